"""Find the newest whole checkpoint of a run in which a job may still save and rotate.

What is answered was whole when it was answered: its files are looked at before they are read, and
again, with a new listing, at the end. What changed in between is judged again, a few times; what
did not is not read again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckpt_conformance.fsck.judge.ages import UNKNOWN, WEIGHTS_ALONE, is_passed_over, newest_first
from ckpt_conformance.fsck.judge.examine import Checkpoints
from ckpt_conformance.fsck.judge.judge import Change, Judged, Meanwhile, Options
from ckpt_conformance.fsck.judge.judging import Job, Judgement, Judging, Unjudged, unjudged
from ckpt_conformance.fsck.judge.siblings import told
from ckpt_conformance.fsck.judge.stamps import stamps_of, wait_for_tick
from ckpt_conformance.fsck.layouts import unknown
from ckpt_conformance.fsck.source.findings import Kind, Report, State, Topic
from ckpt_conformance.fsck.source.places import anew, is_far
from ckpt_conformance.fsck.source.source import in_threads
from ckpt_conformance.fsck.source.sums import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ckpt_conformance.fsck.judge.ages import Age
    from ckpt_conformance.fsck.judge.siblings import Kin
    from ckpt_conformance.fsck.judge.stamps import Stamps
    from ckpt_conformance.fsck.layouts.listing import Found
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Entry

    Progress = Callable[[int, int], None] | None

ROUNDS = 4
"""How often a run is listed, and what changed in it judged again."""


class Moment(StrEnum):
    """Where another process may come between: for tests."""

    LISTED = "listed"
    JUDGING = "judging"  # what is there was looked at, and nothing read
    HELD = "held"  # and not yet judged
    JUDGED = "judged"
    CHOSEN = "chosen"  # and not looked at again
    CHECKED = "checked"


def reached(moment: Moment, name: str) -> None:
    """Do nothing: tests put another process's saves here."""
    del moment, name


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint, to be held.

    Attributes:
        source: the folder that names are relative to.
        inner: its name, where it is the checkpoint; empty where the files are.
        seen: each file by name, as it was seen, or what a link leads to; None for a text.
        folders: names of the folders in it.

    """

    source: Path
    inner: str
    seen: Mapping[str, Entry | None]
    folders: Sequence[str]


class Hold(Protocol):
    """Makes files stay while they are judged, whatever becomes of their names."""

    def take(self, files: Files) -> Path:
        """Hold files under their names in a folder, and return that.

        Raises FileNotFoundError where they were not as they had been seen until all were held.
        """
        ...

    def release(self) -> None:
        """Let go of what was held last, which is not whole."""
        ...


@dataclass
class _Known:
    """A checkpoint as it was listed, and what was found out since.

    Attributes:
        age: orders it among others; with `kin` known once its structure was read.
        stamps: what its files looked like when it was judged; None where that was not.
        judgement: what came of it.
        is_steady: whether it was there to be judged, and was held as it was.

    """

    found: Found
    is_looked_at: bool = False
    age: Age = UNKNOWN
    kin: Kin | None = None
    stamps: Stamps | None = None
    judgement: Judgement | None = None
    is_steady: bool = True

    def is_as_listed(self, now: Found) -> bool:
        """Return whether a listing says the same of it."""
        return _listed(self.found) == _listed(now)


@dataclass(frozen=True)
class _Held:
    """What is held and was judged: where, and how its files looked."""

    top: Path
    found: Found
    stamps: Stamps


def _listed(found: Found) -> Found:
    return replace(found, changed=None)


@dataclass
class Gate:
    """Judges from the newest checkpoint on until one is whole, and stays as it was judged."""

    top: Where
    options: Options = field(default_factory=Options)
    progress: Progress = None
    hold: Hold | None = None
    known: dict[str, _Known] = field(default_factory=dict[str, _Known])
    none: dict[str, _Known] = field(default_factory=dict[str, _Known])  # listed, no checkpoint
    meanwhile: dict[str, Change] = field(default_factory=dict[str, Change])
    leftovers: list[str] = field(default_factory=list[str])
    _chosen: _Known | None = None
    _held: _Held | None = None
    _takes_poorer: bool = False  # also a checkpoint of which others hold more

    def run(self) -> Judged:
        """Return what was judged: the newest first, the whole one last.

        One that never stayed as it was is UNKNOWN.
        """
        self._place = self.top
        self._list(self.top if is_far(self.top) else self._here())
        judged = Judged(self.top, options=self.options)
        for left in reversed(range(ROUNDS)):
            judged = self._round(is_last=not left)
            if self.is_settled(judged):
                break
        else:
            judged = self._given_up(judged)
        judged.meanwhile = [Meanwhile(self._path(name), one) for name, one in self._others(judged)]
        return judged

    def is_still_there(self) -> bool:
        """Return whether what was chosen is as it was judged: look at it once more."""
        if self._held is not None:
            return self._held.stamps.are_same(stamps_of(self._held.top, self._held.found))
        if self._chosen is None:
            return True
        return self._here() == self._place and self._stands(self._chosen)

    def is_settled(self, judged: Judged) -> bool:
        """List again, and return whether all that was judged is as it was then.

        What is not is forgotten, so that it is judged again.
        """
        newest = judged.newest_whole
        reached(Moment.CHOSEN, str(newest.path) if newest else "")
        if newest is not None and self.hold is not None:
            return True  # whatever becomes of the run
        restless = [one for one in self.known.values() if one.judgement and not one.is_steady]
        place = self._here()
        is_same = place == self._place
        self.meanwhile = {}
        self._list(place)
        reached(Moment.CHECKED, str(newest.path) if newest else "")
        return is_same and not restless and not self.meanwhile

    # -- what is there --

    def _here(self) -> Where:
        """Return the place now: a link is what it leads to, a store is asked again."""
        return anew(self.top)

    def _list(self, place: Where) -> None:
        """List, forget what changed, and note it."""
        checkpoints = Checkpoints(place)
        now = {found.name: found for found in checkpoints}
        self.leftovers = sorted(set(checkpoints.leftovers))
        before, self.known = self.known, {}
        moved, self._place = str(place) != str(self._place), place
        for name, found in now.items():
            one = before.get(name)
            if not moved and self._is_none(found):
                continue
            if one is not None and not moved and one.is_as_listed(found) and self._stands(one):
                self.known[name] = one
            else:
                self.known[name] = _Known(found)
                self.meanwhile[name] = Change.NEW if one is None else Change.CHANGED
        self.meanwhile |= dict.fromkeys(before.keys() - now.keys(), Change.GONE)
        reached(Moment.LISTED, "")

    def _is_none(self, found: Found) -> bool:
        """Return whether it was looked at, was no checkpoint, and is listed as it was then."""
        before = self.none.get(found.name)
        return before is not None and before.is_as_listed(found)

    def _stands(self, one: _Known) -> bool:
        """Return whether the files are as they were when they were judged, if they were."""
        if one.judgement is None:
            return True
        now = stamps_of(self._place, one.found)
        return one.is_steady and one.stamps is not None and one.stamps.are_same(now)

    def _path(self, name: str) -> Where:
        return self._place if name == "." else self._place / name

    # -- judging --

    def _round(self, *, is_last: bool) -> Judged:
        """Judge all that is newer than the answer, or that has to be judged again."""
        self._takes_poorer = False
        judged = self._from_newest(is_last=is_last)
        newest, known = judged.newest_whole, list(self.known.values())
        is_restless = any(one.judgement and not one.is_steady for one in known)
        if newest is None or self._chosen is not None or (is_restless and not is_last):
            return judged
        self._takes_poorer = True
        for one in known if self.hold is not None else ():
            if one.judgement and one.judgement.report.path == newest.path:
                one.judgement = None  # it is not held any more
        return self._from_newest(is_last=is_last)

    def _from_newest(self, *, is_last: bool) -> Judged:
        """Judge from the newest on; stop at a whole one, or at one that has to be judged again."""
        self.meanwhile, self._chosen = {}, None
        judging = Judging(self._place, self.options, self.progress)
        order = self._ordered(judging)
        reports: list[Report] = []
        judged = Judged(self.top, reports, self.leftovers, self.options)
        for at, one in enumerate(order):
            if one.judgement is None:
                self._judge(judging, one)
            if one.judgement is None:
                continue  # no checkpoint after all
            report = _with_told(order, at)
            if not one.is_steady:
                self._let_go()
                if not is_last:
                    break  # it is listed and judged again before older ones are read
                if report.state is State.WHOLE or one.judgement.unjudged:
                    report = self._restless(one)
            reports.append(report)
            if self._is_answer(report, judged):
                self._chosen = one
                if self.hold is None:
                    _name_for_good(report)
                break
            self._let_go()
        return judged

    def _is_answer(self, report: Report, judged: Judged) -> bool:
        """Return whether no older one has to be judged.

        One that is poorer than others is the answer only where none of these is whole.
        """
        return judged.is_enough(report) and (self._takes_poorer or not report.is_poorer)

    def _ordered(self, judging: Judging) -> list[_Known]:
        """Return what was listed, newest first; of several the structure is read for that."""
        there = list(self.known.values())
        new = [one for one in there if not one.is_looked_at]
        if len(there) > 1 and new:
            looks = in_threads(judging.look, [one.found for one in new])
            for one, look in zip(new, looks, strict=True):
                one.is_looked_at = True
                if look is None:
                    self.none[one.found.name] = self.known.pop(one.found.name)
                else:
                    one.age, one.kin = look
        return _newest_first(self.known.values())

    def _judge(self, judging: Judging, one: _Known) -> None:
        """Look at the files of a checkpoint, and judge it; `is_settled` looks at them again."""
        one.stamps = stamps_of(self._place, one.found)
        if one.stamps is not None:
            wait_for_tick(one.stamps)
        reached(Moment.JUDGING, one.found.name)
        if self.hold is None or one.stamps is None:
            one.judgement = _judged(judging, one.found)
        else:
            one.judgement = self._judge_held(judging, one, one.stamps, self.hold)
        reached(Moment.JUDGED, one.found.name)
        if one.judgement is None:
            return
        one.kin = one.judgement.kin if self.hold is None else one.kin
        is_there = one.judgement.unjudged is not Unjudged.GONE and one.stamps is not None
        one.is_steady = is_there and one.is_steady

    def _judge_held(
        self, judging: Judging, one: _Known, stamps: Stamps, hold: Hold
    ) -> Judgement | None:
        """Judge the structure where it lies, for names and places tell; all of it where it is held.

        Until each file was held it was as it had been seen, so they are of one moment.
        """
        lying = judging.open(Job(0, one.found), NOTHING).judgement
        if lying is None or lying.unjudged or lying.report.state is not State.WHOLE:
            one.is_steady = stamps.are_same(stamps_of(self._place, one.found))
            return lying
        one.kin = lying.kin
        files = _files(self._place, one.found, stamps)
        try:
            top = hold.take(files)
        except FileNotFoundError:
            one.is_steady = False
            return lying
        found = replace(one.found, base=f"{files.inner}/" if files.inner else "")
        before = stamps_of(top, found)
        reached(Moment.HELD, one.found.name)
        judgement = _judged(Judging(top, self.options, self.progress), found)
        if judgement is None or before is None or not before.are_same(stamps_of(top, found)):
            one.is_steady = False
            return lying
        self._held = _Held(top, found, before)
        judgement.report.path = lying.report.path
        return judgement

    def _let_go(self) -> None:
        self._held = None
        if self.hold is not None:
            self.hold.release()

    def _restless(self, one: _Known) -> Report:
        """Report one that was whole whenever it was judged, and never as it had been before."""
        what = (
            f"its files changed, or went, each of {ROUNDS} times while it was judged: a job saves "
            "or rotates there now. Judge it when nobody writes, or hold it by --pin DIR"
        )
        return unjudged(self._place, one.found, Unjudged.CHANGING, what).report

    def _given_up(self, judged: Judged) -> Judged:
        """Answer after the last round: what was chosen, if that alone stayed as it was."""
        newest, chosen = judged.newest_whole, self._chosen
        if newest is None or chosen is None or self.known.get(chosen.found.name) is chosen:
            return judged
        kept = [one for one in judged.reports if one is not newest]
        return replace(judged, reports=[*kept, self._changed(newest)])

    def _changed(self, newest: Report) -> Report:
        """Report a whole one that was not there, or not the same, when it was to be answered."""
        report = Report(newest.path, newest.layout, newest.step)
        what = (
            f"it was whole, and changed or went before it could be named, {ROUNDS} times: the job "
            "rotates faster than it is judged. Hold it by --pin DIR"
        )
        report.say(Kind.UNKNOWN, "", what, topic=Topic.CHANGING)
        return report

    def _others(self, judged: Judged) -> list[tuple[str, Change]]:
        """Return what came, went or changed since, and is in no report."""
        told_of = {str(one.path) for one in judged.reports}
        return sorted(
            (name, one)
            for name, one in self.meanwhile.items()
            if str(self._path(name)) not in told_of or one is Change.GONE
        )


def _newest_first(listed: Collection[_Known]) -> list[_Known]:
    """Order what was listed; a folder that nobody could look into may hold the newest of all.

    One beside checkpoints does not: there a run has its logs.
    """
    places = {one.found.parent for one in listed if not one.found.may_hide_newer}
    known = list(listed)
    ordered = [known[at] for at in newest_first([one.age for one in known])]
    return sorted(
        ordered,
        key=lambda one: not (one.found.may_hide_newer and one.found.parent not in places),
    )


def _files(top: Where, found: Found, stamps: Stamps) -> Files:
    """Return what is to be held of a checkpoint on a disk; raises FileNotFoundError."""
    place = Path(str(top))
    source = (place if place.is_dir() else place.parent) / found.base
    files: dict[str, Entry | None] = {name: seen[-1] for name, seen in stamps.files.items() if seen}
    inner = source.resolve().name if found.is_folder else ""
    return Files(source, inner, files | dict.fromkeys(stamps.texts), found.folders(top))


def _name_for_good(report: Report) -> None:
    """Name what a link leads to: the job may have it lead elsewhere before anybody follows it."""
    if isinstance(report.path, Path) and report.path.is_symlink():
        report.path = report.path.resolve()


def _judged(judging: Judging, found: Found) -> Judgement | None:
    return next((judgement for _, judgement in judging.run([Job(0, found)])), None)


def _with_told(order: list[_Known], at: int) -> Report:
    """Return the report of a checkpoint with what its neighbours tell, newest first."""
    judgement = order[at].judgement
    if judgement is None:
        raise IndexError(at)
    report = replace(judgement.report, findings=list(judgement.report.findings))
    said = told((place, one.kin) for place, one in enumerate(order) if one.kin)
    report.take_findings(said.get(at, ()))
    if is_passed_over([one.age for one in order], at):
        report.take_findings([WEIGHTS_ALONE])
    return report


def of_another_format(path: Where) -> str | None:
    """Return a file below a folder that may be a checkpoint of a format that fsck does not know."""
    return unknown.first(path)


def judge_newest(path: Where, options: Options | None = None, progress: Progress = None) -> Judged:
    """Judge from the newest checkpoint on until one is whole: what a launch script needs to know.

    The older ones have no report: their structure is read alone, to order them and for what they
    tell of their neighbours.
    """
    return Gate(path, options or Options(), progress).run()
