"""Which names a pickle may ask for, and who vouches for others.

Names of data pass in silence. What libraries write, but is a class, is told. Every other name may
run code where the file is loaded: whether it does, nobody can say who has not read its source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats.written_names import CLASSES, DATA, MAKERS, NOT_CALLED
from ckpt_conformance.fsck.source.findings import Kind
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckpt_conformance.fsck.formats.pickles import Asked, Name

_MOST_UNSAFE = 200  # names of one pickle that are told one by one
ANY = "*"
"""Stands for what no single name vouches for."""


def judge_names(asked: Asked, own: Collection[str] = ()) -> Iterator[tuple[Kind, str, str]]:
    """Yield (what it means, in words, the unsafe name) of names that a pickle asks for.

    The last is empty where a name is told only. `own` are packages whose code is in the file.
    """
    told: list[str] = []
    unsafe = 0
    for trick in sorted(asked.tricks):
        yield Kind.UNSAFE, f"{trick}: to load it may run code", ANY
    for name in sorted(asked.names - (DATA - (NOT_CALLED & (asked.called | asked.handed)))):
        if name.module.partition(".")[0] in own:
            continue
        is_used = name in asked.called or name in asked.handed
        if name in MAKERS or (name in CLASSES and not is_used):
            told.append(str(name))
            continue
        unsafe += 1
        if unsafe <= _MOST_UNSAFE:
            yield Kind.UNSAFE, _why(name, asked), str(name)
    if unsafe > _MOST_UNSAFE:
        yield Kind.UNSAFE, f"asks for {unsafe - _MOST_UNSAFE} more names like these", ANY
    if told:
        some = ", ".join(clip(each) for each in told[:5])
        yield Kind.NOTE, f"asks for {some}: torch.load(weights_only=True) may refuse it", ""


def _why(name: Name, asked: Asked) -> str:
    if name in CLASSES or name in NOT_CALLED:
        verb = "calls" if name in asked.called else "hands on"
        return f"{verb} {clip(str(name))}, of which libraries only make instances: it may run code"
    verb = "calls" if name in asked.called else "asks for"
    shown = f"{verb} {clip(str(name))}, which is not in fsck's list"
    return f"{shown}: to load it may run code (--allow-name NAME, if you know it)"
