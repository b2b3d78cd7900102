"""What the harness and its child processes say to each other: programs, operations, results.

A program is a list of operations for one child. It is sent to the fork server as one line of JSON,
and the child leaves a report with one result for each operation that it reached. Both sides encode
and decode with these types: what is missing, misspelt or of another type is an error at once, and
not a verdict. A bundle keeps programs as they were sent.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from msgspec import structs

from ckpt_conformance.contract import StepRecord
from ckpt_conformance.contract.registry import Refusal
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.trace import vector_clocks
from ckpt_conformance.trace.turns import taking
from ckpt_conformance.workload import values

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")
Leaves = values.Leaves
RankLeaves = values.RankLeaves
Stop = vector_clocks.Stop
Plan = taking.Plan
TurnReport = taking.TurnReport
ExitKind = lifecycle.ExitKind
Tree = dict[str, str]  # name below a directory -> digest of what a new process would read there
Arguments = dict[str, Any]  # plain values by name; what takes them says which


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message: immutable; a field that the other side does not know is refused."""


class MessageError(ValueError):
    """A message that is not one of these; the text names the field and what is wrong with it."""


def encode(message: object, indent: int | None = None) -> bytes:
    """Write a message as JSON, on one line unless `indent` says otherwise.

    By `json`, which keeps what msgspec refuses or changes: NaN, and file names that are no UTF-8.
    """
    plain = msgspec.to_builtins(message, str_keys=True, enc_hook=str)
    return json.dumps(plain, indent=indent).encode()


def decode(data: bytes | str, kind: type[T]) -> T:
    """Read a message of a type; raises MessageError for anything else."""
    try:
        return msgspec.convert(json.loads(data), kind, str_keys=True)
    except ValueError as error:  # of either: no JSON, or not this message
        msg = f"no {kind.__name__}: {error}"
        raise MessageError(msg) from error


# ---- faults ----------------------------------------------------------------------------------


class Fault(Message, frozen=True):
    """A fault injector for an operation: `module:attribute`, its arguments; on some ranks only."""

    injector: str
    args: Arguments = {}
    ranks: tuple[int, ...] | None = None


class SeenCall(Message, frozen=True, omit_defaults=True):
    """One call that an injector counted: its number, the function, the name that it is about."""

    call: int
    what: str
    path: str = ""
    size: int = 0  # bytes, of a write
    offset: int = 0  # where in the file a write begins
    order: int = 0  # over all injectors of a child
    tree: Tree = {}  # before the call, of a survey
    reads: bool = False  # changes nothing
    injected: bool = False  # the fault hit this call
    elsewhere: bool = False  # the file was made elsewhere on the disk, and was not moved in
    is_whole: bool = False  # a write that can't be cut short
    is_folder: bool = False  # the call is about a directory
    became: str = ""  # the name that its file has in the end, or had last, if that is another one


class UnsupportedCall(Message, frozen=True):
    """A call that writes and that no supervisor can follow or hit, and why."""

    call: str
    path: str
    why: str


class FaultReport(Message, frozen=True):
    """What one injector counted in an operation, and how often it fired."""

    name: str = ""
    calls: int = 0
    fired: int = 0
    log: tuple[SeenCall, ...] = ()
    unsupported: tuple[UnsupportedCall, ...] = ()


def calls_of(reports: Iterable[FaultReport]) -> list[SeenCall]:
    """Return the calls that injectors counted, in the order of their reports."""
    return [call for report in reports for call in report.log]


# ---- operations ------------------------------------------------------------------------------


class Op(Message, frozen=True, tag_field="op", omit_defaults=True):
    """One operation of a program.

    `ranks` are those of a world that do it, None for all. After an error the program ends, unless
    the operation says `go_on`.
    """

    ranks: tuple[int, ...] | None = None
    go_on: bool = False


class Run(Op, frozen=True, tag="run"):
    """Train to a step with saves, by the harness's loop or by the framework's.

    `resume` loads first: the newest (True), a step, or a path. `watch` digests the state at every
    step, else only at the first; `stop_after` ends the run after so many further steps; `final`
    digests the state at the end, `overlaps` lists there what shares memory; `realign` lays the
    parameters anew in aligned storage after the load. The faults hold for the whole run, or from
    the save of `fault_step` on.
    """

    until: int | None = None
    save_at: tuple[int, ...] = ()
    resume: bool | int | str = False
    stop_after: int | None = None
    watch: bool = False
    final: bool = False
    overlaps: bool = False
    realign: bool = False
    faults: tuple[Fault, ...] = ()
    fault_step: int | None = None


class Save(Op, frozen=True, tag="save"):
    """Save now, as `step` or as the step of the job."""

    step: int | None = None
    faults: tuple[Fault, ...] = ()


