"""Folders that links of a checkpoint lead to: a load finds what is in them under its own names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.source import DEEPEST, MOST_FILES, EntryKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ckpt_conformance.fsck.source.source import Folder


def below(
    folder: Folder, links: Iterable[str], depth: int = DEEPEST
) -> Iterator[tuple[str, EntryKind]]:
    """List what links of a checkpoint's folder lead to; nothing where it has one level alone.

    That is each file in a folder, by a name through the link; links in it are followed, too. One
    that leads out, and is not followed, comes as `LINK`, a folder that is too deep as `FOLDER`, and
    one that may not be read as `DENIED`. Left out is what has a name of its own below `folder`, and
    what is behind a link that is the second one to a folder.
    """
    first = set[str]()
    for link in links:
        if folder.link_problem(link):
            yield link, EntryKind.LINK
        elif depth > 1:
            first.add(link)
    if first:
        yield from _followed(folder, first)


def _followed(folder: Folder, first: Collection[str]) -> Iterator[tuple[str, EntryKind]]:
    own, seen, pending, number = _real(folder, ""), set[Path](), sorted(first), 0
    while pending:
        at = pending.pop()
        real = _real(folder, at)
        if real in seen or real.is_relative_to(own):
            continue
        seen.add(real)
        for name, kind in _entries(folder, at, is_first=at in first):
            number += 1
            if number > MOST_FILES:
                raise Malformed(f"more than {MOST_FILES} names behind links of {folder.root}")
            if not _is_followed(folder, name, kind):
                yield name, kind
            elif name.count("/") < 2 * DEEPEST:
                pending.append(name)
            else:
                yield name, EntryKind.FOLDER


def _real(folder: Folder, name: str) -> Path:
    return Path(os.path.realpath(str(folder.root / name)))


def _is_followed(folder: Folder, name: str, kind: EntryKind) -> bool:
    is_link = kind is EntryKind.LINK
    return kind is EntryKind.FOLDER or (is_link and not folder.link_problem(name))


def _entries(folder: Folder, at: str, *, is_first: bool) -> Iterator[tuple[str, EntryKind]]:
    """Yield what is under a name that may be a folder, through links; a file that it leads to."""
    try:
        names = folder.listing(at)
    except NotADirectoryError:
        if not is_first:
            yield at, EntryKind.FILE
    except PermissionError:
        yield at, EntryKind.DENIED
    except OSError:  # nothing, or links without an end
        return
    else:
        yield from ((f"{at}/{name}", kind) for name, kind in names.items())
