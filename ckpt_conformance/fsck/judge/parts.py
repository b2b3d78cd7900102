"""Judge the files of a checkpoint: those of torch, safetensors, JSON, an index.

Each function reads the structure at once, adds what is wrong with it to the report, and gives the
work that is left: bytes to hold against digests and CRCs.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import (
    safetensors_file,
    torch_file,
)
from ckpt_conformance.fsck.judge.ages import UPDATES
from ckpt_conformance.fsck.judge.looks import no_archive
from ckpt_conformance.fsck.judge.roles import held
from ckpt_conformance.fsck.layouts import names
from ckpt_conformance.fsck.source.findings import (
    Facts,
    Finding,
    Kind,
    Malformed,
    Tensors,
    Topic,
)
from ckpt_conformance.fsck.source.sums import (
    Work,
    unreadable,
    works_of,
)
from ckpt_conformance.fsck.source.untrusted import (
    MOST_JSON,
    clip,
    is_dict,
    is_json_lines,
    is_list,
    object_or_empty,
    parse_any_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_conformance.fsck.judge.context import Context

_MOST_FACTS = 200
_MOST_COUNTED = 1 << 62  # elements: a tensor with strides of 0 may claim more than JSON has numbers


# -- single files ----------------------------------------------------------------------------------


def torch_part(context: Context, name: str) -> list[Work]:
    """Judge one file of `torch.save`."""
    archive = _archive(context, name)
    if archive is None:
        return []
    context.report.ties += ties_of(archive.tensors)
    return works_of(context.folder, name, archive.spans, context.sizes)


def _archive(context: Context, name: str) -> torch_file.Archive | None:
    """Read all of a file of `torch.save` but its payload; None, and a finding, where that fails."""
    folder, report = context.folder, context.report
    try:
        with folder.open(name) as file:
            archive = torch_file.read(file, 0, folder.size(name))
            inside = held(file, archive)
    except (OSError, Malformed) as error:
        report.findings += no_archive(folder, name, unreadable(name, error))
        return None
    report.tensors += len(archive.tensors)
    tensors = tensors_in((one.name, one.shape) for one in archive.tensors)
    _require_elements(context, name, tensors)
    report.structure += archive.overhead
    known = facts_of(name, archive.tree).get(name, Facts())
    report.facts[name] = replace(known, held=inside, tensors=tensors)
    report.findings += problems_of(name, archive)
    if archive.unsummed:
        what = f"{len(archive.unsummed)} records have no CRC: torch was told to compute none"
        report.say(Kind.NOTE, name, what, topic=Topic.NO_CHECKSUM)
    return archive


def facts_of(name: str, tree: object) -> dict[str, Facts]:
    """Note what the top of a structure says, by the name of its file; nothing of a large one.

    Of fairseq how many updates there were: it counts them in the history of its optimizers.
    """
    if not is_dict(tree) or len(tree) > _MOST_FACTS:
        return {}
    values = {
        str(key): value if isinstance(value, bool | int | float | str) else None
        for key, value in tree.items()
    }
    history = tree.get("optimizer_history")
    if is_list(history) and history and is_dict(last := history[-1]):
        updates = last.get(UPDATES)
        values[UPDATES] = updates if type(updates) is int else None
    if name.endswith("_model_states.pt"):
        return {name: Facts(values, *_zero_facts(tree))}
    return {name: Facts(values)}


def _zero_facts(tree: dict[object, object]) -> tuple[bool, bool]:
    """Return whether DeepSpeed's optimizer is in files of its own, and whether bf16 was on.

    It writes the shapes of the parameters there only if ZeRO, or bf16, keeps the optimizer's states
    in files of their own. The name of those begins with `bf16_` if that is on.
    """
    config = object_or_empty(tree.get("ds_config"))
    bf16 = object_or_empty(config.get("bf16", config.get("bfloat16")))
    return tree.get("param_shapes") is not None, bf16.get("enabled") is True


def ties_of(tensors: Iterable[torch_file.Tensor]) -> int:
    """Count groups of tensors that show the same bytes in the same way."""
    places = Counter(
        (tensor.record, tensor.first, tensor.last, tensor.shape, tensor.stride)
        for tensor in tensors
        if tensor.last > tensor.first
    )
    return sum(names > 1 for names in places.values())


def problems_of(name: str, archive: torch_file.Archive, key: str = "") -> list[Finding]:
    """Return what is wrong inside an archive; `key` is the tensor that it is the chunk of."""
    return [
        Finding(
            one.kind, name, one.what, (key,) if key else one.tensors, one.start, one.end, one.name
        )
        for one in archive.problems
    ]


def safetensors_part(context: Context, name: str) -> None:
    """Judge one safetensors file; nothing protects its payload."""
    _header(context, name)


def _header(context: Context, name: str) -> list[safetensors_file.Stored]:
    """Read the header of a safetensors file; nothing, and a finding, where that fails."""
    try:
        with context.folder.open(name) as file:
            header = safetensors_file.read(file)
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return []
    context.report.tensors += len(header)
    tensors = tensors_in((stored.name, stored.shape) for stored in header)
    context.report.facts[name] = Facts(tensors=tensors)
    _require_elements(context, name, tensors)
    return header


def tensors_in(found: Iterable[tuple[str, Sequence[int]]]) -> Tensors:
    """Return which tensors there are, by name and shape."""
    known = {name: tuple(shape) for name, shape in found}
    mark = hashlib.blake2b(repr(sorted(known.items())).encode("utf-8", "replace"), digest_size=8)
    return Tensors(min(sum(map(math.prod, known.values())), _MOST_COUNTED), mark.hexdigest())


def _require_elements(context: Context, name: str, tensors: Tensors) -> None:
    """Report weights of a library without an element: a load gives a model that nobody trained.

    ZeRO-3 that was not gathered gives tensors of the shape [0], FSDP an empty dict on most ranks.
    """
    if names.is_weights(name.rpartition("/")[2]) and not tensors.elements:
        why = "no tensor in it has an element: were the weights not gathered, or saved elsewhere?"
        context.report.say(Kind.MISSING, name, why)


def json_part(context: Context, name: str) -> None:
    """Judge a JSON file of any library: it is text, and it is JSON."""
    data = b""
    try:
        data = context.folder.read(name, MOST_JSON)
        value = parse_any_json(data)
    except (OSError, Malformed) as error:
        if is_json_lines(data):
            return
        context.refuse(name, error)
        return
    context.report.facts |= facts_of(name, value)


# -- links -----------------------------------------------------------------------------------------


def link_part(context: Context, name: str) -> None:
    """Report where a link leads; what it leads to is not judged."""
    where = context.folder.root / name
    if isinstance(where, Path) and not where.exists():
        what = f"a symbolic link to {where.readlink()}, which is not there"
        context.report.say(Kind.MISSING, name, what)
    else:
        what = f"{context.folder.link_problem(name)}: give the path that it leads to"
        context.report.say(Kind.DAMAGED, name, what, topic=Topic.LINK)


# -- the index of Hugging Face ---------------------------------------------------------------------


def index_part(context: Context, base: str, name: str) -> list[Work]:
    """Judge an index and the files that it names."""
    try:
        index = safetensors_file.read_index(context.folder.read(base + name, MOST_JSON))
    except (OSError, Malformed) as error:
        context.refuse(base + name, error)
        return []
    works: list[Work] = []
    size = 0
    for file_name, expected in sorted(index.files.items()):
        stored, more = _tensors_of(context, base + file_name)
        works += more
        size += sum(stored.values())
        if stored or context.folder.entry(base + file_name):
            _compare(context, name, base + file_name, expected, set(stored))
    total = index.total_size
    if total is not None and total != size and not context.report.findings:
        what = f"total_size is {clip(total)}, and the tensors have {size} bytes"
        context.report.say(Kind.NOTE, base + name, what)
    return works


def _tensors_of(context: Context, name: str) -> tuple[dict[str, int], list[Work]]:
    """Return the tensors of a file with their bytes, whichever format it has."""
    if name.endswith(".safetensors"):
        return {stored.name: stored.end - stored.start for stored in _header(context, name)}, []
    archive = _archive(context, name)
    if archive is None:
        return {}, []
    sizes = {tensor.name: tensor.last - tensor.first for tensor in archive.tensors}
    return sizes, works_of(context.folder, name, archive.spans, context.sizes)


def _compare(context: Context, index: str, file: str, expected: set[str], stored: set[str]) -> None:
    """Check what the index says of a file against what the file holds."""
    if not stored:
        return  # its own finding says why
    absent, extra = sorted(expected - stored), sorted(stored - expected)
    if absent:
        what = f"{index} says that it holds {clip(absent[0])}, and it does not ({len(absent)} so)"
        context.report.say(Kind.DAMAGED, file, what, absent)
    if extra:
        what = f"it holds {clip(extra[0])}, which {index} does not place there ({len(extra)} so)"
        context.report.say(Kind.DAMAGED, file, what, extra)
