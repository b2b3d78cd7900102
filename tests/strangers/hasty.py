"""A manager with a file for each step, and three that are hasty in one place each.

Each of the three has a careful twin: it does the same things, in an order or with a look that costs
nobody a step.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import DamagedError, packed, unpack
from reused import adapter
from step_files import StepFiles, sync

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import TrainingJob


def sealed(step: int, content: bytes) -> bytes:
    """Put the step and a digest of both before the content."""
    body = step.to_bytes(8, "big") + content
    return hashlib.sha256(body).digest() + body


def opened(raw: bytes) -> tuple[int, bytes]:
    """Return step and content; raises DamagedError."""
    if hashlib.sha256(raw[32:]).digest() != raw[:32]:
        raise DamagedError("these are not the bytes that were written")
    return int.from_bytes(raw[32:40], "big"), raw[40:]


@dataclass
class Plain(StepFiles):
    """Rotates once the new step is there; passes over what is damaged."""

    keep: int | None = None

    def save(self, job: TrainingJob, step: int) -> None:
        self.publish(step, sealed(step, packed(job)))
        with contextlib.suppress(OSError):  # what stays too long harms nothing
            self.rotate(step)

    def rotate(self, saved: int) -> None:
        """Remove what is beyond the number to keep; what is being saved counts."""
        others = [step for step in self.steps() if step != saved]
        for step in others[: max(0, len(others) + 1 - self.keep)] if self.keep else []:
            self.path(step).unlink()

    def content(self, step: int) -> bytes:
        number, content = opened(self.path(step).read_bytes())
        if number != step:
            raise DamagedError(f"this is step {number}, not {step}")
        return content

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        there = [self.wanted(step)] if step is not None else self.steps()[::-1]
        for number in there:
            try:
                content = self.content(number)
            except DamagedError:
                continue
            unpack(job, content)
            return number
        if there:
            raise DamagedError(f"no step is whole in {self.root}")
        raise FileNotFoundError(f"no step is in {self.root}")


@dataclass
class Replaying(Plain):
    """A save writes the file `recent`; the next save, or a load, makes a step's own file of it.

    A hasty load removes `recent` while it has nothing but a copy in memory.
    """

    hasty: bool = False

    @property
    def recent(self) -> Path:
        return self.root / "recent"

    def save(self, job: TrainingJob, step: int) -> None:
        self.settle()
        draft = self.root / "recent.new"
        draft.write_bytes(sealed(step, packed(job)))
        sync(draft)
        draft.replace(self.recent)
        sync(self.root)
        with contextlib.suppress(OSError):
            self.rotate(step)

    def settle(self, *, hasty: bool = False) -> None:
        """Give what was saved last a file of its own."""
        with contextlib.suppress(DamagedError, FileNotFoundError):
            raw = self.recent.read_bytes()
            step, _ = opened(raw)
            if hasty:
                self.recent.unlink()
            self.publish(step, raw)
            self.recent.unlink(missing_ok=True)
            sync(self.root)

    def steps(self) -> list[int]:
        with contextlib.suppress(DamagedError, FileNotFoundError):
            return sorted({*super().steps(), opened(self.recent.read_bytes())[0]})
        return super().steps()

    def rotate(self, saved: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # what is recent has no file yet
            super().rotate(saved)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        self.settle(hasty=self.hasty)
        return super().load(job, step)


@dataclass
class MakingRoom(Plain):
    """Wrong: removes the oldest step before the new one is written."""

    def save(self, job: TrainingJob, step: int) -> None:
        if self.keep and self.keep > 1:
            self.rotate(step)
        super().save(job, step)


@dataclass
class SettingAside(Plain):
    """A load renames what is damaged; a hasty one also what it could not read this time."""

    hasty: bool = False

    def content(self, step: int) -> bytes:
        try:
            return super().content(step)
        except DamagedError:
            self.set_aside(step)
            raise
        except OSError as error:
            if not self.hasty:
                raise
            self.set_aside(step)
            raise DamagedError(f"step {step} cannot be read") from error

    def set_aside(self, step: int) -> None:
        with contextlib.suppress(OSError):
            self.path(step).replace(self.root / f"damaged-{step}")


plain = adapter("plain", Plain)
replaying = adapter("replaying", Replaying)
replaying_hastily = adapter("replaying", lambda root, keep: Replaying(root, keep, hasty=True))
making_room = adapter("making-room", MakingRoom)
setting_aside = adapter("setting-aside", SettingAside)
aside_hastily = adapter("setting-aside", lambda root, keep: SettingAside(root, keep, hasty=True))
