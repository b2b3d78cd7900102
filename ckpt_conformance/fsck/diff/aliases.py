"""What two sides say of the same thing in other words: by parameters, and by ranks.

Torch numbers the parameters of an optimizer, or gives them the model's names:
`optimizer.state_dict()` numbers them (`state.0.exp_avg`); what it saves for several ranks
(`get_optimizer_state_dict`) names them (`state.layers.0.weight.exp_avg`). Both list them in the
same order under `param_groups`: that is how a load goes from one to the other, and a comparison.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents.leaves import Value, same_value
from ckpt_conformance.fsck.source.untrusted import is_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_conformance.fsck.contents.entries import Entry

_RANK = re.compile(r"rank(\d{1,9})\.")
_PARAMS = re.compile(r"((?:.*\.)?)param_groups\.(\d{1,9})\.params")


def named(
    a: Mapping[str, Entry], b: Mapping[str, Entry]
) -> tuple[dict[str, Entry], dict[str, Entry], list[str]]:
    """Give the numbered parameters of one side the names that they have on the other one.

    Returns the entries of both, and what the names of such optimizers begin with.
    """
    sides, groups = (dict(a), dict(b)), (_groups(a), _groups(b))
    done: list[str] = []
    for top in sorted(groups[0].keys() & groups[1].keys()):
        for numbered, with_names in ((0, 1), (1, 0)):
            names = _pairs(groups[numbered][top], groups[with_names][top])
            if names and _rename(sides[numbered], top, names):
                _take_lists(sides[numbered], sides[with_names], top, groups[with_names][top])
                done.append(top.rstrip("."))
    return *sides, done


def _groups(entries: Mapping[str, Entry]) -> dict[str, dict[str, list[object]]]:
    """Return the list of each group of parameters, by the head of the optimizer's names."""
    found: dict[str, dict[str, list[object]]] = {}
    for name, entry in entries.items():
        match = _PARAMS.fullmatch(name)
        if match and isinstance(entry, Value) and is_list(entry.value):
            found.setdefault(match[1], {})[match[2]] = entry.value
    return found


def _pairs(
    numbered: Mapping[str, list[object]], with_names: Mapping[str, list[object]]
) -> dict[str, str]:
    """Return the name of each number; nothing where the lists are not such a pair."""
    if numbered.keys() != with_names.keys():
        return {}
    names: dict[str, str] = {}
    places = 0
    for group, numbers in numbered.items():
        texts = with_names[group]
        if len(numbers) != len(texts):
            return {}
        for number, text in zip(numbers, texts, strict=True):
            if type(number) is not int or not isinstance(text, str):
                return {}
            names[str(number)] = text
            places += 1
    is_one_to_one = len(names) == len({*names.values()}) == places
    return names if is_one_to_one else {}


def _rename(entries: dict[str, Entry], top: str, names: Mapping[str, str]) -> bool:
    """Rename the state of each parameter; False, and nothing, where a name is taken."""
    head = f"{top}state."
    after: dict[str, str] = {}
    for name in entries:
        number, _, rest = name.removeprefix(head).partition(".")
        if name.startswith(head) and rest and number in names:
            after[name] = f"{head}{names[number]}.{rest}"
    taken = entries.keys() - after.keys()
    if len({*after.values()}) < len(after) or not taken.isdisjoint(after.values()):
        return False
    moved = {new: entries.pop(old) for old, new in after.items()}
    entries |= moved
    return True


def _take_lists(
    entries: dict[str, Entry], other: Mapping[str, Entry], top: str, groups: Mapping[str, object]
) -> None:
    """Give a side the other one's lists of names: they say the same."""
    for group in groups:
        name = f"{top}param_groups.{group}.params"
        entries[name] = other[name]


def once_for_all(
    fewer: Mapping[str, Entry],
    more: Mapping[str, Entry],
    own: tuple[Mapping[str, str], Mapping[str, str]],
) -> Iterator[str]:
    """Yield the values of ranks that the other side does not have, and that it says once for all.

    `own` are the names of what is a rank's own, on each side, with the names that it has without.
    """
    ranks = {_rank(name) for name in own[0]}
    for name, of_all in own[1].items():
        theirs, ours = more.get(name), fewer.get(of_all)
        is_new = name not in fewer and _rank(name) not in ranks
        if not (is_new and isinstance(theirs, Value) and isinstance(ours, Value)):
            continue
        if same_value(theirs.value, ours.value):
            yield name


def _rank(name: str) -> str:
    match = _RANK.match(name)
    return match[1] if match else ""
