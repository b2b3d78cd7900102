"""The files of a certificate: `result.json`, `report.html`, `summary.md` and `junit.xml`.

All are made from the content of `result.json` alone. What a manager wrote (reasons, evidence, its
own name) is untrusted text in each of them. Reports are keyed by invariant id.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from markupsafe import Markup

from ckpt_conformance.certificate import (
    CERTIFIED,
    UNDECIDED,
    judge,
    write_json,
    write_text,
)
from ckpt_conformance.verdicts import SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.certificate import Json

MARK = "ckpt-conformance"  # stands near the beginning of every file that is ours
FILES = ("result.json", "report.html", "junit.xml", "summary.md")
CLIP = 4000
ONE_LINE = 72
FAMILIES = {
    "SMOK": "Smoke",
    "RTRP": "Round trip",
    "COMP": "Completeness of state",
    "RSUM": "Resumed trajectory",
    "ATOM": "Atomicity under kill",
    "DURA": "Durability under power loss",
    "CORR": "Damage detection",
    "IOER": "I/O errors and full disk",
    "DISC": "Discovery and latest",
    "RETN": "Retention",
    "MIRR": "Mirror and upload",
    "ASYN": "Async save",
    "INTN": "Explicit intent",
    "SHRD": "Shards and resharding",
    "RANK": "Rank faults and coordination",
    "VERS": "Versions and formats",
    "SECU": "Untrusted input",
    "SIDE": "Saving has no side effects",
}


class Word(NamedTuple):
    """How a verdict is written for people: never by colour alone."""

    glyph: str
    ascii: str
    label: str
    meaning: str


WORDS = {
    Verdict.VIOLATION: Word("✗", "X", "violated", "a promise was broken, with evidence"),
    Verdict.UNKNOWN: Word("?", "?", "unknown", "the harness or an assumption failed; not a pass"),
    Verdict.NOT_MET: Word("○", "o", "not met", "good practice that this manager does not claim"),
    Verdict.WAIVED: Word("⚑", "w", "waived", "a violation that was accepted, with a reason"),
    Verdict.PASS: Word("✓", "+", "kept", "every check of the promise passed"),
    Verdict.NOT_APPLICABLE: Word("·", "-", "not applicable", "the manager does not declare it"),
}


class OutputError(ValueError):
    """A folder that the certificate cannot be written to."""


def shown(text: object) -> str:
    """Make untrusted text safe to show: control, bidi and other invisible characters escaped."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in str(text)
    )


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


def percent(rate: Sequence[int]) -> str:
    """Write (bad, tried) as "40 of 64 (62.5 %)"."""
    bad, tried = rate
    return f"{bad:,} of {tried:,} ({100 * bad / tried:.3g} %)" if tried else f"{bad:,} of 0"


