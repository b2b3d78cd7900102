"""Fsck over HTTP: a server of files with an index, which gives no ranges."""

from __future__ import annotations

import functools
import importlib.util
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsck_runs import Finished

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.fsck.source.places import place
from ckpt_conformance.fsck.source.remote import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None or importlib.util.find_spec("requests") is None,
    reason="needs aiohttp and requests: pip install 'ckpt-conformance[dev]'",
)


class Silent(SimpleHTTPRequestHandler):
    """Serves a folder; remembers which files were asked for."""

    fetched: list[str]
    answers: dict[str, int]  # by a part of the path

    def log_message(self, *_: Any) -> None:  # noqa: ANN401
        """Say nothing."""

    def do_GET(self) -> None:
        """Give a whole file, or an index."""
        self.fetched.append(self.path)
        if not self._refuses():
            super().do_GET()

    def do_HEAD(self) -> None:
        """Say how long a file is."""
        if not self._refuses():
            super().do_HEAD()

    def _refuses(self) -> bool:
        status = next((code for name, code in self.answers.items() if name in self.path), 0)
        if status:
            self.send_error(status)
        return bool(status)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Silent, "fetched", [], raising=False)
    monkeypatch.setattr(Silent, "answers", {}, raising=False)
    serve = functools.partial(Silent, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_index_is_a_folder(url: str, tmp_path: Path) -> None:
    for step in (4, 5):
        (tmp_path / f"step_{step}").mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / f"step_{step}" / "model.pt")
    for name in (f"{url}/", url):
        judged = judge(place(name))
        assert (judged.state, [one.step for one in judged.reports]) == (State.WHOLE, [5, 4])
        assert str(judged.reports[0].path) == f"{url}/step_5"
    assert judge(place(f"{url}/step_4/model.pt")).state is State.WHOLE


def test_a_large_file_without_ranges_is_not_fetched(url: str, tmp_path: Path) -> None:
    torch.save({"w": torch.randn(BLOCK)}, tmp_path / "step_5.pt")
    (report,) = judge(place(f"{url}/step_5.pt")).reports
    (finding,) = report.findings
    assert finding.kind is Kind.UNKNOWN
    assert "no ranges" in finding.what
    assert "/step_5.pt" not in Silent.fetched


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "credentials"),
        (403, "credentials"),
        (429, "429"),
        (500, "500"),
        (503, "503"),
        (404, "does not exist"),
        (410, "does not exist"),
    ],
)
@pytest.mark.parametrize("name", ["", "/", "/step_5/model.pt"])
def test_an_answer_that_is_no_file_is_told_as_what_it_is(
    url: str, status: int, words: str, name: str, tmp_path: Path
) -> None:
    """All are the same to fsspec: a file that is not there. A gate must not begin anew for them."""
    (tmp_path / "step_5").mkdir()
    Silent.answers["/"] = status
    with pytest.raises(RequestError, match=words):
        Finished("fsck", f"{url}{name}")


@pytest.mark.parametrize("status", [403, 429, 500])
def test_a_file_that_is_refused_is_not_missing(url: str, status: int, tmp_path: Path) -> None:
    for step in (4, 5):
        (tmp_path / f"step_{step}").mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / f"step_{step}" / "model.pt")
    Silent.answers["step_5/model.pt"] = status
    judged = judge(place(url))
    assert [one.state for one in judged.reports] == [State.UNKNOWN, State.WHOLE]
    with pytest.raises(RequestError, match="was not read to its end"):
        Finished("fsck", url, "--newest-whole")
