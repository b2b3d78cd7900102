"""A temporary folder with a long path, as a cluster's job or a CI system has it."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from ckpt_conformance.cli.explore import subject_of
from ckpt_conformance.processes import unix_sockets
from ckpt_conformance.subject.subject import SAVES


def path_of(length: int, above: Path) -> Path:
    """Return a path of so many bytes."""
    while (missing := length - len(os.fsencode(above)) - 1) > 0:
        above = above / ("d" * min(missing, 100))
    return above


@pytest.mark.parametrize("length", [unix_sockets.LONGEST, unix_sockets.LONGEST + 1, 400])
def test_a_socket_is_reached_at_a_path_of_any_length(length: int) -> None:
    with tempfile.TemporaryDirectory(prefix="ckc-", dir="/tmp") as short:  # not tmp_path: too long
        path = path_of(length - len("/socket"), Path(short)) / "socket"
        path.parent.mkdir(parents=True)
        assert len(os.fsencode(path)) == length
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client,
        ):
            unix_sockets.bind(listener, str(path))
            listener.listen()
            unix_sockets.connect(client, str(path))
            listener.accept()[0].close()
        assert path.is_socket()


def test_a_server_works_in_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = path_of(400, tmp_path)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(Path("/proc/self/fd").iterdir())
    with subject_of("reference", 0) as subject:
        assert set(SAVES) <= set(subject.golden().at)
        assert set(SAVES) <= set(subject.golden(kind="workers").at)  # by sockets of its own
    assert set(Path("/proc/self/fd").iterdir()) == before
