"""What the steps of one run tell of each other: a file that one lacks, or that is another step's.

What a script may do on purpose is a remark: to save the optimizer every second time, or weights
only at the end. A verdict needs neighbours on both sides, or a library that keeps two counts
in step.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from ckpt_conformance.fsck.judge import trackers
from ckpt_conformance.fsck.judge.placed import LIBRARIES, counts_of, named
from ckpt_conformance.fsck.judge.roles import is_count
from ckpt_conformance.fsck.layouts import layouts, names
from ckpt_conformance.fsck.source.findings import (
    NO_FACTS,
    Finding,
    Kind,
    Role,
    Tensors,
    Topic,
)
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.findings import Facts, Report
    from ckpt_conformance.fsck.source.places import Where

MOST = 2_000
"""Checkpoints of which is kept what neighbours are asked for."""
_MOST_FILES = 64  # of one checkpoint; more are ranks, which are held against each other
_WITH_TENSORS = frozenset({Role.MODEL, Role.OPTIMIZER})
_FEW = 3  # neighbours that make a rule
_FEW_PREPARED = 2  # where a library writes the same each time
_SKIPPED = "skipped_steps"  # DeepSpeed's
_LOCKSTEP = ("optimizer", "scheduler")
_GLOBAL = "global_steps"
OF_A_SCRIPT = ("files", "torch", "safetensors", "hf-index")
_DCP = {name: name for name in ("dcp", "hf-shards")}
_MEGATRON = dict.fromkeys((names.V2, names.PRE_V2), names.V2)  # a run may be migrated in part
_FILES = dict.fromkeys(OF_A_SCRIPT, "files")
_LAYOUTS = {name: name for name in LIBRARIES} | _FILES | _MEGATRON | _DCP
"""Layouts whose steps are compared; a script's own may hold one file or several."""
_ACCELERATE = "accelerate"
# Of what was prepared once for all of a run: `save_state` writes each, whatever the step.
_PREPARED = re.compile(
    r"(?:(?:model|optimizer|scheduler|sampler|dl_state_dict|pytorch_model|custom_checkpoint)(?:_\d+)?"
    r"\.(?:safetensors|bin|pkl)|scaler\.pt)"
)
_READ_FIRST = frozenset({"config.json"})  # by `from_pretrained`, which makes the model of it
_OF_RANKS = re.compile(r"rank|world_size|random_states|rng_state_\d|-of-")


class FileJson(TypedDict):
    """A `File`."""

    counts: dict[str, int]
    mark: str
    is_linked: bool
    tensors: NotRequired[list[int | str]]


class KinJson(TypedDict):
    """A `Kin`."""

    run: str
    layout: str
    step: int
    files: dict[str, FileJson]
    roles: NotRequired[list[str]]
    holds: NotRequired[list[str]]
    pointed: NotRequired[int | None]
    names: NotRequired[list[str]]


class File(NamedTuple):
    """What neighbours are asked for of one file.

    Attributes:
        counts: what it counts, by name.
        mark: as in `Held`.
        is_linked: whether it has several names on the disk: who wrote it meant it to be shared.
        tensors: which it holds, where that is known.

    """

    counts: Mapping[str, int]
    mark: str
    is_linked: bool = False
    tensors: Tensors | None = None

    def to_json(self) -> FileJson:
        """Return plain types."""
        plain = FileJson(counts=dict(self.counts), mark=self.mark, is_linked=self.is_linked)
        if self.tensors is not None:
            plain["tensors"] = [*self.tensors]
        return plain


def _file_from(plain: FileJson) -> File:
    """Read what `to_json` wrote."""
    elements, mark = plain.get("tensors", (None, None))
    tensors = Tensors(int(elements), str(mark)) if elements is not None else None
    return File(plain["counts"], plain["mark"], plain["is_linked"], tensors)


