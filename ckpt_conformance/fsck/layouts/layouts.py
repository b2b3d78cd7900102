"""Find the checkpoints below a path, by what lies there and never by running anything.

A folder is one checkpoint where it holds `.metadata`, shards, an index, or is named after a step.
Everything below such a folder belongs to it. Anything else is a run: its folders, its manifests and
its loose files, grouped by the step in their names, are checkpoints.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.code import any_file
from ckpt_conformance.fsck.formats import (
    dcp,
    foreign,
    hf_shards,
    manifest,
    manifest_v2,
    orbax,
    safetensors_file,
    torchsnapshot,
    zip_ends,
)
from ckpt_conformance.fsck.layouts import first_bytes, leftovers, linked, step_names
from ckpt_conformance.fsck.layouts import names as written
from ckpt_conformance.fsck.source.findings import Malformed, OutOfTime
from ckpt_conformance.fsck.source.source import DEEPEST, EntryKind, Unreachable, in_threads
from ckpt_conformance.fsck.source.untrusted import MOST_JSON

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder

_TORCH = (".pt", ".pth", ".ckpt")
_MAYBE_TORCH = (
    ".bin",
    ".pkl",
    ".pickle",
    ".tar",
    ".optim",
    ".th",
    ".chkpt",
    ".ckp",
    ".pyth",
    ".t7",
)
_TORCH_BY_STEP = (".model", ".weights", ".state", ".params")  # others use these words, too
_INDEX = re.compile(r".+\.(?:safetensors|bin)\.index(?:\.[^./]+)?\.json")  # with diffusers' variant
_BY_NAME = (".safetensors", *_TORCH)
OF_A_STEP = re.compile(
    r"^(?:global_?steps?|step|iter|checkpoint|ckpt|dcp|dist_ckpt|epoch)[-_=]?\d+(?:\D|$)",
    re.IGNORECASE,
)
# Of a file without an ending.
_NAMED_AS_STEP = re.compile(
    r"(?:(?:global_?steps?|step|iter|epoch)[-_=]?|(?:checkpoint|ckpt)[-_=])\d{1,18}",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d{1,18}")
_OF_LEROBOT = {"pretrained_model", "training_state"}  # in `checkpoints/020000`
_BATCHES = "batched"  # the folder in which torchsnapshot puts small tensors together
_BATCHED = re.compile(rf"{_BATCHES}/[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}")
_STEP_NAME = re.compile(r"(.*?)\d{1,18}")
_RUN_ID = "run_id"
_FLAT_MANIFEST = re.compile(r"meta_(\d{6,18})\.json")
_FLAT_DATA = re.compile(r"(?:model|extra)_(\d{6,18})\.pt|(?:optim|extra)_(\d{6,18})_rank\d+\.pt")
_DIRECTORY = re.compile(r"(?:dcp|dist_ckpt)_\d{6,18}")
_DUMP = re.compile(r"emergency_step_\d{1,18}_\d{1,18}")
_DCP_MANIFEST, DCP_EXTRA = "meta.json", "extra_state.pt"
_TEXT = {".md", ".txt", ".yaml", ".yml", ".toml", ".log", ".py", ".sh"}
_BESIDE = "._"
_OF_STATE = re.compile(r"model|checkpoint|ckpt|state|params|weights|policy|agent", re.IGNORECASE)
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".pdf", ".mp4", ".wav", ".flac")
_BEGIN = re.compile(r"(?:(?:adapter|generation)_)?config\.json")  # `save_pretrained` begins so
_SIGNATURES = (_DCP_MANIFEST, manifest_v2.MANIFEST)


class Format(StrEnum):
    """How a part of a checkpoint is judged."""

    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HF_SHARDS = "hf-shards"  # of torch's writer for Hugging Face, which divide tensors
    INDEX = "index"  # of Hugging Face, with the files that it names
    DCP = "dcp"
    REFERENCE = "reference"
    DUMP = "reference-emergency"  # of the reference manager, on SIGTERM: a marker for each rank
    ORBAX = "orbax"  # a step, or an item of one, with all that is below it
    SNAPSHOT = "torchsnapshot"  # with all that is below it
    GGUF = "gguf"
    HDF5 = "hdf5"
    FLAX = "flax-msgpack"
    ONNX = "onnx"
    NPZ = "npz"
    KERAS = "keras"
    EXPORT = "pt2"  # of torch.export
    SB3 = "stable-baselines3"
    PICKLE = "pickle"  # plain, of somebody's own state
    JSON = "json"
    LINK = "link"  # a step that lies elsewhere, or nowhere
    UNREFERENCED = "unreferenced"  # a file in a folder of DCP that nothing refers to
    UNKNOWN_NAME = "unknown-name"  # a file in a library's checkpoint, under none of its names
    OTHER = "other"  # a file of no layout: it is looked at for code, and passed over
    LINKED = "linked"  # a file in a folder that a link leads to: it is looked at for code
    LEFTOVER = "leftover"  # a file of work in progress: it is looked at for code, and told
    DEEP = "deep"  # a folder that is too deep to be looked into
    DENIED = "denied"  # a folder that this user may not read
    EMPTY = "empty"  # a step in which no file holds a state


_FOREIGN = {
    ".gguf": Format.GGUF,
    ".h5": Format.HDF5,
    ".hdf5": Format.HDF5,
    ".onnx": Format.ONNX,
    ".msgpack": Format.FLAX,
    ".npz": Format.NPZ,
    ".keras": Format.KERAS,
    ".pt2": Format.EXPORT,
}
# Of the callbacks of stable-baselines3; what a script saves may have any name.
_SB3 = re.compile(r"(?:.*_)?\d+_steps\.zip|best_model\.zip")
_OF_NUMBERS = (Format.NPZ, Format.HDF5)  # metrics and data sets are written so, too
_MODEL = re.compile(r"(?:.*\.)?(?:model|weights|variables|state|params)(?:[^a-z]|$)", re.IGNORECASE)
_FIRST_BYTES = {foreign.GGUF: Format.GGUF, foreign.HDF5: Format.HDF5}
FOREIGN = {*_FOREIGN.values(), Format.SB3}
"""Formats of single files that others than torch, safetensors and Hugging Face have."""
WITH_DATA = frozenset(
    {Format.TORCH, Format.SAFETENSORS, Format.INDEX, Format.DCP, Format.PICKLE, *FOREIGN}
)
"""Formats of files that a step has, or lacks, beside its neighbours."""
_NO_STATE = (
    *(Format.JSON, Format.OTHER, Format.LINKED, Format.LEFTOVER),
    *(Format.DEEP, Format.DENIED),
)
"""What makes no checkpoint of a folder, unless it runs code."""
_NO_DATA = (*_NO_STATE, Format.UNREFERENCED, Format.UNKNOWN_NAME, Format.EMPTY)
"""What says nothing of the layout that it is in."""


class Part(NamedTuple):
    """One part: the folder that it is in, with a slash at its end or nothing, and its file."""

    form: Format
    base: str
    name: str


@dataclass
class Candidate:
    """What may be one checkpoint.

    Attributes:
        path: what a user would name.
        root: the folder that file names are relative to.
        layout: what it was taken for.
        step: what its name says.
        parts: what is to be judged.
        files: every file that belongs to it.
        is_alone: the user named the file, and nothing else is judged.
        is_part_of_set: the file is one of a set.

    """

    path: Where
    root: Where
    layout: str
    step: int | None
    parts: list[Part] = field(default_factory=list[Part])
    files: list[str] = field(default_factory=list[str])
    is_alone: bool = False
    is_part_of_set: bool = False


@dataclass
class Overview:
    """The checkpoints below a path, and what else lies there."""

    candidates: list[Candidate] = field(default_factory=list[Candidate])
    leftovers: list[str] = field(default_factory=list[str])
    links: dict[str, str] = field(default_factory=dict[str, str])
    """Links that are not followed, and why."""


def is_reference_file(path: Where) -> bool:
    """Return whether a name is one of the per-rank files of the reference manager."""
    known = _FLAT_DATA.fullmatch(path.name) or _FLAT_MANIFEST.fullmatch(path.name)
    return known is not None and path.is_file()


def _ends(name: str, *endings: str) -> bool:
    """Return whether a name has one of some endings: a load minds no case of them."""
    return name.lower().endswith(endings)


def is_beside(name: str) -> bool:
    """Return whether a file is what macOS keeps beside another one, where a disk has no place.

    Its name ends as that of the other one, and it is no part of any layout.
    """
    return name.rpartition("/")[2].startswith(_BESIDE)


def _name(folder: Folder, base: str) -> str:
    """Return the name of a folder below another; with an empty base, that of the other."""
    return PurePosixPath(base).name or folder.root.resolve().name


def format_of(folder: Folder, name: str, *, by_library: bool = False) -> Format | None:
    """Return the format of a file by its name and first bytes; None for one without tensors.

    `by_library` says that a library wrote the folder: names that are common words are its own.
    """
    if is_beside(name):
        return None
    last = name.rpartition("/")[2]
    if _ends(name, ".safetensors"):
        return Format.SAFETENSORS
    if _ends(name, *_TORCH) or written.is_torch(last, by_library=by_library):
        return Format.TORCH
    if form := _foreign_by_name(last):
        return form
    if is_text(name):
        return None
    return _by_first_bytes(folder, name)


def _foreign_by_name(name: str) -> Format | None:
    """Return the format that the ending of a name promises."""
    if _SB3.fullmatch(name):
        return Format.SB3
    return _FOREIGN.get(PurePosixPath(name).suffix.lower())


def _by_first_bytes(folder: Folder, name: str) -> Format | None:
    """Return the format of a file whose name says none, or not surely."""
    is_maybe = _may_be_torch(name.rpartition("/")[2])
    try:
        with folder.open(name) as file:
            head = file.read(first_bytes.HEAD)
    except (PermissionError, Unreachable, OutOfTime):
        # The part is judged, and that it cannot be read is a finding then.
        return Format.TORCH if _is_named_as_torch(name.rpartition("/")[2]) else None
    except (OSError, Malformed):
        return None
    found = next((form for sign, form in _FIRST_BYTES.items() if head.startswith(sign)), None)
    if found or not is_maybe:
        return found
    if _NAMED_AS_STEP.fullmatch(name.rpartition("/")[2]) and safetensors_file.begins(
        head[: safetensors_file.HEAD]
    ):
        return Format.SAFETENSORS
    is_zip = head.startswith(zip_ends.MAGIC)
    if not _is_named_as_torch(name.rpartition("/")[2]):
        is_zip = first_bytes.is_torch(head)
    return Format.TORCH if is_zip or not head else None


def is_one(folder: Folder, base: str, names: list[str], inner: list[str]) -> bool:
    """Return whether a folder, with all that is below it, is one checkpoint.

    `inner` are the names of the folders in it.
    """
    is_signed = written.is_signed(names)
    steps = [name for name in inner if OF_A_STEP.match(name)]
    holds_steps = any(not (is_signed and written.is_sharded(name)) for name in steps)
    if is_by_names(names) or _DUMP.fullmatch(_name(folder, base)):
        return True
    if written.is_speechbrains(names):
        return True
    if _is_of_ranks(folder, base, inner) or (written.is_of_parts(names, inner) and not steps):
        return True
    is_number = _NUMBER.fullmatch(_name(folder, base)) is not None
    if is_number and (_OF_LEROBOT & set(inner) or _holds_items(folder, base, inner)):
        return True
    if _BATCHES in inner and any(map(_is_batched, _below(folder, base, _BATCHES))):
        return True
    is_step = OF_A_STEP.match(_name(folder, base)) and not _is_of_metric(names)
    looks_so = is_signed or is_step or _is_split(folder, base, inner)
    return bool(looks_so) and not holds_steps


def _is_of_ranks(folder: Folder, base: str, inner: Sequence[str]) -> bool:
    """Return whether a folder holds those of the ranks of Megatron, whatever its own name is."""
    are_ranks = bool(inner) and all(map(written.is_rank, inner))
    return are_ranks and any(map(written.is_of_rank, _listed(folder, base + inner[0])))


def _is_of_metric(names: Iterable[str]) -> bool:
    """Return whether a folder comes of a metric with a slash in its name, such as `val/acc`.

    Lightning writes `epoch=1-val/acc=0.90.ckpt` then: the folder is named as a step, and is none.
    """
    data = [name for name in names if is_loose(name)]
    return bool(data) and all("=" in name and step_names.is_whole(name) for name in data)


def _below(folder: Folder, base: str, name: str) -> Iterator[str]:
    """Yield the names in a folder inside of another, relative to that one."""
    return (f"{name}/{one}" for one in _listed(folder, base + name))


def _listed(folder: Folder, name: str) -> Collection[str]:
    """Return the names in a folder; none of one that this user may not read, which is told."""
    try:
        return folder.listing(name)
    except PermissionError:
        return ()


def _holds_items(folder: Folder, base: str, inner: Iterable[str]) -> bool:
    """Return whether items of Orbax are in a folder: older releases wrote nothing beside them."""
    return any(orbax.TREE in _listed(folder, base + name) for name in inner)


def hides_a_step(folder: Folder, base: str, name: str) -> bool:
    """Return whether a link, or what it leads to, is named as a step, and that is not judged."""
    is_step = _is_named_as_step(name) or _is_named_as_step(_gone(folder, base + name))
    return is_step and _hides_a_folder(folder, base + name)


def _is_named_as_step(name: str) -> bool:
    return bool(OF_A_STEP.match(name)) and not PurePosixPath(name).suffix


def _gone(folder: Folder, name: str) -> str:
    """Return the name of what a link leads to and is not there: `latest` may tell what is lost."""
    where = folder.root / name
    if not isinstance(where, Path) or where.exists():
        return ""
    try:
        return where.readlink().name
    except OSError:
        return ""


def step_of_link(folder: Folder, base: str, name: str) -> int | None:
    """Return the step that a link's name says, or that of what it leads to and is not there."""
    step = step_names.step_of(name)
    return step_names.step_of(_gone(folder, base + name)) if step is None else step


