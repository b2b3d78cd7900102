"""Names that a pickle asks for: silent, told, or unsafe where no library writes them."""

from __future__ import annotations

import functools
import importlib
import ipaddress
import itertools
import pickle
import re
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import _weights_only_unpickler
from torch.nn.utils import prune

from ckpt_conformance.fsck.formats.written_names import (
    ANY,
    CLASSES,
    DATA,
    FUNCTIONS,
    MAKERS,
    NOT_CALLED,
    VALUES,
    judge_names,
)
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.pickled.asked import Asked
from ckpt_conformance.fsck.pickled.pickle_values import Name
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed, State, allowed
from ckpt_conformance.fsck.source.trust import Trust

if TYPE_CHECKING:
    from pathlib import Path

_HELD = ("torch.", "collections.", "builtins.", "_codecs.")  # others are somebody's in this process


def asked(path: str, **how: bool) -> Asked:
    """Ask for a name as it stands in a pickle: `module:name`."""
    name = Name(*path.split(":"))
    return Asked({name}, *({name} if how.get(one) else set() for one in ("called", "handed")))


UNSAFE = (
    "builtins:eval",
    "__builtin__:exec",
    "os:system",
    "io:open",
    "torch:load",
    "torch:compile",
    "torch.storage:_load_from_bytes",
    "torch.jit.unsupported_tensor_ops:execWrapper",
    "torch.fx.graph_module:_exec_with_source",
    "torch._inductor.codecache:PyCodeCache.load",
    "operator:attrgetter",
    "operator:methodcaller",
    "pydoc:pipepager",
    "jinja2.environment:Template",
    "uuid:_get_command_stdout",
    "logging:FileHandler",
    "logging.config:_resolve",
    "sympy.core.sympify:sympify",
    "distutils.spawn:spawn",
    "dataclasses:_create_fn",
    "transformers.utils.import_utils:direct_transformers_import",
    "numpy.testing._private.utils:runstring",
    "numpyro:Sample",
    "torch.distributed.fsdp:FullyShardedDataParallel",
    "collections:namedtuple",
    "project.code:Model",
    # Names with dots lead anywhere, whatever they begin with.
    "torch.serialization:os.system",
    "torch:Tensor.tofile",
    "collections:_sys.modules",
    "numpy:__builtins__.eval",
    "pathlib:Path.write_text",
)


@pytest.mark.parametrize("path", UNSAFE)
def test_a_name_that_no_library_writes_is_unsafe(path: str) -> None:
    for how in ({}, {"called": True}, {"handed": True}):
        ((kind, text, name),) = judge_names(asked(path, **how))
        assert (kind, name) == (Kind.UNSAFE, path.replace(":", "."))
        assert name in text


GETATTR = b"\x80\x02c__builtin__\ngetattr\n"
SHARDED = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def test_a_class_inside_of_a_class_is_a_name_with_a_dot() -> None:
    """Protocols 0 to 3 ask for it by `getattr`: FSDP's ShardedTensor is pickled so."""
    data = GETATTR + SHARDED + text("ProcessGroupState") + b"\x86R)\x81."
    assert list(judge_names(pickles.load(data)[1])) == []
    for protocol in range(6):
        _, names = pickles.load(pickle.dumps(Outer.Inner(), protocol=protocol))
        found = {name for kind, _, name in judge_names(names) if kind is Kind.UNSAFE}
        assert found - {f"{__name__}.Outer"} == {f"{__name__}.Outer.Inner"}


class Outer:
    class Inner:
        """A class of a team's own."""


@pytest.mark.parametrize(
    "data",
    [
        GETATTR + b"cos\npath\n" + text("os") + b"\x86R" + text("ls") + b"\x85R.",
        GETATTR + b"cbuiltins\nbool\n)\x81" + text("real") + b"\x86R.",  # of what was made
        GETATTR + SHARDED + text("stack") + text("x") + b"\x87R.",  # with a default
        GETATTR + b".",
        b"\x80\x02ccollections\ndefaultdict\n" + GETATTR[2:] + b"\x85R.",
    ],
)
def test_any_other_use_of_getattr_is_unsafe(data: bytes) -> None:
    found = list(judge_names(pickles.load(data)[1]))
    assert Kind.UNSAFE in [kind for kind, *_ in found]


