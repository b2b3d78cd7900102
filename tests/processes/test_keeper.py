"""What a keeper keeps is ended and removed, whichever of owner, keeper and command is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stopped import wait

from ckpt_conformance.processes import keeper

if TYPE_CHECKING:
    from collections.abc import Iterator

# A command that leaves its session twice, once without its environment, and writes what it did.
COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
folder = Path(os.environ["TMPDIR"])
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
pids = [subprocess.Popen(sleep, start_new_session=True).pid]
pids.append(subprocess.Popen(["env", "-i", *sleep], start_new_session=True).pid)
(folder / "draft").write_text(" ".join(map(str, [os.getpid(), *pids])))
(folder / "draft").rename(folder / "pids")
{then}
"""


class Kept:
    """A keeper with its command, and the pids of all that this started."""

    def __init__(self, folder: Path, then: str) -> None:
        """Start it."""
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ckpt_conformance.processes.keeper", folder),
                *(sys.executable, "-c", COMMAND.format(then=then)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def let_go(self) -> bytes:
        """Close both ends of ours and wait; give what was printed."""
        self.process.stdin.close()
        with self.process.stdout as out:
            printed = out.read()
        self.process.wait()
        return printed

    def pids(self) -> list[int]:
        wait((self.folder / "pids").exists)
        return list(map(int, (self.folder / "pids").read_text().split()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kept-"))
    yield made
    keeper.end(made)


def test_nothing_outlives_the_owner(folder: Path) -> None:
    kept = Kept(folder, "time.sleep(600)")
    pids = kept.pids()
    assert all(map(is_alive, pids))
    kept.let_go()
    assert not any(map(is_alive, pids))
    assert not folder.exists()


def test_a_keeper_makes_its_folder(folder: Path) -> None:
    kept = Kept(folder / "below", "")
    kept.let_go()
    assert list(folder.iterdir()) == []


def test_nothing_outlives_the_command(folder: Path) -> None:
    kept = Kept(folder, "print('done'); sys.stdin.read()")
    pids = kept.pids()
    assert kept.let_go() == b"done\n"
    assert not any(map(is_alive, pids))
    assert not folder.exists()


def test_the_owner_sees_the_end_of_the_command_before_all_is_clean(folder: Path) -> None:
    kept = Kept(folder, "os.kill(os.getpid(), 9)")
    assert kept.process.stdout.read() == b""
    kept.let_go()
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_keeper_that_is_asked_to_end_cleans_up(folder: Path, number: int) -> None:
    kept = Kept(folder, "time.sleep(600)")
    pids = kept.pids()
    os.kill(kept.process.pid, number)
    kept.process.wait()
    kept.let_go()
    assert not any(map(is_alive, pids))
    assert not folder.exists()


def test_a_command_that_does_not_listen_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "GRACE", 0.0)
    pid = os.fork()
    if pid == 0:  # a keeper of its own patience
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        read, _ = os.pipe()
        os.dup2(read, 0)
        then = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        keeper.keep(folder, [sys.executable, "-c", COMMAND.format(then=then)])
        os._exit(0)
    wait((folder / "pids").exists)
    pids = list(map(int, (folder / "pids").read_text().split()))
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    assert not any(map(is_alive, pids))


def test_a_killed_keeper_takes_its_command_along_and_its_owner_cleans_up(folder: Path) -> None:
    kept = Kept(folder, "time.sleep(600)")
    command, daemon, bare = kept.pids()
    kept.process.kill()
    kept.process.wait()
    wait(lambda: not is_alive(command))
    assert keeper.carriers(folder) == {daemon}
    keeper.end(folder)
    assert not is_alive(daemon)
    assert not folder.exists()
    os.kill(bare, signal.SIGKILL)  # without its environment nothing says whose it is
    kept.let_go()


def test_only_its_own_processes_are_ended(folder: Path) -> None:
    """A folder whose name begins with another one's is not the other one."""
    other = Path(f"{folder}-other")
    other.mkdir()
    kept = Kept(other, "time.sleep(600)")
    pids = kept.pids()
    keeper.end(folder)
    assert all(map(is_alive, pids))
    kept.let_go()
