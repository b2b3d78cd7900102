"""The files of a certificate: `result.json`, `report.html`, `summary.md` and `junit.xml`.

All are made from the content of `result.json` alone. What a manager wrote (reasons, evidence, its
own name) is untrusted text in each of them. Reports are keyed by invariant id.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
import xml.etree.ElementTree as ET
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from markupsafe import Markup

from ckpt_conformance.contract.catalogue import FAMILIES
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.report.certificate import (
    CERTIFIED,
    UNDECIDED,
    bundles_named,
    bundles_of,
    judge,
    write_json,
    write_text,
)
from ckpt_conformance.report.environment import MARK
from ckpt_conformance.report.findings import (
    LINES,
    WHOLE,
    WORST,
    attention,
    briefly,
    explained,
    findings,
)
from ckpt_conformance.report.incidents import incident
from ckpt_conformance.report.next_steps import STRAY, Advice, advice, reason_beside
from ckpt_conformance.report.result import encode
from ckpt_conformance.report.terminal import WORDS, count, open_console, say, shown
from ckpt_conformance.report.words import (
    OWNERS,
    called,
    lines,
    linked,
    outcomes_in,
    profile_shown,
    texts,
)
from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.contract.verdicts import CrashSummary
    from ckpt_conformance.report.result import CheckResult, InvariantResult, Rate, Result

__all__ = ["WORDS", "count", "open_console", "say", "shown"]  # of `terminal`, as its own

CLIP = 4000
ONE_LINE = 72
BRIEF = 200  # characters of a reason in the list of what to look at first
FOLD = 110  # characters of a line of which the rest is in the report
BRIEFLY = 4  # findings of each of several adapters on a terminal


def clip(text: str, limit: int = CLIP) -> str:
    """Cut a long text and say so; `result.json` has all of it."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters in result.json"


def pretty(value: object) -> str:
    """Write one value of the evidence: text as it is, the rest as indented JSON."""
    if isinstance(value, str):
        return clip(shown(value))
    short = json.dumps(value, ensure_ascii=False)
    fits = len(short) <= ONE_LINE
    return clip(shown(short if fits else json.dumps(value, indent=2, ensure_ascii=False)))


def percent(rate: Rate) -> str:
    """Write (bad, tried) as "40 of 64 (62.5 %)"."""
    bad, tried = rate
    return f"{bad:,} of {tried:,} ({100 * bad / tried:.3g} %)" if tried else f"{bad:,} of 0"


def bundle_path(key: str, value: object) -> str:
    """Write the path of a bundle beside the report; empty where the evidence names none."""
    named = key == "bundle" and re.fullmatch(r"\w[\w.-]*", str(value))
    return f"bundles/{value}/violation.json" if named else ""


def verdict_counts(invariants: Iterable[InvariantResult]) -> dict[Verdict, int]:
    """Count invariants by verdict, worst first."""
    counts = Counter(one.verdict for one in invariants)
    return {verdict: counts[verdict] for verdict in WORDS if counts[verdict]}


class Headline(NamedTuple):
    """The first thing a reader sees."""

    verdict: Verdict
    title: str
    sentence: str


def headline(result: Result) -> Headline:
    """Summarize the certificate in one line; its verdict is never better than `judge` says."""
    counts = verdict_counts(result.invariants.values())
    status = judge(result)
    total = sum(counts.values())
    note = profile_note(counts)
    if result.harness:
        note += f", and {count(len(result.harness), 'fault')} of the harness"
    sentence = f"{count(total, 'invariant')}: {note}." if total else "Nothing ran."
    if result.interrupted:
        sentence = f"Stopped before the end. {sentence}"
    if status == CERTIFIED:
        return _certified(result, counts, sentence)
    if status == UNDECIDED:
        return Headline(Verdict.UNKNOWN, "Undecided", sentence)
    return Headline(Verdict.VIOLATION, "Not certified", sentence)


def _certified(result: Result, counts: Mapping[Verdict, int], sentence: str) -> Headline:
    """Do not call a manager certified where nothing applied, or no profile was judged whole."""
    if not counts.get(Verdict.PASS):
        return Headline(Verdict.NOT_APPLICABLE, "Nothing was shown", sentence)
    unmet = counts.get(Verdict.NOT_MET)
    if unmet:
        sentence = f"Every MUST holds; {count(unmet, 'SHOULD')} not met. {sentence}"
    title = "Certified" if result.profiles else "No violation in a selection"
    return Headline(Verdict.PASS, title, sentence)


