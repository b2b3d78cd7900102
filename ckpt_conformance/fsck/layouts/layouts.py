"""Find the checkpoints below a path, by what lies there and never by running anything.

A folder is one checkpoint where it holds `.metadata`, shards, an index, or is named after a step.
Everything below such a folder belongs to it. Anything else is a run: its folders, its manifests and
its loose files, grouped by the step in their names, are checkpoints.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import manifest, manifest_v2
from ckpt_conformance.fsck.formats.safetensors_file import read_index
from ckpt_conformance.fsck.layouts import links, megatron
from ckpt_conformance.fsck.layouts import names as written
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.places import folder_at
from ckpt_conformance.fsck.source.source import Unreachable, in_threads
from ckpt_conformance.fsck.source.untrusted import MOST_JSON

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder

MOST_LEVELS = 5

_TORCH = (".pt", ".pth", ".ckpt")
_MAYBE_TORCH = (".bin", ".pkl", ".tar", ".optim", ".th")
_INDEX = (".safetensors.index.json", ".bin.index.json")
_LEFT = re.compile(
    r"(?:^\.?tmp[._-]|\.(?:tmp|temp|partial|part|incomplete|old|del|bak|swp|lock)$|[.-]tmp[._-]|~$)"
)
_SHARD = re.compile(
    r"(?:^|[._-])(?:rank|shard|part|mp|tp|pp|dp|ep|cp|world_size)[_-]?\d+|\d+[_-]of[_-]\d+"
)
_STEP = (
    re.compile(r"(?:global_?step|step|iter(?:ation)?s?|batch)[-_=]?(\d{1,18})", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt|dcp|dist_ckpt|meta|model|optim|extra)[-_=](\d{1,18})"),
    re.compile(r"(?:epoch|ep)[-_=]?(\d{1,18})", re.IGNORECASE),
    re.compile(r"(?:^|[-_.=])(\d{1,18})$"),
)
OF_A_STEP = re.compile(
    r"^(?:global_?step|step|iter|checkpoint|ckpt|dcp|dist_ckpt|epoch)[-_=]?\d+(?:\D|$)",
    re.IGNORECASE,
)
_FLAT_MANIFEST = re.compile(r"meta_(\d{6,18})\.json")
_FLAT_DATA = re.compile(r"(?:model|extra)_(\d{6,18})\.pt|(?:optim|extra)_(\d{6,18})_rank\d+\.pt")
_DIRECTORY = re.compile(r"(?:dcp|dist_ckpt)_\d{6,18}")
_DCP_MANIFEST, DCP_EXTRA = "meta.json", "extra_state.pt"
_NO_DATA = ("json", "stranger", "stray")
_OF_ONE = (".metadata", _DCP_MANIFEST, manifest_v2.MANIFEST)


@dataclass
class Candidate:
    """What may be one checkpoint.

    Attributes:
        path: what a user would name.
        root: the folder that file names are relative to.
        layout: what it was taken for.
        step: what its name says.
        parts: (format, base folder with its slash or nothing, file) to judge.
        files: every file that belongs to it.
        is_alone: the user named the file, and nothing else is judged.
        is_of_more: the file is one of a set.

    """

    path: Where
    root: Where
    layout: str
    step: int | None
    parts: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    files: list[str] = field(default_factory=list[str])
    is_alone: bool = False
    is_of_more: bool = False


@dataclass
class Found:
    """The checkpoints below a path, and what else lies there."""

    candidates: list[Candidate] = field(default_factory=list[Candidate])
    leftovers: list[str] = field(default_factory=list[str])
    links: dict[str, str] = field(default_factory=dict[str, str])
    """Links that are not followed, and why."""


def step_of(name: str) -> int | None:
    """Give the step that a name says; None where it says none."""
    stem = re.sub(r"\.(?:pt|pth|ckpt|bin|safetensors|json|distcp|pkl)$", "", name)
    stem = _SHARD.sub("", stem)
    for pattern in _STEP:
        found = pattern.findall(stem)
        if found:
            return int(found[-1])
    return None


def is_reference_file(path: Where) -> bool:
    """Tell whether a name is one of the per-rank files of the reference manager."""
    known = _FLAT_DATA.fullmatch(path.name) or _FLAT_MANIFEST.fullmatch(path.name)
    return known is not None and path.is_file()


def is_leftover(name: str) -> bool:
    """Tell whether a name is one of work in progress."""
    return _LEFT.search(name) is not None


def find(path: Where) -> Found:
    """Find the checkpoints at a folder: that of a checkpoint, or of a run."""
    found = Found()
    _folder(folder_at(path), "", found, 0)
    return found


def _name(folder: Folder, base: str) -> str:
    """Give the name of a folder inside of another, or of that one."""
    return PurePosixPath(base).name or folder.root.resolve().name


def format_of(folder: Folder, name: str, *, by_library: bool = False) -> str:
    """Give `torch`, `safetensors`, or nothing for a file that is no part of a checkpoint.

    `by_library` says that a library wrote the folder: names that are common words are its own.
    """
    if name.endswith(".safetensors"):
        return "safetensors"
    last = name.rpartition("/")[2]
    if name.endswith(_TORCH) or written.is_torch(last, by_library=by_library):
        return "torch"
    if name.endswith(_MAYBE_TORCH):
        try:
            with folder.open(name) as file:
                head = file.read(4)
        except (PermissionError, Unreachable):
            return "torch"  # whoever judges it says that it cannot be read
        except (OSError, Malformed):
            return ""
        return "torch" if head[:4] == b"PK\x03\x04" or not head else ""
    return ""


def _folder(folder: Folder, base: str, found: Found, level: int) -> None:
    """Look into one folder of a run, or take it as a checkpoint."""
    entries = _entries(folder, base, found)
    names = list(entries)
    inner = [name for name, kind in entries.items() if kind == "folder"]
    here = _name(folder, base)
    is_signed = written.is_signed(names)
    steps = [name for name in inner if OF_A_STEP.match(name)]
    holds_steps = any(not (is_signed and written.is_sharded(name)) for name in steps)
    is_one = is_signed or OF_A_STEP.match(here) or _is_split(folder, base, inner)
    if is_by_names(names) or (is_one and not holds_steps):
        _add(found, _whole_folder(folder, base, found))
        return
    before = len(found.candidates)
    _linked_steps(folder, base, entries, found)
    if level < MOST_LEVELS:
        for name in inner:
            _folder(folder, f"{base}{name}/", found, level + 1)
    if is_signed:
        _add(found, _whole_folder(folder, base, found, depth=1))
        return
    _flat(folder, base, entries, found, is_run=len(found.candidates) > before)


def _linked_steps(folder: Folder, base: str, entries: Mapping[str, str], found: Found) -> None:
    """Take links that hide a step as checkpoints: what is said of them says why."""
    for name, kind in entries.items():
        is_step = kind == "link" and OF_A_STEP.match(name) and not PurePosixPath(name).suffix
        if is_step and links.hides_a_folder(folder, base + name):
            root = folder.root / base
            one = Candidate(root / name, root, "link", step_of(name), [("link", "", name)])
            found.candidates.append(one)


def _add(found: Found, one: Candidate) -> None:
    """Keep a candidate that has something to judge."""
    if one.parts:
        found.candidates.append(one)


def _entries(folder: Folder, base: str, found: Found) -> dict[str, str]:
    """List a folder: the kind of each name, less leftovers; links that lead out are noted."""
    kept: dict[str, str] = {}
    for name, kind in folder.listing(base).items():
        if is_leftover(name):
            found.leftovers.append(base + name)
            continue
        if kind == "link" and (why := folder.strayed(base + name)):
            found.links[base + name] = why
        kept[name] = kind
    return kept


def is_by_names(names: Iterable[str]) -> bool:
    """Tell whether a folder is one checkpoint by the names in it."""
    return any(name in _OF_ONE or name.endswith((".distcp", *_INDEX)) for name in names)


def _is_split(folder: Folder, base: str, inner: list[str]) -> bool:
    """Tell whether a folder is one of verl's, without a manifest, by the folders in it."""
    parts = [name for name in inner if name in megatron.SPLIT]
    return megatron.FOLDER in inner or any(
        megatron.FOLDER in folder.listing(base + name) for name in parts
    )


