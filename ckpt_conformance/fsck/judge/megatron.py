"""The Megatron layouts of verl: schema v2 with its manifest, and the one before it.

What is asked for is what verl's documentation promises: the manifest is written last and names all
that was saved; the optimizer and the rest have folders of their own. Of a folder of Megatron's
`dist_checkpointing` it is what that package says of itself: `metadata.json` is written last and
names the formats, `common.pt` holds what is not sharded. Shards and weights are judged as such.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import dcp, manifest_v2
from ckpt_conformance.fsck.formats.manifest_v2 import DIST, HF, JSON, MANIFEST
from ckpt_conformance.fsck.judge.parts import json_part
from ckpt_conformance.fsck.layouts.names import FOLDER, PRE_V2, SPLIT, V2, megatron_bases
from ckpt_conformance.fsck.source.findings import NO_FACTS, Kind, Malformed
from ckpt_conformance.fsck.source.source import EntryKind
from ckpt_conformance.fsck.source.untrusted import clip, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckpt_conformance.fsck.formats.manifest_v2 import Content, Manifest
    from ckpt_conformance.fsck.judge.context import Context
    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.findings import Plain

_CONFIG, _COMMON = "metadata.json", "common.pt"
_MOST_BYTES = 16 << 20
_WEIGHTS = re.compile(r".*\.safetensors|.*\.bin|.*\.index\.json")
_TOKENS = re.compile(r".*(?:token|vocab|merges|processor|\.model$|\.tiktoken$).*")


@dataclass(frozen=True)
class _Role:
    """One folder that verl saves into, as `actor/`; names are relative to it."""

    context: Context
    base: str
    files: frozenset[str]

    def say(self, kind: Kind, name: str, why: str) -> None:
        """Add a finding, unless something else was said of the file that keeps it from use."""
        known = self.context.report.findings
        if not any(one.file == self.base + name and one.kind is not Kind.NOTE for one in known):
            self.context.report.say(kind, self.base + name, why)

    def below(self, folder: str) -> set[str]:
        """Return the names below a folder, relative to it."""
        head = f"{folder}/"
        return {name.removeprefix(head) for name in self.files if name.startswith(head)}

    def has(self, name: str) -> bool:
        """Return whether there is a file, a folder with one, or a link that leads somewhere."""
        return bool(self.below(name)) or (name in self.files and self._leads(name))

    def _leads(self, name: str) -> bool:
        folder = self.context.folder
        entry = folder.entry(self.base + name)
        if entry is None or entry.kind is not EntryKind.LINK:
            return True
        try:
            return bool(folder.listing(self.base + name))
        except (OSError, Malformed):
            return False

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files below a folder: copies and links of one have the same."""
        entries = {
            name: self.context.folder.entry(f"{self.base}{folder}/{name}")
            for name in self.below(folder)
        }
        return {name: one.size for name, one in entries.items() if one is not None}

    def facts(self, name: str) -> dict[str, Plain | None]:
        """Return the keys at the top of a file that was read, with the values that are plain."""
        return self.context.report.facts.get(self.base + name, NO_FACTS).values


def judge_megatron(context: Context, candidate: Candidate) -> None:
    """Judge what a checkpoint of verl should hold; nothing for any other."""
    if candidate.layout not in (V2, PRE_V2):
        _of_megatron(context, candidate)
        return
    v2, old = megatron_bases(candidate.files)
    for base in sorted(v2 | old):
        names = frozenset(
            name.removeprefix(base) for name in candidate.files if name.startswith(base)
        )
        role = _Role(context, base, names)
        if base in old:
            _before_v2(role)
        elif MANIFEST in names:
            _by_manifest(role, candidate)
        else:
            _without_manifest(role)
        for folder in sorted(_dist_folders(names)):
            _dist(role, folder)