class Family(NamedTuple):
    """The invariants of one family, in the order of their ids."""

    code: str
    title: str
    counts: dict[Verdict, int]
    invariants: list[tuple[str, InvariantResult]]


def families(result: Result) -> list[Family]:
    """Group the invariants by family, in the order of `catalogue.FAMILIES`."""
    groups: dict[str, list[tuple[str, InvariantResult]]] = {code: [] for code in FAMILIES}
    for name, invariant in sorted(result.invariants.items()):
        groups.setdefault(invariant.family, []).append((name, invariant))
    return [
        Family(code, FAMILIES.get(code, code), verdict_counts(one for _, one in members), members)
        for code, members in groups.items()
        if members
    ]


def profile_note(counts: Mapping[Verdict, int]) -> str:
    """Write the counts of a profile."""
    return ", ".join(
        f"{counts[verdict]} {word.label}" for verdict, word in WORDS.items() if verdict in counts
    )


def _show(value: object) -> object:
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _markdown(value: object) -> object:
    """Escape untrusted text for one cell or line of Markdown, HTML included."""
    if isinstance(value, Markup):
        return value
    line = " ".join(clip(shown(value), 300).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*\[\]|~#@])", r"\\\1", line)


def _code(value: str) -> Markup:
    """Put a command into one line of an indented code block, where Markdown escapes nothing."""
    return Markup(" ".join(shown(value).split()))  # noqa: S704  no HTML comes of it


def _lines(value: object, key: str = "") -> str:
    listed = lines(value)
    return shown(listed or value) if key in WHOLE else pretty(listed or value)


def _brief(text: str) -> str:
    return one_line(text, BRIEF)


def _linked(text: str, known: Collection[str]) -> Markup:
    return linked(shown(text), known)


def _tried(crash: CrashSummary) -> str:
    """Say how many contents of each model and phase were recovered from; empty if not counted."""
    return "; ".join(
        f"{model} "
        + ", ".join(f"{phase} {n.visited} of {n.unique}" for phase, n in states.phases.items())
        + (
            f", {states.strata.visited} of {states.strata.unique} strata"
            if states.strata.unique
            else ""
        )
        for model, states in crash.items()
        if states.phases
    )


def _template(name: str, finalize: Callable[[object], object]) -> jinja2.Template:
    """Load a template whose every expression passes `finalize`: no line of it can forget to."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ckpt_conformance.report", "templates"),
        autoescape=".html" in name,  # noqa: S701  the others are Markdown and plain text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters.update(
        pretty=pretty, percent=percent, profile_note=profile_note, clip=clip, code=_code
    )
    filters: dict[str, Any] = {"lines": _lines, "brief": _brief, "linked": _linked}
    filters["tried"] = _tried
    environment.filters.update(filters)
    shared: dict[str, Any] = {"words": WORDS, "profile_shown": profile_shown, "called": called}
    shared |= {"advice": advice, "reason_beside": reason_beside, "stray": STRAY}
    environment.globals.update(shared)
    return environment.get_template(name)


def page(name: str, **values: object) -> str:
    """Render an HTML page of `templates/`; all text in it is escaped."""
    return _template(name, _show).render(words=WORDS, mark=MARK, **values)


def render_html(result: Result) -> str:
    """Render the report: one file, no network, no script."""
    return page(
        "report.html.j2",
        result=result,
        headline=headline(result),
        counts=verdict_counts(result.invariants.values()),
        families=families(result),
        incident=incident,
        bundle_path=bundle_path,
        attention=attention(result),
        outcomes=outcomes_in(result),
        owners=OWNERS,
    )


def render_summary(result: Result) -> str:
    """Render the short summary for a CI page, in Markdown."""
    return _template("summary.md.j2", _markdown).render(
        result=result,
        headline=headline(result),
        attention=attention(result),
        mark=MARK,
    )


def render_text(template: str, width: int, **values: object) -> str:
    """Render text for a terminal of this width; `wrap(indent)` folds, anything else stays long."""

    def wrap(text: object, indent: int = 0) -> str:
        lines = (
            textwrap.wrap(line, max(width - indent, 20), break_on_hyphens=False) or [""]
            for line in shown(text).splitlines()
        )
        return ("\n" + " " * indent).join(itertools.chain.from_iterable(lines))

    def room(name: str) -> int:
        """Return how many characters are left beside a name."""
        return max(min(width, FOLD) - len(name) - 6, 20)

    return _template(template, _show).render(
        wrap=wrap,
        one_line=one_line,
        evidence_line=evidence_line,
        headline=headline,
        findings=findings,
        lines=LINES,
        worst=WORST,
        briefly=briefly,
        explained=explained,
        brief=BRIEFLY,
        room=room,
        **values,
    )


def one_line(value: object, limit: int = 160) -> str:
    """Write a value of the evidence in one line."""
    line = " ".join(pretty(value).split())
    return line if len(line) <= limit else f"{line[:limit]}…"


def evidence_line(key: str, value: object, limit: int = 160) -> str:
    """Write one entry of the evidence in one line.

    A list of texts is cut between two of them, and what is left out is counted. What has to be read
    to its end is not cut.
    """
    listed = [one_line(text, limit) for text in texts(value)]
    if key in WHOLE:
        return " ".join(shown("; ".join(texts(value)) or value).split())
    if not listed:
        return one_line(value, limit)
    ends = list(itertools.accumulate(len(text) + 2 for text in listed))
    fitting = max(sum(end <= limit + 2 for end in ends), 1)
    rest = [f"… {len(listed) - fitting} more"] if fitting < len(listed) else []
    return "; ".join([*listed[:fitting], *rest])


def junit_xml(result: Result) -> str:
    """Write JUnit XML with one test case per invariant, named by its id.

    NOT_MET, SAME_CAUSE, WAIVED and NOT_APPLICABLE are skipped: a dashboard shows a cause red once.
    """
    adapter = shown(result.adapter.name)
    judged = sorted(result.invariants.items())
    cases = [_case(adapter, name, one, advice(one, result)) for name, one in judged]
    cases += [_stray(adapter, check) for check in result.harness]
    suite = ET.Element("testsuite", {"name": adapter} | _totals(cases))
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(result).items():
        ET.SubElement(properties, "property", name=name, value=shown(value))
    suite.extend(cases)
    root = ET.Element("testsuites", {"name": MARK} | _totals(cases))
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _properties(result: Result) -> dict[str, str | int]:
    return {
        "suite": result.suite.version,
        "catalogue": result.suite.catalogue,
        "seed": result.seed,
        "budget": result.budget,
    }


def _totals(cases: Sequence[ET.Element]) -> dict[str, str]:
    kinds = Counter(child.tag for case in cases for child in case)
    seconds = sum(float(case.get("time", "0")) for case in cases)
    totals = {"tests": len(cases), "failures": kinds["failure"]}
    totals |= {"errors": kinds["error"], "skipped": kinds["skipped"]}
    return {name: str(value) for name, value in totals.items()} | {"time": f"{seconds:.3f}"}


def _case(
    adapter: str, name: str, invariant: InvariantResult, next_step: Advice | None
) -> ET.Element:
    """Make the test case of an invariant; it takes what its checks took."""
    step = f"{next_step.label}: {next_step.text}" if next_step else ""
    detail = [invariant.statement, pretty(invariant.evidence), step, invariant.reproduce]
    seconds = sum(check.seconds for check in invariant.checks)
    return _element(adapter, name, invariant, seconds, detail)


def _stray(adapter: str, check: CheckResult) -> ET.Element:
    """Make the test case of a fault of the harness, which belongs to no invariant."""
    return _element(adapter, shown(check.name), check, check.seconds, [pretty(check.evidence)])


def _element(
    adapter: str,
    name: str,
    judged: InvariantResult | CheckResult,
    seconds: float,
    detail: Sequence[str],
) -> ET.Element:
    case = ET.Element("testcase", classname=adapter, name=name, time=f"{seconds:.3f}")
    if judged.verdict is not Verdict.PASS:
        kind = {Verdict.VIOLATION: "failure", Verdict.UNKNOWN: "error"}
        message = f"{judged.verdict}: {clip(shown(judged.reason), 500)}"
        tag = kind.get(judged.verdict, "skipped")
        child = ET.SubElement(case, tag, type=str(judged.verdict), message=message)
        child.text = shown("\n".join(filter(None, detail)))
    return case


def write_certificate(result: Result, folder: Path) -> None:
    """Write the four files of one certificate; the session has written `bundles/`.

    Bundles that the certificate before this one names, and this one does not, go with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stale = bundles_of(folder / "result.json") - bundles_named(result)
    write_json(folder / "result.json", encode(result))
    write_text(folder / "report.html", render_html(result))
    write_text(folder / "summary.md", render_summary(result))
    write_text(folder / "junit.xml", junit_xml(result))
    bundle.remove(folder / "bundles", sorted(stale))


def show(template: str, **values: object) -> None:
    """Print a template of `templates/`; a log is not folded, so that it can be searched."""
    console = open_console()
    width = console.width if console.is_terminal else 10_000
    say(render_text(template, width, **values).rstrip("\n") + "\n")
