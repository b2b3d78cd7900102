"""Before the first crash: record a run, run the command again, resume from whole directories.

Nothing can be said of crashes where two uninterrupted runs differ, or where it is not known what
a resume from an undamaged directory gives. Raises Unknown with the reason and the next step.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore.exploration import complete_at
from ckpt_conformance.crash.explore.judging import BEFORE, Version
from ckpt_conformance.crash.explore.materializer import digest
from ckpt_conformance.crash.explore.messages import pack
from ckpt_conformance.crash.script import progress
from ckpt_conformance.crash.script.child import GENERATORS
from ckpt_conformance.crash.script.command import start_of
from ckpt_conformance.crash.script.messages import Begin, Compare, Expect, Record, Recover, Warm
from ckpt_conformance.crash.script.pool import WEEK, Pool, WorkerProcess
from ckpt_conformance.harness import opened
from ckpt_conformance.trace.operations import Kind, Recording

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Collection, Sequence

    from ckpt_conformance.crash.explore.exploration import Limits
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.crash.script.command import Script
    from ckpt_conformance.crash.script.messages import Comparison, Recorded, Run
    from ckpt_conformance.crash.script.progress import Meter, Patterns
    from ckpt_conformance.trace.operations import Operation

PATIENCE, FEWEST = 90.0, 12  # seconds of recovering with a quick budget; states for one model
CONTROLS = 40  # whole directories that are resumed from, at most
SHORTEST, FACTOR = 30.0, 10  # of a deadline: seconds, and times the uninterrupted run
_ERROR = re.compile(r"(?:\[\w+\]:\s*)?[\w.]*(?:Error|Exception|Interrupt)\b")
LAUNCHER = "ChildFailedError"  # of torchrun
LAST_WORDS = 300  # characters of an output that are told
SECOND_RUN = "a second uninterrupted run"
AS_A_USER = Recover(WEEK, first=True, fork=False)  # in an empty directory, started anew


@dataclass
class Rehearsal:
    """What is known before the first crash.

    `results` are what a resume from each version's whole directory gives, by the version's number.
    `inexact` tells which of them are not what the uninterrupted run gives.
    """

    script: Script
    pool: Pool
    recording: Recording
    meter: Meter
    patterns: Patterns
    deadline: float
    expected: Path
    versions: list[Version] = field(default_factory=list[Version])
    results: dict[int, str] = field(default_factory=dict[int, str])
    controls: dict[str, Run] = field(default_factory=dict[str, "Run"])  # by content
    inexact: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    forks: bool = True
    seconds: float = 0.0  # of one resume
    workers: int = 0  # where it was rehearsed; 0: here

    def within(self, limits: Limits, models: int) -> Limits:
        """Recover from fewer states where a resume takes long; a note says what is left out."""
        workers = self.workers or len(self.pool.workers)
        of_model = limits.recoveries * self.seconds / max(1, workers)
        if of_model * models <= PATIENCE:
            return limits
        count = max(FEWEST, int(limits.recoveries * PATIENCE / (of_model * models)))
        if count >= limits.recoveries:
            return limits
        self.notes.append(
            f"a resume takes {self.seconds:.1f} s: {count} states are visited for each model; "
            "--budget full visits all of them"
        )
        return replace(limits, recoveries=count, rounds=0)


@dataclass
class Stage:
    """Workers, and where their progress is reported."""

    script: Script
    folder: Path
    jobs: int
    tell: Callable[[str], None]  # takes a line of progress
    stack: contextlib.ExitStack
    workers: list[WorkerProcess] = field(default_factory=list[WorkerProcess])
    why_not: str = ""  # why runs are started anew instead of forked
    private: bool = True
    expected: str = ""  # where the result of the uninterrupted run is kept
    notes_opened: bool = False  # whether workers note what runs open, in `folder`
    closing: bool = False  # whether closes are recorded, too

    def worker(self) -> WorkerProcess:
        """Start one more worker."""
        folder = self.folder / f"worker-{len(self.workers)}"
        if self.notes_opened and not self.workers:
            opened.prepare(self.folder)
        notes = self.folder if self.notes_opened else None
        worker = self.stack.enter_context(WorkerProcess(folder, self.script, notes))
        self.workers.append(worker)
        return worker

    @property
    def recording(self) -> str:
        """Where the recording is."""
        return str(self.folder / "recording")


def last_words(output: str) -> str:
    """Return the last line that names an error, or else the last line.

    The error of a launcher is passed over: it names no cause.

    A rank that a signal ends names none: there torchrun's `exitcode` is the most there is.
    """
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalnum, line))]
    errors = [line for line in lines if _ERROR.match(line) and LAUNCHER not in line]
    if errors and any(LAUNCHER in line for line in lines):
        return errors[0][:LAST_WORDS]  # what ended the others
    codes = [line for line in lines if line.startswith("exitcode")]
    return (errors or codes or lines or ["it printed nothing"])[-1][:LAST_WORDS]


class _UnlikeError(Exception):
    """Forked, a script does something else than started anew."""


def rehearse(stage: Stage) -> Rehearsal:
    """Record, run again, compare, resume from every whole directory that was acknowledged."""
    stage.why_not = "" if stage.script.fork else "--no-fork"
    starts = [start_of(stage.script.filled(resume=again)) for again in (False, True)]
    stage.why_not = stage.why_not or next((s for s in starts if isinstance(s, str)), "")
    try:
        return _rehearse(stage)
    except _UnlikeError as error:
        again = replace(
            stage,
            folder=stage.folder / "anew",
            workers=[],
            script=replace(stage.script, fork=False),
        )
        again.why_not = str(error)
        return _rehearse(again)


def _rehearse(stage: Stage) -> Rehearsal:
    stage.tell("recording an uninterrupted run")
    first, second = stage.worker(), stage.worker()
    stage.private = second.ask(Begin()).private
    others = [stage.worker() for _ in range(stage.jobs)] if stage.private else []
    recorded, plain = _record_and_run(stage, first, second, others)
    _check_recorded(recorded)
    stage.script = replace(stage.script, result_file=recorded.result_file)
    stage.expected = recorded.expected
    _expect(stage, [second])
    comparison = second.ask(Compare())
    if plain.exit_kind == "hang":
        raise Unknown(f"{SECOND_RUN} did not end")
    _check_status(plain.code, plain.output, SECOND_RUN)
    if not comparison.same:
        _explain_difference(stage, second, comparison)
    rehearsal = _prepare(stage, recorded, plain)
    ready = others or [second]  # the second one imported nothing, so that its start was a real one
    _expect(stage, ready)
    if not stage.why_not and not others and (why := second.ask(Warm()).why):
        raise Unknown(f"the script can't be forked: {why}; run it with --no-fork")
    rehearsal.pool = Pool(ready)
    _resume_from_whole(rehearsal)
    return rehearsal


def _record_and_run(
    stage: Stage, first: WorkerProcess, second: WorkerProcess, others: Sequence[WorkerProcess]
) -> tuple[Recorded, Run]:
    """Record a run, and run the command as a user would, at the same time if that is possible."""

    def record() -> Recorded:
        if not stage.why_not:
            stage.why_not = first.ask(Warm()).why
        return first.ask(Record(str(stage.folder), stage.closing))

    def plain() -> Run:
        return second.ask(AS_A_USER)

    def prepare(worker: WorkerProcess) -> None:
        worker.ask(Begin())
        if not stage.why_not:
            worker.ask(Warm())

    if not stage.private:
        return record(), plain()
    with ThreadPoolExecutor(2 + len(others)) as threads:
        recorded, as_a_user = threads.submit(record), threads.submit(plain)
        try:
            _ = list(threads.map(prepare, others))
            return recorded.result(), as_a_user.result()
        except BaseException:  # the threads have to end first, and they wait for answers
            for worker in stage.workers:
                worker.end()
            raise


def _check_recorded(recorded: Recorded) -> None:
    """Raise Unknown if the recorded run did not end well, or left no result."""
    _check_status(recorded.code, recorded.output, "the uninterrupted run")
    if recorded.result_code:
        raise Unknown(f"--result-cmd ends with exit status {recorded.result_code}")
    if recorded.absent:
        raise Unknown(f"--result-file {recorded.absent!r} is not there after the uninterrupted run")


def _check_status(code: int, output: str, what: str) -> None:
    if code != 0:
        raise Unknown(
            f"{what} ends with exit status {code}: {last_words(output)}; it has to end well "
            "before anything can be said about crashes"
        )


def _expect(stage: Stage, workers: Sequence[WorkerProcess]) -> None:
    """Tell workers what was recorded and what it produced."""
    for worker in workers:
        worker.ask(Expect(stage.recording, stage.expected, stage.script.result_file))


def _explain_difference(stage: Stage, second: WorkerProcess, plain: Comparison) -> None:
    """Raise Unknown if the script is not seeded, and _UnlikeError if only the fork differs."""
    again = second.ask(AS_A_USER)
    if stage.why_not or again.comparison.digest != plain.digest:
        raise Unknown(_unseeded(stage, second, plain))
    raise _UnlikeError("forked, it gives another result than started anew")


def _unseeded(stage: Stage, second: WorkerProcess, plain: Comparison) -> str:
    """Say that two runs differ, where, and what has to be seeded."""
    what = stage.script.result_file or "what --result-cmd prints"
    return (
        f"two uninterrupted runs differ in {what}: {'; '.join(plain.differs[:3])}. "
        f"A resumed run can't be compared with anything then. {_what_to_seed(stage, second)}"
    )


def _what_to_seed(stage: Stage, worker: WorkerProcess) -> str:
    """Say which generators the script has to seed, found out by seeding all but one for it."""
    usual = "torch.manual_seed(...), random.seed(...), numpy.random.seed(...)"
    advice = f"Seed what it draws from ({usual}), or leave what differs out with --result-cmd"
    start = start_of(stage.script.filled(resume=False))
    if stage.why_not or isinstance(start, str) or worker.ask(Warm()).why:
        return advice

    def steady(seeded: Collection[str]) -> bool:
        request = Recover(WEEK, first=True, seeded=tuple(seeded))
        digests = [worker.ask(request).comparison.digest for _ in range(2)]
        return bool(digests[0]) and digests[0] == digests[1]

    stage.tell("two runs differ: looking for the generator that is not seeded")
    if not steady(GENERATORS):
        return (
            "With random, numpy and torch seeded they still differ: look for times, os.urandom, "
            "several threads, or generators of its own; or compare with --result-cmd"
        )
    words = {
        "torch": "torch.manual_seed(...)",
        "random": "random.seed(...)",
        "numpy": "numpy.random.seed(...)",
    }
    guilty = [words[n] for n in GENERATORS if not steady([o for o in GENERATORS if o != n])]
    return f"Seed it: call {', '.join(guilty) or usual} at its start"


def _prepare(stage: Stage, recorded: Recorded, plain: Run) -> Rehearsal:
    """Choose how positions are measured, and put marks into the recording."""
    script = stage.script
    recording = Recording.read(Path(stage.recording))
    if all(operation.kind is Kind.MARK for operation in recording.operations):
        raise Unknown(
            f"the uninterrupted run wrote nothing below {script.root}: does the script use {{out}}?"
        )
    patterns = _patterns(script, recording)
    outputs = [recorded.output, plain.output]
    meter = progress.Meter(patterns, progress.measure_of(patterns, outputs, plain.files))
    recording.operations = progress.with_marks(recording, patterns)
    recording.save()
    forks = not stage.why_not
    seconds = recorded.seconds if forks else plain.seconds
    deadline = script.deadline or max(SHORTEST, FACTOR * seconds)
    expected = Path(stage.expected)
    rehearsal = Rehearsal(script, Pool([]), recording, meter, patterns, deadline, expected)
    rehearsal.forks, rehearsal.seconds = forks, seconds
    if stage.why_not:
        rehearsal.notes.append(f"started anew for each state: {stage.why_not}")
    if not (script.result_cmd or script.result_file):
        rehearsal.notes.append(
            "there is no file of tensors to compare: give --result-file or --result-cmd, or wrong "
            "results are not seen"
        )
    if script.checkpoint_glob and not progress.commits(recording, patterns):
        raise Unknown(
            f"--checkpoint-glob {script.checkpoint_glob!r} matches nothing that the script writes "
            f"below {{out}}: {', '.join(_names(recording)[:6])}"
        )
    return rehearsal


def _patterns(script: Script, recording: Recording) -> Patterns:
    """Recognize checkpoints; the result is none, unless it is written again and again."""
    from_user = (script.step_regex, script.checkpoint_glob)
    patterns = progress.make_patterns(*from_user)
    operations = [recording.operations[at] for at in progress.commits(recording, patterns)]
    times = sum(script.result_file in {commit.path, commit.target} for commit in operations)
    only = times <= 1 and not script.result_cmd
    return progress.make_patterns(*from_user, script.result_file if only else "")


def _names(recording: Recording) -> list[str]:
    return list(dict.fromkeys(o.target or o.path for o in recording.operations if o.path))


# -- resuming from whole directories --------------------------------------------------------------


def _resume_from_whole(rehearsal: Rehearsal) -> None:
    """Resume from the whole directory at each mark: what comes of it is promised from there on."""
    marks = [each for each in rehearsal.recording.operations if each.kind is Kind.MARK]
    kept = complete_at(rehearsal.recording, {mark.index + 1 for mark in marks}) if marks else {}
    wholes = {mark.index: kept[mark.index + 1] for mark in marks}
    contents = {index: digest(rehearsal.recording, state) for index, state in wholes.items()}
    first = {content: index for index, content in reversed(contents.items())}
    room = int(PATIENCE * len(rehearsal.pool.workers) / rehearsal.seconds)
    chosen = evenly(sorted(first.values()), min(CONTROLS, max(FEWEST, room)))

    def request(number: int) -> Recover:
        return Recover(rehearsal.deadline, state=pack([wholes[chosen[number]]]))

    for number, run in rehearsal.pool.map(len(chosen), request):
        rehearsal.controls[contents[chosen[number]]] = run
    rehearsal.seconds = median(run.seconds for run in rehearsal.controls.values())
    _check_regex(rehearsal)
    best = 0
    for mark in marks:
        control = rehearsal.controls.get(contents[mark.index])
        if control is not None and control.is_good:
            best = _promise(rehearsal, mark, control, best)
    if best == 0 and rehearsal.meter.measure.by != "nothing":
        _never_resumes(rehearsal, marks[-1], wholes[marks[-1].index])


def evenly(items: list[int], count: int) -> list[int]:
    """Choose so many of the items, from the first to the last; at most all of them."""
    if len(items) <= count or count < 2:  # noqa: PLR2004  two have a distance
        return items[:count]
    step = (len(items) - 1) / (count - 1)
    return [items[round(number * step)] for number in range(count)]


def _check_regex(rehearsal: Rehearsal) -> None:
    """Refuse an expression of the user's that finds nothing at all."""
    named = any(rehearsal.patterns.steps(run.output) for run in rehearsal.controls.values())
    marked = any(o.kind is Kind.MARK and o.step >= 0 for o in rehearsal.recording.operations)
    if rehearsal.script.step_regex and not named and not marked:
        raise Unknown(
            f"--step-regex {rehearsal.script.step_regex!r} matches no line of the uninterrupted "
            "run, nor of a resumed one"
        )


