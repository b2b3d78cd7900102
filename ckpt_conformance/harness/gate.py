"""The gate that background uploads pass: open, shut (a slow network), or failing. No sleeps."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass

from ckpt_conformance.contract import trees

PATIENCE = 30.0  # seconds that a shut gate holds: a save that waits for it meets its deadline
AWAITED = 5.0  # seconds that the harness waits for uploads: where none comes it lives to say so


@dataclass(eq=False)
class Waiting:
    """A file that waits at a shut gate, and the state that it is told to go on with.

    It is told for itself: by the time that its thread looks, the gate may be shut once more, and
    other files may wait.
    """

    state: str = ""


class Gate:
    """Uploads call `pass_through` before each file; the harness sets the state."""

    def __init__(self) -> None:
        """Start open."""
        self.state = "open"
        self._condition = threading.Condition()
        self._free = 0
        self._arrived = 0
        self._came: list[str] = []
        self.failed = 0  # files, since it was set before
        self._only: int | None = None
        self._waiting: list[Waiting] = []

    def set(self, state: str, after: int = 0, only: int | None = None) -> int:
        """Set the state and wake whoever waits; the next `after` files still pass.

        With `only` it is open for each file whose name does not carry that step. Returns how many
        files have come to the gate since it was set before.
        """
        with self._condition:
            came, self._came, self.failed = len(self._came), [], 0
            self._only = only
            self.state, self._free, self._arrived = state, after, 0
            if state != "shut":
                self._release(state)
        return came

    def pass_through(self, name: str) -> None:
        """Wait while the gate is shut; raise OSError(EIO) while it fails."""
        with self._condition:
            self._came.append(name)
            self._condition.notify_all()
            if not self._is_meant(name):
                return
            if self._free:
                self._free -= 1
                return
            self._arrived += 1
            self._condition.notify_all()
            state = self._wait() if self.state == "shut" else self.state
            self.failed += state == "fail"
        if state == "fail":
            raise OSError(errno.EIO, "injected upload failure", name)

    def _is_meant(self, name: str) -> bool:
        """Return whether the state is one for a file of this name."""
        return self._only is None or trees.carries(name, self._only)

    @property
    def standing(self) -> int:
        """How many files wait at the gate."""
        with self._condition:
            return len(self._waiting)

    def let_pass(self) -> None:
        """Let the files that wait at a shut gate go on; it stays shut for those after them."""
        with self._condition:
            self._release("open")

    def wait_for_upload(self, count: int = 1, only: int | None = None) -> bool:
        """Wait until files have met its state since it was set; False if they do not.

        With `only` until files have come whose names carry that step, whatever they met.
        """

        def is_there() -> bool:
            if only is None:
                return self._arrived >= count
            return sum(trees.carries(name, only) for name in self._came) >= count

        with self._condition:
            return self._condition.wait_for(is_there, AWAITED)

    def _release(self, state: str) -> None:
        """Let the files that wait go on, as the gate is in a state."""
        for file in self._waiting:
            file.state = state
        self._waiting.clear()
        self._condition.notify_all()

    def _wait(self) -> str:
        """Wait until somebody lets this file go on, for as long as the gate has patience."""
        file = Waiting()
        self._waiting.append(file)
        if not self._condition.wait_for(lambda: bool(file.state), PATIENCE):
            self._waiting.remove(file)
        return file.state
