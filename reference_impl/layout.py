"""The names on disk, and nothing else: no function here touches the file system.

Two formats in one root, with the names of MegaCpp's checkpoint manager (M001-M003, MX9):

    root/run_id                              the id of the run that writes here
    root/latest                              a hint: the relative name of the newest commit
    root/writer_000003                       a claim: the third process that writes there; in a
                                             mirror, and in a root that is `exclusive`
    root/model_000200.pt                     per-rank format: the model's state_dict
    root/optim_000200_rank0.pt               ... the optimizers of rank 0
    root/extra_000200.pt                     ... the train state: scheduler, RNG, data position
    root/meta_000200.json                    ... the manifest: its rename is the commit
    root/dcp_000200/                         DCP format: the rename of the directory is the commit
        .metadata  __0_0.distcp  extra_state.pt  meta.json
    root/emergency_step_200_1760000000000/   emergency dump, made on SIGTERM (M005)
        model_000200_rank0.pt  optim_000200_rank0.pt  extra_000200_rank0.pt
        rank0.json                           the marker of a rank: the manifest of its files
    root/emergency                           a hint: the name of the newest dump

Of several ranks each adds its own: optim_000200_rank1.pt and extra_000200_rank1.pt, or
__1_0.distcp and extra_state_rank1.pt. The names without a rank are those of the first.

Names of work in progress are `<final name>.<tag>.<unique>.<state>`. The tag is the start of the
run's id, so that a save reclaims what its own dead predecessors left, and nobody else's files.

    .tmp    staged, not committed
    .old    a DCP directory set aside while its replacement is renamed in: still whole, still served
    .del    a commit that was withdrawn: its files are being unlinked
    .new    a fresh copy of a step, whole, in a directory; served before what it replaces
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Kind = Literal["model", "dcp", "emergency"]

LATEST = "latest"
EMERGENCY = "emergency"
RUN_ID = "run_id"
DCP_METADATA = ".metadata"
DCP_EXTRA = "extra_state.pt"
DCP_MANIFEST = "meta.json"
TAG_LENGTH = 12

_FLAT_MANIFEST = re.compile(r"meta_(\d{6,18})\.json")
_FLAT_DATA = re.compile(
    r"(?:model|extra)_(\d{6,18})\.pt|(?:optim|extra)_(\d{6,18})_rank\d+\.pt",
)
_DCP_EXTRA = re.compile(r"extra_state(?:_rank\d+)?\.pt")
_MODEL = re.compile(r"model_(\d{1,18})\.pt")
_DIRECTORY = re.compile(r"(?:dcp|dist_ckpt)_(\d{6,18})")
_WRITER = re.compile(r"writer_\d{6,18}")
_EMERGENCY = re.compile(
    r"emergency_step_(?P<step>0|[1-9]\d{0,17})_(?P<time>[1-9]\d{0,17})", re.ASCII
)
_RECEIPT = re.compile(r"receipt_(\d{6,18})_(?:model|dcp)\.[0-9a-f]{16}\.json")
_WORK = re.compile(
    r"(?P<final>.+)\.(?P<tag>[0-9a-z]{1,12})\.(?P<unique>[0-9a-f]{12})\.(?P<state>tmp|old|del|new)",
)


@dataclass(frozen=True)
class CheckpointReference:
    """One checkpoint on disk: where, which step, which format.

    Attributes:
        directory: what holds the manifest. The root for kind `model`, the DCP directory itself
            for kind `dcp`, as that of a dump is for kind `emergency`.
        step: the training step, a count of optimizer steps.
        kind: `model` (per-rank files), `dcp`, or `emergency`.
    """

    directory: Path
    step: int
    kind: Kind

    @property
    def manifest_path(self) -> Path:
        """The manifest: the file whose presence commits the checkpoint.

        Of a dump it is the marker of the first rank; each of the others has its own.
        """
        if self.kind == "emergency":
            return self.directory / marker_name(0)
        name = flat_manifest_name(self.step) if self.kind == "model" else DCP_MANIFEST
        return self.directory / name

    @property
    def path(self) -> Path:
        """What a user would name: the model file, or the directory."""
        return self.directory / model_name(self.step) if self.kind == "model" else self.directory

    @property
    def root(self) -> Path:
        """The directory that the run writes its checkpoints into."""
        return self.directory if self.kind == "model" else self.directory.parent

    @property
    def commit_name(self) -> str:
        """The name, relative to the root, whose rename commits the checkpoint."""
        return flat_manifest_name(self.step) if self.kind == "model" else self.directory.name


class Refusal(NamedTuple):
    """A checkpoint that was not served, and why."""

    reference: CheckpointReference
    reason: str


class WorkName(NamedTuple):
    """The parts of a name of work in progress."""

    final: str
    tag: str
    state: str


def model_name(step: int) -> str:
    """`model_000200.pt`: six digits or more, so that names sort as numbers do (M001)."""
    return f"model_{step:06d}.pt"


def optim_name(step: int, rank: int = 0) -> str:
    """`optim_000200_rank0.pt`."""
    return f"optim_{step:06d}_rank{rank}.pt"


def optim_names(names: Iterable[str]) -> list[str]:
    """Those names that are of optimizer files, under their final or a staging name."""
    return [name for name in names if final_name(name).startswith("optim_")]


def extra_name(step: int, rank: int = 0) -> str:
    """`extra_000200.pt`, and `extra_000200_rank1.pt` of a further rank."""
    return f"extra_{step:06d}_rank{rank}.pt" if rank else f"extra_{step:06d}.pt"


def dcp_extra_name(rank: int) -> str:
    """`extra_state.pt`, and `extra_state_rank1.pt` of a further rank."""
    return f"extra_state_rank{rank}.pt" if rank else DCP_EXTRA


def is_extra(name: str) -> bool:
    """Whether a file of a DCP directory is the train state of a rank."""
    return _DCP_EXTRA.fullmatch(name) is not None


def flat_manifest_name(step: int) -> str:
    """`meta_000200.json`."""
    return f"meta_{step:06d}.json"


def directory_name(step: int) -> str:
    """`dcp_000200`."""
    return f"dcp_{step:06d}"


def emergency_name(step: int, time: int) -> str:
    """`emergency_step_200_1760000000000`: the step, and milliseconds since 1970 (M005)."""
    return f"emergency_step_{step}_{time}"


def emergency_step(name: str) -> int | None:
    """The step in the name of an emergency dump; None for any other name."""
    match = _EMERGENCY.fullmatch(name)
    return int(match["step"]) if match else None


def emergency_time(name: str) -> int:
    """The time in the name of an emergency dump, in milliseconds; 0 for any other name."""
    match = _EMERGENCY.fullmatch(name)
    return int(match["time"]) if match else 0


def dump_name(document: str, step: int, rank: int) -> str:
    """`model_000200_rank0.pt`: what one rank dumps of `model`, `optim` or `extra`."""
    return f"{document}_{step:06d}_rank{rank}.pt"


def marker_name(rank: int) -> str:
    """`rank0.json`: the marker of a rank in an emergency dump."""
    return f"rank{rank}.json"


def _step_of(pattern: re.Pattern[str], name: str) -> int | None:
    """The step in a name that we could have written; None for any other spelling.

    `meta_0000005.json` beside `meta_000005.json` would be two names of one step, so only the
    spelling that `:06d` gives counts.
    """
    match = pattern.fullmatch(name)
    if match is None or not name.isascii():
        return None
    digits = next(group for group in match.groups() if group is not None)
    return int(digits) if f"{int(digits):06d}" == digits else None


def flat_manifest_step(name: str) -> int | None:
    """The step of `meta_000200.json`, else None."""
    return _step_of(_FLAT_MANIFEST, name)


def flat_data_step(name: str) -> int | None:
    """The step of a model, optim or extra file, else None."""
    return _step_of(_FLAT_DATA, name)


def directory_step(name: str) -> int | None:
    """The step of `dcp_000200` or of the older `dist_ckpt_000200`, else None (M002)."""
    return _step_of(_DIRECTORY, name)


def model_file_step(name: str) -> int | None:
    """The step of a model file in any padding, as people type and older tools write it (MX9)."""
    match = _MODEL.fullmatch(name)
    return int(match.group(1)) if match else None


def tag_of(run_id: str) -> str:
    """The part of a run's id that its names of work in progress carry."""
    kept = re.sub(r"[^0-9a-z]", "", run_id.lower())[:TAG_LENGTH]
    return kept or "run"


