"""What a cached outcome depends on is at least what really runs.

A tracer that shares no code with `plugin/depends.py` watches which functions are called while a
check runs, in every process. Each of their files must be among those that the key of the outcome
was made of: else an edit of that file would not be noticed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.plugin import depends, plan
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.work import own_code
from ckpt_conformance.work.cache import key_of
from ckpt_conformance.work.sources import Source, SourceTree

if TYPE_CHECKING:
    from ckpt_conformance.plugin.plan import CheckItem

TRACING = Path(__file__).parents[1] / "support" / "tracing"
RUN = """
import json, os, sys
from pathlib import Path
os.environ["CKC_RAN_LATER"] = ""  # not in this process: pytest imports every suite
import sitecustomize
del os.environ["CKC_RAN_LATER"]
import pytest
from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.plugin import session
from ckpt_conformance.plugin.options import SessionOptions

adapter, only, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
notes, ran = Path(os.environ["CKC_RAN"]), {}
notes.touch()

class Watching(session.Collector):
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.start = notes.stat().st_size
        ran.setdefault("server", notes.read_text().split())
        sitecustomize.begin()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item):
        sitecustomize.end()
        key = f"{item.path.stem}::{item.originalname}"
        ran[key] = notes.read_text()[self.start:].split()

session.Collector = Watching
session.run_session(SessionOptions((adapter,), only=tuple(only), claims=tuple(PROFILES), jobs=1))
out.write_text(json.dumps(ran))
"""
SOME = ("CKC-SMOK-001", "CKC-ATOM-001", "CKC-DISC-011", "CKC-IOER-006", "CKC-RETN-001")


def ran(adapter: str, only: tuple[str, ...], folder: Path) -> dict[str, set[str]]:
    """Run checks under the tracer; return the files that ran by check, those of the server too."""
    packages = own_code.our_packages()
    below = os.pathsep.join(str(path.resolve()) + os.sep for path in packages.values())
    out = folder / "ran.json"
    paths = [str(TRACING), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CKC_RAN": str(folder / "notes"),
        "CKC_RAN_BELOW": below,
        "CKC_RAN_LATER": "",
    }
    words = [sys.executable, "-B", "-c", RUN, adapter, json.dumps(only), str(out)]
    subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    return {key: set(files) for key, files in json.loads(out.read_text()).items()}


def forgotten(adapter: str, only: tuple[str, ...], folder: Path) -> dict[str, list[str]]:
    """Return by check the files that ran and that its key does not know of."""
    options = SessionOptions((adapter,), only=only)
    known = depends.inputs(options, "")
    by_check = ran(adapter, only, folder)
    server = by_check.pop("server")
    modules = {check.key: check.module for check in plan.checks()}
    missed: dict[str, list[str]] = {}
    for key, files in by_check.items():
        names = known.modules_of(adapter, modules[key])
        covered = {str(known.tree.sources[name].path.resolve()) for name in names}
        if wrong := sorted((files | server) - covered):
            missed[key] = wrong
    assert by_check
    return missed


@pytest.mark.parametrize(
    "adapter", ["reference", pytest.param("dcp-per-step", marks=pytest.mark.slow)]
)
def test_every_file_that_runs_is_known(adapter: str, tmp_path: Path) -> None:
    assert forgotten(adapter, SOME, tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["reference", "reference-trainer", "mutant:A03"])
def test_every_file_that_runs_in_any_check_is_known(adapter: str, tmp_path: Path) -> None:
    assert forgotten(adapter, (), tmp_path) == {}


class Edited(Source):
    """A module whose text was changed."""

    digest = "another text"  # type: ignore[assignment]  # in place of what is computed


def edited(tree: SourceTree, name: str) -> SourceTree:
    """Return a tree in which one module has another text that imports the same."""
    other = SourceTree(
        {**tree.sources, name: Edited(name, tree.sources[name].path)}, dict(tree.linked)
    )
    other._imports.update(tree._imports)
    other._elsewhere.update(tree._elsewhere)
    return other


def items_of(*adapters: str) -> list[CheckItem]:
    """Return the first check of each suite on each adapter."""
    first: dict[str, Any] = {}
    for item in plan.plan_of(SessionOptions(adapters, budget="full")).items:
        first.setdefault(item.group, item)
    return list(first.values())


def test_an_edit_of_any_module_changes_exactly_the_keys_that_know_of_it() -> None:
    options = SessionOptions(("mutant:C08", "dcp-per-step"))
    known = depends.inputs(options, "")
    items = items_of(*options.adapters)
    keys = {item.id: key_of(known.of(item)) for item in items}
    names = {item.id: known.modules_of(item.adapter, item.check.module) for item in items}
    ours = [name for name in known.tree.sources if name.startswith("ckpt_conformance")]
    for name in ours:
        other = replace(known, tree=edited(known.tree, name))
        changed = {item.id for item in items if key_of(other.of(item)) != keys[item.id]}
        assert changed == {item for item, modules in names.items() if name in modules}, name


@pytest.mark.parametrize(
    ("edited", "run_again"),
    [
        ("ckpt_conformance.fsck.judge.judge", ()),
        ("ckpt_conformance.cli.certify", ()),
        ("ckpt_conformance.report.files", ()),
        ("ckpt_conformance.mutants.retention", ()),
        ("ckpt_conformance.suites.test_stateful", ("reference test_st", "dcp-per-step test_st")),
        ("ckpt_conformance.adapters.dcp", ("dcp-per-step",)),
        ("ckpt_conformance.reference_impl.mirror", ("reference",)),
    ],
)
def test_what_has_nothing_to_do_with_an_edit_is_not_run_again(
    edited: str, run_again: tuple[str, ...]
) -> None:
    known = depends.inputs(SessionOptions(), "")
    again = {
        item.group
        for item in items_of("reference", "dcp-per-step")
        if edited in known.modules_of(item.adapter, item.check.module)
    }
    assert {name for name in again if not name.startswith(run_again or "nothing")} == set()
    assert bool(again) == bool(run_again)


@pytest.mark.parametrize("what", ["seed", "budget", "deadline", "claims", "device"])
def test_every_choice_is_in_the_key(what: str) -> None:
    values: dict[str, Any] = {
        "seed": 1,
        "budget": "full",
        "deadline": 5.0,
        "claims": ("crash",),
        "device": "cuda",
    }
    known = depends.inputs(SessionOptions(("reference",), claims=("damage",)), "ext4")
    item = items_of("reference")[0]
    other = replace(known, options=replace(known.options, **{what: values[what]}))
    assert key_of(known.of(item)) != key_of(other.of(item))


def test_the_machine_is_in_the_key() -> None:
    known = depends.inputs(SessionOptions(("reference",)), "ext4")
    item = items_of("reference")[0]
    for name in known.machine:
        other = replace(known, machine={**known.machine, name: "another"})
        assert key_of(known.of(item)) != key_of(other.of(item)), name


def test_a_manager_of_the_users_own_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_manager.py").write_text("import their_format\n")
    (tmp_path / "their_format.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    known = depends.inputs(SessionOptions(("their_manager:make",)), "")
    item = items_of("their_manager:make")[0]
    modules = known.modules_of(item.adapter, item.check.module)
    assert {"their_manager", "their_format"} <= modules
    before = key_of(known.of(item))
    (tmp_path / "their_format.py").write_text("x = 2\n")
    again = depends.inputs(SessionOptions(("their_manager:make",)), "")
    assert key_of(again.of(item)) != before


def test_an_outcome_depends_on_what_other_releases_wrote(tmp_path: Path) -> None:
    """On the files, not on where they lie: a CI job unpacks them anywhere."""

    def key(folder: Path) -> str:
        options = SessionOptions(("reference",), only=SOME, written_by=(str(folder),))
        (first, *_) = plan.plan_of(options).items
        return key_of(depends.inputs(options, "").of(first))  # type: ignore[arg-type]

    here, there = tmp_path / "here" / "a", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir(parents=True)
        (folder / "written.json").write_text("{}")
        (folder / "file").write_text("as it was")
    assert key(here.parent) == key(there)
    (there / "file").write_text("changed")
    assert key(here.parent) != key(there)
    (first, *_) = plan.plan_of(SessionOptions(("reference",), only=SOME)).items
    plain, pretending = (
        depends.inputs(SessionOptions(("reference",), only=SOME, pretends=pretends), "")
        for pretends in (False, True)
    )
    assert key_of(plain.of(first)) != key_of(pretending.of(first))  # type: ignore[arg-type]
