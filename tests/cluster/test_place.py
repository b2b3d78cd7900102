"""What `--on` may name, and what is said of anything else."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.cli.options import Where
from ckpt_conformance.cluster.place import Place, Tls
from ckpt_conformance.contract.requests import RequestError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from pathlib import Path

needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="the extra cluster is not installed"
)


@needs_dask
@pytest.mark.parametrize(
    ("text", "address", "local"),
    [
        ("dask://head:8786", "tcp://head:8786", 0),
        ("tcp://head:8786", "tcp://head:8786", 0),  # as dask itself prints it
        ("dask://[::1]:8786", "tcp://[::1]:8786", 0),
        ("local:2", "", 2),
    ],
)
def test_a_place_is_read(text: str, address: str, local: int) -> None:
    place = Place.parse(text, Tls())
    assert (place.address, place.local) == (address, local)


@pytest.mark.parametrize(
    "text",
    [
        *("local:0", "local:1025", "local:", "local:-1", "dask://head", "dask://:8786"),
        *("dask://head:0", "dask://head:65536", "http://head:80", "head:8786", ""),
        "dask://head:8786/x",
    ],
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="dask://HOST:PORT, tls://HOST:PORT, or local:N") as info:
        Place.parse(text, Tls())
    assert repr(text) in str(info.value)


def test_files_for_tls_need_a_scheduler_that_speaks_it(tmp_path: Path) -> None:
    tls = Tls(ca=tmp_path / "ca.pem")
    with pytest.raises(RequestError, match=r"write tls://head:8786"):
        Place.parse("dask://head:8786", tls)
    with pytest.raises(RequestError, match="makes certificates of its own"):
        Place.parse("local:2", tls)
    with pytest.raises(RequestError, match=r"--tls-ca .*ca.pem cannot be read: No such file"):
        Place.parse("tls://head:8786", tls)
    with pytest.raises(RequestError, match="go with --on"):
        Where(tls=tls).place()


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    """Make a certificate, with its key in the same file."""
    pytest.importorskip("cryptography", reason="the extra cluster is not installed")
    import distributed

    untyped: Any = distributed
    made = untyped.Security.temporary()
    file = tmp_path / "me.pem"
    file.write_text(made.tls_client_key + made.tls_client_cert)
    return file


TLS = "tls://10.0.0.1:8786"


@needs_dask
def test_tls_without_certificates_is_one_error_before_anything_is_connected(pem: Path) -> None:
    """Dask finds out in a thread, and then waits 40 seconds for that thread."""
    with pytest.raises(RequestError, match=r"--on tls://10.0.0.1:8786 .*no --tls-ca and no --tls-"):
        Place.parse(TLS, Tls())
    with pytest.raises(RequestError, match=r"there is no --tls-ca; .*--tls-ca.*comm.tls"):
        Place.parse(TLS, Tls(certificate=pem, key=pem))
    with pytest.raises(RequestError, match=r"there is no --tls-cert; name files"):
        Place.parse(TLS, Tls(ca=pem))
    assert Place.parse(TLS, Tls(pem, pem, pem)).address == TLS
    assert Place.parse(TLS, Tls(pem, pem)).address == TLS  # the key is in the same file


@needs_dask
def test_certificates_of_dasks_configuration_are_taken(pem: Path, tmp_path: Path) -> None:
    import dask

    gone = str(tmp_path / "gone.pem")
    there = {"ca-file": str(pem), "client.cert": str(pem), "client.key": str(pem)}
    settings = {f"distributed.comm.tls.{name}": path for name, path in there.items()}
    with dask.config.set(settings):
        assert Place.parse(TLS, Tls()).address == TLS
    with dask.config.set(settings | {"distributed.comm.tls.ca-file": gone}):
        with pytest.raises(RequestError, match=r"cannot be used: No such file .*gone.pem"):
            Place.parse(TLS, Tls())
        assert Place.parse(TLS, Tls(ca=pem)).address == TLS  # what is named goes first


@needs_dask
def test_certificates_that_are_none_are_refused_with_their_names(pem: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk\n")
    with pytest.raises(RequestError, match=r"no certificate or crl found .*--tls-ca \S+junk.pem"):
        Place.parse(TLS, Tls(junk, pem, pem))
    with pytest.raises(RequestError, match=r"cannot be used: .*--tls-key \S+junk.pem"):
        Place.parse(TLS, Tls(pem, pem, junk))


def test_a_number_of_processes_is_none_of_a_cluster() -> None:
    with pytest.raises(RequestError, match="--jobs 4 is a number of processes here"):
        Where(on="local:2", jobs=4).place()
    assert Where(jobs=4).place() is None


def test_without_dask_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str) -> ModuleSpec | None:
        return None if name == "distributed" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(RequestError, match=r"pip install 'ckpt-conformance\[cluster\]'"):
        Place.parse("local:2", Tls())
