"""Which checkpoint: one rule for every entry point (M030, B04).

A checkpoint is what a manifest says it is. Steps are ordered as numbers, never as text or by time
of modification (B10, C05). The pointer `latest` is a hint: nothing here needs it.
"""

from __future__ import annotations

import logging
import os
import platform
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.reference_impl import durable, layout
from ckpt_conformance.reference_impl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    DumpElsewhere,
)
from ckpt_conformance.reference_impl.layout import CheckpointReference, Refusal
from ckpt_conformance.reference_impl.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.reference_impl.layout import Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """Something in a root that looks like a checkpoint.

    Attributes:
        reference: where it is.
        manifest: what it consists of; None when that cannot be read.
        problem: why it is not complete; None when every file is there with its size.
    """

    reference: CheckpointReference
    manifest: Manifest | None
    problem: str | None

    @property
    def complete(self) -> bool:
        """Whether discovery advertises it. Digests are verified when it is loaded."""
        return self.problem is None


def names_in(root: Path) -> list[str]:
    """The names in a directory, sorted; none if it does not exist."""
    try:
        return sorted(entry.name for entry in os.scandir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []


def scan(root: Path) -> list[Candidate]:
    """Everything in a root that looks like a checkpoint, judged, in the order of `preference`."""
    return [candidate_at(reference) for reference in sorted(references(root), key=preference)]


def references(root: Path) -> Iterator[CheckpointReference]:
    """The places that discovery looks at. A name in any other spelling is left alone."""
    for name in names_in(root):
        if (step := layout.flat_manifest_step(name)) is not None:
            yield CheckpointReference(root, step, "model")
        elif (step := layout.directory_step(name)) is not None:
            yield CheckpointReference(root / name, step, "dcp")
        elif (work := layout.parse_work_name(name)) and work.state == "old":
            step = layout.directory_step(work.final)
            if step is not None:
                yield CheckpointReference(root / name, step, "dcp")
        elif work and work.state == "new":
            yield fresh_reference(root / name, work.final)


def fresh_reference(directory: Path, final: str) -> CheckpointReference:
    """A fresh copy, in a directory of its own, of what will have a final name."""
    step = layout.flat_manifest_step(final)
    if step is not None:
        return CheckpointReference(directory, step, "model")
    return CheckpointReference(directory, layout.directory_step(final) or 0, "dcp")


def is_fresh(reference: CheckpointReference) -> bool:
    """Whether a checkpoint is one that replaces the others of its step (M042)."""
    work = layout.parse_work_name(reference.directory.name)
    return work is not None and work.state == "new"


def preference(reference: CheckpointReference) -> tuple[int, int, str]:
    """Newest step first; DCP before per-rank files (M003); a directory that was set aside last.

    A fresh copy comes before what it replaces (MX10).

    A dump comes after all others of its step, of two the later one first: it is only served where
    it is newer.
    """
    if reference.kind == "emergency":
        age = 10**18 - layout.emergency_time(reference.directory.name)
        return -reference.step, 3, f"{age:019d}"
    aside = layout.parse_work_name(reference.directory.name) is not None
    rank = 2 if aside else ("dcp", "model").index(reference.kind)
    if is_fresh(reference):
        rank = -1
    return -reference.step, rank, reference.directory.name


def candidate_at(reference: CheckpointReference) -> Candidate:
    """Judge what is at a place by its manifest, and by the presence and size of each file.

    Nothing is raised: what is wrong is the candidate's `problem`.
    """
    manifest = None
    try:
        check_place(reference)
        manifest = read_manifest(reference.manifest_path)
        check_identity(reference, manifest)
        check_sizes(reference, manifest)
    except (CheckpointDamaged, OSError) as error:
        return Candidate(reference, manifest, str(error))
    return Candidate(reference, manifest, None)


def check_place(reference: CheckpointReference) -> None:
    """Check that a directory of a checkpoint is one, not a link that leads elsewhere (L01).

    Raises:
        CheckpointDamaged: it is something else. A name that is absent is not checked here.
    """
    with suppress(FileNotFoundError):
        mode = os.lstat(reference.directory).st_mode
        if reference.kind != "model" and not stat.S_ISDIR(mode):
            raise CheckpointDamaged(f"{reference.directory.name} is not a directory")


def check_identity(reference: CheckpointReference, manifest: Manifest) -> None:
    """Check that the manifest speaks of the step and kind that its name promises (B02).

    Raises:
        CheckpointDamaged: it speaks of others.
    """
    if (manifest.step, manifest.kind) != (reference.step, reference.kind):
        raise CheckpointDamaged(
            f"{reference.manifest_path.name} is of step {manifest.step}, kind {manifest.kind}: "
            f"its place promises step {reference.step}, kind {reference.kind}",
        )


def check_sizes(reference: CheckpointReference, manifest: Manifest) -> None:
    """Check that every listed file is a regular file of the listed size (O04).

    Raises:
        CheckpointDamaged: one is missing, of another kind, or of another size.
    """
    for name, entry in manifest.files.items():
        try:
            status = os.lstat(reference.directory / name)
        except OSError as error:
            raise CheckpointDamaged(f"{name} is missing: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointDamaged(f"{name} is not a regular file")
        if status.st_size != entry.size:
            raise CheckpointDamaged(f"{name} has {status.st_size} bytes instead of {entry.size}")


def orphans(root: Path) -> list[Refusal]:
    """Per-rank files of steps that have no manifest: a save that never committed, or lost it."""
    names = names_in(root)
    committed = {layout.flat_manifest_step(name) for name in names}
    steps = sorted(
        {
            step
            for name in names
            if (step := layout.flat_data_step(name)) is not None and step not in committed
        },
        reverse=True,
    )
    return [
        Refusal(CheckpointReference(root, step, "model"), "it has files but no manifest")
        for step in steps
    ]


# ---- emergency dumps -----------------------------------------------------------------------------


class Dump(NamedTuple):
    """An emergency dump: where it is, what the own rank has in it, and why it is not served."""

    reference: CheckpointReference
    manifest: Manifest | None
    problem: CheckpointError | OSError | None


def host_name() -> str:
    """What names this host in a dump; by default a dump is served on no other one."""
    return platform.node()[:255] or "unknown"


def dump_references(root: Path) -> list[CheckpointReference]:
    """The places of the dumps in a root, newest step first."""
    found = [
        CheckpointReference(root / name, step, "emergency")
        for name in names_in(root)
        if (step := layout.emergency_step(name)) is not None
    ]
    return sorted(found, key=preference)


def dumps(root: Path, host: str | None = None) -> list[Dump]:
    """Every dump in a root, judged for a process alone; newest step first."""
    return [dump_at(reference, host) for reference in dump_references(root)]


def dump_at(reference: CheckpointReference, host: str | None = None) -> Dump:
    """Judge a dump by its markers, and by the presence and size of each file.

    Nothing is raised: what is wrong is its `problem`. `host` None means: on whatever host.
    """
    manifest = None
    try:
        manifest = read_dump(reference)
        check_place_of_dump(manifest, host, world_size=1)
    except (CheckpointDamaged, DumpElsewhere, OSError) as error:
        return Dump(reference, manifest, error)
    return Dump(reference, manifest, None)


def read_dump(reference: CheckpointReference, rank: int = 0) -> Manifest:
    """The marker of one rank, once those of all ranks are seen to be of one dump, whole (MX12).

    Ranks that were at different steps when the signal came have dumped no state that ever was, and
    so have ranks of two attempts: their markers are there, and the dump is incomplete.

    Raises:
        CheckpointDamaged: a marker or a file is missing, or speaks of another dump.
    """
    first = read_marker(reference, 0)
    markers = {0: first}
    for other in range(1, first.world_size):
        markers[other] = read_marker(reference, other)
        check_same_dump(first, markers[other], f"of rank {other}")
    if rank not in markers:
        raise CheckpointDamaged(f"it is of {first.world_size} ranks: there is no rank {rank}")
    return markers[rank]


def read_marker(reference: CheckpointReference, rank: int) -> Manifest:
    """The marker of a rank, with its files seen to be there.

    Raises:
        CheckpointDamaged: it is missing, damaged, or of another rank or step; or a file is not
            there with its size.
    """
    check_place(reference)
    path = reference.directory / layout.marker_name(rank)
    manifest = read_manifest(path)
    if (manifest.step, manifest.kind, manifest.rank) != (reference.step, "emergency", rank):
        raise CheckpointDamaged(
            f"{path.name} is of step {manifest.step}, kind {manifest.kind}, rank {manifest.rank}: "
            f"its place promises step {reference.step} of rank {rank}",
        )
    check_sizes(reference, manifest)
    return manifest


def check_same_dump(first: Manifest, other: Manifest, whose: str) -> None:
    """Check that the markers of two ranks are of one dump.

    Raises:
        CheckpointDamaged: they are of two.
    """
    for fact in ("step", "tokens_seen", "world_size", "run_id", "save_id"):
        here, there = getattr(first, fact), getattr(other, fact)
        if here != there:
            raise CheckpointDamaged(
                f"it is mixed: {fact} is {here} by the marker of rank 0, and {there} by that "
                f"{whose}. Ranks that stopped apart have dumped no state that ever was",
            )


def check_place_of_dump(manifest: Manifest, host: str | None, world_size: int) -> None:
    """Check that a dump may be served here (M034, M036).

    Raises:
        DumpElsewhere: it was made on another host and is no copy in a persistent directory, or by
            another number of ranks.
    """
    if host is not None and not manifest.anywhere and manifest.host != host:
        raise DumpElsewhere(
            f"it was dumped on host {manifest.host}, and this is {host}: a dump is of its host "
            f"alone. One that is to be loaded elsewhere needs a persistent_dir when it is made",
        )
    if manifest.world_size != world_size:
        raise DumpElsewhere(
            f"it was dumped by {manifest.world_size} ranks, and this is {world_size}: each rank "
            f"has dumped what it held. Load it with {manifest.world_size} ranks",
        )


def read_latest(root: Path) -> str | None:
    """The name in the pointer `latest`; None if there is none, or if it is no plain short name.

    Raises:
        OSError: the pointer is there and cannot be read.
    """
    data = durable.read_small_file(root / layout.LATEST) or b""
    name = data.decode("utf-8", errors="replace").strip()
    return name if name and Path(name).name == name else None


def find_local_checkpoint_steps(
    root: str | Path,
    require_kind: Kind | None = None,
    host: str | None = None,
) -> list[int]:
    """The complete steps in a root, ascending, of one kind or of any (M040).

    Complete: the manifest is there and well-formed, and each file has its size. What is not
    advertised is named in the log, with the reason (MX5). Of an emergency dump every rank's marker
    has to be there, and it has to be of `host`, unless that is None.
    """
    steps: set[int] = set()
    for candidate in scan(Path(root)):
        if require_kind in (None, candidate.reference.kind):
            if candidate.complete:
                steps.add(candidate.reference.step)
            else:
                logger.warning(
                    "%s is not advertised: %s", candidate.reference.path, candidate.problem
                )
    for dump in dumps(Path(root), host) if require_kind in (None, "emergency") else ():
        if dump.problem is None:
            steps.add(dump.reference.step)
        else:
            logger.warning("%s is not advertised: %s", dump.reference.path, dump.problem)
    return sorted(steps)


def resolve_checkpoint_reference(
    path: str | os.PathLike[str] | CheckpointReference,
    require_kind: Kind | None = None,
) -> CheckpointReference:
    """Normalise what people pass: a model file, a DCP directory, a dump, or their parent (M030).

    Args:
        path: a path of one of these; a reference is returned as it is.
        require_kind: the kind that is wanted. An explicit path of the other kind is an error: it
            is never replaced by a sibling (M031, R03).

    Returns:
        Directory, step and kind. For a parent directory the newest complete checkpoint, DCP first
        when one step has both kinds; an emergency dump of this host where it is newer.

    Raises:
        CheckpointNotFound: nothing there (B09), or not of that kind.
        CheckpointDamaged: a parent directory in which no candidate is complete.
    """
    if isinstance(path, CheckpointReference):
        return _of_kind(path, require_kind)
    path = Path(os.fspath(path))
    explicit = explicit_reference(path)
    if explicit is not None:
        return _of_kind(explicit, require_kind)
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} does not exist")
    candidates = [
        candidate for candidate in scan(path) if require_kind in (None, candidate.reference.kind)
    ]
    complete = [candidate.reference for candidate in candidates if candidate.complete]
    if require_kind in (None, "emergency"):
        found = [dump.reference for dump in dumps(path, host_name()) if dump.problem is None]
        complete = sorted([*complete, *found], key=preference)
    if not complete:
        raise nothing_whole(
            path,
            [Refusal(candidate.reference, str(candidate.problem)) for candidate in candidates],
            require_kind,
        )
    warn_of_two_kinds(complete)
    return complete[0]


def explicit_reference(path: Path) -> CheckpointReference | None:
    """The checkpoint that a path names by itself; None if the path is a parent, or nothing."""
    step = layout.model_file_step(path.name)
    if step is not None:
        return _explicit_flat(path, step)
    step = layout.flat_manifest_step(path.name)
    if step is not None:
        return CheckpointReference(path.parent, step, "model")
    step = layout.directory_step(path.name)
    if step is not None:
        return _explicit_directory(path, step)
    step = layout.emergency_step(path.name)
    if step is not None:
        directory = _explicit_directory(path, step).directory
        return CheckpointReference(directory, step, "emergency")
    if (path / layout.DCP_MANIFEST).is_file() or (path / layout.DCP_METADATA).is_file():
        return _explicit_directory(path, None)
    return None


def _explicit_flat(path: Path, step: int) -> CheckpointReference:
    """The reference of a model file. The manifest decides whether it is there: it is the commit."""
    reference = CheckpointReference(path.parent, step, "model")
    if not path.exists() and not reference.manifest_path.exists():
        raise CheckpointNotFound(f"{path} does not exist")
    return reference


def _explicit_directory(path: Path, step: int | None) -> CheckpointReference:
    """The reference of a DCP directory; a renamed one has its step in the manifest.

    Whoever names a link means what it leads to; links that discovery finds are refused.
    """
    path = path.resolve() if path.is_symlink() else path
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} does not exist")
    if step is None:
        step = read_manifest(path / layout.DCP_MANIFEST).step
    return CheckpointReference(path, step, "dcp")