def count(number: int, noun: str) -> str:
    """Write "1 invariant", "2 invariants"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Incident(NamedTuple):
    """A real bug behind an invariant; `url` is empty where there is nothing to link."""

    label: str
    url: str
    title: str


@functools.cache
def _corpus() -> dict[str, dict[str, str]]:
    folder = importlib.resources.files("ckpt_conformance") / "templates"
    corpus: dict[str, dict[str, str]] = json.loads((folder / "incidents.json").read_text("utf-8"))
    return corpus


def incident(name: str) -> Incident:
    """Look up an id of the bug corpus ("A01"), or take an address as it is."""
    known = _corpus().get(name)
    if known:
        return Incident(f"{name} {known['thread']}", known["url"], known["title"])
    # Anything but http(s) stays text: a javascript: link is not an incident.
    return Incident(name, name if re.match(r"https?://[^\s]+$", name) else "", "")


def verdict_counts(result: Json) -> dict[Verdict, int]:
    """Count the invariants by verdict, worst first."""
    counts = Counter(Verdict(one["verdict"]) for one in result["invariants"].values())
    return {verdict: counts[verdict] for verdict in WORDS if counts[verdict]}


class Headline(NamedTuple):
    """The first thing a reader sees."""

    verdict: Verdict
    title: str
    sentence: str


def headline(result: Json) -> Headline:
    """Say in one line what the certificate comes to."""
    counts = verdict_counts(result)
    status = judge(result)
    total = sum(counts.values())
    said = [f"{one} {WORDS[verdict].label}" for verdict, one in counts.items()]
    if result["harness"]:
        said.append(count(len(result["harness"]), "fault") + " of the harness")
    sentence = f"{count(total, 'invariant')}: {', '.join(said)}." if total else "Nothing ran."
    if result["interrupted"]:
        sentence = f"Stopped before the end. {sentence}"
    if status == CERTIFIED:
        return _certified(result, counts, sentence)
    if status == UNDECIDED:
        return Headline(Verdict.UNKNOWN, "Undecided", sentence)
    return Headline(Verdict.VIOLATION, "Not certified", sentence)


def _certified(result: Json, counts: Mapping[Verdict, int], sentence: str) -> Headline:
    """Do not call a manager certified where nothing applied, or no profile was judged whole."""
    if not counts.get(Verdict.PASS):
        return Headline(Verdict.NOT_APPLICABLE, "Nothing was shown", sentence)
    title = "Certified" if result["profiles"] else "No violation in a selection"
    return Headline(Verdict.PASS, title, sentence)


class Family(NamedTuple):
    """The invariants of one family, in the order of their ids."""

    code: str
    title: str
    counts: dict[Verdict, int]
    invariants: list[tuple[str, Json]]


def families(result: Json) -> list[Family]:
    """Group the invariants by family, in the order of the design."""
    groups: dict[str, list[tuple[str, Json]]] = {code: [] for code in FAMILIES}
    for name, one in sorted(result["invariants"].items()):
        groups.setdefault(one["family"], []).append((name, one))
    return [
        Family(code, FAMILIES.get(code, code), verdict_counts({"invariants": dict(ones)}), ones)
        for code, ones in groups.items()
        if ones
    ]


def attention(result: Json) -> list[tuple[str, Json]]:
    """List what a reader must look at first: violations, then UNKNOWN."""
    wanted = (Verdict.VIOLATION, Verdict.UNKNOWN)
    found = [(name, one) for name, one in result["invariants"].items() if one["verdict"] in wanted]
    return sorted(found, key=lambda pair: (-SEVERITY[Verdict(pair[1]["verdict"])], pair[0]))


def profile_note(counts: Mapping[str, int]) -> str:
    """Write the counts of a profile; the SHOULDs that are not met stand there by name."""
    words = {verdict: word.label for verdict, word in WORDS.items()}
    words[Verdict.NOT_MET] = "SHOULD not met"
    return ", ".join(
        f"{counts[verdict]} {words[verdict]}" for verdict in WORDS if verdict in counts
    )


def _show(value: object) -> object:
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def render_html(result: Json) -> str:
    """Render the report: one file, no network, no script."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ckpt_conformance", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Every text passes `shown` on its way out, so that no template line can forget it.
    environment.finalize = _show
    environment.filters |= {"pretty": pretty, "percent": percent, "incident": incident}
    environment.filters |= {"profile_note": profile_note, "clip": clip}
    return environment.get_template("report.html.j2").render(
        result=result,
        headline=headline(result),
        counts=verdict_counts(result),
        families=families(result),
        attention=attention(result),
        words=WORDS,
        mark=MARK,
    )


