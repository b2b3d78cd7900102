"""The plan of a session: every check on every adapter, known before anything runs."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.catalogue import is_chosen, load_catalogue
from ckpt_conformance.plugin import durations
from ckpt_conformance.subject.checks import MARKER, id_of, key_of
from ckpt_conformance.work.items import Item, Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt_conformance.plugin.options import CheckOptions

SUITES = "ckpt_conformance.suites"


class Check(NamedTuple):
    """A check of the suites."""

    key: str  # `suite::check`
    invariant: str
    module: str  # dotted

    @property
    def suite(self) -> str:
        """The name of its suite, which is the last part of the module's."""
        return self.key.partition("::")[0]


class CheckItem(Item, frozen=True, kw_only=True):
    """A check on an adapter."""

    adapter: str
    check: Check


@functools.cache
def checks() -> tuple[Check, ...]:
    """List the checks of every suite, by key; the suites are imported for it, and no torch."""
    package = importlib.import_module(SUITES)
    found: list[Check] = []
    for info in pkgutil.walk_packages(package.__path__, f"{SUITES}."):
        if info.name.rpartition(".")[2].startswith("test_"):
            module = importlib.import_module(info.name)
            functions = (value for name, value in vars(module).items() if name.startswith("test_"))
            found += [
                Check(key_of(function), id_of(function), info.name)
                for function in functions
                if function.__module__ == info.name and _is_check(function)
            ]
    return tuple(sorted(found))


def _is_check(function: object) -> bool:
    return any(mark.name == MARKER for mark in getattr(function, "pytestmark", ()))


def plan_of(options: CheckOptions) -> Plan:
    """Plan every chosen check on every adapter; costs are those of `durations.json`."""
    known = load_catalogue(options.catalogue).invariants
    asked = options.profiles, options.only, options.claims, options.budget
    chosen = [
        check
        for check in checks()
        if check.invariant in known and is_chosen(known[check.invariant], *asked)
    ]
    cost = durations.costs()
    return Plan(
        tuple(
            CheckItem(
                id=f"{adapter} {check.key}",
                group=f"{adapter} {check.suite}",
                family=adapter,
                cost=cost.get(check.suite, 1.0),
                adapter=adapter,
                check=check,
            )
            for adapter in options.adapters
            for check in chosen
        )
    )


def selection(items: Iterable[Item]) -> Mapping[str, tuple[str, ...]]:
    """Map each check of some items to the adapters that it shall run on."""
    adapters = defaultdict[str, list[str]](list)
    for item in items:
        if isinstance(item, CheckItem):
            adapters[item.check.key].append(item.adapter)
    return {key: tuple(names) for key, names in adapters.items()}
