"""What `fsck --explain` says: every topic has its words, and every finding its topic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from fsck_runs import Finished
from test_cli_fsck import cli

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import TOPICS, Kind, State, Topic
from ckpt_conformance.report import explanations


def test_every_topic_is_explained() -> None:
    assert list(explanations.EXPLANATIONS) == list(Topic)
    assert set(TOPICS) == set(Kind)
    for told in explanations.EXPLANATIONS.values():
        assert all(text.endswith((".", "-")) for text in told[:-1])
    without = {topic for topic, told in explanations.EXPLANATIONS.items() if not told.next}
    assert without == {Topic.NO_CHECKSUM, Topic.REMARK}  # which change no state
    assert max(len(told.next) for told in explanations.EXPLANATIONS.values()) < 64


@pytest.mark.parametrize("topic", Topic)
def test_it_needs_no_folder(topic: Topic) -> None:
    done = Finished("fsck", "--explain", topic)
    assert done.status == 0
    assert done.out.splitlines()[0] == topic
    assert "what to do" in done.out


@pytest.mark.parametrize("word", ["leftover", "pointer", "not-finite", "passed-over"])
def test_lines_that_are_no_findings_are_explained(word: str) -> None:
    assert "what to do" in Finished("fsck", "--explain", word).out


@pytest.mark.parametrize("state", [one for one in State if one is not State.WHOLE])
def test_a_verdict_leads_to_the_topics(state: State) -> None:
    done = Finished("fsck", "--explain", state)
    assert done.status == 0
    assert all(topic in done.out for topic in Topic)


def test_every_topic_is_said_somewhere() -> None:
    """A topic without a finding would be a page for nothing, a finding without one has none."""
    package = Path(explanations.__file__).parents[1]
    code = "".join(one.read_text() for one in (package / "fsck").rglob("*.py"))
    said = {topic for topic in Topic if len(re.findall(rf"Topic\.{topic.name}\b", code)) > 0}
    assert said == set(Topic)
    schema = json.loads((package / "report" / "schemas" / "fsck.schema.json").read_text())
    assert set(schema["$defs"]["finding"]["properties"]["topic"]["enum"]) == set(Topic)


def test_an_unknown_topic_is_told_with_those_that_there_are() -> None:
    done = cli("fsck", "--explain", "chksum")
    assert done.returncode == 2
    assert "did you mean checksum" in done.stderr


def test_findings_say_where_to_read_more(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
        torch.save({"w": torch.ones(300)}, tmp_path / f"step_{step}" / "model.pt")
    path = tmp_path / "step_2" / "model.pt"
    data = bytearray(path.read_bytes())
    data[data.index(b"\x00\x00\x80\x3f" * 4) + 5] ^= 1
    path.write_bytes(data)
    done = cli("fsck", tmp_path)
    assert "more about this: ckpt-conformance fsck --explain checksum" in done.stdout
    topics = {one.topic for report in judge(tmp_path).reports for one in report.findings}
    assert topics == {Topic.CHECKSUM}