class BeginSave(Op, frozen=True, tag="begin_save"):
    """Begin to save in the background, as `step` or as the step of the job, and do not wait.

    The faults hold until the next `EndSaves`.
    """

    step: int | None = None
    faults: tuple[Fault, ...] = ()


class EndSaves(Op, frozen=True, tag="end_saves"):
    """Let what a fault holds go on, and wait for the saves that were begun, in their order.

    Without `asks` nobody asks how they ended, as in a job that dropped their handles. With `polls`
    `exception()` is asked once `done()` says so, before anybody waits. With `hurries` what a fault
    holds goes on only as the caller waits for it, whose patience ends at once if it has an end:
    handles are asked to wait, and no more; the faults stay armed, and another `EndSaves` follows.
    """

    asks: bool = True
    polls: bool = False
    hurries: bool = False


class EmergencySave(Op, frozen=True, tag="emergency_save"):
    """Dump now, as a job does that was told to end; as `step` or as the step of the job."""

    step: int | None = None
    faults: tuple[Fault, ...] = ()


class Preempt(Op, frozen=True, tag="preempt", kw_only=True):
    """Catch SIGTERM and train with saves, as `Run` does; dump once it has come, and end.

    It is asked between two steps whether it has come. The faults are those that send the signal,
    from the save of `fault_step` on.
    """

    until: int
    save_at: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()
    fault_step: int = 0


class Load(Op, frozen=True, tag="load"):
    """Load into the live job: the newest, a step, or a path."""

    step: int | str | None = None
    faults: tuple[Fault, ...] = ()


class Train(Op, frozen=True, tag="train", kw_only=True):
    """Train `n` steps with the job's own loop."""

    n: int


class Steps(Op, frozen=True, tag="steps"):
    """Ask which steps there are."""


class ReadLeaves(Op, frozen=True, tag="leaves"):
    """Digest the live state."""


class ReadPayloadSamples(Op, frozen=True, tag="payload_samples"):
    """Report bytes of tensors that must stand in an uncompressed payload, by saved step."""


class Perturb(Op, frozen=True, tag="perturb"):
    """Change every live tensor and every generator."""


class Fresh(Op, frozen=True, tag="fresh"):
    """Replace the job by a fresh one in the same process; the manager stays."""

    seed: int | None = None
    kind: str | None = None


class Materialize(Op, frozen=True, tag="materialize", kw_only=True):
    """Close the manager and make its directory a copy of a tree; the next one opens anew."""

    tree: str


class Close(Op, frozen=True, tag="close"):
    """Close the manager; the next operation opens a new one. `hurries` as of `EndSaves`."""

    hurries: bool = False


class CopyOut(Op, frozen=True, tag="copy_out", kw_only=True):
    """Copy the manager's directory as it is now to a new place."""

    tree: str


class Gate(Op, frozen=True, tag="gate", kw_only=True):
    """Set the upload gate (open, shut, fail) after some files; or `await` `count` uploads.

    With `only` it is shut, fails or waits for files alone whose names carry that step.
    """

    state: str
    after: int = 0
    count: int = 1
    only: int | None = None


class Call(Op, frozen=True, tag="call", kw_only=True):
    """Call a method of an optional capability; `$job` in the arguments is the live job."""

    method: str
    args: tuple[Any, ...] = ()
    faults: tuple[Fault, ...] = ()


class Probe(Op, frozen=True, tag="probe", kw_only=True):
    """Run `module:function(child, **args)` and keep the plain value that it gives."""

    probe: str
    args: Arguments = {}


AnyOp = (
    Run
    | Save
    | BeginSave
    | EndSaves
    | EmergencySave
    | Preempt
    | Load
    | Train
    | Steps
    | ReadLeaves
    | ReadPayloadSamples
    | Perturb
    | Fresh
    | Materialize
    | Close
    | CopyOut
    | Gate
    | Call
    | Probe
)


def faults_of(op: AnyOp) -> tuple[Fault, ...]:
    """Return the faults of an operation; only those that save or load have any."""
    if isinstance(op, Run | Save | BeginSave | EmergencySave | Preempt | Load | Call):
        return op.faults
    return ()


def named(op: AnyOp) -> list[str]:
    """Return the `module:attribute` names in an operation: of injectors, and of a probe."""
    injectors = [fault.injector for fault in faults_of(op)]
    return [*injectors, op.probe] if isinstance(op, Probe) else injectors


# ---- results ---------------------------------------------------------------------------------


ExceptionClass = type[BaseException]  # `Error` has a field named type


class Error(Message, frozen=True):
    """An exception that an operation raised, in plain values.

    `typed`: the adapter lists its type among the refusals; `memory`: out of memory; `disk`: an
    OSError, or raised from one; `where`: the last frames.
    """

    type: str
    message: str
    typed: bool = False
    memory: bool = False
    disk: bool = False
    where: tuple[str, ...] = ()
    errno: int | None = None

    def is_a(self, kind: ExceptionClass) -> bool:
        """Return whether it was of exactly this class."""
        return self.type == name_of(kind)


