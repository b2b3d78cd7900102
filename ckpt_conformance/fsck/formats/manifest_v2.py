"""`ckpt_contents.json`, the manifest of verl's Megatron layout v2: held against itself.

It has no digest of itself, and none of any file: what can be said is what contradicts what verl's
documentation says of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import Json, clip, is_dict, is_list, object_or_empty

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST = "ckpt_contents.json"
VERSION = 2
DIST, HF, JSON = "megatron_dist_checkpoint", "huggingface", "json"

_MOST_ENTRIES = 1000
_SAVED = ("model", "optimizer", "extra", "hf_model")
_FLAGS = ("has_bridge", "use_dist_checkpointing", "peft")
# Of each word of `save_contents`: the contents that are there then, and only then.
_BELONGS = {"optimizer": ("optimizer",), "extra": ("rng_state", "transformer_config")}
_ONLY_WITH = {
    "optimizer": "optimizer",
    "lr_scheduler": "optimizer",
    "rng_state": "extra",
    "transformer_config": "extra",
}


@dataclass(frozen=True)
class Content:
    """One entry of `contents`: something that was saved, and where.

    Attributes:
        path: relative to the manifest; None where the manifest names none inside of its folder.
        form: its format, as `huggingface`; where the manifest is wrong, any JSON value.
        key: its key in a folder of shards; None where there is none.

    """

    name: str
    path: str | None
    form: object
    key: str | None


@dataclass(frozen=True)
class Manifest:
    """What a manifest says, less what has a wrong type: `contradictions` reports that.

    Attributes:
        version, world_size: None where the manifest has no whole number there.
        is_peft: the model was saved as an adapter.
        folders: those that are listed, and those of adapters; none that leads out.
        named: every path that occurs, wherever it leads.

    """

    version: int | None
    world_size: int | None
    is_peft: bool
    contents: tuple[Content, ...]
    folders: tuple[str, ...]
    named: frozenset[str]


def read(body: Json) -> Manifest:
    """Take what can be followed out of a manifest; nothing of it raises."""
    version, world = body.get("schema_version"), body.get("world_size")
    entries = list(_entries(body))
    folders = tuple(_folders(body))
    said = (entry.get("path") for _, entry in entries)
    return Manifest(
        version if type(version) is int else None,
        world if type(world) is int else None,
        object_or_empty(body.get("backend")).get("peft") is True,
        tuple(_content(name, entry) for name, entry in entries),
        folders,
        frozenset((*folders, *(path for path in said if isinstance(path, str)))),
    )


def _content(name: str, entry: Json) -> Content:
    key = entry.get("key")
    try:
        path = inside(entry.get("path"))
    except Malformed:
        path = None
    return Content(name, path, entry.get("format"), key if isinstance(key, str) else None)


def inside(path: object) -> str:
    """Return a path of the manifest; Malformed for one that leads out of the checkpoint."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise Malformed(f"the path {clip(path)} is none")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise Malformed(f"the path {clip(path)} leads out of the checkpoint")
    return path


def _entries(body: Json) -> Iterator[tuple[str, Json]]:
    """Yield the first entries of `contents` that are objects, with their names."""
    contents = object_or_empty(body.get("contents"))
    for name, entry in list(contents.items())[:_MOST_ENTRIES]:
        if is_dict(entry):
            yield name, entry


def _folders(body: Json) -> Iterator[str]:
    """Yield the folders that are listed, and those of adapters; less those that lead out."""
    listed = list(object_or_empty(body.get("directories")))[:_MOST_ENTRIES]
    adapters = (entry.get("peft_adapter_path") for _, entry in _entries(body))
    for folder in (*listed, *adapters):
        try:
            yield inside(folder)
        except Malformed:
            continue


# -- what contradicts itself -----------------------------------------------------------------------


def contradictions(body: Json, step: int | None) -> Iterator[str]:
    """Report what is wrong in a manifest; `step` is what the name of its folder says."""
    yield from _fields(body, step)
    yield from _settings(body)
    yield from _places(body)
    saved = body.get("save_contents")
    if is_list(saved) and is_dict(body.get("contents")):
        yield from _complete(saved, {name for name, _ in _entries(body)})
    yield from _agree(body)


