"""What tests do with servers of S3 on loopback: s3fs and boto3 speak to them.

moto is one in this process; SeaweedFS one that others run in production, in `make test-all`.
"""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import seaweedfs

from ckpt_conformance.fault_injectors.object_store import server
from ckpt_conformance.fault_injectors.object_store.server import (
    BUCKET,
    EXTRA,
    environment,
    missing,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy

__all__ = [
    "BOTH",
    "BUCKET",
    "MISSING",
    "MOTO",
    "NEEDS",
    "SEAWEEDFS",
    "client",
    "emptied",
    "endpoint",
    "lead_to",
    "needed",
    "proxied",
    "quiet",
    "with_bucket",
]

MISSING = missing()
NEEDS = f"needs {', '.join(MISSING)}: pip install '{EXTRA}'"
needed = pytest.mark.skipif(bool(MISSING), reason=NEEDS)
MOTO, SEAWEEDFS = "moto", "seaweedfs"
# The kinds of servers, as parameters of a fixture that calls `endpoint`.
BOTH = [
    MOTO,
    pytest.param(
        SEAWEEDFS,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                seaweedfs.program() is None, reason=f"pip install '{seaweedfs.EXTRA}'"
            ),
        ],
    ),
]
# Of botocore and aiobotocore of these versions; nothing that is tested does it.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@lru_cache(maxsize=2)
def endpoint(kind: str = MOTO) -> str:
    """Run a server of a kind until the session ends; returns its endpoint."""
    if kind == SEAWEEDFS:
        return seaweedfs.started()
    running = ExitStack()
    atexit.register(running.close)
    return running.enter_context(server.served())


def proxied(store: str, folder: Path, **given: Any) -> StoreProxy:  # noqa: ANN401
    """Make a proxy in front of the server; moto says 500 of an upload that has ended."""
    from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy

    return StoreProxy(store, folder, knows_uploads=False, **given)


def lead_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment that leads s3fs and boto3 to the server, and to nobody's account."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # one of an earlier test speaks to its server
    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(endpoint).items():
        if value is not None:
            monkeypatch.setenv(name, value)


def client(**given: Any) -> Any:  # noqa: ANN401  boto3 has no types here
    """Speak to the server by boto3."""
    import boto3

    return boto3.client("s3", **given)


def with_bucket() -> Any:  # noqa: ANN401
    """Make the bucket, if it is not there; returns a client. Not each store says yes twice."""
    one = client()
    with suppress(one.exceptions.BucketAlreadyOwnedByYou):
        one.create_bucket(Bucket=BUCKET)
    return one


def emptied() -> Any:  # noqa: ANN401
    """Make the bucket, or empty it; returns a client."""
    one = with_bucket()
    for item in one.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        one.delete_object(Bucket=BUCKET, Key=item["Key"])
    for item in one.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        one.abort_multipart_upload(Bucket=BUCKET, Key=item["Key"], UploadId=item["UploadId"])
    return one
