"""Fsck over HTTP: a server of files with an index, which gives no ranges."""

from __future__ import annotations

import functools
import importlib.util
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import torch

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

    def log_message(self, *_: Any) -> None:  # noqa: ANN401
        """Say nothing."""

    def do_GET(self) -> None:
        """Give a whole file, or an index."""
        self.fetched.append(self.path)
        super().do_GET()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Silent, "fetched", [], raising=False)
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
