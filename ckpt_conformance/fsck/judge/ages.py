"""Which of several checkpoints is newer: by epoch and step as far as all have them, or by time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.judge.roles import is_count
from ckpt_conformance.fsck.layouts import step_names
from ckpt_conformance.fsck.source.findings import Finding, Kind, Role, State, Topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt_conformance.fsck.source.findings import Facts, Report

COUNTERS = ("global_steps", "global_step", "iteration", "step")
"""Under which keys files of `torch.save` count their steps."""
UPDATES = "num_updates"
"""The same of fairseq, whose names say an epoch, or an epoch and a step."""
_EPOCH = "epoch"
_FIRST, _MOST_SLOTS = (0, 1), 16  # of the numbers of files that are written by turns

Key = tuple[bool, int, int, bool, float]


class Age(NamedTuple):
    """What orders a checkpoint among others.

    Attributes:
        epoch: None where it is not known.
        step: None where it is not known.
        time: seconds since 1970 of the last change.
        resumable: whether a file in it was seen to hold the state of an optimizer.
        counted: the epoch that its files count, whatever its name says.
        slot: the number of a name that has no word for what it counts, such as `ckpt.1.pt`.
        inside: the step that its files count, whatever its name says.
        alone: of a model and an optimizer the one that it holds, where all that it holds is known.

    """

    epoch: int | None
    step: int | None
    time: float
    resumable: bool = False
    counted: int | None = None
    slot: int | None = None
    inside: int | None = None
    alone: Role | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything but the time is known."""
        return self.epoch is not None or self.step is not None


UNKNOWN = Age(None, None, 0.0)


def age_of(name: str, said: int | None, facts: Iterable[Facts], time: float) -> Age:
    """Return the age of what has a name; `said` is the step that its report says.

    A step in the name decides. Where there is none, files in it may count steps and epochs.
    """
    epoch, step = step_names.moment_of(name)
    facts = list(facts)
    resumable = has_optimizer(facts)
    updates = _agreed(one.number(UPDATES) for one in facts)
    if updates is not None:
        return Age(None, updates, time, resumable, inside=updates)
    counted = _agreed(one.number(_EPOCH) for one in facts)
    inside = step_inside(facts)
    if step is not None:
        return Age(epoch, step, time, resumable, counted, step_names.slot_of(name), inside)
    by_files = said if inside is None and epoch is None else inside
    return Age(epoch if epoch is not None else counted, by_files, time, resumable, counted)


def has_optimizer(facts: Iterable[Facts]) -> bool:
    """Whether a file was seen to hold the state of an optimizer."""
    return any(one.held is not None and Role.OPTIMIZER in one.held.roles for one in facts)


def step_inside(facts: Iterable[Facts]) -> int | None:
    """Return the step that files count, as far as all that do agree; None for none."""
    counted = (one.number(key) for one in facts for key in COUNTERS)
    return _agreed(number for number in counted if is_count(number))


def _agreed(numbers: Iterable[int | None]) -> int | None:
    found = {one for one in numbers if one is not None}
    return found.pop() if len(found) == 1 else None


def newest_first(ages: Sequence[Age]) -> list[int]:
    """Return the places of some ages, the newest first; of equal ones the first one first."""
    key = _key_of(ages)
    return sorted(range(len(ages)), key=lambda at: key(ages[at]), reverse=True)


def _key_of(ages: Sequence[Age]) -> Callable[[Age], Key]:
    """Return what to sort by: what nothing is known of comes last."""
    known = [one for one in ages if one.is_known]
    if are_slots(known):
        return lambda one: (one.is_known, _or_newest(one.inside), 0, *_of_equals(one))
    if all(one.epoch is not None for one in known):
        return lambda one: (one.is_known, one.epoch or 0, _or_first(one.step), *_of_equals(one))
    if all(one.step is not None for one in known):
        return lambda one: (one.is_known, one.step or 0, 0, *_of_equals(one))
    if all(one.counted is not None for one in known):
        return lambda one: (one.is_known, one.counted or 0, 0, *_of_equals(one))
    return lambda one: (one.is_known, 0, 0, False, one.time)


def are_slots(known: Sequence[Age]) -> bool:
    """Whether names number the places of files that are written by turns, and no steps.

    They count from 0 or 1, to a few, and the steps in the files are in another order.
    """
    slots = {_MOST_SLOTS if one.slot is None else one.slot for one in known}
    if not slots or min(slots) not in _FIRST or max(slots) >= _MOST_SLOTS:
        return False
    pairs = sorted((one.slot or 0, one.inside) for one in known if one.inside is not None)
    steps = [step for _, step in pairs]
    return len(set(steps)) == len(steps) and steps != sorted(steps)


def _of_equals(one: Age) -> tuple[bool, float]:
    """Of the same step what a run can resume from comes first, then what was changed last."""
    return one.resumable and one.is_known, one.time


def _or_first(step: int | None) -> int:
    return -1 if step is None else step


def _or_newest(step: int | None) -> int:
    """Place what does not say its step, as it is cut: it may be the newest."""
    return 10**18 if step is None else step


# -- weights alone beside what a run can resume from: an export, an average, the best --------------


def is_passed_over(ages: Sequence[Age], place: int) -> bool:
    """Return whether one of weights alone has an older one behind it to resume from."""
    return ages[place].alone is Role.MODEL and any(map(_is_to_resume, ages[place + 1 :]))


def weights_before_others(
    ages: Sequence[Age], report_at: Callable[[int], Report], least: float
) -> set[int]:
    """Return the places of weights alone in front of the newest whole one to resume from.

    The ages are ordered, newest first. Reports are asked for up to the first that is whole, of
    which `least` is verified, and of which no other holds more.
    """
    found = set[int]()
    last = max((place for place, one in enumerate(ages) if _is_to_resume(one)), default=-1)
    for place in range(last + 1):
        if ages[place].alone is Role.MODEL:
            found.add(place)
            continue
        report = report_at(place)
        if report.state is State.WHOLE and report.coverage >= least and not report.is_poorer:
            break
    return found


def _is_to_resume(age: Age) -> bool:
    return age.resumable and age.alone is None


WEIGHTS_ALONE = Finding(
    Kind.NOTE,
    "",
    "it holds a model and no optimizer, and an older one holds both: a run that resumes from it "
    "starts its optimizer cold",
    own_topic=Topic.WEIGHTS_ALONE,
)
