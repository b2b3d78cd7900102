"""JSON files beside weights: objects and lists are right if Python's json reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source import json_pieces
from ckpt_conformance.fsck.source.findings import Malformed, State
from ckpt_conformance.fsck.source.untrusted import parse_any_json

if TYPE_CHECKING:
    from pathlib import Path


def loads(data: bytes) -> bool:
    try:
        json.loads(data.decode())
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("data", "loaded"),
    [
        (b"[]", True),
        (b' \n[1, {"a": [2]}]\n', True),
        (b'["a", "b"', False),
        (b"[1, 2]]", False),
        (b"[\x00\x00\x00]", False),
        (b'["\xff"]', False),
        (b"[" * 100_000, False),
    ],
)
def test_a_list_is_parsed(data: bytes, *, loaded: bool, tmp_path: Path) -> None:
    step = tmp_path / "step_5"
    step.mkdir()
    torch.save({"w": torch.ones(2)}, step / "model.pt")
    (step / "tokens.json").write_bytes(data)
    if len(data) < 1000:  # a deep one is an error of another sort
        assert loads(data) is loaded
    judged = judge(tmp_path)
    assert judged.state is (State.WHOLE if loaded else State.DAMAGED)
    assert diff(step, step).is_judged is loaded


SIGNS = st.sampled_from(["", "a}", "}]", '"', "},{", "],[", "\\", "é", "\n", "1,2"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | SIGNS
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(SIGNS | st.integers(0, 99).map(str), inner, max_size=8)
    ),
    max_leaves=40,
)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


def read(text: str) -> str:
    """Return the value of a text, or what is wrong with it."""
    try:
        return repr(parse_any_json(text.encode()))
    except Malformed as error:
        return f"wrong: {error}"


@hypothesis.given(
    tree=TREES,
    spaces=SPACES,
    at=st.integers(0, 200),
    sign=st.sampled_from(list('{}[],:"\\1 e-')),
    how=st.sampled_from(["as it is", "more", "less", "another"]),
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_in_pieces_a_text_says_what_it_says_at_once(  # noqa: PLR0913, PLR0917  each is drawn
    tree: object,
    spaces: tuple[str, str],
    at: int,
    sign: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values, and the words for what is wrong; pieces are a few signs long."""
    text = json.dumps(tree, separators=spaces)
    if how != "as it is":
        text = text[:at] + ("" if how == "less" else sign) + text[at + (how != "more") :]
    at_once = read(text)
    with monkeypatch.context() as small:
        for name, size in (("LARGE", 0), ("_PIECE", 8), ("_MANY", 24)):
            small.setattr(json_pieces, name, size)
        assert read(text) == at_once


def test_a_key_that_occurs_twice_far_apart_is_wrong() -> None:
    """Each piece of the text has it once."""
    members = ",".join(f'"{number}":{{"a":{number}}}' for number in range(100_000))
    for text in (f'{{{members},"7":1}}', f'{{"x":{{{members},"7":{{}},"8":[]}}}}'):
        with pytest.raises(Malformed, match="a key occurs twice"):
            parse_any_json(text.encode())
