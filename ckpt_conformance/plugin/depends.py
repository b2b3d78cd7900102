"""What the outcome of a check depends on, in plain values: the key under which it is cached.

Anything that may change an outcome has to be here. What is too much costs a run; what is missing
would give an old verdict for new code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.contract import installed, registry, written
from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.work import packages, startup
from ckpt_conformance.work.cache import KeyParts, key_of
from ckpt_conformance.work.own_code import is_code, our_packages
from ckpt_conformance.work.sources import SourceTree, code_beside, code_outside, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt_conformance.plugin.options import CheckOptions
    from ckpt_conformance.plugin.plan import CheckItem

# What runs around every check: the plugin that judges what it raised, the server that forks its
# children, the interpreters that are started anew, and what children are asked to run by name.
AROUND = (
    "ckpt_conformance.plugin",
    "ckpt_conformance.plugin.outcomes",
    "ckpt_conformance.plugin.session",
    "ckpt_conformance.plugin.batches",
    "ckpt_conformance.harness.server",
    "ckpt_conformance.harness.child",
    "ckpt_conformance.harness.facts",
    "ckpt_conformance.harness.probes",
    "ckpt_conformance.subject.elastic",
    "ckpt_conformance.subject.observing",
)
INJECTORS = "ckpt_conformance.fault_injectors"
PROSE = {"statement", "why", "remedy", "incidents"}  # of an invariant: no verdict depends on it
MACHINE = ("model name", "flags", "Features")  # of /proc/cpuinfo: they choose the arithmetic
# How names of variables begin that C code of torch, of its libraries or of libc reads.
ENVIRONMENT = (
    *("PYTHON", "LC_", "LANG", "TZ", "LD_", "MALLOC_", "GLIBC_", "LOCPATH", "NLSPATH"),
    *("TORCH", "PYTORCH_", "ATEN_", "C10_", "LTC_", "JIT_", "KINETO_", "FBGEMM_", "THP_"),
    *("ENABLE_", "DISABLE_", "XNN", "QNNP", "NNPACK_", "CPUINFO_", "AOTI", "TRITON_"),
    *("OMP_", "GOMP_", "KMP_", "LIBOMP", "TBB_", "MKL_", "MKLDNN_", "DNNL_", "ONEDNN_"),
    *("OPENBLAS_", "GOTO_", "BLIS_", "BLAS_", "VECLIB_", "NUMEXPR_", "INTEL_", "ITT_", "ARM_"),
    *("CUDA", "CUBLAS", "CUDNN_", "CUFFT_", "NVIDIA_", "NVTX_", "TF32_", "NCCL", "NPY_"),
    *("HIP_", "HSA_", "ROCM_", "ROCR_", "AMD_", "MIOPEN_", "RCCL_", "XPU_", "SYCL_", "ZE_"),
    *("GLOO", "UCX_", "UCC_", "TP_", "FI_", "OMPI_", "PMIX_", "I_MPI_", "MASTER_"),
)
LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
OF_THE_PROCESS = ("Umask:", "SigIgn:", "SigBlk:", "Groups:", "CapEff:")  # of /proc/self/status


@dataclass(frozen=True)
class Inputs:
    """What all checks of a session depend on, and the sources of the suite."""

    options: CheckOptions
    tree: SourceTree
    machine: Mapping[str, Any]
    around: tuple[str, ...] = AROUND  # modules that run whatever is checked

    def of(self, item: CheckItem) -> KeyParts:
        """Return all that the outcome of one check on one adapter depends on."""
        return {
            "check": item.check.key,
            "catalogue": _rules(self.options.catalogue),
            "seed": self.options.seed,
            "budget": self.options.budget,
            "deadline": self.options.deadline,
            "claims": sorted(self.options.claims),
            "releases": self._releases,
            **self._common(item.adapter, item.check.module),
        }

    def of_adapter(self, name: str) -> KeyParts:
        """Return all that an adapter's description of itself depends on."""
        return {"facts": True, **self._common(name)}

    def of_other(self, adapter: str, values: Mapping[str, Any]) -> KeyParts:
        """Return all that something else depends on that is found out with an adapter."""
        return {**values, **self._common(adapter)}

    def modules_of(self, adapter: str, *modules: str) -> frozenset[str]:
        """Name the modules whose text decides what modules find out about an adapter."""
        roots = (*self.around, *adapter_modules(adapter), *modules)
        return frozenset[str]().union(*(self._closure(root) for root in roots))

    def _common(self, adapter: str, *modules: str) -> KeyParts:
        key = (adapter, *modules)
        if key not in self._digests:
            self._digests[key] = self.tree.digest(self.modules_of(*key))
        return {
            "adapter": adapter,
            "device": self.options.device,
            "sources": self._digests[key],
            "outside": self._outside if self._company else "",
            "company": self._company,
            "machine": self._machine,
        }

    @functools.cached_property
    def _releases(self) -> list[str]:
        """What other releases of torch wrote: a digest of each folder, whatever its path."""
        pretended = ["pretended"] if self.options.pretends else []
        folders = (Path(folder) for folder in self.options.written_by)
        return pretended + sorted(
            key_of({"record": one.read_bytes().hex(), "files": written.digests(one.parent)})
            for folder in folders
            for one in folder.rglob(written.RECORD)
        )

    @functools.cached_property
    def _company(self) -> tuple[str, ...]:
        return foreign(self.options.adapters)

    @functools.cached_property
    def _outside(self) -> str:
        return code_outside()

    @functools.cached_property
    def _machine(self) -> str:
        """A digest: the list of packages in every entry of a cache would be most of it."""
        return key_of(self.machine)

    @functools.cached_property
    def _digests(self) -> dict[tuple[str, ...], str]:
        return {}

    @functools.cached_property
    def _closures(self) -> dict[str, frozenset[str]]:
        return {}

    def _closure(self, root: str) -> frozenset[str]:
        if root not in self._closures:
            self._closures[root] = self.tree.closure([root])
        return self._closures[root]