def _hides_a_folder(folder: Folder, name: str) -> bool:
    """Return whether a link leads to a folder that is not judged: it is elsewhere, or gone.

    A link to a folder inside is judged where that lies.
    """
    where = folder.root / name
    if isinstance(where, Path) and not where.exists():
        return True
    return bool(folder.link_problem(name)) and (where.is_dir() or not isinstance(where, Path))


def is_index(name: str) -> bool:
    """Return whether a name is one of an index of Hugging Face."""
    return name.endswith(".json") and _INDEX.fullmatch(name) is not None


def is_by_names(names: Iterable[str]) -> bool:
    """Return whether a folder is one checkpoint by the names in it."""
    names = list(names)
    return signed_form(names) is not None or any(
        name in _SIGNATURES or is_index(name) or dcp.is_file(name) or hf_shards.is_shard(name)
        for name in names
    )


def _is_split(folder: Folder, base: str, inner: list[str]) -> bool:
    """Return whether a folder is one of verl's, without a manifest, by the folders in it."""
    parts = [name for name in inner if name in written.SPLIT]
    return written.FOLDER in inner or any(
        written.FOLDER in _listed(folder, base + name) for name in parts
    )


def form_by_name(name: str) -> Format | None:
    """Return the format that takes all of a folder, by a file of it."""
    return Format.SNAPSHOT if _is_batched(name) else signed_form((name.rpartition("/")[2],))