def name_of(kind: ExceptionClass) -> str:
    """Return the name of a class with its module, as `Error.type` has it."""
    return f"{kind.__module__}.{kind.__qualname__}"


class Result(Message, frozen=True, tag_field="op", omit_defaults=True):
    """What came of one operation; the fields of one that was not reached are empty."""

    error: Error | None = None


class Arrived(Message, frozen=True):
    """Where a run was at its first training step: the step, and tensors that share storage."""

    step: int
    ties: list[list[str]] = []


class RunResult(Result, frozen=True, tag="run"):
    """States by step at the loss call, records of the steps, and what the faults did.

    `overlaps`: where it was asked for, the groups of leaves whose elements share memory at the end.
    """

    arrived: Arrived | None = None
    overlaps: list[list[str]] = []
    states: dict[int, RankLeaves] = {}
    records: tuple[StepRecord, ...] = ()
    step: int | None = None
    final: RankLeaves | None = None
    faults: tuple[FaultReport, ...] = ()
    in_background: bool = False  # a save of this process returned before it had ended


class SaveResult(Result, frozen=True, tag="save"):
    """What the faults of a save did."""

    faults: tuple[FaultReport, ...] = ()


class BeginSaveResult(Result, frozen=True, tag="begin_save"):
    """Whether the save went on when the call had returned, and whether a fault held threads then.

    `goes_on` is what its handle said, once the first thread stood. `beside`: earlier saves that
    went on then, as their handles say.
    """

    goes_on: bool = False
    is_held: bool = False
    beside: int = 0


class EndedSave(Message, frozen=True):
    """How one save ended, as its handle says.

    `done`: before anybody waited; `is_over`: what `done()` said after that. `error`: what a job is
    told that waits; `again`: what `wait()` raised when it was called once more, where it was.
    `polled`: what `exception()` gave before anybody waited, where it was asked then.
    """

    step: int
    done: bool
    is_over: bool = True
    error: Error | None = None
    again: Error | None = None
    was_asked_again: bool = False
    was_polled: bool = False
    polled: Error | None = None

    @property
    def answers(self) -> dict[str, Error | None]:
        """What it gave each time that it was asked how the save ended, by what was asked."""
        polled = {"exception()": self.polled} if self.was_polled else {}
        if not self.was_asked_again:
            return {**polled, "wait()": self.error}
        return {**polled, "wait(), exception()": self.error, "wait() again": self.again}


class EndSavesResult(Result, frozen=True, tag="end_saves"):
    """How each save ended that was begun, and what the faults did."""

    saves: tuple[EndedSave, ...] = ()
    faults: tuple[FaultReport, ...] = ()


class EmergencySaveResult(Result, frozen=True, tag="emergency_save"):
    """What the faults of a dump did."""

    faults: tuple[FaultReport, ...] = ()


class PreemptResult(Result, frozen=True, tag="preempt"):
    """The step that was dumped, if one was, and what the faults did."""

    dumped: int | None = None
    faults: tuple[FaultReport, ...] = ()


class LoadResult(Result, frozen=True, tag="load"):
    """The step that a load gave."""

    step: int | None = None
    faults: tuple[FaultReport, ...] = ()


class TrainResult(Result, frozen=True, tag="train"):
    """Records of the steps."""

    records: tuple[StepRecord, ...] = ()


class StepsResult(Result, frozen=True, tag="steps"):
    """The steps that the manager lists; None if it did not answer."""

    steps: list[int] | None = None


class LeavesResult(Result, frozen=True, tag="leaves"):
    """Digests of the live state."""

    leaves: RankLeaves | None = None


class PayloadSample(Message, frozen=True):
    """The first bytes of a large tensor, in hex, and its size in bytes."""

    name: str
    bytes: str
    size: int


class PayloadSamplesResult(Result, frozen=True, tag="payload_samples"):
    """Samples by saved step."""

    samples: dict[int, list[PayloadSample]] = {}


class PerturbResult(Result, frozen=True, tag="perturb"):
    """It has no fields of its own."""


class FreshResult(Result, frozen=True, tag="fresh"):
    """It has no fields of its own."""


class MaterializeResult(Result, frozen=True, tag="materialize"):
    """It has no fields of its own."""


class CloseResult(Result, frozen=True, tag="close"):
    """It has no fields of its own."""


class CopyOutResult(Result, frozen=True, tag="copy_out"):
    """It has no fields of its own."""


class GateResult(Result, frozen=True, tag="gate"):
    """Whether the gate was set, or so many uploads came; `came`: files since it was set before.

    `failed`: how many of these it failed.
    """

    done: bool = False
    came: int = 0
    failed: int = 0


