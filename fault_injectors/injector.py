"""What every fault at a call shares: counting, firing, the proof, and putting things back.

`Child.arm` makes an injector with the manager's directory and the child's journal, installs it, and
removes it at the end of the operation. An injector counts the calls whose path lies below the
directory; at the chosen one it raises, dies by a real SIGKILL, or is held (see `slow_disk`). A pass
that only counts (`at=0`) says how many points there are; with `survey` each log entry also holds
the tree at that moment.

A name that a module took with `from os import replace` is replaced there too, as long as it kept
its name. What took it under another name, or inside a closure, calls the real function.
"""

from __future__ import annotations

import errno as codes
import itertools
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckpt_conformance.contract import kept_trees
from ckpt_conformance.harness.messages import SeenCall
from ckpt_conformance.processes import lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from ckpt_conformance.contract.journal import ChildJournal

T = TypeVar("T")
Mode = Literal["count", "raise", "kill", "hold", "term"]
Moment = Literal["before", "prefix", "after"]
_ORDER = itertools.count()  # of calls over all injectors of a process
PREFIXES = ("0", "1", "half", "len-1")
_MISSING = object()


def length_of(prefix: str, size: int) -> int:
    """Return the number of bytes that one of `PREFIXES` keeps of `size` bytes."""
    return {"0": 0, "1": min(1, size), "half": size // 2, "len-1": max(size - 1, 0)}[prefix]


class Interrupted(KeyboardInterrupt):
    """What Ctrl-C raises, in the midst of an operation; the child reports it as any error."""

    is_injected = True


def error_of(name: str, path: str) -> BaseException:
    """Make the error of a name: OSError for a name of `errno`, or one that torch raises itself.

    MemoryError is of a copy that finds no memory, RuntimeError of torch's own writer,
    KeyboardInterrupt of Ctrl-C, or of a handler that raises.
    """
    if name == "KeyboardInterrupt":
        return Interrupted(f"injected at {path}")
    if name == "MemoryError":
        return MemoryError(f"injected: no memory for {path}")
    if name == "RuntimeError":
        return RuntimeError(f"injected: writing {path} failed, unexpected pos 64 vs 0")
    code = getattr(codes, name)
    return OSError(code, f"injected: {os.strerror(code)}", path)


class Injector:
    """One kind of call, hit at one of its occurrences.

    Arguments: `at` is the call to hit, from 1, and 0 hits none; `mode` is count, raise, kill,
    hold (`on_hold` says until when; then the call is made) or term (SIGTERM is sent to this
    process, and the call is made); `moment` is before the call, after a
    `prefix` of its bytes, or after it; `error` names what is raised; `persistent` hits every
    call from there on; `only` restricts to one function (`os.replace`); `below` watches another
    directory, such as a mirror; `survey` notes the tree at each call, and copies each new one into
    the folder `keep`.
    """

    name = "injector"

    def __init__(
        self,
        root: Path,
        journal: ChildJournal,
        **given: Any,  # noqa: ANN401  JSON-plain arguments of a program
    ) -> None:
        """Keep the arguments; raises TypeError for an unknown one."""
        self.root = os.path.abspath(given.pop("below", None) or root)  # noqa: PTH100  keeps links
        self.real = os.path.realpath(self.root)
        self.journal = journal
        self.at = int(given.pop("at", 0))
        self.mode: Mode = given.pop("mode", "raise" if self.at else "count")
        self.moment: Moment = given.pop("moment", "before")
        self.prefix = str(given.pop("prefix", "half"))
        self.error = str(given.pop("error", "EIO"))
        self.persistent = bool(given.pop("persistent", False))
        self.survey = bool(given.pop("survey", False))
        self.keep = str(given.pop("keep", ""))
        self.only = str(given.pop("only", ""))
        if given:
            msg = f"{self.name} takes no argument {sorted(given)}"
            raise TypeError(msg)
        self.calls, self.fired = 0, 0
        self.log: list[SeenCall] = []
        self.on_hold: Callable[[], None] = lambda: None
        self._lock = threading.RLock()  # copying the tree comes here again
        self._undo: list[tuple[Any, str, Any]] = []

    # -- installing -------------------------------------------------------------------------------

    def install(self) -> None:
        """Replace what this injector watches; every injector defines it."""
        raise NotImplementedError(self.name)

    def remove(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            owner, name, original = self._undo.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def patch(self, owner: object, name: str, replacement: object) -> None:
        """Replace one attribute of a module or a class."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, replacement)

    def patch_everywhere(self, original: Callable[..., Any], name: str, new: object) -> None:
        """Replace a function in each module that holds it under its name."""
        for module in holders(original, name):
            self.patch(module, name, new)

    def patch_functions(
        self, module: object, names: Sequence[str], replacement: Callable[..., object]
    ) -> None:
        """Replace functions wherever they were imported by name.

        A call of one becomes `replacement(name, original, ...)`, with the arguments of the call.
        """
        for name in names:
            original = getattr(module, name)
            self.patch_everywhere(original, name, partial(replacement, name, original))

    # -- paths ------------------------------------------------------------------------------------

    def below(self, path: object) -> str | None:
        """Return the name relative to the watched directory; None for other paths and objects."""
        given = path_of(path)
        if given is None:
            return None
        absolute = os.path.abspath(given)  # noqa: PTH100  a link must not be followed at its end
        for root in (self.root, self.real):
            if absolute == root:
                return "."
            if absolute.startswith(root + os.sep):
                return absolute[len(root) + 1 :]
        return None

    # -- firing -----------------------------------------------------------------------------------

    def count(self, what: str, name: str | None, *, size: int = 0) -> bool:
        """Count a call on a name below the directory; true if the caller has to hit it now.

        None is a name elsewhere, which does not count. `size` is that of a write, in bytes. In mode
        hold the call is held in here.
        """
        if name is None or (self.only and what != self.only):
            return False
        with self._lock:
            self.calls += 1
            tree = kept_trees.fingerprint(Path(self.root)) if self.survey else {}
            if self.survey and self.keep:
                kept_trees.keep(Path(self.root), Path(self.keep), tree)
            call = SeenCall(
                call=self.calls, what=what, path=name, order=next(_ORDER), tree=tree, size=size
            )
            self.log.append(call)
            is_due = self.calls == self.at or (self.persistent and 0 < self.at <= self.calls)
        if is_due and self.mode == "hold":  # without the lock: other threads go on
            self.note(what, name)
            self.on_hold()
        if is_due and self.mode == "term":
            self.note(what, name)
            if lifecycle.signal_self(signal.SIGTERM):
                self.journal.note("delivered", signal=signal.SIGTERM.name)
        return is_due and self.mode in ("raise", "kill")

    def note(self, what: str, name: str) -> None:
        """Write down that the fault fired, before it does: the journal survives SIGKILL."""
        self.fired += 1
        call = {"injector": self.name, "call": self.calls, "what": what, "path": name}
        self.journal.note("fired", **call, mode=self.mode, moment=self.moment)

    def inject(self, what: str, name: str) -> None:
        """Fire: raise the error, or die."""
        self.note(what, name)
        if self.mode == "kill":
            die()
        raise error_of(self.error, name)

    def around(self, what: str, name: str | None, call: Callable[[], T]) -> T:
        """Run a call that has no prefix, hit before or after it."""
        is_due = self.count(what, name)
        if is_due and self.moment != "after":
            self.inject(what, str(name))
        try:
            result = call()
        except BaseException:
            if is_due and self.mode == "kill":
                self.inject(what, str(name))
            raise
        if is_due:
            self.inject(what, str(name))
        return result


def holders(value: object, name: str) -> list[ModuleType]:
    """Return the modules that hold an object under a name: its own, and who imported it so."""
    modules = list(sys.modules.values())
    return [module for module in modules if getattr(module, "__dict__", {}).get(name) is value]


def die() -> None:
    """End this process as an out-of-memory killer or a scheduler does: nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def path_of(given: object) -> str | None:
    """Return the path of a path, a descriptor, or an open file; None if it has none."""
    if isinstance(given, bool) or given is None:
        return None
    if isinstance(given, int):
        try:
            target = os.readlink(f"/proc/self/fd/{given}")  # noqa: PTH115  a string is wanted
        except OSError:
            return None
        return target if target.startswith("/") else None
    if isinstance(given, str | bytes | os.PathLike):
        return os.fsdecode(given)
    name = getattr(given, "name", None)
    return path_of(name) if isinstance(name, str | bytes | os.PathLike | int) else None
