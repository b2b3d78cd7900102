"""What a run was asked for: names that must exist, and the command that asks for it again.

The command line and the pytest plugin both refuse here, so that they say the same. Nothing of it
imports torch.
"""

from __future__ import annotations

import difflib
import math
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

AGAIN = "reproduced"  # where the printed command writes: the files of the first run stay


class RequestError(ValueError):
    """A request that cannot be run: a usage error."""


LISTED = ("adapters", "invariants", "profiles", "faults", "mutants")  # by the command `list`


def check_names(kind: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that does not exist: a typo would select nothing and stay green.

    Raises:
        RequestError: names it, and the nearest that do exist.

    """
    for name in given:
        if name not in known:
            listed = f"`ckpt-conformance list {kind}s` names all"
            names = listed if f"{kind}s" in LISTED else f"there are {', '.join(known)}"
            hint = f"{nearest(name, known)}{names}"
            raise RequestError(f"unknown {kind} {name!r}; {hint}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.55) -> str:
    """Write a hint with the valid names nearest to `name`, or nothing; `cutoff` is difflib's."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(folded[one] for one in near)}? " if near else ""


DEADLINE = 60.0  # seconds that one child may take, unless the user says otherwise


def reproduce(  # noqa: PLR0913  every choice that a check depends on
    adapter: str,
    *invariants: str,
    seed: int,
    budget: str,
    claims: Sequence[str] = (),
    catalogue: int | None = None,
    device: str = "cpu",
    written_by: Sequence[str] = (),
    deadline: float = DEADLINE,
) -> str:
    """Write the command that runs the checks of invariants again, with the same choices.

    It has a folder of its own: beside the certificate that it comes from it would replace it.
    """
    words = ["ckpt-conformance", "certify", adapter]
    for invariant in invariants:
        words += ["--only", invariant]
    words += ["--seed", str(seed), "--budget", budget]
    for claim in claims:
        words += ["--claim", claim]
    for folder in written_by:
        words += ["--written-by", folder]
    if deadline != DEADLINE:
        words += ["--deadline", str(math.ceil(deadline))]
    if device != "cpu":
        words += ["--device", device]
    if catalogue is not None:
        words += ["--catalogue", str(catalogue)]
    return shlex.join([*words, "--out", AGAIN])
