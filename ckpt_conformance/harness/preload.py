"""What the fork server imports before it forks, so that no child pays for it.

An adapter that misbehaves when it is imported must not take the others down. So a child tries
first: it may raise, hang, end its process or start threads, and the server learns the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.contract import registry
from ckpt_conformance.contract.registry import Refusal
from ckpt_conformance.harness import messages
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.processes.lifecycle import Waited

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.messages import Program

PATIENCE = 60.0  # seconds for an import
LATER = Refusal("starts threads and says so: every child imports it anew")  # no reason to refuse


def preload(adapters: Sequence[str]) -> dict[str, Refusal]:
    """Import torch and the adapters; return by name why an adapter can't be used."""
    warm_up()
    refusals = {} if try_out(adapters) is None else {name: try_out([name]) for name in adapters}
    for name in adapters:
        if refusals.get(name) is None:
            load(name)
    return {name: why for name, why in refusals.items() if why is not None and why != LATER}


def warm_up() -> None:
    """Import torch with its lazy parts, and train two tiny jobs."""
    import torch

    for part in ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"):
        importlib.import_module(part)
    torch.set_num_threads(1)
    from ckpt_conformance.harness import child
    from ckpt_conformance.workload.job import Job

    _ = child.RESULTS
    for kind in ("mixed", "rare-dtypes"):
        job = Job(kind, 0)
        job.train(2)
        _ = job.leaves(), job.payload_samples()
        job.perturb()
        torch.save({name: part.state_dict() for name, part in job.components.items()}, io.BytesIO())


def import_named(program: Program) -> None:
    """Import what a program names of this package: a child that imports an injector pays for it.

    What can't be imported is left to the child, which reports it.
    """
    if program.world or program.rank_group:
        importlib.import_module("ckpt_conformance.harness.ranks")
    modules = {name.partition(":")[0] for op in program.ops for name in messages.named(op)}
    # A set less `sys.modules.keys()` touches the names of all modules, and so copies their pages.
    missing = [module for module in modules if module not in sys.modules]
    for module in missing:
        if module.startswith("ckpt_conformance."):
            with contextlib.suppress(Exception):
                importlib.import_module(module)


def load(name: str) -> Refusal | None:
    """Import an adapter and what it asks for; return why it can't stay in this process."""
    adapter = registry.get(name)
    getattr(adapter, "preload", lambda: None)()
    threads = len(list(Path("/proc/self/task").iterdir())) - 1
    if not threads:
        return None
    if adapter.isolation == "spawn":
        return LATER
    what = f"adapter {name!r} starts {threads} thread(s) when imported"
    return Refusal(f"{what}; declare isolation = 'spawn'")


def try_out(names: Sequence[str]) -> Refusal | None:
    """Load adapters in a child; return why the first that fails can't be used."""
    with tempfile.TemporaryDirectory(prefix="try-") as folder:
        note = Path(folder) / "refusal"
        pid = lifecycle.fork(lambda: _child(names, note, Path(folder) / "output"))
        waited = lifecycle.wait(pid, PATIENCE)
        lifecycle.kill_group(pid)  # with what it started
        code = lifecycle.reap(pid).code
        if note.exists():
            line = note.read_bytes()
            return messages.decode(line, Refusal) if line else None
        end = f"ends the process (exit status {code})"
        if waited is Waited.DEADLINE:
            end = f"takes over {PATIENCE:.0f} s"
        return Refusal(f"adapter {', '.join(names)}: its import {end}")


def _child(names: Sequence[str], note: Path, output: Path) -> None:
    """Load the adapters and leave a note, unless an import ends the process; never returns."""
    os.setsid()
    lifecycle.redirect_output(output)
    try:
        refusal = next(filter(None, map(load, names)), None)
    except BaseException as error:  # noqa: BLE001  a child must never return into the server
        refusal = Refusal.of_error(error)
    draft = note.with_suffix(".draft")
    draft.write_bytes(messages.encode(refusal) if refusal else b"")
    draft.rename(note)  # whole, or not there
    os._exit(0)
