"""Train state, generators, rehydration and import of foreign checkpoints."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_reference_job import KINDS, Job, Loader, Quick, listing, resume, same, save

from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointNotFound,
    SaveRefused,
    build_train_state,
    get_rng_state,
    import_unverified,
    patch_missing_config_keys,
    rehydrate,
    restore_train_state,
    set_rng_state,
)
from ckpt_conformance.reference_impl.dcp_format import Chunk, check_coverage

if TYPE_CHECKING:
    from pathlib import Path


def draws() -> list[float]:
    """One number of each generator, a gaussian too: they keep half of a pair."""
    return [
        random.random(),  # noqa: S311 - the job's own generators
        random.gauss(0, 1),
        float(np.random.rand()),  # noqa: NPY002
        float(np.random.randn()),  # noqa: NPY002
        torch.rand(1).item(),
        torch.randn(1).item(),
    ]


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """Four generators with their pending gaussians, through a file (K004, K007, E01, E05)."""
    draws()
    state = get_rng_state()
    expected = [draws() for _ in range(3)]
    torch.save(state, tmp_path / "rng.pt")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(123)
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draws() for _ in range(3)] == expected
    assert set(state) - {"torch_cuda"} == {"python", "numpy", "torch_cpu"}
    assert ("torch_cuda" in state) == torch.cuda.is_available()


def test_taking_the_state_draws_nothing() -> None:
    """A snapshot leaves every generator where it was (G02)."""
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate()
    get_rng_state()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("part", ["python", "numpy", "torch_cpu"])
@pytest.mark.parametrize("damage", ["missing", "malformed"])
def test_a_generator_that_cannot_be_restored_is_an_error(part: str, damage: str) -> None:
    """It is never a log line, and then no generator is changed at all (E05, E06)."""
    state = get_rng_state()
    state.pop(part) if damage == "missing" else state.update({part: "nonsense"})
    before = get_rng_state()
    draws_before = torch.get_rng_state()
    with pytest.raises(CheckpointDamaged, match="generators"):
        set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), draws_before)
    assert same(get_rng_state(), before)


def test_another_numpy_generator_is_refused() -> None:
    """Only MT19937 has the documented form (K004)."""
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(SaveRefused, match="MT19937"):
            get_rng_state()
    finally:
        np.random.set_bit_generator(original)


def test_train_state_has_the_documented_keys() -> None:
    """The keys, the triple, and a namespace for extra (K002, K003, K014-K016, KX4)."""
    job = Job()
    job.train(3)
    state = build_train_state(3, 300, job.scheduler, job.loader, {"phase_idx": 1, "run": "x"})
    keys = {"step", "tokens_seen", "rng", "scheduler", "dataloader", "extra"}
    assert keys <= set(state)
    other = Job(7)
    assert restore_train_state(state, other.scheduler, other.loader) == (
        3,
        300,
        {"phase_idx": 1, "run": "x"},
    )
    assert same(other.scheduler.state_dict(), job.scheduler.state_dict())
    assert other.loader.state_dict() == job.loader.state_dict()
    assert "scheduler" not in build_train_state(0, 0)


def test_the_flat_form_is_accepted_on_read() -> None:
    """`extra` merged at the top, as the document shows it (KX4, K015)."""
    state = {
        "step": 5,
        "tokens_seen": 50,
        "rng": get_rng_state(),
        "phase_idx": 2,
        "wandb_run_id": "a",
    }
    assert restore_train_state(state) == (5, 50, {"phase_idx": 2, "wandb_run_id": "a"})


@pytest.mark.parametrize("key", ["step", "tokens_seen", "rng", "scheduler", "dataloader"])
def test_a_reserved_key_in_extra_is_an_error(key: str) -> None:
    """A user's key never replaces state (KX4)."""
    with pytest.raises(SaveRefused, match=key):
        build_train_state(1, 1, extra={key: 999})


@pytest.mark.parametrize("key", ["step", "rng", "scheduler", "dataloader"])
def test_a_train_state_with_a_hole_is_refused(key: str) -> None:
    """Never step 0 with trained weights: what is asked for has to be there (KX5, B06)."""
    job = Job()
    state = build_train_state(3, 3, job.scheduler, job.loader)
    del state[key]
    with pytest.raises(CheckpointDamaged, match=key):
        restore_train_state(state, job.scheduler, job.loader)


