"""The persistence models by name, from the one that promises most to the one that does least.

Each is an enumerator, which walks, and a predicate, which judges: they share no code.

ext4 and xfs are one walk with other rules: operations on metadata are kept in order up to the last
transaction that was committed. An fsync commits the transaction that last changed its inode. New
data is absent or a prefix in blocks of 4 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import (
    btrfs,
    fuse_object,
    kill,
    legality,
    legality_fuse,
    legality_log,
    legality_ranks,
    legality_store,
    mounts,
    node_loss,
    object_store,
    posix,
    ranks,
)
from ckpt_conformance.crash.model.enumerate import Rules, Walk, explore

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from ckpt_conformance.crash.model.states import Model, State
    from ckpt_conformance.trace.operations import Recording

OF_POWER_LOSS = ("ext4", "xfs", "btrfs")
OF_A_DISK = ("kill", *OF_POWER_LOSS)  # what is explored unless models are named
OF_RANKS = ("ranks", "nfs", "node-loss")  # only of a recording of several ranks
OF_STORES = (object_store.NAME,)  # only of a recording of requests
PROGRAMS = {  # by model: those that mount a bucket, of which it has the states
    mounts.NAME: mounts.UPLOADING,
    **{f"{mounts.NAME}:{name}": (mount,) for name, mount in mounts.MOUNTS.items()},
}
OF_MOUNTS = tuple(PROGRAMS)  # a bucket that is mounted as a folder

# data=ordered, delayed allocation, auto_da_alloc, no fast_commit: a rename over a file, or a new
# size, is committed only with the data that it stands for.
EXT4 = Rules("ext4", replace_flushes=True, in_block=True, zeroes_tail=True)
# A rename over a file does not flush the new one: old and new content can both be gone then. The
# size of a file is logged when its data was written.
XFS = Rules("xfs", zeroes_tail=True)


@dataclass
class PersistenceModel:
    """The two sides of a model."""

    rules: Rules
    walk: type[Walk]
    predicate: Callable[[Recording, State], str]

    @property
    def name(self) -> str:
        """The name that users give."""
        return self.rules.name

    def states(self, recording: Recording, rng: random.Random, budget: int) -> Iterator[State]:
        """Yield legal states of every crash point, simplest first at each; at most `budget`."""
        return explore(self.walk(recording, self.rules), rng, budget)

    def illegal(self, recording: Recording, state: State) -> str:
        """Return which constraint a state breaks; empty if it is legal."""
        return self.predicate(recording, state)


_ALL = (
    PersistenceModel(Rules("kill"), kill.KillWalk, legality.killed),
    PersistenceModel(Rules("ranks"), ranks.CutWalk, legality_ranks.killed),
    PersistenceModel(
        node_loss.NFS, node_loss.NfsWalk, partial(legality_ranks.node_lost, closing=True)
    ),
    PersistenceModel(node_loss.RULES, node_loss.NodeLossWalk, legality_ranks.node_lost),
    PersistenceModel(EXT4, Walk, partial(legality.journalled, replace_flushes=True)),
    PersistenceModel(XFS, Walk, legality.journalled),
    PersistenceModel(btrfs.RULES, btrfs.BtrfsWalk, legality_log.logged),
    PersistenceModel(posix.RULES, posix.PosixWalk, legality.unordered),
)


@dataclass
class Mounted:
    """The two sides of the model of a bucket that one of some programs mounts as a folder."""

    name: str
    programs: tuple[mounts.Mount, ...]

    def states(self, recording: Recording, rng: random.Random, budget: int) -> Iterator[State]:
        """Yield legal states of every crash point, simplest first at each; at most `budget`.

        Raises Unknown where the recording does not tell when files were closed.
        """
        return fuse_object.listed(self.programs, self.name, recording, rng, budget)

    def illegal(self, recording: Recording, state: State) -> str:
        """Return which rule a state breaks; empty if it is legal."""
        return legality_fuse.mounted(self.programs, recording, state)


class Stored(object_store.ObjectStoreModel):
    """The two sides of the model of a store."""

    def illegal(self, recording: Recording, state: State) -> str:
        """Return which rule a state breaks; empty if it is legal."""
        return legality_store.stored(recording, state)


_MOUNTED = tuple(Mounted(name, programs) for name, programs in PROGRAMS.items())
_EVERY: tuple[Model, ...] = (*_ALL, *_MOUNTED, Stored())
MODELS: dict[str, Model] = {model.name: model for model in _EVERY}


def refused(name: str, recording: Recording) -> list[mounts.Refused]:
    """List the first call that each program of a model refuses; none where nobody mounts."""
    return mounts.refused(PROGRAMS.get(name, ()), recording)
