"""Documents made from data and code, by `make docs`: invariants, incidents, torch, and more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.contract.catalogue import FAMILIES, PROFILES, is_chosen, load_catalogue
from ckpt_conformance.contract.references import load_incidents, load_requirements
from ckpt_conformance.mutants import all_mutants
from ckpt_conformance.report import survivors, torch_versions
from ckpt_conformance.report.citations import checked_by, cited_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.contract.catalogue import Catalogue, Invariant, Origin
    from ckpt_conformance.contract.references import Incident
    from ckpt_conformance.mutants import MutantInfo

INVARIANTS_HEAD = """# Invariants, catalogue version {version}

Made from `ckpt_conformance/contract/catalogue.toml` by `make docs`.
Do not edit. {count} invariants.

A certificate counts those that its run asks: {usual} where no profile is named, at the quick
budget. The other {apart} are of the profile `distributed` alone, and cost more than all the rest
together: `--profile distributed` asks them, `--budget full` asks all. What an adapter does not
declare, such as a mirror, is counted, too, as not applicable.

`contract` and `promise` are MUST. `practice` is SHOULD, unless a profile is claimed (`--claim`).
An id is never reused. [Incidents](incidents.md) are real bugs; [requirements](requirements.md)
are what documents of checkpoint formats ask for.
"""

ORIGINS_HEAD = """\
Some violations have their cause in a library that the manager calls as it is documented. A check
has seen that it comes right when this library alone does otherwise. Such a cause is told once,
under the invariant that is named here; all others that it breaks refer to that one (`SAME_CAUSE`)
and do not count."""

INCIDENTS_HEAD = """# Incidents: the real bugs behind the invariants

Made from `ckpt_conformance/contract/incidents.toml` by `make docs`.
Do not edit. {count} bugs; {without} of them have no invariant and no mutant of their own yet.

Each entry says in our words what happened. It names the public thread, the
[invariants](invariants.md) that rest on the bug, and the mutants: managers that are broken in the
same way, on purpose, to test the checks. Where there is neither, it names the tests or the modules
that cite the bug, if any. An id is never reused.
"""

REQUIREMENTS_HEAD = """# Requirements

Made from `ckpt_conformance/contract/requirements.toml` and from the tests, by `make docs`.
Do not edit. {count} requirements.

