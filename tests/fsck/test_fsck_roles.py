"""A file that holds another role's state than its name says, over files that libraries wrote."""

from __future__ import annotations

import pickle
import random
import shutil
import sys
from typing import TYPE_CHECKING, Any

import fsck_swaps
import pytest
import torch
from fsck_swaps import RUNS, Seen, run_of, same, script, seen, swaps

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.judge.placed import named
from ckpt_conformance.fsck.source.findings import Finding, Kind, Report, Role, State

if TYPE_CHECKING:
    from pathlib import Path


def only(root: Path) -> Report:
    (report,) = judge(root).reports
    return report


def told(report: Report) -> list[tuple[str, Kind]]:
    return [(one.file, one.kind) for one in report.findings]


def damage(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.kind is Kind.DAMAGED]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """One step of a script."""
    return script(tmp_path / "run", (10,)) / "step_10"


@pytest.mark.parametrize("name", RUNS)
def test_what_was_written_is_whole_without_a_remark(name: str, tmp_path: Path) -> None:
    reports = judge(run_of(name, tmp_path)).reports
    assert len(reports) == 3
    for report in reports:
        assert report.state is State.WHOLE
        assert [one for one in report.findings if "asks for" not in one.what] == []


@pytest.mark.parametrize("name", RUNS)
def test_every_swap_of_different_roles_is_found(name: str, tmp_path: Path) -> None:
    """Of the newest step; the table of docs/fsck.md is of all of them."""
    root = run_of(name, tmp_path)
    newest = str(judge(root).reports[0].path)
    trials = [one for one in swaps(root) if str(one.copies[0][0]).startswith(newest)]
    asked = [one for one in trials if one.what == "of different roles" and not same(one)]
    assert len(asked) >= 2
    for trial in asked:
        assert seen(root, trial) is Seen.DAMAGED, trial.copies[0]


def test_both_files_of_a_swap_are_named(step: Path) -> None:
    one, two = step / "optimizer.pt", step / "scheduler.pt"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    report = only(step)
    assert [one.file for one in damage(report)] == ["optimizer.pt", "scheduler.pt"]
    assert "holds the state of a scheduler" in report.findings[0].what
    assert "scheduler.pt is not what its name says" in report.findings[0].what


def test_a_copy_under_another_role_is_damage(step: Path) -> None:
    shutil.copyfile(step / "optimizer.pt", step / "scheduler.pt")
    (finding,) = damage(only(step))
    assert finding.file == "scheduler.pt"
    assert "byte for byte the records of optimizer.pt" in finding.what


def test_a_file_of_no_role_that_took_the_place_of_another_is_found(tmp_path: Path) -> None:
    root = run_of("accelerate_run", tmp_path)
    folder = root / "checkpoints" / "checkpoint_2"
    one, two = folder / "custom_checkpoint_0.pkl", folder / "random_states_0.pkl"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert {one.file for one in damage(judge(root).reports[0])} == {one.name, two.name}


# -- what is right, and looks wrong ----------------------------------------------------------------


def rewrite(step: Path, **parts: Any) -> Report:  # noqa: ANN401  a state
    for name, part in parts.items():
        torch.save(part, step / f"{name}.pt")
    return only(step)


def load(step: Path, name: str) -> Any:  # noqa: ANN401  a state
    return torch.load(step / f"{name}.pt", weights_only=True)


def test_sgd_without_state_is_whole(step: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    report = rewrite(step, optimizer=optimizer.state_dict())
    assert (report.state, report.findings) == (State.WHOLE, [])


def test_a_scheduler_that_looks_like_an_optimizer_is_a_remark(step: Path) -> None:
    """One that keeps the optimizer's groups, beside the optimizer itself."""
    like = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}], "last_epoch": 3}
    report = rewrite(step, scheduler=like)
    assert report.state is State.WHOLE
    assert told(report) == [("scheduler.pt", Kind.NOTE)]


@pytest.mark.parametrize(
    "parts",
    [
        {"model": ["model", "optimizer", "scheduler", "rng"]},
        {"optimizer": ["optimizer", "scheduler", "scaler"]},
        {"scheduler": ["scheduler", "rng"]},
    ],
)
def test_a_file_may_hold_more_than_its_name_says(parts: dict[str, list[str]], step: Path) -> None:
    """As `model.pt` with everything in it does."""
    for name, inner in parts.items():
        report = rewrite(step, **{name: {one: load(step, one) for one in inner} | {"epoch": 3}})
        assert (report.state, report.findings) == (State.WHOLE, [])


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"w": torch.ones(2)},
        {"exp_avg.0.weight": torch.ones(2), "exp_avg_sq.0.weight": torch.ones(2)},
        {"momentum_buffer": {"0.weight": torch.ones(2)}, "lr": 0.1},
        [{"a": 1}],
        torch.ones(3),
    ],
)
@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "scaler", "rng", "sampler"])
def test_what_is_not_recognised_is_nobodys(name: str, part: object, step: Path) -> None:
    """A state of somebody's own class, and one that is switched off."""
    report = rewrite(step, **{name: part})
    assert (report.state, report.findings) == (State.WHOLE, [])


def test_several_optimizers_in_one_file_are_optimizers(step: Path) -> None:
    one = load(step, "optimizer")
    for several in ([one, one], {"adam": one, "muon": one}):
        assert rewrite(step, optimizer=several).findings == []


