"""A small kill matrix on a cluster whose processes are killed all the time: it is that of one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import cluster_jobs
import pytest

from ckpt_conformance.cli import mutants, sessions
from ckpt_conformance.cli.sessions import Work
from ckpt_conformance.cluster.place import Place
from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.processes import keeper
from ckpt_conformance.work import lines
from ckpt_conformance.work.items import Shard

pytest.importorskip("distributed", reason="the extra cluster is not installed")
pytest.importorskip("cryptography", reason="the extra cluster is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS = SessionOptions(
    adapters=("reference", "mutant:R01", "mutant:O01"),
    only=(
        *("CKC-SMOK-001", "CKC-SMOK-003", "CKC-RETN-001", "CKC-RETN-002", "CKC-DISC-001"),
        *("CKC-COMP-001", "CKC-COMP-003", "CKC-RTRP-001", "CKC-ATOM-002", "CKC-SIDE-002"),
    ),
    claims=tuple(PROFILES),
)
KILLS = 8
VICTIMS = {
    "worker": "spawn_main",
    "runner": "-m ckpt_conformance.cluster.runner",
    "fork server": "-m ckpt_conformance.harness.server",
}


def matrix(work: Work) -> str:
    session = sessions.run(OPTIONS, "mutants", work=work)
    with redirect_stdout(StringIO()) as printed:
        mutants.deliver(session, OPTIONS, as_json=True)
    return printed.getvalue()


def canonical(path: Path, scratch: Path) -> list[dict[str, object]]:
    return without_chance(lines.read(path), scratch)


def without_chance(results: lines.Results, scratch: Path) -> list[dict[str, object]]:
    """Return results without what differs from run to run.

    That are the seconds, the order of lines, and in texts the paths of temporary folders.
    """
    folders = re.compile(rf"{scratch}(/ckc-[\w-]+)+(/tmp/subject\d+)?")
    texts = [
        folders.sub("FOLDER", bytes(line.result).decode()) for line in results.results.values()
    ]
    found = [json.loads(text) | {"seconds": 0} for text in texts]
    return sorted(found, key=lambda one: (one["adapter"], one["check"]))


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _is_itself(pid: int, name: str) -> bool:
    """Leave out a runner's keeper, which names it, and children of a server, which are its forks.

    A killed child is what checks are about: it is a finding, and no fault of the machine.
    """
    if name == "fork server":
        return VICTIMS["runner"] in command(cluster_jobs.parent(pid))
    return "processes.keeper" not in command(pid)


class Killer:
    """Kills a process of the cluster, drawn by a seed, as results come in."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        """Draw when to kill, and what kind of process each time."""
        self.folder, self.random = folder, random.Random(seed)  # noqa: S311  no secret
        self.at = set(self.random.sample(range(steps), KILLS))
        self.done, self.killed = 0, list[str]()

    def __call__(self) -> None:
        if self.done in self.at:
            self._kill()
        self.done += 1

    def _kill(self) -> None:
        there = [
            (name, pid)
            for pid in sorted(self._processes())
            for name, words in VICTIMS.items()
            if words in command(pid) and _is_itself(pid, name)
        ]
        if there:
            name, pid = self.random.choice(there)
            os.kill(pid, signal.SIGKILL)
            self.killed.append(name)

    def _processes(self) -> set[int]:
        return {pid for kept in self.folder.glob("ckc-cluster-*") for pid in keeper.carriers(kept)}


@pytest.mark.parametrize("seed", [0, 1])
def test_kills_change_nothing(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    expected = matrix(Work(results=one))
    killer = Killer(scratch, seed, steps=len(lines.read(one).results))
    step = sessions._Run._step

    def kill_and_step(run: sessions._Run, outcome: object) -> None:
        killer()
        step(run, outcome)

    monkeypatch.setattr(sessions._Run, "_step", kill_and_step)
    assert matrix(Work(results=many, place=Place("local:2", local=2))) == expected
    assert killer.killed
    assert canonical(many, scratch) == canonical(one, scratch)
    assert list(scratch.iterdir()) == []


def test_shards_on_a_cluster_make_the_report_of_one_process(scratch: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", [tmp_path / f"{number}.jsonl" for number in (1, 2)]
    matrix(Work(results=whole))
    for number, path in enumerate(parts, 1):
        place = Place("local:1", local=1)
        shard = Shard(number, len(parts))
        sessions.run(OPTIONS, "mutants", work=Work(shard, results=path, place=place))
    combined = lines.combine([lines.read(path) for path in parts])
    assert combined.ended
    assert not combined.missing
    assert without_chance(combined, scratch) == canonical(whole, scratch)
