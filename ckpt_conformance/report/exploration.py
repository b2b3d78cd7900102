"""The files of an exploration: `result.json`, and `report.html` with its crash maps.

The page is made from the content of `result.json` alone. Names of files, messages and source lines
are a manager's own: untrusted text.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import shlex
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from markupsafe import Markup

from ckpt_conformance import __version__
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.crash.explore import crashmap, summary
from ckpt_conformance.crash.explore.workloads import WORKLOADS
from ckpt_conformance.report import certificate, environment, files, map_geometry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.contract.verdicts import CrashSummary
    from ckpt_conformance.crash.explore.exploration import BaseExplorer
    from ckpt_conformance.report.certificate import Json

SCHEMA = "ckpt-conformance/exploration/v1"
STATUS = {
    Verdict.PASS: certificate.CERTIFIED,
    Verdict.VIOLATION: certificate.VIOLATED,
    Verdict.UNKNOWN: certificate.UNDECIDED,
}


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    seed: int = 0
    budget: str = "quick"
    models: Sequence[str] = ()
    workloads: Sequence[str] = ()
    real: Sequence[str] = ()  # file systems whose images were crashed, too


@dataclass(frozen=True)
class Made:
    """When and where an exploration was made, and by what: of parts, as the first one says."""

    version: str
    commit: str | None
    created: str  # ISO 8601, UTC
    environment: Json

    @classmethod
    def here(cls) -> Made:
        """Describe this machine, now."""
        return cls(
            __version__,
            environment.suite_commit(),
            datetime.now(UTC).isoformat(timespec="seconds"),
            environment.describe_environment(Path(tempfile.gettempdir())),
        )


@dataclass
class Findings:
    """What the explorations of one adapter came to, workload by workload; or those of a script."""

    asked: Asked
    explorations: list[Json] = field(default_factory=list["Json"])
    not_applicable: list[str] = field(default_factory=list[str])  # workloads, each with the reason
    unknown: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])  # what is compared, and how steps are known
    without_a_crash: list[str] = field(default_factory=list[str])  # violations that need no crash
    signals: list[Json] = field(default_factory=list["Json"])  # kinds of signals to a script
    interrupted: bool = False
    made: Made | None = None  # None: here and now
    summaries: list[CrashSummary] = field(default_factory=list["CrashSummary"])  # of `explorations`

    def add(self, explorer: BaseExplorer, bundles: Mapping[str, str]) -> None:
        """Take one exploration; `bundles` gives the folder of each class of violation."""
        result = explorer.result
        work = WORKLOADS.get(result.workload)
        content = result.to_json() | {"told": work.description if work else ""}
        crash = summary.of_exploration(result)
        content["crash"] = msgspec.to_builtins(crash)
        content["map"] = msgspec.to_builtins(crashmap.map_of(explorer, bundles))
        self.explorations.append(certificate.plain(content))
        self.summaries.append(crash)

    @property
    def verdict(self) -> Verdict:
        """Merge what was found: a violation wins over UNKNOWN, and a part is no PASS."""
        models = [model for one in self.explorations for model in one["models"].values()]
        is_violated = any(model["violations"] or model["unusable"] for model in models)
        is_violated |= any(kind["classes"] for kind in self.signals)
        if is_violated or self.without_a_crash:
            return Verdict.VIOLATION
        undecided = self.unknown or self.interrupted or not self.explorations
        return Verdict.UNKNOWN if undecided else Verdict.PASS

    def to_json(self, about: Mapping[str, Any]) -> Json:
        """Return the content of `result.json`; `about` has the `adapter`, or the `script`."""
        asked, made = asdict(self.asked), self.made or Made.here()
        content: Json = {
            "schema": SCHEMA,
            "suite": {"version": made.version, "commit": made.commit},
            "created": made.created,
            "interrupted": self.interrupted,
            "environment": made.environment,
            **about,
            "seed": asked.pop("seed"),
            "budget": asked.pop("budget"),
            "asked": asked,
            "verdict": str(self.verdict),
            "crash": msgspec.to_builtins(summary.merge(self.summaries)),
            "hygiene": _hygiene(self.explorations),
            "not_applicable": self.not_applicable,
            "unknown": self.unknown,
            "notes": self.notes,
            "without_a_crash": self.without_a_crash,
            "signals": self.signals,
            "explorations": self.explorations,
        }
        return cast("Json", certificate.plain(content))


def _hygiene(explorations: Sequence[Json]) -> list[Json]:
    """Collect the audit's findings, each once, with the workloads that show it."""
    findings: dict[tuple[str, str, str], Json] = {}
    for exploration in explorations:
        workload = exploration["workload"]
        for finding in exploration["audit"]:
            key = finding["rule"], finding["source"], finding["other_source"]
            first = findings.setdefault(key, {**finding, "workloads": []})
            if workload not in first["workloads"]:
                first["workloads"].append(workload)
    return list(findings.values())


def prepare(folder: Path) -> None:
    """Make sure that the files can be written.

    Raises:
        OutputError: the folder can't be written, or holds files that are not of an exploration.

    """
    environment.prepare_output(folder)
    try:
        known = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if certificate.as_table(known).get("schema") in certificate.SCHEMAS:
        raise environment.OutputError(
            f"{folder}/result.json is a certificate and would be overwritten; name another folder "
            "with --out"
        )


