"""The reader of verl's manifest on values that nobody would write."""

from __future__ import annotations

from typing import Any

import megatron_layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_conformance.fsck.formats import manifest_v2

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=100)
def test_whatever_a_manifest_holds_is_told_in_words(data: st.DataObject) -> None:
    """Any value anywhere: no exception, and every path that is followed stays inside."""
    body = megatron_layouts.manifest()
    for _ in range(data.draw(st.integers(1, 3))):
        holder: Any = body
        key = data.draw(st.sampled_from(sorted(holder)))
        while isinstance(holder[key], dict) and holder[key] and data.draw(st.booleans()):
            holder = holder[key]
            key = data.draw(st.sampled_from(sorted(holder)))
        holder[key] = data.draw(ANY_JSON)
    said = list(manifest_v2.contradictions(body, 100))
    assert all(isinstance(one, str) and len(one) < 2000 for one in said)
    read = manifest_v2.read(body)
    for path in read.folders:
        assert not path.startswith("/")
        assert ".." not in path.split("/")
    assert all(isinstance(path, str) for path in read.named)
