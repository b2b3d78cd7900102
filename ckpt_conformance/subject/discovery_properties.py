"""Discovery and rotation over planted trees, on a file system in memory (pyfakefs).

Runs inside one child: Hypothesis draws which steps there are, Faker which other names; the manager
plants payload-less steps by Python alone, because writers in C++ bypass pyfakefs. Without pyfakefs
(an extra) the same trees lie in a directory of the disk.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance.contract import OpenOptions
from ckpt_conformance.subject import names

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hypothesis.strategies import SearchStrategy

DIGITS = ("٦", "６", "²", "Ⅷ", "1_0", "+8", "8.0", "00000000000000000000008")  # noqa: RUF001  hostile
EDGES = (1, 9, 10, 99, 100, 999_999, 1_000_000, 10**9)
BUDGETS = {"quick": (3, 20), "full": (60, 10_000)}  # drawn trees, steps of the large one
LEFT_BEHIND = {"quick": 110, "full": 2_000}  # files of another program


class Disagreement(Exception):  # noqa: N818  a finding
    """The manager and the tree disagree; the argument says what was planted and what was found."""


def preload() -> None:
    """Import what this module uses, in the fork server: then no child pays for it."""
    import hypothesis.strategies

    _ = hypothesis.strategies, names.strange(0, 1)
    with contextlib.suppress(ImportError):
        import pyfakefs.fake_filesystem_unittest

        _ = pyfakefs.fake_filesystem_unittest


@contextlib.contextmanager
def file_system(folder: Path) -> Generator[Path]:
    """Return a directory in memory; on disk, below `folder`, without pyfakefs."""
    try:
        from pyfakefs.fake_filesystem_unittest import Patcher
    except ImportError:
        yield folder
        return
    with Patcher(allow_root_user=True):
        root = Path("/planted")
        root.mkdir()
        yield root


@contextlib.contextmanager
def a_tree(folder: Path) -> Generator[Path]:
    """Return an empty root, for one tree."""
    root = folder / "root"
    root.mkdir()
    try:
        yield root
    finally:
        shutil.rmtree(root)


def steps_and_names(pool: list[str]) -> SearchStrategy[tuple[list[int], list[str]]]:
    """Draw the steps of a tree, in the order in which they are planted, and other names in it."""
    from hypothesis import strategies as st

    step = st.one_of(st.integers(1, 120), st.sampled_from(EDGES))
    steps = st.lists(step, unique=True, max_size=16)
    return st.tuples(steps, st.lists(st.sampled_from(pool), unique=True, max_size=8))


def lookalikes(child: Any, folder: Path) -> list[str]:  # noqa: ANN401  a Child
    """Return names that look like this manager's steps and are none."""
    with a_tree(folder) as root:
        child.adapter.open(root, OpenOptions()).plant(4)
        planted = names.created(root, None, 4)
    similar = [path for name in planted for path in names.lookalikes(name)]
    return similar + [name.of(word) for name in planted for word in DIGITS]


def explore(child: Any, check: Callable[..., None], seed: int, budget: str) -> dict[str, Any]:  # noqa: ANN401
    """Check a plain tree, drawn ones, and large ones; give what disagrees, smallest first."""
    rng, trees = random.Random(seed), 0  # noqa: S311
    pool = list(names.strange(seed, 20))
    examples, steps = BUDGETS[budget]
    large = [*EDGES, *rng.sample(range(101, 900_000), steps)]

    def on_tree(folder: Path, tree: tuple[list[int], list[str]]) -> None:
        nonlocal trees
        trees += 1
        with a_tree(folder) as root:
            check(child, root, *tree)

    try:
        with file_system(child.root) as folder:
            pool += lookalikes(child, folder)
            try:
                on_tree(folder, ([2, 4, 6, 8], []))
            except Disagreement as error:
                return {"control": error.args[0]}
            draw(partial(on_tree, folder), pool, seed, examples)
            on_tree(folder, (large, pool[:20]))
        on_tree(child.root, (large[:50], pool[:20] + crowd(budget)))  # slow in memory
    except Disagreement as error:
        return {"trees": trees, "disagreement": error.args[0]}
    return {"trees": trees}


def crowd(budget: str) -> list[str]:
    """Return the names of the many files that another program left."""
    return [f"events.out.tfevents.{1_700_000_000 + at}.0" for at in range(LEFT_BEHIND[budget])]


def draw(on_tree: Callable[..., None], pool: list[str], seed: int, examples: int) -> None:
    """Let Hypothesis draw trees and shrink the first that disagrees."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import seed as seeded

    every = cast("list[HealthCheck]", list(HealthCheck))
    quiet = settings(database=None, deadline=None, suppress_health_check=every)
    limited = settings(quiet, max_examples=examples)

    @limited
    @seeded(seed)
    @given(steps_and_names(pool))
    def drawn(tree: tuple[list[int], list[str]]) -> None:
        on_tree(tree)

    drawn()


@contextlib.contextmanager
def blame_the_manager(foreign: list[str]) -> Generator[None]:
    """Let whatever the manager raises be a disagreement; what the harness raises stays its own."""
    try:
        yield
    except Exception as error:
        finding = {"raises": f"{type(error).__name__}: {error}"[:300], "names": foreign[:8]}
        raise Disagreement(finding) from error


def compare(listed: list[int], wanted: list[int], foreign: list[str], **more: Any) -> None:  # noqa: ANN401
    """Raise Disagreement unless exactly the wanted steps are listed."""
    if listed != wanted:
        lost, extra = sorted(set(wanted) - set(listed)), sorted(set(listed) - set(wanted))
        finding = {"missing": lost[:8], "unexpected": extra[:8], "names": foreign[:8], **more}
        raise Disagreement({**finding, "steps": len(wanted)})


def discovery(child: Any, seed: int, budget: str) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Compare what discovery advertises with what was planted."""

    def check(child: Any, root: Path, steps: list[int], foreign: list[str]) -> None:  # noqa: ANN401
        names.plant_all(root, foreign)
        with blame_the_manager(foreign):
            manager = child.adapter.open(root, OpenOptions())
            for step in steps:
                manager.plant(step)
            listed = list(manager.steps())
        compare(sorted(listed), sorted(steps), foreign)  # their order is another promise

    return explore(child, check, seed, budget)


def rotation(child: Any, seed: int, budget: str) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Rotate planted trees and compare what is left.

    Steps are planted in ascending order, so that their times agree with it: whether times matter
    is another promise.
    """

    def check(child: Any, root: Path, steps: list[int], foreign: list[str]) -> None:  # noqa: ANN401
        steps = sorted(steps) or [1]
        planted = names.plant_all(root, foreign)
        least = max(getattr(child.adapter, "min_keep", 1), len(steps) - 20)
        most = getattr(child.adapter, "max_keep", None) or len(steps)
        keep = min(max(1 + len(foreign) % 3, least), most)
        with blame_the_manager(foreign):
            manager = child.adapter.open(root, OpenOptions(keep_last=keep))
            for step in steps:
                manager.plant(step)
            manager.rotate(steps[-1])
            listed = list(manager.steps())
        gone = [name for name in planted if not os.path.lexists(root / name)]
        compare(sorted(listed), steps[-keep:], foreign, keep_last=keep, deleted=gone[:8])
        if gone:
            raise Disagreement({"deleted": gone[:8], "steps": len(steps)})

    return explore(child, check, seed, budget)
