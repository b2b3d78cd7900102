"""Names that a pickle asks for: silent where libraries write them, damage where they run code."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from torch import _weights_only_unpickler

from ckpt_conformance.fsck.formats import pickles
from ckpt_conformance.fsck.formats.pickle_names import judge_names
from ckpt_conformance.fsck.formats.pickles import Name
from ckpt_conformance.fsck.source.findings import Kind

_HELD = ("torch.", "collections.", "builtins.", "_codecs.")  # others are somebody's in this process


def asks_for(*paths: str) -> list[tuple[Kind, str]]:
    """Judge names as they stand in a pickle: `module:name`."""
    return list(judge_names(Name(*path.split(":")) for path in paths))


@pytest.mark.parametrize(
    "path",
    [
        "builtins:eval",
        "__builtin__:exec",
        "os:system",
        "nt:system",
        "subprocess:Popen",
        "_posixsubprocess:fork_exec",
        "runpy:run_path",
        "importlib:import_module",
        "pickle:loads",
        "_pickle:loads",
        "marshal:loads",
        "timeit:timeit",
        "cProfile:run",
        "platform:popen",
        "io:open",
        "_io:FileIO",
        "torch:load",
        "torch.serialization:load",
        "torch.storage:_load_from_bytes",
        "torch.hub:load",
        "torch.jit:load",
        "torch.distributed.rpc:rpc_sync",
        "torch.distributed.rpc.api:rpc_sync",
        "numpy:load",
        "numpy.lib._npyio_impl:load",
        "numpy.testing._private.utils:runstring",
        "torch.serialization:os.system",
        "collections:_sys.modules",
        "numpy:__builtins__.eval",
    ],
)
def test_a_name_that_runs_code_is_damage(path: str) -> None:
    ((kind, text),) = asks_for(path)
    assert kind is Kind.DAMAGED
    assert path.replace(":", ".") in text
    assert "runs code" in text


@pytest.mark.parametrize(
    "path",
    [
        "numpy.random._pickle:__generator_ctor",
        "numpyro:Sample",
        "torch:compile",
        "torch.distributed.fsdp:FullyShardedDataParallel",
        "torch.nn.modules.linear:Linear",
        "collections:namedtuple",
        "codecs:lookup",
        "_io:BytesIO",  # extra states of layers are held in it
        "numpy:memmap",  # as _reconstruct is given it
        "project.code:Model",  # its own module, whatever it is called
        "project.io:open",
        "builtins:getattr",
    ],
)
def test_a_name_that_no_structure_needs_is_a_remark(path: str) -> None:
    ((kind, text),) = asks_for(path)
    assert kind is Kind.NOTE
    assert path.replace(":", ".") in text


def test_what_weights_only_loads_is_silent() -> None:
    """Our list is held against that of the installed torch, and what DTensor adds to it."""
    allowed = _weights_only_unpickler._get_allowed_globals()
    allowed |= _weights_only_unpickler._get_user_allowed_globals()
    names = {
        (one.rpartition(".")[0], one.rpartition(".")[2]) for one in allowed if one.startswith(_HELD)
    }
    assert list(judge_names(Name(*one) for one in names)) == []


def test_what_numpy_writes_is_silent() -> None:
    for module in ("numpy.core", "numpy._core"):
        assert asks_for(f"{module}.multiarray:_reconstruct", f"{module}.multiarray:scalar") == []
    held = {"a": np.arange(3), "n": np.float64(2), "b": np.array(["x"])}
    for protocol in (2, 4, 5):
        _, names = pickles.load(pickle.dumps(held, protocol=protocol))
        assert list(judge_names(names)) == []
