"""What a pickle says of NumPy's generators, held against those that NumPy has.

NumPy looks a bit generator up by the name that a pickle gives, and takes a state of no other one: a
load fails else. By `numpy/random/_pickle.py` of NumPy 2.4, and the setters of its generators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.pickled.pickle_values import Made, Name
from ckpt_conformance.fsck.source.untrusted import clip, is_dict, is_tuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_KNOWN = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_MADE_BY = {
    Name("numpy.random._pickle", name)
    for name in ("__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor")
}


def is_generator(of: object) -> bool:
    """Return whether a generator is what a call makes."""
    return type(of) is Name and of in _MADE_BY


def problem(generators: Iterable[Made]) -> str:
    """Return which of the generators in a pickle NumPy does not make; empty for none."""
    for made in generators:
        args = made.args
        own = _name(args[0]) if is_tuple(args) and args else ""
        stated = _stated(made.state)
        for name in (own, stated):
            if name not in ("", *_KNOWN):
                return f"a generator of NumPy that is a {clip(name)}: there is none"
        if own and stated and own != stated:
            return f"a generator of NumPy that is a {own}, with the state of a {stated}"
    return ""


def _name(value: object) -> str:
    """Return the name of a bit generator: the name itself, a class, or what was made of one."""
    if isinstance(value, Made):
        is_named = is_generator(value.of) and is_tuple(value.args) and value.args
        return _name(value.args[0]) if is_named else ""
    if type(value) is Name:
        return value.name if value.module.startswith("numpy.random.") else ""
    return value if isinstance(value, str) else str(value) if isinstance(value, bytes) else ""


def _stated(state: object) -> str:
    """Return which bit generator a state is of; empty where it says none."""
    first = state[0] if is_tuple(state) and state else state
    name = first.get("bit_generator") if is_dict(first) else None
    return name if isinstance(name, str) else ""
