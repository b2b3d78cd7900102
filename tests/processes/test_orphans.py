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


CHILDLESS = """
import subprocess, sys
from ckpt_conformance.processes import orphans

run = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(orphans.all_children() == {run.pid})
print(orphans.known_children() == {run.pid})
run.communicate()

def refuse():
    raise AssertionError

orphans._parents = refuse
print(orphans.all_children())
print(orphans.known_children())
"""

ENDED = """
import os
from ckpt_conformance.processes import orphans

pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(orphans.all_children() == {pid})
orphans.reap((), kill=False)
print(orphans.all_children())
"""


def swept(others: str) -> list[str]:
    return alone(LIVES.replace("OTHERS", others))


def test_each_daemon_is_told_of_its_own_life() -> None:
    assert swept("(2,)") == ["4", "['sleep 601']", "['sleep 602']", "set()"]


def test_without_marks_the_first_is_given_both() -> None:
    """The control: what the marks are for."""
    assert swept("()") == ["4", "['sleep 601', 'sleep 602']", "[]", "set()"]


def test_marks_differ() -> None:
    assert len({orphans.marked(number) for number in range(1, 2000)}) == 1999


def test_who_has_no_child_reads_no_status() -> None:
    """To read that of each process of the machine took a third of what a supervisor costs."""
    assert alone(CHILDLESS) == ["True", "True", "set()", "set()"]


def test_a_child_that_has_ended_is_one_until_it_is_reaped() -> None:
    assert alone(ENDED) == ["True", "set()"]


def alone(program: str) -> list[str]:
    """Run a program that has no children yet: the tests' own process may have some."""
    run = [sys.executable, "-c", program]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
