"""Draws the next input from one: files of it are changed, swapped, taken from other seeds, lost."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_bytes
from fuzz_inputs import MOST_BYTES, Input, Seeds, decode, encode, is_path

if TYPE_CHECKING:
    from collections.abc import Callable

    Native = Callable[[bytes], bytes]

_SHARE_OF_BLIND = 0.3
_SHARE_OF_FILES = 0.12
OPTIONS = 64  # numbers that `fuzz_judge.options_of` tells apart


def fresh(seeds: Seeds, rng: random.Random) -> Input:
    """Return a seed as it is."""
    return Input(rng.choice(seeds.names), {}, rng.randrange(OPTIONS))


def mutated(one: Input, seeds: Seeds, rng: random.Random, native: Native | None = None) -> Input:
    """Return an input that differs from another one; `native` is a mutator of bytes of its own."""
    if rng.random() < 0.02:
        return mutated(fresh(seeds, rng), seeds, rng, native)
    files = dict(one.files)
    new = Input(one.seed, files, one.options, one.is_blind)
    if rng.random() < 0.2:
        new.options = rng.randrange(OPTIONS)
    if not files and rng.random() < _SHARE_OF_BLIND:
        _change(new, seeds, rng, fuzz_bytes.blind)
        return new
    if rng.random() < _SHARE_OF_FILES:
        new.is_blind = False
        _move(new, seeds, rng)
        return new
    new.is_blind = False
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if native is not None and rng.random() < 0.15:
            _change(new, seeds, rng, lambda data, _: native(data))
        else:
            _change(new, seeds, rng, None)
    return new


def _change(one: Input, seeds: Seeds, rng: random.Random, change: fuzz_bytes.Change | None) -> None:
    """Change a file: one that was changed already, or any."""
    paths = seeds.paths(one)
    if not paths:
        return
    again = [path for path, data in one.files.items() if data is not None]
    path = rng.choice(again) if again and rng.random() < 0.4 else rng.choice(paths)
    data = seeds.file(one, path) or b""
    if change is None:
        known = fuzz_bytes.known(path, data)
        change = fuzz_bytes.blind if known is None or rng.random() < 0.15 else known
    one.files[path] = change(data, rng)[:MOST_BYTES]


def _move(one: Input, seeds: Seeds, rng: random.Random) -> None:
    """Do something with whole files."""
    paths = seeds.paths(one)
    if not paths:
        return
    path, to = rng.choice(paths), rng.choice(paths)
    match rng.randrange(7):
        case 0:
            one.files[path] = None
        case 1:
            one.files[path], one.files[to] = seeds.file(one, to), seeds.file(one, path)
        case 2:
            one.files[path] = seeds.file(one, to)
        case 3 | 4:
            one.files[path] = _from_another(path, seeds, rng)
        case 5:
            new = _renamed(path, rng)
            if is_path(new) and _is_free(new, paths):
                one.files[new] = seeds.file(one, path)
        case _:
            folder = path.rpartition("/")[0]
            name = rng.choice(
                ("data.pkl", "extra.bin", "notes", "x.npy", "y.npz", "latest", "a.pt")
            )
            new = f"{folder}/{name}" if folder else name
            if _is_free(new, paths):
                one.files[new] = _from_another(name, seeds, rng)


def _is_free(new: str, paths: list[str]) -> bool:
    """Return whether a file can have a name: neither is it a folder, nor below a file."""
    above = {new.rpartition("/")[0]} | {*new.rpartition("/")[0].split("/")}
    return not any(path.startswith(f"{new}/") or path in above for path in paths)


def _from_another(path: str, seeds: Seeds, rng: random.Random) -> bytes:
    """Take a file of any seed, one with the same ending if there is one."""
    ending = Path(path).suffix
    for _ in range(8):
        own = seeds.by_name[rng.choice(seeds.names)].files
        alike = [name for name in sorted(own) if Path(name).suffix == ending]
        if alike:
            return own[rng.choice(alike)]
    return own[rng.choice(sorted(own))]


def _renamed(path: str, rng: random.Random) -> str:
    folder, slash, name = path.rpartition("/")
    digits = [at for at, char in enumerate(name) if char.isdecimal()]
    if digits and rng.random() < 0.7:
        at = rng.choice(digits)
        name = name[:at] + rng.choice("0123456789") + name[at + 1 :]
    else:
        name = rng.choice((name.upper(), f"{name}.tmp", f"{name}x", name[:-1], ".metadata"))
    return folder + slash + name


def for_libfuzzer(seeds: Seeds, native: Native) -> Callable[[bytes, int, int], bytes]:
    """Return the mutator that libFuzzer calls."""

    def mutate(data: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)  # noqa: S311  a fuzz
        one = decode(bytes(data), seeds) or fresh(seeds, rng)
        for _ in range(4):
            new = encode(mutated(one, seeds, rng, native))
            if len(new) <= most and new != data:
                return new
        return encode(fresh(seeds, rng))

    return mutate
