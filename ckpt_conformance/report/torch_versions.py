"""The page about releases of torch: who loads what whom wrote, and where certificates differ.

`record` gathers the results of the matrix (`tox run -e matrix`) into one small file, which is kept
in the repository; `page` writes `docs/torch-versions.md` from that file and from notes on why.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.report.result import load_result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.report.result import Result

SCHEMA = "ckpt-conformance/torch-versions/v1"
RECORD = "torch-versions.json"
NOTES = "torch-versions.toml"
PAGE = "torch-versions.md"
FORMATS = {
    "reference": "reference, per-rank files",
    "reference-dcp": "reference, DCP directory",
    "torch-save-atomic-per-step": "torch.save",
    "dcp-per-step": "torch.distributed.checkpoint",
    "safetensors-per-step": "safetensors, torch.save beside it",
}
LOADED, SAME, LOADS, RANKS = (f"CKC-VERS-00{number}" for number in (2, 3, 4, 5))
SHOWN = (Verdict.VIOLATION, Verdict.NOT_MET, Verdict.UNKNOWN)
LONGEST = 240  # characters of a reason

HEAD = """# Releases of torch

Made from `docs/torch-versions.json` and `docs/torch-versions.toml` by `make docs`. Do not edit.

`tox run -e matrix` makes these results: it certifies managers on each release and lets each release
load what each other one wrote, one environment at a time. `tox run -e matrix -- 2.7 2.15` takes
these two. Results stay in `.cache/torch-matrix` and are not made twice; `python -m
ckpt_conformance.report.torch_versions .cache/torch-matrix` and `make docs` make this page of them.
A round trip under one release is no result here. `not run` is what it says.

## The same for your own manager

In a CI matrix over releases of torch job A writes and uploads a folder, job B loads all of them:

```yaml
write:   # strategy.matrix.torch: ["2.7", "2.10", "2.15"]
  - run: pip install 'torch==${{ matrix.torch }}.*' 'ckpt-conformance[cli]' .
  - run: ckpt-conformance write my_pkg.adapter:make --out written
  - run: tar -cf written-${{ matrix.torch }}.tar written   # as one file: times and links stay
  - uses: actions/upload-artifact@v4
read:    # needs: write; the same matrix
  - uses: actions/download-artifact@v4
  - run: for t in */*.tar; do mkdir -p all/$t && tar -xf $t -C all/$t; done
  - run: ckpt-conformance certify my_pkg.adapter:make --profile versions --written-by all
```

