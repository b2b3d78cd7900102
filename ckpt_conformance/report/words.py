"""Words that a report explains where it uses them: outcomes of a resume, owners; links to ids."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, cast

from markupsafe import Markup, escape

from ckpt_conformance.contract.verdicts import Outcome, Verdict
from ckpt_conformance.report.result import encode

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpt_conformance.report.result import Adapter, ProfileResult, Result

OUTCOMES = {
    Outcome.NEW: "the newest step is served, as it was saved",
    Outcome.PREVIOUS: "the step before is served; the new one was not acknowledged yet",
    Outcome.REFUSED_TYPED: "the load raises an exception that the manager documents",
    Outcome.REFUSED_UNTYPED: "the load raises some other exception",
    Outcome.LOST_STEP: "an older step is served although a newer one was acknowledged",
    Outcome.LOST_ALL: "no checkpoint loads any more, although one was acknowledged",
    Outcome.COLD_START: "the job begins anew although a step was acknowledged",
    Outcome.SILENT_WRONG: "a state that was never saved is served, without an error",
    Outcome.HANG: "the load does not end within its deadline",
    Outcome.CRASHED: "the process of the load dies",
    Outcome.OUT_OF_MEMORY: "the load takes more memory than it may",
}
OWNERS = {
    "library": "the library itself, shown without the adapter or the manager that calls it",
    "recipe": "the way of using the library that its documentation shows",
    "adapter": "not settled: the manager, or the adapter that drives it",
}
IDENTIFIER = re.compile(r"(CKC-[A-Z]{4}-\d{3})")


def outcomes_in(result: Result) -> dict[str, str]:
    """Explain the outcomes that a result mentions in any of its texts, for the legend."""
    content = encode(result)
    text = json.dumps([content["invariants"], content["crash"]])
    mentioned = set(re.findall(r"[A-Z_]{3,}", text))
    return {str(one): meaning for one, meaning in OUTCOMES.items() if one in mentioned}


def texts(value: object) -> list[str]:
    """Return a list whose entries are texts, all of them; an empty one for anything else."""
    listed = cast("list[object]", value) if isinstance(value, list) else []
    written = [one for one in listed if isinstance(one, str)]
    return written if len(written) == len(listed) else []


def lines(value: object) -> str | None:
    """Write a list of texts one a line, without brackets and quotes; None for anything else."""
    return "\n".join(texts(value)) or None


def linked(text: str, known: Collection[str]) -> Markup:
    """Escape text for HTML; ids of invariants that are on the page become links to them."""
    link = Markup('<a href="#{0}">{0}</a>')
    parts = IDENTIFIER.split(text)
    return Markup("").join(link.format(one) if one in known else escape(one) for one in parts)


def profile_shown(profile: ProfileResult) -> Verdict:
    """Choose the verdict that people are shown of a profile, the same in every report.

    Where every MUST holds and a SHOULD does not, it must not read as if everything held.
    """
    unmet = profile.verdict is Verdict.PASS and profile.counts.get(Verdict.NOT_MET)
    return Verdict.NOT_MET if unmet else profile.verdict


def called(adapter: Adapter) -> str:
    """Name an adapter: as it was asked for, and what it calls itself where that differs."""
    own = f"{adapter.title} {adapter.version}".strip()
    return f"{adapter.name} ({own})" if adapter.title not in {"", adapter.name} else adapter.name
