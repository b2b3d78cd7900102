# The two commands of a newcomer: `make certify` and `make test`. They need Python 3.11, git and make;
# the first call makes .venv, by the versions pinned in constraints/.
#
# JOBS=1 make test           for one core instead of all
# PYTHON=/opt/py311/bin/python3 make certify    another Python to make the environment with

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# What certify, mutants and the like use.
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# Tests wait for children, locks and time limits, too: one more than cores takes 570 s where as many take 800.
TEST_JOBS ?= $(shell expr $(JOBS) + 1)
SOAK_RUNS ?= 100
KILLS ?= 1000
CACHE ?= .cache/results
FUZZ_SECONDS ?= 3600
FUZZ_JOBS ?= $(JOBS)
VENV := .venv
BIN := $(VENV)/bin
THIRD := .venv-third-party
PINS := pyproject.toml constraints/common.txt constraints/dev.txt

MANAGERS := reference torch-save-inplace torch-save-atomic-fixed-name torch-save-atomic-per-step \
	dcp-per-step dcp-overwrite safetensors-per-step
THIRD_PARTY := accelerate lightning

.PHONY: help
help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 28

# ---- environments --------------------------------------------------------------------------------

# $(call make-venv,DIR): an environment, kept where it works. Version 3.11 first: the one that is tested.
define make-venv
	@if ! $(1)/bin/python -c 'import pip' 2>/dev/null; then \
	  found=; for python in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "error: no Python 3.11 or newer with venv was found on the PATH (tried: $(strip $(PYTHON) python3.11 python3 python3.12 python3.13 python))." >&2; \
	    echo "       Install one (Debian: apt-get install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python3.11 ..." >&2; \
	    exit 2; \
	  fi; \
	  echo "making $(1) with $$($$found --version)"; $$found -m venv --clear $(1); \
	fi
endef

# $(call install,DIR,EXTRAS)
define install
	@echo "installing ckpt-conformance[$(2)] into $(1)"
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/dev.txt -e '.[$(2)]'
endef

# Three stamps in one environment: certifying needs less than developing, and that less than all tests.
$(VENV)/.stamp-use: $(PINS)
	$(call make-venv,$(VENV))
	$(call install,$(VENV),all)
	@touch $@

$(VENV)/.stamp-dev: $(PINS) | $(VENV)/.stamp-use
	$(call install,$(VENV),all$(comma)dev)
	@touch $(VENV)/.stamp-use $@

$(VENV)/.stamp-all: $(PINS) | $(VENV)/.stamp-dev
	$(call install,$(VENV),all$(comma)dev$(comma)seaweedfs)
	@touch $@

$(THIRD)/.stamp: $(PINS)
	$(call make-venv,$(THIRD))
	$(call install,$(THIRD),all$(comma)accelerate$(comma)lightning)
	@touch $@

comma := ,

.PHONY: venv
venv: $(VENV)/.stamp-dev ## the environment for working on the project

# ---- certificates --------------------------------------------------------------------------------

# certify exits with 1 when any manager is violated, and the bare recipes are: that is what the
# matrix shows, and no failure of this target. A usage error (2), UNKNOWN (3) or a crash is one; so
# is a `reference` that is not certified, since the project promises that it is.
define JUDGE
import pathlib, sys
code, reports = int(sys.argv[1]), pathlib.Path(sys.argv[2])
if code not in (0, 1):
    words = {2: "usage error", 3: "UNKNOWN verdicts"}
    print(f"error: certify ended with {code} ({words.get(code, 'it crashed')})", file=sys.stderr)
    sys.exit(code)
from ckpt_conformance.report.certificate import judge, load_result
for name in sys.argv[3:]:
    path = reports / name / "result.json"
    if not path.is_file():
        sys.exit(f"error: certify left no {path}")
    if judge(load_result(path)) != 0:
        sys.exit(f"error: {name} must be certified, and is not: see {path.parent}/report.html")
if code == 1:
    print("certify ended with 1: some managers are violated, as the matrix shows. That is no failure here.")
endef
export JUDGE

# $(call certify,BIN,REPORTS,MANAGERS,BUDGET,WHO MUST BE CERTIFIED)
define certify
	@rm -rf $(foreach name,$(5),$(2)/$(name)/result.json)
	@code=0; $(1)/ckpt-conformance certify $(3) --out $(2) --budget $(4) --jobs $(JOBS) || code=$$?; \
	$(1)/python -c "$$JUDGE" $$code $(2) $(5)
endef

.PHONY: certify certify-full certify-third-party
certify: $(VENV)/.stamp-use ## certify the reference manager and the recipes; reports in reports/ (under 3 minutes)
	$(call certify,$(BIN),reports,$(MANAGERS),quick,reference)

certify-full: $(VENV)/.stamp-use ## the same at the full budget
	$(call certify,$(BIN),reports,$(MANAGERS),full,reference)

certify-third-party: $(THIRD)/.stamp ## certify accelerate and lightning, in an environment of their own
	$(call certify,$(THIRD)/bin,reports,$(THIRD_PARTY),quick,)

# ---- tests ---------------------------------------------------------------------------------------

