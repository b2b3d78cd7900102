"""INT and TERM end fsck, diff and corrupt wherever they are, and leave nothing behind."""

from __future__ import annotations

import signal
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stopped import PATIENCE, Place, place, wait

from ckpt_conformance.fault_injectors import drills

if TYPE_CHECKING:
    import subprocess

__all__ = ["place"]

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
HUGE = 4 << 40  # bytes of a file without a block on the disk: it takes an hour to read
END = 30.0  # seconds: it takes about one, and the machine may be busy


def ended(process: subprocess.Popen[str], number: signal.Signals) -> int:
    """Send a signal and return the exit status; what hangs is a failure."""
    process.send_signal(number)
    process.communicate(timeout=END)
    return process.returncode


def is_open(process: subprocess.Popen[str], path: Path) -> bool:
    """Return whether a process has opened a file."""
    links = Path(f"/proc/{process.pid}/fd").glob("*")
    for one in links:
        try:
            if one.samefile(path):
                return True
        except OSError:
            continue
    return False


def sparse(path: Path, size: int = HUGE) -> Path:
    """Write a safetensors file of one tensor of zeros, of which nothing is on the disk."""
    text = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (size // 4, size)
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    return path


@pytest.mark.parametrize(("number", "status"), SIGNALS)
@pytest.mark.parametrize(
    "words", [("fsck", "--nan", "a.safetensors"), ("diff", "a.safetensors", "b.safetensors")]
)
def test_a_signal_ends_who_reads_a_large_file(
    words: tuple[str, ...], number: signal.Signals, status: int, place: Place
) -> None:
    file = sparse(place.folder / "a.safetensors")
    sparse(place.folder / "b.safetensors")
    process = place.start(*words, "--jobs", "2")
    wait(lambda: is_open(process, file) or process.poll() is not None)
    assert ended(process, number) == status
    assert place.is_clean()


@pytest.mark.parametrize(("number", "status"), SIGNALS)
@pytest.mark.parametrize("words", [("fsck",), ("fsck", "--newest-whole"), ("diff", ".")])
def test_a_signal_ends_who_waits_for_a_store(
    words: tuple[str, ...], number: signal.Signals, status: int, place: Place
) -> None:
    """The store takes the request and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/run/model.safetensors"
        process = place.start(*words, url)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1)
            assert ended(process, number) == status
    assert place.is_clean()


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_stopped_corrupt_leaves_no_copy(
    number: signal.Signals, status: int, place: Place
) -> None:
    sparse(place.folder / "run" / "a.safetensors", 2 << 30)
    copy = place.folder / "copy"
    process = place.start("corrupt", "run", "--fault", "bit-flip", "--out", "copy")
    draft = drills.draft_of(copy)
    wait(lambda: (draft / "a.safetensors").exists() or process.poll() is not None)
    assert not copy.exists()
    assert ended(process, number) == status
    assert not copy.exists()
    assert not draft.exists()


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_ends_a_cluster_of_its_own(
    number: signal.Signals, status: int, place: Place
) -> None:
    pytest.importorskip("distributed")
    sparse(place.folder / "run" / "a.safetensors")
    process = place.start("fsck", "--nan", "run", "--on", "local:2")
    wait(lambda: any((place.folder / "tmp").iterdir()) or process.poll() is not None)
    assert ended(process, number) == status
    wait(place.is_clean)
