"""Notes in the journal of a rank what ties it to the others: collectives, stores, looks at files.

Wrapped where Python calls them, for the rest of this process. A collective is left when its work
was waited for; what it orders then follows from its kind. What a rank sees below the directory
orders it after what others did there, because it may have waited for it.
"""

from __future__ import annotations

import builtins
import io
import os
from collections import Counter
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal

FROM_ROOT = ("broadcast", "scatter")  # left after the root came
TO_ROOT = ("gather", "reduce")  # left by the root after all came, by others at once
TO_ALL = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "_end_coalescing"),
)
FUNCTIONAL = (
    *("all_reduce", "all_gather_tensor", "all_gather_single", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "all_reduce_coalesced", "all_gather_single_coalesced"),
    *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "permute_tensor"),
    *("reduce_scatter_single_coalesced", "all_to_all_single", "broadcast"),
    *("all_gather_tensor_autograd", "reduce_scatter_tensor_autograd", "all_to_all_single_autograd"),
)
WAITS = ("wait", "synchronize")
PUBLISHES = ("set", "append", "multi_set", "queue_push", "delete_key")
RECEIVES = ("get", "wait", "multi_get", "check", "queue_pop", "list_keys", "num_keys", "queue_len")
BOTH = ("add", "compare_set", "barrier")
LOOKS = ("stat", "lstat", "access", "listdir", "scandir", "open", "readlink")


class Marker:
    """Writes the notes of one rank."""

    def __init__(self, journal: ChildJournal, root: str) -> None:
        """Start with no collective entered."""
        self.journal, self.root = journal, root
        self.rank: int = journal.whose["rank"]
        self.calls: Counter[str] = Counter()
        # By the id of a work, which is held so that no other gets it: notes that it is done.
        self.under_way: dict[int, tuple[Any, Callable[[], None]]] = {}

    # ---- collectives ----

    def collective(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a method of a process group."""

        @wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as it is
            group_name = str(group.group_name)
            self.calls[group_name] += 1
            key = f"{group_name} {self.calls[group_name]}"
            after = self.waits_for(name, _members(group), _root((*args, *kwargs.values())))
            self.journal.note("enter", call=key)
            work = original(group, *args, **kwargs)
            if work is None:
                self.journal.note("leave", call=key, after=after)
            else:
                note = partial(self.journal.note, "leave", call=key, after=after)
                self.under_way[id(work)] = (work, note)
            return work

        return call

    def waits_for(self, name: str, members: list[int], root: int | None) -> list[int]:
        """Return the ranks that have entered for certain when this one leaves.

        `members` are the ranks of the group; `root` is an index into them, None without a root.
        """
        if root is None or name in TO_ALL or root >= len(members):
            return members
        at = members[root]
        if name in FROM_ROOT:
            return [at]
        return members if at == self.rank else []

    def waiting(self, original: Callable[..., Any], _name: str) -> Callable[..., Any]:
        """Wrap a method that waits for a work."""

        @wraps(original)
        def call(work: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as it is
            result = original(work, *args, **kwargs)
            _, note = self.under_way.pop(id(work), (None, None))
            if note is not None:
                note()
            return result

        return call

    # ---- stores, and messages from one rank to another ----

    def store(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a method that publishes something to other ranks, or receives it."""

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as it is
            if name in PUBLISHES or name in BOTH or name == "send":
                self.journal.note("tell")
            result = original(*args, **kwargs)
            if name not in PUBLISHES and name != "send":
                self.journal.note("ask")
            return result

        return call

    def receiving(self, original: Callable[..., Any], _name: str) -> Callable[..., Any]:
        """Wrap a method that receives: the message is here when its work was waited for."""

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as it is
            work = original(*args, **kwargs)
            self.under_way[id(work)] = (work, partial(self.journal.note, "ask"))
            return work

        return call

    def functional(self, original: Callable[..., Any], _name: str) -> Callable[..., Any]:
        """Wrap a functional collective, as DTensor uses them: all who came are before who leaves.

        Its work is waited for here: one that is waited for in C++ would not be seen.
        """

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as it is
            self.journal.note("tell")
            result = original(*args, **kwargs)
            for tensor in tree_leaves(result):
                if isinstance(tensor, functional.AsyncCollectiveTensor):
                    tensor.trigger_wait()
            self.journal.note("ask")
            return result

        return call

    # ---- files ----

    def look(self, original: Callable[..., Any], _name: str) -> Callable[..., Any]:
        """Wrap a function that sees a path below the directory."""

        @wraps(original)
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as it is
            below = self._below(path)
            try:
                return original(path, *args, **kwargs)
            finally:
                if below is not None:
                    self.journal.note("look", path=below)

        return call

    def _below(self, path: Any) -> str | None:  # noqa: ANN401  what a caller gives
        """Return a path relative to the directory; None if it is elsewhere."""
        if not isinstance(path, str) and not hasattr(path, "__fspath__"):
            return None
        absolute = os.path.abspath(str(path))  # noqa: PTH100  no link is resolved
        if absolute == self.root:
            return ""
        above = self.root + "/"
        return absolute.removeprefix(above) if absolute.startswith(above) else None


def _members(group: Any) -> list[int]:  # noqa: ANN401  a ProcessGroup
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return list(range(group.size()))


def _root(arguments: tuple[Any, ...]) -> int | None:
    """Find the root in the options of a collective; None if it has none."""
    roots = (getattr(argument, "rootRank", None) for argument in arguments)
    return next((int(root) for root in roots if root is not None), None)


def mark(journal: ChildJournal, root: Path) -> None:
    """Wrap everything, for good."""
    marker = Marker(journal, os.path.realpath(root))
    _wrap(c10d.ProcessGroup, (*FROM_ROOT, *TO_ROOT, *TO_ALL), marker.collective)
    _wrap(c10d.Work, WAITS, marker.waiting)
    _wrap(c10d.Store, (*PUBLISHES, *RECEIVES, *BOTH), marker.store)
    _wrap(c10d.ProcessGroup, ("send",), marker.store)
    _wrap(c10d.ProcessGroup, ("recv", "recv_anysource"), marker.receiving)
    _wrap(functional, FUNCTIONAL, marker.functional)
    _wrap(os, LOOKS, marker.look)
    builtins.open = io.open = marker.look(io.open, "open")


def _wrap(owner: Any, names: tuple[str, ...], wrap: Callable[..., Any]) -> None:  # noqa: ANN401
    for name in names:
        if hasattr(owner, name):  # older versions of torch have fewer
            setattr(owner, name, wrap(getattr(owner, name), name))
