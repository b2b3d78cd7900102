"""Faults at a call: each fires where it is told to, proves it, and puts everything back."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import journal
from ckpt_conformance.fault_injectors import files, injector, patched_calls, points
from ckpt_conformance.fault_injectors.patched_calls import Kind, PatchedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.fault_injectors.injector import Injector

STATE = {"weight": torch.arange(64.0)}


def save_torch(root: Path) -> None:
    torch.save(STATE, root / "a.pt")


def load_torch(root: Path) -> None:
    torch.load(root / "old.pt", weights_only=True)


def save_dcp(root: Path) -> None:
    dcp.save(dict(STATE), checkpoint_id=root / "dcp", no_dist=True)


def load_dcp(root: Path) -> None:
    dcp.load({"weight": torch.zeros(64)}, checkpoint_id=root / "old_dcp", no_dist=True)


def write_file(root: Path) -> None:
    (root / "a.txt").write_text("some text")


def read_file(root: Path) -> None:
    (root / "old.txt").read_text()


def rename_file(root: Path) -> None:
    (root / "old.txt").rename(root / "new.txt")


def unlink_file(root: Path) -> None:
    (root / "old.txt").unlink()


def sync_file(root: Path) -> None:
    with (root / "old.txt").open("rb") as file:
        os.fsync(file.fileno())


def collect(_: Path) -> None:
    nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()


CALLS: dict[str, Callable[[Path], None]] = {
    "torch-save": save_torch,
    "torch-load": load_torch,
    "dcp-save": save_dcp,
    "dcp-load": load_dcp,
    "dcp-writer": save_dcp,
    "file-write": write_file,
    "file-read": read_file,
    "rename": rename_file,
    "unlink": unlink_file,
    "fsync": sync_file,
    "collecting": collect,
}


def injector_of(name: str, root: Path, notes: journal.ChildJournal, **given: Any) -> Injector:  # noqa: ANN401
    """Make an injector from its name, as a child does."""
    fault = fault_injectors.spec(name, **given)
    module, _, attribute = fault.injector.partition(":")
    made: Injector = getattr(importlib.import_module(module), attribute)(
        root=root, journal=notes, **fault.args
    )
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    torch.save(STATE, folder / "old.pt")
    dcp.save(dict(STATE), checkpoint_id=folder / "old_dcp", no_dist=True)
    return folder


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[journal.ChildJournal]:
    child_journal = journal.ChildJournal(tmp_path / "journal")
    yield child_journal
    os.close(child_journal.descriptor)


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    watched = (io.open, os.replace, os.rename, os.unlink, os.fsync, os.write, torch.save)
    watched += (torch.load, dcp.save, dcp.load, nn.Module.state_dict, Path.open)
    yield
    after = (io.open, os.replace, os.rename, os.unlink, os.fsync, os.write, torch.save)
    after += (torch.load, dcp.save, dcp.load, nn.Module.state_dict, Path.open)
    assert watched == after


@contextmanager
def armed_with(made: Injector) -> Iterator[Injector]:
    """Install an injector and remove it, also after an error."""
    made.install()
    try:
        yield made
    finally:
        made.remove()


def fired(tmp_path: Path) -> list[journal.Fired]:
    """Read the journal, in which nothing but faults is noted."""
    events = journal.read(tmp_path / "journal")
    assert journal.has_fired(events)
    assert all(isinstance(event, journal.Fired) for event in events)
    return [event for event in events if isinstance(event, journal.Fired)]


@pytest.mark.parametrize("name", CALLS)
def test_a_pass_that_counts_changes_nothing(
    name: str, root: Path, notes: journal.ChildJournal
) -> None:
    with armed_with(injector_of(name, root, notes)) as armed:
        CALLS[name](root)
    assert armed.calls == len(armed.log) >= 1
    assert armed.fired == 0


@pytest.mark.parametrize("name", CALLS)
def test_it_raises_at_the_call_and_says_so(
    name: str, root: Path, notes: journal.ChildJournal, tmp_path: Path
) -> None:
    with armed_with(injector_of(name, root, notes, at=1, error="ENOSPC")) as armed:
        # DCP wraps what its writer raises, in an exception that is no Exception.
        with pytest.raises(BaseException, match="No space left"):
            CALLS[name](root)
        assert armed.fired == 1
    assert len(fired(tmp_path)) == 1


@pytest.mark.parametrize("name", CALLS)
def test_it_fires_once_and_everything_is_put_back(
    name: str, root: Path, notes: journal.ChildJournal
) -> None:
    armed = injector_of(name, root, notes, at=2, mode="raise")
    armed.install()
    armed.remove()
    CALLS[name](root)
    assert armed.calls == 0


def test_paths_elsewhere_do_not_count(
    root: Path, notes: journal.ChildJournal, tmp_path: Path
) -> None:
    with (
        armed_with(injector_of("file-write", root, notes, at=1)) as writes,
        armed_with(injector_of("torch-save", root, notes, at=1)) as saves,
    ):
        (tmp_path / "rooted.txt").write_text("beside")
        torch.save(STATE, tmp_path / "beside.pt")
        torch.save(STATE, io.BytesIO())
    assert (writes.calls, saves.calls) == (0, 0)


def test_a_mirror_can_be_watched_instead(
    root: Path, notes: journal.ChildJournal, tmp_path: Path
) -> None:
    with armed_with(
        injector_of("file-write", root, notes, below=str(tmp_path / "mirror"))
    ) as armed:
        write_file(root)
        (tmp_path / "mirror").mkdir()
        (tmp_path / "mirror" / "a").write_bytes(b"copy")
    assert {entry.path for entry in armed.log} == {"a"}


def test_a_rename_across_is_refused_as_between_two_file_systems(
    root: Path, notes: journal.ChildJournal, tmp_path: Path
) -> None:
    memory = Path("/dev/shm")  # noqa: S108  a mount of its own on every Linux
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system for the temporary folder")
    staged = tmp_path / "staged"
    staged.write_text("new")
    crossing = pytest.raises(OSError, match="cross-device")
    with tempfile.TemporaryDirectory(dir=memory) as other, crossing as real:
        staged.rename(Path(other) / "x")
    with armed_with(injector_of("cross-device", root, notes)) as armed:
        with pytest.raises(OSError, match="cross-device") as injected:
            staged.rename(root / "x")
        (root / "old.txt").rename(root / "new.txt")
        shutil.move(staged, root / "new.txt")
    assert str(injected.value) == str(real.value).replace(other, str(root))
    assert (root / "new.txt").read_text() == "new"
    assert armed.fired == armed.calls == 2
    assert [event.what for event in fired(tmp_path)] == ["os.rename", "os.rename"]


@pytest.mark.parametrize("is_below", [True, False])
def test_a_file_without_a_name_lies_where_it_was_made(
    root: Path, notes: journal.ChildJournal, tmp_path: Path, *, is_below: bool
) -> None:
    """open(2), O_TMPFILE: such a file gets its name by a link from /proc/self/fd."""
    try:
        descriptor = os.open(root if is_below else tmp_path, os.O_TMPFILE | os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"the temporary folder's file system has no O_TMPFILE: {error}")
    refused = contextlib.nullcontext() if is_below else pytest.raises(OSError, match="cross-device")
    with armed_with(injector_of("cross-device", root, notes)) as armed, refused:
        # With a descriptor of a directory it is linkat(2), which can follow the link.
        os.link(f"/proc/self/fd/{descriptor}", root / "named", src_dir_fd=descriptor)
    os.close(descriptor)
    assert (root / "named").exists() is is_below
    assert armed.fired == (not is_below)


def test_the_nth_call_is_struck_and_the_next_is_not(
    root: Path, notes: journal.ChildJournal
) -> None:
    with armed_with(injector_of("rename", root, notes, at=2)) as armed:
        (root / "old.txt").rename(root / "1")
        with pytest.raises(OSError, match="injected") as caught:
            (root / "1").rename(root / "2")
        (root / "1").rename(root / "3")
    assert caught.value.errno == errno.EIO
    assert (armed.calls, armed.fired) == (3, 1)


def test_a_persistent_fault_strikes_from_there_on(root: Path, notes: journal.ChildJournal) -> None:
    with armed_with(injector_of("unlink", root, notes, at=2, persistent=True)) as armed:
        (root / "old.txt").unlink()
        for _ in range(3):
            with pytest.raises(OSError, match="injected"):
                (root / "old.pt").unlink()
    assert armed.fired == 3


def test_after_means_that_the_call_was_done(root: Path, notes: journal.ChildJournal) -> None:
    armed = injector_of("rename", root, notes, at=1, moment="after")
    with armed_with(armed), pytest.raises(OSError, match="injected"):
        (root / "old.txt").rename(root / "new.txt")
    assert (root / "new.txt").exists()


@pytest.mark.parametrize("prefix", injector.PREFIXES)
@pytest.mark.parametrize("through_a_file", [False, True])
def test_torch_save_leaves_a_prefix_of_its_own_bytes(
    prefix: str, root: Path, notes: journal.ChildJournal, *, through_a_file: bool
) -> None:
    save_torch(root)
    whole = (root / "a.pt").stat().st_size
    armed = injector_of("torch-save", root, notes, at=1, moment="prefix", prefix=prefix)
    injected = pytest.raises(OSError, match="injected")
    with armed_with(armed), injected, (root / "a.pt").open("wb") as file:
        torch.save(STATE, file if through_a_file else root / "a.pt")
    left = (root / "a.pt").read_bytes()
    assert len(left) == injector.length_of(prefix, whole) or through_a_file
    assert left[:2] in {b"", b"P", b"PK"}
    with pytest.raises((RuntimeError, EOFError, ValueError, pickle.UnpicklingError)):
        torch.load(io.BytesIO(left), weights_only=True)


def test_a_disk_that_fills_up_takes_a_part_and_refuses_the_rest(
    root: Path, notes: journal.ChildJournal
) -> None:
    armed = injector_of("file-write", root, notes, at=2, moment="prefix", error="ENOSPC")
    with armed_with(armed), pytest.raises(OSError, match="No space") as caught:
        (root / "a.bin").write_bytes(b"x" * 1000)
    assert caught.value.errno == errno.ENOSPC
    assert (root / "a.bin").read_bytes() == b"x" * 500
    assert armed.fired == 1


def test_a_short_write_is_a_fault_that_only_the_count_shows(
    root: Path, notes: journal.ChildJournal
) -> None:
    with armed_with(injector_of("file-write", root, notes, at=2, moment="prefix")) as armed:
        with io.FileIO(root / "unseen", "w") as unseen:
            unseen.write(b"not through open")
        with open(root / "a.bin", "wb", buffering=0) as file:  # noqa: PTH123  the call under test
            assert file.write(b"x" * 10) == 5
    assert armed.fired == 1


def test_names_that_were_imported_are_replaced_too(
    root: Path, notes: journal.ChildJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "replace", os.replace, raising=False)
    with armed_with(injector_of("rename", root, notes)) as armed:
        files.replace(root / "old.txt", root / "new.txt")  # type: ignore[attr-defined]
    assert armed.calls == 1


def test_two_injectors_of_one_function_both_see_it(root: Path, notes: journal.ChildJournal) -> None:
    with (
        armed_with(injector_of("file-write", root, notes)) as writes,
        armed_with(injector_of("file-read", root, notes)) as reads,
    ):
        shutil.copyfile(root / "old.txt", root / "copy.txt")
    assert {entry.path for entry in writes.log} == {"copy.txt"}
    assert {entry.path for entry in reads.log} == {"old.txt"}
    assert (root / "copy.txt").read_text() == "old"


def test_a_survey_holds_the_tree_at_each_call(root: Path, notes: journal.ChildJournal) -> None:
    with armed_with(injector_of("file-write", root, notes, survey=True)) as armed:
        (root / "a.txt").write_text("some text")
    first, second = (set(entry.tree) for entry in armed.log)
    assert second - first == {"a.txt"}


@pytest.mark.parametrize("mode", ["w", "wb", "a", "x", "r+", "w+b"])
def test_hooked_files_are_what_open_gives(
    mode: str, root: Path, notes: journal.ChildJournal, tmp_path: Path
) -> None:
    def use(path: Path) -> tuple[object, ...]:
        if "r" in mode:
            path.write_text("0123456789")
        with path.open(mode) as file:
            written = file.write("ab" if "b" not in mode else b"ab")
            shape = (type(file), file.mode, written)
        return (*shape, path.read_bytes())

    real = use(tmp_path / "real")
    with armed_with(injector_of("file-write", root, notes)) as armed:
        assert use(root / "hooked") == real
    assert armed.calls >= 2


def test_a_component_is_asked_once_however_deep_it_is(
    root: Path, notes: journal.ChildJournal
) -> None:
    with armed_with(injector_of("collecting", root, notes, at=2, error="MemoryError")) as armed:
        collect(root)
        with pytest.raises(MemoryError, match="injected"):
            collect(root)
    assert armed.calls == 2


def test_an_unknown_argument_is_refused(root: Path, notes: journal.ChildJournal) -> None:
    with pytest.raises(TypeError, match="takes no argument"):
        injector_of("file-write", root, notes, when=3)


@pytest.mark.parametrize("into_memory", [False, True])
def test_a_file_that_is_given_by_name_is_cut_too(
    root: Path, notes: journal.ChildJournal, *, into_memory: bool
) -> None:
    armed = injector_of("torch-save", root, notes, at=1, moment="prefix", prefix="1")
    path = root / "a.pt"
    with armed_with(armed), path.open("wb") as file, pytest.raises(OSError, match="injected"):
        torch.save(STATE, f=file if into_memory else path)
    assert path.read_bytes() == b"P"


def test_arguments_of_a_patched_call_arrive(root: Path, notes: journal.ChildJournal) -> None:
    with armed_with(injector_of("rename", root, notes)) as armed:
        (root / "link").symlink_to("old.txt", target_is_directory=False)
        os.link(src=root / "old.txt", dst=root / "hard", follow_symlinks=True)
    assert (root / "link").read_text() == (root / "hard").read_text() == "old"
    assert [(call.what, call.path) for call in armed.log] == [
        ("os.symlink", "link"),
        ("os.link", "hard"),
    ]


def test_a_deletion_beside_a_descriptor_has_its_name(
    root: Path, notes: journal.ChildJournal
) -> None:
    (root / "folder").mkdir()
    (root / "folder" / "a").touch()
    with armed_with(injector_of("unlink", root, notes)) as armed:
        shutil.rmtree(root / "folder")
    assert [call.path for call in armed.log] == ["folder/a", "folder"]


def test_the_rust_writer_of_safetensors(root: Path, notes: journal.ChildJournal) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    armed = injector_of("safetensors-save", root, notes, at=1, moment="prefix")
    with armed_with(armed), pytest.raises(OSError, match="injected"):
        safetensors.save_file({"a": torch.ones(8)}, root / "a.safetensors")
    assert armed.fired == 1
    assert (root / "a.safetensors").exists()


DYING = """
import sys
from contextlib import contextmanager
from pathlib import Path
from ckpt_conformance.fault_injectors.file_write import FileWrite
from ckpt_conformance.contract.journal import ChildJournal
root = Path(sys.argv[1])
journal = ChildJournal(root.parent / "journal")
armed = FileWrite(root, journal, at=2, mode="kill", moment=sys.argv[2])
armed.install()
with (root / "a.bin").open("wb") as file:
    file.write(b"x" * 100)
    file.flush()
    file.write(b"never")
