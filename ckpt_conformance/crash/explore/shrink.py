"""From a violating state to the simplest one, and to the operation that is to blame."""

from __future__ import annotations

from dataclasses import replace
from posixpath import dirname
from typing import TYPE_CHECKING

from ckpt_conformance.crash.explore.audit import OF_DATA
from ckpt_conformance.crash.explore.exploration import BY_MODEL, Case, Violation
from ckpt_conformance.crash.explore.judging import is_fine, judge
from ckpt_conformance.crash.explore.losses import loss_of
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.trace.operations import DATA, NAMING

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Mapping

    from ckpt_conformance.contract.verdicts import Outcome
    from ckpt_conformance.crash.explore.audit import Finding
    from ckpt_conformance.crash.explore.exploration import BaseExplorer
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation

Class = tuple[str, "Outcome"]  # a model, and how its states end
ROUNDS = 3
LONG = 300  # operations
FEW = 8  # lighter states that a round tries
EARLIER = 24  # untried states before the violating one that a round tries


def missing(state: State, whole: State) -> tuple[list[str], list[int]]:
    """Return what a state lacks of `whole`: names, and files (objects) with other content."""
    names = sorted(
        name
        for name in state.names.keys() | whole.names.keys()
        if state.names.get(name) != whole.names.get(name)
    )
    files = [
        number
        for number, content in state.contents.items()
        if number in whole.contents and whole.contents[number] != content
    ]
    return names, files


def simplicity(explorer: BaseExplorer, case: Case) -> tuple[bool, int, int]:
    """Return a sort key: states that were observed, the earliest crash, the fewest losses."""
    names, files = missing(case.state, explorer.complete(case.state.point))
    by_model = explorer.result.grade(case) == BY_MODEL
    return by_model, case.state.point, len(names) + len(files)


def shrink_all(explorer: BaseExplorer) -> None:
    """Try simpler states around each violation until none of them violates in the same way.

    Each class, which is a model and an outcome, is shrunk on its own: from the simplest of the
    states that were chosen, by states that are tried for this class. So a shard that holds this
    state shrinks as a run of all states does, whatever the other shards hold.
    """
    if explorer.limits.rounds == 0:
        return
    tried: dict[Class, set[str]] = {}
    whole: set[Class] = set()
    while new := [key for key in _classes(explorer) if key not in tried]:
        for key in new:  # what is tried may violate in a way that nothing did before
            tried[key] = set()
            if _descend(explorer, key, tried[key]):
                whole.add(key)
    settle(explorer, tried, whole)


def _classes(explorer: BaseExplorer) -> list[Class]:
    return [(one.case.model, one.outcome) for one in explorer.result.violations]


def _descend(explorer: BaseExplorer, key: Class, tried: set[str]) -> bool:
    """Try simpler states of one class; return whether all of them could be recovered from."""
    best = simplest(explorer, key, tried)
    is_whole = True
    for _ in range(min(ROUNDS, explorer.limits.rounds)):
        around = [case for case in simpler(explorer, best, tried) if case.content not in tried]
        if not around:
            break
        tried |= {case.content for case in around}
        explorer.add(around)
        is_whole &= all(case.content in explorer.result.recoveries for case in around)
        better = simplest(explorer, key, tried)
        if better.content == best.content:
            break
        best = better
    return is_whole


def settle(
    explorer: BaseExplorer, tried: Mapping[Class, Collection[str]], whole: Container[Class]
) -> None:
    """Let the simplest recovered state of each class stand for it."""
    result = explorer.result
    for report in result.models.values():
        for outcome, violation in report.worst.items():
            key = (report.name, violation.outcome)
            best = simplest(explorer, key, tried.get(key, ()))
            report.worst[outcome] = replace(
                violation,
                case=best,
                recovery=result.recoveries[best.content],
                shrunk=key in whole,
                grade=result.grade(best),
            )


def simplest(explorer: BaseExplorer, key: Class, tried: Collection[str]) -> Case:
    """Return the simplest state of a class, of those that were chosen and those tried for it.

    A class that showed only while another one was shrunk has none of these: then any will do.
    """
    model, outcome = key
    same = [case for case in explorer.cases[model] if _ends_so(explorer, case, outcome)]
    own = [case for case in same if case.content in explorer.chosen or case.content in tried]
    return min(own or same, key=lambda case: simplicity(explorer, case))