def _whole_folder(folder: Folder, base: str, found: Found, depth: int = 8) -> Candidate:
    """Take what is below a folder, so many levels, as one checkpoint; names are relative to it."""
    inner = folder.inner(base)
    root = inner.root
    one = Candidate(root, root, "", step_of(root.resolve().name))
    sub: dict[str, list[str]] = defaultdict(list)
    for name, kind in inner.walk(depth):
        at, _, last = name.rpartition("/")
        if is_leftover(last) or any(is_leftover(each) for each in at.split("/")):
            found.leftovers.append(base + name)
        elif kind in ("file", "link", "other"):
            if kind == "link" and (why := inner.strayed(name)):
                found.links[base + name] = why
            one.files.append(name)
            sub[f"{at}/" if at else ""].append(last)
    by_library = bool(_library(one))
    for at, names in sorted(sub.items()):
        one.parts += _parts(inner, at, names, by_library=by_library)
    one.layout = layout_name(one)
    return one


def _parts(
    folder: Folder, base: str, names: list[str], *, by_library: bool
) -> Iterator[tuple[str, str, str]]:
    """Say what a folder inside a checkpoint holds."""
    is_dcp = ".metadata" in names or any(name.endswith(".distcp") for name in names)
    if _is_reference(folder, base, names):
        yield "reference", base, _DCP_MANIFEST
        return
    if is_dcp:
        yield "dcp", base, ".metadata"
    taken = {".metadata", *(name for name in names if name.endswith((".distcp", *_INDEX)))}
    for name in names:
        if name.endswith(_INDEX):
            yield "index", base, name
            taken.update(_of_index(folder, base, name))
    rest = sorted(set(names) - taken)
    kinds = in_threads(lambda name: format_of(folder, base + name, by_library=by_library), rest)
    for name, kind in zip(rest, kinds, strict=True):
        other = "json" if name.endswith(".json") else "stranger" if is_dcp else ""
        if by_library and name.endswith(_MAYBE_TORCH):
            other = "stray"
        if kind or other:
            yield kind or other, base, name


