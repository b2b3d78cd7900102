"""What results depend on: what differs is named, a few files of many."""

from __future__ import annotations

from ckpt_conformance.work.identity import SUITE, Identity


def test_what_differs_is_named_with_both_values() -> None:
    ours = Identity({"torch": "2.1", "Python": "3.11"}, files={"a.py": "1", "b.py": "2"})
    theirs = Identity({"torch": "2.2", "Python": "3.11"}, files={"a.py": "1", "c.py": "3"})
    assert ours.differences(ours) == []
    assert ours.differences(theirs, "in shard 1/2", "in shard 2/2") == [
        "torch is 2.1 in shard 1/2 and 2.2 in shard 2/2",
        "b.py is 2 in shard 1/2 and absent in shard 2/2",
        "c.py is absent in shard 1/2 and 3 in shard 2/2",
    ]


def test_of_many_files_a_few_are_named() -> None:
    ours = Identity({}, files={f"{number:04}.py": "1" for number in range(2000)})
    told = ours.differences(Identity({}, files={}))
    assert [line.partition(" ")[0] for line in told] == ["0000.py", "0001.py", "0002.py", "1,997"]


def test_files_that_nobody_has_looked_at_are_not_compared() -> None:
    ours = Identity({"torch": "2.1", SUITE: "1"}, files={"a.py": "1"})
    early = Identity({"torch": "2.1"})
    assert ours.part(early).differences(early) == []
    late = Identity({"torch": "2.1"}, files={"a.py": "2"})
    assert ours.part(late).differences(late) == ["a.py is 1 here and 2 there"]