def write(findings: Findings, about: Mapping[str, Any], folder: Path) -> None:
    """Write `result.json` and `report.html`; `bundles/` has its own writer."""
    result = findings.to_json(about)
    certificate.write_json(folder / "result.json", result)
    certificate.write_text(folder / "report.html", render_html(result))


# ---- the page ------------------------------------------------------------------------------------


class Headline(NamedTuple):
    """The first thing a reader sees."""

    verdict: Verdict
    title: str
    sentence: str


class Head(NamedTuple):
    """What was explored."""

    what: str
    name: str
    more: str


def head_of(result: Json) -> Head:
    """Name the adapter and its library, or the command."""
    if "script" in result:
        command = shlex.join(result["script"]["command"])
        return Head("Command", result["script"]["name"], command)
    adapter = result["adapter"]
    version = f"{adapter['library'] or 'version'} {adapter['version']}"
    return Head("Adapter", adapter["name"], " · ".join(filter(None, (version, adapter["recipe"]))))


def headline(result: Json) -> Headline:
    """Summarize an exploration in one line."""
    verdict = Verdict(result["verdict"])
    count = sum(len(one["map"]["classes"]) for one in result["explorations"])
    count += len(result["without_a_crash"])
    count += sum(len(kind["classes"]) for kind in result.get("signals", ()))
    titles = {
        Verdict.PASS: "No violation found",
        Verdict.VIOLATION: f"Violated: {files.count(count, 'finding')}",
    }
    tried = sum(one["visited"] for one in result["explorations"])
    where = files.count(len(result["explorations"]), "workload")
    sentence = f"{files.count(tried, 'run')} of recovery, from crash states of {where}."
    if result["unknown"]:
        sentence += f" {files.count(len(result['unknown']), 'doubt')} of the harness, see below."
    if result["interrupted"]:
        sentence = f"Stopped before the end. {sentence}"
    return Headline(verdict, titles.get(verdict, "Undecided"), sentence)


def render_html(result: Json) -> str:
    """Render the report: one file, no network; its only script shows what a point stands for."""
    script = _resource("explore.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return files.page(
        "explore.html.j2",
        result=result,
        headline=headline(result),
        head=head_of(result),
        maps=[map_geometry.draw(one["map"], one["models"]) for one in result["explorations"]],
        looks={str(outcome): look for outcome, look in map_geometry.LOOKS.items()},
        bad=_bad(result),
        tables=[_embedded(_table(one)) for one in result["explorations"]],
        looks_table=_embedded(
            {str(key): look._asdict() for key, look in map_geometry.LOOKS.items()}
        ),
        bundle_name=_bundle_name,
        bundle_path=files.bundle_path,
        replay=_replay,
        script=Markup(script),  # noqa: S704  our own file
        script_hash=digest,
    )


def _bad(result: Json) -> dict[str, set[str]]:
    """Return by model the outcomes that violate; a refusal may be right before a first save."""
    outcomes: dict[str, set[str]] = {model: set() for model in result["crash"]}
    for exploration in result["explorations"]:
        for model, report in exploration["models"].items():
            outcomes[model] |= {violation["outcome"] for violation in report["violations"]}
    return outcomes


def _table(exploration: Json) -> Json:
    """Collect what the script shows of a map."""
    drawn = exploration["map"]
    keys = ("first", "last", "kind", "path", "target", "source", "marks")
    columns = [{k: v for k, v in c.items() if k in keys} for c in drawn["columns"]]
    rows = [[name, cells] for name, cells in drawn["rows"].items()]
    bundles = sorted({cell["bundle"] for _, cells in rows for cell in cells if _kept(cell)})
    commands = {path: [_replay(path), _bundle_name(path)] for path in bundles}
    unused = {"point", "content", "alone"}
    states = [{k: v for k, v in state.items() if k not in unused} for state in drawn["states"]]
    return {"columns": columns, "rows": rows, "states": states, "replays": commands}


def _kept(cell: Json | None) -> bool:
    return bool(cell and cell.get("bundle"))


def _replay(folder: str) -> str:
    """Write the command that replays a bundle."""
    return shlex.join(["ckpt-conformance", "replay", folder])


def _bundle_name(folder: str) -> str:
    return Path(folder).name


def _embedded(value: object) -> Markup:
    """Write JSON that may stand in a script element: no `<` of a manager's ends it."""
    text = json.dumps(_shown(value), separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704  every sign that HTML knows was replaced


def _shown(value: Any) -> Any:  # noqa: ANN401  any JSON value
    if isinstance(value, str):
        return files.shown(value)
    if isinstance(value, dict):
        return {files.shown(k): _shown(v) for k, v in cast("Json", value).items()}
    if isinstance(value, list):
        return [_shown(one) for one in cast("list[object]", value)]
    return value


def _resource(name: str) -> str:
    folder = importlib.resources.files("ckpt_conformance.report") / "templates"
    return (folder / name).read_text("utf-8")
