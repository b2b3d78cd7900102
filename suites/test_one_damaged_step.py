"""One damaged step among whole ones: it costs none of them (CORR) and stops no rotation (RETN)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import NotApplicable, Violation
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.harness.messages import Close
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.controls import test_damage as damage
from ckpt_conformance.suites.controls import test_retention as retention
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Golden, Subject

SAVES = (2, 4, 6, 8)
OLDER, DAMAGED, NEWEST, NEXT = SAVES
HEAD = 64  # bytes at each end of what a save appended that are inverted


@check("CKC-CORR-008")
def test_damage_to_one_step_costs_no_other_one_of_its_file(subject: Subject) -> None:
    """Where steps share a file, damage to what one save appended costs no other step.

    Why: a log was read up to the first record that did not fit, as after a torn write: all later
    steps were gone for discovery, and the next save cut them off.
    How: save steps 2, 4 and 6; where a file grows by appending, invert the beginning, the end and
    one bit in the middle of what step 4 brought. A restart gives step 6 or refuses. Then save step
    8: what loaded before still loads.
    """
    golden = subject.golden(SAVES)
    if not (brought := _appended(golden)):
        raise NotApplicable("no file holds several steps one behind the other")
    legal = subject.legal(golden)
    spots = [(file, *spot) for file, begin, end in brought for spot in _spots(begin, end)]
    trees_of: dict[str, Path] = {}
    for number, (file, what, at, length) in enumerate(subject.sample(spots, 3)):
        folder = subject.scratch / f"damaged-{number}"
        trees.copy(golden.snapshot(NEWEST), folder)
        _invert(folder / file, at, length)
        trees_of[f"{what} of what step {DAMAGED} brought to {file}"] = folder
    before = _given(subject, legal, trees_of)
    _require_no_way_back(before)
    after = _given(subject, legal, _saved_on(subject, trees_of))
    _require_all(before, after)


def _appended(golden: Golden) -> list[tuple[str, int, int]]:
    """Find (file, begin, end) of payload that the save of step 4 appended, and step 6 left."""
    before, after, later = (golden.snapshot(step) for step in (OLDER, DAMAGED, NEWEST))
    found: list[tuple[str, int, int]] = []
    for file in payload.names(before):
        begin = (before / file).stat().st_size
        end = (after / file).stat().st_size if (after / file).is_file() else 0
        if 0 < begin < end and _begins(after / file, before / file):
            places = payload.find(after, golden.payload_samples.get(DAMAGED, []), [file])
            if any(place.offset >= begin for place in places) and _begins(
                later / file, after / file
            ):
                found.append((file, begin, end))
    return found


def _begins(longer: Path, shorter: Path) -> bool:
    """Return whether a file begins with the bytes of another one, and goes on."""
    head = shorter.read_bytes()
    return (
        longer.is_file()
        and longer.stat().st_size > len(head)
        and longer.read_bytes().startswith(head)
    )


def _spots(begin: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield (what to say, offset, bytes) of what is inverted, one at a time."""
    length = min(HEAD, (end - begin) // 2)
    yield "the beginning", begin, length
    yield "the end", end - length, length
    yield "the middle", (begin + end) // 2, 1


def _invert(path: Path, at: int, length: int) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + length] = bytes(byte ^ 0xFF for byte in data[at : at + length])
    path.write_bytes(data)


class Given(NamedTuple):
    """The steps that a directory gives as they were saved: when named, and by a restart."""

    named: set[int]
    by_restart: int | None


def _given(
    subject: Subject, legal: Mapping[int, Leaves], folders: Mapping[str, Path]
) -> dict[str, Given]:
    """Load the newest step of each directory, and steps 2 and 6 where a step can be named."""
    by_name = Capability.EXPLICIT_STEP in subject.info.capabilities
    asked = (None, OLDER, NEWEST) if by_name else (None,)
    cases = [Case(folder, step) for folder in folders.values() for step in asked]
    results = iter(
        resume_each(subject, cases, lambda result: _step(subject, legal, result) != OLDER)
    )
    found: dict[str, Given] = {}
    for what in folders:
        newest, *named = (_step(subject, legal, next(results)) for _ in asked)
        found[what] = Given({step for step in named if step is not None}, newest)
    return found


