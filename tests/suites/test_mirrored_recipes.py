"""What the suite says of the recipes with a mirror is true: the same loss, shown without the suite.

The rotation of `torch-save-mirrored` is the first one of an article on large runs, that of
`torch-save-mirrored-join` the article's own fix: it asks a table of threads in memory.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn, optim

from ckpt_conformance.adapters import mirrored
from ckpt_conformance.contract import OpenOptions
from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.suites import test_rotation_during_upload as rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.subject.subject import Subject

MODEL = nn.Linear(2, 2)
PARTS = {"model": MODEL, "optimizer": optim.SGD(MODEL.parameters(), lr=0.1)}
JOB: Any = SimpleNamespace(
    model=MODEL, optimizers={"optimizer": PARTS["optimizer"]}, components=PARTS
)
NAIVE, JOIN = "torch-save-mirrored", "torch-save-mirrored-join"


class Network:
    """Uploads hang at it; at the end of a test they fail."""

    def __init__(self) -> None:
        """Let them hang."""
        self.ends = threading.Event()

    def hang(self, name: str) -> None:
        self.ends.wait()
        raise OSError(name)

    def fail(self, name: str) -> None:
        raise OSError(name)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.ends.set()


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Make the manager's directory; name that of the mirror."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root", tmp_path / "mirror"


# ---- in plain Python -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [mirrored.naive, mirrored.dcp], ids=lambda one: one.name)
@pytest.mark.parametrize("way", ["hang", "fail"])
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_rotation_removes_the_only_copy(
    recipe: mirrored.MirroredRecipe, way: str, network: Network, places: tuple[Path, Path]
) -> None:
    """The trap of the article: step N is not uploaded when N+2 rotates (M010)."""
    root, mirror = places
    manager = recipe.open(root, OpenOptions(2, mirror, getattr(network, way)))
    for step in (2, 4, 6):
        manager.save(JOB, step)
    assert manager.steps() == [4, 6]
    assert not [path for path in mirror.rglob("*") if path.is_file()]


def test_the_fix_keeps_what_failed(network: Network, places: tuple[Path, Path]) -> None:
    """The article's second test: the flag of the thread says that it failed (M013, M015)."""
    root, mirror = places
    manager = mirrored.join.open(root, OpenOptions(2, mirror, network.fail))
    for step in (2, 4, 6):
        manager.save(JOB, step)
    assert manager.steps() == [2, 4, 6]


def test_the_fix_forgets_at_a_restart(network: Network, places: tuple[Path, Path]) -> None:
    """The table is in memory: who opens the directory anew deletes what never arrived (MX7)."""
    root, mirror = places
    before = mirrored.join.open(root, OpenOptions(2, mirror, network.hang))
    before.save(JOB, 2)
    before.save(JOB, 4)
    after = mirrored.join.open(root, OpenOptions(2, mirror, network.hang))
    after.save(JOB, 6)
    after.save(JOB, 8)
    assert after.steps() == [6, 8]
    assert not mirror.exists()


def test_the_fix_waits_in_the_training_step(
    network: Network, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save joins the upload of an old step: for five minutes, here for none (MX7, M012)."""
    root, mirror = places
    waits: list[float] = []
    manager = mirrored.join.open(root, OpenOptions(2, mirror, network.hang))
    for step in (2, 4):
        manager.save(JOB, step)
    monkeypatch.setattr(threading.Thread, "join", lambda _, timeout: waits.append(timeout))
    manager.save(JOB, 6)
    assert waits == [300.0]
    assert manager.steps() == [2, 4, 6]


# ---- what the suite says -------------------------------------------------------------------------


def test_the_suite_sees_what_rotation_removes(new_subject: Callable[..., Subject]) -> None:
    subject = new_subject(NAIVE)
    with pytest.raises(Violation, match="deletes a step whose upload is not finished"):
        rotation.test_no_step_is_deleted_before_its_upload_is_finished(subject)
    subject.reset()
    with pytest.raises(Violation, match="deletes a step whose upload has failed"):
        rotation.test_a_failed_upload_keeps_the_local_copy(subject)


def test_the_suite_sees_what_a_restart_removes(new_subject: Callable[..., Subject]) -> None:
    """Of a manager whose saves wait for uploads, too; that they do is found in 8 s, elsewhere."""
    subject = new_subject(JOIN)
    subject.once(rotation.WAITS, lambda: True)
    with pytest.raises(Violation, match="a restart lets rotation delete"):
        rotation.test_a_restart_does_not_finish_an_upload(subject)


@pytest.mark.slow
def test_the_suite_sees_that_the_fix_waits(new_subject: Callable[..., Subject]) -> None:
    with pytest.raises(Violation, match="a save waits for an upload"):
        rotation.test_a_save_does_not_wait_for_its_upload(new_subject(JOIN))
