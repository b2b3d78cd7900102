"""What the fork server imports before it forks, so that no child pays for it.

An adapter that misbehaves when it is imported must not take the others down. So a child tries
first: it may raise, hang, end its process or start threads, and the server learns the reason. It
learns, too, which adapters it must not import: those of `spawn` are imported by each child itself,
in a fork of this server, and those of `exec` in an interpreter of the child's own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ckpt_conformance.contract import DEFAULT_KIND, registry
from ckpt_conformance.contract.registry import PACKAGE, AdapterError, Refusal
from ckpt_conformance.harness import messages, watching
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.processes.lifecycle import Waited

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.messages import Program

PATIENCE = 60.0  # seconds for an import
_loaded: set[str] = set()  # adapters that this process, or the one it was forked from, has loaded


@dataclass(frozen=True)
class Preloaded:
    """What the server found out about its adapters, by name."""

    refused: dict[str, Refusal] = field(default_factory=dict[str, Refusal])
    anew: frozenset[str] = frozenset()  # their children get an interpreter of their own


class Trial(messages.Message, frozen=True):
    """What came of loading adapters in a process that was made for it."""

    refusal: Refusal | None = None
    is_late: bool = False  # the refusal is that it took too long
    isolation: str = "fork"  # the first that is another one
    threads: int = 0  # that were started
    modules: tuple[str, ...] = ()  # that were imported for it

    @property
    def is_plain(self) -> bool:
        """Whether the process may be forked that has loaded them."""
        return self.refusal is None and self.isolation == "fork" and not self.threads


def preload(adapters: Sequence[str], owner: int = -1) -> Preloaded:
    """Import the adapters that may be forked, after `warm_up`; say what is to be done with others.

    `owner` is a descriptor that gets readable when nobody waits for this any more: then it ends the
    process.
    """
    is_clean = lifecycle.threads() == 1  # else torch has imported a backend that starts threads
    trials = _try_all(adapters, owner, is_clean=is_clean)
    refused = {name: trial.refusal for name, trial in trials.items() if trial.refusal}
    usable = {name: trial for name, trial in trials.items() if name not in refused}
    if not is_clean:
        return Preloaded(refused, frozenset(usable))
    # What children of `spawn` import themselves stays out, whoever else imports it, too.
    apart = {
        name for trial in usable.values() if trial.isolation == "spawn" for name in trial.modules
    }
    for name, trial in usable.items():
        if trial.isolation == "fork" and apart.isdisjoint(trial.modules):
            ensure(name)  # else each child does so itself
    anew = {name for name, trial in usable.items() if trial.isolation == "exec"}
    return Preloaded(refused, frozenset(anew))


def _try_all(adapters: Sequence[str], owner: int, *, is_clean: bool) -> dict[str, Trial]:
    """Load all adapters in one child; each in one of its own unless all are fine."""
    if try_out(adapters, owner, anew=not is_clean).is_plain:
        return dict.fromkeys(adapters, Trial())
    if not is_clean:
        return {name: try_out([name], owner, anew=True) for name in adapters}
    return {name: _try_both(name, owner) for name in adapters}


def _try_both(name: str, owner: int) -> Trial:
    """Load an adapter in a fork; in a new interpreter, too, if that might go better."""
    trial = try_out([name], owner)
    if trial.refusal is None and trial.isolation == "fork" and trial.threads:
        what = f"adapter {name!r} starts {trial.threads} thread(s) when imported"
        return Trial(Refusal(f"{what}; declare isolation = 'spawn'"))
    refusal = trial.refusal
    if refusal is None or trial.is_late or refusal.type == AdapterError.__name__:
        return trial
    anew = try_out([name], owner, anew=True)
    if anew.refusal:
        return trial
    if anew.isolation == "fork":
        hint = "a new interpreter imports it: declare isolation = 'exec'"
        return Trial(Refusal(f"{refusal.message}; {hint}", refusal.type))
    return structs.replace(anew, isolation="exec")


@functools.cache
def warm_up() -> None:
    """Import torch with its lazy parts, and train two tiny jobs; once in a process."""
    import torch

    for part in ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"):
        importlib.import_module(part)
    torch.set_num_threads(1)
    from ckpt_conformance.harness import child
    from ckpt_conformance.workload.job import Job

    _ = child.RESULTS
    for kind in (DEFAULT_KIND, "rare-dtypes"):
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


def ensure(name: str) -> Any:  # noqa: ANN401  an Adapter
    """Import an adapter and what it asks for, unless this process has it; return the adapter.

    Raises what its import raises.
    """
    adapter = registry.get(name)
    if name not in _loaded:
        getattr(adapter, "preload", lambda: None)()
        _loaded.add(name)
    return adapter


def try_out(names: Sequence[str], owner: int = -1, *, anew: bool = False) -> Trial:
    """Load adapters in a child, up to the first that fails or is not to be forked.

    `anew`: in a new interpreter, not in a fork of this process. Ends the process, with the child,
    when the owner is gone.
    """
    with tempfile.TemporaryDirectory(prefix="try-") as folder:
        note = Path(folder) / "trial"
        pid = lifecycle.fork(lambda: _child(names, note, Path(folder) / "output", anew=anew))
        waited = lifecycle.wait(pid, PATIENCE, owner)
        lifecycle.kill_group(pid)  # with what it started
        code = lifecycle.reap(pid).code
        if waited is Waited.WATCHED:
            sys.exit("whoever asked for the adapters is gone")
        if note.exists():
            return messages.decode(note.read_bytes(), Trial)
        is_late = waited is Waited.DEADLINE
        end = (
            f"takes over {PATIENCE:.0f} s" if is_late else f"ends the process (exit status {code})"
        )
        refusal = Refusal(f"adapter {', '.join(names)}: its import {end}")
        return Trial(refusal, is_late=is_late)


def _child(names: Sequence[str], note: Path, output: Path, *, anew: bool) -> None:
    """Load the adapters and leave a note, unless an import ends the process; never returns."""
    os.setsid()
    lifecycle.die_with_parent()
    lifecycle.redirect_output(output)
    if anew:
        watching.hand_over()
        command = lifecycle.interpreter("ckpt_conformance.harness.preload", str(note), *names)
        os.execv(command[0], command)  # noqa: S606  our own interpreter
    _leave_note(names, note)


def _leave_note(names: Sequence[str], note: Path) -> None:
    """Load the adapters, write what came of it, and end the process."""
    try:
        trial = _load_all(names)
    except BaseException as error:  # noqa: BLE001  a child must never return into the server
        trial = Trial(Refusal.of_error(error))
    draft = note.with_suffix(".draft")
    draft.write_bytes(messages.encode(trial))
    draft.rename(note)  # whole, or not there
    os._exit(0)


def _load_all(names: Sequence[str]) -> Trial:
    modules, threads = set(sys.modules), lifecycle.threads()
    trial = Trial()
    for name in names:
        adapter = ensure(name)
        trial = Trial(isolation=adapter.isolation, threads=lifecycle.threads() - threads)
        if not trial.is_plain:
            break
    new = (name for name in sys.modules if name not in modules and _is_foreign(name))
    return structs.replace(trial, modules=tuple(new))


def _is_foreign(module: str) -> bool:
    """Return whether a module is neither Python's nor ours: those start nothing when imported."""
    package = module.partition(".")[0]
    return package != PACKAGE and package not in sys.stdlib_module_names


def main() -> None:
    """Try adapters in this new interpreter: run by `-m` with NOTE ADAPTER..."""
    importlib.import_module("ckpt_conformance.harness.child")  # as what runs their programs does
    watching.take_over()
    _leave_note(sys.argv[2:], Path(sys.argv[1]))


if __name__ == "__main__":
    main()