def test_a_loader_of_length_zero_is_restored() -> None:
    """What counts is that a component was passed, not whether it is true (K013)."""

    class Falsy(Loader):
        def __len__(self) -> int:
            return 0

    one = Falsy()
    one.position = 8
    state = build_train_state(1, 1, dataloader=one)
    other = Falsy()
    restore_train_state(state, dataloader=other)
    assert other.position == 8


@KINDS
def test_extra_state_round_trip(tmp_path: Path, kind: str) -> None:
    """Nested extra, tokens, scheduler and position come back with their types (M024)."""
    job = Job()
    job.train(5)
    extra = {"a": [1, 2.5, None, True, (1, "x")], "t": torch.arange(3), "n": {"k": np.int64(4)}}
    manager = Quick(tmp_path, use_dcp=kind == "dcp")
    manager.save(5, **job.parts, tokens_seen=10**15, extra=extra)
    other = Job(3)
    result = manager.load(**other.parts)
    assert (result.tokens_seen, type(result.extra["n"]["k"])) == (10**15, np.int64)
    assert same(result.extra, extra)
    assert same(other.scheduler.state_dict(), job.scheduler.state_dict())


@KINDS
def test_resume_preserves_training_step(tmp_path: Path, kind: str) -> None:
    """A load changes no byte on disk, the step in the manifest least of all (M022)."""
    save(tmp_path, Job(), 37812, kind)
    before = listing(tmp_path)
    assert resume(tmp_path)[1].step == 37812
    assert listing(tmp_path) == before


@KINDS
@pytest.mark.parametrize(
    "build",
    [
        lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step),
        lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
        lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=1),
        lambda one: torch.optim.lr_scheduler.MultiStepLR(one, [2, 4]),
        lambda one: torch.optim.lr_scheduler.SequentialLR(
            one,
            [
                torch.optim.lr_scheduler.LinearLR(one, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(one, 0.5),
            ],
            [3],
        ),
    ],
    ids=["lambda", "warm_restarts", "plateau", "multi_step", "sequential"],
)
def test_schedulers_go_on(tmp_path: Path, kind: str, build: Any) -> None:  # noqa: ANN401
    """Learning rates after a resume are those of the unbroken run (K010, F01, F02, F08, F09)."""

    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
        return model, optimizer, build(optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:  # noqa: ANN401
        found: list[float] = []
        for step in range(steps):
            optimizer.step()
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[float(step)] if plateau else [])
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = job()
    rates(optimizer, scheduler, 2)
    manager = Quick(tmp_path, use_dcp=kind == "dcp")
    manager.save(2, model=model, optimizers=optimizer, scheduler=scheduler)
    expected = rates(optimizer, scheduler, 5)
    for _ in range(3):  # three resumes without training in between leave the position alone
        model, optimizer, scheduler = job()
        manager.load(model=model, optimizers=optimizer, scheduler=scheduler)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert rates(optimizer, scheduler, 5) == expected


def test_patch_missing_config_keys() -> None:
    """Newer features are off in an old checkpoint's config; what is there stays (M037)."""
    old = {"layers": 3, "mamba_enabled": True}
    assert patch_missing_config_keys(old) == {
        "layers": 3,
        "mamba_enabled": True,
        "engram_enabled": False,
        "dsa_enabled": False,
    }
    assert old == {"layers": 3, "mamba_enabled": True}


@pytest.mark.parametrize("same_root", [True, False])
def test_rehydrate(tmp_path: Path, same_root: bool) -> None:  # noqa: FBT001
    """A DCP checkpoint becomes per-rank files that resume to the same state (M045, M046)."""
    job = Job()
    job.train(3)
    path = save(tmp_path / "run", job, 3, "dcp", config={"layers": 2})
    before = listing(tmp_path / "run")
    target = tmp_path / "run" if same_root else tmp_path / "export"
    reference = rehydrate(path, target)
    assert (reference.step, reference.kind, reference.directory) == (3, "model", target)
    model = torch.load(target / "model_000003.pt", weights_only=True)
    assert same(dict(model), dict(job.model.state_dict()))
    assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()
    other, result = resume(target, require_kind="model")
    assert same(other.state(), job.state())
    assert (result.tokens_seen, result.extra) == (300, {"phase": 3})
    assert before.items() <= listing(tmp_path / "run").items()


