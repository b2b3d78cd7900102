"""After which recoveries a job goes on, and which of these runs count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckpt_conformance.crash.explore.judging import Recovery
from ckpt_conformance.crash.explore.messages import Continued, Item, Message
from ckpt_conformance.crash.explore.recovery import UNHARMED, Onward, Recoverer

if TYPE_CHECKING:
    from collections.abc import Mapping

SAVES = (4, 6)
FINE, ITEMS = "", 4
In = dict[int, str]


class Going(Recoverer):
    """Goes on from every item: what comes of it, together and alone, is given."""

    def __init__(self, together: Mapping[int, str], alone: Mapping[int, str]) -> None:
        """Keep what going on gives; nothing runs."""
        self.together, self.alone = together, alone
        self.ran_alone: list[int] = []
        self.said: list[Continued] = []
        items = tuple(Item(place="", fine=frozenset({0}), saves_after=SAVES) for _ in range(ITEMS))
        whole = SimpleNamespace(place="whole", step=2)
        task = SimpleNamespace(items=items, control=None, legal=(whole,))
        self.task, self.legal = cast("Any", task), cast("Any", {0: None})

    def say(self, message: Message) -> None:
        assert isinstance(message, Continued)
        self.said.append(message)

    def _choose_onward(self, in_batch: dict[int, Recovery]) -> list[int]:
        return list(in_batch)

    def _continue_together(self, ways: dict[int, Onward]) -> In:
        return {number: error for number, error in self.together.items() if number in ways}

    def _continue(self, going: Onward) -> str:
        number = UNHARMED if going.place == "whole" else going.step
        self.ran_alone.append(number)
        return self.alone.get(number, FINE)

    def go_on(self) -> dict[int | None, str]:
        """Return what is said, by item; the step of each item is its number."""
        recovered = {number: Recovery("ended", number, (0,)) for number in range(1, ITEMS)}
        self._continue_each(recovered)
        return {continued.item: continued.error for continued in self.said}


ALL_FINE = {UNHARMED: FINE, 1: FINE, 2: FINE, 3: FINE}


@pytest.mark.parametrize(
    ("together", "alone", "ran_alone", "said"),
    [
        pytest.param(ALL_FINE, {}, [1], {None: "", 1: "", 2: "", 3: ""}, id="one of them alone"),
        pytest.param(ALL_FINE, {1: "E"}, [1], {None: "", 1: "E", 2: "", 3: ""}, id="its own word"),
        pytest.param(
            ALL_FINE | {2: "E"}, {}, [1, 2], {None: "", 1: "", 2: "", 3: ""}, id="only together"
        ),
        pytest.param(
            ALL_FINE | {3: "E"}, {3: "F"}, [1, 3], {None: "", 1: "", 2: "", 3: "F"}, id="alone, too"
        ),
        pytest.param(
            {UNHARMED: FINE, 1: FINE}, {}, [1, 2, 3], {None: "", 1: "", 2: "", 3: ""}, id="it died"
        ),
        pytest.param(
            ALL_FINE | {UNHARMED: "E"}, {UNHARMED: "E"}, [UNHARMED], {None: "E"}, id="without harm"
        ),
        pytest.param({}, {}, [UNHARMED, 1, 2, 3], {None: "", 1: "", 2: "", 3: ""}, id="no answer"),
    ],
)
def test_only_what_goes_wrong_alone_counts(
    together: In, alone: In, ran_alone: list[int], said: dict[int | None, str]
) -> None:
    going = Going(together, alone)
    assert going.go_on() == said
    assert going.ran_alone == ran_alone