@dataclass(frozen=True, slots=True)
class Kin:
    """What neighbours are asked for of one checkpoint.

    Attributes:
        run: the folder that it lies in.
        step: `NO_STEP` of a file that has none in its name.
        files: by name; of files of a run's folder the step in it is replaced.
        roles: folders that verl has written for each role, as `actor`.
        pointed: the step that the run's own pointer names, where there are roles.
        holds: of one file: the roles of what is in it.
        names: of all files with data, as in `files`.

    """

    run: str
    layout: str
    step: int
    files: Mapping[str, File]
    roles: frozenset[str] = frozenset()
    pointed: int | None = None
    holds: frozenset[Role] = frozenset()
    names: frozenset[str] = frozenset()

    def real(self, name: str) -> str:
        """Return the name that a file of this step has."""
        return name.replace(_STEP_SIGN, str(self.step))

    def to_json(self) -> KinJson:
        """Return plain types."""
        files = {name: one.to_json() for name, one in self.files.items()}
        plain: KinJson = {
            "run": self.run,
            "layout": self.layout,
            "step": self.step,
            "files": files,
        }
        if self.roles:
            plain["roles"], plain["pointed"] = sorted(self.roles), self.pointed
        if self.holds:
            plain["holds"] = sorted(self.holds)
        if self.names:
            plain["names"] = sorted(self.names)
        return plain


def kin_from(plain: KinJson) -> Kin:
    """Read what `to_json` wrote."""
    files = {name: _file_from(one) for name, one in plain["files"].items()}
    roles = frozenset(plain.get("roles", ()))
    holds = frozenset(map(Role, plain.get("holds", ())))
    own = plain["run"], plain["layout"], plain["step"]
    every = frozenset(plain.get("names", ()))
    return Kin(*own, files, roles, plain.get("pointed"), holds, every)


_STEP_SIGN = "{step}"
# What names have beside the step that another save has not: the epoch, metrics.
_OF_ONE_SAVE = re.compile(r"(?<=epoch)[-_=]?\d+|(?<![\d.])\d+\.\d+")
_WRITTEN_LAST = {
    "transformers-trainer": ("trainer_state.json", f"/checkpoint-{_STEP_SIGN}"),
    "accelerate": ("random_states_0.pkl", _STEP_SIGN),
}
"""What a library writes at the end of each save, and how the names of its folders end."""
NO_STEP = -1


def kin_of(candidate: Candidate, report: Report, linked: Iterable[str], top: Where) -> Kin | None:
    """Return what neighbours are asked for; None of what has no step, or no file with a role.

    `top` is the folder that is judged: above it nothing is read.
    """
    step = report.step if candidate.step is None else candidate.step
    layout = _LAYOUTS.get(report.layout, "")
    if not layout or candidate.is_alone:
        return None
    is_folder = candidate.path == candidate.root
    run, _, own = str(candidate.path).rpartition("/")
    holds = frozenset[Role]() if is_folder else _holds(candidate, report)
    if step is None:
        is_whole = holds >= _RESUMABLE
        return (
            Kin(f"{run}/*", layout, NO_STEP, {own: File({}, "")}, holds=holds) if is_whole else None
        )
    files = _files(candidate, report, set(linked), step if not is_folder else None)
    roles = frozenset(names.roles(candidate.files)) if is_folder and candidate.root != top else None
    masked = _alike(_OF_ONE_SAVE.sub("", own), step) or _alike(own, step)
    sort = masked if is_folder else "*"
    if holds and not files and (alike := _alike(own, step)):
        files = {alike: File({}, "", tensors=report.facts[candidate.files[0]].tensors)}
    every = _names(candidate, step if not is_folder else None)
    if not (files or roles or every) or not sort:
        return None
    pointed = trackers.step_named(candidate.root.parent) if roles else None
    own_roles = roles or frozenset()
    return Kin(f"{run}/{sort}", layout, step, files, own_roles, pointed, holds, every)


_RESUMABLE = frozenset({Role.MODEL, Role.OPTIMIZER})


def _holds(candidate: Candidate, report: Report) -> frozenset[Role]:
    """Return what is in the one file of a checkpoint; nothing of several, or of what is unknown."""
    if len(candidate.files) != 1:
        return frozenset()
    held = report.facts.get(candidate.files[0], NO_FACTS).held
    return held.roles if held else frozenset()


