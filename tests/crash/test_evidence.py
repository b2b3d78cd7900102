"""Parts of an exploration: how batches are cut, how evidence travels, who holds a directory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.crash.explore import evidence, kept
from ckpt_conformance.crash.explore.evidence import Evidence
from ckpt_conformance.crash.explore.judging import LoadError, Recovery
from ckpt_conformance.crash.script import kept as rehearsals
from ckpt_conformance.crash.script.command import Script
from ckpt_conformance.crash.script.progress import Measure
from ckpt_conformance.trace.operations import Kind, Operation, Recording
from ckpt_conformance.work.lines import Header, Line, Writer, read


@pytest.mark.parametrize(("contents", "chunk"), [(0, 8), (1, 8), (47, 8), (1000, 1), (4100, 250)])
@pytest.mark.parametrize("count", [16, 256])
def test_batches_hold_each_content_once_and_cut_no_chunk(
    contents: int, chunk: int, count: int
) -> None:
    names = [str(number) for number in range(contents)]
    batches = evidence.batches_of(names, chunk, count)
    assert len(batches) == count
    assert list(itertools.chain(*batches)) == names
    starts = itertools.accumulate((len(batch) for batch in batches), initial=0)
    assert all(start % chunk == 0 or start == contents for start in starts)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("chunks", [1, 3, 16, 100])
def test_neighbours_have_their_share_of_the_chunks(shards: int, chunks: int) -> None:
    batches = evidence.batches_of(["x"] * chunks, 1, 16)
    cuts = [16 * number // shards for number in range(shards + 1)]
    loads = [sum(map(len, batches[a:b])) for a, b in itertools.pairwise(cuts)]
    widest = max(b - a for a, b in itertools.pairwise(cuts))
    assert max(loads) <= chunks * widest / 16 + 1


def test_evidence_with_names_that_are_no_text_goes_through_a_file(tmp_path: Path) -> None:
    error = LoadError("pkg.Broken", "no file \udcff.pt")
    sent = Evidence("basis", {"c": Recovery("ended", error=error)}, left=(("c", 3),))
    path = tmp_path / "lines.jsonl"
    with Writer(path) as writer:
        writer.write(_header())
        writer.write(Line(item="first 1/16", result=msgspec.Raw(evidence.to_json(sent))))
    line = read(path).results["first 1/16"]
    assert evidence.from_json(line.result, Evidence) == sent


def _header() -> Header:
    plain = {"request": {}, "environment": {}, "created": "", "plan": "", "items": []}
    return Header(command="explore", version="0", **plain)


# ---- kept recordings -----------------------------------------------------------------------------


def test_who_shares_a_directory_last_removes_it(tmp_path: Path) -> None:
    root = tmp_path / "ckc-explore-1" / "run" / "checkpoints"
    with kept.hold(root, alone=False):
        with kept.hold(root, alone=False):
            assert root.is_dir()
        assert root.is_dir(), "the first one needs it still"
    assert list(tmp_path.iterdir()) == []


def test_without_private_memory_one_run_holds_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "ckc-explore-1" / "run" / "checkpoints"
    with kept.hold(root, alone=False):
        with pytest.raises(RequestError, match="held by another run"), kept.hold(root, alone=True):
            pass
        assert root.is_dir()


def test_a_directory_of_somebody_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "ckc-explore-1" / "run" / "checkpoints" / "model.pt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("weights")
    with (
        pytest.raises(RequestError, match="is there, and is not of a run with --recording"),
        kept.hold(theirs.parent, alone=False),
    ):
        pass
    assert theirs.read_text() == "weights"
    home = tmp_path / "home" / "me" / "checkpoints"
    with pytest.raises(RequestError, match="TMPDIR"), kept.hold(home, alone=False):
        pass
    assert not home.exists()


@pytest.mark.parametrize("path", ["../outside", "/etc/cron.d/job", "a/../../b"])
def test_a_recording_that_leads_out_of_its_directory_is_refused(tmp_path: Path, path: str) -> None:
    operations = [Operation(0, Kind.CREATE, object=2, path=path)]
    Recording("/root", tmp_path, [], operations).save()
    with pytest.raises(RequestError, match="leads out of the recorded directory"):
        kept.recording_of(tmp_path)


def test_a_kept_rehearsal_names_no_command(tmp_path: Path) -> None:
    """A folder from elsewhere says where a script ran; what runs is what the user typed."""
    rehearsed = rehearsals.KeptRehearsal(
        script=Script(("evil",), "/there/ckc-explore-1/run/out", "/there", result_cmd="evil"),
        expected="e.pt",
        result="",
        deadline=1.0,
        versions=(),
        results={},
        controls={},
        inexact=(),
        notes=(),
        forks=True,
        seconds=1.0,
        measure=Measure("lines", (), resumes=False),
        workers=2,
    )
    (tmp_path / rehearsals.FILE).write_text(json.dumps(msgspec.to_builtins(rehearsed)))
    asked = Script(("python", "train.py", "{out}"), "", str(Path.cwd()))
    script = rehearsals.read(tmp_path, asked).script
    assert (script.command, script.result_cmd, script.cwd) == (asked.command, "", asked.cwd)
    assert script.root == "/there/ckc-explore-1/run/out"
