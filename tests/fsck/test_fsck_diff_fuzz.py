"""Diff, NaN counts and samples on bytes that nobody vouches for: findings, nothing else."""

from __future__ import annotations

import json
import shutil
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_fsck_parsers import edited, edits
from torch.distributed import checkpoint as dcp

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path

FUZZ = settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

FOREIGN = (
    *(f"foreign/{one}" for one in ("model.gguf", "state.npz", "packed.npz", "model.onnx")),
    *("foreign/flax_model.msgpack", "orbax/zarr2", "orbax/zarr3", "orbax/ocdbt3", "orbax/forms"),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of a DCP, a safetensors file, a torch file and JSON."""
    folder = tmp_path_factory.mktemp("original") / "step_5"
    state = {"a": torch.randn(4, 3), "b": {"c": torch.ones(3).half(), "n": 3, "e": []}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder / "sharded")
    torch.save(state | {"t": state["a"].t(), "z": torch.zeros(0, 2)}, folder / "optimizer.pt")
    save_file({"w": torch.randn(5)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"size": [1, 2], "deep": {"x": None}}))
    return folder


def test_the_original_is_read(original: Path) -> None:
    compared = diff(original, original)
    assert compared.is_judged
    assert len(compared.same) > 8
    assert judge(original, Options(nan=True, sample=0.5)).state is State.WHOLE


@FUZZ
@given(data=st.data(), changes=edits)
def test_mutated_files_are_findings(
    data: st.DataObject, changes: list[tuple[int, str, bytes]], original: Path, tmp_path: Path
) -> None:
    names = sorted(one.relative_to(original).as_posix() for one in trees.files(original))
    name = data.draw(st.sampled_from(names))
    copy = tmp_path / "step_5"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    before = (copy / name).read_bytes()
    after = edited(before, changes)
    (copy / name).write_bytes(after)
    judged = judge(copy, Options(nan=True, jobs=2))
    assert judged.to_json()
    try:
        compared = diff(original, copy)
    except RequestError:  # nothing is left that looks like a checkpoint
        return
    assert compared.to_json()
    assert compared.a.problems == []
    if after == before:
        assert compared.differences == []
        assert compared.is_judged


def test_metadata_that_break_off_are_a_problem_and_no_traceback(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    """Found by `make fuzz-fsck`: diff reads those of the reference manager, and sums no digest."""
    original = corpus["reference-dcp"] / "dcp_000005"
    copy = shutil.copytree(original, tmp_path / "dcp_000005")
    path = copy / ".metadata"
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + b"\xff" * 99 + data[half + 99 :])
    compared = diff(original, copy)
    assert not compared.is_judged
    (problem,) = compared.b.problems
    assert problem.startswith("meta.json: ")


@settings(parent=FUZZ, max_examples=100)
@given(data=st.data(), changes=edits)
def test_mutated_files_of_other_formats_are_findings(
    data: st.DataObject,
    changes: list[tuple[int, str, bytes]],
    repository: Path,
    tmp_path: Path,
) -> None:
    """Of GGUF, npz, msgpack, ONNX and Orbax, as their libraries wrote them."""
    golden = repository / "tests" / "golden" / "fsck"
    whole = data.draw(st.sampled_from(FOREIGN))
    below = [one.relative_to(golden / whole) for one in trees.files(golden / whole)]
    name = data.draw(st.sampled_from(sorted(map(str, below))) if below else st.just(""))
    copy = tmp_path / (golden / whole).name
    if (golden / whole).is_dir():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(golden / whole, copy)
    else:
        shutil.copy(golden / whole, copy)
    (copy / name).write_bytes(edited((copy / name).read_bytes(), changes))
    assert judge(copy, Options(nan=True, jobs=2)).to_json()
    try:
        compared = diff(golden / whole, copy)
    except RequestError:
        return
    assert compared.to_json()
    assert compared.a.problems == []
