"""Facts of an adapter, read in a child: the pytest process imports no manager and no torch."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ckpt_conformance.contract import DEFAULT_KIND, Capability, registry, trees
from ckpt_conformance.contract.verdicts import Cause, Unknown
from ckpt_conformance.harness.client import Client, Server, ServerError
from ckpt_conformance.harness.messages import JobSpec, Probe, ProbeResult, Program
from ckpt_conformance.workload import devices

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path


@contextlib.contextmanager
def serve(
    names: Sequence[str],
    described: Sequence[str],
    device: str = devices.CPU,
    *,
    notes_opened: bool = False,
) -> Generator[tuple[str, dict[str, registry.AdapterInfo]]]:
    """Start the fork server of a session; yield its socket and the facts of `described` adapters.

    Raises registry.AdapterError with the reason if an adapter is unknown or can't be made, and
    requests.RequestError for a device that is not there.
    """
    for name in names:
        registry.check_name(name)
    with Server(tuple(names), notes_opened=notes_opened) as server:
        yield server.socket, describe(server, names, described, device)


def describe(
    server: Server, names: Sequence[str], described: Sequence[str], device: str = devices.CPU
) -> dict[str, registry.AdapterInfo]:
    """Return the facts of `described` adapters of a server that was started for `names`.

    Raises as `serve` does.
    """
    for name, refusal in server.refused.items():
        raise registry.AdapterError(refusal.about(name))
    with contextlib.closing(Client(server.socket)) as client:
        infos = {name: _describe(client, name, server.folder) for name in described}
    for name in names[:1]:
        check_device(server.socket, name, server.folder, device)
    return infos


def _describe(client: Client, name: str, folder: Path) -> registry.AdapterInfo:
    """Read an adapter's facts; raises registry.AdapterError where that fails."""
    try:
        return read(client, name, folder)
    except (Unknown, ServerError) as error:
        raise registry.AdapterError(str(error)) from error


def read(client: Client, name: str, folder: Path) -> registry.AdapterInfo:
    """Ask for an adapter's facts, and let it open an empty directory once.

    Raises Unknown where it does not say what it is, or fails before its manager is called.
    """
    result = client.run(_program(name, folder, "ckpt_conformance.harness.facts:probe"))
    value = result.of(ProbeResult).value
    if value is None:
        reason = result.error.message if result.error else result.output[-500:]
        msg = f"adapter {name!r} does not say what it is: {reason}"
        raise Unknown(msg, cause=Cause.ADAPTER)
    opened = client.run(_program(name, folder, "ckpt_conformance.harness.facts:open_once"))
    if trouble := opened.of(ProbeResult).value:  # how else it may end is for the checks to judge
        msg = f"adapter {name!r} fails before its manager is called: {trouble}"
        raise Unknown(msg, cause=Cause.ADAPTER)
    return registry.AdapterInfo(**value)


def check_device(socket: str, name: str, folder: Path, device: str) -> None:
    """Refuse a device that two ranks can't use; raises requests.RequestError."""
    if device == devices.CUDA:
        program = _program(name, folder, "ckpt_conformance.workload.devices:count")
        with contextlib.closing(Client(socket)) as client:
            result = client.run(structs.replace(program, isolation="exec", device=device))
        devices.check(result.of(ProbeResult).value or 0)


def _program(name: str, folder: Path, probe: str) -> Program:
    """Make the program of a child that only answers a probe; its directory is empty."""
    root = folder / "empty"
    trees.clear(root)
    return Program(
        adapter=name,
        root=str(root),
        journal=str(folder / "journal"),
        result=str(folder / "result"),
        output=str(folder / "output"),
        job=JobSpec(kind=DEFAULT_KIND, seed=0),
        ops=(Probe(probe=probe),),
    )


def probe(child: Any) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Run in the child: describe its adapter."""
    return asdict(registry.describe(child.program.adapter))


def open_once(child: Any) -> str:  # noqa: ANN401  a Child
    """Run in the child: say how the adapter fails to make a manager; empty if it does not.

    That is so where something is not installed, or where the adapter's own module raises: in an
    empty directory no manager has refused anything yet. What its manager raises is its own affair.
    An adapter of several ranks may need the others.
    """
    if Capability.RANKS in child.adapter.capabilities:
        return ""
    try:
        child.opened  # noqa: B018  the property opens it
        child.close()
    except ImportError as error:
        return f"{type(error).__name__}: {error}; install what it needs"
    except Exception as error:  # noqa: BLE001  of any adapter
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.filename in _own_files(child):
            return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    return ""


def _own_files(child: Any) -> set[str | None]:  # noqa: ANN401  a Child
    """Return the files of an adapter: that which its name leads to, and that of its class."""
    modules = (child.program.adapter.partition(":")[0], type(child.adapter).__module__)
    return {getattr(sys.modules.get(name), "__file__", None) for name in modules}