REBUILD = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("


@pytest.mark.parametrize(
    "function",
    [
        b"cnumpy._core.numeric\n_frombuffer\n",
        b"cnumpy\ndtype\n",
        b"cnumpy.ma.core\n_mareconstruct\n",
        b"ccollections\ndeque\n",
        b"cbuiltins\nbool\n)\x81",
        REBUILD[2:-1],
    ],
)
def test_what_rebuilds_tensors_rebuilds_nothing_else(function: bytes) -> None:
    """It calls any function with any arguments, and sets the state of what that returns."""
    data = REBUILD + function + b"cnumpy\nndarray\n)NtR."
    found = list(judge_names(pickles.load(data)[1]))
    assert Kind.UNSAFE in [kind for kind, *_ in found]


@pytest.mark.parametrize("path", UNSAFE)
def test_one_vouches_for_exactly_the_name(path: str) -> None:
    ((_, _, name),) = judge_names(asked(path))
    found = [Finding(Kind.UNSAFE, "a.pt", "asks", name=name)]
    (one,) = allowed(found, Trust(frozenset({name})).covers)
    assert one.kind is Kind.NOTE
    assert (
        allowed(found, Trust(frozenset({f"{name}s", name.rpartition(".")[0] + ".s"})).covers)
        == found
    )
    assert allowed(found, Trust(everything=True).covers)[0].kind is Kind.NOTE


@pytest.mark.parametrize("text", ["", "*", "eval", "torch.*", "a..b", ".a.b", "a.b ", "a/b.c"])
def test_what_is_no_name_vouches_for_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        Trust(frozenset({text}))


@pytest.mark.parametrize("path", sorted(f"{one.module}:{one.name}" for one in CLASSES))
def test_instances_of_a_librarys_class_are_told_and_a_call_is_unsafe(path: str) -> None:
    ((kind, text, name),) = judge_names(asked(path))
    assert (kind, name) == (Kind.NOTE, "")
    assert path.replace(":", ".") in text
    is_value = Name(*path.split(":")) in VALUES
    for how, is_unsafe in (("called", True), ("handed", not is_value)):
        ((kind, _, name),) = judge_names(asked(path, **{how: True}))
        assert (kind, name) == (
            (Kind.UNSAFE, path.replace(":", ".")) if is_unsafe else (Kind.NOTE, "")
        )


@pytest.mark.parametrize("how", ["called", "handed"])
def test_a_function_is_a_value_and_a_call_of_it_is_unsafe(how: str) -> None:
    for one in FUNCTIONS:
        ((kind, _, _),) = judge_names(asked(f"{one.module}:{one.name}", **{how: True}))
        assert kind is (Kind.UNSAFE if how == "called" else Kind.NOTE)


def values() -> dict[str, object]:
    """Return what checkpoints hold of torch beside tensors: modules with functions, classes."""
    pruned = torch.nn.Linear(3, 3)
    prune.l1_unstructured(pruned, "weight", 0.3)
    prune.random_unstructured(pruned, "weight", 0.3)
    return {
        "transformer": torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        "another activation": torch.nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"),
        "pruned": pruned,
        "spectral": torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3)),
        "wrapped": torch.nn.DataParallel(torch.nn.Linear(2, 2)),
        "classes": {"optimizer": torch.optim.AdamW, "loss": (torch.nn.CrossEntropyLoss,)},
        "functions": [torch.relu, torch.nn.functional.gelu, torch.nn.init.trunc_normal_],
        "a part": functools.partial(torch.nn.LayerNorm, eps=1e-6),
        "named values": torch.max(torch.ones(2, 2), dim=0),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2)]),
        "texts": np.array(["a"], dtype=np.dtypes.StringDType()),
        "numbers": [signal.SIGTERM, itertools.count(3)],
        "addresses": [ipaddress.ip_address("10.0.0.1"), ipaddress.ip_network("fd00::/8")],
        "a pattern": re.compile("(?i)layer[0-9]+"),
    }


@pytest.mark.parametrize("what", values())
def test_what_torch_itself_writes_is_not_unsafe(what: str, tmp_path: Path) -> None:
    torch.save({"model": values()[what]}, tmp_path / "model.pt")
    report = judge(tmp_path / "model.pt").reports[0]
    assert report.state is State.WHOLE, report.findings


