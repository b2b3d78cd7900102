"""Pairs of layouts and a model, drawn by Hypothesis: meshes, placements, chosen sizes, dtypes.

A pair of world sizes alone is not drawn: CKC-SHRD-007 and 008 ask for all of these.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import given, seed
from hypothesis import strategies as st

from ckpt_conformance.subject import drawing, worlds

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import Layout

EXAMPLES = {"quick": 3, "full": 30}
SHORTEN = 12  # examples that may be tried while one that fails is shrunk
AXES: tuple[str, ...] = ("fsdp", "tp", "replicate", "dim")
# Simple ones first: Hypothesis shrinks towards them.
TENSORS = {
    "rows": (7, 5, 3, 2, 1, 8),
    "columns": (5, 3, 1, 8),
    "trained": ("float32", "bfloat16", "float64"),
    "frozen": ("bfloat16", "float32", "float16", "float64"),
}


@dataclass(frozen=True)
class Model:
    """What is drawn of a model: the fields of `sharded.Tensors`, which imports torch."""

    rows: int
    columns: int
    trained: str
    frozen: str


@dataclass(frozen=True)
class Drawn:
    """A model, the layout in which it is saved, and the one in which it is loaded."""

    old: Layout
    new: Layout
    drawn_model: Model

    @property
    def tensors(self) -> dict[str, int | str]:
        """The fields of `sharded.Tensors`, as a program takes them."""
        return asdict(self.drawn_model)

    @property
    def model(self) -> str:
        """Say what is particular about the model."""
        model = self.drawn_model
        return f"{model.rows} x {model.columns} of {model.trained}, frozen {model.frozen}"


def layouts(most: int) -> list[Layout]:
    """Return every layout of at most so many ranks, simple ones first.

    Tensor parallel in powers of two, for torch divides a bias by its ranks; a batch must be shared
    out evenly; one rank alone has nothing to shard along another dimension.
    """
    sizes = itertools.product(range(1, most + 1), (1, 2, 4), range(1, most + 1), (0, 1))
    every = [dict(zip(AXES, of_axes, strict=True)) for of_axes in sizes]
    fitting = [
        layout
        for layout in every
        if worlds.size_of(layout) <= most
        and 24 % (layout["fsdp"] * layout["replicate"]) == 0
        and (layout["fsdp"] > 1 or not layout["dim"])
    ]
    plain = [
        {axis: size for axis, size in layout.items() if size > (axis != "dim")}
        for layout in fitting
    ]
    return sorted((layout or {"fsdp": 1} for layout in plain), key=_simplicity)


def _simplicity(layout: Layout) -> tuple[int, int, list[int]]:
    order = [AXES.index(axis) for axis in layout]
    return worlds.size_of(layout), len(layout), order


def pairs(most: int) -> list[tuple[Layout, Layout]]:
    """Return every two layouts that differ in more than the number of ranks, simple ones first."""
    every = itertools.permutations(layouts(most), 2)
    chosen = [(old, new) for old, new in every if not (_is_plain(old) and _is_plain(new))]
    return sorted(chosen, key=lambda two: worlds.size_of(two[0]) + worlds.size_of(two[1]))


def _is_plain(layout: Layout) -> bool:
    return set(layout) == {"fsdp"}


def each(subject: Subject, most: int, check: Callable[[Drawn], None]) -> None:
    """Check some pairs of at most so many ranks; raises what the simplest raises that fails.

    The same seed draws the same ones. While one is shrunk only so many more are tried: a world
    costs a second.
    """
    known: dict[str, BaseException | None] = {}
    left = [SHORTEN]

    def once(drawn: Drawn) -> None:
        key = repr(drawn)
        if key not in known:
            if any(known.values()):
                left[0] -= 1
            if left[0] < 0:
                return
            known[key] = _error_of(check, drawn)
        if error := known[key]:
            raise error

    quiet = drawing.quiet(EXAMPLES[subject.budget])
    tensors: Any = st.tuples(*map(st.sampled_from, TENSORS.values()))
    drawn: Any = st.builds(_drawn, st.sampled_from(pairs(most)), tensors)
    draw: Any = given(drawn)
    checked: Any = seed(subject.seed)(quiet(draw(once)))
    checked()


def _drawn(both: tuple[Layout, Layout], values: tuple[int, int, str, str]) -> Drawn:
    return Drawn(*both, Model(*values))


def _error_of(check: Callable[[Drawn], None], drawn: Drawn) -> BaseException | None:
    try:
        check(drawn)
    except Exception as error:  # noqa: BLE001  a verdict: it is raised again each time
        return error
    return None