`--written-by` takes every folder below that `write` made for the adapter. What the installed
release wrote is left out. Where nothing else is there, nothing between two releases would be
compared, and that is a usage error (exit 2). So is a folder that did not arrive whole; it is no
violation. A refusal in words is NOT_MET
(CKC-VERS-004, a MUST with `--claim versions`); another state, and a checkpoint that is passed over,
are violations. The invariants are [VERS-002 to 005](invariants.md#ckc-vers-002).
"""
MEANING = """`bit for bit`: all that was saved arrived, but for leaves that only one of the two has,
which the last section names. `refused`: an error says that it does not load; the first one is shown
below the table, others may be like it. `other state`: something else arrived. `passed over`: none
of these. `+ ranks`: two ranks wrote it, and two, one and three ranks (where the manager declares
resharding; else two) got what was saved.
"""


class Release(Struct, frozen=True, kw_only=True):
    """One release as it was tried."""

    asked: str
    torch: str
    python: str
    packages: dict[str, str]
    suite: str
    commit: str | None
    date: str
    machine: str
    made: dict[str, int] | None = None  # seconds, peak_bytes; None for an environment from before


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict of one invariant; a reason where it is not a PASS."""

    verdict: Verdict
    reason: str = ""


class Reading(Struct, frozen=True, kw_only=True):
    """What came of one manager that loaded what another release wrote."""

    reader: str
    writer: str
    adapter: str
    date: str
    commit: str | None
    findings: dict[str, Finding]
    one_sided: dict[str, list[str]] = {}  # release -> leaves that only it has


class Certificate(Struct, frozen=True, kw_only=True):
    """What one manager was found to keep on one release."""

    release: str
    adapter: str
    date: str
    commit: str | None
    budget: str
    findings: dict[str, Finding]


class Matrix(Struct, frozen=True, kw_only=True):
    """All that is kept of a matrix."""

    schema: str = SCHEMA
    releases: list[Release]
    readings: list[Reading]
    certificates: list[Certificate]


class Note(Struct, frozen=True, kw_only=True):
    """Why certificates or readings differ, by hand."""

    title: str
    text: str
    links: list[str] = []


# -- the record --------------------------------------------------------------------------------


def record(results: Path) -> Matrix:
    """Gather a folder of results; raises ResultError for one that does not read."""
    releases = [
        msgspec.json.decode(path.read_bytes(), type=Release)
        for path in results.glob("*/release.json")
    ]
    releases.sort(key=lambda one: tuple(map(int, one.asked.split("."))))
    names = [one.asked for one in releases]
    return Matrix(
        releases=releases,
        readings=[one for reader in names for one in _readings(results, reader, names)],
        certificates=[one for name in names for one in _certificates(results, name)],
    )


def _readings(results: Path, reader: str, names: Sequence[str]) -> Iterator[Reading]:
    for writer in names:
        for result in _whole(results / reader / "read" / writer):
            yield Reading(
                reader=reader,
                writer=writer,
                adapter=result.adapter.name,
                date=result.created[:10],
                commit=result.suite.commit,
                findings=_findings(result, (LOADED, SAME, LOADS, RANKS)),
                one_sided=result.environment.one_sided,
            )


def _certificates(results: Path, name: str) -> Iterator[Certificate]:
    for result in _whole(results / name / "certificates"):
        known = [one for one in result.invariants if not one.startswith("CKC-VERS-00")]
        yield Certificate(
            release=name,
            adapter=result.adapter.name,
            date=result.created[:10],
            commit=result.suite.commit,
            budget=result.budget,
            findings=_findings(result, [*known, "CKC-VERS-001"]),
        )


def _whole(folder: Path) -> Iterator[Result]:
    """Read the results of the adapters below a folder, in the order of the formats."""
    for adapter in FORMATS:
        path = folder / adapter / "result.json"
        if path.is_file():
            result = load_result(path)
            if not result.interrupted:
                yield result


def _findings(result: Result, names: Sequence[str]) -> dict[str, Finding]:
    known = result.invariants
    return {
        name: Finding(
            verdict=known[name].verdict,
            reason="" if known[name].verdict is Verdict.PASS else _short(known[name].reason),
        )
        for name in sorted(names)
        if name in known
    }


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


# -- the page ----------------------------------------------------------------------------------


def page(matrix: Matrix, notes: Sequence[Note]) -> str:
    """Write the page of a matrix."""
    lines = [HEAD, *_releases(matrix), *_tables(matrix), *_differences(matrix)]
    lines += _why(notes) + _one_sided(matrix)
    return "\n".join(lines).rstrip() + "\n"


def _releases(matrix: Matrix) -> list[str]:
    lines = [
        "## What was tried",
        "",
        "| release | torch | Python | with | tried on | environment |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for one in matrix.releases:
        packages = ", ".join(f"{name} {version}" for name, version in one.packages.items())
        made = "was there before"
        if one.made:
            made = f"{one.made['peak_bytes'] / 2**30:.1f} GiB of disk at most"
        lines.append(
            f"| {one.asked} | {one.torch} | {one.python} | {packages} | {one.date} | {made} |"
        )
    return [*lines, ""]


def _tables(matrix: Matrix) -> list[str]:
    """Write a table of writers and readers for each format."""
    cells = {(one.reader, one.writer, one.adapter): one for one in matrix.readings}
    names = [one.asked for one in matrix.releases]
    lines = ["## Who loads what whom wrote", "", MEANING]
    for adapter, title in FORMATS.items():
        lines += [
            f"### {title}",
            "",
            f"`{adapter}`; a row for each writer, a column for each reader.",
        ]
        lines += ["", "| written by | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for writer in names:
            row = [
                "" if reader == writer else outcome(cells.get((reader, writer, adapter)))
                for reader in names
            ]
            lines.append(f"| {writer} | " + " | ".join(row) + " |")
        lines += ["", *_reasons(adapter, matrix)]
    return lines


def outcome(reading: Reading | None) -> str:
    """Say in a cell what came of a reading; the first line that fits."""
    if reading is None:
        return "not run"
    verdicts = dict.fromkeys((LOADED, SAME, LOADS, RANKS), Verdict.UNKNOWN)
    verdicts |= {name: finding.verdict for name, finding in reading.findings.items()}
    served = {verdicts[LOADED], verdicts[SAME], verdicts[LOADS]}
    words = {
        "passed over": verdicts[LOADED] is Verdict.VIOLATION,
        "other state": verdicts[SAME] is Verdict.VIOLATION,
        "refused": verdicts[LOADS] in {Verdict.VIOLATION, Verdict.NOT_MET},
        "UNKNOWN": Verdict.UNKNOWN in served,
        "not applicable": served != {Verdict.PASS},
    }
    told = next((word for word, fits in words.items() if fits), "")
    return told or "bit for bit" + _of_ranks(verdicts[RANKS])


def _of_ranks(verdict: Verdict) -> str:
    words = {
        Verdict.PASS: " + ranks",
        Verdict.VIOLATION: ", not so on ranks",
        Verdict.NOT_MET: ", not so on ranks",
        Verdict.UNKNOWN: ", on ranks UNKNOWN",
    }
    return words.get(verdict, "")


def _reasons(adapter: str, matrix: Matrix) -> list[str]:
    lines = [
        f"- {one.writer} read by {one.reader}, {name}: {finding.verdict}: {finding.reason}"
        for one in matrix.readings
        if one.adapter == adapter
        for name, finding in one.findings.items()
        if finding.verdict in SHOWN
    ]
    return [*lines, ""] if lines else []


def _differences(matrix: Matrix) -> list[str]:
    """List the verdicts of certificates that are not the same on all releases."""
    names = [one.asked for one in matrix.releases]
    lines = ["## Where certificates differ", ""]
    for adapter in FORMATS:
        of = {one.release: one for one in matrix.certificates if one.adapter == adapter}
        missing = [name for name in names if name not in of]
        lines += [f"### `{adapter}`", ""]
        if missing:
            lines += [f"Not run on {', '.join(missing)}.", ""]
        ids = sorted({name for one in of.values() for name in one.findings})
        rows = [name for name in ids if len({_verdict(one, name) for one in of.values()}) > 1]
        if not rows:
            budgets = sorted({f"budget {one.budget}, {one.date}" for one in of.values()})
            same = f"{len(ids)} invariants have the same verdict on {', '.join(of)}"
            lines += [f"{same} ({'; '.join(budgets)})." if len(of) > 1 else "", ""]
            continue
        lines += ["| invariant | " + " | ".join(of) + " |", "|---" * (len(of) + 1) + "|"]
        lines += [
            f"| {name} | " + " | ".join(_verdict(one, name) for one in of.values()) + " |"
            for name in rows
        ]
        lines += [""]
        lines += [
            f"- {name} on {one.release}: {one.findings[name].reason}"
            for name in rows
            for one in of.values()
            if name in one.findings and one.findings[name].verdict in SHOWN
        ]
        lines += [""]
    return lines


def _verdict(certificate: Certificate, name: str) -> str:
    finding = certificate.findings.get(name)
    return str(finding.verdict) if finding else "not run"


def _why(notes: Sequence[Note]) -> list[str]:
    lines = ["## Why", ""] if notes else []
    for note in notes:
        lines += [f"### {note.title}", "", note.text.strip(), ""]
        lines += [f"- <{link}>" for link in note.links]
        lines += [""] if note.links else []
    return lines


def _one_sided(matrix: Matrix) -> list[str]:
    """Say what was read in each reading, and which leaves only one of the two releases has."""
    lines = ["## Leaves that only one release has", ""]
    for one in matrix.readings:
        for release, names in one.one_sided.items():
            what = f"only {release} has {', '.join(names)}"
            lines.append(f"- {one.writer} read by {one.reader}, `{one.adapter}`: {what}")
    return lines if len(lines) > 2 else [*lines, "None was met."]  # noqa: PLR2004  the heading


def load(folder: Path) -> tuple[Matrix, list[Note]]:
    """Read the record and the notes of the folder `docs`."""
    matrix = msgspec.json.decode((folder / RECORD).read_bytes(), type=Matrix)
    raw = tomllib.loads((folder / NOTES).read_text(encoding="utf-8"))
    return matrix, msgspec.convert(raw.get("note", []), list[Note])


def main() -> None:
    """Gather a folder of results into the record below `docs`, or another folder."""
    results, docs = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "docs")  # noqa: PLR2004
    content = msgspec.to_builtins(record(results))
    (docs / RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
