"""Small things that a child does for a check, by `op_probe`; `probe` asks for one of them."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import warnings
from pathlib import Path
from typing import Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.kept_trees import fingerprint
from ckpt_conformance.harness.messages import Probe
from ckpt_conformance.processes import lifecycle, rendezvous

SECOND = 1_000_000_000  # nanoseconds


def probe(
    name: str,
    *,
    go_on: bool = False,
    ranks: tuple[int, ...] | None = None,
    **args: object,
) -> Probe:
    """Make the operation that runs a function of this module in the child; no probe itself."""
    return Probe(probe=f"{__name__}:{name}", args=args, go_on=go_on, ranks=ranks)


def begin_turns(child: Any) -> None:  # noqa: ANN401  a Child
    """Let the threads of the child take turns from here on; this one is the first task."""
    child.journal.note("turns-begun", process=os.getpid())


def end_turn(child: Any, tree: str, copy: str) -> None:  # noqa: ANN401  a Child
    """End this thread's turns; the other threads stand where they are. Copy a directory of then."""
    child.journal.note("turn-over")
    if Path(tree).is_dir():
        trees.copy(Path(tree), Path(copy))


def let_turns_go_on(child: Any) -> None:  # noqa: ANN401  a Child
    """Let the threads go on that stand since `end_turn`, by turns."""
    child.journal.note("turns-go-on")


def enter(_child: Any, folder: str) -> None:  # noqa: ANN401  a Child
    """Change the working directory of the child."""
    os.chdir(folder)


def reach(child: Any, step: int) -> None:  # noqa: ANN401  a Child
    """Train one step and count as if `step` steps had been trained."""
    child.prepare()
    child.job.train(1)
    child.job.step = step


def count(child: Any, step: int) -> None:  # noqa: ANN401  a Child
    """Count as if `step` steps had been trained; nothing else of the job changes."""
    child.job.step = step


def rate_at(child: Any, epoch: int) -> list[float] | str:  # noqa: ANN401  a Child
    """Ask schedulers for the rates of an epoch, as `step(epoch)` does; words where one raises."""
    rates: list[float] = []
    child.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older way to step, which torch keeps
        for scheduler in child.job.schedulers.values():
            try:
                scheduler.step(epoch)
            except Exception as error:  # noqa: BLE001  whatever the state that was loaded lacks
                return f"{type(error).__name__}: {error}"
            rates += scheduler.get_last_lr()
    return rates


def mask(_child: Any, bits: int) -> None:  # noqa: ANN401  a Child
    """Set which bits of the mode new files do not get."""
    os.umask(bits)


def tensor_bytes(_child: Any) -> int:  # noqa: ANN401  a Child
    """Count the bytes of memory that tensors of this process hold, each once."""
    import torch  # a child has it; who only plans does not load it

    gc.collect()
    kinds = {torch.Tensor, torch.nn.Parameter}
    storages = (one.untyped_storage() for one in gc.get_objects() if type(one) in kinds)
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def scribble(child: Any) -> int:  # noqa: ANN401  a Child
    """Invert every byte of every file of the manager, in place; return the number of bytes.

    Size and inode stay, so that a mapping of the file sees the new bytes and no signal.
    """
    total = 0
    for path in trees.files(child.root):
        with path.open("r+b", buffering=0) as file:
            data = file.read()
            file.seek(0)
            file.write(bytes(byte ^ 0xFF for byte in data))
        total += len(data)
    return total


def flip(child: Any, file: str, offset: int) -> None:  # noqa: ANN401  a Child
    """Flip a bit of a file of the manager, in place."""
    with (child.root / file).open("r+b", buffering=0) as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 1]))


def reseal(child: Any, folders: list[str], step: int) -> list[str]:  # noqa: ANN401  a Child
    """Renew the manager's own checksums of a step in each folder, in place.

    Return why not, one text each: empty where it was done. What was not done stays as it was.
    """
    return [_resealed(child, Path(folder), step) for folder in folders]


