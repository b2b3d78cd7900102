"""Jobs for a cluster whose items say what to do: quick ones, and such that take processes down."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.work.identity import Identity, identity
from ckpt_conformance.work.items import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.cluster.runner import Feed

HERE = "cluster_jobs"


def items(names: Sequence[str]) -> list[Item]:
    return [Item(id=name, group=name, family=name[:1]) for name in names]


def here() -> Identity:
    return identity("the-commit", {})


def obey(feed: Feed) -> None:
    """Answer each item with its name and the runner's pid; obey the first word of its name."""
    feed.require(here())
    feed.ready(msgspec.Raw(b'{"pid": %d}' % os.getpid()))
    for batch in feed:
        for raw in batch.items:
            name = msgspec.json.decode(raw, type=Item).id
            _do(name.partition(" ")[0], feed)
            shown = f"{name} {_sent(feed)}" if name.startswith("show") else name
            feed.put(name, json.dumps([shown, os.getpid()]).encode(), 0.01)


def obey_until_closed(feed: Feed) -> None:
    """Obey, unless a file says that nobody may begin any more."""
    if closed().exists():
        raise RequestError("this machine came too late")
    obey(feed)


def _sent(feed: Feed) -> str:
    return (feed.job_files / "it").read_text()


def closed() -> Path:
    return Path(os.environ["CKC_MARK"]).with_name("closed")


def _do(what: str, feed: Feed) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill-worker":
        keeper = os.getppid()
        os.kill(parent(keeper), signal.SIGKILL)
        time.sleep(600)
    elif what == "raise":
        raise ValueError("the item is not to be had")
    elif what == "write":
        (feed.files / "left").write_text("beside the results")
    elif what == "hang":
        Path(os.environ["CKC_MARK"]).write_text(str(os.getpid()))
        time.sleep(600)


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def refuse(feed: Feed) -> None:
    del feed
    raise RequestError("this machine has no wheels")
