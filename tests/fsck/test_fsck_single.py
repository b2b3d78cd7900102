"""One file is named: the set that it belongs to is judged, or it is told that only the file was."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report

SET = ("model_000003.pt", "extra_000003.pt", "optim_000003_rank0.pt", "meta_000003.json")
PART = "model-0000{}-of-00002.bin"


def only(root: Path) -> Report:
    (report,) = judge(root).reports
    return report


@pytest.fixture
def reference(repository: Path, tmp_path: Path) -> Path:
    """A copy of a run of the reference manager, per-rank files."""
    golden = repository / "tests" / "golden" / "schema-1" / "model"
    shutil.copytree(golden, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", SET)
def test_any_file_of_the_reference_manager_names_its_set(name: str, reference: Path) -> None:
    (whole,) = judge(reference).reports
    assert only(reference / name).to_json() == whole.to_json()
    assert only(reference / name).state is State.WHOLE


@pytest.mark.parametrize("gone", SET)
@pytest.mark.parametrize("name", SET)
def test_a_set_of_the_reference_manager_that_lacks_a_file(
    name: str, gone: str, reference: Path
) -> None:
    if name == gone:
        pytest.skip("what is not there cannot be named")
    (reference / "run_id").write_text("of the manager")
    (reference / gone).unlink()
    report = only(reference / name)
    assert report.state is State.INCOMPLETE
    assert [(one.kind, one.file) for one in report.findings] == [(Kind.MISSING, gone)]
    assert judge_newest(reference / name).newest_whole is None


def test_a_file_with_such_a_name_is_no_reference_managers(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model_000003.pt")
    report = only(tmp_path / "model_000003.pt")
    assert (report.layout, report.findings) == ("torch", [])


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Two files that number themselves."""
    for number in (1, 2):
        torch.save({"w": torch.ones(2)}, tmp_path / PART.format(number))
    return tmp_path


def test_the_rest_of_a_numbered_set_is_looked_for_beside_it(parts: Path) -> None:
    report = only(parts / PART.format(1))
    assert [(one.kind, one.file) for one in report.findings] == [(Kind.NOTE, PART.format(1))]
    assert f"give its folder: {parts}" in report.findings[0].what
    (parts / PART.format(2)).unlink()
    report = only(parts / PART.format(1))
    assert [(one.kind, one.file) for one in report.findings] == [
        (Kind.MISSING, PART.format(2)),
        (Kind.NOTE, PART.format(1)),
    ]


@pytest.mark.parametrize("library", ["accelerate", "transformers", "deepspeed"])
def test_one_file_of_a_librarys_set_is_remarked(
    library: str, repository: Path, tmp_path: Path
) -> None:
    shutil.copytree(repository / "tests" / "golden" / "fsck" / library, tmp_path / "run")
    endings = (".pt", ".pth", ".bin", ".pkl", ".safetensors")
    files = [one for one in (tmp_path / "run").rglob("*") if one.name.endswith(endings)]
    assert len(files) > 2
    for path in files:
        report = only(path)
        assert report.state is State.WHOLE
        found = [one for one in report.findings if "weights_only=True" not in one.what]
        assert [(one.kind, one.file) for one in found] == [(Kind.NOTE, path.name)]
        assert diff(path, path).differences == []


def test_one_file_of_a_step_is_remarked(tmp_path: Path) -> None:
    for name in ("model_5.pt", "optim_5.pt", "model_6.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert [one.kind for one in only(tmp_path / "model_5.pt").findings] == [Kind.NOTE]
    assert only(tmp_path / "model_6.pt").findings == []


@pytest.mark.parametrize(
    "name", ["README.md", "trainer_state.json", "model.safetensors.index.json"]
)
def test_what_is_no_checkpoint_is_no_damaged_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(RequestError, match=f"{name} is no checkpoint; give its folder: "):
        judge(tmp_path / name)
