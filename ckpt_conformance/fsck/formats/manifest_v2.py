"""`ckpt_contents.json`, the manifest of verl's Megatron layout v2: held against itself.

It has no digest of itself, and none of any file: what can be said is what contradicts what verl's
documentation says of its keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.formats.dtypes import clip
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.guards import is_dict, is_list

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


def inside(path: object) -> str:
    """Give a path of the manifest; Malformed for one that leads out of the checkpoint."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise Malformed(f"the path {clip(path)} is none")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise Malformed(f"the path {clip(path)} leads out of the checkpoint")
    return path


def contents(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the contents that are described, each with its entry."""
    found = body.get("contents")
    for name, entry in list(found.items())[:_MOST_ENTRIES] if is_dict(found) else ():
        if is_dict(entry):
            yield name, entry


def named(body: dict[str, Any]) -> Iterator[str]:
    """Give the folders that are listed, and those of adapters; less those that lead out."""
    found = body.get("directories")
    folders: list[Any] = list(found)[:_MOST_ENTRIES] if is_dict(found) else []
    folders += [one["peft_adapter_path"] for _, one in contents(body) if "peft_adapter_path" in one]
    for folder in folders:
        try:
            yield inside(folder)
        except Malformed:
            continue


def paths(body: dict[str, Any]) -> Iterator[str]:
    """Give every path that the manifest names."""
    yield from named(body)
    for _, entry in contents(body):
        if isinstance(entry.get("path"), str):
            yield entry["path"]


def contradictions(body: dict[str, Any], step: int | None) -> Iterator[str]:
    """Say what is wrong in a manifest; `step` is what the name of its folder says."""
    yield from _fields(body, step)
    yield from _settings(body)
    yield from _places(body)
    if is_list(body.get("save_contents")) and is_dict(body.get("contents")):
        yield from _complete(body["save_contents"], {name for name, _ in contents(body)})
    yield from _agree(body)


def _fields(body: dict[str, Any], step: int | None) -> Iterator[str]:
    """Hold the plain fields against their types, and the step against the name."""
    if body.get("schema_version") != VERSION:
        yield f"its schema_version is {clip(body.get('schema_version'))}"
    if body.get("framework") != "megatron":
        yield f"its framework is {clip(body.get('framework'))}, and only megatron writes it"
    for key in ("role", "arch"):
        if not isinstance(body.get(key), str):
            yield f"its {key} is {clip(body.get(key))}"
    for key, least in (("global_step", 0), ("world_size", 1)):
        if type(body.get(key)) is not int or body[key] < least:
            yield f"its {key} is {clip(body.get(key))}"
        elif key == "global_step" and step is not None and body[key] != step:
            yield f"it is of step {body[key]}, and the name says {step}: another's bytes?"


def _settings(body: dict[str, Any]) -> Iterator[str]:
    """Hold what says how it was saved against its types."""
    if type(body.get("saved_any_dist_ckpt")) is not bool:
        yield f"its saved_any_dist_ckpt is {clip(body.get('saved_any_dist_ckpt'))}"
    backend = body.get("backend")
    if not is_dict(backend) or any(type(backend.get(one)) is not bool for one in _FLAGS):
        yield f"its backend does not say {', '.join(_FLAGS)}"
    saved = body.get("save_contents")
    if not is_list(saved) or not saved or any(one not in _SAVED for one in saved):
        yield f"its save_contents are {clip(saved)}, and not some of {', '.join(_SAVED)}"


def _places(body: dict[str, Any]) -> Iterator[str]:
    """Hold every path against the folder, and the contents against the folders that are listed."""
    found, listed = body.get("contents"), body.get("directories")
    if not is_dict(found) or not found:
        yield "its contents are none"
        found = {}
    if not is_dict(listed):
        yield "its directories are none"
        listed = {}
    for name, entry in list(found.items())[:_MOST_ENTRIES]:
        known = entry if is_dict(entry) else {}
        if not isinstance(known.get("format"), str):
            yield f"it does not say the format of {clip(name)}"
        for key in ("path", "peft_adapter_path"):
            if key == "path" or key in known:
                yield from _outside(known.get(key), f"{key} of {clip(name)}")
        is_folder = known.get("format") in (DIST, HF)
        if is_folder and isinstance(known.get("path"), str) and known["path"] not in listed:
            yield f"{clip(name)} is in {clip(known['path'])}, which its directories do not list"
    for folder in listed:
        yield from _outside(folder, "a folder of its directories")


def _outside(path: object, what: str) -> Iterator[str]:
    try:
        inside(path)
    except Malformed as error:
        yield f"{what}: {error}"


def _complete(saved: list[Any], there: set[str]) -> Iterator[str]:
    """Hold the contents against what was to be saved."""
    for word in saved:
        for name in _BELONGS.get(str(word), ()):
            if name not in there:
                yield f"{word} was saved, and its contents have no {name}"
    if {"model", "hf_model"} & {str(word) for word in saved} and not {"model", "hf_model"} & there:
        yield "the model was saved, and its contents have none"
    for name, word in _ONLY_WITH.items():
        if name in there and word not in saved:
            yield f"its contents have {name}, and save_contents no {word}"


def _agree(body: dict[str, Any]) -> Iterator[str]:
    """Hold the formats of the contents against the backend, and against the summary."""
    forms = {name: entry.get("format") for name, entry in contents(body)}
    backend = body.get("backend")
    flags: dict[str, Any] = backend if is_dict(backend) else {}
    if HF in forms.values() and flags.get("has_bridge") is False:
        yield "a content has the format of Hugging Face, and the backend has no bridge to write it"
    sharded = flags.get("use_dist_checkpointing") or flags.get("peft")
    if forms.get("model") == DIST and sharded is False:
        yield "the model is sharded by Megatron, and its backend says that it is not"
    any_sharded = DIST in forms.values()
    if type(body.get("saved_any_dist_ckpt")) is bool and body["saved_any_dist_ckpt"] != any_sharded:
        yield f"saved_any_dist_ckpt is {body['saved_any_dist_ckpt']}, and its contents contradict"
