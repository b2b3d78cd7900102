"""`--timeout` and `--file-timeout`: what takes too long is unknown, and the command ends."""

from __future__ import annotations

import io
import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import commands
import pytest
import torch
from stopped import PATIENCE, Place, place
from test_fsck_stopped import sparse

from ckpt_conformance.fsck.formats import safetensors_file, torchscript, torchsnapshot
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.source.clock import Clock
from ckpt_conformance.fsck.source.findings import OutOfTime
from ckpt_conformance.fsck.source.untrusted import parse_any_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["place"]

FOR_ALL, FOR_FILE = "--timeout", "--file-timeout"
# A disk that is gone: a read of `stuck.pt` does not come back.
STUCK = """
import threading
from ckpt_conformance.fsck.source import disk
opened = disk.DiskFolder.open
def open(self, name):
    if name.endswith("stuck.pt"):
        threading.Event().wait()
    return opened(self, name)
disk.DiskFolder.open = open
"""


@pytest.fixture
def run(place: Place) -> Path:
    """Three steps; the one in the middle is what a test makes of it."""
    run = place.folder / "run"
    for step in (1, 2, 3):
        (run / f"step_{step}").mkdir(parents=True)
        torch.save({"w": torch.ones(3)}, run / f"step_{step}" / "model.pt")
    return run


def fsck(place: Place, *words: str, path: Path | None = None) -> tuple[int, dict[str, Any], str]:
    process = place.start("fsck", "--json", *words, **({"path": path} if path else {}))
    out, _ = process.communicate(timeout=PATIENCE)
    errors = (place.folder / "err").read_text()
    return process.returncode, json.loads(out) if out else {}, errors


def states(found: dict[str, Any]) -> dict[str, str]:
    return {one["path"].rpartition("/")[2]: one["state"] for one in found["checkpoints"]}


def why(found: dict[str, Any], step: str) -> list[str]:
    (report,) = [one for one in found["checkpoints"] if one["path"].endswith(step)]
    return [f"{one['file']}: {one['what']}" for one in report["findings"]]


@pytest.mark.parametrize("option", [FOR_ALL, FOR_FILE])
def test_a_file_that_takes_an_hour_is_unknown(option: str, place: Place, run: Path) -> None:
    sparse(run / "step_2" / "large.safetensors")
    status, found, _ = fsck(place, "--nan", option, "5", "run")
    assert status == 2
    assert states(found)["step_2"] == "unknown"
    if option == FOR_FILE:  # else others have no time, either
        assert states(found) == {"step_1": "whole", "step_2": "unknown", "step_3": "whole"}
    assert any(option in line for line in why(found, "step_2"))


@pytest.mark.parametrize("option", [FOR_ALL, FOR_FILE])
def test_a_read_that_does_not_come_back_is_left(option: str, place: Place, run: Path) -> None:
    """Both threads of a step's readers, and more steps than are open at once."""
    (place.folder / "sitecustomize.py").write_text(STUCK)
    for step in (4, 5, 6):
        (run / f"step_{step}").mkdir()
        torch.save({"w": torch.ones(3)}, run / f"step_{step}" / "stuck.pt")
    status, found, _ = fsck(place, option, "4", "run", path=place.folder)
    assert status == 2
    assert [one for one, state in states(found).items() if state == "unknown"] == [
        *("step_6", "step_5", "step_4")
    ]
    for step in ("step_4", "step_5", "step_6"):
        assert any(option in line for line in why(found, step))


def test_the_newest_whole_one_hides_behind_what_is_late(place: Place, run: Path) -> None:
    (place.folder / "sitecustomize.py").write_text(STUCK)
    torch.save({"w": torch.ones(3)}, run / "step_3" / "stuck.pt")
    process = place.start("fsck", "--newest-whole", FOR_ALL, "4", "run", path=place.folder)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (2, "")


@pytest.mark.parametrize("words", [("fsck",), ("fsck", "--newest-whole"), ("diff", ".")])
def test_a_store_that_never_answers(words: tuple[str, ...], place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/run/model.safetensors"
        process = place.start(*words, url, FOR_ALL, "1")
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "--timeout is used up" in (place.folder / "err").read_text()


@pytest.fixture
def no_time() -> Iterator[None]:
    """A file was opened, and all of its time is used up."""
    Clock(file=0.0).opened("data.pkl")
    yield
    Clock().opened("")


@pytest.mark.usefixtures("no_time")
def test_a_pickle_that_takes_too_long_to_be_followed() -> None:
    with pytest.raises(OutOfTime, match="--file-timeout"):
        pickles.load(b"\x80\x04" + b"N0" * 2000 + b"N.", ())


@pytest.mark.usefixtures("no_time")
def test_torchscript_that_takes_too_long_to_be_parsed_is_not_unsafe() -> None:
    with pytest.raises(OutOfTime, match="--file-timeout"):
        list(torchscript.problems({"code/__torch__.py": b"class C(Module):\n  a : int\n"}))


LONG = range(100_000)
TEXTS: dict[str, object] = {
    "an object": {f"layers.{number}": "model.safetensors" for number in LONG},
    "an object in one": {"weight_map": {f"layers.{number}": "model" for number in LONG}},
    "objects": {str(number): {"shape": [number], "dtype": "F32"} for number in LONG},
    "numbers": {"merges": list(range(400_000))},
    "texts": [f"token {number}" for number in LONG],
}


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("sort", TEXTS)
def test_json_that_takes_too_long_to_be_parsed(sort: str) -> None:
    with pytest.raises(OutOfTime, match="--file-timeout"):
        parse_any_json(json.dumps(TEXTS[sort]).encode())


@pytest.mark.usefixtures("no_time")
def test_a_header_that_takes_too_long_to_be_parsed() -> None:
    entries = {f"w{at}": {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]} for at in LONG}
    header = json.dumps(entries).encode()
    with pytest.raises(OutOfTime, match="--file-timeout"):
        safetensors_file.read(io.BytesIO(struct.pack("<Q", len(header)) + header))


@pytest.mark.usefixtures("no_time")
def test_yaml_that_takes_too_long_to_be_parsed() -> None:
    pytest.importorskip("yaml", reason="pip install 'ckpt-conformance[tools]'")
    text = "version: 0.1.0\nworld_size: 1\nmanifest:\n"
    text += "".join(f"  0/w{number}: {{type: list}}\n" for number in range(100))
    with pytest.raises(OutOfTime, match="--file-timeout"):
        torchsnapshot.read(text.encode())


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e99"])
@pytest.mark.parametrize("option", [FOR_ALL, FOR_FILE])
def test_what_is_no_time_is_refused(option: str, value: str, run: Path) -> None:
    done = commands.run("fsck", option, value, str(run))
    assert done.returncode == 2
    assert value in done.stderr
    assert "seconds above 0" in " ".join(done.stderr.replace("│", " ").split())
