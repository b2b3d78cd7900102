"""A server of S3 on loopback: moto serves the protocol, s3fs and boto3 speak it."""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy

MISSING = [
    one
    for one in ("moto", "flask", "flask_cors", "s3fs", "aiohttp")
    if importlib.util.find_spec(one) is None
]
BUCKET = "bucket"
needed = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'ckpt-conformance[store]'"
)
# Of botocore and aiobotocore of these versions; nothing that is tested does it.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@contextmanager
def served() -> Iterator[str]:
    """Run a server in this process, on a port that is free; yields its endpoint."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def proxied(store: str, folder: Path, **given: Any) -> StoreProxy:  # noqa: ANN401
    """Make a proxy in front of the server; moto says 500 of an upload that has ended."""
    from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy

    return StoreProxy(store, folder, knows_uploads=False, **given)


def lead_to(endpoint: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set the environment that leads s3fs and boto3 to the server, and to nobody's account."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # one of an earlier test speaks to its server
    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))


def client(**given: Any) -> Any:  # noqa: ANN401  boto3 has no types here
    """Speak to the server by boto3."""
    import boto3

    return boto3.client("s3", **given)


def emptied() -> Any:  # noqa: ANN401
    """Make the bucket, or empty it; returns a client."""
    one = client()
    one.create_bucket(Bucket=BUCKET)
    for item in one.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        one.delete_object(Bucket=BUCKET, Key=item["Key"])
    for item in one.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        one.abort_multipart_upload(Bucket=BUCKET, Key=item["Key"], UploadId=item["UploadId"])
    return one
