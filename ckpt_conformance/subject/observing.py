"""What a child sees around its job, and small changes that it makes to it; run by `op_probe`.

Everything that a manager might touch and no state dict holds: modes, gradients, parameter groups,
settings of the process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch

from ckpt_conformance.contract import OpenOptions
from ckpt_conformance.harness import pending_saves
from ckpt_conformance.harness.messages import JobSpec
from ckpt_conformance.subject.subject import OTHER_SEED
from ckpt_conformance.workload import digests
from ckpt_conformance.workload.rng import RngState

BIG = 1 << 20  # float32 elements of the storage that a small view is cut from


def surroundings(child: Any) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Return what no component owns: one entry for each thing, as text or a digest."""
    model = child.job.model
    named = list(model.named_parameters(remove_duplicate=False))
    groups = [
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in child.job.optimizers.values()
    ]
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in named},
        "gradients": digests.leaves({name: parameter.grad for name, parameter in named}),
        "hooks": sum(len(module._forward_hooks) for module in model.modules()),  # noqa: SLF001
        "groups": repr(groups),
        "signals": _signals(),
        **_process(),
    }


def _signals() -> dict[str, str]:
    """Name the handler of each signal, the same in each process."""
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    return {name: getattr(one, "__qualname__", repr(one)) for name, one in handlers.items()}


def _process() -> dict[str, Any]:
    mask = os.umask(0o022)
    os.umask(mask)
    return {
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "directory": str(Path.cwd()),
        "umask": mask,
        "environment": digests.digest(dict(os.environ)),
    }


def around_a_load(child: Any) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Return what a load has no reason to change, one entry for each thing.

    No gradients and no parameter groups: these a load may clear, or bring.
    """
    around = surroundings(child)
    kept = ("modes", "requires_grad", *_process())
    return {
        **{name: around[name] for name in kept},
        "hooks": _hooks(child.job.model),
        "signals": {number.name: repr(signal.getsignal(number)) for number in signal.Signals},
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "except hooks": [repr(hook) for hook in (sys.excepthook, threading.excepthook)],
    }


def tensors_in_torch_files(_child: Any, place: str) -> dict[str, str]:  # noqa: ANN401  a Child
    """Digest each tensor of a torch file, or of all in a folder; by file and path in it."""
    path = Path(place)
    found: dict[str, str] = {}
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and zipfile.is_zipfile(file):
            state = torch.load(file, map_location="cpu", weights_only=True)
            tensors = digests.tensors(state)
            found |= {f"{file.name}.{name}": digests.hash_tensor(each) for name, each in tensors}
    return found


def get_ready(child: Any) -> None:  # noqa: ANN401  a Child
    """Open the manager, then install a handler of the job's own for SIGTERM, as many jobs do."""
    child.prepare()
    child.opened  # noqa: B018  the property opens it
    handle_signals(child)


def handle_signals(_child: Any) -> None:  # noqa: ANN401  a Child
    """Install a handler of the job's own for SIGTERM."""
    signal.signal(signal.SIGTERM, _on_signal)


def _on_signal(_number: int, _frame: object) -> None:
    """Do nothing."""


