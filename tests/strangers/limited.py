"""Managers that cannot hold all that torch takes; they refuse it in words, or lose it unsaid."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability, Feature

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

DTYPES = {Feature.BFLOAT16, Feature.FLOAT8, Feature.COMPLEX64, Feature.BOOL, Feature.INT8}


def has(feature: str, job: TrainingJob) -> bool:
    """Return whether the model of a job has a feature; an optimizer with unused parameters, too."""
    state = job.model.state_dict()
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    parameters = list(job.model.named_parameters(remove_duplicate=False))
    listed = [p for o in job.optimizers.values() for g in o.param_groups for p in g["params"]]
    tests: Mapping[str, Callable[[], bool]] = {
        Feature.EMPTY: lambda: any(not tensor.numel() for tensor in tensors),
        Feature.SCALAR: lambda: any(not parameter.ndim for _, parameter in parameters),
        Feature.UNUSED: lambda: (
            job.step > 0 and any(p.grad is None and not _stepped(job, p) for p in listed)
        ),
        Feature.TIED: lambda: len({id(p) for _, p in parameters}) < len(parameters),
        Feature.EXTRA_STATE: lambda: any(isinstance(value, dict) for value in state.values()),
        Feature.VIEWS: lambda: any(_is_partial(tensor) for tensor in tensors),
        Feature.CHANNELS_LAST: lambda: any(not tensor.is_contiguous() for tensor in tensors),
        Feature.DOTTED: lambda: _is_dotted(job.components["extra"].state_dict()),
    }
    if feature in DTYPES:
        return any(str(tensor.dtype) == f"torch.{feature}" for tensor in tensors)
    return tests[feature]()


def _is_partial(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _is_dotted(state: object) -> bool:
    if not isinstance(state, Mapping):
        return False
    return any("." in str(key) or _is_dotted(value) for key, value in state.items())


def _stepped(job: TrainingJob, parameter: torch.Tensor) -> bool:
    return any(parameter in optimizer.state for optimizer in job.optimizers.values())


@dataclass
class Limited(StepFiles):
    """A file for each step, in which some features have no place."""

    limits: tuple[str, ...]
    is_silent: bool
    left_out: frozenset[str] = frozenset()

    def save(self, job: TrainingJob, step: int) -> None:
        met = [limit for limit in self.limits if has(limit, job)]
        if met and not self.is_silent:
            raise ValueError(f"{', '.join(met)}: this format has no place for that")
        states: dict[str, Any] = {
            name: part.state_dict()
            for name, part in job.components.items()
            if name not in self.left_out
        }
        if Feature.SCALAR in met:
            states["model"].pop("scale")
        file = io.BytesIO()
        torch.save(states, file)
        self.publish(step, file.getvalue())

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        if not self.is_silent and not self.left_out:
            return super().load(job, step)
        wanted = self.wanted(step)
        states = torch.load(self.path(wanted), weights_only=True)
        job.model.load_state_dict(states.pop("model"), strict=False)
        for name, state in states.items():
            job.components[name].load_state_dict(state)
        return wanted


@dataclass(frozen=True)
class Adapter(AdapterBase):
    limits: tuple[str, ...] = ()
    is_silent: bool = False

    def open(self, root: Path, options: OpenOptions) -> Limited:
        del options
        return Limited(root, self.limits, self.is_silent, EVERYTHING - self.holds)


def make(*limits: str, is_declared: bool = True, is_silent: bool = False) -> Adapter:
    return Adapter(
        name=f"limited-{'-'.join(limits)}",
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        cannot_hold={str(limit): "no place for it" for limit in limits if is_declared},
        limits=limits,
        is_silent=is_silent,
    )


@dataclass
class Once(Limited):
    """Takes no step twice; makes the folder of a draft unless a dead save has left it."""

    def save(self, job: TrainingJob, step: int) -> None:
        if step in self.steps():
            raise FileExistsError(self.path(step))
        super().save(job, step)

    def publish(self, step: int, content: bytes | bytearray) -> None:
        folder = self.root / f"draft-{step}"
        if not folder.exists():
            folder.mkdir()
        draft = folder / "content"
        draft.write_bytes(content)
        sync(draft)
        draft.replace(self.path(step))
        folder.rmdir()
        sync(self.root)


@dataclass
class Ascending(Limited):
    """Keeps the last ones, and refuses a save of a step below the newest, in words or in none."""

    keep: int | None = None
    words: str = "a newer step is there"

    def save(self, job: TrainingJob, step: int) -> None:
        if step < max(self.steps(), default=0):
            raise ValueError(self.words)
        super().save(job, step)
        for old in self.steps()[: -self.keep] if self.keep else ():
            self.path(old).unlink()


@dataclass
class Horizon(Limited):
    """Deletes what is below the last ones but for what it has just saved; lists the last ones."""

    keep: int | None = None

    def kept(self) -> list[int]:
        there = super().steps()
        return there[-self.keep :] if self.keep else there

    def save(self, job: TrainingJob, step: int) -> None:
        super().save(job, step)
        for old in set(super().steps()) - {*self.kept(), step}:
            self.path(old).unlink()

    def steps(self) -> list[int]:
        return self.kept()

    def wanted(self, step: int | None) -> int:
        wanted = step if step is not None else max(self.steps(), default=None)
        if wanted is None or not self.path(wanted).exists():
            raise FileNotFoundError(f"step {wanted} is not in {self.root}")
        return wanted


@dataclass(frozen=True)
class OfOnce(Adapter):
    def open(self, root: Path, options: OpenOptions) -> Once:
        del options
        return Once(root, (), is_silent=False)


@dataclass(frozen=True)
class OfHorizon(Adapter):
    def open(self, root: Path, options: OpenOptions) -> Horizon:
        return Horizon(root, (), is_silent=False, keep=options.keep_last)


@dataclass(frozen=True)
class Rotating(Adapter):
    words: str = "a newer step is there"

    def open(self, root: Path, options: OpenOptions) -> Ascending:
        return Ascending(root, (), is_silent=False, keep=options.keep_last, words=self.words)


once = OfOnce(**vars(make()) | {"saves_over": False})
ascending = Rotating(
    **vars(make()) | {"capabilities": make().capabilities | {Capability.RETENTION}}
)
horizon = OfHorizon(**vars(make()) | {"capabilities": ascending.capabilities})
# It can't be asked for what it does not list.
horizon_unnamed = replace(horizon, capabilities={Capability.STEPS, Capability.RETENTION})
ascending_wordless = replace(ascending, words="")
nothing, everything = make(), make(*Feature)
empty_undeclared = make(Feature.EMPTY, is_declared=False)
scalar_undeclared = make(Feature.SCALAR, is_declared=False)
unused_undeclared = make(Feature.UNUSED, is_declared=False)
extra_undeclared = make(Feature.EXTRA_STATE, is_declared=False)
float8_undeclared = make(Feature.FLOAT8, is_declared=False)
channels_undeclared = make(Feature.CHANNELS_LAST, is_declared=False)
views_undeclared = make(Feature.VIEWS, is_declared=False)
without_extra = replace(make(), holds=EVERYTHING - {"extra", "ema"} | {"gradients"})
scalar_lost = make(Feature.SCALAR, is_silent=True)
declared_in_vain = replace(make(), cannot_hold={str(Feature.EMPTY): "so it was once"})
