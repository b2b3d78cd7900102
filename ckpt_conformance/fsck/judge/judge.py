"""Judge every checkpoint below a path, and put what is known of them in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from ckpt_conformance.fsck.judge import trackers
from ckpt_conformance.fsck.judge.ages import WEIGHTS_ALONE, newest_first, weights_before_others
from ckpt_conformance.fsck.judge.examine import Checkpoints
from ckpt_conformance.fsck.judge.judging import Job, Judging, notes_of_shared
from ckpt_conformance.fsck.judge.siblings import told
from ckpt_conformance.fsck.judge.trackers import Tracker
from ckpt_conformance.fsck.source.findings import SEVERITY, Report, State
from ckpt_conformance.fsck.source.sums import DIVIDED, NOTHING, SAMPLED
from ckpt_conformance.fsck.source.trust import NOBODY, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.fsck.judge.trackers import TrackerJson
    from ckpt_conformance.fsck.source.findings import ReportJson
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.sums import Sizes

    Progress = Callable[[int, int], None] | None

SCHEMA = "ckpt-conformance/fsck/v2"


@dataclass(frozen=True)
class Options:
    """How to judge.

    Attributes:
        jobs: threads that read payload.
        metadata_only: leave payload unread.
        sample: the share of the payload that is read, 0 to 1; `seed` chooses which.
        nan: count NaNs and infinities.
        trust: names in pickles that the user vouches for.
        end: when all must be judged, in seconds of the monotonic clock; what is not by then is
            unknown. None for never.
        file_timeout: seconds from the opening of a file to its last byte.
        least: the share of the bytes, 0 to 1, that a digest or a CRC must have covered.

    """

    jobs: int = 1
    metadata_only: bool = False
    sample: float = 1.0
    seed: int = 0
    nan: bool = False
    trust: Trust = NOBODY
    end: float | None = None
    file_timeout: float | None = None
    least: float = 0.0

    @property
    def sizes(self) -> Sizes:
        """How work is divided between threads."""
        if self.metadata_only:
            return NOTHING
        return replace(DIVIDED if self.sample == 1 else SAMPLED, jobs=self.jobs)


class SampleJson(TypedDict):
    """Which share of the payload was read."""

    share: float
    seed: int


class Change(StrEnum):
    """What became of a checkpoint while others were judged."""

    GONE = "gone"
    NEW = "new"
    CHANGED = "changed"


class MeanwhileJson(TypedDict):
    """A `Meanwhile` in the output of `fsck --newest-whole --json`."""

    path: str
    change: str


class Meanwhile(NamedTuple):
    """A checkpoint that changed while others were judged, and of which the report says nothing."""

    path: Where
    change: Change

    def to_json(self) -> MeanwhileJson:
        """Return plain types."""
        return {"path": str(self.path), "change": str(self.change)}


class JudgedJson(TypedDict):
    """The output of `fsck --json`; the schema is `report/schemas/fsck.schema.json`."""

    schema: str
    path: str
    metadata_only: bool
    sample: SampleJson | None
    require_coverage: NotRequired[float]
    state: str
    newest_whole: str | None
    leftovers: list[str]
    trackers: list[TrackerJson]
    checkpoints: list[ReportJson]
    missing_shards: NotRequired[list[str]]
    meanwhile: NotRequired[list[MeanwhileJson]]


@dataclass
class Judged:
    """All that was found below a path, newest checkpoint first.

    Attributes:
        path: what was judged.
        reports: one for each checkpoint.
        leftovers: names of work in progress that nobody finished, relative to the path.
        options: how it was judged.
        missing: shards of which not all results are there: nobody knows what is newest.
        trackers: what the run's own pointers to its newest checkpoint name.
        meanwhile: of a gate: what came, went or changed since, and was not judged.

    """

    path: Where
    reports: Sequence[Report] = field(default_factory=list[Report])
    leftovers: list[str] = field(default_factory=list[str])
    options: Options = field(default_factory=Options)
    missing: tuple[str, ...] = ()
    trackers: list[Tracker] = field(default_factory=list[Tracker])
    meanwhile: list[Meanwhile] = field(default_factory=list[Meanwhile])

    @property
    def newest_whole(self) -> Report | None:
        """The newest checkpoint with nothing wrong, of which enough was verified.

        One that is poorer than others is it only where no other is whole.
        """
        if self.missing:
            return None
        poorer: Report | None = None
        for one in self.reports:
            if self.is_enough(one) and not one.is_poorer:
                return one
            if poorer is None and self.is_enough(one):
                poorer = one
        return poorer

    def is_enough(self, report: Report) -> bool:
        """Return whether a checkpoint is whole, and as much of it verified as was asked for."""
        return report.state is State.WHOLE and report.coverage >= self.options.least

    @property
    def has_too_little(self) -> bool:
        """Whether less of some whole checkpoint was verified than was asked for."""
        least = self.options.least
        return least > 0 and any(
            one.state is State.WHOLE and one.coverage < least for one in self.reports
        )

    @property
    def dangling(self) -> list[Tracker]:
        """The pointers to checkpoints that are not there."""
        return trackers.dangling(self.trackers, self.reports) if self.trackers else []

    @property
    def state(self) -> State:
        """The worst of the checkpoints; UNKNOWN where there is none, or where some are missing.

        A pointer to a checkpoint that is not there makes the run INCOMPLETE.
        """
        states = {one.state for one in self.reports}
        if self.dangling:
            states.add(State.INCOMPLETE)
        if self.missing or not states:
            states.add(State.UNKNOWN)
        return max(states, key=SEVERITY.index)

    def to_json(self) -> JudgedJson:
        """Return plain types."""
        whole = self.head_json()
        whole["checkpoints"] = [one.to_json() for one in self.reports]
        return whole

    def head_json(self) -> JudgedJson:
        """Return plain types of everything but the checkpoints, whose list is empty."""
        newest = self.newest_whole
        sample: SampleJson = {"share": self.options.sample, "seed": self.options.seed}
        head: JudgedJson = {
            "schema": SCHEMA,
            "path": str(self.path),
            "metadata_only": self.options.metadata_only,
            "sample": sample if self.options.sample < 1 else None,
            "state": str(self.state),
            "newest_whole": str(newest.path) if newest else None,
            "leftovers": self.leftovers,
            "trackers": [one.to_json() for one in self.trackers],
            "checkpoints": [],
        }
        if self.options.least:
            head["require_coverage"] = self.options.least
        if self.missing:
            head["missing_shards"] = list(self.missing)
        if self.meanwhile:
            head["meanwhile"] = [one.to_json() for one in self.meanwhile]
        return head


def judge(path: Where, options: Options | None = None, progress: Progress = None) -> Judged:
    """Judge the checkpoints at a path, which exists. Nothing is written, run or unpickled.

    `progress` is told how many bytes of how many were read.
    """
    options, checkpoints = options or Options(), Checkpoints(path)
    jobs = [Job(number, found) for number, found in enumerate(checkpoints)]
    done = sorted(
        ((job.number, one) for job, one in Judging(path, options, progress).run(jobs) if one),
        key=itemgetter(0),
    )
    judgements = [done[at][1] for at in newest_first([one.age for _, one in done])]
    for place, notes in notes_of_shared(enumerate(one.shared for one in judgements)).items():
        judgements[place].report.remark(notes)
    kins = ((place, one.kin) for place, one in enumerate(judgements) if one.kin)
    for place, findings in told(kins).items():
        judgements[place].report.take_findings(findings)
    reports = [one.report for one in judgements]
    for place in weights_before_others(
        [one.age for one in judgements], reports.__getitem__, options.least
    ):
        reports[place].take_findings([WEIGHTS_ALONE])
    leftovers = sorted(set(checkpoints.leftovers))
    return Judged(path, reports, leftovers, options, trackers=trackers.read(path, reports))
