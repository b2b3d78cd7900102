"""Which findings of the audit matter: those about what a load needs.

A log, or a temporary file that was left, may be unsynced as long as it likes. So each finding is
held against states that lack just what it is about: the name, the bytes, or a removal; one about
the order of calls against what is there in the middle of the save. Where a load gives the
acknowledged step from all of them the finding is dropped. These states are made up, not legal: only
how a load takes them counts.
"""

from __future__ import annotations

from dataclasses import replace
from posixpath import dirname
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.crash.explore.audit import OF_DATA, OF_ORDER, OF_REMOVAL
from ckpt_conformance.crash.explore.exploration import Case
from ckpt_conformance.crash.explore.judging import is_fine, judge
from ckpt_conformance.crash.model.states import Content
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.crash.explore.audit import Finding
    from ckpt_conformance.crash.explore.exploration import BaseExplorer
    from ckpt_conformance.crash.model.states import State

AT_MOST = 24  # kinds of findings that are tried; further ones are kept untried

Sort = tuple[str, str, str]  # rule, path without its numbers, source line


def sift(explorer: BaseExplorer) -> None:
    """Drop findings about what no load needs, and those about syncs where only kills are explored.

    Findings of one rule, source line and kind of path are tried once, by the first of them. What
    was removed is put back all at once first: a rotation takes many names, and mostly none matters.
    """
    result = explorer.result
    result.audit = result.audit_of(result.models)
    if explorer.recording.ranks > 1:
        return
    removals = [finding for finding in result.audit if finding.rule in OF_REMOVAL]
    cases = list(_cases(explorer, removals))
    explorer.recover(cases)
    if cases and all(_loads(explorer, case) for case in cases):
        result.audit = [finding for finding in result.audit if finding not in removals]
    first: dict[Sort, Finding] = {}
    for finding in result.audit:
        first.setdefault(sort_of(finding), finding)
    chosen = dict(list(first.items())[:AT_MOST])
    middle = (_middle(explorer, finding) for finding in chosen.values() if finding.rule in OF_ORDER)
    explorer.complete_all({point for points in middle for point in points})
    tried = {sort: list(_cases(explorer, [finding])) for sort, finding in chosen.items()}
    explorer.recover([case for cases in tried.values() for case in cases])
    idle = {
        sort for sort, cases in tried.items() if cases and all(_loads(explorer, c) for c in cases)
    }
    result.audit = [finding for finding in result.audit if sort_of(finding) not in idle]


def sort_of(finding: Finding) -> Sort:
    """Return what findings have in common that one of them stands for."""
    return finding.rule, trees.pattern(finding.path), finding.source


def _loads(explorer: BaseExplorer, case: Case) -> bool:
    """Whether a load gives what was acknowledged."""
    recovery = explorer.result.recoveries.get(case.content)
    facts = explorer.result.facts(case.state)
    return recovery is not None and is_fine(judge(recovery, facts), facts)


def _cases(explorer: BaseExplorer, findings: Sequence[Finding]) -> Iterator[Case]:
    """Yield states, at the acknowledgement after the first finding, that lack what they are about.

    Several findings are of removals.
    """
    point = _acknowledged(explorer, findings[0]) if findings else None
    if point is None:
        return
    whole = explorer.complete(point)
    if findings[0].rule in OF_REMOVAL:
        states = list(_with_the_removed(explorer, findings, whole))
    elif findings[0].rule in OF_ORDER:
        states = list(_in_the_middle(explorer, findings[0]))
    else:
        states = list(_lacking(findings[0], whole))
    for state in states:
        made_up = replace(state, why=f"complete, but for {findings[0].path}")
        yield Case("", made_up, explorer.content_of_made_up(made_up))


def _acknowledged(explorer: BaseExplorer, finding: Finding) -> int | None:
    """Return the crash point just after the acknowledgement that a finding is about."""
    marks = [
        operation.index + 1
        for operation in explorer.recording.operations
        if operation.kind is Kind.MARK and operation.mark == "acknowledged"
    ]
    later = [point for point in marks if point > finding.operation]
    return next(iter([*later, *reversed(marks)]), None)


def _middle(explorer: BaseExplorer, finding: Finding) -> list[int]:
    """Return up to four crash points from a finding to the end of its save."""
    points = range(finding.operation + 1, _acknowledged(explorer, finding) or 0)
    last = len(points) - 1
    return sorted({points[last * part // 3] for part in range(4)}) if points else []


def _in_the_middle(explorer: BaseExplorer, finding: Finding) -> Iterator[State]:
    """Yield states in the middle of a save; with half of a finding's file, too."""
    for point in _middle(explorer, finding):
        whole = explorer.complete(point)
        yield whole
        if finding.object in whole.contents:
            half = _cut(whole, finding, whole.contents[finding.object].size // 2)
            yield replace(whole, contents={**whole.contents, finding.object: half})


def _lacking(finding: Finding, whole: State) -> Iterator[State]:
    """Yield states without the bytes of a file, or half of them; or without a name."""
    if finding.rule in OF_DATA and finding.object in whole.contents:
        size = whole.contents[finding.object].size
        for kept in {0, size // 2}:
            contents = {**whole.contents, finding.object: _cut(whole, finding, kept)}
            yield replace(whole, contents=contents)
    elif finding.path in whole.names:
        yield _pruned(whole, finding.path)


def _cut(whole: State, finding: Finding, size: int) -> Content:
    """Return the first bytes of a file."""
    kept = [extent for extent in whole.contents[finding.object].extents if extent.offset < size]
    extents = tuple(replace(e, size=min(e.size, size - e.offset)) for e in kept)
    return Content(size, extents)


def _pruned(whole: State, path: str) -> State:
    """Return a state without a name, and without what is below it."""
    names = {
        name: number
        for name, number in whole.names.items()
        if name != path and not name.startswith(f"{path}/")
    }
    used = set(names.values())
    contents = {number: kept for number, kept in whole.contents.items() if number in used}
    return replace(whole, names=names, contents=contents)


def _with_the_removed(
    explorer: BaseExplorer, findings: Sequence[Finding], whole: State
) -> Iterator[State]:
    """Yield states in which removed names are back: with what was below them, and without."""
    names: dict[str, int] = {}
    contents: dict[int, Content] = {}
    for finding in findings:
        before = explorer.complete(finding.operation)
        names |= {name: number for name, number in before.names.items() if _is_in(finding, name)}
        contents |= before.contents
    back = {name: number for name, number in names.items() if name not in whole.names}
    tops = {finding.path: back[finding.path] for finding in findings if finding.path in back}
    folders = {*whole.names, *back, ""}
    if not back or any(dirname(name) not in folders for name in back):
        return
    for some in (back, tops) if tops.keys() != back.keys() else (back,):
        files = {number: contents[number] for number in some.values() if number in contents}
        yield replace(whole, names={**whole.names, **some}, contents={**files, **whole.contents})


def _is_in(finding: Finding, name: str) -> bool:
    return name == finding.path or name.startswith(f"{finding.path}/")
