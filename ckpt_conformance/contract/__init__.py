"""The contract: what a checkpoint manager is to this suite.

Three shapes. A `Manager` saves and loads, the harness runs the loop. A `Trainer` owns the loop.
A script has no adapter. An adapter is an object that opens one of the first two on a directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor, nn, optim


class Capability(StrEnum):
    """What an adapter declares. Undeclared makes its checks NOT_APPLICABLE, never a pass."""

    EXPLICIT_STEP = "explicit_step"  # load(step=k) serves step k although newer ones exist
    STEPS = "steps"  # discovery can be asked: steps()
    RETENTION = "retention"  # options.keep_last is honoured
    MIRROR = "mirror"  # options.mirror: committed steps are copied there in the background
    STORE = "store"  # options.mirror may be a URL of fsspec: s3://bucket/prefix
    KINDS = "kinds"  # several formats of one step: save_kind, load_kind
    REFERENCE = "reference"  # load_path: a file, a checkpoint directory or its parent
    EXPORT = "export"  # export(step, destination): one torch file with the model's state_dict
    COLD_START = "cold_start"  # load_without: a named component is left cold on request
    RANKS = "ranks"  # every rank of a torch.distributed job calls save and load
    RESHARD = "reshard"  # a checkpoint loads into another world size and layout; see `resharding`
    PLANT = "plant"  # plant(step): a step without payload that discovery names, by Python only
    RESEAL = "reseal"  # reseal(step): its own checksums are renewed, whatever its files hold now
    ASYNC = "async"  # save_async, or save itself, gives a PendingSave: it goes on while one trains
    STAGE = "stage"  # stage: a step comes from options.mirror into the directory
    EMERGENCY = "emergency"  # save_emergency, alone on each rank; catch_sigterm


class Feature(StrEnum):
    """What a model may have that some managers cannot hold, and say so; dtypes by torch's names."""

    EMPTY = "empty-tensors"  # a parameter without elements
    SCALAR = "scalar-parameters"  # a parameter without dimensions
    UNUSED = "unused-parameters"  # in the optimizer, and never updated
    TIED = "tied-parameters"  # two names of one parameter
    EXTRA_STATE = "dict-extra-state"  # a module's get_extra_state gives a dict
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8_e4m3fn"
    COMPLEX64 = "complex64"
    BOOL = "bool"
    INT8 = "int8"
    DOTTED = "dotted-keys"  # keys of a dict with dots in them, beside a tree of the same names
    VIEWS = "partial-views"  # two tensors that are parts of one storage
    CHANNELS_LAST = "channels-last"  # a tensor whose memory has another order than its shape


DEFAULT_KIND = "plain"  # of a job: what every manager takes


class Stateful(Protocol):
    """What torch calls Stateful."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:  # noqa: ANN401  torch's own signature
        """Take the state."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """What one training step did, bit for bit."""

    step: int
    loss: str  # the loss's bytes in hex
    learning_rates: tuple[str, ...]  # float.hex of each parameter group
    batch: tuple[int, ...]  # sample ids
    draws: tuple[str, ...]  # one draw of each generator: python, numpy, torch (cuda)
    parameters: str  # digest of model parameters and buffers after the step


class TrainingJob(Protocol):
    """The deterministic workload that is saved and resumed."""

    kind: str
    step: int
    rank: int
    world_size: int
    device: str
    model: nn.Module
    optimizers: Mapping[str, optim.Optimizer]
    schedulers: Mapping[str, optim.lr_scheduler.LRScheduler]
    loader: Iterable[tuple[Tensor, Tensor, Tensor]]
    extra: Stateful

    @property
    def components(self) -> Mapping[str, Stateful]:
        """Every stateful part by name: model, optimizer, scheduler, loader, rng, extra, ..."""
        ...

    def loss(self, batch: Any) -> Tensor:  # noqa: ANN401  what the loader yields
        """Run the forward pass; the first call of a child records what was resumed."""
        ...

    def after_step(self, loss: Tensor) -> StepRecord:
        """Count the step and record it; a framework's loop calls this after its optimizer step."""
        ...

    def train(self, n: int) -> list[StepRecord]:
        """Train n steps with the job's own loop."""
        ...

    def digest(self) -> Mapping[str, str]:
        """Return by component a digest of its state, bit for bit."""
        ...


class Journal(Protocol):
    """Events outside the manager's directory; one O_APPEND write each, so they survive SIGKILL."""

    def begun(self, step: int) -> None:
        """Note that a save of `step` starts."""
        ...

    def acknowledged(self, step: int) -> None:
        """Note that the save of `step` returned success."""
        ...

    def failed(self, step: int, error: BaseException) -> None:
        """Note that the save of `step` raised."""
        ...

    def record(self, step_record: StepRecord) -> None:
        """Note one training step."""
        ...


class PendingSave(Protocol):
    """A save that goes on in the background, while the job trains on.

    The harness waits for it before the next save and at the end of the run, as jobs do; checks of
    the capability `async` begin further saves, close the manager or end the process meanwhile.
    """

    def wait(self) -> object:
        """Block until it has ended; raise what made it fail. To return is to acknowledge."""
        ...

    def done(self) -> bool:
        """Return at once whether it has ended, well or not."""
        ...

    def exception(self) -> BaseException | None:
        """Return what made it fail, None if nothing did; it has ended when this is called."""
        ...


@dataclass(frozen=True)
class FutureSave:
    """The `PendingSave` of a `concurrent.futures.Future`, such as `dcp.async_save` returns."""

    future: Future[Any]

    def wait(self) -> object:
        """Block until the future has a result; raise its exception."""
        return self.future.result()

    def done(self) -> bool:
        """Return whether the future has ended."""
        return self.future.done()

    def exception(self) -> BaseException | None:
        """Return the future's exception."""
        return self.future.exception()