def _promise(rehearsal: Rehearsal, mark: Operation, run: Run, best: int) -> int:
    """Promise, from a mark on, what the resume there came to; return the best position so far."""
    position, comparison = rehearsal.meter.position(run.output, run.files), run.comparison
    if not position or position <= best:
        return best
    number = len(rehearsal.versions)
    rehearsal.versions.append(Version(number, position, BEFORE, mark.index))
    rehearsal.results[number] = comparison.digest
    _acknowledge(rehearsal.recording, mark)
    if not comparison.same:
        where = rehearsal.meter.describe(position)
        rehearsal.inexact.append(f"{where}, nothing damaged: {'; '.join(comparison.differs[:3])}")
    return position


def _acknowledge(recording: Recording, mark: Operation) -> None:
    recording.operations[mark.index] = replace(mark, mark="acknowledged")


def _never_resumes(rehearsal: Rehearsal, mark: Operation, whole: State) -> None:
    """Hold a script that wrote checkpoints to them, although it never resumes."""
    names = [name for name in whole.names if rehearsal.patterns.is_checkpoint(name)]
    if names:
        rehearsal.versions.append(Version(0, 1, BEFORE, mark.index))
        rehearsal.results[0] = ""
        _acknowledge(rehearsal.recording, mark)
        rehearsal.notes.append(
            f"it never resumes, although {names[-1]} is there: does that take another command? "
            "give it with --resume-cmd"
        )
