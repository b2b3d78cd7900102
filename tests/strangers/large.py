"""A manager that looks at the head of a large file alone, and one that looks at all of it."""

from __future__ import annotations

import hashlib
import io
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from databases import DamagedError
from step_files import StepFiles

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob

FRONT = struct.Struct("<QQ32s")  # bytes of what is small, and of what is large; digest of the head
HEAD = 1 << 20
LARGE = 1 << 20  # bytes of a tensor that stands behind all others


@dataclass
class Headed(StepFiles):
    """What is small first, large tensors raw behind it; the digest covers the first MiB.

    `whole` says that the digest covers everything.
    """

    whole: bool = False

    def digest(self, body: memoryview) -> bytes:
        return hashlib.sha256(body if self.whole else body[:HEAD]).digest()

    def save(self, job: TrainingJob, step: int) -> None:
        states = {name: dict(part.state_dict()) for name, part in job.components.items()}
        large = {k: v for k, v in states["model"].items() if v.nbytes >= LARGE}
        states["model"] = {k: v for k, v in states["model"].items() if k not in large}
        states["tails"] = {k: (v.dtype, v.shape) for k, v in large.items()}
        small = io.BytesIO()
        torch.save(states, small)
        content = bytearray(FRONT.size) + small.getbuffer()
        for value in large.values():  # in place: one copy of a tensor of 4 GiB is enough
            content += memoryview(value.contiguous().numpy()).cast("B")
        more = len(content) - FRONT.size - small.tell()
        digest = self.digest(memoryview(content)[FRONT.size :])
        FRONT.pack_into(content, 0, small.tell(), more, digest)
        self.publish(step, content)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = self.wanted(step)
        with self.path(wanted).open("rb") as file:
            front = file.read(FRONT.size)
            if len(front) < FRONT.size:
                raise DamagedError(f"{file.name} has no front")
            size, more, digest = FRONT.unpack(front)
            content = bytearray(size + more)
            file.readinto(content)  # of a file that was cut the rest stays zeros
        if self.digest(memoryview(content)) != digest:
            raise DamagedError(f"{wanted}: another digest")
        states = torch.load(io.BytesIO(content[:size]), weights_only=True)
        at = size
        for name, (dtype, shape) in states.pop("tails").items():
            flat = torch.frombuffer(content, dtype=dtype, count=shape.numel(), offset=at)
            states["model"][name] = flat.reshape(shape)
            at += flat.nbytes
        for name, part in job.components.items():
            part.load_state_dict(states[name])
        return wanted


@dataclass
class Narrow(Headed):
    """Counts bytes in 32 bits."""

    def save(self, job: TrainingJob, step: int) -> None:
        super().save(job, step)
        path = self.path(step)
        with path.open("r+b") as file:
            size, more, digest = FRONT.unpack(file.read(FRONT.size))
            file.seek(0)
            file.write(FRONT.pack(size, more & 0xFFFFFFFF, digest))


@dataclass
class Few(Headed):
    """Counts tensors in 16 bits."""

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        model = job.components["model"]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        wanted = super().load(job, step)
        beyond = list(before)[len(before) & 0xFFFF :]
        now = model.state_dict()
        with torch.no_grad():
            for name in beyond:
                now[name].copy_(before[name])
        return wanted


@dataclass(frozen=True, kw_only=True)
class Adapter(AdapterBase):
    whole: bool
    kind: type[Headed] = Headed

    def open(self, root: Path, options: OpenOptions) -> Manager:
        del options
        return self.kind(root, whole=self.whole)


def adapter(name: str, *, whole: bool, kind: type[Headed] = Headed) -> Adapter:
    return Adapter(
        name=name,
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        refusals=(DamagedError, FileNotFoundError),
        whole=whole,
        kind=kind,
    )


head = adapter("head", whole=False)
body = adapter("body", whole=True)
narrow = adapter("narrow", whole=False, kind=Narrow)
few = adapter("few", whole=False, kind=Few)
