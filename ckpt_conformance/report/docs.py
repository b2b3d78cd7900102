"""Documents made from the code, by `make docs`: docs/invariants.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.contract.catalogue import FAMILIES, PROFILES, load_catalogue

if TYPE_CHECKING:
    from ckpt_conformance.contract.catalogue import Catalogue, Invariant

HEAD = """# Invariants, catalogue version {version}

Made from `ckpt_conformance/contract/catalogue.toml` by `make docs`.
Do not edit. {count} invariants.

`contract` and `promise` are MUST. `practice` is SHOULD, unless a profile is claimed (`--claim`).
An id is never reused. Incidents are ids of real bugs; each mutant names its bug's thread.
"""


def invariants(catalogue: Catalogue) -> str:
    """Write the catalogue as Markdown: profiles first, then each family."""
    lines = [
        HEAD.format(version=catalogue.version, count=len(catalogue.invariants)),
        "## Profiles",
        "",
    ]
    for name, text in PROFILES.items():
        count = sum(name in entry.profiles for entry in catalogue.invariants.values())
        lines.append(f"- **{name}** ({count}): {text}.")
    for family, title in FAMILIES.items():
        found = [entry for entry in catalogue.invariants.values() if entry.family == family]
        if found:
            lines += ["", f"## {family}: {title}", ""]
            lines += [line for entry in sorted(found, key=lambda e: e.id) for line in _entry(entry)]
    return "\n".join(lines).rstrip() + "\n"


def _entry(entry: Invariant) -> list[str]:
    asks = [*entry.capabilities, *(f"holds {part}" for part in entry.needs)]
    asks += [] if len(entry.shapes) > 1 else [f"{shape} shape" for shape in entry.shapes]
    facts = [f"{entry.basis} ({entry.level})", f"profiles: {', '.join(entry.profiles)}"]
    facts += [f"asks for: {', '.join(asks)}"] if asks else []
    facts += [f"incidents: {', '.join(entry.incidents)}"] if entry.incidents else []
    facts += [f"checklist: {', '.join(entry.checklist)}"] if entry.checklist else []
    return [
        f"### {entry.id}",
        "",
        f"**{entry.statement}**",
        "",
        entry.why,
        "",
        "; ".join(facts) + ".",
        "",
    ]


def main() -> None:
    """Write the file below the folder that is given, `docs` by default."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    (folder / "invariants.md").write_text(invariants(load_catalogue()), encoding="utf-8")


if __name__ == "__main__":
    main()