def head_of_step(name: str) -> str | None:
    """Return what stands before the number of a step in the name of a folder; None for none."""
    match = _STEP_NAME.fullmatch(name)
    return match[1] if match else None


def is_data(name: str) -> bool:
    """Return whether a file of a checkpoint's folder is certainly judged, by its name."""
    is_by_name = _ends(name, *_BY_NAME, ".metadata", ".distcp")
    is_foreign = _foreign_by_name(name) is not None
    return is_by_name or is_foreign or form_by_name(name) is not None or _is_torch(name)


def may_be_data(name: str) -> bool:
    """Return whether a file of a checkpoint's folder may be judged, by its name."""
    return _ends(name, ".json", *_MAYBE_TORCH)


def is_picture(name: str) -> bool:
    """Return whether a name is one of a picture or a sound: samples are kept by step, too."""
    return _ends(name, *_PICTURES)


def is_text(name: str) -> bool:
    """Return whether a name is one of a text, which nobody loads as a checkpoint."""
    return name.endswith((".json", *_TEXT))


def is_loose(name: str) -> bool:
    """Return whether a file of a run's folder is certainly a checkpoint, or a part of one."""
    is_by_name = _ends(name, ".safetensors", *_TORCH) or _is_torch(name) or _is_model(name)
    return is_by_name and not is_beside(name)


