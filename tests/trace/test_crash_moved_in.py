"""What is made elsewhere on the same disk, then renamed or linked in, is followed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from recording import Witness, needs_strace, plain, record, replay, tree
from test_crash_recorder import HEAD

from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.model.models import MODELS, OF_MOUNTS, OF_STORES
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.trace.operations import Recording

START = (
    HEAD
    + """
import tempfile
elsewhere = root.parent / "elsewhere"
elsewhere.mkdir()
def stage(data, sync=False, name=None):
    path = elsewhere / (name or "staged")
    with open(path, "wb") as f:
        f.write(data)
        if sync:
            f.flush(); os.fsync(f.fileno())
    return path
"""
)
MOVES = {
    "a new name": "os.rename(stage(b'new'), root / 'a')",
    "over an old name": """
(root / 'a').write_bytes(b'old'); os.rename(stage(b'new', True), root / 'a')
""",
    "a second name": """
staged = stage(b'one file'); os.link(staged, root / 'a'); staged.unlink()
""",
    "written on after it came in": """
with open(elsewhere / 'x', 'wb') as f:
    f.write(b'before'); f.flush(); os.rename(elsewhere / 'x', root / 'a'); f.write(b' and after')
""",
    "renamed elsewhere first": """
os.rename(stage(b'new'), elsewhere / 'y'); os.rename(elsewhere / 'y', root / 'a')
""",
    "a name that is used again": """
stage(b'first').unlink(); os.rename(stage(b'second'), root / 'a')
os.rename(stage(b'third'), root / 'b'); stage(b'never comes in')
""",
    "as tempfile and shutil do": """
import shutil
(root / 'source').write_bytes(b'payload' * 1000)
with tempfile.TemporaryDirectory(dir=elsewhere) as folder:
    staged = shutil.copyfile(root / 'source', folder + '/staged'); shutil.move(staged, root / 'a')
with tempfile.NamedTemporaryFile(dir=elsewhere, delete=False) as f:
    f.write(b'named'); f.flush(); os.fsync(f.fileno())
shutil.move(f.name, root / 'd')
""",
}


@needs_strace
@pytest.mark.parametrize("name", MOVES)
def test_what_comes_in_equals_what_strace_says(name: str, tmp_path: Path) -> None:
    """Of what comes in strace tells the name; bytes from before show in the replay."""
    recording = record(tmp_path, START + MOVES[name], by="strace")
    seen = Witness(tmp_path / "root").read(tmp_path / "strace")
    mine = plain(recording)
    assert [one for one in mine if one[1] or one[2]] == [one for one in seen if one[1] or one[2]]
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


FOLDERS = {
    "a directory": """
folder = elsewhere / 'd'; folder.mkdir()
(folder / 'x').write_bytes(b'x'); (folder / 'sub').mkdir(); (folder / 'sub' / 'y').write_bytes(b'y')
os.symlink('x', folder / 'link'); os.rename(folder, root / 'm'); (root / 'm' / 'x').unlink()
""",
    "renamed within": """
folder = elsewhere / 'd'; folder.mkdir(); (folder / 'x').write_bytes(b'x')
os.rename(folder / 'x', folder / 'y'); (folder / 'z').write_bytes(b'z'); (folder / 'z').unlink()
os.rename(folder, elsewhere / 'e'); os.rename(elsewhere / 'e', root / 'm')
""",
    "as tempfile and shutil do": """
import shutil
folder = Path(tempfile.mkdtemp(dir=elsewhere)); (folder / 'x').write_bytes(b'x' * 9000)
shutil.move(folder, root / 'm')
""",
    "a file of it first": """
folder = elsewhere / 'd'; folder.mkdir(); (folder / 'x').write_bytes(b'x')
(folder / 'y').write_bytes(b'y'); os.rename(folder / 'x', root / 'x'); os.rename(folder, root / 'm')
os.link(root / 'm' / 'y', root / 'y')
""",
    "over an empty one": """
(root / 'm').mkdir(); folder = elsewhere / 'd'; folder.mkdir(); (folder / 'x').write_bytes(b'x')
os.rename(folder, root / 'm')
""",
    "emptied and filled again": """
stage(b'first'); os.rename(stage(b'second'), root / 'm')
""",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_directory_that_comes_in_has_what_was_made_in_it(name: str, tmp_path: Path) -> None:
    recording = record(tmp_path, START + FOLDERS[name])
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


NOT_SEEN = {
    "a directory with a file of somebody else": """
