"""A clock that goes back while a job runs: what is saved later has an earlier time.

Models: a wall clock that is set back, as by NTP after a boot, or that of another node that goes on:
`time`, `time_ns`, `localtime`, `gmtime` and `datetime.now` of this process, in whatever module, and
the times of modification of what was written meanwhile.
Does not model: clocks that C++ reads by itself, as a database does; those of other processes.
Proof: by how much `time.time()` is behind the kernel's clock, and an event in the journal.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import holders
from ckpt_conformance.harness.probes import SECOND, times_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_REAL = dt.datetime


class Clock:
    """By how much the clocks of this process are behind, in seconds, and what is on the disk."""

    behind = 0
    is_put = False
    times: dict[str, int] = {}  # noqa: RUF012  of modification, as of the last look


def begin(child: Any) -> None:  # noqa: ANN401  a Child
    """Look at what is on the disk; nothing goes back yet."""
    Clock.times = times_of(child.root)


def go_back(child: Any, seconds: int) -> int:  # noqa: ANN401  a Child
    """Date what was written since the last look by the clock as it was; set that back further.

    Return by how many seconds `time.time()` is behind the kernel's clock now.
    """
    _date_what_was_written(child.root)
    Clock.behind += seconds
    if not Clock.is_put:
        Clock.is_put = True
        _put()
    lag = round(time.clock_gettime(time.CLOCK_REALTIME) - time.time())
    fired = {"injector": "clock-back", "call": lag // seconds, "what": "clock", "path": "."}
    if lag == Clock.behind:
        child.journal.note("fired", **fired, mode="back")
    return lag


def _date_what_was_written(root: Path) -> None:
    """Give what has changed since the last look the times that this clock had."""
    for name, now in times_of(root).items():
        path = root / name
        if Clock.behind and Clock.times.get(name) != now:
            status = path.lstat()
            earlier = now - Clock.behind * SECOND
            os.utime(path, ns=(status.st_atime_ns, earlier), follow_symlinks=False)
    Clock.times = times_of(root)


def _put() -> None:
    """Stand in for the clocks, in each module that holds one under its name."""
    for name, later in (("time", _time), ("time_ns", _time_ns)):
        _replace(name, getattr(time, name), partial(later, getattr(time, name)))
    for name in ("localtime", "gmtime"):
        _replace(name, getattr(time, name), partial(_broken_down, getattr(time, name)))
    _replace("datetime", _REAL, Behind)


def _replace(name: str, real: object, new: object) -> None:
    for module in holders(real, name):
        setattr(module, name, new)


def _time(real: Callable[[], float]) -> float:
    return real() - Clock.behind


def _time_ns(real: Callable[[], int]) -> int:
    return real() - Clock.behind * SECOND


def _broken_down(real: Callable[[float], object], seconds: float | None = None) -> object:
    return real(time.time() if seconds is None else seconds)


class _AnyDatetime(type):
    """What `datetime` made before counts as one that it makes now."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL)


class Behind(_REAL, metaclass=_AnyDatetime):
    """`datetime`, of which the present is behind."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Any:  # noqa: ANN401  a datetime
        """Give the present by this clock."""
        return _REAL.now(tz) - dt.timedelta(seconds=Clock.behind)

    @classmethod
    def utcnow(cls) -> Any:  # noqa: ANN401  a datetime
        """Give the present by this clock, as the old call does."""
        return _REAL.now(dt.UTC).replace(tzinfo=None) - dt.timedelta(seconds=Clock.behind)

    @classmethod
    def today(cls) -> Any:  # noqa: ANN401  a datetime
        """Give the present by this clock."""
        return cls.now()
