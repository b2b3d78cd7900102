"""Steps of one run tell of each other; what a script may do on purpose stays whole."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from fsck_runs import Finished
from fsck_swaps import RUNS, Seen, run_of, same, script, seen, stales
from safetensors.torch import save_file

from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.judge.judging import Job, Judging
from ckpt_conformance.fsck.layouts.listing import Listing
from ckpt_conformance.fsck.source.findings import Kind, Report, State

if TYPE_CHECKING:
    from pathlib import Path

STEPS = (10, 20, 30, 40)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a script, with four steps."""
    return script(tmp_path / "run", STEPS)


def told(root: Path) -> dict[int, list[tuple[str, Kind]]]:
    """Return what is said of each step."""
    reports = {one.step or 0: one for one in judge(root).reports}
    return {
        step: [(one.file, one.kind) for one in reports[step].findings]
        for step in sorted(reports)
        if reports[step].findings
    }


def report_of(root: Path, step: int) -> Report:
    return next(one for one in judge(root).reports if one.step == step)


# -- a file that one step lacks --------------------------------------------------------------------


def test_a_step_between_others_that_lacks_their_optimizer_is_incomplete(run: Path) -> None:
    (run / "step_20" / "optimizer.pt").unlink()
    assert told(run) == {20: [("optimizer.pt", Kind.MISSING)]}
    assert report_of(run, 20).state is State.INCOMPLETE