def _of_megatron(context: Context, candidate: Candidate) -> None:
    """Ask for what Megatron-LM itself writes into a step: `iter_0000010`, without any role."""
    for base in sorted({name.rpartition("/")[0] for name in candidate.files if _ends_so(name)}):
        own = PurePosixPath(base).name or candidate.root.resolve().name
        head = f"{base}/" if base else ""
        files = {one.removeprefix(head) for one in candidate.files if one.startswith(head)}
        facts = context.report.facts.get(f"{head}{_CONFIG}", NO_FACTS).values
        is_said = isinstance(facts.get("sharded_backend"), str)
        is_named = _ITERATION.fullmatch(own) and {dcp.METADATA, _COMMON} <= files
        role = _Role(context, head, frozenset(files))
        for name, why in _demanded(facts) if is_said or is_named else ():
            if name not in files:
                role.say(Kind.MISSING, name, why)


_ITERATION = re.compile(r"iter_\d{7}")


def _ends_so(name: str) -> bool:
    return name.rpartition("/")[2] in (_CONFIG, _COMMON)


def _dist_folders(names: Iterable[str]) -> set[str]:
    """Return the folders of Megatron's format."""
    matches = (re.fullmatch(rf"((?:.*/)?{FOLDER})/[^/]+", name) for name in names)
    return {match[1] for match in matches if match}


def _before_v2(role: _Role) -> None:
    why = (
        "the layout before v2: verl of today refuses it; migrate it by its script "
        "migrate_megatron_checkpoint_layout.py"
    )
    role.context.report.say(Kind.NOTE, role.base + FOLDER, why)


# -- by the manifest -------------------------------------------------------------------------------


def _by_manifest(role: _Role, candidate: Candidate) -> None:
    """Check the manifest against itself, and the folder against the manifest."""
    report, name = role.context.report, role.base + MANIFEST
    try:
        body = parse_json(role.context.folder.read(name, _MOST_BYTES))
    except (OSError, Malformed) as error:
        role.context.refuse(name, error)
        return
    manifest = manifest_v2.read(body)
    if manifest.version not in (None, manifest_v2.VERSION):
        why = f"its schema version is {manifest.version}, and {manifest_v2.VERSION} is known here"
        report.say(Kind.UNKNOWN, name, why)
        return
    for why in manifest_v2.contradictions(body, candidate.step):
        report.say(Kind.DAMAGED, name, why)
    if report.world_size is None:
        report.world_size = manifest.world_size
    for content in manifest.contents:
        _content(role, content, is_peft=manifest.is_peft)
    for folder in manifest.folders:
        if not role.has(folder):
            role.say(Kind.MISSING, folder, f"{MANIFEST} lists this folder: nothing is in it")
    _strangers(role, manifest)


def _content(role: _Role, content: Content, *, is_peft: bool) -> None:
    """Look for one content, and for what its format demands."""
    what, path, form = content.name, content.path, content.form
    if path is None:
        return  # it is a contradiction of the manifest
    if not role.has(path):
        role.say(Kind.MISSING, path, f"{MANIFEST} says that {clip(what)} is here")
    elif form == HF:
        _huggingface(role, what, path, is_peft=is_peft)
    elif form == DIST:
        _key(role, what, path, content.key)
    elif form == JSON and not path.endswith(".json"):
        json_part(role.context, role.base + path)
    elif form != JSON:
        why = f"the format of {clip(what)} is {clip(form)}, which is not known here: not judged"
        role.say(Kind.UNKNOWN, path, why)


def _huggingface(role: _Role, what: str, path: str, *, is_peft: bool) -> None:
    """Ask for weights, configuration and tokenizer of Hugging Face."""
    names = role.below(path)
    if not names:
        return  # a link: judged where it leads
    if "config.json" not in names:
        role.say(Kind.MISSING, f"{path}/config.json", "it belongs to every export of Hugging Face")
    tops = {name for name in names if "/" not in name}
    if what in ("model", "hf_model") and not is_peft and not any(map(_WEIGHTS.fullmatch, tops)):
        why = f"{MANIFEST} says that {what} is in this folder, and there are no weights"
        role.say(Kind.MISSING, f"{path}/model.safetensors", why)
    if what == "tokenizer" and not any(map(_TOKENS.fullmatch, tops)):
        why = f"{MANIFEST} says that the tokenizer is in this folder, and nothing of one is there"
        role.say(Kind.MISSING, f"{path}/tokenizer.json", why)