def _is_reference(folder: Folder, base: str, names: Iterable[str]) -> bool:
    """Tell whether a folder was written by the reference manager, damaged or not."""
    if _DCP_MANIFEST in names:
        try:
            data = folder.read(base + _DCP_MANIFEST, manifest.MOST_BYTES)
        except (OSError, Malformed):
            data = b""
        if any(sign in data for sign in manifest.SIGNS):
            return True
    here = _name(folder, base)
    return bool(_DIRECTORY.fullmatch(here)) and DCP_EXTRA in names


def _of_index(folder: Folder, base: str, name: str) -> Iterator[str]:
    """Name the files of an index that can be read."""
    try:
        yield from read_index(folder.read(base + name, MOST_JSON)).files
    except (OSError, Malformed):
        return


def _flat(
    folder: Folder, base: str, entries: Mapping[str, str], found: Found, *, is_run: bool
) -> None:
    """Take the manifests and the loose files of a run's folder.

    Files that share no step with any other are one checkpoint, if there is nothing beside them.
    """
    before = len(found.candidates)
    names = [name for name, kind in entries.items() if kind != "folder"]
    rest = per_rank(folder, base, names, found)
    groups: dict[int | None, list[str]] = defaultdict(list)
    formats = in_threads(lambda name: format_of(folder, base + name), rest)
    for name, known in zip(rest, formats, strict=True):
        if known:
            groups[step_of(name)].append(name)
    alone = groups.pop(None, [])
    is_run = is_run or bool(groups) or len(found.candidates) > before
    for step, group in sorted(groups.items(), key=lambda item: item[0] or 0):
        found.candidates.append(_loose(folder, base, group, step))
    if is_run or len(alone) == 1:
        for group in _sets(alone):
            found.candidates.append(_loose(folder, base, group, None))
    elif alone:
        found.candidates.append(_loose(folder, base, alone, None))


def _sets(names: list[str]) -> Iterator[list[str]]:
    """Keep files together that differ in the number of a rank or a part only."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_SHARD.sub("", name)].append(name)
    yield from groups.values()


def _loose(folder: Folder, base: str, names: list[str], step: int | None) -> Candidate:
    """Make a checkpoint of files that share a step."""
    inner = folder.inner(base)
    root = inner.root
    path = root / names[0] if len(names) == 1 or step is not None else root
    parts = [(format_of(inner, name), "", name) for name in names]
    one = Candidate(path, root, "", step, parts, list(names))
    one.layout = layout_name(one)
    return one


def per_rank(folder: Folder, base: str, names: list[str], found: Found) -> list[str]:
    """Take the per-rank checkpoints of the reference manager; give the names that are left."""
    if not any(_FLAT_MANIFEST.fullmatch(name) or name == "run_id" for name in names):
        return names
    steps: dict[str, list[str]] = defaultdict(list)
    rest: list[str] = []
    for name in names:
        match = _FLAT_MANIFEST.fullmatch(name) or _FLAT_DATA.fullmatch(name)
        if match:
            steps[next(group for group in match.groups() if group)].append(name)
        else:
            rest.append(name)
    root = folder.root / base
    for digits, files in sorted(steps.items()):
        name = f"meta_{digits}.json"
        path = root / f"model_{digits}.pt"
        one = Candidate(path, root, "reference", int(digits), [("reference", "", name)], files)
        found.candidates.append(one)
    return rest


def _library(one: Candidate) -> str:
    """Name the library that wrote a checkpoint; nothing for none that is known."""
    above = "/".join(one.root.resolve().parts[-2:])
    return written.library(f"{above}/{file}" for file in one.files)


def layout_name(one: Candidate) -> str:
    """Name a layout by the library that wrote it, else by what it holds."""
    if library := _library(one):
        return library
    if found := megatron.layout_of(one.files, one.root.resolve().name):
        return found
    kinds = [kind for kind, _, _ in one.parts if kind not in _NO_DATA]
    for kind, name in (("reference", "reference-dcp"), ("dcp", "dcp"), ("index", "hf-index")):
        if kind in kinds:
            return name
    if len(kinds) == 1 and kinds[0]:
        return kinds[0]
    return "files" if kinds else "unknown"
