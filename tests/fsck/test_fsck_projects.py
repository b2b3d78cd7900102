"""Folders as well-known projects lay them out: what is one checkpoint, and which is the newest.

The names are those that each project's code gives, as an outsider remembered it; nothing of these
projects is run. The files hold small tensors.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsck_runs import Finished
from safetensors.torch import save_file

from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State, Topic

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report


def write(run: Path, *names: str) -> None:
    """Write files of torch or safetensors, each a second newer than the one before."""
    for at, name in enumerate(names):
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"w": torch.full((300,), float(at))}
        if name.endswith(".safetensors"):
            save_file(tensors, path)
        else:
            torch.save(tensors, path)
        os.utime(path, (at + 1, at + 1))


def newest(run: Path) -> str:
    found = judge_newest(run).newest_whole
    return str(found.path.relative_to(run)) if found else ""


def reports(run: Path) -> dict[str, Report]:
    return {str(one.path.relative_to(run)): one for one in judge(run).reports}


RANKS = [f"weights_tp_rank_world_size={at}_2_pp_rank_world_size=0_1.pth" for at in (0, 1)]
STEPS = {
    "composer": ["ep0-ba{}0-rank0.pt", "ep0-ba{}0-rank1.pt"],
    "fairseq": ["checkpoint_1_{}0-shard0.pt", "checkpoint_1_{}0-shard1.pt"],
    "allennlp": ["model_state_e0_b{}0.th", "training_state_e0_b{}0.th"],
    "guided diffusion": ["model0{}0000.pt", "opt0{}0000.pt", "ema_0.9999_0{}0000.pt"],
    "3D gaussian splatting": ["chkpnt{}0000.pth"],
    "NeRF": ["{}00000.tar"],
    "VITS": ["G_{}000.pth", "D_{}000.pth"],
    "HiFi-GAN": ["g_000{}0000", "do_000{}0000"],
    "CycleGAN": ["{}_net_G_A.pth", "{}_net_D_A.pth"],
    "rl_games": ["last_Ant_ep_{}00_rew_99.1.pth"],
    "VISSL": ["model_iteration{}00.torch"],
    "nanochat": ["model_00{}000.pt", "optim_00{}000_rank0.pt"],
    "Picotron": [f"{{}}0/{name}" for name in RANKS],
    "Megatron-LM": [f"iter_00000{{}}0/mp_rank_0{rank}/model_optim_rng.pt" for rank in (0, 1)],
    "GPT-NeoX": [f"global_step{{}}0/layer_0{at}-model_00-model_states.pt" for at in (0, 1)],
    "dates": ["checkpoint_20260101_12{}000.pt"],
}
ONE = {"Picotron": "{}0", "Megatron-LM": "iter_00000{}0", "GPT-NeoX": "global_step{}0"}


@pytest.mark.parametrize("project", STEPS)
def test_each_step_is_a_checkpoint_and_the_last_the_newest(project: str, tmp_path: Path) -> None:
    patterns = STEPS[project]
    write(tmp_path, *(pattern.format(step) for step in (1, 2) for pattern in patterns))
    if project == "nanochat":
        for step in (1, 2):
            (tmp_path / f"meta_00{step}000.json").write_text('{"step": 1, "val_bpb": 0.9}')
    expected = ONE.get(project, patterns[0])
    assert newest(tmp_path) == expected.format(2)
    assert len(reports(tmp_path)) == 2
    os.truncate(tmp_path / patterns[-1].format(2), 1_000)  # one file of the newest is cut
    assert newest(tmp_path) == expected.format(1)


def test_shards_of_llama_are_one_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "llama", "consolidated.00.pth", "consolidated.01.pth")
    (tmp_path / "llama" / "params.json").write_text('{"dim": 8}')
    assert list(reports(tmp_path)) == ["llama"]


def test_a_model_that_was_released_is_named_by_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "release/mp_rank_00/model_optim_rng.pt")
    assert newest(tmp_path) == "release"


def test_the_best_of_a_run_is_a_checkpoint_beside_its_step(tmp_path: Path) -> None:
    """MMEngine's names: of one epoch the file to resume from, and weights that were the best."""
    whole = {"state_dict": {"w": torch.ones(300)}, "optimizer": {"state": {}, "param_groups": []}}
    write(tmp_path, "best_coco_bbox_mAP_epoch_3.pth", "epoch_2.pth")
    torch.save(whole, tmp_path / "epoch_3.pth")
    assert newest(tmp_path) == "epoch_3.pth"
    os.truncate(tmp_path / "best_coco_bbox_mAP_epoch_3.pth", 1_000)
    assert newest(tmp_path) == "epoch_3.pth"


