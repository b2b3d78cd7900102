"""The reference manager brings back what it saved, bit for bit, and goes on as if never stopped."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference_job import KINDS, Job, Quick, listing, resume, same, save

from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointMismatch,
    CheckpointNotFound,
    SaveRefused,
)


@KINDS
def test_resume_weights_exact_match(tmp_path: Path, kind: str) -> None:
    """Every weight comes back as it was saved, with no tolerance (M021, K008)."""
    job = Job()
    job.train(3)
    save(tmp_path, job, 3, kind)
    saved = job.state()
    other, result = resume(tmp_path)
    assert same(other.state(), saved)
    assert (result.step, result.tokens_seen, result.extra) == (3, 300, {"phase": 3})
    assert (result.refused, result.cold) == ([], [])


@KINDS
def test_a_run_that_resumes_twice_is_the_run_that_never_stopped(tmp_path: Path, kind: str) -> None:
    """Losses and state of a run broken twice are those of an unbroken one (K008, H13, H14)."""
    whole = Job()
    losses = whole.train(9)
    job = Job()
    broken = job.train(3)
    for step in (3, 6):
        save(tmp_path, job, step, kind)
        job, result = resume(tmp_path, seed=step)
        assert result.step == step
        broken += job.train(3)
    assert broken == losses
    assert same(job.state(), whole.state())


@KINDS
def test_identity_of_live_objects_is_kept(tmp_path: Path, kind: str) -> None:
    """Parameters, buffers and stateful objects stay the same objects (J03)."""
    job = Job()
    job.train(1)
    save(tmp_path, job, 1, kind)
    other = Job(5)
    before = [id(one) for one in (*other.model.parameters(), *other.model.buffers())]
    places = [one.data_ptr() for one in other.model.parameters()]
    CheckpointManager(tmp_path).load(**other.parts)
    assert [id(one) for one in (*other.model.parameters(), *other.model.buffers())] == before
    assert [one.data_ptr() for one in other.model.parameters()] == places
    assert other.model.head.weight is other.model.embed.weight
    assert other.scheduler.optimizer is other.optimizer


@KINDS
def test_save_has_no_side_effects(tmp_path: Path, kind: str) -> None:
    """A save draws from no generator, steps nothing, initialises nothing (G02, G15)."""
    job = Job()
    job.model.eval()
    before = job.state()
    save(tmp_path, job, 0, kind)
    assert same(job.state(), before)
    assert not job.optimizer.state
    assert not job.model.training
    assert all(one.grad is None for one in job.model.parameters())
    job.model.train()
    assert job.train(3) == Job().train(3)


@KINDS
def test_load_leaves_nothing_behind_that_leads_to_the_file(tmp_path: Path, kind: str) -> None:
    """No mapping, no open file: overwriting the checkpoint changes nothing in memory (O06)."""
    job = Job()
    job.train(2)
    save(tmp_path, job, 2, kind)
    other, _ = resume(tmp_path)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not any(
        str(tmp_path) in str(link.readlink())
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    )
    saved = other.state()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff" * path.stat().st_size)
    assert same(other.state(), saved)


def test_per_rank_files_load_with_plain_torch(tmp_path: Path) -> None:
    """`torch.load(weights_only=True)` opens every .pt file, ties kept (M001, M006)."""
    job = Job()
    job.train(2)
    path = save(tmp_path, job, 200)
    assert path == tmp_path / "model_000200.pt"
    assert set(listing(tmp_path)) == {
        "run_id",
        "latest",
        "model_000200.pt",
        "optim_000200_rank0.pt",
        "extra_000200.pt",
        "meta_000200.json",
    }
    model = torch.load(path, weights_only=True)
    assert isinstance(model, OrderedDict)
    assert same(dict(model), dict(job.model.state_dict()))
    assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()
    Job(3).model.load_state_dict(model)
    extra = torch.load(tmp_path / "extra_000200.pt", weights_only=True)
    assert (extra["step"], extra["tokens_seen"], extra["extra"]) == (200, 20000, {"phase": 200})
    optimizers = torch.load(tmp_path / "optim_000200_rank0.pt", weights_only=True)
    assert same(optimizers["optimizer"]["state"], job.optimizer.state_dict()["state"])


def test_dcp_directory_loads_with_stock_dcp(tmp_path: Path) -> None:
    """Stock `dcp.load` reads model and optimizer state from the directory (M002)."""
    job = Job()
    job.train(2)
    path = save(tmp_path, job, 200, "dcp")
    assert path == tmp_path / "dcp_000200"
    assert {one.name for one in path.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "extra_state.pt",
        "meta.json",
    }
    model = {key: value for key, value in Job(1).model.state_dict().items() if key[0] != "_"}
    model.pop("_extra_state", None)
    wanted = {
        "model": model,
        "optimizer": {
            "state": {
                pid: {key: torch.empty_like(value) for key, value in state.items()}
                for pid, state in job.optimizer.state_dict()["state"].items()
            }
        },
    }
    dcp.load(wanted, checkpoint_id=path)
    assert all(same(value, job.model.state_dict()[key]) for key, value in model.items())
    assert same(wanted["optimizer"]["state"], job.optimizer.state_dict()["state"])


@KINDS
def test_several_optimizers_and_schedulers_by_name(tmp_path: Path, kind: str) -> None:
    """Each of several optimizers and schedulers gets its own state back (M043)."""

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 3)
        optimizers = {
            "adam": torch.optim.AdamW([model.weight]),
            "sgd": torch.optim.SGD([model.bias], lr=0.1, momentum=0.9),
        }
        model(torch.ones(3)).sum().backward()
        schedulers = {
            name: torch.optim.lr_scheduler.StepLR(one, 1) for name, one in optimizers.items()
        }
        for _ in range(seed):
            for name, one in optimizers.items():
                one.step()
                schedulers[name].step()
        return {"model": model, "optimizers": optimizers, "scheduler": schedulers}

    job, other = build(2), build(5)
    Quick(tmp_path, use_dcp=kind == "dcp").save(2, **job)
    result = CheckpointManager(tmp_path).load(**other)
    assert result.cold == []
    for part in ("optimizers", "scheduler"):
        for name in ("adam", "sgd"):
            assert same(other[part][name].state_dict(), job[part][name].state_dict())


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"logger": logging.getLogger("x")}, "extra.logger is a logging.Logger"),
        ({"a": [1, {"path": Path("x")}]}, "extra.a.1.path is a pathlib.PosixPath"),
        ({"array": np.zeros(2)}, "extra.array is a numpy.ndarray"),
        ({"set": {frozenset()}}, "extra.set.frozenset() is a builtins.frozenset"),
        ({"huge": 1 << 5000}, "extra.huge is a builtins.int"),
        ({"sparse": torch.eye(2).to_sparse()}, "extra.sparse is a torch.Tensor"),
        ({"meta": torch.empty(2, device="meta")}, "extra.meta is a torch.Tensor"),
        ({"step": 9}, "extra has the reserved keys ['step']"),
    ],
)
def test_save_refuses_by_key_and_type_before_it_writes(
    tmp_path: Path, extra: dict[str, Any], named: str
) -> None:
    """What a safe load would refuse is refused at save; nothing is written (K017, KX4, M01)."""
    root = tmp_path / "root"
    with pytest.raises(SaveRefused) as caught:
        Quick(root).save(1, model=torch.nn.Linear(1, 1), extra=extra)
    assert named in str(caught.value)
    assert not root.exists()


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    """A cycle in a state ends in a clear error, not in a recursion (K017)."""
    extra: dict[str, Any] = {}
    extra["self"] = extra
    with pytest.raises(SaveRefused, match="holds itself"):
        Quick(tmp_path).save(1, model=torch.nn.Linear(1, 1), extra=extra)


def test_config_must_be_json() -> None:
    """A config that JSON would change is refused by key (M037)."""
    with pytest.raises(SaveRefused, match=r"config\.layers\.0 is a PosixPath"):
        CheckpointManager("x", config={"layers": [Path("a")]})


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), torch.float8_e4m3fn])  # noqa: FBT003
    | st.sampled_from([torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 2), torch.arange(3)])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.just("__ckpt__")
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, database=None)
@given(
    extra=st.dictionaries(st.text(max_size=5), TREES, max_size=4),
    kind=st.sampled_from(["model", "dcp"]),
)
def test_any_tree_of_plain_values_comes_back(
    tmp_path_factory: pytest.TempPathFactory, extra: dict[str, Any], kind: str
) -> None:
    """Types, bits and order of a nested `extra` survive, whatever its keys are (M024, J02)."""
    root = tmp_path_factory.mktemp("tree")
    model = torch.nn.Linear(1, 1)
    for key in ("step", "tokens_seen", "rng", "scheduler", "dataloader", "train_state_version"):
        extra.pop(key, None)
    Quick(root, use_dcp=kind == "dcp").save(1, model=model, extra=extra)
    assert repr(CheckpointManager(root).load(model=model).extra) == repr(extra)


@KINDS
@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "dtype", "tie"])
def test_a_model_that_does_not_fit_is_refused_untouched(
    tmp_path: Path, kind: str, damage: str
) -> None:
    """Keys, shapes, dtypes and ties are compared before a byte is written (J01, J04, J05, S01)."""
    job = Job()
    save(tmp_path, job, 1, kind)
    other = Job(4)
    changes = {
        "missing": lambda: setattr(other.model, "more", torch.nn.Linear(1, 1)),
        "unexpected": lambda: delattr(other.model, "frozen"),
        "shape": lambda: setattr(other.model, "unused", torch.nn.Parameter(torch.zeros(5))),
        "dtype": lambda: setattr(
            other.model, "scalar", torch.nn.Parameter(torch.tensor(1.0).half())
        ),
        "tie": lambda: setattr(
            other.model.head, "weight", torch.nn.Parameter(other.model.head.weight.detach().clone())
        ),
    }
    changes[damage]()
    before = other.state()
    with pytest.raises(CheckpointMismatch):
        CheckpointManager(tmp_path).load(**other.parts)
    assert same(other.state(), before)


@KINDS
def test_components_on_one_side_only_are_refused(tmp_path: Path, kind: str) -> None:
    """A saved component without a destination, and the reverse, are errors (G13, H10)."""
    job = Job()
    save(tmp_path, job, 1, kind)
    manager = CheckpointManager(tmp_path)
    parts = job.parts
    with pytest.raises(CheckpointMismatch, match=r"not asked for \['scheduler'\]"):
        manager.load(**{**parts, "scheduler": None})
    with pytest.raises(CheckpointMismatch, match=r"not saved \['stateful/scaler'\]"):
        manager.load(**{**parts, "stateful": {**parts["stateful"], "scaler": Loader()}})
    result = manager.load(model=job.model, allow_missing=FAMILIES)
    assert (result.step, result.cold) == (1, [])


FAMILIES = {"optimizer", "scheduler", "dataloader", "average"}


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    """A step is a count: a name made from a negative one would not be found again."""
    with pytest.raises(ValueError, match="counts"):
        Quick(tmp_path).save(-1, model=torch.nn.Linear(1, 1))


def test_nothing_on_disk_is_not_found(tmp_path: Path) -> None:
    """The one case in which a job may start at step 0; and a load creates nothing (B08)."""
    job = Job()
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFound):
            CheckpointManager(root).load(**job.parts)
    assert CheckpointManager(tmp_path).steps() == []
    assert list(tmp_path.iterdir()) == []