def _files(
    candidate: Candidate, report: Report, several: set[str], step: int | None
) -> dict[str, File]:
    """Return the files of which neighbours are asked; `step` is what is in the names of all."""
    files: dict[str, File] = {}
    for name in candidate.files if len(candidate.files) <= _MOST_FILES else ():
        alike = name if step is None else _alike(name, step)
        counts = _counts(report.facts.get(name, NO_FACTS))
        is_known = named(name) or _PREPARED.fullmatch(name) or names.of_a_rank(name)
        if alike and (counts or is_known):
            facts = report.facts.get(name, NO_FACTS)
            mark = facts.held.mark if facts.held else ""
            files[alike] = File(counts, mark, name in several, facts.tensors)
    return files


def _names(candidate: Candidate, step: int | None) -> frozenset[str]:
    """Return the names of the files with data, and without which none is read; of too many none."""
    parts = [
        part
        for part in candidate.parts
        if part.form in layouts.WITH_DATA or part.name in _READ_FIRST
    ]
    if len(parts) > _MOST_FILES:
        return frozenset()
    every = (part.base + part.name for part in parts)
    return frozenset(filter(None, (one if step is None else _alike(one, step) for one in every)))


def _is_prepared(layout: str, name: str) -> bool:
    return layout == _ACCELERATE and _PREPARED.fullmatch(name) is not None


def _counts(facts: Facts) -> dict[str, int]:
    skipped = facts.number(_SKIPPED)
    return counts_of(facts) | ({_SKIPPED: skipped} if is_count(skipped) else {})


def _alike(name: str, step: int) -> str:
    """Return a name without its step; empty where the step is not in it just once."""
    alike, times = re.subn(rf"(?<!\d)0*{step}(?!\d)", _STEP_SIGN, name)
    return alike if times == 1 else ""


def told(kins: Iterable[tuple[int, Kin]]) -> dict[int, list[Finding]]:
    """Return what checkpoints tell of each other, by their places."""
    runs: dict[tuple[str, str], dict[int, tuple[int, Kin]]] = defaultdict(dict)
    without: dict[tuple[str, str], Kin] = {}
    for place, kin in kins:
        if kin.step == NO_STEP:
            without[kin.run, kin.layout] = kin
        else:
            runs[kin.run, kin.layout][kin.step] = (place, kin)
    findings: dict[int, list[Finding]] = defaultdict(list)
    for key, run in runs.items():
        steps = [run[step] for step in sorted(run)]
        if key in without and (poor := _poorer(steps[-1][1], without[key])):
            findings[steps[-1][0]].append(poor)
        if len(steps) > 1:
            places, own = [place for place, _ in steps], [kin for _, kin in steps]
            lacks = [*_absent(own), *_lost_ranks(own)]
            lacks = lacks if _is_lost(lacks, len(own) - 1) else _instead(lacks, _fewer(own))
            for at, finding in (*lacks, *_absent_roles(own), *_stale(own), *_other_tensors(own)):
                findings[places[at]].append(finding)
    for place, finding in _begun(runs):
        findings[place].append(finding)
    for place, finding in _nobodys(runs):
        if all(one.kind is Kind.NOTE for one in findings[place]):  # else it is known to lack some
            findings[place].append(finding)
    return findings


def _nobodys(
    runs: Mapping[tuple[str, str], Mapping[int, tuple[int, Kin]]],
) -> Iterator[tuple[int, Finding]]:
    """Find a newest step that has some of a library's files, and none that tells whose they are."""
    for (run, layout), steps in runs.items():
        if layout != "files":
            continue
        place, newest = steps[max(steps)]
        for (other, library), own in runs.items():
            if other == run and library != layout and max(own) < newest.step:
                kins = [own[step][1] for step in sorted(own)]
                yield from ((place, one) for _, one in _fewer([*kins, newest]))


def _begun(
    runs: Mapping[tuple[str, str], Mapping[int, tuple[int, Kin]]],
) -> Iterator[tuple[int, Finding]]:
    """Find steps of a library's run that have the first files alone, and nothing that tells whose.

    The newest is one that was not written, or copied, to its end: also where only weights are saved
    the library writes another file behind them. From an older one the rest may have been taken.
    """
    for (run, layout), others in runs.items():
        for library, (last, ending) in _WRITTEN_LAST.items():
            own = runs.get((run, library), {})
            if layout != "files" or not own or not run.endswith(ending):
                continue
            for step, (place, kin) in others.items():
                is_begun = _PREPARED.fullmatch if library == _ACCELERATE else names.is_weights
                if all(map(is_begun, kin.files)):
                    yield place, _no_end(last, len(own), is_newest=step > max(own))


