"""What may be a checkpoint of a format that fsck does not know, where no checkpoint was found.

A launch script starts a run anew where there is none; a file like that should stop it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.layouts import layouts, leftovers
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.places import folder_at

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.places import Where

_DEPTH = 4
_STATE = re.compile(r"(?<![a-z])(?:checkpoint|ckpt|model|weights|state|params)(?![a-z])")
_OTHERS = (
    *(".npy", ".npz", ".csv", ".tsv", ".parquet", ".jsonl", ".html", ".dot", ".ipynb", ".pkl"),
    *(".db", ".lock", ".pid", ".wandb", ".gz", ".zip", ".pickle"),
)
_EVENTS = "tfevents"  # TensorBoard's


def first(place: Where) -> str | None:
    """Return the name of such a file below a folder; None where there is none."""
    if not place.is_dir():
        return None
    folder = folder_at(place)
    try:
        for name, kind in folder.walk(_DEPTH):
            if layouts.is_file(kind) and _may_be(name) and folder.size(name):
                return name
    except (OSError, Malformed):
        return None  # who lists the folder says it
    return None


def _may_be(name: str) -> bool:
    *above, own = name.lower().split("/")
    is_other = layouts.is_text(own) or layouts.is_picture(own) or own.endswith(_OTHERS)
    if is_other or _EVENTS in own or layouts.is_beside(own) or leftovers.is_below(name):
        return False
    return any(layouts.OF_A_STEP.match(one) for one in [*above, own]) or bool(_STATE.search(own))
