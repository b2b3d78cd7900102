"""The command `list`: adapters, invariants, profiles, faults and mutants."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.contract import registry
from ckpt_conformance.contract.catalogue import PROFILES, load_catalogue
from ckpt_conformance.report import files

if TYPE_CHECKING:
    from collections.abc import Mapping

# Values are the names in lower case.
Listed = StrEnum("Listed", ["ADAPTERS", "INVARIANTS", "PROFILES", "FAULTS", "MUTANTS"])


def list_(what: Annotated[Listed, typer.Argument(help="What to list.")]) -> None:
    """List what there is."""
    plugins = registry.entry_points()
    files.show("listing.txt.j2", what=str(what), entries=entries(what), plugins=plugins)


def entries(what: Listed) -> Mapping[str, object]:
    """Return what there is, by name; mutants and faults are imported only to be listed."""
    if what is Listed.MUTANTS:
        from ckpt_conformance.mutants import all_mutants

        return all_mutants()
    if what is Listed.FAULTS:
        from ckpt_conformance.fault_injectors import all_faults

        return all_faults()
    if what is Listed.ADAPTERS:
        return {name: _adapter(name) for name in registry.known()}
    return PROFILES if what is Listed.PROFILES else load_catalogue().invariants


def _adapter(name: str) -> registry.AdapterInfo | str:
    """Describe an adapter; one whose library is missing says what to install."""
    try:
        return registry.describe(name)
    except registry.AdapterError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  an installed package's: it must not hide the others
        return registry.Refusal.of_error(error).about(name)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("list")(list_)