def new_id() -> str:
    """A unique id, 32 hex digits.

    It comes from the kernel, not from `random`: a save must not draw from the job's generators
    (G02).
    """
    return uuid.uuid4().hex


def work_name(
    final: str,
    tag: str,
    state: Literal["tmp", "old", "del", "new"],
    unique: str | None = None,
) -> str:
    """A name for work in progress on `final`.

    Unique names need no lock file, which a crash would leave behind for ever (PX10).
    """
    return f"{final}.{tag}.{(unique or new_id())[:12]}.{state}"


def parse_work_name(name: str) -> WorkName | None:
    """The parts of a name of work in progress; None for any other name."""
    match = _WORK.fullmatch(name)
    return WorkName(match["final"], match["tag"], match["state"]) if match else None


def final_name(name: str) -> str:
    """The final name behind a name of work in progress; any other name is its own."""
    work = parse_work_name(name)
    return work.final if work else name


def data_step_of(name: str) -> int | None:
    """The step of a per-rank file, under its final or under a staging name."""
    return flat_data_step(final_name(name))


def is_known(name: str) -> bool:
    """Whether a name, or the final name behind it, is one that a manager writes."""
    final = final_name(name)
    steps = (flat_manifest_step(final), flat_data_step(final), directory_step(final))
    if final == EMERGENCY or emergency_step(final) is not None:
        return True
    is_other = final in (LATEST, RUN_ID) or is_receipt(final) or bool(_WRITER.fullmatch(final))
    return is_other or steps != (None, None, None)


def writer_name(epoch: int) -> str:
    """`writer_000003`: the third process that writes here."""
    return f"writer_{epoch:06d}"


def receipt_name(reference: CheckpointReference, target: str) -> str:
    """`receipt_000200_model.0123456789abcdef.json`: the target is 16 hex digits (MX7)."""
    return f"receipt_{reference.step:06d}_{reference.kind}.{target}.json"


def is_receipt(name: str) -> bool:
    """Whether a name is that of a mirror's receipt."""
    return _RECEIPT.fullmatch(name) is not None
