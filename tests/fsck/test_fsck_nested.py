"""Tensors in a plain pickle: files of torch in the old format, as bytes."""

from __future__ import annotations

import array
import io
import pickle
from typing import TYPE_CHECKING

import torch
from unsafe_corpus import Evil

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path


class _Loads:
    """Has torch load some bytes."""

    def __init__(self, data: bytes, *more: object) -> None:
        self.data, self.more = data, more

    def __reduce__(self) -> tuple[object, ...]:
        return torch.storage._load_from_bytes, (self.data, *self.more)


def _old(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def _state(tmp_path: Path, value: object) -> State:
    folder = tmp_path / "step_1"
    folder.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(2)}, folder / "model.pt")
    (folder / "state.pkl").write_bytes(pickle.dumps(value))
    return judge(folder).state


def test_tensors_in_a_plain_pickle_run_nothing(tmp_path: Path) -> None:
    """`pickle.dump` of a tensor writes its storage as a file of torch, which a load reads."""
    assert _state(tmp_path, {"a": torch.ones(3), "b": [torch.arange(4)]}) is State.WHOLE
    assert _state(tmp_path, _Loads(_old({"a": 1}))) is State.WHOLE


def test_code_in_a_file_in_a_plain_pickle_is_unsafe(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3)}, stream)
    for value in (
        _Loads(_old(Evil())),
        [torch.ones(2), _Loads(_old({"a": Evil()}))],
        _Loads(_old(_Loads(_old(Evil())))),
        _Loads(stream.getvalue()),  # not looked into: nobody writes that
        _Loads(b"cos\nsystem\n(S'true'\ntR."),
        _Loads(_old(1)[:40]),
        torch.storage._load_from_bytes,
    ):
        assert _state(tmp_path, value) is State.UNSAFE


def test_code_in_a_pickle_behind_many_is_unsafe(tmp_path: Path) -> None:
    """Programs append pickles to a file, and load them one by one."""
    folder = tmp_path / "step_1"
    assert _state(tmp_path, 1) is State.WHOLE
    many = b"".join(map(pickle.dumps, range(3000)))
    (folder / "state.pkl").write_bytes(many)
    assert judge(folder).state is State.WHOLE
    (folder / "state.pkl").write_bytes(many + pickle.dumps(Evil()))
    assert judge(folder).state is State.UNSAFE


def test_arrays_of_the_standard_library_run_nothing(tmp_path: Path) -> None:
    assert _state(tmp_path, array.array("d", [1, 2])) is State.WHOLE
