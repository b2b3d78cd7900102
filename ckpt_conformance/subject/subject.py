"""The subject: what suites speak to. They see neither shape of adapter, nor any manager's name."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import structs

from ckpt_conformance.contract import DEFAULT_KIND, Capability, trees
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    CrashSummary,
    NotApplicable,
    Outcome,
    Remarks,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    JobSpec,
    OptionNotImplementedError,
    Options,
    PayloadSamplesResult,
    Program,
    ReadPayloadSamples,
    Run,
    RunResult,
    Steps,
    StepsResult,
    whole,
)
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.subject import oracle, undisturbed
from ckpt_conformance.workload import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.contract import StepRecord
    from ckpt_conformance.contract.registry import AdapterInfo
    from ckpt_conformance.harness.client import Client, Finished, ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Arguments, Fault, Leaves, PayloadSample

T = TypeVar("T")
SAVES = (2, 4)  # the golden run's steps: both in the middle of the first epoch of five batches
AFTER = 4  # steps that a run is followed for after its last save: beyond the end of the epoch
COSTLY = frozenset({"large"})  # kinds of job whose steps are dear; no check asks how they go on
JOB_SEED, OTHER_SEED = 11, 97


def steps_after(kind: str) -> int:
    """Return how many steps a run of a kind of job is followed for after its last save.

    Each step of a job with a tensor of 64 MiB costs a digest of it.
    """
    return 1 if kind in COSTLY else AFTER


@dataclass(frozen=True, eq=False)
class Slot(Generic[T]):
    """What is found out once per adapter and shared by checks: a typed key of `Subject.once`."""

    what: str


@dataclass(frozen=True)
class RankRecord:
    """What one training step of one rank did."""

    rank: int
    record: StepRecord


@dataclass
class Golden:
    """A run without faults: a snapshot of the directory after each save, and what they give.

    `at` maps a step to the state at that step's loss call in the run that never stopped; `loaded`
    (filled by controls) to the state that this manager's own undamaged load gives; `overlaps` are
    the leaves that share memory at the end. For each saved step `payload_samples` gives the first
    bytes of its large tensors: where they stand is payload. `resumed` keeps the children of
    `resumption`.
    """

    saves: tuple[int, ...]
    kind: str
    folder: Path
    at: Mapping[int, Leaves]
    records: Sequence[RankRecord]
    ties: Sequence[Sequence[str]]
    payload_samples: Mapping[int, Sequence[PayloadSample]]
    overlaps: Sequence[Sequence[str]] = ()
    loaded: dict[int, Leaves] = field(default_factory=dict[int, Any])
    resumed: dict[tuple[int, bool, tuple[str, ...]], ProcessResult] = field(
        default_factory=dict[tuple[int, bool, tuple[str, ...]], Any]
    )

    def snapshot(self, step: int) -> Path:
        """Return the directory as it was when the save of `step` had returned."""
        return self.folder / str(step)


def resume_key(
    step: int, *, realign: bool = False, faults: tuple[Fault, ...] = ()
) -> tuple[int, bool, tuple[str, ...]]:
    """Return the key in `Golden.resumed` of a resume from a step."""
    return step, realign, tuple(fault.injector for fault in faults)


def run_op(
    until: int | None, save_at: Sequence[int], given: Mapping[str, Any]
) -> tuple[Run, dict[str, Any]]:
    """Make a run of the fields that belong to it; give those that do not, too."""
    known = {field.name for field in structs.fields(Run)}
    own = {name: value for name, value in given.items() if name in known}
    if "faults" in own:
        own["faults"] = tuple(own["faults"])
    rest = {name: value for name, value in given.items() if name not in known}
    return Run(until=until, save_at=tuple(save_at), **own), rest


@dataclass
class Subject:
    """One adapter under test, in a folder of its own.

    `root` is the manager's directory: always the same absolute path, because managers may write it
    down. `scratch` is ours.
    """

    info: AdapterInfo
    client: Client
    folder: Path
    seed: int = 0
    budget: str = "quick"
    order: str = ""  # the turns of tasks that are to be taken, as `contract.orders` has it
    deadline: float = 60.0  # seconds that a child has, unless the check says otherwise
    device: str = devices.CPU  # where ranks compute
    written_by: tuple[Path, ...] = ()  # folders that other releases of torch wrote
    pretends: bool = False  # another release is pretended instead
    goldens: dict[tuple[Any, ...], Golden] = field(default_factory=dict[tuple[Any, ...], Golden])
    controls: dict[str, str] = field(default_factory=dict[str, str])  # by check; empty if it held
    # Crash states that were explored since the last outcome, by workload.
    explored: dict[str, CrashSummary] = field(default_factory=dict[str, CrashSummary])
    remarks: Remarks = field(default_factory=Remarks)  # on how this check was made
    children: int = 0
    programs: list[Program] = field(default_factory=list[Program])
    left: list[str] = field(default_factory=list[str])  # daemons of its children, ended since

    def __post_init__(self) -> None:
        """Make the folders."""
        self._found: dict[tuple[Hashable, ...], Any] = {}
        self.root = self.folder / "run" / "checkpoints"
        self.scratch = self.folder / "scratch"
        trees.clear(self.root)
        trees.clear(self.scratch)

    # -- what the adapter is ----------------------------------------------------------------------

    @property
    def holds(self) -> frozenset[str]:
        """The components that the manager saves."""
        return frozenset(self.info.holds)

    def need(self, *capabilities: str, holds: Collection[str] = (), shape: str = "") -> None:
        """Raise NotApplicable unless everything named is declared."""
        lacking = [c for c in capabilities if c not in self.info.capabilities]
        lacking += [f"holds {part}" for part in holds if part not in self.holds]
        if shape and self.info.shape != shape:
            lacking.append(f"the {shape} shape")
        if lacking:
            msg = f"the adapter does not declare {', '.join(lacking)}"
            raise NotApplicable(msg)

    def keepable(self, number: int) -> int:
        """Return how many checkpoints to keep where a number is wanted: as near as it can keep."""
        most = self.info.max_keep
        return max(self.info.min_keep, number if most is None else min(number, most))

    def keeping(self, number: int = 1) -> Options:
        """Return options that keep so many, as near as it can; none where it rotates nothing."""
        if Capability.RETENTION not in self.info.capabilities:
            return Options()
        return Options(keep_last=self.keepable(number))

    @property
    def rng(self) -> random.Random:
        """A generator for the choices of a check; the same seed gives the same choices."""
        return random.Random(self.seed)  # noqa: S311

    def sample(self, items: Sequence[T], quick: int) -> list[T]:
        """Choose `quick` items by the seed, in order; all of them at the full budget."""
        if self.budget == "full" or len(items) <= quick:
            return list(items)
        return [items[at] for at in sorted(self.rng.sample(range(len(items)), quick))]

    def once(self, slot: Slot[T], make: Callable[[], T], *key: Hashable) -> T:
        """Return what a slot holds for a key; the first one to ask finds it out."""
        place = (slot, *key)
        if place not in self._found:
            self._found[place] = make()
        known: T = self._found[place]
        return known

    def forget(self, slot: Slot[T], *key: Hashable) -> None:
        """Empty a slot, so that it is found out again."""
        self._found.pop((slot, *key), None)

    # -- children ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the manager's directory, its mirror and the scratch; begin a check."""
        trees.clear(self.root)
        trees.clear(self.scratch)
        self.programs.clear()
        self.remarks = Remarks()

    def execute(self, *ops: AnyOp, **given: Any) -> ProcessResult:  # noqa: ANN401
        """Run operations in one fresh child; a crash of the harness itself is UNKNOWN.

        `given` are fields of `JobSpec` (kind, seed, variant) and of `Program`.
        """
        return self.send([self.program(*ops, **given)])[0]

    def program(
        self,
        *ops: AnyOp,
        rank: int = 0,
        layout: Mapping[str, int] | None = None,
        **given: Any,  # noqa: ANN401  fields of a job and of a program
    ) -> Program:
        """Make the program of one child; with a layout, of one rank of a world.

        Raises TypeError for a field that neither has.
        """
        job = JobSpec(
            kind=given.pop("kind", DEFAULT_KIND if layout is None else "sharded"),
            seed=given.pop("seed", JOB_SEED),
            variant=given.pop("variant", ""),
            without=given.pop("without", tuple(sorted(self.info.cannot_hold))),
            data_seed=JOB_SEED if self.info.skips else None,
            tensors=given.pop("tensors", {}),
            layout=None if layout is None else dict(layout),
            device=devices.CPU if layout is None else self.device,
        )
        own = f"-{rank}" if rank else ""
        root = str(given.pop("root", self.root))
        more: Arguments = {"isolation": self.info.isolation, "deadline": self.deadline, **given}
        return Program(
            adapter=self.info.name,
            root=root,
            journal=str(self.folder / f"journal{own}"),
            result=str(self.folder / f"result{own}"),
            output=str(self.folder / f"output{own}"),
            job=job,
            ops=ops,
            **more,
        )

    def send(self, programs: Sequence[Program]) -> list[ProcessResult]:
        """Run one child of each program, all at the same time.

        Raises NotApplicable where the adapter does not implement an option that is asked for.
        """
        self.children += len(programs)
        self.programs += programs
        results = self.client.run_together(programs)
        self.left += [left for result in results for left in result.left]
        for result in results:
            if result.error and result.error.is_a(OptionNotImplementedError):
                raise NotApplicable(f"the adapter does not implement {result.error.message}")
            if result.exit_kind is ExitKind.CRASHED and result.code == lifecycle.NO_JOB:
                raise Unknown(f"the job could not be built: {self.tell(result)}")
        return results

    def send_rank_group(self, program: Program) -> list[ProcessResult]:
        """Run one child that forks its ranks, and is recorded; give how each rank ended."""
        self.children += 1
        self.programs.append(program)
        results = self.client.run_rank_group(program)
        self.left += results[0].left
        return results

    def run(
        self,
        until: int | None,
        save_at: Sequence[int] = (),
        *,
        then: Sequence[AnyOp] = (),
        **given: Any,  # noqa: ANN401
    ) -> ProcessResult:
        """Train to a step with saves, and do what comes `then`.

        `given` are fields of the operation (see `Run`), of the job and of the program.
        """
        op, rest = run_op(until, save_at, given)
        return self.execute(op, *then, **rest)

    def resume(self, step: int | str | None = None, **given: Any) -> ProcessResult:  # noqa: ANN401
        """Load into a job of another seed and digest at its first training step."""
        given = {"seed": OTHER_SEED, "stop_after": 0, **given}
        return self.run(None, resume=True if step is None else step, **given)

    def steps(self, **given: Any) -> list[int]:  # noqa: ANN401
        """Ask discovery in a fresh child; raises Violation if it raises."""
        self.need("steps")
        result = self.execute(Steps(), **given)
        steps = result.of(StepsResult).steps
        if steps is None:
            raise Violation("discovery does not answer", evidence=self.evidence(result))
        return steps

    # -- golden runs and controls -----------------------------------------------------------

    def golden(
        self,
        saves: tuple[int, ...] = SAVES,
        kind: str = DEFAULT_KIND,
        **given: Any,  # noqa: ANN401
    ) -> Golden:
        """Return a run without faults, made once per adapter, saves, kind and options."""
        key = (saves, kind, repr(sorted(given.items())))
        if key not in self.goldens:
            self.goldens[key] = self._record(saves, kind, given)
        trees.clear(self.root)
        return self.goldens[key]

    def _record(self, saves: tuple[int, ...], kind: str, given: dict[str, Any]) -> Golden:
        folder = self.folder / "golden" / str(len(self.goldens))
        trees.clear(folder)
        trees.clear(self.root)
        result = self.run(
            max(saves) + steps_after(kind),
            saves,
            kind=kind,
            watch=True,
            overlaps=True,
            snapshots=str(folder),
            then=[ReadPayloadSamples(), Close()],
            **given,
        )
        if result.error and result.error.is_a(NotImplementedError):  # it takes no such job
            raise NotApplicable(f"the adapter takes no job of kind {kind}: {self.tell(result)}")
        if not result.went_well:
            raise control_failed(f"a run without faults does not end well: {self.tell(result)}")
        ran = result.of(RunResult)
        samples = result.of(PayloadSamplesResult).samples
        records = [RankRecord(0, record) for record in ran.records]
        ties = ran.arrived.ties if ran.arrived else []
        at = {step: whole(state) for step, state in ran.states.items()}
        return Golden(saves, kind, folder, at, records, ties, samples, ran.overlaps)

    def loaded(self, golden: Golden, step: int, **given: Any) -> Leaves:  # noqa: ANN401
        """Return what an undamaged load of `step` gives: the control of every fault check."""
        if step not in golden.loaded:
            result = None if given else golden.resumed.get(resume_key(step))
            if result is None or not result.went_well:
                self.materialize(golden, step)
                result = self.resume(kind=golden.kind, **given)
            arrived, state = oracle.arrival(result)
            if arrived != step:
                message = self.tell(result)
                raise control_failed(f"an undamaged load of step {step} gives {message}")
            golden.loaded[step] = state
        return golden.loaded[step]

    def legal(self, golden: Golden, *steps: int, **given: Any) -> dict[int, Leaves]:  # noqa: ANN401
        """Return the states of several steps."""
        return {step: self.loaded(golden, step, **given) for step in steps or golden.saves}

    def materialize(self, golden: Golden, step: int | None = None) -> None:
        """Make the directory what it was after the save of `step` (the last by default)."""
        step = golden.saves[-1] if step is None else step
        if not golden.snapshot(step).is_dir():
            raise control_failed(f"a run without faults ends well, and never saves step {step}")
        trees.materialize(golden.snapshot(step), self.root)

    # -- judging -----------------------------------------------------------------------------------

    def classify(
        self,
        result: Finished,
        legal: Mapping[int, Leaves],
        *,
        newest: int,
        acknowledged: Collection[int],
    ) -> Outcome:
        """Classify a resume on the held components."""
        return oracle.classify(
            result, legal, holds=self.holds, newest=newest, acknowledged=acknowledged
        )

    def tell(self, result: Finished) -> str:
        """Say in one line how a child ended."""
        if result.exit_kind is ExitKind.HANG:
            return f"hang (no end within {result.program.deadline:g} s)"
        if result.error:
            what = "out of memory: " if result.exit_kind is ExitKind.MEMORY else ""
            return f"{what}{result.error.type}: {result.error.message[:200]}"
        if result.exit_kind is not ExitKind.ENDED:
            last = result.output.strip().splitlines()[-1:] or [""]
            return f"{result.exit_kind} (exit code {result.code}) {last[0][:200]}".strip()
        step, _ = oracle.arrival(result)
        return f"step {step}" if step is not None else "no training step"

    def evidence(
        self,
        result: Finished,
        state: Leaves | None = None,
        **more: Any,  # noqa: ANN401  further evidence
    ) -> dict[str, Any]:
        """Collect what a reader needs: how the child ended, the error, the leaves that differ."""
        evidence: dict[str, Any] = {"child": self.tell(result), **more}
        if result.error:
            evidence["where"] = list(result.error.where)
        if self.left:
            evidence["left behind"] = self.left[-3:]
        step, arrived = oracle.arrival(result)
        if state is not None and arrived:
            evidence["step"] = step
            if differs := oracle.differences(arrived, state, self.holds):
                evidence["differs"] = differs
        return evidence

    def judge(  # noqa: PLR0913  what a verdict needs
        self,
        result: Finished,
        legal: Mapping[int, Leaves],
        allowed: Collection[Outcome],
        message: str,
        *,
        newest: int,
        acknowledged: Collection[int],
        **more: Any,  # noqa: ANN401  further evidence
    ) -> Outcome:
        """Raise Violation unless the outcome is allowed; give the outcome.

        Raises Unknown where saves alone make the state another one: CKC-SIDE-001 tells that.
        """
        outcome = self.classify(result, legal, newest=newest, acknowledged=acknowledged)
        if outcome in REFUSALS and not REFUSALS & set(allowed):
            outcome = Outcome.LOST_ALL
        if outcome not in allowed:
            step, _ = oracle.arrival(result)
            wanted = legal.get(step or 0)
            evidence = self.evidence(result, wanted, outcome=str(outcome), **more)
            if outcome is Outcome.SILENT_WRONG:
                undisturbed.require(self)
            raise Violation(f"{message}: {outcome}", evidence=evidence)
        return outcome
