"""Lines on a terminal or in a log: words for verdicts, colours, and text that nobody vouches for.

Apart from `report`, so that a command that judges a directory starts without its templates.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from ckpt_conformance.contract.verdicts import Verdict


class Word(NamedTuple):
    """How a verdict is written for people: never by colour alone."""

    glyph: str
    ascii: str
    label: str
    meaning: str


WORDS = {
    Verdict.VIOLATION: Word("✗", "X", "violated", "a promise was broken, with evidence"),
    Verdict.SAME_CAUSE: Word(
        "≡",
        "=",
        "same cause",
        "broken too, by a cause that another promise tells; not counted again",
    ),
    Verdict.UNKNOWN: Word("?", "?", "unknown", "the harness or an assumption failed; not a pass"),
    Verdict.NOT_MET: Word("○", "o", "SHOULD not met", "good practice, not followed, not claimed"),
    Verdict.WAIVED: Word("⚑", "w", "waived", "a violation that was accepted, with a reason"),
    Verdict.PASS: Word("✓", "+", "kept", "every check of the promise passed"),
    Verdict.NOT_APPLICABLE: Word("·", "-", "not applicable", "the manager does not declare it"),
}

STYLES = {
    Verdict.VIOLATION: "bold red",
    Verdict.SAME_CAUSE: "red",
    Verdict.UNKNOWN: "magenta",
    Verdict.NOT_MET: "yellow",
    Verdict.WAIVED: "cyan",
    Verdict.PASS: "green",
    Verdict.NOT_APPLICABLE: "dim",
}


def shown(text: object) -> str:
    """Make untrusted text safe to show: control, bidi and other invisible characters escaped."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in str(text)
    )


def one_line(text: object) -> str:
    """Escape what a terminal would obey, line breaks too."""
    return shown(text).replace("\n", "\\n")


def count(number: int, noun: str) -> str:
    """Write "1 invariant", "2 invariants"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def open_console(*, error: bool = False, file: TextIO | None = None) -> Console:
    """Open a console that takes all text as it is; a log gets a fixed width."""
    console = Console(stderr=error, file=file, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 100
    return console


def width() -> int | None:
    """Return the columns of the terminal that stdout is; None where it is none."""
    console = open_console()
    return console.width if console.is_terminal else None


def say(line: str, *, error: bool = False) -> None:
    """Print text: lines that begin with the sign of a verdict take its colour."""
    console = open_console(error=error)
    if not console.encoding.lower().startswith("utf"):
        line = line.translate({ord(word.glyph): word.ascii for word in WORDS.values()})
        line = line.encode(console.encoding, "backslashreplace").decode(console.encoding)
    text = Text(line)
    for verdict, word in WORDS.items():
        signs = f"[{re.escape(word.glyph + word.ascii)}]"
        cell = rf"(?<!\S){re.escape(word.glyph)}\d*(?!\S)"
        text.highlight_regex(rf"(?m)^ {{0,2}}{signs} \S+|{cell}", STYLES[verdict])
    text.highlight_regex(r"(?m)^! unsafe|^error:|^ +(MISSED|EXTRA)\b", STYLES[Verdict.VIOLATION])
    console.print(text, soft_wrap=True)
