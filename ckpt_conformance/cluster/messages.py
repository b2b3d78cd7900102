"""What client, workers and runners say to each other; each message is one line of JSON."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ckpt_conformance.work.identity import Identity

NOTHING = msgspec.Raw(b"null")
ADVICE = (
    "install the same versions on every machine, and have the same adapters where each worker can "
    "import them (as a package, on its PYTHONPATH, or in its working directory), and the same "
    "scripts at the same paths"
)


class Job(Struct, frozen=True, kw_only=True):
    """One run of a command, as every worker gets it.

    `function` is named as `module:attribute`; it takes a `runner.Feed`. `identity` is the client's:
    a worker with another one would find out something else. `files_size` is how many bytes of a tar
    archive follow its line: files that the job needs.
    """

    id: str  # no other run has it
    function: str
    request: msgspec.Raw
    identity: Identity
    files_size: int = 0


class Batch(Struct, frozen=True, tag=True):
    """Items that run one after another; none is a question whether the runner is there."""

    items: tuple[msgspec.Raw, ...] = ()


# -- what a runner says ---------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag=True):
    """The runner can run batches; `facts` are the function's own, about the worker."""

    facts: msgspec.Raw


class Refused(Struct, frozen=True, tag=True):
    """This worker cannot do the job, and trying again would not help: a sentence for people."""

    reason: str


class Found(Struct, frozen=True, tag=True):
    """What came of one item; `seconds` it took by itself."""

    item: str
    result: msgspec.Raw
    seconds: float


class Done(Struct, frozen=True, tag=True):
    """A batch has ended; `files` is a tar archive of what it left beside its results, if any."""

    files: str = ""


Said = Ready | Refused | Found | Done


# -- what a worker says to the client -------------------------------------------------------------


class Answer(Struct, frozen=True, kw_only=True):
    """What came of a batch on a worker.

    `died` says how the runner ended, if it did so before the end of the batch: the items of which
    nothing is found are to be tried again. After `refused` there is no use in that.
    """

    worker: str
    found: tuple[Found, ...] = ()
    seconds: float = 0.0  # from the start of the task to its end
    files: bytes = b""
    died: str = ""
    refused: str = ""
    facts: msgspec.Raw = NOTHING  # of the worker; nothing if its runner is not ready
