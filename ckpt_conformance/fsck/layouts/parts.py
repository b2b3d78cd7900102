"""Judge the files of a checkpoint: torch, safetensors, JSON, and the index of Hugging Face.

Each function reads the structure at once, adds what is wrong with it to the report, and gives the
work that is left: bytes to hold against digests and CRCs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import raw_pickles, safetensors_file, torch_file
from ckpt_conformance.fsck.source.findings import Facts, Finding, Kind, Malformed
from ckpt_conformance.fsck.source.sums import DIVIDED, Sizes, Work, unreadable, works_of
from ckpt_conformance.fsck.source.untrusted import (
    MOST_JSON,
    clip,
    is_dict,
    object_or_empty,
    parse_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.source import Folder

_MOST_FACTS = 200
# Files that are instances of classes of the library that wrote them: it loads them as such.
_OWN = {
    "training_args.bin": ("transformers", "accelerate"),
    "_optim_states.pt": ("deepspeed",),
    "_model_states.pt": ("deepspeed",),
}


@dataclass(frozen=True)
class Context:
    """What the parts of one checkpoint share: folder, report, and how work is divided."""

    folder: Folder
    report: Report
    sizes: Sizes = DIVIDED

    def refuse(self, name: str, error: OSError | Malformed) -> None:
        """Add that a file could not be read."""
        self.report.findings.append(unreadable(name, error))


# -- single files ----------------------------------------------------------------------------------


def torch_part(context: Context, name: str) -> list[Work]:
    """Judge one file of `torch.save`."""
    archive = _archive(context, name)
    if archive is None:
        return []
    context.report.tensors += len(archive.tensors)
    context.report.ties += ties_of(archive.tensors)
    return works_of(context.folder, name, archive.spans, context.sizes)


def _archive(context: Context, name: str) -> torch_file.Archive | None:
    """Read all of a file of `torch.save` but its payload."""
    try:
        with context.folder.open(name) as file:
            own = next((tops for end, tops in _OWN.items() if name.endswith(end)), ())
            archive = torch_file.read(file, 0, context.folder.size(name), own)
    except torch_file.Legacy as error:
        context.report.say(Kind.UNKNOWN, name, str(error))
        return None
    except (OSError, Malformed) as error:
        told = raw_pickles.findings_of(context.folder, name)
        context.report.findings += told or [unreadable(name, error)]
        return None
    context.report.structure += archive.overhead
    context.report.facts |= facts_of(name, archive.tree)
    for finding in problems_of(name, archive):
        context.report.findings.append(finding)
    if archive.unsummed:
        what = f"{len(archive.unsummed)} records have no CRC: torch was told to compute none"
        context.report.say(Kind.NOTE, name, what)
    return archive


def facts_of(name: str, tree: object) -> dict[str, Facts]:
    """Note what the top of a structure says, by the name of its file; nothing of a large one."""
    if not is_dict(tree) or len(tree) > _MOST_FACTS:
        return {}
    values = {
        str(key): value if isinstance(value, bool | int | float | str) else None
        for key, value in tree.items()
    }
    if name.endswith("_model_states.pt"):
        return {name: Facts(values, *_zero_facts(tree))}
    return {name: Facts(values)}


def _zero_facts(tree: dict[object, object]) -> tuple[bool, bool]:
    """Say what DeepSpeed's states of the model tell of its optimizer's.

    It writes the shapes of the parameters there only if ZeRO, or bf16, keeps the optimizer's states
    in files of their own. The name of those begins with `bf16_` if that is on.
    """
    config = object_or_empty(tree.get("ds_config"))
    bf16 = object_or_empty(config.get("bf16", config.get("bfloat16")))
    return tree.get("param_shapes") is not None, bf16.get("enabled") is True


def ties_of(tensors: Iterable[torch_file.Tensor]) -> int:
    """Count groups of tensors that show the same bytes in the same way."""
    places = Counter(
        (one.record, one.first, one.last, one.shape, one.stride)
        for one in tensors
        if one.last > one.first
    )
    return sum(names > 1 for names in places.values())


def problems_of(name: str, archive: torch_file.Archive, key: str = "") -> list[Finding]:
    """Give what is wrong inside an archive; `key` is the tensor that it is the chunk of."""
    return [
        Finding(kind, name, str(why), (key,) if key else tensors, why.start, why.end)
        for kind, why, tensors in archive.problems
    ]


def safetensors_part(context: Context, name: str) -> None:
    """Judge one safetensors file; nothing protects its payload."""
    context.report.tensors += len(_header(context, name) or ())


def _header(context: Context, name: str) -> list[safetensors_file.Stored] | None:
    try:
        with context.folder.open(name) as file:
            return safetensors_file.read(file)
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return None


def json_part(context: Context, name: str) -> None:
    """Judge a JSON file of somebody else: it is text, and it is JSON."""
    try:
        data = context.folder.read(name, MOST_JSON)
        if data[:1] != b"[":
            context.report.facts |= facts_of(name, parse_json(data))
    except (OSError, Malformed) as error:
        context.refuse(name, error)


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
    """Give the tensors of a file with their bytes, whichever format it has."""
    if name.endswith(".safetensors"):
        header = _header(context, name) or []
        context.report.tensors += len(header)
        return {one.name: one.end - one.start for one in header}, []
    archive = _archive(context, name)
    if archive is None:
        return {}, []
    context.report.tensors += len(archive.tensors)
    sizes = {one.name: one.last - one.first for one in archive.tensors}
    return sizes, works_of(context.folder, name, archive.spans, context.sizes)


def _compare(context: Context, index: str, file: str, expected: set[str], stored: set[str]) -> None:
    """Hold what the index says of a file against what the file holds."""
    if not stored:
        return  # its own finding says why
    absent, extra = sorted(expected - stored), sorted(stored - expected)
    if absent:
        what = f"{index} says that it holds {clip(absent[0])}, and it does not ({len(absent)} so)"
        context.report.say(Kind.DAMAGED, file, what, absent)
    if extra:
        what = f"it holds {clip(extra[0])}, which {index} does not place there ({len(extra)} so)"
        context.report.say(Kind.DAMAGED, file, what, extra)