def _no_end(last: str, others: int, *, is_newest: bool) -> Finding:
    why = f"{others} other checkpoints of this run have it, and it is written behind the weights: "
    why += "the save, or a copy of it, did not end" if is_newest else "was it removed on purpose?"
    return Finding(Kind.MISSING if is_newest else Kind.NOTE, last, why)


def _poorer(newest: Kin, other: Kin) -> Finding | None:
    """Remark weights alone as the newest step, beside a file without a step to resume from."""
    own = next(iter(newest.files), None)
    if newest.holds != frozenset({Role.MODEL}) or own is None:
        return None
    (name,) = other.files
    what = f"it holds a model and no optimizer; {clip(name)}, whose name has no step, holds both: "
    return Finding(
        Kind.NOTE, newest.real(own), f"{what}a run that resumes here starts its optimizer cold"
    )


# -- files that one lacks --------------------------------------------------------------------------


def _absent(run: Sequence[Kin]) -> list[tuple[int, Finding]]:
    """Find the one step that lacks a file which all others have, beside weights."""
    found: list[tuple[int, Finding]] = []
    known = {name for kin in run for name in kin.files if _may_be_asked(kin, name)}
    for name in sorted(name for name in known if not _OF_RANKS.search(name)):
        lacks = [at for at, kin in enumerate(run) if name not in kin.files]
        is_prepared = _is_prepared(run[0].layout, name)
        few = _FEW_PREPARED if is_prepared else _FEW
        if len(lacks) != 1 or len(run) <= few or lacks[0] == 0:
            continue
        (at,) = lacks
        if is_prepared and _is_weights(name) and _is_there_otherwise(run[at], name):
            continue
        kind, why = _why_not_prepared(run) if is_prepared else _why_absent(run, at, name)
        found.append((at, Finding(kind, run[at].real(name), why)))
    return found


def _is_lost(found: Iterable[tuple[int, Finding]], last: int) -> bool:
    """Whether it is known that the newest step lacks something."""
    return any(at == last and one.kind is Kind.MISSING for at, one in found)


def _instead(
    found: Iterable[tuple[int, Finding]], fewer: Iterable[tuple[int, Finding]]
) -> list[tuple[int, Finding]]:
    """Put what tells that the newest step has fewer files in the place of its remarks."""
    some = list(fewer)
    places = {at for at, _ in some}
    return [*((at, one) for at, one in found if at not in places), *some]


def _fewer(run: Sequence[Kin]) -> Iterator[tuple[int, Finding]]:
    """Find files that the newest step lacks, and all others have.

    One other step is enough where the file has a role by its name: that it was copied in part is
    likelier then than that it was saved so.
    """
    *others, newest = run
    first, *rest = (kin.names for kin in others)
    every = first.intersection(*rest)
    own_rule = {role for kin in run for role in kin.roles}
    gone = sorted(name for name in every - newest.names if name.split("/")[0] not in own_rule)
    if len(others) == 1:
        gone = [name for name in gone if named(name)]
    if not gone or not newest.names or newest.names - every:
        return  # another layout
    some = "the other step has" if len(others) == 1 else f"the {len(others)} other steps have"
    more = f" and {len(gone) - 1} more files" if len(gone) > 1 else ""
    what = f"this file{more}, which {some}, is not here: copied or saved in part, or so on purpose?"
    yield (
        len(others),
        Finding(Kind.NOTE, newest.real(gone[0]), what, own_topic=Topic.FEWER_FILES),
    )


def _is_weights(name: str) -> bool:
    return name.startswith(("model", "pytorch_model"))


def _is_there_otherwise(kin: Kin, name: str) -> bool:
    """Whether a step has the weights of the same model in another format."""
    return any(_is_weights(one) and _number_of(one) == _number_of(name) for one in kin.files)


def _number_of(name: str) -> str:
    """Return the number by which accelerate tells models apart; nothing for the first one."""
    match = re.search(r"_(\d+)\.\w+$", name)
    return match[1] if match else ""


def _may_be_asked(kin: Kin, name: str) -> bool:
    return bool(named(name)) or _is_prepared(kin.layout, name)