def _ends_so(explorer: BaseExplorer, case: Case, outcome: str) -> bool:
    recovery = explorer.result.recoveries.get(case.content)
    if recovery is None:
        return False
    facts = explorer.result.facts(case.state)
    judged = judge(recovery, facts)
    return judged == outcome and not is_fine(judged, facts)


def simpler(explorer: BaseExplorer, case: Case, tried: Collection[str]) -> Iterator[Case]:
    """Yield states with one piece more than the violating one, and untried ones before it.

    Yields none for what was observed on an image: only what a model allows can be made up. In a
    long recording pieces are many, and to judge what is made up takes long: those that the model
    listed at the same crash point, and that lack less, are taken instead.
    """
    model = MODELS.get(case.model)
    if model is None:
        return
    whole = explorer.complete(case.state.point)
    if len(explorer.recording.operations) > LONG:
        yield from _lighter(explorer, case, whole)
    else:
        for state in _restored(case.state, whole):
            if not model.illegal(explorer.recording, state):
                yield Case(case.model, state, explorer.content_of_made_up(state))
    earlier = [
        other
        for other in explorer.cases[case.model]
        if other.state.point < case.state.point
        and other.content not in explorer.chosen
        and other.content not in tried
    ]
    step = max(1, len(earlier) // EARLIER)
    yield from earlier[::-1][: EARLIER // 2]
    yield from earlier[::step][: EARLIER // 2]


def _lighter(explorer: BaseExplorer, case: Case, whole: State) -> list[Case]:
    """Return listed states of the same crash point that lack less, the least first."""
    at_point = [
        (loss_of(other.state, whole).amount, other)
        for other in explorer.cases[case.model]
        if other.state.point == case.state.point
    ]
    now = loss_of(case.state, whole).amount
    lighter = {other.content: (amount, other) for amount, other in at_point if 0 < amount < now}
    ordered = sorted(lighter.values(), key=lambda pair: pair[0])
    return [other for _, other in ordered[:FEW]]


def _restored(state: State, whole: State) -> Iterator[State]:
    """Yield states with one missing piece put back, a file or a name."""
    names, files = missing(state, whole)
    for number in files:
        yield replace(
            state,
            contents={**state.contents, number: whole.contents[number]},
            why=f"{state.why}, without one loss",
        )
    for name in names:
        restored = dict(state.names)
        restored.pop(name, None)
        if name in whole.names:
            restored[name] = whole.names[name]
        contents = {**whole.contents, **state.contents}
        kept = {number: contents[number] for number in restored.values() if number in contents}
        if all(dirname(path) in restored or not dirname(path) for path in restored):
            yield replace(state, names=restored, contents=kept)


# -- blame ------------------------------------------------------------------------------------


def blame_all(explorer: BaseExplorer) -> None:
    """Add to each violation its guilty operation, and the finding of the audit that fits."""
    for report in explorer.result.models.values():
        for outcome, violation in report.worst.items():
            finding = _finding(explorer, violation)
            guilty = guilty_of(explorer, violation, finding)
            report.worst[outcome] = replace(violation, guilty=guilty, blame=finding)


def _finding(explorer: BaseExplorer, violation: Violation) -> Finding | None:
    """Return the audit's finding about what the state lacks; else about the last operation."""
    state = violation.case.state
    names, files = missing(state, explorer.complete(state.point))
    audit = explorer.result.audit_of([violation.case.model])
    of_files = [f for f in audit if f.object in files and f.rule in OF_DATA]
    of_names = [f for f in audit if f.path in names and f.rule not in OF_DATA]
    late = [f for f in audit if f.operation == state.point - 1]
    return next(iter([*of_files, *of_names, *(late if not names and not files else [])]), None)


def guilty_of(
    explorer: BaseExplorer, violation: Violation, finding: Finding | None
) -> Operation | None:
    """Return the operation to blame.

    It is the finding's, or the last one that was not kept, or the last one that was issued.
    """
    recording, state = explorer.recording, violation.case.state
    if finding is not None and finding.operation >= 0:
        return recording.operations[finding.operation]
    names, files = missing(state, explorer.complete(state.point))
    issued = recording.operations[: state.point]
    lost = [o for o in issued if o.kind in DATA and o.object in files]
    lost = lost or [
        o for o in issued if o.kind in NAMING and (o.path in names or o.target in names)
    ]
    kept = [o for o in issued if o.kind in NAMING | DATA]
    return next(reversed(lost or kept), None)
