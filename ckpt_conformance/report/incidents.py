"""The real bugs behind the invariants: what a report links to."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from typing import NamedTuple


class Incident(NamedTuple):
    """A real bug behind an invariant; `url` is empty where there is nothing to link."""

    label: str
    url: str
    title: str


@functools.cache
def _corpus() -> dict[str, dict[str, str]]:
    folder = importlib.resources.files("ckpt_conformance.report") / "templates"
    corpus: dict[str, dict[str, str]] = json.loads((folder / "incidents.json").read_text("utf-8"))
    return corpus


def incident(name: str) -> Incident:
    """Look up an id of the bug corpus ("A01"), or take an address as it is."""
    known = _corpus().get(name)
    if known:
        return Incident(f"{name} {known['thread']}", known["url"], known["title"])
    # Anything but http(s) stays text: a javascript: link is not an incident.
    return Incident(name, name if re.match(r"https?://[^\s]+$", name) else "", "")
