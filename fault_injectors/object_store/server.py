"""A server of S3 on loopback: moto serves the protocol, in threads of this process.

What moto lacks is in `docs/fault-model.md`.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckpt_conformance.contract.verdicts import Cause, Unknown

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

NEEDED = ("moto", "flask", "flask_cors", "s3fs", "aiohttp")
EXTRA = "ckpt-conformance[store]"
BUCKET = "bucket"
ACCOUNT = "testing"  # its name, and its secret


def missing() -> list[str]:
    """Return which packages are not installed that a store on loopback needs."""
    return [one for one in NEEDED if importlib.util.find_spec(one) is None]


@contextmanager
def served() -> Generator[str]:
    """Run a server, on a port that is free; yields its endpoint.

    Raises Unknown where what it needs is not installed.
    """
    if lacking := missing():
        reason = f"a store of objects needs {', '.join(lacking)}: pip install '{EXTRA}'"
        raise Unknown(reason, cause=Cause.MACHINE)
    from moto.server import ThreadedMotoServer

    log = logging.getLogger("werkzeug")  # of moto: a line for each request, on the terminal
    level = log.level
    log.setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        log.setLevel(level)


def make_bucket(store: str) -> None:
    """Make the one bucket, empty: servers of one process share what they hold.

    Raises Unknown where the store does not answer well.
    """
    for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
        connection = http.client.HTTPConnection(urlsplit(store).netloc, timeout=30)
        connection.request(method, path)
        status = connection.getresponse().status
        connection.close()
        if status != http.client.OK:
            raise Unknown(f"the store on loopback makes no bucket: {method} {path} gives {status}")


def contents(store: str) -> dict[str, bytes]:
    """Return all objects of the bucket by their keys."""
    with _client(store) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def begin_uploads(store: str, keys: Iterable[str]) -> set[str]:
    """Begin an upload in parts of each key, send one part, and complete none; return the keys."""
    begun = set(keys)
    with _client(store) as client:
        for key in begun:
            of = {"Bucket": BUCKET, "Key": key}
            upload = client.create_multipart_upload(**of)["UploadId"]
            client.upload_part(**of, UploadId=upload, PartNumber=1, Body=b"left by a dead upload")
    return begun


def uploads(store: str) -> set[str]:
    """Return the keys of the uploads in parts that nobody has ended."""
    with _client(store) as client:
        return {
            one["Key"] for one in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        }


@contextmanager
def _client(store: str) -> Generator[Any]:
    """Make a client of the store."""
    from botocore.session import Session  # type: ignore[import-untyped]

    client: Any = Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=store,
        aws_access_key_id=ACCOUNT,
        aws_secret_access_key=ACCOUNT,
    )
    with contextlib.closing(client):
        yield client


def environment(endpoint: str) -> dict[str, str | None]:
    """Return the variables that lead clients to a store, and to nobody's account; None: unset."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCOUNT,
        "AWS_SECRET_ACCESS_KEY": ACCOUNT,
        "AWS_SESSION_TOKEN": None,
        "AWS_PROFILE": None,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
