"""Checkpoints of libraries as they write them: recognised, whole, and every missing file is told.

The golden ones are in `golden/fsck`, with the versions that wrote them; `golden/make_fsck.py` made
them. Where a library is installed, it writes one now.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.contract import trees
from ckpt_conformance.fault_injectors import at_rest
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Finding, Report

LAYOUTS = {
    "accelerate": "accelerate",
    "transformers": "transformers-trainer",
    "lightning": "lightning",
    "deepspeed": "deepspeed",
}
MOST_BYTES = 2 << 20
# The last rank of a set that nothing counts: accelerate writes its number of ranks nowhere.
UNSEEN = {"random_states_1.pkl"}
# What may be absent for a reason: fsck remarks on it.
OPTIONAL = {"optimizer.bin", "scheduler.bin", "model.safetensors"}
# Settings of the library's own that nobody resumes from.
IDLE = {"config.json", "generation_config.json", "training_args.bin", "latest"}


@pytest.fixture
def golden(repository: Path, library: str, tmp_path: Path) -> Path:
    """A copy of what a library wrote."""
    copy = tmp_path / "golden"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / library, copy)
    return copy


def only(root: Path) -> Report:
    (report,) = judge(root).reports
    return report


def wrong(report: Report) -> list[Finding]:
    """Return the findings but those that tell the classes of a pickle."""
    return [one for one in report.findings if "weights_only=True" not in one.what]


def test_the_golden_folders_are_small_and_say_their_versions(repository: Path) -> None:
    folder = repository / "tests" / "golden" / "fsck"
    assert sum(one.stat().st_size for one in trees.files(folder)) < MOST_BYTES
    for library in LAYOUTS:
        about = json.loads((folder / f"{library}.json").read_text(encoding="utf-8"))
        assert set(about["versions"]) == {library, "torch"}
        assert not [one for one in trees.files(folder / library) if one.suffix == ".py"]


@pytest.mark.parametrize("library", LAYOUTS)
def test_what_a_library_wrote_is_recognised_and_whole(library: str, golden: Path) -> None:
    judged = judge(golden)
    assert judged.reports
    for report in judged.reports:
        assert report.layout == LAYOUTS[library]
        assert report.state is State.WHOLE
        assert wrong(report) == []
        assert report.tensors > 0


@pytest.mark.parametrize("library", LAYOUTS)
def test_every_missing_file_is_told(library: str, golden: Path) -> None:
    if library == "lightning":
        pytest.skip("one file is a whole checkpoint")
    whole = judge(golden)
    for path in sorted(trees.files(golden)):
        if path.name in IDLE | UNSEEN:
            continue
        aside = golden.parent / "aside"
        path.rename(aside)
        judged = judge(golden)
        aside.rename(path)
        found = [one for report in judged.reports for one in wrong(report)]
        told = {one.file.rpartition("/")[2]: one.kind for one in found}
        kind = Kind.NOTE if library == "accelerate" and path.name in OPTIONAL else Kind.MISSING
        assert told == {path.name: kind}, path
        assert judged.state is (State.WHOLE if kind is Kind.NOTE else State.INCOMPLETE)
    assert judge(golden).to_json() == whole.to_json()


@pytest.mark.parametrize("name", ["checkpoint_0", "state", "step_7"])
@pytest.mark.parametrize("library", ["accelerate"])
def test_accelerate_without_generators_is_incomplete(
    name: str, library: str, golden: Path, tmp_path: Path
) -> None:
    """The library resumes without them, and says so in its log alone."""
    del library
    folder = (golden / "checkpoints" / "checkpoint_0").rename(tmp_path / name)
    for path in folder.glob("random_states_*.pkl"):
        path.unlink()
    for report in only(folder), only(tmp_path):
        assert (report.layout, report.state) == ("accelerate", State.INCOMPLETE)
        assert [one.file for one in wrong(report)] == ["random_states_0.pkl"]


@pytest.mark.parametrize("library", ["accelerate"])
def test_weights_that_a_hook_saved_in_folders_are_named(library: str, golden: Path) -> None:
    """As the training scripts of diffusers do: `unet/`, and `unet_ema/` beside it."""
    del library
    folder = golden / "checkpoints" / "checkpoint_0"
    for name in ("unet", "unet_ema"):
        (folder / name).mkdir()
        copied = folder / name / "diffusion_pytorch_model.safetensors"
        shutil.copy(folder / "model.safetensors", copied)
    (folder / "model.safetensors").unlink()
    report = only(folder)
    (told,) = [one for one in report.findings if one.file == "model.safetensors"]
    assert report.state is State.WHOLE
    assert "its weights are in 'unet'/, 'unet_ema'/" in told.what


@pytest.mark.parametrize("fault", ["bit-flip", "truncation-half", "zeroed-block"])
@pytest.mark.parametrize("library", LAYOUTS)
def test_damage_of_protected_files_is_found(library: str, fault: str, golden: Path) -> None:
    for number, path in enumerate(sorted(trees.files(golden))):
        if path.suffix not in (".pt", ".pth", ".bin", ".pkl", ".ckpt"):
            continue
        copy = golden.parent / str(number)
        name = path.relative_to(golden).as_posix()
        rng = random.Random(number)  # noqa: S311  which bits, no secret
        at_rest.copy_damaged(golden, copy, fault, rng, name)
        found = [one for report in judge(copy).reports for one in wrong(report)]
        kinds = {one.kind for one in found}  # what a bit made of a name is unsafe, too
        assert kinds - {Kind.UNSAFE} == {Kind.DAMAGED}, (library, name, fault)


@pytest.mark.parametrize("library", LAYOUTS)
def test_a_checkpoint_compared_with_its_copy_is_the_same(library: str, golden: Path) -> None:
    report = judge(golden).reports[0]
    compared = diff(report.path, report.path)
    assert compared.is_judged, (compared.a.problems, compared.b.problems)
    assert compared.differences == []
    assert len(compared.same) > 5, library


@pytest.mark.parametrize("library", ["transformers"])
def test_a_state_of_another_step_is_damage(library: str, golden: Path) -> None:
    (golden / "run" / "checkpoint-2").rename(golden / "run" / "checkpoint-9")
    report = only(golden)
    assert report.state is State.DAMAGED, library
    assert "of step 2, and the name says 9" in report.findings[0].what


@pytest.mark.parametrize("library", ["transformers"])
def test_weights_alone_are_whole_and_remarked(library: str, golden: Path) -> None:
    """What `save_only_model` leaves; resuming from it starts the optimizer cold."""
    folder = golden / "run" / "checkpoint-2"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()
    report = only(golden)
    assert report.state is State.WHOLE, library
    assert [(one.kind, one.file) for one in wrong(report)] == [(Kind.NOTE, "optimizer.pt")]


@pytest.mark.parametrize("library", ["transformers"])
def test_a_save_killed_after_the_weights_is_incomplete(library: str, golden: Path) -> None:
    """`save_model` comes first: the folder looks like an exported model, and its name does not."""
    folder = golden / "run" / "checkpoint-2"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (folder / name).unlink()
    assert only(golden).state is State.INCOMPLETE, library
    exported = golden / "exported"
    folder.rename(exported)
    assert only(exported).state is State.WHOLE


@pytest.mark.parametrize("library", ["accelerate"])
def test_a_rank_between_others_is_missed(library: str, golden: Path) -> None:
    folder = golden / "checkpoints" / "checkpoint_0"
    shutil.copyfile(folder / "random_states_1.pkl", folder / "random_states_3.pkl")
    shutil.copyfile(folder / "optimizer.bin", folder / "optimizer_2.bin")
    report = only(golden)
    assert report.state is State.INCOMPLETE, library
    assert {one.file for one in report.findings} == {"random_states_2.pkl", "optimizer_1.bin"}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("library", ["deepspeed"])
def test_no_optimizer_of_any_rank_is_incomplete(library: str, stage: int, golden: Path) -> None:
    """ZeRO was on: the states of the model have the shapes of its parameters."""
    folder = golden / f"stage{stage}" / "global_step1"
    gone = sorted(one.name for one in folder.glob("*_optim_states.pt"))
    for name in gone:
        (folder / name).unlink()
    report = only(folder)
    assert (report.layout, report.state) == (library, State.INCOMPLETE)
    assert [(one.kind, one.file) for one in wrong(report)] == [
        (Kind.MISSING, name) for name in gone
    ]


@pytest.mark.parametrize("library", ["deepspeed"])
def test_no_optimizer_without_zero_is_whole(library: str, golden: Path) -> None:
    """Without ZeRO the states of the optimizer are those of the model's file, or none."""
    folder = golden / "stage1" / "global_step1"
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    path = folder / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save(state | {"param_shapes": None}, path)
    report = only(folder)
    assert (report.layout, report.findings) == (library, [])