def _fields(body: Json, step: int | None) -> Iterator[str]:
    """Check the plain fields against their types, and the step against the name."""
    if body.get("schema_version") != VERSION:
        yield f"its schema_version is {clip(body.get('schema_version'))}"
    if body.get("framework") != "megatron":
        yield f"its framework is {clip(body.get('framework'))}, and only megatron writes it"
    for key in ("role", "arch"):
        if not isinstance(body.get(key), str):
            yield f"its {key} is {clip(body.get(key))}"
    for key, least in (("global_step", 0), ("world_size", 1)):
        number = body.get(key)
        if type(number) is not int or number < least:
            yield f"its {key} is {clip(number)}"
        elif key == "global_step" and step is not None and number != step:
            yield f"it is of step {number}, and the name says {step}: another's bytes?"


def _settings(body: Json) -> Iterator[str]:
    """Check what says how it was saved against its types."""
    if type(body.get("saved_any_dist_ckpt")) is not bool:
        yield f"its saved_any_dist_ckpt is {clip(body.get('saved_any_dist_ckpt'))}"
    backend = object_or_empty(body.get("backend"))
    if any(type(backend.get(flag)) is not bool for flag in _FLAGS):
        yield f"its backend does not say {', '.join(_FLAGS)}"
    saved = body.get("save_contents")
    if not is_list(saved) or not saved or any(word not in _SAVED for word in saved):
        yield f"its save_contents are {clip(saved)}, and not some of {', '.join(_SAVED)}"


def _places(body: Json) -> Iterator[str]:
    """Check every path against the folder, and the contents against the folders that are listed."""
    contents, listed = object_or_empty(body.get("contents")), body.get("directories")
    if not contents:
        yield "its contents are none"
    if not is_dict(listed):
        yield "its directories are none"
        listed = {}
    for name, entry in list(contents.items())[:_MOST_ENTRIES]:
        known = object_or_empty(entry)
        form, path = known.get("format"), known.get("path")
        if not isinstance(form, str):
            yield f"it does not say the format of {clip(name)}"
        for key in ("path", "peft_adapter_path"):
            if key == "path" or key in known:
                yield from _outside(known.get(key), f"{key} of {clip(name)}")
        if form in (DIST, HF) and isinstance(path, str) and path not in listed:
            yield f"{clip(name)} is in {clip(path)}, which its directories do not list"
    for folder in listed:
        yield from _outside(folder, "a folder of its directories")


def _outside(path: object, what: str) -> Iterator[str]:
    try:
        inside(path)
    except Malformed as error:
        yield f"{what}: {error}"


def _complete(saved: list[object], there: set[str]) -> Iterator[str]:
    """Check the contents against what was to be saved."""
    words = {str(word) for word in saved}
    for word in map(str, saved):
        for name in _BELONGS.get(word, ()):
            if name not in there:
                yield f"{word} was saved, and its contents have no {name}"
    if {"model", "hf_model"} & words and not {"model", "hf_model"} & there:
        yield "the model was saved, and its contents have none"
    for name, word in _ONLY_WITH.items():
        if name in there and word not in saved:
            yield f"its contents have {name}, and save_contents no {word}"


def _agree(body: Json) -> Iterator[str]:
    """Check the formats of the contents against the backend, and against the summary."""
    forms = {name: entry.get("format") for name, entry in _entries(body)}
    flags = object_or_empty(body.get("backend"))
    if HF in forms.values() and flags.get("has_bridge") is False:
        yield "a content has the format of Hugging Face, and the backend has no bridge to write it"
    sharded = flags.get("use_dist_checkpointing") or flags.get("peft")
    if forms.get("model") == DIST and sharded is False:
        yield "the model is sharded by Megatron, and its backend says that it is not"
    summary = body.get("saved_any_dist_ckpt")
    if type(summary) is bool and summary != (DIST in forms.values()):
        yield f"saved_any_dist_ckpt is {summary}, and its contents contradict"
