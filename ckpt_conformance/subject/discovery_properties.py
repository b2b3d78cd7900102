"""Discovery and rotation over planted trees, on file systems in memory.

Runs inside one child: Hypothesis draws which steps there are, Faker which other names; the manager
plants payload-less steps by Python alone, because writers in C++ bypass pyfakefs. The drawn trees
lie in pyfakefs. It takes 100 microseconds for each name that is listed, and a millisecond for each
step that is planted, so the large tree lies in private memory of the kernel, which takes a tenth.
Where one of the two is not there its trees lie on the disk, and what is said of them says so.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ckpt_conformance.contract import OpenOptions
from ckpt_conformance.processes.memory import mount_place
from ckpt_conformance.subject import drawing, names

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hypothesis.strategies import SearchStrategy

DIGITS = ("٦", "６", "²", "Ⅷ", "1_0", "+8", "8.0", "00000000000000000000008")  # noqa: RUF001  hostile
EDGES = (1, 9, 10, 99, 100, 999_999, 1_000_000, 10**9)
MANY = 40  # steps, of which rotation may delete half: each costs it more than to be listed
ON_DISK = 200  # steps of the large tree where it is no memory: each may cost a sync
# Names that sort before most steps, among them and behind: a listing that is cut loses steps.
OTHERS = ("0-worker.{}.log", "events.out.tfevents.{}.0", "profile.{}.json", "~core.{}")
IN_PYFAKEFS, IN_MEMORY = "in pyfakefs", "in private memory"
NOT_ALLOWED = "this machine lets no process mount memory of its own"
NOT_INSTALLED = "pyfakefs is not installed: the extra `all` has it"


class Size(NamedTuple):
    """How many trees are drawn; how many names the large one has, and how many of them are steps.

    The edges come on top of both.
    """

    examples: int
    names: int
    steps: int


BUDGETS = {"quick": Size(3, 10_000, 1_000), "full": Size(60, 20_000, 10_000)}

Finding = dict[str, object]  # what was planted and what was found, for evidence


class Explored(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a property came to: the trees that were tried, and the smallest one that disagrees.

    `control` is what was wrong with a plain tree already, and `unfit` how the adapter's `plant`
    raised by itself: then nothing else can be judged. `drawn` and `large` say where trees lay; the
    large one has so many `names`, and `steps` among them.
    """

    trees: int = 0
    control: Finding | None = None
    unfit: str = ""
    disagreement: Finding | None = None
    drawn: str = ""
    large: str = ""
    names: int = 0
    steps: int = 0

    @property
    def remark(self) -> str:
        """What was seen, for a certificate; empty if the large tree was not reached."""
        if not self.names:
            return ""
        large = f"{self.names:,} names, {self.steps:,} of them steps, {self.large}"
        return f"{large}; {self.trees - 1} smaller trees {self.drawn}"


class Tree(NamedTuple):
    """What is planted: steps in their order, other names, and how many files of other programs."""

    steps: list[int]
    others: list[str]
    crowd: int = 0


class Disagreement(Exception):  # noqa: N818  a finding
    """The manager and the tree disagree; the argument says what was planted and what was found."""


def preload() -> None:
    """Import what this module uses, in the fork server: then no child pays for it."""
    import hypothesis.strategies

    _ = hypothesis.strategies, names.strange(0, 1)
    with contextlib.suppress(ImportError):
        import pyfakefs.fake_filesystem_unittest

        _ = pyfakefs.fake_filesystem_unittest


class Place(NamedTuple):
    """A directory for trees, and in words where it lies."""

    folder: Path
    where: str


@contextlib.contextmanager
def file_system(folder: Path) -> Generator[Place]:
    """Return a directory in memory; on disk, below `folder`, without pyfakefs."""
    try:
        from pyfakefs.fake_filesystem_unittest import Patcher
    except ImportError:
        yield Place(folder, f"on the disk ({NOT_INSTALLED})")
        return
    with Patcher(allow_root_user=True):
        root = Path("/planted")
        root.mkdir()
        yield Place(root, IN_PYFAKEFS)


@contextlib.contextmanager
def a_tree(folder: Path) -> Generator[Path]:
    """Return an empty root, for one tree."""
    root = folder / "root"
    root.mkdir()
    try:
        yield root
    finally:
        shutil.rmtree(root)


def trees(pool: list[str]) -> SearchStrategy[Tree]:
    """Draw the steps of a tree, in the order in which they are planted, and other names in it."""
    from hypothesis import strategies as st

    step = st.one_of(st.integers(1, 120), st.sampled_from(EDGES))
    steps = st.lists(step, unique=True, max_size=16)
    others = st.lists(st.sampled_from(pool), unique=True, max_size=8)
    return st.builds(Tree, steps, others, crowd=st.just(0))


def lookalikes(child: Any, folder: Path) -> list[str]:  # noqa: ANN401  a Child
    """Return names that look like this manager's steps and are none."""
    with a_tree(folder) as root:
        child.adapter.open(root, OpenOptions()).plant(4)
        planted = names.created(root, None, 4)
    similar = [path for name in planted for path in names.lookalikes(name)]
    return similar + [name.of(word) for name in planted for word in DIGITS]