@pytest.mark.parametrize("name", sorted(one for one in FUNCTIONS if one.module[:6] == "torch."))
def test_a_function_that_stands_in_the_list_is_there(name: Name) -> None:
    parts = name.name.split(".")
    assert callable(functools.reduce(getattr, parts, importlib.import_module(name.module)))


def test_what_only_makes_values_may_be_called_and_is_told() -> None:
    for one in MAKERS:
        ((kind, _, _),) = judge_names(Asked({one}, {one}, {one}))
        assert kind is Kind.NOTE


def test_data_that_opens_connections_where_it_is_called_is_unsafe_then() -> None:
    for one in NOT_CALLED:
        assert one in DATA
        assert list(judge_names(Asked({one}))) == []
        assert [kind for kind, *_ in judge_names(Asked({one}, {one}))] == [Kind.UNSAFE]


def test_many_unsafe_names_are_counted() -> None:
    found = list(judge_names(Asked({Name("evil", f"f{number}") for number in range(210)})))
    assert len(found) == 201
    assert found[-1] == (Kind.UNSAFE, "asks for 10 more names like these", ANY)
    assert not Trust(frozenset({f"evil.f{number}" for number in range(210)})).covers(ANY)


def test_what_weights_only_loads_is_silent() -> None:
    """Our list is held against that of the installed torch, and what DTensor adds to it."""
    allowed = _weights_only_unpickler._get_allowed_globals()
    allowed |= _weights_only_unpickler._get_user_allowed_globals()
    names = {
        (one.rpartition(".")[0], one.rpartition(".")[2]) for one in allowed if one.startswith(_HELD)
    }
    assert list(judge_names(Asked({Name(*one) for one in names}))) == []


def test_what_numpy_writes_is_silent() -> None:
    for module in ("numpy.core", "numpy._core"):
        for name in ("_reconstruct", "scalar"):
            assert list(judge_names(asked(f"{module}.multiarray:{name}", called=True))) == []
    held = {"a": np.arange(3), "n": np.float64(2), "b": np.array(["x"])}
    for protocol in range(6):
        _, names = pickles.load(pickle.dumps(held, protocol=protocol))
        assert list(judge_names(names)) == []


def test_a_name_that_is_not_known_is_told_without_a_claim_and_with_the_way_out() -> None:
    """Joblib writes this one for every array: what follows the array's bytes is not read."""
    data = b"\x80\x02cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81."
    ((kind, text, name),) = judge_names(pickles.load(data)[1])
    assert (kind, name) == (Kind.UNSAFE, "joblib.numpy_pickle.NumpyArrayWrapper")
    assert "not in fsck's list" in text
    assert "--allow-name NAME" in text


@pytest.mark.parametrize("code", [b"R", b"\x81"])
@pytest.mark.parametrize("args", [b"]", b"N", b"ccollections\nOrderedDict\n"])
def test_arguments_that_are_no_tuple_are_refused_as_python_does(code: bytes, args: bytes) -> None:
    data = b"\x80\x02ccollections\nOrderedDict\n" + args + code + b"."
    with pytest.raises((TypeError, pickle.UnpicklingError)):
        pickle.loads(data)  # noqa: S301  ours
    with pytest.raises(Malformed, match="as arguments"):
        pickles.load(data)


def test_a_call_whose_arguments_are_a_list_is_still_one_that_is_asked_for(tmp_path: Path) -> None:
    """`pickle.Unpickler` refuses it; a reader in Python, as dill's is, makes the call."""
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "notes").write_bytes(b"cos\nsystem\n(S'true'\nlR.")
    assert judge(tmp_path).state is State.UNSAFE


@pytest.mark.parametrize("begin", [b"(dp0\n", b"(lp0\n"])
def test_a_name_in_a_plain_pickle_that_breaks_off_is_asked_for(
    begin: bytes, tmp_path: Path
) -> None:
    """All of it is text; a load imports the module before it fails."""
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "notes").write_bytes(begin + b"cantigravity\nfly\ntR.")
    (report,) = judge(tmp_path).reports
    assert report.state is State.UNSAFE


def test_a_text_that_may_be_read_as_a_name_is_none(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "notes").write_text("(dear all,\ncall me\nsoon\n")
    (report,) = judge(tmp_path).reports
    assert report.state is State.WHOLE
