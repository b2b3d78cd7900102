"""Load files, each in a process of its own, and print which of them made their marker.

Standard input: lines of JSON, each a list of [file, marker]; a line of JSON answers each.
`torch.load` first; where it refuses, `pickle.load`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from pathlib import Path

import torch


def load(path: str) -> None:
    """Load a file as somebody does who trusts it."""
    with contextlib.suppress(Exception):
        torch.load(path, weights_only=False)
        return
    with contextlib.suppress(Exception), Path(path).open("rb") as file:
        pickle.load(file)  # noqa: S301  that is what is looked at


def fired(path: str, marker: str) -> bool:
    """Load a file in a child, and look for its marker."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            load(path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    there = Path(marker).exists()
    Path(marker).unlink(missing_ok=True)
    return there


for line in sys.stdin:
    sys.stdout.write(json.dumps([fired(*one) for one in json.loads(line)]) + "\n")
    sys.stdout.flush()