@pytest.mark.parametrize("name", ["step_10/weights.xyz", "model.tflite", "checkpoint-30"])
def test_what_may_be_a_checkpoint_of_another_format_stops_a_launch(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x01\x02 of nobody's")
    done = Finished("fsck", tmp_path, "--newest-whole")
    assert done.status == 2
    assert "has no format that fsck knows" in done.err


@pytest.mark.parametrize(
    "name", ["config.yaml", "events.out.tfevents.1.model", "step_5/sample.png", "logs/run.log"]
)
def test_a_run_that_has_saved_nothing_starts_anew(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x: 1")
    assert Finished("fsck", tmp_path, "--newest-whole").status == 1


def test_an_average_of_several_is_no_step(tmp_path: Path) -> None:
    write(tmp_path, "epoch_1.pt", "epoch_2.pt", "avg_5.pt")
    assert newest(tmp_path) == "epoch_2.pt"


def test_what_an_evaluation_found_is_not_resumed_from(tmp_path: Path) -> None:
    write(tmp_path, "checkpoint.pth", "checkpoint0003.pth", "eval/000.pth", "eval/latest.pth")
    assert newest(tmp_path) == "checkpoint0003.pth"


def test_a_step_of_nanotron_counts_its_ranks_from_zero(tmp_path: Path) -> None:
    for step in (10, 20):
        at = tmp_path / str(step)
        write(at, "model/0/model_weight.safetensors", "random/tp-0-of-2_pp-0-of-1.pt")
        write(at, "random/tp-1-of-2_pp-0-of-1.pt", "optimizer/optimizer_dp-0-of-1.pt")
        (at / "checkpoint_metadata.json").write_text("{}")
    assert newest(tmp_path) == "20"
    (tmp_path / "20" / "optimizer" / "optimizer_dp-0-of-1.pt").rename(tmp_path / "gone")
    assert newest(tmp_path) == "10"


def test_a_run_with_a_note_of_that_name_is_no_step_of_nanotron(tmp_path: Path) -> None:
    write(tmp_path, "best/model.pt", "last/model.pt")
    (tmp_path / "checkpoint_metadata.json").write_text("{}")
    assert sorted(reports(tmp_path)) == ["best/model.pt", "last/model.pt"]


def test_a_step_of_nemo_is_the_folder_around_its_weights(tmp_path: Path) -> None:
    for step in (19, 29):
        at = tmp_path / f"model--val_loss=3.30-step={step}-consumed_samples=240.0"
        write(at, "weights/model.safetensors")
        (at / "context").mkdir()
        (at / "context" / "io.json").write_text("{}")
    assert "step=29" in newest(tmp_path)
    assert newest(tmp_path).endswith("240.0")


def pipeline(run: Path) -> None:
    write(run, "unet/diffusion_pytorch_model.safetensors", "vae/model.safetensors")
    parts = {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
    index = {"_class_name": "Pipeline", **parts, "safety_checker": [None, None], "fast": True}
    (run / "model_index.json").write_text(json.dumps(index))
    for part in parts:
        (run / part / "config.json").write_text("{}")


def test_a_pipeline_of_diffusers_is_one_checkpoint(tmp_path: Path) -> None:
    pipeline(tmp_path / "pipe")
    assert newest(tmp_path) == "pipe"
    shutil.rmtree(tmp_path / "pipe" / "vae")
    report = reports(tmp_path)["pipe"]
    assert report.state is State.INCOMPLETE
    assert [one.file for one in report.findings] == ["vae/"]


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("vae/model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
        ("vae/config.json", "vae/config.json"),
    ],
)
def test_a_part_of_a_pipeline_needs_weights_and_what_says_of_which_model_they_are(
    gone: str, told: str, tmp_path: Path
) -> None:
    pipeline(tmp_path / "pipe")
    (tmp_path / "pipe" / gone).unlink()
    report = reports(tmp_path)["pipe"]
    assert report.state is State.INCOMPLETE
    assert [one.file for one in report.findings if one.kind is Kind.MISSING] == [told]


def test_a_pipeline_without_any_weights_is_incomplete(tmp_path: Path) -> None:
    index = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    (report,) = judge(tmp_path).reports
    assert report.state is State.INCOMPLETE
    assert "unet/" in {one.file for one in report.findings}


def test_a_pipeline_with_steps_of_its_training_in_it_is_a_run(tmp_path: Path) -> None:
    pipeline(tmp_path)
    for step in (500, 1000):
        write(tmp_path / f"checkpoint-{step}", "model.safetensors", "optimizer.bin")
    assert newest(tmp_path) == "checkpoint-1000"


def speechbrain(folder: Path, at: int) -> None:
    write(folder, "model.ckpt", "optimizer.ckpt")
    (folder / "CKPT.yaml").write_text(f"end-of-epoch: true\nunixtime: {at}\n")
    (folder / "brain.ckpt").write_text("avg_train_loss: 0.5\nstep: 10\n")
    (folder / "counter.ckpt").write_text(str(at))
    for path in folder.iterdir():
        os.utime(path, (at, at))


def test_counters_of_speechbrain_are_texts(tmp_path: Path) -> None:
    speechbrain(tmp_path / "CKPT+2026-01-01+10-00-00+00", 1)
    speechbrain(tmp_path / "CKPT+2026-01-01+11-00-00+00", 2)
    os.utime(tmp_path / "CKPT+2026-01-01+10-00-00+00", (1, 1))
    assert newest(tmp_path) == "CKPT+2026-01-01+11-00-00+00"
    (tmp_path / "CKPT+2026-01-01+11-00-00+00" / "counter.ckpt").write_bytes(b"")
    assert newest(tmp_path) == "CKPT+2026-01-01+10-00-00+00"


def test_steps_of_plain_pickles_are_judged(tmp_path: Path) -> None:
    for step in (10, 20):
        at = tmp_path / f"checkpoint_{step:06d}"
        at.mkdir()
        state = {"step": step, "weights": np.full(300, float(step))}
        (at / "algorithm_state.pkl").write_bytes(pickle.dumps(state))
    assert newest(tmp_path) == "checkpoint_000020"
    path = tmp_path / "checkpoint_000020" / "algorithm_state.pkl"
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 3, 0):
        path.write_bytes(whole[:cut])
        assert newest(tmp_path) == "checkpoint_000010", cut


def test_a_pickle_of_metrics_makes_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metrics.pkl").write_bytes(pickle.dumps({"loss": [1.0]}))
    (tmp_path / "params_100.pkl").write_bytes(pickle.dumps({"w": np.ones(3)}))
    assert list(reports(tmp_path)) == ["params_100.pkl"]


@pytest.mark.parametrize("name", ["config.yaml", "notes.txt", "HEAD", "args"])
@pytest.mark.parametrize("text", ["run_name: x\nseed: 1\n", "ref: refs/heads/main\n", "q: y.\n"])
def test_a_text_that_begins_as_a_pickle_may_is_none(text: str, name: str, tmp_path: Path) -> None:
    write(tmp_path / "step_10", "model.pt")
    (tmp_path / "step_10" / name).write_text(text)
    (report,) = reports(tmp_path).values()
    assert report.state is State.WHOLE, report.findings


@pytest.mark.parametrize("name", ["config", "config.txt", "x.yaml.bak", "train.cfg", "run.conf"])
def test_tags_of_yaml_are_seen_in_any_text(name: str, tmp_path: Path) -> None:
    write(tmp_path / "step_10", "model.pt")
    (tmp_path / "step_10" / name).write_text("a: !!python/object/apply:os.system ['id']\n")
    (report,) = reports(tmp_path).values()
    assert report.state is State.UNSAFE


@pytest.mark.parametrize("lost", ["data.pt", "optimizer.pt", "model.pt"])
def test_the_newest_step_with_fewer_files_is_passed_over(lost: str, tmp_path: Path) -> None:
    """It is whole as far as anybody knows; a run resumes from the one before."""
    for step in (10, 20, 30):
        write(tmp_path / f"step_{step}", "data.pt", "model.pt", "optimizer.pt")
    (tmp_path / "step_30" / lost).unlink()
    judged = judge(tmp_path)
    assert [one.state for one in judged.reports] == [State.WHOLE] * 3
    assert [one.topic for one in judged.reports[0].findings] == [Topic.FEWER_FILES]
    assert newest(tmp_path) == "step_20"
    assert judged.newest_whole is judged.reports[1]
    for step in (10, 20):
        os.truncate(tmp_path / f"step_{step}" / "data.pt", 100)
    assert newest(tmp_path) == "step_30"  # no other is whole


def test_the_first_files_of_a_library_are_not_all_of_a_step(tmp_path: Path) -> None:
    """GPT-NeoX: without the states of DeepSpeed nothing tells whose the layers are."""
    names = [f"layer_0{at}-model_00-model_states.pt" for at in (0, 1)]
    for step in (10, 20, 30):
        write(tmp_path / f"global_step{step}", *names, "mp_rank_00_model_states.pt")
    (tmp_path / "global_step30" / "mp_rank_00_model_states.pt").unlink()
    assert newest(tmp_path) == "global_step20"
    assert reports(tmp_path)["global_step30"].state is State.WHOLE


def test_what_the_trainer_leaves_in_the_folder_of_a_run_is_no_step(tmp_path: Path) -> None:
    """LLaMA-Factory: the adapter of the last step lies beside the steps, without an optimizer."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for name in ("checkpoint-20", "checkpoint-30", "."):
        at = tmp_path / name
        write(at, "adapter_model.safetensors")
        (at / "adapter_config.json").write_text("{}")
        (at / "trainer_state.json").write_text(json.dumps({"global_step": int(name[11:] or 30)}))
        torch.save({}, at / "training_args.bin")
        if name != ".":
            torch.save(optimizer.state_dict(), at / "optimizer.pt")
            write(at, "scheduler.pt", "rng_state.pth")
    assert newest(tmp_path) == "checkpoint-30"
    os.truncate(tmp_path / "checkpoint-30" / "adapter_model.safetensors", 100)
    assert newest(tmp_path) == "checkpoint-20"


def test_an_optimizer_alone_is_what_is_left_of_a_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for at, name in enumerate(("best", "last")):
        write(tmp_path / name, "model.pt")
        torch.save(optimizer.state_dict(), tmp_path / name / "optimizer.pt")
        os.utime(tmp_path / name, (at, at))
    assert newest(tmp_path) == "last"
    (tmp_path / "last" / "model.pt").unlink()
    assert newest(tmp_path) == "best"
    (tmp_path / "best" / "model.pt").unlink()
    assert newest(tmp_path) in {"best/optimizer.pt", "last/optimizer.pt"}


def test_what_is_lost_beside_a_dcp_is_seen_by_the_steps_before(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / f"step_{step}" / "weights")
        write(tmp_path / f"step_{step}", "train_dataloader.pt")
    assert newest(tmp_path) == "step_30"
    (tmp_path / "step_30" / "train_dataloader.pt").unlink()
    assert newest(tmp_path) == "step_20"


def test_of_two_steps_a_role_that_is_gone_tells(tmp_path: Path) -> None:
    for step in (10, 20):
        write(tmp_path / f"step_{step}", "data.pt", "model.pt", "optimizer.pt")
    (tmp_path / "step_20" / "data.pt").unlink()
    assert newest(tmp_path) == "step_20"
    (tmp_path / "step_20" / "optimizer.pt").unlink()
    assert newest(tmp_path) == "step_10"


def test_a_newest_step_of_another_layout_is_believed(tmp_path: Path) -> None:
    for step in (10, 20):
        write(tmp_path / f"step_{step}", "model.pt", "optimizer.pt")
    write(tmp_path / "step_30", "all.pt")
    assert newest(tmp_path) == "step_30"


@pytest.mark.parametrize("name", ["weights.0{}-0.50.keras", "cp-000{}.weights.h5"])
def test_names_of_keras_say_epochs(name: str, tmp_path: Path) -> None:
    write(tmp_path, name.format(1), name.format(2))
    assert {one.step for one in judge(tmp_path).reports} == {1, 2}


def test_one_shard_of_one_needs_its_index(tmp_path: Path) -> None:
    write(tmp_path / "step_10", "model-00001-of-00001.safetensors")
    (tmp_path / "step_10" / "config.json").write_text('{"model_type": "llama"}')
    (report,) = reports(tmp_path).values()
    assert [(one.kind, one.file) for one in report.findings] == [
        (Kind.MISSING, "model.safetensors.index.json")
    ]


def test_folders_with_an_epoch_beside_the_step_are_steps_of_one_run(tmp_path: Path) -> None:
    """Lightning's strategies that save a folder: `epoch=1-step=10.ckpt/`, with a DCP in it."""
    names = [f"epoch={at}-step={at}0-val_loss=0.{at}.ckpt" for at in (1, 2, 3)]
    for name in names:
        dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / name)
        write(tmp_path / name, "meta.pt")
    assert newest(tmp_path) == names[2]
    (tmp_path / names[2] / "meta.pt").unlink()
    assert newest(tmp_path) == names[1]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_full(path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def write_weights(path: Path) -> None:
    model, _ = trained()
    if path.suffix == ".safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)


@pytest.mark.parametrize("export", ["final_iteration=30.pt", "export-step30.safetensors"])
def test_weights_alone_are_passed_over_where_an_older_one_has_an_optimizer(
    export: str, tmp_path: Path
) -> None:
    """Of MONAI, kohya, diffusion-pipe: a run resumes from the state, and not from the export."""
    for step in (10, 20):
        write_full(tmp_path / f"checkpoint_iteration={step}.pt")
    write_weights(tmp_path / export)
    assert newest(tmp_path) == "checkpoint_iteration=20.pt"
    judged = judge(tmp_path)
    assert judged.newest_whole is judged.reports[1]
    assert [one.topic for one in judged.reports[0].findings] == [Topic.WEIGHTS_ALONE]
    assert judged.reports[0].state is State.WHOLE
    os.truncate(tmp_path / "checkpoint_iteration=20.pt", 100)
    assert newest(tmp_path) == "checkpoint_iteration=10.pt"
    os.truncate(tmp_path / "checkpoint_iteration=10.pt", 100)
    assert newest(tmp_path) == export, "no other is whole"


def test_weights_alone_beside_no_optimizer_are_what_there_is(tmp_path: Path) -> None:
    for step in (10, 20):
        write_weights(tmp_path / f"step_{step}.pt")
    (judged,) = (one for one in judge(tmp_path).reports if one.step == 20)
    assert not judged.findings
    assert newest(tmp_path) == "step_20.pt"


def test_a_dcp_with_an_optimizer_comes_before_its_export(tmp_path: Path) -> None:
    for step in (10, 20):
        tensors = {"model.w": torch.ones(9), "optimizer.state.w.exp_avg": torch.ones(9)}
        dcp.save(tensors, checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-20-hf").mkdir()
    write_weights(tmp_path / "step-20-hf" / "model.safetensors")
    os.utime(tmp_path / "step-20-hf", (1 << 32, 1 << 32))
    assert newest(tmp_path) == "step-20"
    os.truncate(tmp_path / "step-20" / "__0_0.distcp", 100)
    assert newest(tmp_path) == "step-10"


def test_shards_of_a_run_know_of_weights_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_full(run / "step_10.pt")
    write_weights(run / "step_20.pt")
    for number in (1, 2):
        part = str(tmp_path / f"{number}.jsonl")
        assert Finished("fsck", str(run), "--shard", f"{number}/2", "--results", part).status == 0
    done = Finished("combine", str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl"))
    assert "others hold more: step_20.pt" in done.out
    assert str(run / "step_10.pt") in done.out.splitlines()[-1]


@pytest.mark.parametrize("lost", RANKS)
def test_of_the_ranks_of_picotron_one_is_missing(lost: str, tmp_path: Path) -> None:
    """A number of two digits names no step for sure: the files say how many there are."""
    for step in (10, 20):
        write(tmp_path / str(step), *RANKS)
    (tmp_path / "20" / lost).unlink()
    assert newest(tmp_path) == "10"
    assert {one.state for one in judge(tmp_path).reports} == {State.WHOLE, State.INCOMPLETE}