def _hooks(model: torch.nn.Module) -> dict[str, int]:
    """Count the hooks of a module and of all below it, by their kind; none of kinds without any."""
    kinds = sorted({name for name in vars(model) if name.endswith("_hooks")})
    counts = {kind: sum(len(getattr(one, kind)) for one in model.modules()) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


def descriptors(_child: Any) -> list[str]:  # noqa: ANN401  a Child
    """List what the open descriptors of the process lead to; garbage is collected before."""
    gc.collect()
    targets: list[str] = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names alone
        with contextlib.suppress(OSError):  # that of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
    return sorted(targets)


def move_in(_child: Any, folder: str) -> None:  # noqa: ANN401  a Child
    """Make working directory, home and temporary directory of the child folders below `folder`."""
    for name in ("cwd", "home", "tmp"):
        (Path(folder) / name).mkdir(exist_ok=True)
    os.chdir(Path(folder) / "cwd")
    os.environ["HOME"] = str(Path(folder) / "home")
    os.environ["TMPDIR"] = tempfile.tempdir = str(Path(folder) / "tmp")


def add_view(child: Any) -> int:  # noqa: ANN401  a Child
    """Register a buffer of 8 elements that is a view of a large storage; give that one's bytes."""
    whole = torch.arange(BIG, dtype=torch.float32)
    child.job.model.register_buffer("glimpse", whole[:8])
    return whole.nbytes


def change_entry(child: Any, how: str) -> None:  # noqa: ANN401  a Child
    """Add, remove or resize a buffer of the model."""
    model = child.job.model
    if how == "added":
        model.register_buffer("late", torch.rand(6))
    elif how == "removed":
        del model.constant
    else:
        model.constant = torch.rand(5)


def hold(child: Any, mib: int) -> None:  # noqa: ANN401  a Child
    """Let the model hold a buffer of so many MiB, no element of it like another one."""
    elements = torch.arange(mib << 18, dtype=torch.int32)
    child.job.model.register_buffer("varying", elements)


def keep_lists(child: Any) -> None:  # noqa: ANN401  a Child
    """Let the optimizer keep a list of tensors and a list in a list, as Shampoo and LBFGS do.

    They stand in the state of a float32 parameter, which torch's own load keeps as they are.
    """
    state = child.job.optimizers["optimizer"].state
    first = next(one for one in state if one.dtype == torch.float32)
    state[first]["kept"] = [torch.arange(3.0), [1.0]]


def change_lists(child: Any) -> None:  # noqa: ANN401  a Child
    """Change what `keep_lists` made, in place."""
    for state in child.job.optimizers["optimizer"].state.values():
        if "kept" in state:
            state["kept"][0].add_(1.0)
            state["kept"][1].append(2.0)


def freeze(child: Any) -> None:  # noqa: ANN401  a Child
    """Put the first module without children in evaluation mode, as a frozen batch norm is."""
    next(one for one in child.job.model.modules() if not any(one.children())).eval()


def add_group(child: Any) -> None:  # noqa: ANN401  a Child
    """Move the last parameter of the optimizer's first group into a new group, with its state."""
    optimizer = child.job.optimizers["optimizer"]
    first = optimizer.param_groups[0]
    options = {key: value for key, value in first.items() if key not in ("params", "param_names")}
    moved = first["params"].pop()
    named = (first["param_names"].pop(), moved) if "param_names" in first else moved
    optimizer.add_param_group({**options, "params": [named]})
    for scheduler in child.job.schedulers.values():
        for name in ("base_lrs", "lr_lambdas"):  # torch asks for one of each group
            of_groups = getattr(getattr(scheduler, "scheduler", scheduler), name)
            of_groups.append(of_groups[0])


def change_keys(child: Any, how: str) -> None:  # noqa: ANN401  a Child
    """Add a key to the user's own dict and to one in it, or remove one."""
    value = child.job.extra.value
    if how == "removed":
        del value["note"], value["phase"]["index"]
    else:
        value["late"], value["phase"]["late"] = 17, [1.5]


def change_component(child: Any, component: str) -> None:  # noqa: ANN401  a Child
    """Change one component of the job, and no other; a disabled scaler has nothing to change."""
    part = child.job.components[component]
    with torch.no_grad():
        if component == "model":
            next(part.parameters()).view(-1)[:1].add_(1.0)
        elif component.startswith("optimizer"):
            part.param_groups[0]["lr"] *= 0.5
        elif component.startswith("scheduler"):
            getattr(part, "scheduler", part).last_epoch += 1
        elif component == "ema":
            part.updates += 1
        elif component == "loader":
            child.job.next_batch()
        elif component == "extra":
            part.value["tokens"] += 1
        elif component == "rng":
            RngState.draw()
        elif component == "scaler":
            part.update(part.get_scale() * 2)


def two_managers(child: Any, other: str, kind: str) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Save two jobs in turn through two live managers; give each job's state at its last save."""
    options = OpenOptions()
    here, there = child.adapter.open(child.root, options), child.adapter.open(Path(other), options)
    if child.adapter_prepares:
        here.prepare(child.job)
    child.job.train(2)
    pending_saves.save(here, child.job, 2)
    second = child.new_job(JobSpec(kind=kind, seed=OTHER_SEED))
    if child.adapter_prepares:
        there.prepare(second)
    second.train(3)
    pending_saves.save(there, second, 3)
    child.job.train(2)
    pending_saves.save(here, child.job, 4)
    states = {"here": child.job.leaves(), "there": second.leaves()}
    here.close()
    there.close()
    return states


def failing_neighbour(child: Any, other: str) -> str:  # noqa: ANN401  a Child
    """Let a save of another manager of this process fail, and ask nobody how it ended.

    No file of the process may grow meanwhile: each write fails with EFBIG, in any language. Returns
    the error that the call told, or "unasked" for a save that goes on in the background; empty if
    it told none and had ended.
    """
    there = child.adapter.open(Path(other), OpenOptions())
    child.neighbour = there  # it stays open
    if child.adapter_prepares:
        there.prepare(child.job)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        begin = getattr(there, "save_async", there.save)
        pending = pending_saves.pending_save(begin(child.job, 2))
        pending_saves.wait_until_done([pending])
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  DCP's is no Exception
        return repr(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "unasked" if pending is not None else ""


def names(child: Any) -> list[str]:  # noqa: ANN401  a Child
    """List the names in the manager's directory."""
    return sorted(path.name for path in child.root.iterdir())
