"""Managers that export in ways of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.adapters import reference

if TYPE_CHECKING:
    from ckpt_conformance.contract import OpenOptions


class OfTheNewest(reference.ReferenceManager):
    """Exports the newest step, whichever is asked for."""

    def export(self, step: int, destination: Path) -> Path:  # noqa: ARG002
        return super().export(max(self.steps()), destination)


class Empty(reference.ReferenceManager):
    """Exports a torch file without any tensor."""

    def export(self, step: int, destination: Path) -> Path:
        torch.save({"step": step}, destination)
        return destination


class Plain(reference.ReferenceManager):
    """Exports to a file, and one of the two names of tied weights."""

    def export(self, step: int, destination: Path) -> Path:
        whole = super().export(step, Path(f"{destination}.whole"))
        state = torch.load(whole, weights_only=True)
        state.pop("head.weight")
        torch.save(state, destination)
        return destination


class Kept(Plain):
    """Exports to a file, and leaves one that is there as it is."""

    def export(self, step: int, destination: Path) -> Path:
        return destination if Path(destination).exists() else super().export(step, destination)


class Refused(Plain):
    """Exports to a file, and says so where one is there."""

    def export(self, step: int, destination: Path) -> Path:
        if Path(destination).exists():
            raise FileExistsError(destination)
        return super().export(step, destination)


@dataclass(frozen=True)
class Exporting(reference.Reference):
    """Adapter of a manager that exports in its own way."""

    way: type[reference.ReferenceManager] = reference.ReferenceManager

    def open(self, root: Path, options: OpenOptions) -> reference.ReferenceManager:
        opened = super().open(root, options)
        return self.way(opened.manager, root)


def of(way: type[reference.ReferenceManager]) -> Exporting:
    whole = reference.dcp_directory
    given = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
    return Exporting(**{**given, "name": f"exports-{way.__name__}", "way": way})


newest, empty, plain = of(OfTheNewest), of(Empty), of(Plain)
kept, refused = of(Kept), of(Refused)
