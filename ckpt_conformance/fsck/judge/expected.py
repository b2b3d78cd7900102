"""What a library writes into each checkpoint: what is missing, by the names that it uses.

Each rule reads the names of one folder and the plain values of some files (`Report.facts`). A file
that the library always writes is missing; one that depends on how it was called is a remark. The
sources are the save functions of the versions that `docs/fsck.md` names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.judge.placed import LIGHTNING
from ckpt_conformance.fsck.layouts.layouts import is_index
from ckpt_conformance.fsck.layouts.names import PIPELINE
from ckpt_conformance.fsck.source.findings import NO_FACTS, Kind, Malformed
from ckpt_conformance.fsck.source.source import EntryKind
from ckpt_conformance.fsck.source.untrusted import MOST_JSON, clip, is_list, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.findings import Facts, Report
    from ckpt_conformance.fsck.source.source import Folder
    from ckpt_conformance.fsck.source.untrusted import Json


class RuleFinding(NamedTuple):
    """What a rule finds about a file, and why."""

    kind: Kind
    file: str
    why: str


_MOST_RANKS = 100_000  # a file may claim any number
_FSDP_CONFIG = "fsdp_config.json"
_STATE, _STEP = "trainer_state.json", "global_step"
_WEIGHTS = re.compile(
    r"(?:adapter_)?model(?:_\d+)?(?:-\d+-of-\d+)?\.safetensors|.*\.index\.json|"
    r"(?:adapter_model|pytorch_model(?:_fsdp)?(?:_\d+)?(?:-\d+-of-\d+)?)\.bin|"
    r"(?:pytorch_model|mp_rank|zero_pp|layer_).*"
)
# A folder inside of a checkpoint is judged if it has one of these, and not only weights or JSON.
_SIGNS = re.compile(
    r"random_states_\d+\.pkl|(?:optimizer|scheduler)(?:_\d+)?\.bin|trainer_state\.json|"
    r"training_args\.bin|(?:optimizer|scheduler)\.pt|.*_(?:optim|model)_states\.pt|"
    r"(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt"
)
_NUMBERED = (
    *(("model", "safetensors"), ("pytorch_model", "bin")),
    *(("optimizer", "bin"), ("scheduler", "bin")),
)
"""What accelerate numbers, of each sort the first without a number."""
_OF_DEEPSPEED = re.compile(r"[^/]*_(?:optim|model)_states\.pt")  # inside of others' folders, too
_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
# Neither JSON nor a format of tensors, so nobody else reads them.
_VOCABULARIES = {
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "vocab.bpe", "bpe.codes", "dict.txt"),
}
_TEXTS = (".json", ".txt", ".md", ".model", ".jinja")  # of a part of a pipeline: no weights
_MOST_LOOKED_AT = 1 << 16  # bytes
_ADAPTER = re.compile(r"adapter_model\.(?:safetensors|bin)")
_STEMS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:\.[^.]+)?\.safetensors|(?:diffusion_)?pytorch_model(?:\.[^.]+)?\.bin"
)
_OF_SEVERAL = re.compile(r"(.+)-\d{5}-of-(\d{5})\.(safetensors|bin)")
_SHARDED = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+/|global_step\d+/|pytorch_model/")


def judge_layout(candidate: Candidate, folder: Folder, report: Report) -> None:
    """Report what is missing of a checkpoint by the rules of its layout; `folder` has its files."""
    _indexes(candidate, report)
    _adapters(candidate, folder, report)
    _vocabularies(candidate, folder, report)
    _pipelines(candidate, folder, report)
    known = {finding.file for finding in report.findings}
    if report.layout == "torch":
        _lightning(candidate, report)
    rule = _RULES.get(report.layout)
    if rule is None:
        return
    folders = _folders(candidate.files)
    signed = {base for base, names in folders.items() if any(map(_SIGNS.fullmatch, names))}
    for base, names in sorted(folders.items()):
        if base not in (signed or {""}):
            continue
        facts = {
            name.removeprefix(base): values
            for name, values in report.facts.items()
            if name.startswith(base)
        }
        own = _deepspeed if any(map(_OF_DEEPSPEED.fullmatch, names)) else rule
        for finding in own(names, facts):
            if base + finding.file not in known:
                report.say(finding.kind, base + finding.file, finding.why)
    _step(candidate, report)


def _indexes(candidate: Candidate, report: Report) -> None:
    """Report a model of transformers or diffusers whose several files have no index."""
    for base, names in _folders(candidate.files).items() if not candidate.is_alone else ():
        own = {name for name in names if "/" not in name}
        if any(map(is_index, own)):
            continue
        sets = {match.groups() for name in own if (match := _OF_SEVERAL.fullmatch(name))}
        for stem, total, ending in sorted(sets):
            if _CONFIG in own or (int(total) > 1 and _STEMS.fullmatch(f"{stem}.{ending}")):
                some = "1 file" if int(total) == 1 else f"{int(total)} files"
                why = f"the index of {some}: without it no library finds the weights"
                report.say(Kind.MISSING, f"{base}{stem}.{ending}.index.json", why)


def _pipelines(candidate: Candidate, folder: Folder, report: Report) -> None:
    """Report what is not there of the parts that the index of a pipeline of diffusers names.

    An entry is a library and a class; without a class the part is left out on purpose.
    """
    for name in candidate.files:
        base, _, last = name.rpartition("/")
        if last != PIPELINE:
            continue
        index = _object_in(name, folder, report)
        if index is None:
            continue
        if "_class_name" not in index:
            why = "it has no _class_name, by which diffusers knows what to make: another's bytes?"
            report.say(Kind.DAMAGED, name, why)
        head = f"{base}/" if base else ""
        for part, value in index.items():
            is_part = is_list(value) and len(value) == 2 and all(value)  # noqa: PLR2004
            if is_part and not part.startswith("_"):
                _part_of_pipeline(candidate, f"{head}{part}/", report)


def _object_in(name: str, folder: Folder, report: Report) -> Json | None:
    """Read a JSON file of a library; None where it is none, or holds something else."""
    try:
        return parse_json(folder.read(name, MOST_JSON))
    except (OSError, Malformed):
        if all(finding.file != name for finding in report.findings):  # else it has been said
            report.say(Kind.DAMAGED, name, "it holds no JSON object, and its library reads one")
        return None


def _part_of_pipeline(candidate: Candidate, base: str, report: Report) -> None:
    """Report a folder that is not there, a model without its weights, and weights alone."""
    own = [name.removeprefix(base) for name in candidate.files if name.startswith(base)]
    if not own:
        report.say(Kind.MISSING, base, f"{PIPELINE} names this part, and its folder is not there")
        return
    has_weights = any(not name.endswith(_TEXTS) for name in own)
    if has_weights and any(map(_STEMS.fullmatch, own)) and _CONFIG not in own:
        why = "it is read before the weights beside it, and says which model they are of"
        report.say(Kind.MISSING, base + _CONFIG, why)
    elif _CONFIG in own and not has_weights:
        why = f"{_CONFIG} says which model this is, and no file has its weights"
        report.say(Kind.MISSING, f"{base}diffusion_pytorch_model.safetensors", why)


def _adapters(candidate: Candidate, folder: Folder, report: Report) -> None:
    """Report an adapter of PEFT without its configuration, which is written beside it each time.

    Of a folder that is no step the files that belong to a checkpoint are those with tensors alone.
    """
    for base, names in _folders(candidate.files).items() if not candidate.is_alone else ():
        is_adapter = any(map(_ADAPTER.fullmatch, names))
        if is_adapter and folder.entry(base + _ADAPTER_CONFIG) is None:
            why = "PEFT writes it beside the adapter, and loads none without it"
            report.say(Kind.MISSING, base + _ADAPTER_CONFIG, why)
        elif is_adapter:
            _object_in(base + _ADAPTER_CONFIG, folder, report)


def _vocabularies(candidate: Candidate, folder: Folder, report: Report) -> None:
    """Report files of a tokenizer that are empty, or zeros alone, as a power loss leaves them."""
    for name in candidate.files:
        entry = folder.entry(name) if name.rpartition("/")[2] in _VOCABULARIES else None
        if entry is None or entry.kind is not EntryKind.FILE:
            continue
        try:
            is_blank = not folder.read(name, _MOST_LOOKED_AT).strip(b"\0")
        except (OSError, Malformed):
            continue  # who judges the file says it
        if is_blank:
            what = "it is empty" if not entry.size else "zeros alone stand at its beginning"
            report.say(Kind.DAMAGED, name, f"{what}, and it holds a vocabulary")


def _folders(files: Collection[str]) -> dict[str, set[str]]:
    """Return the names below each folder that has files of its own, relative to it."""
    folders: dict[str, set[str]] = defaultdict(set)
    for base in {name.rpartition("/")[0] for name in files}:
        head = f"{base}/" if base else ""
        folders[head] = {name.removeprefix(head) for name in files if name.startswith(head)}
    return folders


def _numbered(names: Collection[str], pattern: str, first: int = 0) -> set[int]:
    """Return the numbers in names: one group of digits; a name without them is the first."""
    matches = (re.fullmatch(pattern, name) for name in names)
    return {int(match[1]) if match[1] else first for match in matches if match}


def _gaps(numbers: set[int], first: int = 0) -> Iterator[int]:
    """Yield the numbers that are missing below the largest."""
    if numbers and max(numbers) < _MOST_RANKS:
        yield from sorted(set(range(first, max(numbers))) - numbers)


# -- accelerate ------------------------------------------------------------------------------------


def _accelerate(names: set[str], _: dict[str, Facts]) -> Iterator[RuleFinding]:
    """`save_state` writes models, optimizers, schedulers, then the generators of each rank."""
    ranks = _numbered(names, r"random_states_(\d+)\.pkl")
    if not ranks:
        why = "the generators of no rank are here: they are written last, so the save did not end"
        yield RuleFinding(Kind.MISSING, "random_states_0.pkl", why)
    for rank in _gaps(ranks):
        why = f"the generators of rank {rank}, and those of rank {max(ranks)} are here"
        yield RuleFinding(Kind.MISSING, f"random_states_{rank}.pkl", why)
    for stem, ending in _NUMBERED:
        numbers = _numbered(names, rf"{stem}(?:_(\d+))?\.{ending}")
        for number in _gaps(numbers):
            name = f"{stem}_{number}.{ending}" if number else f"{stem}.{ending}"
            why = f"each {stem} has a file, and number {max(numbers)} is here"
            yield RuleFinding(Kind.MISSING, name, why)
    for number in _gaps(_numbered(names, r"custom_checkpoint_(\d+)\.pkl")):
        why = "an object of register_for_checkpointing: one with a higher number is here"
        yield RuleFinding(Kind.MISSING, f"custom_checkpoint_{number}.pkl", why)
    if not any(_SHARDED.match(name) for name in names):
        yield from _prepared(names)


def _elsewhere(names: set[str]) -> str:
    """Say where weights are that accelerate has not written under a name of its own."""
    inside = {
        name.rpartition("/")[0]
        for name in names
        if "/" in name and name.endswith((".safetensors", ".bin"))
    }
    if not inside:
        return "there are no weights: a hook saved them elsewhere?"
    some = ", ".join(f"{clip(one)}/" for one in sorted(inside)[:5])
    return f"its weights are in {some}: a hook saved them, and has to load them"


def _prepared(names: set[str]) -> Iterator[RuleFinding]:
    """Remark what `save_state` writes only if it was prepared."""
    if not any(_WEIGHTS.fullmatch(name) for name in names):
        yield RuleFinding(Kind.NOTE, "model.safetensors", _elsewhere(names))
    for stem in ("optimizer", "scheduler"):
        if not _numbered(names, rf"{stem}(?:_(\d+))?\.bin"):
            why = f"there is no {stem}: right only if none was prepared; a run with one starts cold"
            yield RuleFinding(Kind.NOTE, f"{stem}.bin", why)


# -- transformers ----------------------------------------------------------------------------------


def _trainer(names: set[str], _: dict[str, Facts]) -> Iterator[RuleFinding]:
    """`Trainer` writes weights, optimizer, scheduler, generators of each rank; its state last."""
    if "trainer_state.json" not in names:
        why = "it is written last, so the save did not end; resuming needs it"
        yield RuleFinding(Kind.MISSING, "trainer_state.json", why)
    sharded = any(_SHARDED.match(name) for name in names)
    if not sharded and not any(_WEIGHTS.fullmatch(name) for name in names):
        why = "there are no weights under any name of transformers"
        yield RuleFinding(Kind.MISSING, "model.safetensors", why)
    ranks = _numbered(names, r"rng_state_(\d+)\.pth")
    for rank in _gaps(ranks):
        why = f"the generators of rank {rank}, and those of rank {max(ranks)} are here"
        yield RuleFinding(Kind.MISSING, f"rng_state_{rank}.pth", why)
    if ranks == {0}:
        why = "a process that saves alone writes rng_state.pth: there were more ranks than one"
        yield RuleFinding(Kind.MISSING, "rng_state_1.pth", why)
    has_rng = bool(ranks) or "rng_state.pth" in names
    parts = {"optimizer.pt": sharded or "optimizer.pt" in names}
    parts |= {"scheduler.pt": sharded or "scheduler.pt" in names, "rng_state.pth": has_rng}
    if not any(parts.values()):
        why = "weights only (save_only_model): a run that resumes here starts its optimizer cold"
        yield RuleFinding(Kind.NOTE, "optimizer.pt", why)
        return
    for name, is_there in parts.items():
        if not is_there:
            why = "transformers would resume without it, and say nothing"
            yield RuleFinding(Kind.MISSING, name, why)


# -- DeepSpeed -------------------------------------------------------------------------------------

_STATES = r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt"
_ZERO = r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt"


def _deepspeed(names: set[str], facts: dict[str, Facts]) -> Iterator[RuleFinding]:
    """ZeRO: a file of model states for each model-parallel rank, of the optimizer for each rank."""
    names = {name for name in names if "/" not in name}
    states = {name for name in names if name.endswith("_model_states.pt")}
    optimizers = {name for name in names if name.endswith("_optim_states.pt")}
    if not states | optimizers:
        return
    if not states:
        why = "there are no states of the model"
        yield RuleFinding(Kind.MISSING, "mp_rank_00_model_states.pt", why)
    data, model = _agreed(facts, "dp_world_size"), _agreed(facts, "mp_world_size")
    plain = _numbered(names, r"mp_rank_(\d+)_model_states\.pt")
    for rank in sorted(set(range(model or 0)) - plain) if plain else ():
        why = f"the states of model-parallel rank {rank} of {model}"
        yield RuleFinding(Kind.MISSING, f"mp_rank_{rank:02d}_model_states.pt", why)
    yield from _no_optimizers(states, optimizers, facts, data or 1)
    for example in sorted(optimizers | states):
        match = re.fullmatch(_ZERO, example)
        if match and match[1] == min(_firsts(names, match), key=int):
            yield from _zero(names, example, match, data)


def _no_optimizers(
    states: set[str], optimizers: set[str], facts: dict[str, Facts], total: int
) -> Iterator[RuleFinding]:
    """Report the optimizer files that are missing where a model-parallel rank has none."""
    has = {match[2] for name in optimizers if (match := re.fullmatch(_ZERO, name))}
    head = {name.partition("zero_pp_rank_")[0] for name in optimizers}
    for name in sorted(states):
        match, known = re.fullmatch(_STATES, name), facts.get(name, NO_FACTS)
        if not match or match[1] in has or not known.has_zero_optimizer:
            continue
        has.add(match[1])
        begin = min(head, default="bf16_" if known.is_bf16 else "")
        for rank in range(total):
            why = f"the optim states of data-parallel rank {rank} of {total}: ZeRO was on"
            gone = f"{begin}zero_pp_rank_{rank}_mp_rank_{match[1]}_optim_states.pt"
            yield RuleFinding(Kind.MISSING, gone, why)


def _firsts(names: set[str], like: re.Match[str]) -> list[str]:
    """Return the data-parallel ranks of the files in the same set as another."""
    matches = (re.fullmatch(_ZERO, name) for name in names)
    return [match[1] for match in matches if match and match.group(2, 3) == like.group(2, 3)]


def _zero(
    names: set[str], example: str, match: re.Match[str], total: int | None
) -> Iterator[RuleFinding]:
    """Report which data-parallel ranks have no file like this one."""
    there = {int(one) for one in _firsts(names, match)}
    wanted = set(range(total or 1 + min(max(there), _MOST_RANKS)))
    for rank in sorted(wanted - there):
        start, end = match.span(1)
        of = f" of {total}" if total else ""
        why = f"the {match[3]} states of data-parallel rank {rank}{of}"
        yield RuleFinding(Kind.MISSING, f"{example[:start]}{rank}{example[end:]}", why)


def _agreed(facts: dict[str, Facts], key: str) -> int | None:
    """Return a number that the files agree on."""
    numbers = {number for known in facts.values() if (number := known.number(key)) is not None}
    value = numbers.pop() if len(numbers) == 1 else None
    return value if value is not None and 0 < value <= _MOST_RANKS else None


# -- verl ------------------------------------------------------------------------------------------


def _verl(names: set[str], facts: dict[str, Facts]) -> Iterator[RuleFinding]:
    """FSDP of verl: model, optimizer and the rest of each rank; the world size is in each name."""
    sets: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        match = re.fullmatch(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt", name)
        if match:
            sets[match[1]][int(match[2])].add(int(match[3]))
    if not sets:
        return
    sizes = sorted({size for by_size in sets.values() for size in by_size})
    if len(sizes) > 1:
        why = f"files of the world sizes {sizes} lie together: another save left some of them"
        yield RuleFinding(Kind.DAMAGED, f"model_world_size_{sizes[-1]}_rank_0.pt", why)
    said = facts.get(_FSDP_CONFIG, NO_FACTS).number("world_size")
    if said is not None and said not in sizes:
        yield _other_size(said, sizes)
    for part in ("model", "optim", "extra_state"):
        if part not in sets:
            why = f"there is no {part} of any rank: right only if save_contents leaves it out"
            yield RuleFinding(Kind.NOTE, f"{part}_world_size_{sizes[-1]}_rank_0.pt", why)


def _other_size(said: int, sizes: list[int]) -> RuleFinding:
    """Report a configuration that says another number of ranks than the names of the files."""
    there = " and ".join(map(str, sizes))
    why = f"it says {clip(said)} ranks, and the names of the files {there}: of another save?"
    return RuleFinding(Kind.DAMAGED, _FSDP_CONFIG, why)


# -- Lightning, and steps --------------------------------------------------------------------------


def _lightning(candidate: Candidate, report: Report) -> None:
    """One file with a version of Lightning in it: the step, and whether it can be resumed."""
    for name, facts in report.facts.items():
        if LIGHTNING not in facts.values:
            continue
        report.layout = "lightning"
        step = facts.number("global_step")
        if step is not None and report.step is None:
            report.step = step
        elif step is not None and "step=" in name and step != candidate.step:
            name_says = f"its name says {candidate.step}: renamed, or another's"
            why = f"its global_step is {step}, and {name_says}"
            report.say(Kind.NOTE, name, why)
        absent = {"optimizer_states", "lr_schedulers", "loops"} - {*facts.values}
        if absent:
            why = f"it has no {', '.join(sorted(absent))}: weights only, it can't be resumed from"
            report.say(Kind.NOTE, name, why)


def _step(candidate: Candidate, report: Report) -> None:
    """Check the step that a file says against the name of the folder."""
    said = {finding.file for finding in report.findings}
    for name in candidate.files:
        is_state = name.rpartition("/")[2] == _STATE and name not in said
        if is_state and _STEP not in report.facts.get(name, NO_FACTS).values:
            why = f"it has no {_STEP}, which the Trainer always writes: another's bytes?"
            report.say(Kind.DAMAGED, name, why)
    for name, facts in report.facts.items():
        step = facts.number(_STEP) if name.endswith("trainer_state.json") else None
        if None not in (step, candidate.step) and step != candidate.step:
            why = (
                f"it is of step {clip(step)}, and the name says {candidate.step}: another's bytes?"
            )
            report.say(Kind.DAMAGED, name, why)


_RULES: dict[str, Callable[[set[str], dict[str, Facts]], Iterator[RuleFinding]]] = {
    "accelerate": _accelerate,
    "transformers-trainer": _trainer,
    "deepspeed": _deepspeed,
    "verl-fsdp": _verl,
}