def _is_model(name: str) -> bool:
    """Return whether a file of another format is a model's: those of numbers hold anything."""
    form = _foreign_by_name(name)
    if form not in _OF_NUMBERS:
        return form is not None
    return bool(OF_A_STEP.match(name) or _MODEL.match(name))


def may_be_loose(name: str) -> bool:
    """Return whether a file of a run's folder may be a checkpoint, or a part of one."""
    return is_loose(name) or _may_be_torch(name)


def _may_be_torch(name: str) -> bool:
    """Return whether a name is one that torch's files have, and others: its bytes tell."""
    return _is_named_as_torch(name) or first_bytes.may_be_torch(name)


def _is_named_as_torch(name: str) -> bool:
    is_step = _NAMED_AS_STEP.fullmatch(name) is not None
    is_of_step = _ends(name, *_TORCH_BY_STEP) and step_names.step_of(name) is not None
    return _ends(name, *_MAYBE_TORCH) or is_step or is_of_step


def _is_torch(name: str) -> bool:
    return written.is_torch(name.rpartition("/")[2], by_library=False)


def is_file(kind: EntryKind) -> bool:
    """Return whether something stands under a name that is no folder."""
    return kind not in (EntryKind.FOLDER, EntryKind.DENIED)


def take_folder(folder: Folder, base: str, overview: Overview, depth: int = DEEPEST) -> None:
    """Take what is below a folder, so many levels, as one checkpoint; names are relative to it."""
    inner = folder.inner(base)
    root = inner.root
    candidate = Candidate(root, root, "", step_names.step_of(root.resolve().name))
    sub: dict[str, list[str]] = defaultdict(list)
    links: list[str] = []
    for name, kind in inner.walk(depth):
        is_deepest = kind is EntryKind.FOLDER and name.count("/") == DEEPEST - 1
        if leftovers.is_below(name):
            overview.leftovers.append(base + name)
            if kind is EntryKind.FILE:
                candidate.parts.append(Part(Format.LEFTOVER, "", name))
        elif is_deepest or kind is EntryKind.DENIED:
            form = Format.DEEP if is_deepest else Format.DENIED
            candidate.parts.append(Part(form, "", name))
        elif kind is EntryKind.FILE and is_beside(name):
            candidate.parts.append(Part(Format.OTHER, "", name))
        elif kind is not EntryKind.FOLDER:
            if kind is EntryKind.LINK:
                links.append(name)
            at, _, last = name.rpartition("/")
            candidate.files.append(name)
            sub[f"{at}/" if at else ""].append(last)
    candidate.parts += _parts_below(inner, sub, by_library=bool(_library(candidate)))
    _take_linked(inner, base, linked.below(inner, links, depth), candidate, overview)
    candidate.layout = layout_name(candidate)
    if _is_begun(candidate):
        candidate.parts.append(Part(Format.EMPTY, "", ""))
    if is_known(candidate) or _is_judged(inner, candidate.parts):
        overview.candidates.append(candidate)