def _why_not_prepared(run: Sequence[Kin]) -> tuple[Kind, str]:
    """Judge what accelerate writes at each save, since it was prepared for all of a run."""
    others = f"all {len(run) - 1} other steps of this run have it"
    return Kind.MISSING, f"{others}, and accelerate saves all that was prepared, each time"


def _why_absent(run: Sequence[Kin], at: int, name: str) -> tuple[Kind, str]:
    """Judge a file that one step lacks: between others at equal distances, it was lost."""
    others = f"all {len(run) - 1} other steps of this run have it"
    if at == len(run) - 1:
        on_purpose = "" if _is_weights(name) else ", or weights only on purpose"
        return Kind.NOTE, f"{others}: a save that did not end{on_purpose}?"
    is_even = len({after.step - before.step for before, after in pairwise(run)}) == 1
    if not is_even:
        return Kind.NOTE, f"{others}: is that meant?"
    return Kind.MISSING, f"{others}, before it and after it, at equal distances"


# -- files of ranks that one lacks -----------------------------------------------------------------


def _lost_ranks(run: Sequence[Kin]) -> list[tuple[int, Finding]]:
    """Find files of ranks that all other steps have, where a file of a later rank is there.

    A step that lacks the last ranks alone may be of a smaller world.
    """
    if len(run) <= _FEW_PREPARED:
        return []
    found: list[tuple[int, Finding]] = []
    for name in sorted({name for kin in run for name in kin.files}):
        if (own := names.of_a_rank(name)) is None:
            continue
        lacks = [at for at, kin in enumerate(run) if name not in kin.files]
        ranks = _ranks_beside(run[lacks[0]], own) if len(lacks) == 1 else []
        is_last = bool(ranks) and own.rank > max(ranks)
        if ranks and (not is_last or lacks[0] == len(run) - 1):
            kind, why = _why_no_rank(run, is_last=is_last)
            found.append((lacks[0], Finding(kind, run[lacks[0]].real(name), why)))
    return found


def _ranks_beside(kin: Kin, own: names.OfARank) -> list[int]:
    """Return the other ranks of which a step has such a file."""
    others = filter(None, map(names.of_a_rank, kin.files))
    return [one.rank for one in others if one.family == own.family]


def _why_no_rank(run: Sequence[Kin], *, is_last: bool) -> tuple[Kind, str]:
    others = f"all {len(run) - 1} other steps of this run have it"
    if is_last:
        return Kind.NOTE, f"{others}: a save that did not end, or of fewer ranks?"
    return Kind.MISSING, f"a file of a later rank is there, and {others}"


# -- roles that one lacks --------------------------------------------------------------------------


def _absent_roles(run: Sequence[Kin]) -> list[tuple[int, Finding]]:
    """Find steps of verl that lack a role which others have.

    Its trainer saves all roles at every save, and a load raises where one is missing.
    """
    found: list[tuple[int, Finding]] = []
    for role in sorted({role for kin in run for role in kin.roles}):
        lacks = [at for at, kin in enumerate(run) if kin.roles and role not in kin.roles]
        for at in lacks:
            kind, why = _why_no_role(run, at, role, is_alone=len(lacks) == 1)
            what = f"this role is not there: {why}"
            found.append((at, Finding(kind, f"{role}/", what, own_topic=Topic.ABSENT)))
    return found


def _why_no_role(run: Sequence[Kin], at: int, role: str, *, is_alone: bool) -> tuple[Kind, str]:
    """Judge a role that a step lacks: what is saved or kept less often is a remark.

    Every interval at which the others can have saved it divides their greatest common divisor.
    """
    own, others = run[at], [kin.step for kin in run if role in kin.roles]
    pointed = own.pointed
    if at == len(run) - 1 and pointed is not None and pointed < own.step:
        return Kind.MISSING, f"{trackers.NAMES[0]} names step {pointed}, so the save did not end"
    is_due = own.step % (math.gcd(*others) or 1) == 0
    if is_alone and at > 0 and len(others) > 1 and is_due:
        return Kind.MISSING, f"all {len(others)} other steps of this run have it"
    some = f"step {others[0]} has" if len(others) == 1 else f"{len(others)} other steps have"
    return Kind.NOTE, f"{some} it; is it saved or kept less often, or no more?"