raise SystemExit(3)
"""


@pytest.mark.parametrize(("moment", "left"), [("before", 0), ("prefix", 50), ("after", 100)])
def test_a_kill_is_a_real_one_and_is_written_down_first(
    moment: str, left: int, root: Path, tmp_path: Path
) -> None:
    ended = subprocess.run([sys.executable, "-c", DYING, str(root), moment], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (root / "a.bin").stat().st_size == left
    (event,) = fired(tmp_path)
    assert (event.what, event.path) == ("write", "a.bin")


def test_every_fault_is_described() -> None:
    described = fault_injectors.all_faults()
    assert set(CALLS) <= set(described)
    assert all(info.models and info.not_models and info.proof for info in described.values())


def rows() -> dict[str, PatchedCall]:
    """Return the table of patched calls, by the names of its constants."""
    return {
        constant: row
        for constant, row in vars(patched_calls).items()
        if isinstance(row, PatchedCall)
    }


def test_every_row_of_the_table_has_its_name() -> None:
    """So the name that a check asks for is the one that journals and reports show."""
    named = {f"patched_calls:{constant}": row.name for constant, row in rows().items()}
    at_call = {place: name for name, place in fault_injectors.AT_CALL.items()}
    assert named == {place: at_call[place] for place in at_call if place.startswith("patched_")}


def test_prefixes_are_tried_of_each_call_that_writes_a_whole_file() -> None:
    of_table = {row.name for row in rows().values() if row.kind is Kind.WHOLE_FILE}
    assert set(points.WHOLE_FILES) == of_table
    assert of_table <= set(points.WRITERS)


def test_every_module_says_what_it_is() -> None:
    described = {where.partition(":")[0] for where in fault_injectors.AT_CALL.values()}
    described |= {"at_rest", "drills", "payload", "dcp_metadata", "slow_uploads", "clock_back"}
    described |= {"cut_uploads"}
    shared = {"__init__", "injector", "files", "points", "injected_save", "crafted"}
    shared |= {"advancing", "counting", "injected_calls", "rank_points", "large_save"}
    folder = Path(str(fault_injectors.__file__)).parent
    assert {path.stem for path in folder.glob("*.py")} == described | shared
