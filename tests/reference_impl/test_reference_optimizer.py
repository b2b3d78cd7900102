"""Optimizer state comes back exactly: moments, counters, groups, names, dtypes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_reference_job import KINDS, Job, Quick, resume, same, save

from ckpt_conformance.reference_impl import CheckpointManager, CheckpointMismatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Optimizer = torch.optim.Optimizer


@KINDS
def test_optimizer_round_trip(tmp_path: Path, kind: str) -> None:
    """Moments, steps and groups are those of the save, in their order (M023)."""
    job = Job()
    job.train(4)
    save(tmp_path, job, 4, kind)
    other, _ = resume(tmp_path)
    assert same(other.optimizer.state_dict(), job.optimizer.state_dict())


@KINDS
def test_restores_optimizer_moments_into_fresh_optimizer(tmp_path: Path, kind: str) -> None:
    """A fresh optimizer has no state to fill: it is made from what was saved (G03, J01, K019)."""
    job = Job()
    job.train(3)
    save(tmp_path, job, 3, kind)
    other, _ = resume(tmp_path, trained=0)
    assert same(other.optimizer.state_dict(), job.optimizer.state_dict())
    state = other.optimizer.state
    assert other.model.unused not in state  # it never got a gradient (G04)
    assert [key for key in state if not isinstance(key, torch.Tensor)] == []


@KINDS
def test_state_that_was_never_saved_is_dropped(tmp_path: Path, kind: str) -> None:
    """A parameter without saved state has none after the load, whatever it had (G04, G18)."""
    job = Job()
    save(tmp_path, job, 0, kind)
    other, _ = resume(tmp_path, trained=3)
    assert len(other.optimizer.state) == 0
    assert same(other.optimizer.state_dict(), job.optimizer.state_dict())


DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float64),
]


class Mixed(torch.optim.Optimizer):
    """An optimizer whose moments have a dtype of their own, and a counter that is no tensor."""

    def __init__(self, params: Any, moments: torch.dtype) -> None:  # noqa: ANN401, D107
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99)})
        self.moments = moments

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(one, dtype=self.moments)
                    state["rows"] = torch.zeros(one.shape[0], dtype=self.moments)
                    state["calls"] = 0
                state["step"] += 100_001
                state["calls"] += 1
                state["exp_avg"].add_(torch.rand(one.shape, dtype=torch.float64))
                state["rows"].add_(0.1)


@KINDS
@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize(("parameters", "moments"), DTYPES)
def test_dtype_of_state_is_kept(
    tmp_path: Path, kind: str, parameters: torch.dtype, moments: torch.dtype, trained: int
) -> None:
    """Torch casts state to its parameter's dtype; here every bit stays (K01, K02, K06, G11)."""

    def build(seed: int) -> tuple[torch.nn.Module, Mixed]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(5, 4).to(parameters)
        return model, Mixed(model.parameters(), moments)

    model, optimizer = build(0)
    optimizer.step()
    manager = Quick(tmp_path, use_dcp=kind == "dcp")
    manager.save(1, model=model, optimizers=optimizer)
    other_model, other = build(1)
    for _ in range(trained):
        other.step()
    manager.load(model=other_model, optimizers=other)
    assert same(other.state_dict(), optimizer.state_dict())
    state = other.state[other_model.weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (moments, torch.float32)
    assert state["step"].item() == 100_001
    assert list(state) == ["step", "exp_avg", "rows", "calls"]


@KINDS
def test_every_key_of_a_group_survives(tmp_path: Path, kind: str) -> None:
    """Also keys that a fresh optimizer lacks, and tensors among them (F04, F05)."""
    model = torch.nn.Linear(2, 2)

    def build() -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    optimizer = build()
    optimizer.param_groups[0] |= {
        "initial_lr": 0.7,
        "tag": ("decay", None),
        "scale": torch.tensor([1.0, 2.0]),
        "lr": torch.tensor(0.25),
    }
    manager = Quick(tmp_path, use_dcp=kind == "dcp")
    manager.save(1, model=model, optimizers=optimizer)
    other = build()
    manager.load(model=model, optimizers=other)
    assert same(other.state_dict(), optimizer.state_dict())
    assert other.param_groups[0]["params"][0] is model.weight


def named(model: torch.nn.Module, order: list[list[str]], *, give_names: bool) -> Optimizer:
    """AdamW over groups of parameters, each with a learning rate of its own."""
    known = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [(name, known[name]) if give_names else known[name] for name in names],
            "lr": 0.1 * (1 + min(names).count("1")),
        }
        for names in order
    ]
    return torch.optim.AdamW(groups)