# -- files of another step -------------------------------------------------------------------------


def _stale(run: Sequence[Kin]) -> list[tuple[int, Finding]]:
    """Find files whose counts are those of another step."""
    found: dict[tuple[int, str], Finding] = {}
    off, right = _counted(run)
    for (at, name), what in off.items():
        others = right[at] - {name}
        kind = Kind.DAMAGED if others else Kind.NOTE  # else all of it may be of another branch
        own = run[at].real(name)
        found[at, name] = Finding(kind, own, what, own_topic=Topic.ANOTHER_SAVE)
    for name in sorted({name for kin in run for name in kin.files}):
        for at, finding in _repeated(run, name):
            found.setdefault((at, name), finding)
    return [(at, finding) for (at, _), finding in found.items()]


def _counted(run: Sequence[Kin]) -> tuple[dict[tuple[int, str], str], dict[int, set[str]]]:
    """Return which files of which steps count what no other step makes likely, and which do not."""
    off: dict[tuple[int, str], str] = {}
    right: dict[int, set[str]] = defaultdict(set)
    counters = {(name, key) for kin in run for name, one in kin.files.items() for key in one.counts}
    for name, counter in sorted(counters):
        if counter == _SKIPPED:
            continue
        points = _points(run, name, counter)
        odd = _off_line(points)
        if odd is not None:
            at, _, number = odd
            what = f"its {counter} count is {number}, and the steps before and after it put it at"
            off[at, name] = f"{what} {_place(points, odd):.6g}: of another save?"
        for point in points:
            if point is not odd and (odd is not None or _is_line(points)):
                right[point[0]].add(name)
    return off, right


class _Point(NamedTuple):
    """A count of a file in one checkpoint: its place in the run, its step, the count."""

    at: int
    step: int
    number: int


def _points(run: Sequence[Kin], name: str, counter: str) -> list[_Point]:
    return [
        _Point(at, kin.step, kin.files[name].counts[counter])
        for at, kin in enumerate(run)
        if name in kin.files and counter in kin.files[name].counts
    ]


def _place(points: Sequence[_Point], odd: _Point) -> float:
    """Return the count that the first and the last step give one between them."""
    first, last = points[0], points[-1]
    rise = (last.number - first.number) / (last.step - first.step)
    return first.number + rise * (odd.step - first.step)


def _off_line(points: Sequence[_Point]) -> _Point | None:
    """Return the one count between others that they do not lie on a line with."""
    if _is_line(points):
        return None
    odd = [one for one in points[1:-1] if _is_line([two for two in points if two is not one])]
    if len(odd) != 1 or abs(_place(points, odd[0]) - odd[0].number) < 1:
        return None  # what is counted by epochs stands still between two
    return odd[0]


def _is_line(points: Sequence[_Point]) -> bool:
    """Return whether counts rise with the steps: by one each, or by the same for three at least."""
    if len(points) < 2:  # noqa: PLR2004  two points are a line
        return False
    first, last = points[0], points[-1]
    run, rise = last.step - first.step, last.number - first.number
    if rise <= 0 or (run != rise and len(points) < _FEW):
        return False
    return all(
        (one.number - first.number) * run == (one.step - first.step) * rise for one in points
    )


def _repeated(run: Sequence[Kin], name: str) -> list[tuple[int, Finding]]:
    """Find files that are those of an earlier step, byte for byte, though they should change.

    Those that count steps should, and those that differ between all other steps.
    """
    marks = Counter(kin.files[name].mark for kin in run if name in kin.files)
    is_once = len(run) >= _FEW and sorted(marks.values())[-2:] == [1, 2]
    found: list[tuple[int, Finding]] = []
    first: dict[str, int] = {}
    for at, kin in enumerate(run):
        file = kin.files.get(name)
        if file is None:
            continue
        before = first.setdefault(file.mark, at) if file.mark else at
        if before == at or file.is_linked:
            continue
        moved, is_sure = _moved(run[before], kin, name), _is_sure(run[before], kin, name)
        is_odd = is_once or (file.counts and len(run) < _FEW)  # else it stands still on purpose
        if not moved or not (is_sure or is_odd):
            continue
        kind = Kind.DAMAGED if is_sure else Kind.NOTE
        what = f"its records are those of step {run[before].step}, and {', '.join(moved)} went on"
        own = kin.real(name)
        found.append((at, Finding(kind, own, what, own_topic=Topic.ANOTHER_SAVE)))
    return found