def test_loose_files_of_a_run_are_compared_too(run: Path, tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    for folder in run.iterdir():
        for file in ("model.pt", "optimizer.pt"):
            step = folder.name.removeprefix("step_")
            shutil.copyfile(folder / file, loose / file.replace(".", f"_{step}."))
    assert told(loose) == {}
    (loose / "optimizer_30.pt").unlink()
    assert told(loose) == {30: [("optimizer_30.pt", Kind.MISSING)]}


def test_a_last_checkpoint_of_weights_only_is_whole_and_nothing_to_resume_from(run: Path) -> None:
    for file in (run / "step_40").iterdir():
        if file.name != "model.pt":
            file.unlink()
    assert {kind for found in told(run).values() for _, kind in found} == {Kind.NOTE}
    assert judge(run).state is State.WHOLE
    newest = judge_newest(run).newest_whole
    assert newest is not None
    assert newest.path == run / "step_30"


def test_newest_weights_beside_a_file_to_resume_from_have_a_remark(tmp_path: Path) -> None:
    """As in the examples of torch: `epoch2.pth` for evaluation, `checkpoint.pth.tar` to go on."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for epoch in (1, 2):
        torch.save(model.state_dict(), tmp_path / f"epoch{epoch}.pth")
    assert told(tmp_path) == {}
    whole = {"epoch": 2, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(whole, tmp_path / "checkpoint.pth.tar")
    assert told(tmp_path) == {2: [("epoch2.pth", Kind.NOTE)]}
    assert "checkpoint.pth.tar" in report_of(tmp_path, 2).findings[0].what
    assert (
        "starts its optimizer cold" in Finished("fsck", tmp_path, "--details").out
    )  # of stored results
    torch.save(whole, tmp_path / "epoch3.pth")
    assert told(tmp_path) == {}


def test_a_script_that_saves_the_optimizer_every_second_step_is_whole(tmp_path: Path) -> None:
    run = script(tmp_path / "run", (10, 20, 30, 40, 50, 60))
    for step in (20, 40, 60):
        (run / f"step_{step}" / "optimizer.pt").unlink()
    assert told(run) == {60: [("", Kind.NOTE)]}, "a run resumes from the one before"
    assert judge(run).newest_whole == next(one for one in judge(run).reports if one.step == 50)
    three = script(tmp_path / "three", (10, 20, 30))
    (three / "step_20" / "optimizer.pt").unlink()
    assert told(three) == {}


def test_a_rotation_that_keeps_some_optimizers_is_whole(run: Path, tmp_path: Path) -> None:
    """Those of the milestones, or of the newest alone."""
    milestones = script(tmp_path / "milestones", (10, 20, 25, 30))
    (milestones / "step_25" / "optimizer.pt").unlink()
    assert judge(milestones).state is State.WHOLE
    for step in (10, 20, 30):
        (run / f"step_{step}" / "optimizer.pt").unlink()
    assert told(run) == {}


def test_a_first_step_without_a_scaler_is_whole(run: Path) -> None:
    (run / "step_10" / "scaler.pt").unlink()
    assert told(run) == {}


def test_a_run_on_fewer_ranks_for_a_while_is_whole(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3, 4, 5):
        for rank in range(1 if step == 3 else 2):
            (run / f"step_{step}").mkdir(parents=True, exist_ok=True)
            torch.save({"w": torch.ones(2)}, run / f"step_{step}" / f"model_rank{rank}.pt")
            torch.save(torch.get_rng_state(), run / f"step_{step}" / f"rng_state_{rank}.pth")
    assert told(run) == {}


def of_ranks(folder: Path, *names: str) -> None:
    """Write files of ranks, whose names say no world size."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.ones(2)}, folder / name)


@pytest.mark.parametrize("form", ["ckpt_{}_rank{}.pt", "step_{}/rank_{}.pt", "step_{}/rank{}/m.pt"])
def test_a_lost_file_of_a_rank_is_missing(form: str, tmp_path: Path) -> None:
    of_ranks(tmp_path, *(form.format(step, rank) for step in (10, 20, 30) for rank in (0, 1)))
    assert told(tmp_path) == {}
    (tmp_path / form.format(30, 0)).unlink()
    lost = form.format(30, 0).removeprefix("step_30/")
    assert told(tmp_path) == {30: [(lost, Kind.MISSING)]}


def test_a_step_of_the_first_ranks_alone_has_a_remark(tmp_path: Path) -> None:
    """It may have been saved by fewer ranks."""
    of_ranks(tmp_path, *(f"step_{step}/rank_{rank}.pt" for step in (1, 2, 3) for rank in (0, 1)))
    (tmp_path / "step_3" / "rank_1.pt").unlink()
    assert told(tmp_path) == {3: [("rank_1.pt", Kind.NOTE)]}


def test_a_rank_between_others_is_missing_without_neighbours(tmp_path: Path) -> None:
    of_ranks(tmp_path / "step_1", *(f"rank_{rank}.pt" for rank in (0, 1, 3)))
    assert told(tmp_path) == {1: [("rank_2.pt", Kind.MISSING)]}


def test_adapters_of_a_rank_are_no_files_of_ranks(tmp_path: Path) -> None:
    of_ranks(tmp_path / "step_1", *(f"lora_rank{size}.pt" for size in (4, 8, 16)))
    of_ranks(tmp_path / "step_2", "lora_rank8.pt")
    assert told(tmp_path) == {}


def test_another_run_beside_it_is_not_asked(run: Path, tmp_path: Path) -> None:
    script(tmp_path / "other", (20,), "best_step_{}")
    (tmp_path / "other" / "best_step_20").rename(run / "best_step_20")
    (run / "best_step_20" / "optimizer.pt").unlink()
    assert told(run) == {}


PREPARED = (
    *("model.safetensors", "optimizer.bin", "scheduler.bin"),
    *("sampler.bin", "custom_checkpoint_0.pkl"),
)


def accelerated(root: Path, *steps: int) -> Path:
    """A run of accelerate, with what was prepared."""
    for step in steps:
        folder = root / f"checkpoint_{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((3,), float(step))}, folder / "model.safetensors")
        for name in PREPARED[1:]:
            torch.save({"of": step}, folder / name)
        torch.save(
            {"step": step, "torch_manual_seed": torch.ones(3)}, folder / "random_states_0.pkl"
        )
    return root


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("name", PREPARED)
def test_what_accelerate_prepared_is_in_each_step(name: str, step: int, tmp_path: Path) -> None:
    """The generators are written last and are there: so the file was lost after the save."""
    root = accelerated(tmp_path / "run", 1, 2, 3)
    (root / f"checkpoint_{step}" / name).unlink()
    assert (name, Kind.MISSING) in told(root)[step]
    newest = judge_newest(root).newest_whole
    assert newest is not None
    assert newest.step == (2 if step == 3 else 3)


def test_what_accelerate_prepared_later_is_not_missing_before(tmp_path: Path) -> None:
    root = accelerated(tmp_path / "run", 1, 2, 3)
    (root / "checkpoint_1" / "scheduler.bin").unlink()
    (root / "checkpoint_3" / "README.md").write_text("notes")
    weights = root / "checkpoint_3" / "model.safetensors"
    weights.unlink()
    torch.save({"w": torch.ones(3)}, weights.with_name("pytorch_model.bin"))
    assert {one.state for one in judge(root).reports} == {State.WHOLE}


def test_one_earlier_step_is_not_enough_to_miss_a_file(tmp_path: Path) -> None:
    root = accelerated(tmp_path / "run", 1, 2)
    (root / "checkpoint_2" / "scheduler.bin").unlink()
    assert {one.state for one in judge(root).reports} == {State.WHOLE}


# -- files of another step -------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_every_stale_file_is_told(name: str, tmp_path: Path) -> None:
    """With neighbours on both sides; the table of docs/fsck.md is of all of them."""
    root = run_of(name, tmp_path)
    reports = judge(root).reports
    newest = str(reports[0].path)
    trials = [one for one in stales(root) if str(one.copies[0][1]).startswith(newest)]
    trials = [one for one in trials if not same(one)]
    assert len(trials) >= 4
    for trial in trials[::2]:
        assert seen(root, trial) is not Seen.SILENT, trial.copies[0]


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt"])
def test_a_count_that_is_right_before_and_after_is_damage_between(file: str, run: Path) -> None:
    shutil.copyfile(run / "step_10" / file, run / "step_30" / file)
    report = report_of(run, 30)
    assert report.state is State.DAMAGED
    assert "count is 10, and the steps before and after it put it at 30" in report.findings[0].what


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt"])
def test_a_stale_file_of_the_trainer_is_damage_in_the_newest(file: str, tmp_path: Path) -> None:
    run = run_of("transformers_run", tmp_path) / "run"
    shutil.copyfile(run / "checkpoint-4" / file, run / "checkpoint-6" / file)
    report = report_of(run, 6)
    assert report.state is State.DAMAGED
    assert "its records are those of step 4" in report.findings[0].what
    judged = judge_newest(run)
    assert judged.newest_whole is not None
    assert judged.newest_whole.path == run / "checkpoint-4"
    done = Finished("fsck", run, "--newest-whole")
    assert (done.status, done.out) == (0, f"{run / 'checkpoint-4'}\n")
    assert "records are those of step 4" in done.err


def test_a_run_whose_steps_are_all_skipped_is_whole(tmp_path: Path) -> None:
    """The Trainer steps neither, where a gradient overflows: both files stay as they are."""
    run = run_of("transformers_run", tmp_path) / "run"
    for file in ("optimizer.pt", "scheduler.pt"):
        shutil.copyfile(run / "checkpoint-4" / file, run / "checkpoint-6" / file)
    assert judge(run).state is State.WHOLE


def test_a_scheduler_that_ended_its_warmup_is_whole(run: Path) -> None:
    for step in (20, 30, 40):
        shutil.copyfile(run / "step_10" / "scheduler.pt", run / f"step_{step}" / "scheduler.pt")
    assert told(run) == {}


def test_a_scheduler_of_epochs_is_whole(tmp_path: Path) -> None:
    """It stands still between two epochs, of 15 steps each."""
    run = script(tmp_path / "run", (10, 20, 30, 40, 50, 60))
    for folder in run.iterdir():
        epochs = int(folder.name.removeprefix("step_")) // 15
        path = folder / "scheduler.pt"
        state = torch.load(path, weights_only=True)
        torch.save(state | {"last_epoch": epochs, "_step_count": epochs + 1}, path)
    assert judge(run).state is State.WHOLE


@pytest.mark.parametrize("file", ["optimizer.pt", "model.pt", "rng.pt"])
def test_a_part_that_is_frozen_is_whole(file: str, run: Path) -> None:
    """From the second step on, as a network that is trained in phases."""
    for step in (30, 40):
        shutil.copyfile(run / "step_20" / file, run / f"step_{step}" / file)
    assert judge(run).state is State.WHOLE


def test_a_run_that_went_on_with_a_cold_optimizer_is_whole(tmp_path: Path) -> None:
    run, cold = script(tmp_path / "run", (10, 20)), script(tmp_path / "cold", (10, 20))
    for step in (10, 20):
        shutil.move(cold / f"step_{step}", run / f"step_{step + 20}")
    assert judge(run).state is State.WHOLE


def test_a_step_that_another_branch_saved_again_is_whole(run: Path, tmp_path: Path) -> None:
    """All that it counts is of one branch: nothing in it contradicts the rest of it."""
    other = script(tmp_path / "other", (10,))
    shutil.rmtree(run / "step_30")
    shutil.move(other / "step_10", run / "step_30")
    assert judge(run).state is State.WHOLE


def test_a_file_that_is_shared_on_purpose_is_whole(tmp_path: Path) -> None:
    run = script(tmp_path / "run", (10, 20))
    (run / "step_20" / "optimizer.pt").unlink()
    os.link(run / "step_10" / "optimizer.pt", run / "step_20" / "optimizer.pt")
    assert judge(run).state is State.WHOLE
    said = {one.what.partition(" (")[0] for one in report_of(run, 20).findings}
    assert said == {"shares its bytes"}


# -- in parts --------------------------------------------------------------------------------------


def test_shards_tell_what_one_process_tells(run: Path, tmp_path: Path) -> None:
    (run / "step_20" / "scaler.pt").unlink()
    shutil.copyfile(run / "step_10" / "optimizer.pt", run / "step_30" / "optimizer.pt")
    whole = Finished("fsck", run)
    assert whole.status == 1
    files = [tmp_path / f"{number}.jsonl" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        Finished("fsck", run, "--shard", f"{number}/2", "--results", file)
    assert Finished("combine", *files).out == whole.out


def test_results_without_what_neighbours_ask_for_are_read(run: Path) -> None:
    job = Job(0, next(iter(Listing(run))))
    _, judgement = next(iter(Judging(run, judge(run).options).run([job])))
    assert judgement is not None
    assert judgement.kin is not None
    plain = stored.result_json(job, judgement)
    again = stored.result_of(stored.decode(stored.encode(plain))).judgement
    assert again is not None
    assert again.kin == judgement.kin
    del plain["kin"]
    old = stored.result_of(plain).judgement
    assert old is not None
    assert old.kin is None


# -- tensors that are not those of the other steps -------------------------------------------------

NOTHING = {"empty": {}, "zero-sized": {"weight": torch.zeros(0)}}


@pytest.mark.parametrize("sort", NOTHING)
def test_weights_without_an_element_beside_full_ones_are_missing(sort: str, run: Path) -> None:
    torch.save(NOTHING[sort], run / "step_40" / "model.pt")
    assert told(run) == {40: [("model.pt", Kind.MISSING)]}
    newest = judge_newest(run).newest_whole
    assert newest is not None
    assert newest.path == run / "step_30"


def test_weights_without_an_element_beside_one_other_step_have_a_remark(run: Path) -> None:
    for step in (10, 20):
        shutil.rmtree(run / f"step_{step}")
    torch.save({}, run / "step_40" / "model.pt")
    assert told(run) == {40: [("model.pt", Kind.NOTE)]}


def test_a_safetensors_file_without_an_element_beside_full_ones_is_missing(tmp_path: Path) -> None:
    for step in STEPS:
        (tmp_path / f"step_{step}").mkdir()
        save_file(
            {"w": torch.ones(3)} if step != 40 else {}, tmp_path / f"step_{step}/model.safetensors"
        )
    assert 40 in told(tmp_path)
    assert report_of(tmp_path, 40).state is State.INCOMPLETE


def test_loose_weights_without_an_element_are_missing(tmp_path: Path) -> None:
    for step in STEPS:
        state = {"weight": torch.ones(3)} if step != 40 else {}
        torch.save(state, tmp_path / f"model_{step}.pt")
    assert told(tmp_path) == {40: [("model_40.pt", Kind.MISSING)]}


@pytest.mark.parametrize(("step", "kind"), [(20, Kind.DAMAGED), (40, Kind.NOTE)])
def test_weights_of_another_model_are_told(step: int, kind: Kind, run: Path) -> None:
    torch.save({"other.weight": torch.ones(3, 2)}, run / f"step_{step}" / "model.pt")
    assert told(run) == {step: [("model.pt", kind)]}
    newest = judge_newest(run).newest_whole
    assert newest is not None
    assert newest.path == run / ("step_40" if step == 20 else "step_30")


@pytest.mark.parametrize("step", [20, 40])
def test_an_optimizer_of_another_model_has_a_remark(step: int, run: Path) -> None:
    state = torch.load(run / f"step_{step}" / "optimizer.pt")
    state["state"] = {key + 7: one for key, one in state["state"].items()}
    torch.save(state, run / f"step_{step}" / "optimizer.pt")
    assert told(run) == {step: [("optimizer.pt", Kind.NOTE)]}


def test_an_optimizer_that_has_made_more_states_is_not_passed_over(run: Path) -> None:
    state = torch.load(run / "step_40" / "optimizer.pt")
    state["state"][99] = {"exp_avg": torch.ones(5)}
    torch.save(state, run / "step_40" / "optimizer.pt")
    assert told(run) == {40: [("optimizer.pt", Kind.NOTE)]}
    newest = judge_newest(run).newest_whole
    assert newest is not None
    assert newest.path == run / "step_40"


def test_weights_of_a_first_step_may_be_less(run: Path) -> None:
    torch.save({}, run / "step_10" / "model.pt")
    assert told(run) == {}


def test_weights_in_half_precision_are_the_same_tensors(run: Path) -> None:
    state = torch.load(run / "step_40" / "model.pt")
    half = {name: one.half() if torch.is_tensor(one) else one for name, one in state.items()}
    torch.save(half, run / "step_40" / "model.pt")
    assert told(run) == {}


def test_a_model_that_grows_in_the_middle_of_a_run_is_no_damage(run: Path) -> None:
    for step in (30, 40):
        state = torch.load(run / f"step_{step}" / "model.pt")
        torch.save(state | {"grown": torch.ones(2)}, run / f"step_{step}" / "model.pt")
    assert told(run) == {}


def test_a_newest_step_without_the_config_of_the_others_has_a_remark(run: Path) -> None:
    for step in STEPS[:-1]:
        (run / f"step_{step}" / "config.json").write_text("{}")
    assert told(run) == {40: [("config.json", Kind.NOTE)]}


def test_weights_alone_of_lightning_are_passed_over(tmp_path: Path) -> None:
    own = {"pytorch-lightning_version": "2.6.6", "state_dict": {"w": torch.ones(2)}, "epoch": 1}
    adam = {
        "state": {0: {"step": torch.tensor(4.0)}},
        "param_groups": [{"lr": 1e-3, "params": [0]}],
    }
    resumes = {"optimizer_states": [adam], "lr_schedulers": [], "loops": {}, "callbacks": {"x": 1}}
    torch.save(own | resumes | {"global_step": 4}, tmp_path / "epoch=0-step=4.ckpt")
    torch.save(own | {"global_step": 6, "callbacks": {"x": 1}}, tmp_path / "final_weights.ckpt")
    newest = judge_newest(tmp_path).newest_whole
    assert newest is not None
    assert newest.path.name == "epoch=0-step=4.ckpt"