ORDER = [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
REORDERED = [["1.bias", "0.bias"], ["1.weight", "0.weight"]]


@KINDS
@pytest.mark.parametrize("give_names", [True, False])
def test_moments_follow_the_name(tmp_path: Path, kind: str, give_names: bool) -> None:  # noqa: FBT001
    """Groups and parameters in another order: each parameter gets its own moments (G05)."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = named(model, ORDER, give_names=give_names)
    for number, one in enumerate(model.parameters()):
        one.grad = torch.full_like(one, 1.0 + number)
    optimizer.step()
    expected = {name: optimizer.state[one] for name, one in model.named_parameters()}
    manager = Quick(tmp_path, use_dcp=kind == "dcp")
    manager.save(1, model=model, optimizers=optimizer)
    other = named(model, REORDERED, give_names=give_names)
    manager.load(model=model, optimizers=other)
    for name, one in model.named_parameters():
        assert same(dict(other.state[one]), dict(expected[name])), name
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]
    if give_names:
        assert [group["param_names"] for group in other.param_groups] == REORDERED


@pytest.mark.parametrize(
    "order",
    [
        [["0.weight", "1.weight", "0.bias", "1.bias"]],
        [["0.weight", "0.bias"], ["1.weight", "1.bias"]],
        [["0.weight"], ["0.bias", "1.bias"]],
    ],
)
def test_groups_composed_differently_are_refused(tmp_path: Path, order: list[list[str]]) -> None:
    """Which hyper-parameters a moved parameter gets is not for the manager to guess (G05)."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model, optimizers=named(model, ORDER, give_names=False))
    with pytest.raises(CheckpointMismatch, match="group"):
        manager.load(model=model, optimizers=named(model, order, give_names=False))


def test_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Live state of another shape belongs to another optimizer; nothing is touched (J05)."""
    model = torch.nn.Linear(3, 2)
    optimizer = Mixed(model.parameters(), torch.float32)
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model, optimizers=optimizer)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    other = Mixed(model.parameters(), torch.float32)
    other.step()
    other.state[model.weight]["rows"] = torch.zeros(9)
    with pytest.raises(CheckpointMismatch, match="rows"):
        manager.load(model=model, optimizers=other)
    assert torch.equal(model.weight, before + 1)


ALL: list[tuple[str, Callable[[Any], Optimizer]]] = [
    ("sgd", lambda params: torch.optim.SGD(params, lr=0.1)),
    ("momentum", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    ("adam", lambda params: torch.optim.Adam(params, amsgrad=True)),
    ("adamw", torch.optim.AdamW),
    ("adafactor", torch.optim.Adafactor),
    ("adagrad", torch.optim.Adagrad),
    ("nadam", torch.optim.NAdam),
    ("rprop", torch.optim.Rprop),
    ("asgd", torch.optim.ASGD),
    ("lbfgs", lambda params: torch.optim.LBFGS(params, max_iter=2)),
]


@KINDS
@pytest.mark.parametrize("build", [one for _, one in ALL], ids=[name for name, _ in ALL])
def test_the_next_updates_are_the_same(
    tmp_path: Path, kind: str, build: Callable[[Any], Optimizer]
) -> None:
    """After a resume every optimizer of torch goes on as if never stopped (G08, K008)."""

    def job(seed: int) -> tuple[torch.nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        return model, build(model.parameters())

    def train(model: torch.nn.Module, optimizer: Optimizer, steps: int) -> None:
        inputs = torch.arange(8.0).reshape(2, 4)
        for _ in range(steps):

            def loss() -> torch.Tensor:
                optimizer.zero_grad()
                value = model(inputs).square().sum()
                value.backward()
                return value

            optimizer.step(loss)  # type: ignore[arg-type]

    model, optimizer = job(0)
    train(model, optimizer, 3)
    manager = Quick(tmp_path, use_dcp=kind == "dcp")
    manager.save(3, model=model, optimizers=optimizer)
    train(model, optimizer, 3)
    other_model, other = job(1)
    train(other_model, other, 1)
    manager.load(model=other_model, optimizers=other)
    train(other_model, other, 3)
    assert same(dict(other_model.state_dict()), dict(model.state_dict()))
    assert same(other.state_dict(), optimizer.state_dict())


def test_hooks_and_own_loaders_of_an_optimizer_are_called(tmp_path: Path) -> None:
    """An optimizer that overrides `load_state_dict`, or has hooks, takes part in the load (G10)."""
    seen: list[str] = []

    class Own(Mixed):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            seen.append(str(self.state[self.param_groups[0]["params"][0]]["exp_avg"].shape))

    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = Own(model.parameters(), torch.float32)
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model, optimizers=optimizer)
    other = Own(model.parameters(), torch.float32)
    other.register_load_state_dict_post_hook(lambda _: seen.append("hook"))
    manager.load(model=model, optimizers=other)
    assert seen == ["hook", "torch.Size([2, 3])"]
    assert same(other.state_dict(), optimizer.state_dict())


def test_another_kind_of_optimizer_is_loaded_as_it_says(tmp_path: Path) -> None:
    """What is not torch's own optimizer gets its state through its own method (G08)."""

    class Wrapper:
        def __init__(self) -> None:
            self.state = {"moments": torch.zeros(2), "n": 0}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    model, one, other = torch.nn.Linear(1, 1), Wrapper(), Wrapper()
    one.state = {"moments": torch.tensor([1.0, 2.0]), "n": 3}
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model, optimizers=one)
    manager.load(model=model, optimizers=other)
    assert same(other.state, one.state)
    one.state["moments"].zero_()
    assert other.state["moments"].tolist() == [1.0, 2.0]


def test_a_loaded_optimizer_is_said_nothing_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A complete load logs no warning: what is logged as one means something (M027)."""
    job = Job()
    save(tmp_path, job, 1)
    with caplog.at_level(logging.WARNING):
        resume(tmp_path)
    assert caplog.records == []