# One thread each: the processes are the parallelism. loadgroup keeps what shares a fixture together.
# Hundreds of interpreters start in a run: their bytecode is kept in .cache, also where the environment
# says that none is kept beside the sources. There Python no longer sees what pip has compiled, so that
# is linked in first: else each of the first interpreters compiles torch again.
BYTECODE := $(CURDIR)/.cache/bytecode
define LINK_BYTECODE
import contextlib, os, pathlib, sys, sysconfig
for root in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}:
    for made in pathlib.Path(root).rglob("__pycache__/*.pyc"):
        kept = pathlib.Path(sys.argv[1]) / made.parent.parent.relative_to("/") / made.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # there already, or on another file system
            os.link(made, kept)
endef
export LINK_BYTECODE

$(BYTECODE)/.stamp: $(VENV)/.stamp-dev
	@mkdir -p $(@D)
	@$(BIN)/python -c "$$LINK_BYTECODE" $(@D)
	@touch $@

PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(BYTECODE) \
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadgroup

.PHONY: validate-models test long-tests test-all soak nightly mutants fuzz-fsck bench
test: $(BYTECODE)/.stamp ## the project's own tests (10 minutes on 2 cores)
	@$(PYTEST) -m 'not slow' $(ARGS)

long-tests: $(BYTECODE)/.stamp ## record which tests take long, which `make test` leaves out (tests/support/long_tests.py)
	@CKC_RECORD_LONG_TESTS=1 $(PYTEST) $(ARGS)

test-all: $(VENV)/.stamp-all $(BYTECODE)/.stamp ## every test, the whole kill matrix, lint, types, wheel, python -O, two releases of torch
	$(BIN)/tox run -e lint,types,build,optimized
	$(BIN)/tox run -e matrix -- 2.7 2.15
	$(BIN)/ckpt-conformance mutants --cache $(CACHE)
	@$(PYTEST) $(ARGS)

mutants: $(VENV)/.stamp-use ## the kill matrix: which check catches which broken manager
	$(BIN)/ckpt-conformance mutants --cache $(CACHE) $(ARGS)

validate-models: $(VENV)/.stamp-dev ## the crash models against real ext4, xfs, btrfs, s3fs and rclone (needs root, loop devices, FUSE)
	@$(BIN)/python -m pytest -q -rs -s tests/crash/test_crash_real_fs.py tests/crash/test_crash_fuse_programs.py $(ARGS)

soak: $(VENV)/.stamp-use ## certify the reference manager SOAK_RUNS=100 times, each with another seed
	@for seed in $$(seq 1 $(SOAK_RUNS)); do \
	  $(BIN)/ckpt-conformance certify reference --seed $$seed --budget quick --jobs $(JOBS) \
	    --out reports/soak/$$seed >reports-soak.log 2>&1 \
	  || { code=$$?; cat reports-soak.log; rm -f reports-soak.log; echo "soak: seed $$seed ended with $$code" >&2; exit $$code; }; \
	  rm -rf reports-soak.log reports/soak/$$seed; echo "soak: $$seed of $(SOAK_RUNS) certified"; \
	done

nightly: $(VENV)/.stamp-use ## kill ranks at KILLS=1000 random points of their saves; run some pairs that `mutants` passes over
	$(BIN)/python benchmarks/nightly_ranks.py --kills $(KILLS) --jobs $(JOBS) $(ARGS)
	$(BIN)/python benchmarks/nightly_unreached.py --jobs $(JOBS) --cache $(CACHE)

fuzz-fsck: $(VENV)/.stamp-dev ## fuzz fsck and diff for FUZZ_SECONDS=3600 in FUZZ_JOBS processes, with the libraries as the truth
	@OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python tests/fuzz/fuzz_fsck.py --seconds $(FUZZ_SECONDS) --jobs $(FUZZ_JOBS) $(ARGS)

bench: $(VENV)/.stamp-dev ## the numbers of benchmarks/, as tables
	@for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python $$bench $(ARGS) || exit; done

# ---- looking after the code ----------------------------------------------------------------------

.PHONY: lint types docs docs-oncall durations clean distclean
lint: $(VENV)/.stamp-dev ## ruff: rules and format
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .

types: $(VENV)/.stamp-dev ## mypy and pyright, both strict
	$(BIN)/mypy
	PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT=1 $(BIN)/pyright

docs: $(VENV)/.stamp-use ## docs/invariants.md, incidents.md, requirements.md, torch-versions.md, generated-mutants.md
	$(BIN)/python -m ckpt_conformance.report.docs

docs-oncall: $(VENV)/.stamp-dev ## the on-call table of docs/fsck.md: layouts and faults, and what fsck says (3 core-minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/oncall_table.py --write docs/fsck.md

durations: $(VENV)/.stamp-use ## how long each suite takes, from a full run: workers begin with the longest
	$(BIN)/ckpt-conformance certify reference --budget full --jobs $(JOBS) --out reports/durations
	$(BIN)/python -m ckpt_conformance.report.durations reports/durations/result.json

clean: ## what the other targets made, but for the environments
	rm -rf reports build dist .tox .mypy_cache .ruff_cache .coverage *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## the environments and kept results, too
	rm -rf $(VENV) $(THIRD) .cache
