"""What the names of files tell: whose a folder is, what a file should be, what is missing of a set.

Sets number themselves: `model_world_size_4_rank_2.pt` (verl, FSDP), and
`model-00002-of-00003.safetensors` (Hugging Face, also without its index).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats.hf_shards import is_shard
from ckpt_conformance.fsck.formats.manifest_v2 import MANIFEST
from ckpt_conformance.fsck.layouts import step_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

# Only names that a script would not use by chance: the rules of the library decide what is missing.
_LAYOUTS = (
    (
        "transformers-trainer",
        re.compile(r"/trainer_state\.json$|/checkpoint-\d+/training_args\.bin$"),
    ),
    (
        "accelerate",
        re.compile(
            r"/random_states_\d+\.pkl$|"
            r"^checkpoints/checkpoint_\d+/(?:optimizer|scheduler)(?:_\d+)?\.bin$"
        ),
    ),
    ("deepspeed", re.compile(r"mp_rank_\d+(?:_.*)?_model_states\.pt$|_optim_states\.pt$")),
    ("verl-fsdp", re.compile(r"(?:model|optim)_world_size_\d+_rank_\d+\.pt$")),
)

_ACCELERATE = re.compile(r"random_states_\d+\.pkl")
_TRAINER = "trainer_state.json"
_OF_TRAINER = re.compile(r"checkpoint-\d+")
_BESIDE_STATE = re.compile(
    r"(?P<more>training_args\.bin|(?:optimizer|scheduler)\.pt|rng_state(?:_\d+)?\.pth)|"
    r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors|pytorch_model(?:-\d+-of-\d+)?\.bin"
)
_WEIGHTS = re.compile(
    r"model(?:_\d+)?(?:-\d+-of-\d+)?\.safetensors|pytorch_model(?:_\d+)?(?:-\d+-of-\d+)?\.bin"
)
_SHARDS = re.compile(r"global_step\d+")  # DeepSpeed's

# Names that a script would not use for anything else.
_ALWAYS = re.compile(
    r"(?:pytorch_model|adapter_model)(?:_\d+)?(?:-\d+-of-\d+)?\.bin|"
    r"pytorch_model_fsdp(?:_\d+)?\.bin|training_args\.bin|random_states_\d+\.pkl"
)
# These are common words: they are a library's only beside others of its files.
_AMONG_OTHERS = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin|(custom_checkpoint)_\d+\.pkl"
)


def library(paths: Iterable[str]) -> str:
    """Name the library by files, each with its folder and the one above; nothing for none."""
    known = list(paths)
    found = next((name for name, one in _LAYOUTS if any(map(one.search, known))), "")
    if found:
        return found
    folders: dict[str, set[str]] = defaultdict(set)
    for path in known:
        folder, _, name = path.rpartition("/")
        folders[folder].add(name)
    if any(_is_trainers(folder, names) for folder, names in folders.items()):
        return "transformers-trainer"
    return "accelerate" if any(map(_is_accelerates, folders.values())) else ""


def _is_trainers(folder: str, names: Iterable[str]) -> bool:
    """Return whether a folder is the Trainer's by its name, though what it writes last is missing.

    Weights, and what to resume from under the Trainer's names, which no other library has there.
    """
    names = list(names)
    is_named = _OF_TRAINER.fullmatch(folder.rpartition("/")[2]) is not None
    matches = filter(None, map(_BESIDE_STATE.fullmatch, names))
    return is_named and any(match["more"] for match in matches) and any(map(is_weights, names))


def is_weights(name: str) -> bool:
    """Return whether a file holds the weights of a model, or of an adapter, by transformers."""
    return _WEIGHTS.fullmatch(name.removeprefix("adapter_")) is not None


def _is_accelerates(names: Iterable[str]) -> bool:
    """Return whether names are accelerate's, though its own, that of the generators, is missing.

    Weights, and two more sorts that may each be chance; no file has an ending that it never writes.
    """
    names = list(names)
    matches = map(_AMONG_OTHERS.fullmatch, names)
    sorts = {match[1] or match[2] for match in matches if match}
    is_foreign = any(name.endswith((".pt", ".pth", ".ckpt")) for name in names)
    return len(sorts) > 1 and not is_foreign and any(map(_WEIGHTS.fullmatch, names))


def is_signed(names: Collection[str]) -> bool:
    """Return whether a folder is one checkpoint by the names in it, whatever its own name is.

    The Trainer writes its state into the folder of the whole run, too, without anything beside it.
    """
    is_trainers = _TRAINER in names and any(map(_BESIDE_STATE.fullmatch, names))
    return is_trainers or any(map(_ACCELERATE.fullmatch, names)) or _is_accelerates(names)


PIPELINE = "model_index.json"
"""What diffusers writes beside the folders of the parts of a pipeline."""
_OF_NANOTRON = "checkpoint_metadata.json"  # others have a file of that name, too
_MODEL_OF_NANOTRON, _MORE_OF_NANOTRON = "model", {"optimizer", "lr_scheduler", "random"}
_OF_NEMO = {"weights", "context"}
_RANK_FOLDER = re.compile(r"mp_rank_\d{2}(?:_\d{3}){0,2}")
_OF_RANK_FOLDER = {"model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt"}


def is_of_parts(names: Collection[str], inner: Collection[str]) -> bool:
    """Return whether a folder is one checkpoint with a folder for each part of it.

    A pipeline of diffusers, a step of nanotron, one of NeMo 2.
    """
    has_model = _OF_NANOTRON in names and _MODEL_OF_NANOTRON in inner
    is_nanotrons = has_model and not _MORE_OF_NANOTRON.isdisjoint(inner)
    return bool(inner) and (PIPELINE in names or is_nanotrons or _OF_NEMO.issubset(inner))


def is_rank(folder: str) -> bool:
    """Return whether a folder is that of one rank, by Megatron-LM."""
    return _RANK_FOLDER.fullmatch(folder) is not None


def is_of_rank(name: str) -> bool:
    """Return whether a file is what Megatron-LM writes into the folder of a rank."""
    return name in _OF_RANK_FOLDER


_OF_SPEECHBRAIN = "CKPT.yaml"


def is_speechbrains(names: Collection[str]) -> bool:
    """Return whether SpeechBrain saved a folder, whatever its own name is."""
    return _OF_SPEECHBRAIN in names


def maybe_texts(names: Collection[str]) -> Iterator[str]:
    """Yield names that end as those of torch, and may be texts: SpeechBrain's counters."""
    if is_speechbrains(names):
        yield from (name for name in names if name.endswith(".ckpt"))


