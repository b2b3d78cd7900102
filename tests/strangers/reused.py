"""Managers whose files belong to several steps, in turn or at once: named by digest, or slots."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from databases import DamagedError, packed, unpack
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob

HEAD = struct.Struct("<QQ32s")  # number of the save, step, SHA-256 of what follows
ZEROS = b"\0" * HEAD.size


def replace(path: Path, content: bytes) -> None:
    """Put a whole file under a name, synced with its directory."""
    draft = path.with_name("draft")
    draft.write_bytes(content)
    sync(draft)
    draft.replace(path)
    sync(path.parent)


@dataclass
class Addressed:
    """Each component in `objects/` under its digest, and a file of digests for each step.

    An object is there once, however many steps have it, and goes with the last of them.
    """

    root: Path
    keep: int | None

    def path(self, step: int) -> Path:
        return self.root / "steps" / f"{step:08d}.json"

    def steps(self) -> list[int]:
        """Return the steps of which every object is there."""
        return [step for step in self.listed() if self.is_whole(step)]

    def listed(self) -> list[int]:
        numbers = (re.match(r"\d{8,}(?=\.json$)", path.name) for path in self.root.glob("steps/*"))
        return sorted(int(number[0]) for number in numbers if number)

    def is_whole(self, step: int) -> bool:
        try:
            names = self.names(step).values()
            return all(self.object(name).exists() for name in names)
        except DamagedError:
            return False

    def names(self, step: int) -> dict[str, str]:
        """Return the digest of each component; raises DamagedError."""
        try:
            content = json.loads(self.path(step).read_bytes())
            text = json.dumps(content["names"], sort_keys=True)
            if hashlib.sha256(f"{step}{text}".encode()).hexdigest() == content["digest"]:
                return content["names"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"the list of step {step} is damaged") from error
        raise DamagedError(f"the list of step {step} is damaged")

    def save(self, job: TrainingJob, step: int) -> None:
        for name in ("objects", "steps"):
            (self.root / name).mkdir(exist_ok=True)
        sync(self.root)
        names = {name: self.put(part.state_dict()) for name, part in job.components.items()}
        text = json.dumps(names, sort_keys=True)
        digest = hashlib.sha256(f"{step}{text}".encode()).hexdigest()
        replace(self.path(step), json.dumps({"names": names, "digest": digest}).encode())
        with contextlib.suppress(OSError, DamagedError):  # what stays too long harms nothing
            self.rotate(step)

    def put(self, state: object) -> str:
        file = io.BytesIO()
        torch.save(state, file)
        digest = hashlib.sha256(file.getvalue()).hexdigest()
        path = self.object(digest)
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            replace(path, file.getvalue())
        return digest

    def rotate(self, saved: int) -> None:
        if not self.keep:
            return
        others = [step for step in self.steps() if step != saved]
        for step in others[: max(0, len(others) + 1 - self.keep)]:
            self.path(step).unlink()
        sync(self.root / "steps")  # before its objects go
        needed = {name for step in self.asked() for name in self.names(step).values()}
        for path in self.objects():
            if path.name not in needed and re.fullmatch("[0-9a-f]{64}", path.name):
                path.unlink()

    def object(self, digest: str) -> Path:
        return self.root / "objects" / digest

    def objects(self) -> list[Path]:
        return list(self.root.glob("objects/*"))

    def asked(self) -> list[int]:
        """Return the steps of which the objects are not swept."""
        return self.listed()

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = [step] if step is not None else self.listed()[::-1]
        for number in wanted:
            try:
                states = self.read(number)
            except DamagedError:
                if number == wanted[-1]:
                    raise
                continue
            for name, part in job.components.items():
                part.load_state_dict(states[name])
            return number
        raise FileNotFoundError(f"no step is in {self.root}")

    def read(self, step: int) -> dict[str, dict[str, object]]:
        if not self.path(step).exists():
            raise FileNotFoundError(f"step {step} is not in {self.root}")
        states = {}
        for name, digest in self.names(step).items():
            path = self.object(digest)
            content = path.read_bytes() if path.exists() else b""
            if hashlib.sha256(content).hexdigest() != digest:
                raise DamagedError(f"{name} of step {step} is damaged")
            states[name] = torch.load(io.BytesIO(content), weights_only=True)
        return states

    def close(self) -> None:
        """Nothing stays open."""


@dataclass
class Fanned(Addressed):
    """Objects in folders by two digits, as git has them: a folder stays when it is empty."""

    def object(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / digest

    def objects(self) -> list[Path]:
        return list(self.root.glob("objects/*/*"))

    def put(self, state: object) -> str:
        file = io.BytesIO()
        torch.save(state, file)
        folder = self.object(hashlib.sha256(file.getvalue()).hexdigest()).parent
        folder.mkdir(exist_ok=True)
        sync(folder.parent)
        return super().put(state)


@dataclass
class Built(Addressed):
    """All of it is in a folder that comes by one rename, as a repository of git may."""

    def save(self, job: TrainingJob, step: int) -> None:
        if not (self.root / "format").exists():
            draft = self.root.with_suffix(".tmp")
            shutil.rmtree(draft, ignore_errors=True)
            (draft / "steps").mkdir(parents=True)
            (draft / "format").write_text("1")
            sync(draft)
            draft.rename(self.root)
            sync(self.root.parent)
        super().save(job, step)


@dataclass
class Sweeping(Addressed):
    """Wrong: takes the objects of all but the newest two, and names what it lists."""

    def steps(self) -> list[int]:
        return self.listed()

    def asked(self) -> list[int]:
        return self.listed()[-2:]


@dataclass
class Trusting(Addressed):
    """Wrong: writes an object in place, and takes one that is there for whole."""

    def put(self, state: object) -> str:
        file = io.BytesIO()
        torch.save(state, file)
        digest = hashlib.sha256(file.getvalue()).hexdigest()
        path = self.root / "objects" / digest
        if not path.exists():
            path.write_bytes(file.getvalue())
            sync(path)
            sync(path.parent)
        return digest


@dataclass
class Slots:
    """Files `slot-a`, `slot-b` and so on: what rotation frees is written to again.

    A slot is free where its head is zeros: the head is written last, and taken away first.
    """

    root: Path
    keep: int | None

    def heads(self) -> dict[Path, tuple[int, int, bytes] | None]:
        """Return for each slot the number of its save, the step and the content, if it is whole."""
        return {path: self.whole(path.read_bytes()) for path in sorted(self.root.glob("slot-*"))}

    def whole(self, raw: bytes) -> tuple[int, int, bytes] | None:
        if len(raw) < HEAD.size:
            return None
        number, step, digest = HEAD.unpack_from(raw)
        content = raw[HEAD.size :]
        right = hashlib.sha256(b"%d:%d:" % (number, step) + content).digest()
        return (number, step, content) if digest == right else None

    def newest(self) -> dict[int, tuple[int, int, bytes]]:
        """Return the last save of each step."""
        return {head[1]: head for head in sorted(filter(None, self.heads().values()))}

    def steps(self) -> list[int]:
        return sorted(self.newest())

    def save(self, job: TrainingJob, step: int) -> None:
        slots = self.heads()
        new = self.root / f"slot-{'abcdefghijklmnopqrstuvwxyz'[len(slots)]}"
        slot = next((path for path, head in slots.items() if head is None), new)
        number = max((head[0] for head in slots.values() if head), default=0) + 1
        content = packed(job)
        digest = hashlib.sha256(b"%d:%d:" % (number, step) + content).digest()
        self.write(slot, content, HEAD.pack(number, step, digest))
        with contextlib.suppress(OSError):  # what stays too long harms nothing
            self.rotate(step, number)

    def write(self, slot: Path, content: bytes, head: bytes) -> None:
        """Write the content, sync, then the head that makes it one."""
        with slot.open("r+b" if slot.exists() else "w+b", buffering=0) as file:
            try:
                for part in (ZEROS, content):
                    write_all(file.fileno(), part)
                file.truncate()
                os.fsync(file)
                sync(self.root)
                file.seek(0)
                write_all(file.fileno(), head)
                os.fsync(file)
            except OSError:
                file.seek(0)
                write_all(file.fileno(), ZEROS)  # half of a save is none
                raise

    def rotate(self, saved: int, number: int) -> None:
        heads = {path: head for path, head in self.heads().items() if head}
        old = sorted({head[1] for head in heads.values()} - {saved})
        gone = old[: max(0, len(old) + 1 - self.keep)] if self.keep else []
        for path, (made, step, _) in heads.items():
            if step in gone or (step == saved and made != number):
                with path.open("r+b", buffering=0) as file:
                    write_all(file.fileno(), ZEROS)
                    os.fsync(file)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        newest = self.newest()
        if not newest:
            raise DamagedError("no slot is whole") if self.heads() else FileNotFoundError("no slot")
        wanted = max(newest) if step is None else step
        if wanted not in newest:
            raise FileNotFoundError(f"step {wanted} is not in {self.root}")
        unpack(job, newest[wanted][2])
        return wanted

    def close(self) -> None:
        """Nothing stays open."""


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of it, however little one call takes."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


@dataclass
class AlwaysThree(StepFiles):
    """A file for each step, of which the newest three stay, whatever anybody asks for."""

    def save(self, job: TrainingJob, step: int) -> None:
        content = packed(job)
        digest = hashlib.sha256(content).digest()
        self.publish(step, digest + content)
        with contextlib.suppress(OSError):  # what stays too long harms nothing
            for old in [other for other in self.steps() if other != step][:-2]:
                self.path(old).unlink()

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = self.wanted(step)
        content = self.path(wanted).read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            raise DamagedError(f"step {wanted} is damaged")
        unpack(job, content[32:])
        return wanted


@dataclass(frozen=True)
class Adapter(AdapterBase):
    make: Callable[[Path, int | None], Manager] = Addressed

    def open(self, root: Path, options: OpenOptions) -> Manager:
        return self.make(root.absolute(), options.keep_last)


def adapter(name: str, make: Callable[[Path, int | None], Manager], **limits: int) -> Adapter:
    steps = {Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}
    return Adapter(
        name=name,
        version="1",
        capabilities=frozenset(steps),
        holds=EVERYTHING | {"gradients"},
        refusals=(DamagedError,),
        make=make,
        **limits,
    )


addressed = adapter("addressed", Addressed)
fanned = adapter("fanned", Fanned)
built = adapter("built", lambda root, keep: Built(root / "store", keep))
sweeping = adapter("sweeping", Sweeping)
slots = adapter("slots", Slots)
trusting = adapter("trusting", Trusting)
two_slots = adapter("two-slots", lambda root, _: Slots(root, 2), min_keep=2, max_keep=2)
always_three = adapter("always-three", lambda root, _: AlwaysThree(root), min_keep=3, max_keep=3)
three_unsaid = adapter("three-unsaid", lambda root, _: AlwaysThree(root))
