"""What the parts of the manager share: its settings, and the few operations that touch a disk.

Every operation that a crash can interrupt is a method of its own, so that it can be watched, or
broken on purpose.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

from ckpt_conformance.reference_impl import durable, layout, resolve
from ckpt_conformance.reference_impl.background import BackgroundSaves
from ckpt_conformance.reference_impl.fencing import Claim, InDirectory
from ckpt_conformance.reference_impl.manifest import check_config
from ckpt_conformance.reference_impl.ranks import TIMEOUT, Ranks, ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch.distributed import ProcessGroup

    from ckpt_conformance.reference_impl.mirror import Mirror
    from ckpt_conformance.reference_impl.writer_process import WriterProcess

logger = logging.getLogger(__name__)

_RUN_ID = re.compile(r"[\x21-\x7e]{1,128}")

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem", "process"]
"""How `save_async` saves: before it returns; in a thread; there, with copies of a GPU's tensors in
page-locked memory (K018); in a process of its own, whose death costs that save alone."""


class ManagerBase:
    """Settings, the run's id, and the primitives of the commit protocol."""

    _ranks: Ranks | None = None
    _writer: WriterProcess | None = None

    def __init__(  # noqa: PLR0913 - these are the settings of a manager
        self,
        root: str | os.PathLike[str],
        *,
        use_dcp: bool = False,
        keep_last: int = 2,
        mirror: Mirror | Sequence[Mirror] | None = None,
        run_id: str | None = None,
        parents: Collection[str] = (),
        config: Mapping[str, Any] | None = None,
        owners: Collection[int] | None = None,
        is_milestone: Callable[[int], bool] | None = None,
        group: ProcessGroup | None = None,
        timeout: float = TIMEOUT,
        async_mode: AsyncMode = "async",
        max_pending: int = 1,
        exclusive: bool = False,
        persistent_dir: str | os.PathLike[str] | None = None,
        host: str | None = None,
    ) -> None:
        """Manage the checkpoints of one run in one directory. Nothing is written yet.

        Args:
            root: the directory. One live writer at a time; created by the first save.
            use_dcp: write the DCP format instead of per-rank files. Both are read.
            keep_last: how many of the highest steps of this run stay; 0 or less keeps all (KX7).
            mirror: where each checkpoint is copied to: one place, or several. A step is only
                deleted here after it was verified in each that is required.
            run_id: of this run. By default it is kept in the root, so a restart is the same run.
            parents: runs that this one continues: their checkpoints count as its own.
            config: kept in every manifest; a difference is reported at load (F07).
            owners: user ids whose files are served; None serves everyone's (K018).
            is_milestone: whether a step stays, uncounted by `keep_last` (K018); by default none.
            group: the ranks that save and load together, each calling the same methods in the
                same order; by default all of torch.distributed, where it is initialised. The
                first of them alone publishes, rotates, mirrors and deletes.
            timeout: seconds that ranks wait for each other: longer than the longest write of one.
            async_mode: what `save_async` does. A script that asks for a process needs
                `if __name__ == "__main__":`, as multiprocessing does; ranks can't have one.
            max_pending: how many saves of `save_async` may wait or go on at a time. Each holds a
                copy of the state in memory; one more waits until there is room.
            exclusive: only the newest process that saves here may go on: the first save claims the
                root, and a save after another process has done so raises `WriterFenced`. Without
                it two processes may save by turns, and a zombie beside a requeued job, too.
            persistent_dir: where each emergency dump is copied to, as far as there is time: what
                lies there may be loaded on any host (M005). Every rank writes its own part.
            host: what names this host in a dump; by default its name in the network.

        Raises:
            SaveRefused: a configuration that JSON does not keep.
            ValueError: a mode that is none, or a number of saves below 1.
        """
        check_mode(async_mode, exclusive=exclusive)
        # Absolute: a job that changes its working directory still saves to one place.
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - links in it are left as they are
        self.use_dcp = use_dcp
        self.keep_last = keep_last
        self.mirrors: tuple[Mirror, ...] = () if mirror is None else as_several(mirror)
        self.parents = frozenset(parents)
        self.config = check_config(config or {})
        self.owners = None if owners is None else frozenset(owners)
        self.is_milestone: Callable[[int], bool] = is_milestone or (lambda _: False)
        self._run_id = run_id
        self._group, self._timeout = group, timeout
        self.async_mode: AsyncMode = async_mode
        self.background = BackgroundSaves(max_pending)
        self._claim = Claim(InDirectory(self.root), str(self.root)) if exclusive else None
        self.persistent_dir = None if persistent_dir is None else Path(persistent_dir).absolute()
        self.host = host or resolve.host_name()

    @property
    def mirror(self) -> Mirror | None:
        """The first of the places that checkpoints are copied to, if there is any."""
        return self.mirrors[0] if self.mirrors else None

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that save and load together; None for a process alone."""
        if self._ranks is None:
            self._ranks = ranks_of(self._group, self._timeout)
        return self._ranks

    # ---- the run -------------------------------------------------------------------------------

    @property
    def run_id(self) -> str | None:
        """The id of this run; None while nothing has been saved and none was given."""
        if self._run_id is None:
            self._run_id = self.read_run_id()
        return self._run_id

    def read_run_id(self) -> str | None:
        """Read the id that the root keeps; None if there is no file, or no id in it."""
        data = durable.read_small_file(self.root / layout.RUN_ID)
        if data is None:
            return None
        text = data.decode("ascii", errors="replace").strip()
        if not _RUN_ID.fullmatch(text):
            logger.warning("%s holds no id: a new one is made", self.root / layout.RUN_ID)
            return None
        return text

    def ensure_run_id(self) -> str:
        """Return the id of this run; make one and keep it in the root if there is none."""
        if self.run_id is None:
            self._run_id = layout.new_id()
            self.replace_small_file(layout.RUN_ID, f"{self._run_id}\n".encode())
        return str(self._run_id)

    def claim_root(self) -> None:
        """Claim the root where it is exclusive, and ask whether a mirror has another writer since.

        Raises:
            WriterFenced: another process writes there.
        """
        if self._claim is not None:
            self._claim.take(self.ensure_run_id())
        for mirror in self.mirrors:
            fenced = getattr(mirror, "fenced", None)  # a user's own mirror may know no such thing
            if fenced is not None and mirror.required:
                raise fenced

    def require_claim(self) -> None:
        """Check right before a commit that the root is still this process's own.

        Raises:
            WriterFenced: another process writes there.
        """
        if self._claim is not None:
            self._claim.require()

    @property
    def own_runs(self) -> frozenset[str]:
        """The runs whose checkpoints this one may delete."""
        own = [] if self.run_id is None else [self.run_id]
        return self.parents.union(own)

    @property
    def tag(self) -> str:
        """The part of the run's id that its names of work in progress carry."""
        return layout.tag_of(self.run_id or "")

    @property
    def dump_roots(self) -> list[Path]:
        """The directories in which emergency dumps of this run may lie."""
        return [self.root, *([] if self.persistent_dir is None else [self.persistent_dir])]

    # ---- the primitives of the commit ----------------------------------------------------------

    def fsync_file(self, file: BinaryIO) -> None:
        """Make an open file's content durable."""
        durable.fsync_file(file)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        durable.fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename in one step; an existing file of the target's name is replaced."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file or a directory of ours; it need not be there."""
        durable.remove_tree(path)

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Write a small file under a new name, durably."""
        with durable.create(path) as file:
            file.write(data)
            self.fsync_file(file)

    def replace_small_file(self, name: str, data: bytes) -> None:
        """Replace the content of a small file of the root: all or nothing, and durably."""
        staged = self.root / layout.work_name(name, self.tag, "tmp")
        self.write_bytes(staged, data)
        self.rename(staged, self.root / name)
        self.fsync_dir(self.root)


def check_mode(mode: AsyncMode, *, exclusive: bool) -> None:
    """Check that `save_async` can save so.

    Raises:
        ValueError: it is no mode, or one that cannot go with a claim of the root.
    """
    if mode not in get_args(AsyncMode):
        raise ValueError(f"async_mode is {mode!r}: give one of {get_args(AsyncMode)}")
    if exclusive and mode == "process":
        raise ValueError("async_mode is 'process', whose writer claims nothing: not exclusive")


def as_several(mirror: Mirror | Sequence[Mirror]) -> tuple[Mirror, ...]:
    """Several mirrors, of one or of several."""
    return tuple(mirror) if isinstance(mirror, Sequence) else (mirror,)
