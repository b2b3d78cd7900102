"""What one layout of ranks saved and another one resumed: global states, compared leaf by leaf."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Violation, control_failed
from ckpt_conformance.subject import oracle, worlds
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Golden, Subject
    from ckpt_conformance.subject.worlds import Layout, WorldResult

NEWEST = 4
TWO: Layout = {"fsdp": 2}
SAME: tuple[Layout, ...] = (TWO, {"fsdp": 3}, {"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2})
MOST = 8  # leaves that a message names
ARRIVED: Slot[WorldResult] = Slot("a resume in a layout from an undamaged directory")


def pairs(subject: Subject, quick: int) -> list[tuple[Layout, Layout]]:
    """Return pairs of world sizes, from several ranks to others; of all at the full budget."""
    many: Layout = {"fsdp": worlds.MANY}
    sizes = (*worlds.PLAIN, many) if worlds.most(subject) == worlds.MANY else worlds.PLAIN
    every = itertools.permutations(sizes, 2)
    return subject.sample([(old, new) for old, new in every if worlds.size_of(old) > 1], quick)


def arrived(subject: Subject, gold: Golden, layout: Layout, step: int = NEWEST) -> WorldResult:
    """Resume from an undamaged directory in a layout, and train on for four steps; once each."""

    def resume() -> WorldResult:
        subject.materialize(gold, step)
        return worlds.patiently(partial(worlds.resume, subject, layout, stop_after=4))

    return subject.once(ARRIVED, resume, gold.folder, *sorted(layout.items()), step)


def pair(subject: Subject, old: Layout, new: Layout) -> tuple[Leaves, Leaves]:
    """Return the global states: as saved in one layout, as arrived in another."""
    gold = worlds.golden(subject, old)
    result = arrived(subject, gold, new)
    step, state = oracle.arrival(result)
    if step != NEWEST:
        reason = f"saved by {name(old)}, a load by {name(new)} gives {subject.tell(result)}"
        raise control_failed(reason, "CKC-SHRD-004" if old == new else "CKC-SHRD-007")
    return gold.at[NEWEST], state


def name(layout: Layout) -> str:
    """Say a layout in a few words."""
    parts = ", ".join(f"{key} {size}" for key, size in sorted(layout.items()))
    return f"{worlds.size_of(layout)} rank{'s' * (worlds.size_of(layout) > 1)} ({parts})"


def differs(
    saved: Leaves, state: Leaves, parts: Iterable[str], leaf: Callable[[str], bool]
) -> list[str]:
    """Name the saved leaves of some components that arrived otherwise."""
    wrong: list[str] = []
    for part in parts:
        for path, value in saved.get(part, {}).items():
            now = state.get(part, {}).get(path, "absent")
            if leaf(path) and now != value:
                wrong.append(f"{part}/{path}: {now[:48]} != {value[:8]}")
    return wrong


def weights_arrive(subject: Subject, old: Layout, new: Layout) -> None:
    """Raise Violation unless ranks in one layout get the weights that another one saved."""
    gold = worlds.golden(subject, old)
    result = arrived(subject, gold, new)
    step, state = oracle.arrival(result)
    if step != NEWEST:
        message = f"saved by {name(old)}: {name(new)} cannot load it"
        raise Violation(message, evidence=subject.evidence(result))
    parts = [part for part in ("model", "ema") if part in subject.holds]
    wrong = differs(gold.at[NEWEST], state, parts, is_tensor)
    demand_none(wrong, f"saved by {name(old)}: {name(new)} gets other weights")


def demand_none(wrong: Sequence[str], message: str) -> None:
    """Raise Violation if anything differs."""
    if wrong:
        raise Violation(message, evidence={"differs": list(wrong[:MOST])})


def is_tensor(path: str) -> bool:
    """Choose leaves, and not the marks of containers."""
    return not path.endswith("()")


def is_moment(path: str) -> bool:
    """Choose what an optimizer keeps of each parameter."""
    return path.startswith("state.") and is_tensor(path)


def optimizers(subject: Subject, state: Leaves) -> list[str]:
    """Name the optimizers; NOT_APPLICABLE if the manager saves none."""
    subject.need(holds=["optimizer"])
    return [part for part in state if part.startswith("optimizer")]