def is_sharded(folder: str) -> bool:
    """Return whether a folder is one of shards, inside of a library's checkpoint."""
    return _SHARDS.fullmatch(folder) is not None


def is_torch(name: str, *, by_library: bool) -> bool:
    """Return whether a name, without its folder, is one that a library writes by `torch.save`.

    `by_library` says that the folder is known as one that a library wrote.
    """
    return bool(_ALWAYS.fullmatch(name) or (by_library and _AMONG_OTHERS.fullmatch(name)))


# -- files that number themselves ------------------------------------------------------------------

_MOST_RANKS = 100_000  # a name may claim any number
_RANK = re.compile(r"(?P<head>.*world_size_)(?P<all>\d+)(?P<middle>_rank_)(?P<one>\d+)(?P<tail>.*)")
_OF = "-of-"
_NUMBERED = re.compile(rf"(?P<head>.*-)(?P<one>\d+)(?P<middle>{_OF})(?P<all>\d+)(?P<tail>\..*)")
_OF_SOME = re.compile(  # a script's own: model_rank_3_of_4.pt, shard-0-of-8.safetensors
    r"(?P<head>(?:.*[._/-])?(?:rank|shard|part|split)[_-]?)(?P<one>\d{1,6})"
    r"(?P<middle>[_-]of[_-])(?P<all>\d{1,6})(?P<tail>\.[^/]*)"
)
_OF_A_GRID = tuple(  # Picotron's: weights_tp_rank_world_size=0_2_pp_rank_world_size=0_1.pth
    re.compile(
        rf"(?P<head>(?:.*_)?{axis}_rank_world_size=)(?P<one>\d+)(?P<middle>_)(?P<all>\d+)(?P<tail>\D.*)"
    )
    for axis in ("tp", "pp")
)

# A script's own: nothing says how many there are.
_OF_A_RANK = re.compile(r"(?P<head>(?:.*[._/-])?rank[-_]?)(?P<one>\d{1,6})(?P<tail>\D.*|)")


