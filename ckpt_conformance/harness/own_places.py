"""Files whose content no result depends on: installed ones, ours, those of the kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ckpt_conformance.contract import installed
from ckpt_conformance.contract.registry import PACKAGE
from ckpt_conformance.processes import scratch

KERNEL = ("/proc/", "/sys/")
IN_MEMORY = "/dev/shm"  # noqa: S108  where folders of ours are made, too


class OwnPlaces:
    """Knows which files are passed over."""

    def __init__(self, server: Path) -> None:
        """Take the folder of the fork server; beside it are the temporary folders of ours."""
        ours = Path(sys.modules[PACKAGE].__file__ or "").parent
        beside = {path.resolve() for path in ours.iterdir() if path.is_dir()}  # links of a checkout
        self.of_the_suite = tuple(f"{place}/" for place in (server, ours, *beside))
        self.temporary = tuple(f"{place}/{scratch.PREFIX}" for place in (server.parent, IN_MEMORY))
        self.roots: tuple[str, ...] = ()  # of managers, with a / behind
        self.known: dict[str, bool] = {}  # temporary folders, and whether they are ours

    def add_root(self, root: str) -> None:
        """Pass over what a manager has below its root, and the temporary folder that this is in."""
        self.roots += (f"{root}/",)
        if (folder := self._temporary_of(root)) is not None:
            self.known[folder] = True

    def seen_as(self, name: str) -> str:
        """Return the name of what is opened by a name; "" where it is passed over.

        A link below a root may lead to a file elsewhere.
        """
        if f"{name}/".startswith(self.roots or ("\0",)):
            real = os.path.realpath(name)
            is_own = f"{real}/".startswith(self._real_roots()) or self._is_passed_over(real)
            return "" if is_own else real
        # What is above the target of a link is another folder than that the link is in.
        place = os.path.realpath(name) if "/../" in f"{name}/" else name
        return "" if self._is_passed_over(place) else name

    def _is_passed_over(self, name: str) -> bool:
        is_ours = f"{name}/".startswith((*KERNEL, *self.of_the_suite))
        folder = self._temporary_of(name)
        is_own = folder is not None and self._is_ours(folder)
        return is_ours or is_own or installed.has_version(name)

    def _real_roots(self) -> tuple[str, ...]:
        return (*self.roots, *(f"{os.path.realpath(root)}/" for root in self.roots))

    def _temporary_of(self, name: str) -> str | None:
        """Return the folder with our prefix that a file is in, which may be a user's."""
        for start in self.temporary:
            if name.startswith(start):
                return start + name.removeprefix(start).partition("/")[0]
        return None

    def _is_ours(self, folder: str) -> bool:
        if folder not in self.known:
            self.known[folder] = os.path.exists(f"{folder}/{scratch.OWNER}")  # noqa: PTH110
        return self.known[folder]
