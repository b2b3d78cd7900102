"""A daemon that a child leaves is ended and named with that child, whichever child ends first."""

from __future__ import annotations

import subprocess
import sys

from ckpt_conformance.processes import orphans

# Two children, each leaving a daemon in a session of its own; the first is asked about while the
# second goes on. `command` is what each daemon becomes.
LIVES = """
import os
from ckpt_conformance.processes import orphans

orphans.adopt()
ready, write = os.pipe()

def child(number, command):
    pid = os.fork()
    if pid == 0:
        orphans.mark(number)
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execvp(command[0], command)
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

first = child(1, ["sleep", "601"])
second = child(2, ["sleep", "602"])
os.close(write)
os.read(ready, 1)  # an exec closes it, a moment before there is a command line
for pid in orphans.children() - {first, second}:
    while not open(f"/proc/{pid}/cmdline").read():
        pass
print(len(orphans.children()))
for pid, number, own, others in ((first, 1, (first, second), OTHERS), (second, 2, (second,), ())):
    print(sorted(one.split(" (")[0] for one in orphans.sweep(own, pid, others)))
    os.waitpid(pid, 0)
print(orphans.children())
"""


def swept(others: str) -> list[str]:
    run = [sys.executable, "-c", LIVES.replace("OTHERS", others)]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()


def test_each_daemon_is_told_of_its_own_life() -> None:
    assert swept("(2,)") == ["4", "['sleep 601']", "['sleep 602']", "set()"]


def test_without_marks_the_first_is_given_both() -> None:
    """The control: what the marks are for."""
    assert swept("()") == ["4", "['sleep 601', 'sleep 602']", "[]", "set()"]


def test_marks_differ() -> None:
    assert len({orphans.marked(number) for number in range(1, 2000)}) == 1999
