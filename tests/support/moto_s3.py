"""What tests do with the server of S3 on loopback: s3fs and boto3 speak to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.fault_injectors.object_store.server import (
    BUCKET,
    EXTRA,
    environment,
    missing,
    served,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy

__all__ = [
    "BUCKET",
    "MISSING",
    "NEEDS",
    "client",
    "emptied",
    "lead_to",
    "needed",
    "proxied",
    "quiet",
    "served",
]

MISSING = missing()
NEEDS = f"needs {', '.join(MISSING)}: pip install '{EXTRA}'"
needed = pytest.mark.skipif(bool(MISSING), reason=NEEDS)
# Of botocore and aiobotocore of these versions; nothing that is tested does it.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


def emptied() -> Any:  # noqa: ANN401
    """Make the bucket, or empty it; returns a client."""
    one = client()
    one.create_bucket(Bucket=BUCKET)
    for item in one.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        one.delete_object(Bucket=BUCKET, Key=item["Key"])
    for item in one.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        one.abort_multipart_upload(Bucket=BUCKET, Key=item["Key"], UploadId=item["UploadId"])
    return one