def _of_kind(reference: CheckpointReference, wanted: Kind | None) -> CheckpointReference:
    """The reference, if it is of the wanted kind."""
    if wanted not in (None, reference.kind):
        raise CheckpointNotFound(
            f"{reference.path} is of kind {reference.kind}, and {wanted} was asked for",
        )
    return reference


def nothing_whole(
    root: Path,
    refused: list[Refusal],
    kind: Kind | None = None,
) -> CheckpointNotFound | CheckpointDamaged:
    """The error when nothing can be served: not found, or damaged with each reason.

    A checkpoint that is there and cannot be read is never "not found": the job would start at
    step 0 and overwrite it (B08). Files without a manifest are what a killed first save leaves;
    they count as damage only where the pointer says that something was committed before.
    """
    what = f"{kind or ''} checkpoint".strip()
    try:
        latest = read_latest(root)
    except OSError as error:  # unreadable is not absent
        latest = str(error)
    if latest is not None and kind != "dcp":
        refused = [*refused, *orphans(root)]
    if not refused and (latest is None or kind is not None):
        return CheckpointNotFound(f"there is no {what} in {root}")
    reasons = reasons_of(refused)
    reasons = reasons or f"the pointer names {latest}, which is not there"
    return CheckpointDamaged(f"no {what} in {root} can be served: {reasons}", refused)


def reasons_of(refused: list[Refusal]) -> str:
    """Why each checkpoint was refused, in one line for a message."""
    return "; ".join(f"{refusal.reference.path.name}: {refusal.reason}" for refusal in refused)


def warn_of_two_kinds(references: list[CheckpointReference]) -> None:
    """Warn where the first of some references has a twin: the same step in the other kind (MX10).

    The first is the one that is used.
    """
    for other in references[1:]:
        chosen = references[0]
        if other.step != chosen.step or other.kind == chosen.kind:
            continue
        logger.warning(
            "step %d is there as %s and as %s: using %s. Ask for the other with require_kind=%r",
            chosen.step,
            chosen.path,
            other.path,
            chosen.path.name,
            other.kind,
        )
