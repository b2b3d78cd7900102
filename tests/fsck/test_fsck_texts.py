"""Texts that run code where they are loaded: tags of YAML, and pickles under the names of texts."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
import torch
import yaml
from unsafe_corpus import Evil

from ckpt_conformance.fsck.code import yaml_tags
from ckpt_conformance.fsck.code.yaml_tags import asked_by
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, Report, State, Topic
from ckpt_conformance.fsck.source.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.fsck.judge.judge import Judged


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step with a model."""
    folder = tmp_path / "step_1"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    return folder


def only(judged: Judged) -> Report:
    (report,) = judged.reports
    return report


UNSAFE = {
    "apply": "!!python/object/apply:os.getpid []",
    "new": '!!python/object/new:subprocess.Popen [["true"]]',
    "verbatim": "!<tag:yaml.org,2002:python/object/apply:os.getpid> []",
    "escaped": "!!pyth%6Fn/object/apply:os.getpid []",
    "handle": "%TAG !p! tag:yaml.org,2002:python/\n---\na: !p!object/apply:os.getpid []",
    "primary handle": "%TAG ! tag:yaml.org,2002:python/object/\n---\na: !apply:os.getpid []",
    "name": "!!python/name:os.system",
    "module": "!!python/module:os.path",
    "key": "? !!python/object/apply:os.getpid []\n: 1",
    "flow": "{a: [1, !!python/object/apply:os.getpid []]}",
    "instance": "!!python/object:subprocess.Popen {a: 1}",
}


@pytest.mark.parametrize("text", UNSAFE.values(), ids=UNSAFE.keys())
@pytest.mark.parametrize("code", ["utf-8", "utf-16"])
def test_tags_that_run_code_are_unsafe(step: Path, text: str, code: str) -> None:
    data = (text if text.startswith(("%", "?")) else f"lr: 1\nx: {text}\n").encode(code)
    yaml.compose(data)  # it is YAML
    (step / "hparams.yaml").write_bytes(data)
    report = only(judge(step))
    (finding,) = (one for one in report.findings if one.kind is not Kind.NOTE)
    assert (report.state, finding.file) == (State.UNSAFE, "hparams.yaml")
    trusted = judge(step, Options(trust=Trust(frozenset({finding.name}))))
    assert only(trusted).state is State.WHOLE


def test_tags_that_run_code_make_a_step_of_a_folder_of_texts(tmp_path: Path) -> None:
    step = tmp_path / "step_1"
    step.mkdir()
    (step / "meta.json").write_text("{}")
    (step / "hparams.yaml").write_text("lr: 1\n")
    assert judge(tmp_path).reports == []
    (step / "hparams.yaml").write_text(f"x: {UNSAFE['apply']}\n")
    assert only(judge(tmp_path)).state is State.UNSAFE


DATA: dict[str, Callable[[], str]] = {
    "plain": lambda: yaml.dump({"a": (1, 2), "b": 1j, "c": {1, 2}, "d": b"x"}),
    "dict": lambda: yaml.dump(OrderedDict(a=1)),
    "arguments": lambda: yaml.dump(Namespace(a=1)),
    "path": lambda: yaml.dump(PurePosixPath("a/b")),
    "own tag": lambda: "a: !env HOME\nb: !include x.yaml\nc: '!'\nd: !ruby/object:X {}",
    "text": lambda: "a: no ! tag, os.system\n",
    "no YAML": lambda: "\x00\x01!!",
}


@pytest.mark.parametrize("text", DATA.values(), ids=DATA.keys())
def test_data_in_yaml_passes(step: Path, text: Callable[[], str]) -> None:
    (step / "hparams.yml").write_text(text())
    report = only(judge(step))
    assert (report.state, report.passed_over) == (State.WHOLE, ["hparams.yml"])


def test_what_pyyaml_resolves_is_what_is_seen() -> None:
    """The tags of PyYAML's own tokens are the truth."""
    for text in UNSAFE.values():
        whole = text if text.startswith(("%", "?")) else f"x: {text}"
        pending, tags = [yaml.compose(whole)], set[str]()
        while pending:
            node = pending.pop()
            tags.add(node.tag)
            if isinstance(node, yaml.MappingNode):
                pending += [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                pending += node.value
        own = {tag.rpartition(":")[2] for tag in tags if "python/" in tag}
        assert {str(name) for name in asked_by(whole.encode()).names} == own


def test_a_text_of_many_tags_is_left_when_its_time_is_over(step: Path) -> None:
    (step / "a.yaml").write_text("a: [!x 1" + ", !x 1" * 3_000_000 + "]\n")
    report = only(judge(step, Options(file_timeout=0.1)))
    assert report.state is State.UNKNOWN
    assert {one.topic for one in report.findings} == {Topic.OUT_OF_TIME}


def test_a_tag_far_behind_in_a_large_text_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_tags, "_PIECE", 100)
    head = b"%TAG !p! tag:yaml.org,2002:python/\n---\na: [!x 1" + b", !x 1" * 5000 + b"]\n"
    assert asked_by(head).names == set()
    assert asked_by(head + b"b: !p!name:os.system\n").names == {("os", "system")}


@pytest.mark.parametrize(
    "name",
    [
        *("vocab.json", "config.json", "notes.txt", "README.md", "a.yaml", "w.safetensors"),
        *("model.safetensors.index.json", "_CHECKPOINT_METADATA", ".snapshot_metadata"),
        *("trainer_state.json", "ckpt_contents.json", "meta.json", "w.h5", "w.gguf", "w.onnx"),
    ],
)
def test_a_pickle_under_the_name_of_a_text_is_unsafe(step: Path, name: str) -> None:
    (step / name).write_bytes(pickle.dumps(Evil()))
    assert only(judge(step)).state is State.UNSAFE
