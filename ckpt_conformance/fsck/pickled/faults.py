"""Why a pickle is not read to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import Malformed, NotRead

if TYPE_CHECKING:
    from ckpt_conformance.fsck.pickled.asked import Asked


class Limit(Malformed):
    """What this machine does not follow, and Python's own may."""


class Short(Malformed):
    """A pickle of more bytes than there are."""


class Broken(Malformed):
    """A pickle that cannot be followed to its end.

    Attributes:
        asked: what it asks for until there, which is what a load of it has run by then.
        is_limit: whether Python's own machine may come further.
        is_short: whether it ends where the bytes end.

    """

    def __init__(self, error: Malformed, place: tuple[int, int], asked: Asked) -> None:
        """Take why, and where."""
        super().__init__(str(error), *place)
        self.asked = asked
        self.is_limit = isinstance(error, Limit)
        self.is_short = isinstance(error, Short)


class TooLong(Limit):
    """The pickles of a file take more than is followed."""


class Unfinished(Broken, NotRead):
    """A pickle that was left before its end: nothing is known to be wrong with it."""


class Again(Exception):  # noqa: N818  no error: a reason to read once more
    """Something was asked for that was passed over: read every instruction."""