def missing_ranks(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the same of files whose names say a rank, and not how many there are.

    Those between the first, which is there, and the last that is: a number behind the word may be
    another one, and adapters of the ranks 8 and 16 have no first.
    """
    families: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in names:
        if one := of_a_rank(name):
            families[one.family][one.rank] = name
    for (head, tail), there in sorted(families.items()):
        count = max(there) + 1
        if 0 not in there or count > _MOST_RANKS:
            continue
        width = len(there[0]) - len(head) - len(tail)
        for rank in sorted(set(range(count)) - there.keys()):
            yield f"{head}{rank:0{width}d}{tail}", count


class OfARank(NamedTuple):
    """A file of one rank: what the names of all ranks have in common, and its number."""

    family: tuple[str, str]
    rank: int


def of_a_rank(name: str) -> OfARank | None:
    """Return which rank's a file is, where its name says that and no world size."""
    match = None if _RANK.fullmatch(name) else _OF_A_RANK.fullmatch(name)
    return OfARank((match["head"], match["tail"]), int(match["one"])) if match else None


def world_size(names: Iterable[str]) -> int | None:
    """Return the world size in the names of files; None where none has it, or they disagree."""
    said = {int(match["all"]) for name in names if (match := _RANK.fullmatch(name))}
    return said.pop() if len(said) == 1 else None


def missing(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the names that are missing, each with how many there should be."""
    groups: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in names:
        if is_shard(name.rpartition("/")[2]):
            continue  # a rank may have none of a number
        for pattern in (_RANK, _OF_SOME if _OF_SOME.fullmatch(name) else _NUMBERED, *_OF_A_GRID):
            match = pattern.fullmatch(name)
            is_step = pattern is _NUMBERED and step_names.is_of_so_many(name)
            if match and int(match["all"]) <= _MOST_RANKS and not is_step:
                width = len(match["one"]) if pattern in (_NUMBERED, _OF_SOME) else 0
                parts = (match["head"], match["all"], match["middle"], match["tail"])
                groups[*parts, "" if pattern is _RANK else "before", str(width)].add(name)
    for (head, total, middle, tail, is_before, digits), there in sorted(groups.items()):
        first, count = 0, int(total)
        zeroth = "".join((head, f"{0:0{digits}d}", middle, total, tail))
        if "of" in middle and zeroth not in there:  # nanotron counts from 0
            first = 1
        for number in range(first, first + count):
            own = f"{number:0{digits}d}"
            order = (own, middle, total) if is_before else (total, middle, own)
            name = "".join((head, *order, tail))
            if name not in there:
                yield name, count


# -- Megatron of verl ------------------------------------------------------------------------------

V2, PRE_V2 = "verl-megatron", "verl-megatron-pre-v2"
FOLDER = "dist_ckpt"
SPLIT = ("model", "optimizer", "extra")
"""The folders of v2, in the order in which they are written."""

_OF_V2 = re.compile(rf"((?:.*/)?)(?:{MANIFEST}|(?:{'|'.join(SPLIT)})/{FOLDER}(?:/.*)?)")
_BEFORE_V2 = re.compile(rf"((?:.*/)?){FOLDER}/.*")


def megatron_layout(files: Collection[str], name: str) -> str:
    """Name the layout by the files of a checkpoint; nothing where it is none of these."""
    v2, old = megatron_bases(files)
    if v2:
        return V2
    return PRE_V2 if old - ({""} if name in SPLIT else set()) else ""


def megatron_bases(files: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the folders with the layout v2, and those with the layout before it."""
    v2, old = set[str](), set[str]()
    for name in files:
        if match := _OF_V2.fullmatch(name):
            v2.add(match[1])
        elif match := _BEFORE_V2.fullmatch(name):
            old.add(match[1])
    return v2, old - v2 - {f"{base}{one}/" for base in v2 for one in SPLIT}


# -- roles of verl ---------------------------------------------------------------------------------

_OF_A_ROLE = re.compile(r"([^/]+)/(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt")


def roles(files: Collection[str]) -> set[str]:
    """Return the folders of a step that verl wrote for each role, as `actor`; none without any."""
    v2, old = megatron_bases(files)
    bases = {base.rstrip("/") for base in v2 | old}
    bases |= {match[1] for match in map(_OF_A_ROLE.fullmatch, files) if match}
    return {base for base in bases if base and "/" not in base}
