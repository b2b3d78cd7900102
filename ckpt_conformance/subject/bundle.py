"""Bundles: what is kept of a violation, so that others can look and run it again.

A bundle is a folder: `violation.json` (the outcome and how the check was run), `programs.json`
(of the children since the check last emptied the directory, in order; none where an earlier check
had run them) and `checkpoints/` (the manager's directory as the last child left it). Where a check
found a crash state, `crash/` is a bundle of that state alone: see `crash/explore/bundles.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.harness import messages

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ckpt_conformance.contract.verdicts import CheckOutcome
    from ckpt_conformance.subject.subject import Subject

SCHEMA = "ckpt-conformance/bundle/v1"
CRASH = "crash"


class BundleError(ValueError):
    """A folder is no bundle of ours; the message says why."""


def safe(name: str) -> str:
    """Make a name that any file system takes."""
    return re.sub(r"[^\w.-]+", "-", name)


def write(folder: Path, subject: Subject, outcome: CheckOutcome) -> Path:
    """Write a bundle below `folder` and give its path.

    An older bundle of the same check is replaced; a folder that is no bundle of ours is left alone.
    """
    check = outcome.check.partition("::")[2]
    target = folder / f"{outcome.invariant}-{safe(check)}"
    if target.exists():
        read(target)  # raises for what is not ours
        shutil.rmtree(target)
    target.mkdir(parents=True)
    how = {"schema": SCHEMA, "budget": subject.budget, "outcome": outcome.to_json()}
    (target / "violation.json").write_text(json.dumps(how, indent=2, default=str))
    (target / "programs.json").write_bytes(messages.encode(subject.programs, indent=1))
    if subject.root.is_dir():
        trees.copy(subject.root, target / "checkpoints")
    if (subject.scratch / CRASH).is_dir():
        trees.copy(subject.scratch / CRASH, target / CRASH)
    return target


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove bundles below `folder` by name; what is no bundle of ours is left alone."""
    for name in names:
        with contextlib.suppress(BundleError):
            read(folder / name)
            shutil.rmtree(folder / name)


def read(folder: Path) -> dict[str, Any]:
    """Read `violation.json`; raises BundleError for anything else."""
    path = folder / "violation.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = (
            f"{folder} is no bundle: {path.name} does not read ({error}); "
            "bundles stand in `bundles/` below the folder of --out"
        )
        raise BundleError(msg) from error
    if document.get("schema") != SCHEMA:
        msg = f"{folder}: schema is {document.get('schema')!r}, this version reads {SCHEMA!r}"
        raise BundleError(msg)
    return document