def test_rehydrate_verifies(tmp_path: Path) -> None:
    """A damaged directory, or another kind, is not exported (M045)."""
    path = save(tmp_path / "run", Job(), 3, "dcp")
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-5] + b"xxxxx")
    with pytest.raises(CheckpointDamaged):
        rehydrate(path, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    with pytest.raises(CheckpointNotFound):
        rehydrate(save(tmp_path / "flat", Job(), 3), tmp_path / "export")


def test_import_of_a_foreign_dcp_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock DCP output is read on request, said to be unverified, and never discovered (VX5)."""
    path = tmp_path / "dist_ckpt_000012"
    state = {"model": {"w": torch.randn(3, 4), "t": torch.randn(4, 3).t()}, "epoch": 4}
    dcp.save(state, checkpoint_id=path)
    torch.save({"step": 12, "phase": 1}, path / "train_state.pt")
    (path / "metadata.json").write_text('{"step": 12}')
    found = import_unverified(path)
    assert (found.step, found.meta) == (12, {"step": 12})
    assert same(found.state["model.w"], state["model"]["w"])
    assert torch.equal(found.state["model.t"], state["model"]["t"])
    assert found.state["epoch"] == 4
    assert found.train_state == {"step": 12, "phase": 1}
    assert "UNVERIFIED" in caplog.text
    assert CheckpointManager(tmp_path).steps() == []
    with pytest.raises(CheckpointDamaged):
        resume(tmp_path)


def test_import_of_foreign_per_rank_files(tmp_path: Path) -> None:
    """Unpadded names, files of several ranks, the sidecars of the source (M001, MX9)."""
    model, optim = {"w": torch.ones(2)}, {"state": {}, "param_groups": []}
    torch.save({"w": torch.zeros(2)}, tmp_path / "model_000100.pt")
    torch.save(model, tmp_path / "model_200.pt")
    for rank in range(2):
        torch.save(optim, tmp_path / f"optim_200_rank{rank}.pt")
    torch.save({"step": 200}, tmp_path / "extra_000200.pt")
    (tmp_path / "meta_000200.json").write_text('{"step": 200}')
    found = import_unverified(tmp_path)
    assert set(found.state) == {"model_200.pt", "optim_200_rank0.pt", "optim_200_rank1.pt"}
    assert same(found.state["model_200.pt"], model)
    assert (found.step, found.train_state, found.meta) == (200, {"step": 200}, {"step": 200})
    with pytest.raises(CheckpointNotFound):
        import_unverified(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([((0, 0), (2, 4)), ((3, 0), (1, 4))], "cover"),
        ([((0, 0), (3, 4)), ((2, 0), (1, 4))], "overlap"),
        ([((0, 0), (4, 4)), ((4, 0), (1, 4))], "outside"),
        ([((0, 0), (4, 2)), ((0, 3), (4, 2))], "outside"),
        ([((-1, 0), (4, 4))], "outside"),
        ([], "cover"),
    ],
)
def test_chunks_must_cover_a_tensor_once(chunks: list[Any], why: str) -> None:
    """Holes, overlaps and chunks outside are found before anything is written (MX3, I06)."""
    with pytest.raises(CheckpointDamaged, match=why):
        check_coverage("w", (4, 4), tuple(Chunk(*box, "f", 0, 0) for box in chunks))


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 3)), ((2, 3), (2, 1))]),
        ((), [((), ())]),
        ((0, 3), [((0, 0), (0, 3))]),
        ((0, 3), []),
    ],
)
def test_chunks_that_cover_a_tensor_are_fine(shape: tuple[int, ...], chunks: list[Any]) -> None:
    """The control: uneven cuts, 0-dim and empty tensors (I02)."""
    check_coverage("w", shape, tuple(Chunk(*box, "f", 0, 0) for box in chunks))