def _key(role: _Role, what: str, path: str, key: str | None) -> None:
    """Look for the key that a content has in its folder: another's shards lack it."""
    common, sharded = role.facts(f"{path}/{_COMMON}"), role.facts(f"{path}/{dcp.METADATA}")
    if key is None or not common or not sharded or key in common or key in sharded:
        return
    some = ", ".join(clip(one) for one in sorted({*common, *sharded})[:5])
    why = f"{MANIFEST} says that it holds {clip(what)} as {clip(key)}; it holds {some}: another's?"
    role.say(Kind.DAMAGED, f"{path}/{dcp.METADATA}", why)


def _strangers(role: _Role, manifest: Manifest) -> None:
    """Remark folders of Megatron's format that the manifest does not name."""
    for folder in sorted(_dist_folders(role.files) - manifest.named):
        why = f"nothing in {MANIFEST} refers to this folder: another save left it?"
        role.context.report.say(Kind.NOTE, role.base + folder, why)


# -- without one -----------------------------------------------------------------------------------


def _without_manifest(role: _Role) -> None:
    """Judge by the folders whether a save did not end, or a migration, which has no manifest."""
    trees = {tree: role.sizes(f"{tree}/{FOLDER}") for tree in SPLIT}
    linked = {tree for tree in SPLIT if f"{tree}/{FOLDER}" in role.files}
    origin = role.sizes(FOLDER) or trees["model"]
    short = [tree for tree in SPLIT if tree not in linked and trees[tree] != origin]
    if not short and origin:
        why = "migrated from the layout before v2 by verl's script, which writes no manifest"
        role.context.report.say(Kind.NOTE, role.base + MANIFEST, why)
        _moved(role, linked)
    elif role.below(FOLDER):
        for tree in short:
            lacks = _lacking({name for name in origin if trees[tree].get(name) != origin[name]})
            why = f"the migration did not end: {lacks}; migrate it again"
            role.say(Kind.MISSING, f"{tree}/{FOLDER}", why)
    else:
        why = "it is missing, and it is written last: the save did not end"
        role.say(Kind.MISSING, MANIFEST, why)


def _moved(role: _Role, linked: set[str]) -> None:
    """Ask for the end of a migration: links that lead somewhere, the weights in their new place."""
    for tree in sorted(linked):
        if not role.has(f"{tree}/{FOLDER}"):
            role.say(Kind.MISSING, f"{tree}/{FOLDER}", "the link leads nowhere")
    if role.below(HF):
        why = f"the migration did not end: {HF}/ is still where it was before"
        role.say(Kind.MISSING, f"model/{HF}", why)


def _lacking(names: set[str]) -> str:
    some = ", ".join(clip(one) for one in sorted(names)[:3])
    return f"{len(names)} files of {FOLDER} are not here as they are there ({some})"


# -- folders of Megatron ---------------------------------------------------------------------------


def _dist(role: _Role, folder: str) -> None:
    """Ask for what a folder of `dist_checkpointing` always has."""
    config = f"{folder}/{_CONFIG}"
    for name, why in _demanded(role.facts(config)):
        if name not in role.below(folder):
            role.say(Kind.MISSING, f"{folder}/{name}", why)
    backend = role.facts(config).get("sharded_backend")
    if config in role.files and not isinstance(backend, str):
        role.say(Kind.DAMAGED, config, "it does not say the format of the shards")


def _demanded(facts: Mapping[str, Plain | None]) -> Iterator[tuple[str, str]]:
    """Yield the files that the formats demand which the configuration names, each with why."""
    yield _CONFIG, "it is written last: the save did not end; Megatron refuses the folder"
    if facts.get("sharded_backend", "torch_dist") == "torch_dist":
        yield dcp.METADATA, "it says where each tensor lies: no shard of this folder can be read"
    if facts.get("common_backend", "torch") == "torch":
        yield _COMMON, "it holds what is not sharded, and loading begins with it"