def _take_linked(
    folder: Folder,
    base: str,
    below: Iterable[tuple[str, EntryKind]],
    candidate: Candidate,
    overview: Overview,
) -> None:
    """Take what links of a checkpoint lead to: a folder is judged where it lies, inside of the run.

    A load finds it here, so that it is looked at for code here, too.
    """
    known = frozenset(candidate.files)
    for name, kind in below:
        if kind is EntryKind.LINK:
            overview.links[base + name] = folder.link_problem(name)
            candidate.files += [name] if name not in known else []
        elif kind in _OF_LINKED:
            candidate.parts.append(Part(_OF_LINKED[kind], "", name))


_OF_LINKED = {
    EntryKind.FILE: Format.LINKED,
    EntryKind.FOLDER: Format.DEEP,
    EntryKind.DENIED: Format.DENIED,
}


def _parts_below(
    folder: Folder, sub: Mapping[str, list[str]], *, by_library: bool
) -> Iterator[Part]:
    """Yield what the folders of a checkpoint hold; `sub` are the names in each."""
    for at, form in signed_roots(sub):
        yield Part(form, at, SIGNS[form])
        sub = {name: own for name, own in sub.items() if not name.startswith(at)}
    for at, names in sorted(sub.items()):
        yield from _parts(folder, at, names, by_library=by_library)


