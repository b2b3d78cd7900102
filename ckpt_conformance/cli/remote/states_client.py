"""`explore --on`: deals out batches of crash states, and takes what workers found.

What follows from a violation is done here: it is shrunk, killed for real, and kept as a bundle, as
by a run without a cluster.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.cli.recordings import SCRIPT
from ckpt_conformance.cli.remote import states
from ckpt_conformance.cli.remote.states import StatesItem
from ckpt_conformance.cluster import client
from ckpt_conformance.contract.verdicts import Cause
from ckpt_conformance.crash.explore import kept
from ckpt_conformance.crash.explore.evidence import Doubt, Evidence, from_json
from ckpt_conformance.plugin.openings import Seen

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from ckpt_conformance.cli.remote.states import Request
    from ckpt_conformance.cluster.client import Cluster
    from ckpt_conformance.crash.explore.evidence import Basis
    from ckpt_conformance.work.identity import Identity

STATE_SECONDS, RESUME_SECONDS = 0.02, 3.0  # that one state takes, until that is known


class Spread:
    """Gives evidence that workers find; `of` says which worker has found a batch."""

    def __init__(self, cluster: Cluster, state_seconds: float) -> None:
        """Take a cluster that is ready."""
        self.cluster, self._seconds = cluster, state_seconds

    def machines(self) -> dict[str, dict[str, Any]]:
        """Describe the machine of each worker that is known, by its address."""
        return {
            worker: msgspec.json.decode(raw, type=states.Facts).machine
            for worker, raw in self.cluster.facts.items()
        }

    def find(
        self, basis: Basis, batches: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[str, Evidence, Seen, str]]:
        """Yield evidence of every batch as it comes, with what it depends on, and the worker.

        It is a doubt where there is none.

        Raises RequestError for a worker that cannot do it.
        """
        left = dict(batches)
        items = [self._item(basis, name, contents) for name, contents in batches.items()]
        try:
            for result in self.cluster.run(items):
                del left[result.item]
                if result.lost:
                    yield result.item, _lost(basis, result.lost), Seen(), ""
                else:
                    sent = from_json(result.content, states.Sent)
                    yield result.item, sent.evidence, sent.seen, result.worker
        except client.LostError as error:
            for name in left:
                yield name, _lost(basis, str(error)), Seen(), ""

    def _item(self, basis: Basis, name: str, contents: Sequence[str]) -> StatesItem:
        workload = name.rpartition(" ")[0]
        return StatesItem(
            id=name,
            group=name,
            family=workload,
            cost=self._seconds * len(contents),
            workload=workload,
            basis=basis.digest,
            contents=tuple(contents),
        )


def _lost(basis: Basis, reason: str) -> Evidence:
    doubt = Doubt(f"the cluster did not recover from a batch of states: {reason}", Cause.HARNESS)
    return Evidence(basis=basis.digest, doubts=(doubt,))


@contextlib.contextmanager
def spread(
    opened: Any,  # noqa: ANN401  a distributed.Client
    request: Request,
    recordings: Path,
    identity: Identity,
) -> Generator[Spread]:
    """Yield what spreads batches over a cluster, when workers are ready."""
    job_files = _packed(recordings, request.workloads)
    content = msgspec.json.encode(request)
    with client.ready(opened, states.FUNCTION, content, identity, job_files) as cluster:
        yield Spread(cluster, RESUME_SECONDS if request.script else STATE_SECONDS)


def _packed(recordings: Path, workloads: Sequence[str]) -> bytes:
    """Pack a folder of recordings, as far as these workloads are in it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as packed:
        packed.add(recordings / kept.FILE, arcname=kept.FILE)
        for name in workloads or (SCRIPT,):
            if (recordings / name).is_dir():  # no folder: it could not be recorded
                packed.add(recordings / name, arcname=name)
    return archive.getvalue()