@pytest.mark.parametrize("library", ["lightning"])
def test_weights_of_lightning_are_remarked_and_the_step_is_read(library: str, golden: Path) -> None:
    reports = {one.path.name: one for one in judge(golden).reports}
    assert reports["last.ckpt"].step == 2, library
    whole = torch.load(golden / "run" / "last.ckpt", weights_only=True)
    weights = {
        key: whole[key] for key in ("state_dict", "pytorch-lightning_version", "global_step")
    }
    torch.save(weights, golden / "run" / "epoch=0-step=7.ckpt")
    (report,) = judge(golden / "run" / "epoch=0-step=7.ckpt").reports
    assert report.state is State.WHOLE
    told = " ".join(one.what for one in report.findings)
    assert "weights only" in told
    assert "its global_step is 2, and its name says 7" in told


@pytest.mark.parametrize("weights", ["model.pt", "model.bin"])
@pytest.mark.parametrize("folder", ["step_5", "checkpoint-5", "checkpoint_5"])
def test_a_script_of_somebodys_own_is_no_library(folder: str, weights: str, tmp_path: Path) -> None:
    """Its names are like theirs; nothing says that there should be more."""
    (tmp_path / folder).mkdir()
    for name in (weights, "scheduler.bin", "optimizer.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / folder / name)
    report = only(tmp_path)
    assert (report.layout, report.findings) == ("files", [])


def test_files_of_two_world_sizes_are_damage(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_7" / "actor"
    folder.mkdir(parents=True)
    for size in (2, 1):
        for rank in range(size):
            for part in ("model", "optim", "extra_state"):
                name = f"{part}_world_size_{size}_rank_{rank}.pt"
                torch.save({"w": torch.ones(2)}, folder / name)
        report = only(tmp_path)
        assert report.layout == "verl-fsdp"
        assert report.state is (State.WHOLE if size == 2 else State.DAMAGED)
    assert "world sizes [1, 2]" in report.findings[0].what


@pytest.mark.slow
@pytest.mark.parametrize("library", LAYOUTS)
def test_what_the_installed_library_writes_is_whole(
    library: str, repository: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    maker = tmp_path / "make_fsck.py"
    shutil.copyfile(repository / "tests" / "golden" / "make_fsck.py", maker)
    subprocess.run([sys.executable, str(maker), library], check=True, timeout=300)
    for report in judge(tmp_path / "fsck" / library).reports:
        assert (report.layout, report.state) == (LAYOUTS[library], State.WHOLE), report.findings