def is_known(candidate: Candidate) -> bool:
    """Return whether a library wrote a folder, which says what has to be in it."""
    names = candidate.files, candidate.root.resolve().name
    return bool(_library(candidate) or written.megatron_layout(*names))


def _is_begun(candidate: Candidate) -> bool:
    """Return whether a step, or a pipeline, has its configuration, and nothing but texts beside."""
    names = [name.rpartition("/")[2] for name in candidate.files]
    is_step = OF_A_STEP.match(candidate.root.resolve().name)
    is_model = is_step and any(map(_BEGIN.fullmatch, names))
    is_begun = is_model or written.PIPELINE in candidate.files
    return bool(is_begun) and all(map(is_text, names)) and not is_known(candidate)


SIGNS = {Format.ORBAX: orbax.STEP, Format.SNAPSHOT: torchsnapshot.METADATA}
"""Of each format that takes all that is below a folder: the file by which it is known."""


def signed_roots(sub: Mapping[str, Collection[str]]) -> list[tuple[str, Format]]:
    """Return the topmost folders that one library wrote, of folders with the names in each."""
    roots: list[tuple[str, Format]] = []
    for at in sorted(sub):
        form = signed_form(sub[at])
        if form and not (roots and at.startswith(roots[-1][0])):
            roots.append((at, form))
    names = (at + name for at, own in sub.items() for name in own)
    return roots or ([("", Format.SNAPSHOT)] if any(map(_is_batched, names)) else [])


def signed_form(names: Collection[str]) -> Format | None:
    """Return the format of a folder that takes all that is below it, by the names in it."""
    if torchsnapshot.METADATA in names:
        return Format.SNAPSHOT
    return Format.ORBAX if orbax.is_checkpoint(names) else None


def _is_batched(name: str) -> bool:
    """Return whether a file is one that only torchsnapshot writes, with or without metadata."""
    return _BATCHED.fullmatch(name) is not None


def take_uncommitted(folder: Folder, base: str, form: Format, overview: Overview) -> None:
    """Take a folder in which a library should have saved a step, and did not.

    `form` is how the other steps are judged: by a file that is missing here, or by any state.
    """
    inner = folder.inner(base)
    root = inner.root
    parts = [Part(form, "", SIGNS.get(form, ""))]
    layout = str(form) if form in SIGNS else "unknown"
    candidate = Candidate(root, root, layout, step_names.step_of(root.resolve().name), parts)
    names = [name for name, kind in inner.walk() if is_file(kind)]
    candidate.files = [name for name in names if not is_beside(name)]
    candidate.parts += [Part(Format.OTHER, "", name) for name in names if is_beside(name)]
    overview.candidates.append(candidate)