class Manager(Protocol):
    """One live manager on one directory.

    Two more methods are optional. `prepare(job)`, for frameworks that wrap a job, is called once
    before it trains, saves or loads, where the adapter declares `prepares`. It may replace
    `job.model`, `job.loader`, `job.optimize` and what is in `job.optimizers` and `job.schedulers`.
    A process may open a second manager, for a job that the first one has wrapped.
    `settle()` is called before `close()`, and waits for what `close()` does not wait for.
    With the capability `async` there is `save_async(job, step)`, which returns a `PendingSave`,
    unless `save` itself does. With the capability `emergency` there is `save_emergency(job, step)`,
    which dumps what this process holds and asks no other rank, and `catch_sigterm()`: from then on
    SIGTERM ends nothing, and what it returns says, each time that it is called, whether one has
    come. Every rank calls it before it trains. With the capability `stage` there is
    `stage(step, refresh, kind)`: it brings a step from the mirror, unless it is there; with
    `refresh` what the mirror has replaces what is there; `kind` None takes any format.
    """

    def save(self, job: TrainingJob, step: int) -> PendingSave | None:
        """Save. To return None is to acknowledge; a `PendingSave` does so once it has ended."""
        ...

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load in place and return the step; None is the latest; raise to refuse."""
        ...

    def steps(self) -> Sequence[int]:
        """Return the steps that discovery advertises, ascending."""
        ...

    def close(self) -> None:
        """Finish background work and let go."""
        ...


class Trainer(Protocol):
    """A framework that runs the loop itself, in a process that the harness started."""

    def fit(
        self,
        job: TrainingJob,
        until: int,
        save_at: Collection[int],
        resume: bool | int | Path,  # noqa: FBT001  the frameworks' own word
        journal: Journal,
    ) -> None:
        """Train to step `until`, save at the steps of `save_at`.

        `resume` True means the latest, an int that step, a path that checkpoint; raise to refuse.
        """
        ...


@dataclass(frozen=True)
class OpenOptions:
    """How to open a manager. An adapter ignores what it does not declare.

    `upload_gate` is called before each file that a background mirror copies: it may block (a slow
    network) or raise OSError (a failing one). `mirror` is a directory, or a URL where the adapter
    declares `STORE`.
    """

    keep_last: int | None = None
    mirror: Path | str | None = None
    upload_gate: Callable[[str], None] | None = None
    kind: str | None = None


@runtime_checkable
class Adapter(Protocol):
    """What a maintainer writes: about 30 lines.

    `open` raises NotImplementedError for an option that the manager does not have: the checks that
    need it are NOT_APPLICABLE.
    """

    name: str
    version: str
    shape: Literal["manager", "trainer"]
    capabilities: frozenset[Capability]
    holds: frozenset[str]
    isolation: Literal["fork", "spawn", "exec"]

    def open(self, root: Path, options: OpenOptions) -> Manager | Trainer:
        """Open a live manager on `root`, which exists."""
        ...


@dataclass(frozen=True)
class AdapterBase:
    """Fields most adapters share; subclassing it is a convenience, not a duty.

    `refusals` are the exceptions that the manager documents for a refused load. `library` and
    `recipe` say what is certified, `owner` who must act on a violation; `promises` maps
    an invariant id to the quoted documentation.
    `resharding` says what becomes of each rank's own state in another world size: of `rng` and of
    `loader`, see `POLICIES`. With `prepares` the manager's `prepare(job)` is called before the job
    trains, saves or loads. `saves_over=False` says that a save of a step that is there is refused
    in words, as the manager documents; `min_keep` is the fewest checkpoints that it can keep,
    `max_keep` the most, where it deletes older ones whatever it is asked for.
    `cannot_hold` maps a `Feature` to the documentation that says so: it has to be refused in words,
    and no other check meets it. With `skips` the position in the data is no state of the loader:
    the manager takes the batches of the first steps from a loader of the same data seed again.
    """

    name: str = ""
    version: str = ""
    shape: Literal["manager", "trainer"] = "manager"
    capabilities: frozenset[Capability] = frozenset({Capability.STEPS})
    holds: frozenset[str] = frozenset()
    isolation: Literal["fork", "spawn", "exec"] = "fork"
    refusals: tuple[type[BaseException], ...] = ()
    library: str = ""
    recipe: str = ""
    owner: str = ""
    promises: Mapping[str, str] = field(default_factory=dict[str, str])
    resharding: Mapping[str, str] = field(default_factory=dict[str, str])
    prepares: bool = False
    saves_over: bool = True
    min_keep: int = 1
    max_keep: int | None = None
    cannot_hold: Mapping[str, str] = field(default_factory=dict[str, str])
    skips: bool = False

    def open(self, root: Path, options: OpenOptions) -> Manager | Trainer:
        """Open a live manager on `root`; every adapter defines it."""
        msg = f"{type(self).__name__}.open is not defined ({root}, {options})"
        raise NotImplementedError(msg)


EVERYTHING = frozenset(
    {"model", "optimizer", "scheduler", "scaler", "ema", "loader", "rng", "extra"}
)

# What may become of a rank's own state where another number of ranks resumes.
POLICIES: Mapping[str, Mapping[str, str]] = {
    "rng": {
        "by-rank": "rank r takes the generators of saved rank r; a new rank a stream of its own",
        "rank0": "every rank takes the generators of saved rank 0",
        "reseeded": "every rank gets a new stream of its own, the same for the same checkpoint",
    },
    "loader": {
        "global": "the position in the global order is kept; each rank takes its part of the rest",
    },
}