def test_files_that_are_named_otherwise_are_not_asked(step: Path) -> None:
    for file in step.glob("*.pt"):
        file.rename(step / f"part{len(file.stem)}_{ord(file.stem[-1])}.pt")
    assert only(step).findings == []


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("optimizer.bin", Role.OPTIMIZER),
        ("optim.pt", Role.OPTIMIZER),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", Role.OPTIMIZER),
        ("actor/optim_world_size_2_rank_1.pt", Role.OPTIMIZER),
        ("optimizer_1.bin", Role.OPTIMIZER),
        ("policy.optimizer.pth", Role.OPTIMIZER),
        ("lr_scheduler.pt", Role.SCHEDULER),
        ("random_states_3.pkl", Role.GENERATORS),
        ("rng_state_0.pth", Role.GENERATORS),
        ("training_args.bin", Role.ARGUMENTS),
        ("pytorch_model.bin", Role.MODEL),
        ("mp_rank_00_model_states.pt", Role.MODEL),
    ],
)
def test_names_tell_a_role(name: str, role: Role) -> None:
    assert named(name) == {role}


@pytest.mark.parametrize(
    "name", ["generator.pt", "opt-125m.bin", "data.pt", "config.json", "ema.pt", "optimus.pt"]
)
def test_common_words_tell_none(name: str) -> None:
    """A generator may be that of a GAN."""
    assert named(name) == frozenset()


# -- ranks, steps, worlds --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["optim", "extra_state"])
def test_a_rank_of_another_step_is_damage(name: str, tmp_path: Path) -> None:
    root = run_of("fsdp_run", tmp_path) / "run"
    file = f"actor/{name}_world_size_2_rank_1.pt"
    shutil.copyfile(root / "global_step_2" / file, root / "global_step_6" / file)
    shutil.rmtree(root / "global_step_2")
    shutil.rmtree(root / "global_step_4")
    report = only(root)
    assert file in [one.file for one in damage(report)]


def test_models_of_two_worlds_are_damage(tmp_path: Path) -> None:
    root = run_of("deepspeed_run", tmp_path) / "run" / "global_step6"
    path = root / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    for rank in range(2):
        own = state | {"mp_world_size": 2, "dp_world_size": 2 + rank}
        torch.save(own, root / f"mp_rank_0{rank}_model_states.pt")
    said = [one for one in damage(only(root)) if "dp_world_size" in one.what]
    assert len(said) == 2


def test_a_step_that_the_name_contradicts_is_a_remark(step: Path) -> None:
    report = rewrite(step, train={"step": 10, "epoch": 1}, extra={"step": 7})
    assert report.state is State.WHOLE
    assert told(report) == [("extra.pt", Kind.NOTE)]


def test_an_optimizer_of_another_step_is_a_remark_where_no_neighbour_tells(tmp_path: Path) -> None:
    root = run_of("transformers_run", tmp_path) / "run"
    for name in (2, 4):
        if name == 4:
            shutil.copyfile(root / "checkpoint-4" / "optimizer.pt", root / "aside")
        shutil.rmtree(root / f"checkpoint-{name}")
    (root / "aside").rename(root / "checkpoint-6" / "optimizer.pt")
    report = only(root)
    assert report.state is State.WHOLE
    assert [file for file, _ in told(report) if file != "training_args.bin"] == ["optimizer.pt"]


def test_a_state_of_the_trainer_without_a_step_is_damage(tmp_path: Path) -> None:
    root = run_of("transformers_run", tmp_path) / "run" / "checkpoint-6"
    one, two = root / "trainer_state.json", root / "config.json"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert "trainer_state.json" in {one.file for one in damage(only(root))}


def test_a_rank_beyond_the_world_is_a_remark(tmp_path: Path) -> None:
    root = run_of("deepspeed_run", tmp_path) / "run" / "global_step6"
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copyfile(root / name.format(1), root / name.format(2))
    report = only(root)
    assert report.state is State.WHOLE
    assert [one.file for one in report.findings if "larger" in one.what] == [name.format(2)]


# -- bytes of strangers ----------------------------------------------------------------------------


def test_a_structure_that_holds_itself_ends(step: Path) -> None:
    loop: list[Any] = [{"param_groups": [{"params": []}], "state": {}}]
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit() // 2):
        deep = [deep, deep]
    wide: list[Any] = [{}]
    for _ in range(40):
        wide = [wide] * 40
    for part in (loop, wide):
        assert rewrite(step, scheduler=part).state is State.WHOLE
    with pytest.raises(RecursionError):
        pickle.dumps(deep)  # so that no file can be made of it here; four levels are looked into


@pytest.mark.parametrize(
    "number", [-1, 0, 1 << 60, pytest.param(10**5000, id="huge"), True, 1.5, "7", None]
)
def test_a_count_of_somebodys_choice_breaks_nothing(number: object, tmp_path: Path) -> None:
    root = script(tmp_path / "run")
    for folder in root.iterdir():
        state = load(folder, "scheduler") | {"last_epoch": number, "_step_count": number}
        torch.save(state, folder / "scheduler.pt")
        torch.save({"step": number, "global_step": number}, folder / "train.pt")
    judged = judge(root)
    assert judged.state is State.WHOLE
    assert judged.to_json()


def test_a_step_tensor_that_is_no_number_is_no_count(step: Path) -> None:
    state = load(step, "optimizer")
    for value in (torch.tensor(float("nan")), torch.tensor(float("inf")), torch.ones(3)):
        for one in state["state"].values():
            one["step"] = value
        assert rewrite(step, optimizer=state).findings == []


@pytest.mark.slow
def test_the_table_of_the_page_is_what_comes_of_every_draw(repository: Path) -> None:
    random.seed(0)
    page = (repository / "docs" / "fsck.md").read_text(encoding="utf-8")
    for row in fsck_swaps.table().splitlines():
        assert row in page