def _is_judged(folder: Folder, parts: Sequence[Part]) -> bool:
    """Return whether parts are a checkpoint: one of them has a format, or runs code."""
    if any(not (part.form in _NO_STATE or _is_no_model(part)) for part in parts):
        return True
    files = [part for part in parts if part.form not in (Format.DEEP, Format.DENIED)]
    return any(in_threads(lambda part: _runs_code(folder, part.base + part.name), files))


def _is_no_model(part: Part) -> bool:
    return part.form in _OF_NUMBERS and not _is_model(part.name)


def _runs_code(folder: Folder, name: str) -> bool:
    try:
        with folder.open(name) as file:
            return any_file.is_unsafe(file, folder.size(name), name)
    except (OSError, Malformed):
        return False


def _parts(folder: Folder, base: str, names: list[str], *, by_library: bool) -> Iterator[Part]:
    """Yield what a folder inside a checkpoint holds."""
    is_dcp = any(map(dcp.is_file, names))
    if _DUMP.fullmatch(_name(folder, base)):
        yield Part(Format.DUMP, base, "")
        return
    if _is_reference(folder, base, names):
        yield Part(Format.REFERENCE, base, _DCP_MANIFEST)
        return
    if is_dcp:
        yield Part(Format.DCP, base, dcp.METADATA)
    taken = {name for name in names if dcp.is_file(name) or is_index(name)}
    for part in _of_several(base, names):
        yield part
        taken.update(_taken_by(folder, part, names))
    rest = sorted(set(names) - taken)
    texts = {
        one for one in written.maybe_texts(names) if first_bytes.is_plain_text(folder, base + one)
    }

    def form_of(name: str) -> Format:
        if name in texts:
            return Format.OTHER
        known = format_of(folder, base + name, by_library=by_library)
        last = Format.UNREFERENCED if is_dcp else Format.OTHER
        return known or _form_of_no_data(folder, base + name, last, by_library=by_library)

    for name, form in zip(rest, in_threads(form_of, rest), strict=True):
        yield Part(form, base, name)


def _form_of_no_data(folder: Folder, name: str, last: Format, *, by_library: bool) -> Format:
    """Return how a file without tensors is judged; `last` is for what nobody knows."""
    if by_library and name.endswith(_MAYBE_TORCH):
        return Format.UNKNOWN_NAME
    if first_bytes.is_pickle(folder, name) and not is_beside(name):
        return Format.PICKLE
    return Format.JSON if name.endswith(".json") else last


def _of_several(base: str, names: Iterable[str]) -> Iterator[Part]:
    """Yield the parts of safetensors and of others that consist of several files."""
    names = sorted(names)
    for name in list(filter(hf_shards.is_shard, names))[:1]:
        yield Part(Format.HF_SHARDS, base, name)
    for name in names:
        if is_index(name):
            yield Part(Format.INDEX, base, name)


def _taken_by(folder: Folder, part: Part, names: Iterable[str]) -> Iterator[str]:
    """Name the files that a part of several consists of."""
    if part.form is Format.INDEX:
        yield from _of_index(folder, part.base, part.name)
    else:
        yield from filter(hf_shards.is_shard, names)


def _is_reference(folder: Folder, base: str, names: Iterable[str]) -> bool:
    """Return whether a folder was written by the reference manager, damaged or not."""
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
        yield from safetensors_file.read_index(folder.read(base + name, MOST_JSON)).files
    except (OSError, Malformed):
        return


def take_loose(
    folder: Folder, base: str, names: Sequence[str], step: int | None, overview: Overview
) -> None:
    """Take files of a run's folder as one checkpoint: those that hold tensors."""
    forms = in_threads(lambda name: _form_of_loose(folder, base, name), names)
    parts = [Part(form or Format.OTHER, "", name) for name, form in zip(names, forms, strict=True)]
    if _is_judged(folder.inner(base), parts):
        overview.candidates.append(_loose(folder, base, parts, step))


