"""What each file is to a manager, and so which calls of a save, a rotation or a load are alike.

Models: nothing; it lets a small sample leave out no sort of call. A stratum is what a call does, at
which role of file: the second write into a payload is like the first, the write of a pointer is
not. Roles come from what runs of this manager show, and never from a name that is known.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ckpt_conformance.contract import trees
from ckpt_conformance.fault_injectors import payload
from ckpt_conformance.subject import names
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.trace.faults import OPENING, READING, REMOVING, SYNCING, WRITING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.subject.subject import Golden, Subject

NAMING = frozenset({"rename", "renameat", "renameat2", "link", "linkat"})
FOLDERS = frozenset({"mkdir", "mkdirat", "rmdir"})  # is no folder yet, or no more
SORTS = {"write": WRITING, "sync": SYNCING, "open": OPENING, "read": READING}
SORTS |= {"name": NAMING, "remove": REMOVING}
SORT_OF = {call: sort for sort, calls in SORTS.items() for call in calls}


class Role(StrEnum):
    """What a file is to a manager.

    Payload: holds the bytes of large tensors, or most bytes where none are found. Pointer: small,
    outside of every step's own names, and replaced at each save. Manifest: of the other files of a
    step, the one that is dealt with last. Metadata: the rest of these. Other: it was there before,
    and is not changed, or it does not stay.
    """

    PAYLOAD = auto()
    METADATA = auto()
    MANIFEST = auto()
    POINTER = auto()
    DIRECTORY = auto()
    OTHER = auto()


class Stratum(NamedTuple):
    """What a call does, and to which role of file."""

    sort: str
    role: Role

    def __str__(self) -> str:
        """Write it for people."""
        return f"{self.sort} {self.role}"


class Call(Protocol):
    """What has to be known of a call: `SeenCall` and `Point` have it."""

    @property
    def what(self) -> str: ...  # noqa: D102

    @property
    def path(self) -> str: ...  # noqa: D102

    @property
    def became(self) -> str: ...  # noqa: D102  the name at the end, where it is another one

    @property
    def is_folder(self) -> bool: ...  # noqa: D102


C = TypeVar("C", bound=Call)
ROLES: Slot[dict[str, Role]] = Slot("roles of the files of a step")


def of_manager(subject: Subject) -> dict[str, Role]:
    """Return the roles of the files of a manager, from its golden run; found once per adapter."""
    golden = subject.golden()
    return subject.once(ROLES, lambda: of_files(golden, golden.saves[-1]))


def of_files(golden: Golden, step: int) -> dict[str, Role]:
    """Return roles of the files of a step, by the kind of their names (`contract.trees.pattern`).

    Which of them is the manifest a log of calls must say: see `strata`.
    """
    files, root = payload.of_step(golden, step), golden.snapshot(step)
    roles = {trees.pattern(file): Role.METADATA for file in files}
    places = payload.find(root, golden.payload_samples.get(step, ()), files)
    holds = {place.file for place in places}
    holds |= set() if holds else _most_bytes({file: (root / file).stat().st_size for file in files})
    roles |= {trees.pattern(file): Role.PAYLOAD for file in holds}
    return roles | {trees.pattern(file): Role.POINTER for file in names.pointers(golden, step)}


def _most_bytes(sizes: Mapping[str, int]) -> set[str]:
    """Return the fewest files that hold more than half of all bytes."""
    chosen: set[str] = set()
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        if 2 * sum(sizes[one] for one in chosen) > sum(sizes.values()):
            break
        chosen.add(file)
    return chosen


def strata(calls: Sequence[C], known: Mapping[str, Role]) -> dict[Stratum, list[C]]:
    """Group the calls of a log by stratum; strata and calls are in the order of the log."""
    manifest = _manifest(calls, known)
    groups: dict[Stratum, list[C]] = {}
    for call in calls:
        role, kind = _role(call, known)
        named = Role.MANIFEST if manifest and kind == manifest else role
        groups.setdefault(Stratum(SORT_OF.get(call.what, call.what), named), []).append(call)
    return groups


def _manifest(calls: Iterable[Call], known: Mapping[str, Role]) -> str:
    """Return the kind of name of the metadata that is dealt with last; empty if there is none."""
    kept = (call for call in calls if call.what not in REMOVING)
    roles = (_role(call, known) for call in kept)
    return next(reversed([kind for role, kind in roles if role is Role.METADATA]), "")


def _role(call: Call, known: Mapping[str, Role]) -> tuple[Role, str]:
    """Return the role of what a call is about, and its kind of name; no kind for a directory."""
    if call.is_folder or call.what in FOLDERS or not call.path:
        return Role.DIRECTORY, ""
    kinds = [trees.pattern(name) for name in (call.became, call.path) if name]
    # In a folder that was renamed, to be removed, a file still has its own name.
    kinds += [kind for kind in known if kind.rpartition("/")[2] == kinds[-1].rpartition("/")[2]]
    return next(((known[kind], kind) for kind in kinds if kind in known), (Role.OTHER, ""))
