"""The geometry of a crash map: lines of columns that fit a desktop, and lines that fit a phone.

Lengths are in CSS pixels. An outcome is a letter in a shape; the colour only repeats them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.contract.verdicts import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.report.certificate import Json

WIDE, NARROW = 32, 10  # columns of one line, on a desktop and on a phone
PITCH, SIZE = 26, 22  # from one cell to the next, and a cell
LABELS, HEAD = 82, 62  # room for the names of the rows, and above the cells
WORD = 60  # room for the word of a marker


class Look(NamedTuple):
    """How an outcome is drawn and described."""

    letter: str
    shape: str
    meaning: str


LOOKS = {
    Outcome.NEW: Look("N", "circle", "the newest step is served"),
    Outcome.PREVIOUS: Look("P", "ring", "the step before, while the new one was being saved"),
    Outcome.REFUSED_TYPED: Look("R", "square", "the load raises an error that is documented"),
    Outcome.REFUSED_UNTYPED: Look("U", "square", "the load raises some other error"),
    Outcome.LOST_STEP: Look("L", "triangle", "an older step is served than was acknowledged"),
    Outcome.OUT_OF_MEMORY: Look("M", "hexagon", "the load runs out of memory"),
    Outcome.CRASHED: Look("X", "hexagon", "the load ends the process"),
    Outcome.HANG: Look("H", "hexagon", "the load does not end"),
    Outcome.COLD_START: Look("C", "octagon", "the job begins anew, and nobody is told"),
    Outcome.LOST_ALL: Look("A", "octagon", "nothing loads of what was acknowledged"),
    Outcome.SILENT_WRONG: Look("W", "diamond", "a state is served that nobody saved"),
}
# Short words for what an operation does; three letters fit a column.
SHORT = {
    "start": "",
    "create": "new",
    "mkdir": "dir",
    "symlink": "sym",
    "write": "wri",
    "truncate": "cut",
    "allocate": "all",
    "link": "lnk",
    "rename": "ren",
    "exchange": "exc",
    "unlink": "del",
    "rmdir": "del",
    "chmod": "mod",
    "utime": "tim",
    "fsync": "syn",
    "fdatasync": "syn",
    "sync": "syn",
    "mark": "",
}


@dataclass
class Line:
    """One line of a map, ready to be drawn."""

    width: int
    height: int
    columns: list[Json] = field(default_factory=list["Json"])
    rows: list[Json] = field(default_factory=list["Json"])
    sources: list[Json] = field(default_factory=list["Json"])


@dataclass
class Drawn:
    """A map for a desktop and for a phone; `letters` names the source lines."""

    wide: list[Line]
    narrow: list[Line]
    letters: dict[str, str]


def draw(drawn: Json, models: Mapping[str, Any]) -> Drawn:
    """Lay out the map of one exploration; rows stand in the order of `models`."""
    columns, rows = drawn["columns"], drawn["rows"]
    letters = _letters(column.get("source", "") for column in columns)
    ordered = {name: rows[name] for name in models if name in rows}
    wide, narrow = (list(_lines(columns, ordered, letters, count)) for count in (WIDE, NARROW))
    return Drawn(wide, narrow, letters)


def _letters(sources: Iterable[str]) -> dict[str, str]:
    """Return a letter for each source line, in order: a to z, then a2 and so on."""
    letters: dict[str, str] = {}
    for source in sources:
        if source and source not in letters:
            turn, letter = divmod(len(letters), 26)
            letters[source] = chr(ord("a") + letter) + (str(turn + 1) if turn else "")
    return letters


def _lines(
    columns: Sequence[Json],
    rows: Mapping[str, Sequence[Json | None]],
    letters: Mapping[str, str],
    count: int,
) -> Iterable[Line]:
    height = HEAD + PITCH * len(rows) + 4
    for start in range(0, len(columns), count):
        part = columns[start : start + count]
        line = Line(LABELS + PITCH * (len(part) if start == 0 else count) + 2, height)
        line.columns = [_head(one, at, line.width) for at, one in enumerate(part)]
        line.sources = list(_brackets(part, letters))
        for number, (name, cells) in enumerate(rows.items()):
            y = HEAD + PITCH * number
            ends = [
                _cell(cell, number, start + at, at)
                for at, cell in enumerate(cells[start : start + count])
            ]
            line.rows.append({"name": name, "y": y, "cells": ends})
        yield line


def _x(at: int) -> int:
    return LABELS + PITCH * at


def _head(column: Json, at: int, width: int) -> Json:
    """Lay out what stands above a column; an acknowledgement has its word to the left."""
    first, last = column["first"], column["last"]
    number = str(first) if first == last else f"{first}…"
    marks = [mark["mark"] for mark in column.get("marks", ())]
    step = next((mark["step"] for mark in column.get("marks", ())), None)
    folder = column["kind"] in {"fsync", "fdatasync"} and not column.get("path")
    short = "dir." if folder else SHORT.get(column["kind"], column["kind"][:3])
    x = _x(at) + PITCH // 2 - 2
    mark = marks[-1] if marks else ""
    left = mark == "acknowledged" or x > width - WORD
    return {
        "x": x,
        "word_x": x - 4 if left else x + 9,
        "short": short,
        "number": number,
        "mark": mark,
        "step": step,
        "failed": bool(column.get("error")),
    }


def _brackets(columns: Sequence[Json], letters: Mapping[str, str]) -> Iterable[Json]:
    """Yield a bracket over neighbouring columns that one source line issued."""
    groups = itertools.groupby(enumerate(columns), key=lambda pair: pair[1].get("source", ""))
    for source, group in groups:
        ats = [at for at, _ in group]
        if source:
            ends = {"x1": _x(ats[0]) + 1, "x2": _x(ats[-1]) + SIZE - 1}
            yield {**ends, "letter": letters[source]}


def _cell(cell: Json | None, row: int, column: int, at: int) -> Json:
    place: Json = {"x": _x(at), "row": row, "column": column, "worst": "", "bad": False}
    return place | {"worst": cell["worst"], "bad": cell["bad"]} if cell else place