def _step(subject: Subject, legal: Mapping[int, Leaves], result: ProcessResult) -> int | None:
    """Return the step that a load gave as it was saved; None for a refusal or another state."""
    step, state = oracle.arrival(result)
    if step is None or step not in legal:
        return None
    return step if oracle.same(state, legal[step], subject.holds) else None


def _require_no_way_back(before: Mapping[str, Given]) -> None:
    back = [damage for damage, given in before.items() if given.by_restart == OLDER]
    if back:
        message = (
            f"with step {DAMAGED} damaged a restart goes back to step {OLDER}, past step {NEWEST}"
        )
        raise Violation(message, evidence={"inverted": back[0]}, rate=(len(back), len(before)))


def _saved_on(subject: Subject, folders: Mapping[str, Path]) -> dict[str, Path]:
    """Save step 8 in each directory; give those in which it was acknowledged."""
    saved: dict[str, Path] = {}
    for what, folder in folders.items():
        trees.materialize(folder, subject.root)
        result = subject.run(NEXT, (NEXT,), then=[Close()])
        if NEXT in result.steps_of("acknowledged"):
            saved[what] = folder.with_name(f"{folder.name}-after")
            trees.copy(subject.root, saved[what])
    return saved


def _require_all(before: Mapping[str, Given], after: Mapping[str, Given]) -> None:
    """Raise Violation if a save cost a step that was whole, or is not given itself."""
    lost = {
        damage: sorted((before[damage].named - given.named) | ({NEXT} - {given.by_restart}))
        for damage, given in after.items()
    }
    bad = {damage: steps for damage, steps in lost.items() if steps}
    if bad:
        damage, steps = next(iter(bad.items()))
        message = f"with step {DAMAGED} damaged, a save of step {NEXT} leaves whole steps lost"
        evidence = {"inverted": damage, "lost": steps}
        raise Violation(message, evidence=evidence, rate=(len(bad), len(after)))


@check("CKC-RETN-013")
def test_a_damaged_step_does_not_stop_rotation(subject: Subject) -> None:
    """Beside a step that is damaged the whole ones that are too old still go.

    Why: a rotation that met a damaged record gave up with a warning, in every save from then on,
    until the disk was full.
    How: save steps 2 and 4, damage 4, save five more with two to keep: of the whole steps
    three stay at most. So it is without the damage.
    """
    keep = retention.keeping(subject, 2)
    controls.require(smoke.test_a_save_that_returned_is_there, subject)
    golden = subject.golden(SAVES)
    later = tuple(range(NEWEST, NEWEST + 10, 2))
    stay = _rotated(subject, golden, keep, later, is_damaged=True)
    if len(set(stay) - {DAMAGED}) <= keep + 1:  # one more may stay until the next save
        return
    whole = _rotated(subject, golden, keep, later, is_damaged=False)
    if len(whole) > keep + 1:
        reason = f"without damage, too, steps {whole} stay"
        raise controls.blame(subject, reason, retention.test_exactly_the_newest_stay)
    message = f"with step {DAMAGED} damaged rotation leaves whole steps that are too old"
    raise Violation(message, evidence={"stay": stay, "without damage": whole})


def _rotated(
    subject: Subject, golden: Golden, keep: int, later: tuple[int, ...], *, is_damaged: bool
) -> list[int]:
    """Save further steps with rotation on steps 2 and 4; return the steps that stay."""
    subject.materialize(golden, DAMAGED)
    if is_damaged:
        _damage(subject.root, golden)
    result = retention.rotating(subject, later[-1], later, keep, then=retention.ASK)
    return retention.left(subject, result)


def _damage(root: Path, golden: Golden) -> None:
    """Invert a byte in the middle of what step 4 appended, or cut its largest file in half."""
    brought = _appended(golden)
    if brought:
        file, begin, end = brought[0]
        _invert(root / file, (begin + end) // 2, 1)
    elif damage.older_stays(golden):
        at_rest.truncate_all(root, damage.largest_of(golden, DAMAGED), "half")
    else:
        raise NotApplicable("no file belongs to one step alone")
