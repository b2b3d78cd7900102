"""What each file is to a manager, found in what it wrote, and never by a name that is known.

Payload: holds the bytes of large tensors; where none are found, the fewest files with most bytes.
Pointer: small, outside of every step's own names, and another at each save. Of the other files that
a save made or changed one that says the name of a payload is a manifest, the rest is metadata.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.harness.strata import Role
from ckpt_conformance.subject import names
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.subject.subject import Golden, Subject

ROLES: Slot[dict[str, Role]] = Slot("roles of the files of a step")


def of_manager(subject: Subject) -> dict[str, Role]:
    """Return roles by kind of name (`trees.pattern`), from the golden run; once per adapter."""
    golden = subject.golden()
    return subject.once(ROLES, lambda: of_step(golden, golden.saves[-1]))


def of_step(golden: Golden, step: int) -> dict[str, Role]:
    """Return the roles of the files that the save of a step, not the first, made or changed."""
    before = _contents(golden.snapshot(max(save for save in golden.saves if save < step)))
    after = _contents(golden.snapshot(step))
    files = {name: data for name, data in after.items() if before.get(name) != data}
    samples = [bytes.fromhex(sample.bytes) for sample in golden.payload_samples.get(step, ())]
    payload = {name for name, data in files.items() if any(part in data for part in samples)}
    payload = payload or most_bytes({name: len(data) for name, data in files.items()})
    said = [PurePosixPath(name).name.encode() for name in payload]
    roles = {
        trees.pattern(name): Role.MANIFEST if any(one in data for one in said) else Role.METADATA
        for name, data in sorted(files.items())
    }
    roles |= {trees.pattern(name): Role.POINTER for name in names.pointers(golden, step)}
    return roles | {trees.pattern(name): Role.PAYLOAD for name in payload}


def _contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in trees.files(root)}


def most_bytes(sizes: Mapping[str, int]) -> set[str]:
    """Return the fewest files that hold more than half of all bytes."""
    chosen: set[str] = set()
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        if 2 * sum(sizes[one] for one in chosen) > sum(sizes.values()):
            break
        chosen.add(file)
    return chosen
