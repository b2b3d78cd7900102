"""Smoke: the adapter works and its claims hold. Everything else builds on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Violation
from ckpt_conformance.harness.messages import (
    Call,
    CallResult,
    Close,
    EmergencySave,
    ExitKind,
    Load,
    LoadResult,
    Options,
    Probe,
    ProbeResult,
    Run,
    RunResult,
    Save,
    SaveResult,
    Steps,
    StepsResult,
    Train,
)
from ckpt_conformance.subject import controls, oracle, resumption, worlds
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import SAVES
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject

READ = "ckpt_conformance.subject.observing:tensors_in_torch_files"
STRANGE = ("run[1] *?", "50% of 'a' & \"b\" #{2}\nü")
"""Names of directories: what patterns, URLs, formats and shells read in another way."""


@check("CKC-SMOK-001")
def test_a_new_process_loads_what_was_saved(subject: Subject) -> None:
    """A process that never saw the save loads the newest step.

    Why: one save path that omits a file which the loader requires makes every restart fail (B11).
    How: save two steps, end the process, load the latest in a fresh one.
    """
    resumption.loads_in_a_new_process(subject)


@check("CKC-SMOK-001")
def test_what_was_saved_through_a_link_is_loaded(subject: Subject) -> None:
    """A directory that is reached through a symbolic link is one like any other.

    Why: clusters keep runs on one disk and name them by a link; who compares the real path of a
    file with the directory's name finds that each file lies outside, and refuses them all (B13).
    How: save into a directory by a link to it; a new process loads by the link, and then by the
    directory's own name. A save that is refused is none.
    """
    controls.require(test_a_new_process_loads_what_was_saved, subject)
    subject.reset()
    place = subject.scratch / "disk" / "run"
    place.mkdir(parents=True)
    link = subject.scratch / "run"
    link.symlink_to(place.parent, target_is_directory=True)
    step = SAVES[0]
    saved = subject.run(step, (step,), then=[Close()], root=link / "run")
    if saved.steps_of("acknowledged") != [step]:
        return
    for root in (link / "run", place):
        resumed = subject.resume(root=root)
        arrived, _ = oracle.arrival(resumed)
        if arrived != step:
            named = "the link" if root != place else "its own name"
            message = f"step {step} was saved through a link; a load by {named} gives {arrived}"
            raise Violation(message, evidence=subject.evidence(resumed))


@check("CKC-SMOK-002")
def test_discovery_names_an_acknowledged_step(subject: Subject) -> None:
    """After an acknowledged save discovery names the step, in the same process and in a new one.

    Why: a step that nobody names is a step that retention, evaluation and restart do not see; two
    rules of discovery in one code base disagree sooner or later (B04, B15).
    How: save two steps; ask the live manager, then one in a fresh process.
    """
    controls.require(test_a_save_that_returned_is_there, subject)
    trees.clear(subject.root)
    result = subject.run(4, (2, 4), then=[Steps(), Close()])
    live = result.of(StepsResult).steps
    if live is None:
        raise Violation("discovery does not answer", evidence=subject.evidence(result))
    for asked, listed in (("the live manager", live), ("a new process", subject.steps())):
        if 4 not in listed:  # noqa: PLR2004  the step that was saved last
            raise Violation(f"step 4 was acknowledged; {asked} lists {listed}")


@check("CKC-SMOK-002")
def test_a_step_that_is_saved_after_going_back_is_there(subject: Subject) -> None:
    """A step that a job saves after it went back, below the newest, is there once acknowledged.

    Why: a step that is smaller than the last one was taken for one that had been saved, and skipped
    without a word: until the old step was passed a job that had gone back saved nothing (B04).
    How: save steps 2 and 4, load step 2 by the same manager, train, save step 3. Discovery of a new
    process lists it, and it loads. A manager that refuses to save it has said so.
    """
    subject.need(Capability.EXPLICIT_STEP, Capability.STEPS, shape="manager")
    controls.require(test_discovery_names_an_acknowledged_step, subject)
    trees.clear(subject.root)
    back = (Load(step=2), Train(n=1), Save(step=3, go_on=True), Close())
    result = subject.execute(Run(until=4, save_at=(2, 4)), *back)
    if not result.reached(SaveResult):
        raise trouble(subject, result)
    if (given := result.of(LoadResult).step) != 2:  # noqa: PLR2004  the step that was asked for
        reason = f"a load of step 2 gives step {given}"
        raise controls.blame(subject, reason, test_each_declared_capability_works)
    if error := result.of(SaveResult).error:
        raise NotApplicable(f"it refuses a step below the newest: {error.message}")
    listed = subject.steps()
    loaded = oracle.step_of(subject.resume(3)) if 3 in listed else None  # noqa: PLR2004
    if loaded not in {3, None}:  # it is there, under this name, and says another step
        reason = f"a load of step 3 gives step {loaded}"
        raise controls.blame(subject, reason, bit_exact.test_the_step_is_the_step_of_the_content)
    if loaded != 3:  # noqa: PLR2004  the step that was saved last
        message = (
            "step 3 was acknowledged, by a job that had gone back from 4 to 2, and is not there"
        )
        raise Violation(message, evidence=subject.evidence(result, listed=listed, loaded=loaded))


@check("CKC-SMOK-002")
def test_discovery_names_a_step_in_a_directory_of_any_name(subject: Subject) -> None:
    """What was saved is found whatever the name of the directory.

    Why: a directory that is listed by a pattern, with its own name not escaped, has no step as soon
    as a sweep puts brackets in the name: the run begins again at step 0 (B13).
    How: save into directories whose names a pattern, a URL or a shell reads in another way; ask the
    live manager, then one in a fresh process. A save that is refused is none.
    """
    controls.require(test_discovery_names_an_acknowledged_step, subject)
    subject.reset()
    for name in STRANGE:
        _require_named_in(subject, name)


def _require_named_in(subject: Subject, name: str) -> None:
    """Raise Violation if what is saved into a directory of this name is not named there."""
    root = subject.scratch / name
    root.mkdir()
    saved = subject.run(2, (2,), then=[Steps(go_on=True), Close()], root=root)
    if saved.steps_of("acknowledged") != [2]:
        return
    again = subject.execute(Steps(), root=root)
    for asked, result in (("the live manager", saved), ("a new process", again)):
        listed = result.of(StepsResult).steps
        if 2 not in (listed or ()):  # noqa: PLR2004  the step that was saved
            message = f"step 2 was acknowledged in {name!r}; {asked} lists {listed}"
            raise Violation(message, evidence=subject.evidence(result))


@check("CKC-SMOK-003")
def test_each_declared_capability_works(subject: Subject) -> None:
    """Whatever the adapter declares works when it is used plainly.

    Why: an option that is accepted and never read is worse than none: the restart began from base
    weights although a checkpoint was named (R06).
    How: use each declared capability once, without any fault; what was exported is read. A second
    export to the same place replaces the first one, lies beside it, or is refused.
    """
    controls.require(test_a_new_process_loads_what_was_saved, subject)
    if "steps" in subject.info.capabilities:
        controls.require(test_discovery_names_an_acknowledged_step, subject)
    for capability in subject.info.capabilities:
        use = PLAIN_USE.get(capability)
        if use is not None:
            subject.reset()
            subject.materialize(subject.golden())
            _use(subject, capability, use)


def _use(subject: Subject, capability: str, plainly: Callable[[Subject], None]) -> None:
    """Use a capability; raises Violation also where the adapter does not implement it after all."""
    try:
        plainly(subject)
    except NotApplicable as why:
        raise Violation(f"{capability} is declared and does not work: {why}") from why


@check("CKC-SMOK-004")
def test_a_save_that_returned_is_there(subject: Subject) -> None:
    """Once a save is acknowledged another process can load the step, although nobody called close.

    Why: a job ends without ceremony: it is preempted, or its script is over. What a background
    thread, a buffer or close() would still have written is then not there (A08, B17).
    How: copy the directory when the save is acknowledged; resume from the copy.
    """
    controls.require(test_a_new_process_loads_what_was_saved, subject)
    result = resumption.resumed(subject, subject.golden())
    step, _ = oracle.arrival(result)
    if step != 4:  # noqa: PLR2004  the step whose save had returned
        raise Violation(
            "a step whose save has returned does not load before close()",
            evidence=subject.evidence(result),
        )


def trouble(subject: Subject, result: ProcessResult, *more: controls.Check) -> Unknown:
    """Make the Unknown of a check whose child without faults does not end well."""
    checks = (test_a_new_process_loads_what_was_saved, test_a_save_that_returned_is_there)
    return controls.blame(subject, subject.tell(result), *checks, *more)


def _fail(subject: Subject, capability: str, given: object, result: ProcessResult) -> None:
    raise Violation(
        f"{capability} is declared and does not work: it gives {given}",
        evidence=subject.evidence(result),
    )


def _explicit_step(subject: Subject) -> None:
    result = subject.resume(2)
    if oracle.step_of(result) != 2:  # noqa: PLR2004  the step that was asked for
        _fail(subject, "explicit_step", subject.tell(result), result)


def _retention(subject: Subject) -> None:
    trees.clear(subject.root)
    keep = subject.keepable(2)
    saves = tuple(range(2, 2 * keep + 4, 2))
    result = subject.run(saves[-1], saves, options=Options(keep_last=keep), then=[Close()])
    kept = subject.steps() if "steps" in subject.info.capabilities else list(saves[-keep:])
    if result.error or not are_newest(result, kept, saves, keep):
        _fail(subject, "retention", f"steps {kept} with keep_last={keep}", result)


def are_newest(
    result: ProcessResult, steps: Sequence[int], saves: Sequence[int], keep: int
) -> bool:
    """Return whether the newest `keep` of the saves of a run are there, and no others.

    What is saved in the background may leave one more, until its next save: the newest was not
    there yet when rotation looked.
    """
    numbers = {keep, keep + 1} if result.of(RunResult).in_background else {keep}
    return list(steps) in [list(saves[-number:]) for number in numbers]


def _mirror(subject: Subject) -> None:
    trees.clear(subject.root)
    mirror = subject.scratch / "mirror"
    mirror.mkdir()
    result = subject.run(2, (2,), options=Options(mirror=str(mirror)), then=[Close()])
    if result.error or not trees.files(mirror):
        _fail(subject, "mirror", f"{len(trees.files(mirror))} files in the mirror", result)


def _reference(subject: Subject) -> None:
    result = subject.resume(str(subject.root))
    if oracle.step_of(result) != 4:  # noqa: PLR2004  the newest step
        _fail(subject, "reference", subject.tell(result), result)


def _kinds(subject: Subject) -> None:
    ops = [
        Call(method=f"{verb}_kind", args=("$job", 6, kind))
        for kind in ("model", "dcp")
        for verb in ("save", "load")
    ]
    result = subject.execute(*ops)
    values = [call.value for call in result.all_of(CallResult)]
    if values[1::2] != [6, 6]:
        _fail(subject, "kinds", values, result)


def _export(subject: Subject) -> None:
    """Export an older step, then the newest one to the same place, which may be refused."""
    target = str(subject.scratch / "export")
    read = Probe(probe=READ, args={"place": target})
    ops: list[AnyOp] = []
    for step in SAVES:
        ops += [Call(method="export", args=(step, target), go_on=step != SAVES[0]), read]
    result = subject.execute(*ops)
    refused = result.of(CallResult, 1).error
    if result.exit_kind is not ExitKind.ENDED or result.error not in {None, refused}:
        _fail(subject, "export", subject.tell(result), result)
    for at, step in enumerate(SAVES[:1] if refused else SAVES):
        exported: dict[str, str] = result.of(ProbeResult, at).value
        wrong = _not_among(exported, subject.golden().at[step]["model"])
        if wrong:
            beside = f", where one of step {SAVES[0]} stood" if at else ""
            raise Violation(
                f"export is declared and does not work: of step {step} {len(wrong)} of the model's "
                f"tensors are not in a torch file there with the bits that were saved{beside}",
                evidence={"not there": wrong[:8], "there": sorted(exported)[:8]},
            )


def _not_among(exported: Mapping[str, str], saved: Mapping[str, str]) -> list[str]:
    """Name the saved entries that no exported one of their name, below any other, has the bits of.

    Of entries that share memory one may stand for all: it has another name and the same bits.
    """
    named: dict[str, set[str]] = {}
    for path, digest in exported.items():
        parts = path.split(".")
        for at in range(len(parts)):
            named.setdefault(".".join(parts[at:]), set()).add(digest)
    there = set(exported.values())
    tensors = {name: digest for name, digest in saved.items() if not name.endswith("()")}
    return [name for name, digest in tensors.items() if digest not in named.get(name, there)]


def _cold_start(subject: Subject) -> None:
    result = subject.execute(Call(method="load_without", args=("$job", 4, "optimizer")))
    step = result.of(CallResult).value
    if step != 4:  # noqa: PLR2004  the step that was asked for
        _fail(subject, "cold_start", step, result)


def _ranks(subject: Subject) -> None:
    _by_ranks(subject, "ranks", {"fsdp": 2})


def _reshard(subject: Subject) -> None:
    _by_ranks(subject, "reshard", {"fsdp": 1})


def _by_ranks(subject: Subject, capability: str, layout: worlds.Layout) -> None:
    """Save with two ranks, load with others."""
    trees.clear(subject.root)
    saved = worlds.run(subject, {"fsdp": 2}, 2, (2,), then=[Close()])
    result = worlds.resume(subject, layout) if saved.went_well else saved
    step, _ = oracle.arrival(result)
    if step != 2:  # noqa: PLR2004  the step that was saved
        ending = subject.tell(result)
        message = f"{capability} is declared and does not work: two ranks save, then: {ending}"
        raise Violation(message, evidence=subject.evidence(result))


def _plant(subject: Subject) -> None:
    result = subject.execute(Call(method="plant", args=(8,)), Steps())
    listed = result.of(StepsResult).steps or []
    if 8 not in listed:  # noqa: PLR2004  the step that was planted
        _fail(subject, "plant", listed, result)


def _stage(subject: Subject) -> None:
    """Stage a step on an empty disk."""
    trees.clear(subject.root)
    options = Options(mirror=str(subject.scratch / "mirror"))
    saved = subject.run(2, (2,), options=options, then=[Close()])
    trees.clear(subject.root)
    staged = subject.execute(Call(method="stage", args=(2, False, None)), Close(), options=options)
    resumed = subject.resume()
    if saved.error or staged.error or oracle.step_of(resumed) != 2:  # noqa: PLR2004  that step
        _fail(subject, "stage", subject.tell(staged if staged.error else resumed), staged)


def _emergency(subject: Subject) -> None:
    """Dump on an empty disk: files are there. What a resume makes of them is CKC-EMRG-001."""
    trees.clear(subject.root)
    caught = Call(method="catch_sigterm")
    result = subject.execute(caught, Run(until=2), EmergencySave())
    if result.error or not trees.files(subject.root):
        files = len(trees.files(subject.root))
        _fail(subject, "emergency", f"{files} files, {subject.tell(result)}", result)


def _reseal(subject: Subject) -> None:
    """Renew checksums that fit already: the step still loads."""
    subject.execute(Call(method="reseal", args=(4,)))
    result = subject.resume()
    if oracle.step_of(result) != 4:  # noqa: PLR2004  the step whose checksums were renewed
        _fail(subject, "reseal", subject.tell(result), result)


PLAIN_USE: dict[str, Callable[[Subject], None]] = {
    "explicit_step": _explicit_step,
    "retention": _retention,
    "mirror": _mirror,
    "reference": _reference,
    "kinds": _kinds,
    "export": _export,
    "cold_start": _cold_start,
    "ranks": _ranks,
    "reshard": _reshard,
    "plant": _plant,
    "reseal": _reseal,
    "emergency": _emergency,
    "stage": _stage,
}