def _resealed(child: Any, folder: Path, step: int) -> str:  # noqa: ANN401  a Child
    child.close()
    trees.materialize(folder, child.root)
    try:
        child.opened.reseal(step)
    except Exception as error:  # noqa: BLE001  a crafted file may be beyond it
        return f"{type(error).__name__}: {error}"
    child.close()
    trees.clear(folder)
    trees.copy(child.root, folder, into=True)
    return ""


def times_of(root: Path) -> dict[str, int]:
    """Map what is in a directory, and itself, to nanoseconds of modification; no probe."""
    paths = [root, *root.rglob("*")]
    return {path.relative_to(root).as_posix(): path.lstat().st_mtime_ns for path in paths}


def redate(child: Any, times: dict[str, int], later: int) -> None:  # noqa: ANN401  a Child
    """Date what has changed since it had these times so many whole seconds after them.

    Within the second another nanosecond is taken, as no file system with these gives one twice.
    """
    for name, before in times.items():
        path = child.root / name
        if not os.path.lexists(path) or path.lstat().st_mtime_ns == before:
            continue
        second, part = divmod(before, SECOND)
        now = (second + later) * SECOND + (part + SECOND // 2) % SECOND
        os.utime(path, ns=(path.lstat().st_atime_ns, now), follow_symlinks=False)


def cut(child: Any, files: list[str]) -> None:  # noqa: ANN401  a Child
    """Cut files of the manager to half of their length, in place."""
    for file in files:
        os.truncate(child.root / file, (child.root / file).stat().st_size // 2)


def copy(_child: Any, source: str, target: str) -> None:  # noqa: ANN401  a Child
    """Copy a directory that is not the manager's own, such as its mirror, as it is now."""
    trees.copy_live(Path(source), Path(target))


def gates(folder: Path, count: int) -> list[str]:
    """Make places where two children meet; for who writes their programs, and no probe."""
    places = [folder / f"gate-{number}" for number in range(count)]
    for place in places:
        rendezvous.make(place)
    return [str(place) for place in places]


def stand(_child: Any, gate: str) -> None:  # noqa: ANN401  a Child
    """Let the other child come, and stand until it has gone."""
    rendezvous.stand(Path(gate))


def wait_for_the_other(_child: Any, gate: str) -> None:  # noqa: ANN401  a Child
    """Wait until another child is held in a save, or was not and says so."""
    rendezvous.enter(Path(gate))


def let_the_other_go(_child: Any, gate: str) -> bool:  # noqa: ANN401  a Child
    """Let the child go on that is held; return whether it went before, as this one waited."""
    return rendezvous.leave(Path(gate))


def let_the_other_go_once_waiting(_child: Any, gate: str) -> None:  # noqa: ANN401  a Child
    """Let the child go on that is held, as soon as this one waits for a lock."""
    rendezvous.leave_once_waiting(Path(gate))


def was_held(_child: Any, gate: str) -> bool:  # noqa: ANN401  a Child
    """Say whether this child was held; if not, let the one that waits for it go all the same."""
    held = rendezvous.has_stood(Path(gate))
    if not held:
        rendezvous.stand(Path(gate))
    return held


def begin_exit_handlers(_child: Any) -> None:  # noqa: ANN401  a Child
    """Drop the exit handlers of the server, which the child was forked with."""
    atexit._clear()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  it has no public name


def end_as_interpreters_do(child: Any) -> None:  # noqa: ANN401  a Child
    """End the process as an interpreter ends after its last line: threads first, then handlers.

    What a fault holds goes on when the interpreter waits for it, so long after pools have learned
    that nothing new may begin.
    """
    names: Any = vars(threading)  # what the interpreter calls has no public names
    names["_threading_atexits"].insert(0, child.let_go)  # the last of them to be called
    end_at_once(child)


def end_at_once(_child: Any) -> None:  # noqa: ANN401  a Child
    """The same, but what a fault holds goes on only if the interpreter waits for it."""
    names: Any = vars(threading)
    names["_shutdown"]()
    atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  as above
    lifecycle.exit_now(0)


def tree(child: Any) -> dict[str, str]:  # noqa: ANN401  a Child
    """Digest each file of the manager's directory."""
    return fingerprint(child.root)
