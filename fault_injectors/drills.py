"""One fault at rest in a copy of a checkpoint, at a file and a place that a seed draws.

Models: what a disk, a copy or a hand did to any file of a checkpoint, payload or not.
Does not model: faults aimed at a tensor; the suites draw those where they know the live state.
Proof: as `at_rest` has it: a digest that is another one. A block that is zero already is no damage.
"""

from __future__ import annotations

import contextlib
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.fault_injectors.payload import Place

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Generator, Mapping

    from ckpt_conformance.fault_injectors.at_rest import Cut, Damage

    Drill = Callable[[Path, random.Random, str | None], Damage]

BLOCK = 512  # bytes that are zeroed, or swapped
_DRAWS = 64  # blocks that are looked at before a file counts as one without any that fits
_COPIED = 4 << 20  # bytes of a file that are copied between two looks for signals


@contextlib.contextmanager
def copied(source: Path, target: Path) -> Generator[Path]:
    """Copy a directory; the copy has its name only once it is whole and was damaged.

    Until then it is `draft_of` that name, and is removed if something is raised.

    Raises:
        OSError: the draft is there already, and stays; or something cannot be copied.

    """
    draft = draft_of(target)
    draft.mkdir()
    try:
        shutil.copytree(source, draft, symlinks=True, copy_function=_copy, dirs_exist_ok=True)
        yield draft
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def draft_of(target: Path) -> Path:
    """Return where a copy lies while it is made: a kill leaves it there, and the next one tells."""
    return target.with_name(f"{target.name}.unfinished")


def _copy(source: str, target: str) -> None:
    """Copy a file with its times; shutil's own copy of 2 GiB is one call that no signal ends."""
    if not stat.S_ISREG(Path(source).stat().st_mode):
        raise shutil.SpecialFileError(f"{source} is no regular file")
    with Path(source).open("rb") as old, Path(target).open("wb") as new:
        shutil.copyfileobj(old, new, _COPIED)
    shutil.copystat(source, target)


def damage(root: Path, fault: str, rng: random.Random, file: str | None = None) -> Damage:
    """Do one fault below a directory, in `file` if one is named.

    Raises Unknown where nothing there can have it, or nothing changed.
    """
    return FAULTS[fault](root, rng, file)


def _file(root: Path, rng: random.Random, file: str | None) -> str:
    """Choose any file that has bytes."""
    if file is not None:
        return file
    there = [name for name in payload.names(root) if (root / name).stat().st_size]
    if not there:
        raise Unknown(f"{root} holds no file with bytes in it")
    return rng.choice(there)


def _flip(bits: int) -> Drill:
    def flip(root: Path, rng: random.Random, file: str | None) -> Damage:
        name = _file(root, rng, file)
        size = (root / name).stat().st_size
        at = rng.randrange(max(size, 1))
        place = Place(name, at, min(BLOCK, size - at), f"{min(BLOCK, size - at)} bytes there")
        return at_rest.flip_bits(root, place, rng, bits)

    return flip


def _zero(root: Path, rng: random.Random, file: str | None) -> Damage:
    name = _file(root, rng, file)
    for place in _blocks(root, name, rng, BLOCK):
        if any(_bytes(root, place)):
            return at_rest.zero_block(root, place, BLOCK)
    raise Unknown(f"the blocks of {name} that were drawn are zero already: try another seed")


def _swap(root: Path, rng: random.Random, file: str | None) -> Damage:
    name = _file(root, rng, file)
    for place in _blocks(root, name, rng, 2 * BLOCK):
        both, half = _bytes(root, place), place.length // 2
        if both[:half] != both[half : 2 * half]:
            return at_rest.swap_blocks(root, place)
    raise Unknown(f"the blocks of {name} that were drawn are alike: try another seed")


def _blocks(root: Path, name: str, rng: random.Random, length: int) -> Generator[Place]:
    """Draw blocks of a file."""
    size = (root / name).stat().st_size
    for _ in range(_DRAWS):
        at = rng.randrange(-(-size // length) or 1) * length
        real = min(length, size - at)
        yield Place(name, at, real, f"{real} bytes there")


def _bytes(root: Path, place: Place) -> bytes:
    with (root / place.file).open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def _cut(cut: Cut) -> Drill:
    return lambda root, rng, file: at_rest.truncate(root, _file(root, rng, file), cut)


def _remove(root: Path, rng: random.Random, file: str | None) -> Damage:
    return at_rest.remove(root, _file(root, rng, file))


FAULTS: Mapping[str, Drill] = {
    **at_rest.AT_REST,
    "bit-flip": _flip(1),
    "multi-bit": _flip(9),
    "zeroed-block": _zero,
    "swapped-blocks": _swap,
    **{f"truncation-{cut}": _cut(cut) for cut in at_rest.CUTS},
    "missing-file": _remove,
}
"""The faults at rest, each at a place that is drawn; those of JSON files and of whole files are
`at_rest`'s own, which draw already."""
