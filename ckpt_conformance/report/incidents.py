"""The real bugs behind the invariants: what a report links to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt_conformance.contract.references import load_incidents


@dataclass(frozen=True)
class IncidentLink:
    """How a report shows a real bug; `url` is empty where there is nothing to link."""

    label: str
    url: str
    title: str


def incident(name: str) -> IncidentLink:
    """Look up the id of a bug ("A01"), or take an address as it is."""
    known = load_incidents().incident.get(name)
    if known:
        return IncidentLink(f"{name} {known.thread}", known.url, known.title)
    # Anything but http(s) stays text: a javascript: link is not an incident.
    return IncidentLink(name, name if re.match(r"https?://[^\s]+$", name) else "", "")
