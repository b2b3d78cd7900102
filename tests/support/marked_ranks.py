"""Two ranks that talk to each other, marked; run by test_marking: `python marked_ranks.py FOLDER`.

Before each kind of talk rank 0 notes its name in the journal, so that the test finds the place.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_conformance.contract.journal import ChildJournal
from ckpt_conformance.trace import marking

NOBODY: Any = None


def talk(rank: int, folder: Path, journal: ChildJournal) -> None:
    """Use each way once."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    words: list[Any] = [NOBODY, NOBODY]
    ways = {
        "barrier": dist.barrier,
        "objects": lambda: dist.all_gather_object(words, rank),
        "waited later": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
        "from a root": lambda: dist.broadcast(torch.ones(1), src=1),
        "to a root": lambda: dist.gather(
            torch.ones(1), [torch.ones(1), torch.ones(1)] if rank == 1 else None, dst=1
        ),
        "functional": sharded.full_tensor,
        "message": lambda: dist.send(torch.ones(1), 1) if not rank else dist.recv(torch.ones(1), 0),
        "store": lambda: store.set("said", "it") if not rank else store.wait(["said"]),
        "look": (folder / "root" / "a" / "file").exists,
        "listing": lambda: list((folder / "root" / "a").iterdir()),
        "read": (folder / "root" / "a" / "there").read_bytes,
        "elsewhere": (folder / "store").exists,
    }
    for name, way in ways.items():
        journal.note("way", name=name)
        way()
    journal.note("way", name="end")


def main() -> None:
    """Fork two ranks, which leave together."""
    folder = Path(sys.argv[1])
    pids: list[int] = []
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            journal = ChildJournal(folder / f"journal-{rank}", rank)
            signal.alarm(60)  # a rank that waits for ever ends here
            marking.mark(journal, folder / "root")
            talk(rank, folder, journal)
            dist.barrier()
            os._exit(0)
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