(elsewhere / 'd').mkdir(); os.rename(root.parent / 'script.py', elsewhere / 'd' / 'x')
os.rename(elsewhere / 'd', root / 'm')
""",
    "a directory of before": """
os.rename(root.parent / 'before', root / 'm')
""",
    "a file that was in the directory": """
(root / 'a').write_bytes(b'a'); (elsewhere / 'd').mkdir()
os.rename(root / 'a', elsewhere / 'd' / 'a'); os.rename(elsewhere / 'd', root / 'm')
""",
    "emptied and filled again where nobody looks": """
for data in (b'first', b'second'):
    (root.parent / 'before' / 'x').write_bytes(data)
os.rename(root.parent / 'before' / 'x', root / 'm')
""",
    "a file of somebody else": """
os.rename(root.parent / 'script.py', root / 'm')
""",
}


@pytest.mark.parametrize("name", NOT_SEEN)
def test_content_that_was_not_seen_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    recording = record(tmp_path, START + NOT_SEEN[name])
    assert [one.path for one in recording.unsupported] == ["m"]


def test_what_never_comes_in_leaves_no_trace(tmp_path: Path) -> None:
    script = START + "stage(b'x' * 9000, True); (root / 'a').write_bytes(b'a')\n"
    script += "import mmap; f = open(stage(b'y', name='z'), 'r+b'); mmap.mmap(f.fileno(), 1)\n"
    recording = record(tmp_path, script)
    assert recording.unsupported == []
    assert {one.path for one in recording.operations} == {"a"}
    assert [one.index for one in recording.operations] == list(range(len(recording.operations)))


def _outcomes(recording: Recording, model: str, folder: Path) -> set[bytes]:
    """Give what the name `a` may hold after a crash, where it is there; each state is legal."""
    found: set[bytes] = set()
    materializer, rng = Materializer(recording, folder), random.Random(0)  # noqa: S311
    for state in MODELS[model].states(recording, rng, 2000):
        for judge in (MODELS[model], MODELS["posix"]):
            assert judge.illegal(recording, state) == ""
        materializer.apply(state)
        if (folder / "a").exists():
            found.add((folder / "a").read_bytes())
    return found


@pytest.mark.parametrize("model", [name for name in MODELS if name not in {*OF_STORES, *OF_MOUNTS}])
@pytest.mark.parametrize("sync", [True, False])
def test_a_sync_before_it_comes_in_counts(model: str, *, sync: bool, tmp_path: Path) -> None:
    """With it the name never shows fewer bytes; without it a power cut may take them."""
    script = START + f"os.rename(stage(b'new' * 3000, {sync}), root / 'a'); os.fsync(here)"
    recording = record(tmp_path, script)
    assert recording.operations[-1].kind is Kind.FSYNC
    found = _outcomes(recording, model, tmp_path / "laid")
    if sync or model in ("kill", "ranks"):
        assert found == {b"new" * 3000}
    else:
        assert len(found) > 1, "a power cut may leave fewer bytes"


@pytest.mark.parametrize("model", [name for name in MODELS if name not in {*OF_STORES, *OF_MOUNTS}])
@pytest.mark.parametrize("sync", [True, False])
def test_a_directory_that_comes_in_is_whole_once_it_is_synced(
    model: str, *, sync: bool, tmp_path: Path
) -> None:
    """Its files and its own entries are synced before, or a power cut may take bytes."""
    script = (
        START
        + f"""
folder = elsewhere / 'd'; folder.mkdir()
with open(folder / 'x', 'wb') as f:
    f.write(b'new' * 3000)
    if {sync}:
        f.flush(); os.fsync(f.fileno())
if {sync}:
    os.fsync(os.open(folder, os.O_RDONLY))
os.rename(folder, root / 'm'); os.fsync(here)
"""
    )
    recording = record(tmp_path, script)
    assert recording.unsupported == []
    found: set[bytes | None] = set()
    materializer, rng = Materializer(recording, tmp_path / "laid"), random.Random(0)  # noqa: S311
    for state in MODELS[model].states(recording, rng, 2000):
        for judge in (MODELS[model], MODELS["posix"]):
            assert judge.illegal(recording, state) == ""
        materializer.apply(state)
        if (tmp_path / "laid" / "m").is_dir():
            file = tmp_path / "laid" / "m" / "x"
            found.add(file.read_bytes() if file.exists() else None)
    if sync or model in ("kill", "ranks"):
        assert found == {b"new" * 3000}
    else:
        assert len(found) > 1, "a power cut may leave fewer bytes"