def explore(child: Any, check: Callable[..., None], seed: int, budget: str) -> Any:  # noqa: ANN401
    """Check a plain tree, drawn ones, and a large one; give what disagrees, smallest first.

    Returns `Explored` as plain JSON.
    """
    exploring = Exploring(child, check)
    size, pool = BUDGETS[budget], list(names.strange(seed, 20))
    try:
        exploring.small_ones(pool, seed, size.examples)
        if exploring.explored.control is None and not exploring.explored.unfit:
            exploring.large_one(pool, seed, size)
    except Disagreement as error:
        exploring.note(disagreement=error.args[0])
    return msgspec.to_builtins(exploring.explored)


class Exploring:
    """Checks trees one after the other, and notes what came of them."""

    def __init__(self, child: Any, check: Callable[..., None]) -> None:  # noqa: ANN401  a Child
        """Begin with none."""
        self.child, self.check = child, check
        self.explored = Explored()

    def note(self, **fields: object) -> None:
        """Note what was found."""
        self.explored = msgspec.structs.replace(self.explored, **fields)

    def on_tree(self, folder: Path, tree: Tree) -> None:
        """Check one tree; raises Disagreement."""
        self.note(trees=self.explored.trees + 1)
        with a_tree(folder) as root:
            names.plant_empty(root, crowd(tree.crowd))
            self.check(self.child, root, tree)

    def small_ones(self, pool: list[str], seed: int, examples: int) -> None:
        """Check a plain tree, then drawn ones; lookalikes of this manager's names go to `pool`."""
        with file_system(self.child.root) as place:
            self.note(drawn=place.where)
            try:
                pool += lookalikes(self.child, place.folder)
            except Exception as error:  # noqa: BLE001  whatever the adapter raises
                self.note(unfit=f"plant(4) raises {type(error).__name__}: {error} ({place.where})")
                return
            try:
                self.on_tree(place.folder, Tree([2, 4, 6, 8], []))
            except Disagreement as error:
                self.note(control=error.args[0])
                return
            draw(partial(self.on_tree, place.folder), pool, seed, examples)

    def large_one(self, pool: list[str], seed: int, size: Size) -> None:
        """Check one tree of very many names."""
        is_memory = mount_place(self.child.root)
        count = size.steps if is_memory else ON_DISK
        drawn = random.Random(seed).sample(range(101, 900_000), count)  # noqa: S311
        others, steps = pool[:20], [*EDGES, *drawn]
        where = IN_MEMORY if is_memory else f"on the disk ({NOT_ALLOWED})"
        tree = Tree(steps, others, crowd=size.names - count)
        self.note(large=where, names=size.names + len(EDGES) + len(others), steps=len(steps))
        self.on_tree(self.child.root, tree)


def crowd(count: int) -> list[str]:
    """Return the names of the many files that other programs left."""
    return [OTHERS[at % len(OTHERS)].format(1_700_000_000 + at) for at in range(count)]


def draw(on_tree: Callable[[Tree], None], pool: list[str], seed: int, examples: int) -> None:
    """Let Hypothesis draw trees and shrink the first that disagrees."""
    from hypothesis import given
    from hypothesis import seed as seeded

    @drawing.quiet(examples)
    @seeded(seed)
    @given(trees(pool))
    def drawn(tree: Tree) -> None:
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


def discovery(child: Any, seed: int, budget: str) -> Any:  # noqa: ANN401  a Child
    """Compare what discovery advertises with what was planted."""

    def check(child: Any, root: Path, tree: Tree) -> None:  # noqa: ANN401
        steps, foreign, _ = tree
        names.plant_all(root, foreign)
        with blame_the_manager(foreign):
            manager = child.adapter.open(root, OpenOptions())
            for step in steps:
                manager.plant(step)
            listed = list(manager.steps())
        compare(sorted(listed), sorted(steps), foreign)  # their order is another promise

    return explore(child, check, seed, budget)


def rotation(child: Any, seed: int, budget: str) -> Any:  # noqa: ANN401  a Child
    """Rotate planted trees and compare what is left.

    Steps are planted in ascending order, so that their times agree with it: whether times matter
    is another promise.
    """

    def check(child: Any, root: Path, tree: Tree) -> None:  # noqa: ANN401
        steps, foreign = sorted(tree.steps) or [1], tree.others
        planted = {*names.plant_all(root, foreign), *crowd(tree.crowd)}
        least = max(
            getattr(child.adapter, "min_keep", 1), 0 if len(steps) < MANY else len(steps) // 2
        )
        most = getattr(child.adapter, "max_keep", None) or len(steps)
        keep = min(max(1 + len(foreign) % 3, least), most)
        with blame_the_manager(foreign):
            manager = child.adapter.open(root, OpenOptions(keep_last=keep))
            for step in steps:
                manager.plant(step)
            manager.rotate(steps[-1])
            listed = list(manager.steps())
        there = {*os.listdir(root)}  # noqa: PTH208  names, and many
        gone = sorted(name for name in planted - there if not os.path.lexists(root / name))
        compare(sorted(listed), steps[-keep:], foreign, keep_last=keep, deleted=gone[:8])
        if gone:
            raise Disagreement({"deleted": gone[:8], "steps": len(steps)})

    return explore(child, check, seed, budget)