def _moved(before: Kin, after: Kin, name: str) -> list[str]:
    """Return which other files have counted further since."""
    return [
        after.real(other)
        for other in sorted(before.files.keys() & after.files.keys() - {name})
        if any(
            before.files[other].counts.get(key, number) != number
            for key, number in after.files[other].counts.items()
            if key != _SKIPPED
        )
    ][:3]


def _is_sure(before: Kin, after: Kin, name: str) -> bool:
    """Return whether the library counts in this file whenever it counts in the others.

    The Trainer steps optimizer and scheduler together, or neither; DeepSpeed counts every step,
    and those that it skipped.
    """
    if before.layout == "transformers-trainer":
        gains = (_gain(before, after, other, key) for other in after.files for key in _LOCKSTEP)
        return any(map(bool, gains)) and any(key in after.files[name].counts for key in _LOCKSTEP)
    if before.layout != "deepspeed":
        return False
    if _GLOBAL in after.files[name].counts:
        return True
    taken = (
        _gain(before, after, other, _GLOBAL) - _gain(before, after, other, _SKIPPED)
        for other in after.files
    )
    return Role.OPTIMIZER in named(name) and any(number > 0 for number in taken)


def _gain(before: Kin, after: Kin, name: str, counter: str) -> int:
    """Return by how much a file has counted further; 0 where it is not known."""
    old, new = before.files.get(name), after.files.get(name)
    if old is None or new is None or counter not in old.counts.keys() | new.counts.keys():
        return 0
    return new.counts.get(counter, 0) - old.counts.get(counter, 0)


# -- tensors that are not those of the other steps -------------------------------------------------


def _other_tensors(run: Sequence[Kin]) -> Iterator[tuple[int, Finding]]:
    """Find files of which one step has no tensor, or other tensors than all others.

    A verdict is only for weights: an optimizer may make more states on the way, and is not passed
    over then.
    """
    known = {name for kin in run for name, file in kin.files.items() if file.tensors is not None}
    for name in sorted(name for name in known if named(name) & _WITH_TENSORS):
        own = {
            at: tensors
            for at, kin in enumerate(run)
            if name in kin.files and (tensors := kin.files[name].tensors) is not None
        }
        at = _odd_one([one.mark for one in own.values()])
        if at is None or not (at := [*own][at]):  # what a first step saves may be less
            continue
        if what := _what_is_odd(own, at, len(run) - 1):
            is_model = Role.MODEL in named(name)
            has_more = own[at].elements > max(one.elements for on, one in own.items() if on != at)
            topic = Topic.REMARK if has_more and not is_model else Topic.OTHER_TENSORS
            kind = what[0] if is_model else Kind.NOTE
            yield at, Finding(kind, run[at].real(name), what[1], own_topic=topic)


def _odd_one(marks: Sequence[str]) -> int | None:
    """Return the place of the one mark that all others, which are the same, differ from."""
    often = Counter(marks).most_common()
    if len(often) != 2 or often[1][1] != 1:  # noqa: PLR2004  theirs, and its own
        return None
    return len(marks) - 1 if often[0][1] == 1 else marks.index(often[1][0])


def _what_is_odd(known: Mapping[int, Tensors], at: int, last: int) -> tuple[Kind, str] | None:
    """Judge a file of weights whose tensors are not those of the other steps."""
    others = [one for place, one in known.items() if place != at]
    some = "the other step has" if len(others) == 1 else f"the {len(others)} other steps have"
    if not known[at].elements:
        kind = Kind.MISSING if len(others) >= _FEW_PREPARED else Kind.NOTE
        why = f"no tensor in it has an element, and {some} {others[0].elements}: not gathered?"
        return kind, why
    if len(others) < _FEW_PREPARED:
        return None
    why = f"the names and shapes of its tensors are not those that {some}"
    is_between = at != last and len(others) >= _FEW
    ends = ", before it and after it" if is_between else ": is it of this model?"
    return Kind.DAMAGED if is_between else Kind.NOTE, why + ends