def _form_of_loose(folder: Folder, base: str, name: str) -> Format | None:
    """Return the format of a file of a run's folder; metrics are pickled there, too."""
    form = format_of(folder, base + name)
    is_state = _OF_STATE.search(name) or step_names.step_of(name) is not None
    if form is None and is_state and first_bytes.is_pickle(folder, base + name):
        return Format.PICKLE
    return form


def sets(names: Iterable[str]) -> Iterator[list[str]]:
    """Keep files together that differ in the number of a rank or a part only."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[step_names.without_parts(name)].append(name)
    yield from groups.values()


def _loose(folder: Folder, base: str, parts: list[Part], step: int | None) -> Candidate:
    """Make a checkpoint of files that share a step, which their names say or their folder's."""
    root = folder.inner(base).root
    names = [part.name for part in parts if part.form is not Format.OTHER]
    names = names or [part.name for part in parts]
    is_named = step_names.step_of(names[0]) is not None
    path = root / names[0] if len(names) == 1 or is_named else root
    candidate = Candidate(path, root, "", step, parts, names)
    candidate.layout = layout_name(candidate)
    return candidate


def per_rank_steps(names: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return the per-rank files of the reference manager by the digits of a step, and the rest."""
    if not any(_FLAT_MANIFEST.fullmatch(name) or name == _RUN_ID for name in names):
        return [], names
    steps: dict[str, list[str]] = defaultdict(list)
    rest: list[str] = []
    for name in names:
        match = _FLAT_MANIFEST.fullmatch(name) or _FLAT_DATA.fullmatch(name)
        if match:
            steps[next(group for group in match.groups() if group)].append(name)
        else:
            rest.append(name)
    return sorted(steps.items()), rest


def take_per_rank(folder: Folder, names: Sequence[str], overview: Overview) -> None:
    """Take the per-rank files of a step of the reference manager as one checkpoint.

    Others name their files so, too: those with a manifest that is none of ours are loose ones.
    """
    root = folder.root
    (digits, files), *_ = per_rank_steps([_RUN_ID, *names])[0]
    note = f"meta_{digits}.json"
    if _is_anothers(folder, note):
        loose = step_names.first_one_first(names)
        take_loose(folder, "", loose, int(digits), overview)
        return
    path = root / f"model_{digits}.pt"
    parts = [Part(Format.REFERENCE, "", note)]
    overview.candidates.append(Candidate(path, root, "reference", int(digits), parts, files))


def _is_anothers(folder: Folder, name: str) -> bool:
    """Return whether a file is JSON, and no manifest of the reference manager."""
    try:
        has_id = folder.entry(_RUN_ID) is not None
        return not has_id and manifest.is_anothers(folder.read(name, manifest.MOST_BYTES))
    except (OSError, Malformed):
        return False


def _library(candidate: Candidate) -> str:
    """Name the library that wrote a checkpoint; nothing for none that is known."""
    above = "/".join(candidate.root.resolve().parts[-2:])
    return written.library(f"{above}/{file}" for file in candidate.files)


def layout_name(candidate: Candidate) -> str:
    """Name a layout by the library that wrote it, else by what it holds."""
    if library := _library(candidate):
        return library
    if layout := written.megatron_layout(candidate.files, candidate.root.resolve().name):
        return layout
    forms = [part.form for part in candidate.parts if part.form not in _NO_DATA]
    for form, name in _LAYOUTS_OF_FORMATS.items():
        if form in forms:
            return name
    if len(forms) == 1:
        return str(forms[0])
    return "files" if forms else "unknown"


_LAYOUTS_OF_FORMATS = {
    Format.REFERENCE: "reference-dcp",
    Format.DUMP: str(Format.DUMP),
    Format.ORBAX: "orbax",
    Format.SNAPSHOT: "torchsnapshot",
    Format.DCP: "dcp",
    Format.INDEX: "hf-index",
    Format.HF_SHARDS: "hf-shards",
}