Five documents describe how real checkpoint managers write and resume. Each sentence says in our
words what one of them asks for. Below it are the invariants that rest on it, and the tests: the
checks of these invariants, and all tests that cite the id. An id with an X is a contradiction or a
gap of its document, and says what holds here. An id is never reused.
"""

TESTED = ("suites", "tests")  # the folders whose citations a requirement lists
CODE = ("ckpt_conformance", "fault_injectors", "reference_impl")


def documents(root: Path) -> Mapping[str, str]:
    """Write every document of a checkout, by its file name below `docs`."""
    catalogue = load_catalogue()
    tests = cited_by(root, TESTED)
    code = cited_by(root, CODE)
    return {
        "invariants.md": invariants(catalogue),
        "incidents.md": incidents(catalogue, {**code, **tests}),
        "requirements.md": requirements(catalogue, _evidence(catalogue, root, tests), code),
        survivors.PAGE: survivors.page(survivors.known()),
        torch_versions.PAGE: torch_versions.page(*torch_versions.load(root / "docs")),
    }


def invariants(catalogue: Catalogue) -> str:
    """Write the catalogue as Markdown: profiles first, then each family."""
    entries = catalogue.invariants.values()
    usual = sum(is_chosen(entry, (), (), (), "quick") for entry in entries)
    lines = [
        INVARIANTS_HEAD.format(
            version=catalogue.version, count=len(entries), usual=usual, apart=len(entries) - usual
        ),
        "## Profiles",
        "",
    ]
    for name, text in PROFILES.items():
        count = sum(name in entry.profiles for entry in catalogue.invariants.values())
        lines.append(f"- **{name}** ({count}): {text}.")
    lines += ["", "## Causes outside of a manager", "", ORIGINS_HEAD, ""]
    for origin in catalogue.origins.values():
        lines += _origin(origin)
    for family, title in FAMILIES.items():
        members = [entry for entry in catalogue.invariants.values() if entry.family == family]
        if members:
            lines += ["", f"## {family}: {title}", ""]
            lines += [
                line for entry in sorted(members, key=lambda e: e.id) for line in _entry(entry)
            ]
    return _text(lines)


def _origin(origin: Origin) -> list[str]:
    level = "SHOULD" if origin.basis == "practice" else "MUST"
    facts = f"owner: {origin.owner}; told by {_links([origin.told_by], 'invariants')}"
    return [
        f"### {origin.id}",
        "",
        f"**{origin.statement}**",
        "",
        f"{origin.basis} ({level}); {facts}.",
        "",
        f"Documented: {origin.documentation}",
        "",
        f"Decision: {origin.decision}",
        "",
    ]


def _entry(entry: Invariant) -> list[str]:
    asks = [*entry.capabilities, *(f"holds {part}" for part in entry.needs)]
    asks += [] if len(entry.shapes) > 1 else [f"{shape} shape" for shape in entry.shapes]
    facts = [f"{entry.basis} ({entry.level})", f"profiles: {', '.join(entry.profiles)}"]
    facts += [f"asks for: {', '.join(asks)}"] if asks else []
    facts += [f"incidents: {_links(entry.incidents, 'incidents')}"] if entry.incidents else []
    required = _links(entry.requirements, "requirements")
    facts += [f"requirements: {required}"] if entry.requirements else []
    return [
        f"### {entry.id}",
        "",
        f"**{entry.statement}**",
        "",
        entry.why,
        "",
        f"Fix: {entry.remedy}",
        "",
        "; ".join(facts) + ".",
        "",
    ]


def incidents(catalogue: Catalogue, cited: Mapping[str, Sequence[str]]) -> str:
    """Write every bug with its thread and what rests on it, by the areas of their ids."""
    known = load_incidents()
    resting = {name: _resting(name, catalogue, all_mutants().values()) for name in known.incident}
    without = sum(not lines for lines in resting.values())
    lines = [INCIDENTS_HEAD.format(count=len(known.incident), without=without)]
    for letter, area in known.area.items():
        lines += [f"## {letter}: {area}", ""]
        for name, bug in known.incident.items():
            if name.startswith(letter):
                lines += _incident(name, bug, resting[name] or _places(cited.get(name, ())))
    return _text(lines)


def _incident(name: str, bug: Incident, resting: list[str]) -> list[str]:
    thread = f"- thread: {_thread(bug.url)}"
    return [f"### {name}", "", bug.what, "", thread, *resting, ""]


def _resting(name: str, catalogue: Catalogue, mutants: Iterable[MutantInfo]) -> list[str]:
    """What the catalogue and the mutants make of a bug; a mutant may have a thread of its own."""
    bug = load_incidents().incident[name]
    ids = [entry.id for entry in catalogue.invariants.values() if name in entry.incidents]
    made = [
        f"`{mutant.id}`" + ("" if mutant.url == bug.url else f" (from {_thread(mutant.url)})")
        for mutant in mutants
        if mutant.bug == name
    ]
    lines = [f"- invariants: {_links(sorted(ids), 'invariants')}"] if ids else []
    return lines + ([f"- mutants: {', '.join(made)}"] if made else [])


def _evidence(
    catalogue: Catalogue, root: Path, tests: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """The tests of each requirement: those that cite it, and the checks of its invariants."""
    checks = checked_by(root)
    places_of = {name: set(tests.get(name, ())) for name in load_requirements().requirement}
    for entry in catalogue.invariants.values():
        for name in entry.requirements:
            places_of[name].update(checks[entry.id])
    return {name: sorted(places) for name, places in places_of.items()}


def requirements(
    catalogue: Catalogue, tests: Mapping[str, Sequence[str]], code: Mapping[str, Sequence[str]]
) -> str:
    """Write every requirement with its invariants and tests, by source; else with its code."""
    known = load_requirements()
    lines = [REQUIREMENTS_HEAD.format(count=len(known.requirement))]
    for letter, source in known.source.items():
        where = f" (<{source.url}>)" if source.url else ""
        lines += [f"## {letter}: {source.name}", "", f"From its {source.document}{where}.", ""]
        for name, text in known.requirement.items():
            if name.startswith(letter):
                ids = [e.id for e in catalogue.invariants.values() if name in e.requirements]
                citing = [f"- invariants: {_links(sorted(ids), 'invariants')}"] if ids else []
                citing += _places(tests.get(name, ()))
                lines += [f"### {name}", "", text, "", *(citing or _places(code[name])), ""]
    return _text(lines)


def _places(places: Sequence[str]) -> list[str]:
    return [f"- `{place}`" for place in places]


def _links(ids: Iterable[str], document: str) -> str:
    """Link each id to its heading in another document."""
    return ", ".join(f"[{name}]({document}.md#{name.lower()})" for name in ids)


def _thread(url: str) -> str:
    owner, repository, _, number = url.removeprefix("https://github.com/").split("/")
    return f"[{owner}/{repository}#{number}]({url})"


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the files below the folder that is given: `docs` of a checkout, by default."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for name, text in documents(folder.resolve().parent).items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
