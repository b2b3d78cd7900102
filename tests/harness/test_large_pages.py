"""The server's interpreter has large pages; what it starts has the environment of its owner."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_conformance.harness import client
from ckpt_conformance.harness.messages import JobSpec, Probe, ProbeResult, Program

# Where it says `always` malloc has no need to ask for them; where it says `never` none come.
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHOWN = """
import os, subprocess, sys
from ckpt_conformance.contract import AdapterBase
AT_IMPORT = {name: os.environ.get(name) for name in (NAMES)}
def seen(child):
    code = "import os; print([os.environ.get(name) for name in (NAMES)])"
    below = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    now = {name: os.environ.get(name) for name in AT_IMPORT}
    pages = "hg" in open("/proc/self/smaps").read().split("[heap]")[1].split("VmFlags:")[1].split()
    return {"import": AT_IMPORT, "child": now, "below": below.strip(), "pages": pages}
class Adapter(AdapterBase):
    def open(self, root, options):
        raise NotImplementedError
def make():
    return Adapter(name="shown", version="1")
""".replace("NAMES", repr(tuple(client.LARGE_PAGES))[1:-1])


def seen(folder: Path) -> dict[str, Any]:  # as `SHOWN` made it
    """Ask a child of a server what it sees of its environment, and of its heap."""
    asked = Program(
        adapter="shown:make",
        root=str(folder),
        journal=str(folder / "journal"),
        result=str(folder / "result"),
        output=str(folder / "output"),
        job=JobSpec(kind="plain", seed=0),
        ops=(Probe(probe="shown:seen"),),
    )
    with (
        client.Server(("shown:make",)) as server,
        contextlib.closing(client.Client(server.socket)) as connection,
    ):
        result = connection.run(asked)
    assert result.went_well, (result.error, result.output)
    value: dict[str, Any] = result.of(ProbeResult).value
    return value


@pytest.mark.parametrize("own", [{}, {"PYTHONMALLOC": "pymalloc"}], ids=["unset", "set"])
def test_a_child_has_the_environment_of_the_owner(
    own: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name in client.LARGE_PAGES:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    expected = {name: own.get(name) for name in client.LARGE_PAGES}
    said = seen(tmp_path)
    assert said["import"] == said["child"] == expected
    assert said["below"] == str(list(expected.values()))
    assert said["pages"] == (not own and KERNEL.exists() and "[madvise]" in KERNEL.read_text())
