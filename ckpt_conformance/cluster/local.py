"""A cluster on this machine alone, for `--on local:N`; run by `-m`, with N.

Scheduler and workers listen on loopback, and speak TLS with a certificate that was made for them
and is in memory only: whoever may connect to a scheduler may run code as its user, and on loopback
that would be every user of the machine. There is no dashboard. It lives in a keeper's folder.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from typing import Any

import msgspec
from msgspec import Struct

HOST = "127.0.0.1"
LOOK = 1.0  # seconds between two looks whether all workers are there
SETTINGS: dict[str, Any] = {
    # Variables as a session that runs here has them: workers would count as other machines.
    "distributed.nanny.environ": {},
    "distributed.nanny.pre-spawn-environ": {},
    "distributed.deploy.lost-worker-timeout": "60s",  # a nanny may be at it on a busy machine
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}


class Listening(Struct, frozen=True):
    """Where the scheduler listens, and what it takes to be let in (PEM)."""

    address: str
    certificate: str
    key: str


def dask_setup(worker: Any) -> None:  # noqa: ANN401  a distributed.Worker
    """Close what a worker serves by HTTP: dask calls this in each one, by this name."""
    worker.http_server.stop()


def main() -> None:
    """Serve until standard input ends."""
    from dask import config
    from distributed import LocalCluster, Security

    config.set(SETTINGS)
    workers = int(sys.argv[1])
    security: Any = Security.temporary()  # type: ignore[no-untyped-call]  # distributed's own
    cluster: Any = LocalCluster(  # type: ignore[no-untyped-call]  # distributed's own
        n_workers=workers,
        threads_per_worker=1,
        processes=True,
        host=HOST,
        protocol="tls://",
        dashboard_address=f"{HOST}:0",
        worker_dashboard_address=f"{HOST}:0",
        security=security,
        memory_limit=0,  # what takes memory is not the worker's process
        silence_logs=logging.CRITICAL,
        preload=["ckpt_conformance.cluster.local"],
    )
    cluster.scheduler.http_server.stop()
    listening = Listening(
        cluster.scheduler_address, security.tls_client_cert, security.tls_client_key
    )
    sys.stdout.buffer.write(msgspec.json.encode(listening) + b"\n")
    sys.stdout.flush()
    while not select.select([0], [], [], LOOK)[0]:
        cluster.scale(workers)  # dask gives up one that is killed while it starts
    os._exit(0)  # the keeper ends what is left, sooner than the cluster would


if __name__ == "__main__":
    main()