def inputs(options: CheckOptions, scratch: str, around: tuple[str, ...] = AROUND) -> Inputs:
    """Read the sources and the machine; `scratch` names the file system of the checkpoints."""
    tree = SourceTree.of_packages(our_packages())
    injectors = frozenset(name for name in tree.sources if name.startswith(f"{INJECTORS}."))
    tree.linked[INJECTORS] = injectors  # a fault is asked for by name
    return Inputs(options, tree, machine(scratch), around)


def adapter_modules(name: str) -> tuple[str, ...]:
    """Name the modules that an adapter's name stands for."""
    module, _, _ = registry.place_of(name).partition(":")
    return (module,)


def is_ours(name: str) -> bool:
    """Return whether an adapter is one of this suite."""
    return all(module.partition(".")[0] in our_packages() for module in adapter_modules(name))


def foreign(adapters: Iterable[str]) -> tuple[str, ...]:
    """Return the adapters that are not of this suite, in their order.

    A server imports all adapters of a command, so what one changes (`sys.path`, the environment)
    may decide what comes of another one.
    """
    return tuple(name for name in adapters if not is_ours(name))


def adapter_version(name: str) -> str:
    """Name the version of an adapter that is not of this suite, or say that it has none.

    Empty for one of this suite. Raises registry.AdapterError for an unknown name.
    """
    if is_ours(name):
        return ""
    known = importlib.metadata.packages_distributions()
    tops = {module.partition(".")[0] for module in adapter_modules(name)}
    names = {package for top in tops for package in known.get(top, [])}
    versions = (f"{one} {importlib.metadata.version(one)}" for one in sorted(names))
    return ", ".join(versions) or "a module of its own"


def own_code(adapters: Iterable[str]) -> dict[str, str]:
    """Return a digest of each file of code that adapters may import and that is not installed.

    Raises registry.AdapterError for an unknown name.
    """
    names = foreign(adapters)
    return code_beside([module for name in names for module in adapter_modules(name)])


@functools.cache
def _rules(version: int | None) -> str:
    """Return a digest of the catalogue's rules, without what is only for readers."""
    invariants = load_catalogue(version).invariants.values()
    rules = [
        {key: value for key, value in msgspec.to_builtins(one).items() if key not in PROSE}
        for one in invariants
    ]
    return hashlib.blake2b(msgspec.json.encode(rules, order="sorted"), digest_size=16).hexdigest()


def machine(scratch: str) -> KeyParts:
    """Describe what surrounds the code: interpreter, packages, processor, kernel, variables."""
    return {
        "python": sys.version,
        "flags": repr(sys.flags),
        "packages": packages.described(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "root": os.geteuid() == 0,
        "limits": [resource.getrlimit(kind) for kind in LIMITS],
        "process": _of_the_process(),
        "beside": _beside(),
        "filesystem": scratch,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT)
        },
    }


def _of_the_process() -> list[str]:
    """Return what a child inherits: the mask of new files, signals that are ignored, its groups."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(OF_THE_PROCESS)]


@functools.cache
def _beside() -> str:
    """Digest what lies beside installed code and has no version, and what is loaded before all.

    Of a loose file of data the name counts, for folders are listed; its content is noted by who
    reads it.
    """
    loose = {path: is_code(Path(path)) for path in installed.loose()}
    preloaded = re.split("[ :]+", os.environ.get("LD_PRELOAD", ""))
    first = (*startup.files(), *filter(None, preloaded))
    digests = {path: digest_of(Path(path)) if runs else "" for path, runs in loose.items()}
    return key_of({"loose": digests, "first": {path: digest_of(Path(path)) for path in first}})


def _processor(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the model and the instructions of the first processor."""
    try:
        first = path.read_text().split("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if line.startswith(MACHINE)]