def _cell(text: object) -> str:
    """Escape untrusted text for a cell of a Markdown table, HTML included."""
    line = " ".join(clip(shown(text), 300).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|~#@])", r"\\\1", line)


def summary_markdown(result: Json) -> str:
    """Write the short summary for a CI page."""
    first = headline(result)
    lines = [
        f"<!-- {MARK} -->",
        f"## {WORDS[first.verdict].glyph} {_cell(result['adapter']['name'])}: {first.title}",
        "",
        first.sentence,
        "",
    ]
    lines += _profile_table(result) + _attention_table(result)
    suite = result["suite"]
    lines.append(
        f"Catalogue {suite['catalogue']}, suite {suite['version']}, seed {result['seed']}, "
        f"budget {result['budget']}."
    )
    return "\n".join(lines) + "\n"


def _profile_table(result: Json) -> list[str]:
    rows = [
        f"| {_cell(name)} | {WORDS[Verdict(one['verdict'])].glyph} {one['verdict']} "
        f"| {profile_note(one['counts'])} |"
        for name, one in result["profile_details"].items()
    ]
    return ["| profile | verdict | invariants |", "|---|---|---|", *rows, ""] if rows else []


def _attention_table(result: Json) -> list[str]:
    rows = [
        f"| {name} | {one['verdict']} | {_cell(one['statement'])} | {_cell(one['reason'])} |"
        for name, one in attention(result)
    ]
    if not rows:
        return []
    head = ["| invariant | verdict | promise | what happened |", "|---|---|---|---|"]
    code = [f"    {' '.join(shown(one['reproduce']).split())}" for _, one in attention(result)]
    return [*head, *rows, "", "Reproduce:", "", *code, ""]


def junit_xml(result: Json) -> str:
    """Write JUnit XML with one test case per invariant, named by its id.

    NOT_MET, WAIVED and NOT_APPLICABLE are skipped, so that a dashboard never shows them red.
    """
    adapter = shown(result["adapter"]["name"])
    cases = [_case(adapter, name, one) for name, one in sorted(result["invariants"].items())]
    cases += [_case(adapter, shown(one["name"]), one) for one in result["harness"]]
    suite = ET.Element("testsuite", {"name": adapter} | _totals(cases))
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(result).items():
        ET.SubElement(properties, "property", name=name, value=shown(value))
    suite.extend(cases)
    root = ET.Element("testsuites", {"name": MARK} | _totals(cases))
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _properties(result: Json) -> dict[str, Any]:
    return {
        "suite": result["suite"]["version"],
        "catalogue": result["suite"]["catalogue"],
        "seed": result["seed"],
        "budget": result["budget"],
    }


def _totals(cases: Sequence[ET.Element]) -> dict[str, str]:
    kinds = Counter(child.tag for case in cases for child in case)
    seconds = sum(float(case.get("time", "0")) for case in cases)
    totals = {"tests": len(cases), "failures": kinds["failure"]}
    totals |= {"errors": kinds["error"], "skipped": kinds["skipped"]}
    return {name: str(value) for name, value in totals.items()} | {"time": f"{seconds:.3f}"}


def _case(adapter: str, name: str, one: Json) -> ET.Element:
    checks: list[Json] = one.get("checks", [one])
    seconds = sum(float(check["seconds"]) for check in checks)
    case = ET.Element("testcase", classname=adapter, name=name, time=f"{seconds:.3f}")
    verdict = Verdict(one["verdict"])
    if verdict is not Verdict.PASS:
        kind = {Verdict.VIOLATION: "failure", Verdict.UNKNOWN: "error"}.get(verdict, "skipped")
        message = f"{verdict}: {clip(shown(one['reason']), 500)}"
        detail = ET.SubElement(case, kind, type=str(verdict), message=message)
        lines = [one.get("statement", ""), pretty(one["evidence"]), one.get("reproduce", "")]
        detail.text = shown("\n".join(filter(None, lines)))
    return case


def output_folders(out: Path, adapters: Sequence[str]) -> dict[str, Path]:
    """Give the folder of each adapter: `out` itself for one, `out`/<name> for several."""
    if len(adapters) == 1:
        return {adapters[0]: out}
    folders: dict[str, Path] = {}
    for adapter in adapters:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", adapter).strip(".-") or "adapter"
        taken = {folder.name.casefold() for folder in folders.values()}
        names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 2**31))
        folders[adapter] = out / next(name for name in names if name.casefold() not in taken)
    return folders


def prepare_output(folder: Path) -> None:
    """Make sure, before anything runs, that the certificate can be written into `folder`.

    Raises:
        OutputError: it is no folder, cannot be written, or holds files of these names that are not
            ours.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # asking for permission is not enough: a file system can be full or read-only
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror}; name another folder with --out"
        ) from error
    for name in FILES:
        _refuse_foreign(folder / name)


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    ours = False
    if path.is_file():
        with path.open("rb") as file:
            ours = MARK.encode() in file.read(1024)
    if not ours:
        raise OutputError(
            f"{path} was not written by {MARK} and would be overwritten; move it away or name "
            "another folder with --out"
        )


def write_certificate(result: Json, folder: Path) -> None:
    """Write the four files of one certificate; `bundles/` belongs to the session."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "result.json", result)
    write_text(folder / "report.html", render_html(result))
    write_text(folder / "summary.md", summary_markdown(result))
    write_text(folder / "junit.xml", junit_xml(result))