class CallResult(Result, frozen=True, tag="call"):
    """The plain value of a method, and what the faults did."""

    value: Any = None
    faults: tuple[FaultReport, ...] = ()


class ProbeResult(Result, frozen=True, tag="probe"):
    """The plain value of a probe."""

    value: Any = None


AnyResult = (
    RunResult
    | SaveResult
    | BeginSaveResult
    | EndSavesResult
    | EmergencySaveResult
    | PreemptResult
    | LoadResult
    | TrainResult
    | StepsResult
    | LeavesResult
    | PayloadSamplesResult
    | PerturbResult
    | FreshResult
    | MaterializeResult
    | CloseResult
    | CopyOutResult
    | GateResult
    | CallResult
    | ProbeResult
)


def whole(state: RankLeaves) -> Leaves:
    """Narrow the type of a state without boxes: of one process, or joined from all ranks."""
    return cast("Leaves", state)


# ---- programs --------------------------------------------------------------------------------


class JobSpec(Message, frozen=True, omit_defaults=True):
    """The job of a program; `layout`, `tensors` and `device` are of jobs on ranks.

    `without` names each `Feature` that the job leaves out. `data_seed` gives the order of the data
    where it is not the job's seed.
    """

    kind: str
    seed: int
    variant: str = ""
    without: tuple[str, ...] = ()
    data_seed: int | None = None
    layout: dict[str, int] | None = None  # fields of `sharded.Layout`
    tensors: Arguments = {}  # fields of `sharded.Tensors`
    device: str = "cpu"


class Options(Message, frozen=True, omit_defaults=True):
    """How the manager is opened; `mirror` is a path or a URL, `kind` what is asked for.

    Without `gated` no upload gate is passed.
    """

    keep_last: int | None = None
    mirror: str | None = None
    kind: str | None = None
    gated: bool = True

    def to_text(self) -> str:
        """Return what is asked for, in words: `keep_last=1`."""
        usual = structs.asdict(Options())
        given = structs.asdict(self).items()
        asked = {name: value for name, value in given if value != usual[name]}
        return ", ".join(f"{name}={value!r}" for name, value in asked.items())


class OptionNotImplementedError(NotImplementedError):
    """The adapter says of an option, when it opens, that its manager has no such thing."""


class World(Message, frozen=True):
    """One rank of several: `store` is the file where they meet, `timeout` (s) of a collective."""

    rank: int
    size: int
    store: str
    timeout: float
    device: str = "cpu"


HASH_SEED = 0  # of every process of ours, unless a program asks for another one


class Program(Message, frozen=True, omit_defaults=True):
    """What one child does: an adapter, a directory, a job and operations.

    `journal`, `result` and `output` are files of ours. `memory` is in bytes above what the child
    has when it begins, `deadline` in seconds without those in line for a CPU; `snapshots` is a
    folder that gets a copy of the directory after each acknowledged save. `isolation` is the
    adapter's, or `exec` for a child that needs an interpreter of its own whatever its adapter says.
    `rank_group`: this child forks one process for each of these programs, and `rank` is said in
    every event of a journal that they share. `hash_seed` is that of an interpreter of its own.
    `record` names the folder of a recording, which has closes, too, with `closing` and of ranks;
    with `stops` all ranks are killed where each has done so much. With `turns` the processes of the
    group, which are no ranks, or the threads of this child take turns at their system calls.
    `environment` has variables of this child alone; None removes one.
    """

    adapter: str
    root: str
    journal: str
    result: str
    output: str
    job: JobSpec
    ops: tuple[AnyOp, ...] = ()
    options: Options = Options()
    isolation: str = "fork"
    hash_seed: int = HASH_SEED
    deadline: float = 60.0
    memory: int = 4 << 30
    snapshots: str = ""
    device: str = "cpu"
    world: World | None = None
    rank: int | None = None
    rank_group: tuple[Program, ...] = ()
    record: str = ""
    closing: bool = False
    stops: tuple[Stop, ...] = ()
    turns: Plan | None = None
    environment: dict[str, str | None] = {}


class Report(Message, frozen=True):
    """What a child leaves at its end: a result for each operation it reached, memory in KiB."""

    results: tuple[AnyResult, ...] = ()
    baseline_kib: int = 0
    peak_kib: int = 0
    codes: dict[int, int] = {}  # exit codes by rank, of a rank group


class Ready(Message, frozen=True, tag_field="server"):
    """The server listens; why each adapter that can't be used is refused."""

    refused: dict[str, Refusal]


class NotReady(Message, frozen=True, tag_field="server"):
    """The server could not start."""

    error: str


class Ended(Message, frozen=True):
    """How a child ended, as the server saw it: exit code, past its deadline or not, times in s."""

    code: int
    hang: bool
    seconds: float
    cpu: float
    left: list[str]  # daemons that had to be ended
