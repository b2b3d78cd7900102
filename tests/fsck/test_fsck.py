"""Fsck on checkpoints that the real libraries wrote: silent on whole ones, finds the damage."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING

import fsck_corpus
import pytest
import torch

from ckpt_conformance.contract import trees
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Finding, Kind, State
from ckpt_conformance.harness.messages import PayloadSample

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.judge.judge import Judged

# One worker writes the corpus, once.
pytestmark = pytest.mark.xdist_group("fsck")

# The hint of the reference manager and the id of the run are part of no checkpoint.
OF_THE_RUN = {"latest", "run_id"}
# One file is the whole checkpoint: without it there is nothing to judge.
NOTHING_LEFT = {("torch", "missing-file"), ("safetensors", "missing-file")}
TIED = ("0.weight", "tie")
PROTECTED = ("torch", "dcp", "dcp-4-ranks", "reference", "reference-dcp")
# What a layout can't have: no JSON file to edit, no second file to swap with.
NO_JSON = {"torch", "dcp", "dcp-4-ranks"}
JSON_FAULTS = {"edited-number", "edited-name", "non-utf8"}
TWO_FILES = {"swapped-files", "duplicated-file"}
CASES = [
    (layout, fault)
    for layout in PROTECTED
    for fault in at_rest.AT_REST
    if not (layout in NO_JSON and fault in JSON_FAULTS)
    and not (layout == "torch" and fault in TWO_FILES)
]


def findings(judged: Judged) -> list[Finding]:
    return [one for report in judged.reports for one in report.findings]


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  which bit, no secret


def damage(root: Path, target: Path, fault: str, seed: int) -> at_rest.Damage:
    return at_rest.copy_damaged(root, target, fault, seeded(seed))


@pytest.mark.parametrize("layout", fsck_corpus.WRITERS)
def test_what_a_library_wrote_is_whole_and_nothing_is_said(
    layout: str, corpus: dict[str, Path]
) -> None:
    before = trees.listing(corpus[layout])
    judged = judge(corpus[layout], Options(jobs=2))
    assert judged.state is State.WHOLE, findings(judged)
    assert findings(judged) == []
    assert {one.layout for one in judged.reports} == {layout.removesuffix("-4-ranks")}
    assert judged.reports[0].step == (None if layout in {"safetensors", "hf-index"} else 5)
    assert trees.listing(corpus[layout]) == before


def test_the_share_that_nothing_covers_is_told(corpus: dict[str, Path]) -> None:
    """Every byte of the reference and of torch files is protected, none of safetensors."""
    told = {name: judge(root).reports[0] for name, root in corpus.items()}
    for name, one in told.items():
        print(name, one.size, one.digest, one.crc, one.structure, one.uncovered)  # noqa: T201
    assert told["torch"].uncovered == told["reference"].uncovered == 0
    assert told["reference-dcp"].uncovered == 0
    for name in ("dcp", "dcp-4-ranks"):  # only the metadata, which is a bare pickle
        metadata = corpus[name] / "step_5" / ".metadata"
        assert told[name].uncovered == metadata.stat().st_size
    assert told["safetensors"].uncovered == told["safetensors"].size


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_every_fault_is_found_in_its_file(
    layout: str, fault: str, seed: int, corpus: dict[str, Path], tmp_path: Path
) -> None:
    done = damage(corpus[layout], tmp_path / "copy", fault, seed)
    judged = judge(tmp_path / "copy", Options(jobs=2))
    unjudged = done.file in OF_THE_RUN and fault != "swapped-files"  # its partner is judged
    if fault == "extra-file" or unjudged:  # it lies in the run's own folder
        assert judged.state is State.WHOLE, findings(judged)
        return
    if (layout, fault) in NOTHING_LEFT:
        assert judged.reports == []
        assert judged.state is State.UNKNOWN
        return
    found = findings(judged)
    damaged = (done.file, done.detail.removeprefix("with "))  # the second file of a swap
    assert any(name.endswith(one.file) for one in found for name in damaged), (done, found)
    assert judged.state in {State.DAMAGED, State.INCOMPLETE}


@pytest.mark.parametrize("layout", PROTECTED)
def test_a_flipped_bit_is_named_with_its_tensor_and_bytes(
    layout: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    """The fault aims at real tensors: their first bytes are searched in the files."""
    values = fsck_corpus.state()["model"] if layout in {"torch", "dcp"} else {}
    samples = [
        PayloadSample(name=key, bytes=one.numpy().tobytes()[:24].hex(), size=one.nbytes)
        for key, one in values.items()
        if one.dtype is torch.float32 and one.nbytes >= 24
    ]
    places = payload.find(corpus[layout], samples) if samples else manifest_places(corpus[layout])
    assert places
    for number, place in enumerate(places[:8]):
        copy = tmp_path / str(number)
        shutil.copytree(corpus[layout], copy)
        done = at_rest.flip_bits(copy, place, seeded(number))
        hits = [one for one in findings(judge(copy)) if one.start is not None and one.tensors]
        assert hits, done
        for one in hits:
            assert one.kind is Kind.DAMAGED
            names = TIED if place.tensor in TIED else (place.tensor,)  # DCP writes a tie twice
            assert any(name.endswith(names) for name in one.tensors), (done, one)
            assert one.start < place.offset + place.length, (done, one)
            assert one.end > place.offset, (done, one)


def manifest_places(root: Path) -> list[payload.Place]:
    """Find the tensors of a DCP by several ranks, or of the reference, by fsck's own reading."""
    from ckpt_conformance.fsck.formats import dcp, manifest

    found: list[payload.Place] = []
    for path in trees.files(root):
        name = path.relative_to(root).as_posix()
        folder = name.rpartition("/")[0]
        at = f"{folder}/" if folder else ""
        if path.name.startswith("meta") and path.suffix == ".json":
            for file, tensors in manifest.read(path.read_bytes()).tensors.items():
                found += [
                    payload.Place(at + file, start, end - start, key)
                    for start, end, key in tensors
                    if end - start > 8
                ][:2]
        elif path.name == ".metadata" and not (path.parent / "meta.json").exists():
            for file, items in dcp.read_metadata(path.read_bytes()).items.items():
                found += [
                    payload.Place(
                        at + file, one.place.start, one.place.end - one.place.start, one.key
                    )
                    for one in items
                ]
    return found


@pytest.mark.parametrize("layout", ["torch", "dcp", "dcp-4-ranks"])
def test_every_bit_that_counts_as_covered_is(
    layout: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    """One random bit of every nineteenth byte of a file that is said to be covered."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus[layout], copy)
    file = min(
        (p for p in trees.files(copy) if p.name != ".metadata"), key=lambda p: p.stat().st_size
    )
    data = file.read_bytes()
    rng = seeded(7)
    for at in range(rng.randrange(19), min(len(data), 6000), 19):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        found = [one for report in judge(copy).reports for one in report.findings]
        kinds = {one.kind for one in found}  # what a bit made of a name is unsafe, too
        assert Kind.DAMAGED in kinds, f"byte {at} of {file.name}"
    file.write_bytes(data)
    assert judge(copy).state is State.WHOLE


def test_a_shard_of_another_step_is_found_where_digests_exist(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus["reference-dcp"], copy)
    stale = copy / "dcp_000002" / "__0_0.distcp"
    at_rest.replace_file(copy, "dcp_000005/__0_0.distcp", stale)
    newest, older = judge(copy).reports
    assert newest.state is State.DAMAGED
    assert older.state is State.WHOLE
    assert judge_newest(copy).newest_whole == older


def test_a_shard_and_the_metadata_that_places_it_are_damaged(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    """Found by `make fuzz-fsck`: nobody knows then which tensor lies at the wrong byte."""
    root = shutil.copytree(corpus["reference-dcp"], tmp_path / "run")
    for name in (".metadata", "__0_0.distcp"):
        path = root / "dcp_000005" / name
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    report = judge(root).reports[0]
    assert report.state is State.DAMAGED
    assert {".metadata", "__0_0.distcp"} <= {one.file for one in report.findings}


def test_a_save_that_did_not_end_is_incomplete(corpus: dict[str, Path], tmp_path: Path) -> None:
    for layout, file in (
        ("dcp", "step_5/.metadata"),
        ("reference", "meta_000005.json"),
        ("reference-dcp", "dcp_000005/meta.json"),
        ("reference", "model_000005.pt"),
        ("hf-index", "model-00001-of-00002.safetensors"),
    ):
        copy = tmp_path / f"{layout}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(corpus[layout], copy)
        (copy / file).unlink()
        report = judge(copy).reports[0]
        assert report.state is State.INCOMPLETE, (layout, report)
        assert [one.file for one in report.findings] == [file.rpartition("/")[2]]


@pytest.mark.parametrize("layout", ["dcp", "reference-dcp"])
def test_a_strange_file_in_a_checkpoint_is_noted(
    layout: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus[layout], copy)
    folder = next(one for one in sorted(copy.iterdir()) if one.is_dir())
    at_rest.add(folder, "extra.bin")
    at_rest.add(folder, "__9_0.distcp")
    judged = judge(copy)
    assert judged.state is State.WHOLE
    assert [(one.kind, one.file) for one in findings(judged)] == [
        (Kind.NOTE, "__9_0.distcp"),
        (Kind.NOTE, "extra.bin"),
    ]


def test_leftovers_are_told_and_are_no_checkpoints(corpus: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus["dcp"], copy)
    shutil.copytree(copy / "step_5", copy / "step_7.tmp")
    (copy / "step_5" / ".metadata.tmp").write_bytes(b"half")
    (copy / "checkpoint-9.pt.tmp").write_bytes(b"half")
    judged = judge(copy)
    assert judged.leftovers == ["checkpoint-9.pt.tmp", "step_5/.metadata.tmp", "step_7.tmp"]
    assert [one.step for one in judged.reports] == [5]
    assert judged.state is State.WHOLE


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_followed(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    outside = tmp_path / "elsewhere.distcp"
    for inside in (False, True):
        copy = tmp_path / f"copy-{inside}"
        shutil.copytree(corpus["dcp"], copy)
        shard = copy / "step_5" / "__0_0.distcp"
        target = copy / "kept.data" if inside else outside
        shard.rename(target)
        shard.symlink_to(target)
        judged = judge(copy)
        assert judged.state is (State.WHOLE if inside else State.DAMAGED)
        if inside:
            assert judged.reports[0].size == judge(corpus["dcp"]).reports[0].size
        else:
            (one,) = findings(judged)
            assert one.file == "__0_0.distcp"
            assert str(outside) in one.what


def test_a_fifo_is_a_finding_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint-5.pt")
    judged = judge(tmp_path)
    assert judged.state is State.DAMAGED
    assert "no regular file" in findings(judged)[0].what


def test_shared_bytes_are_noted(tmp_path: Path) -> None:
    for step in (4, 5):
        (tmp_path / f"step_{step}").mkdir()
    fsck_corpus.torch_save(tmp_path / "step_4")
    os.link(tmp_path / "step_4" / "checkpoint-5.pt", tmp_path / "step_5" / "checkpoint-5.pt")
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE
    assert {one.kind for one in findings(judged)} == {Kind.NOTE}
    assert all("hard link" in one.what for one in findings(judged))
    assert len(findings(judged)) == 2


def test_a_torch_file_without_sums_says_so(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        fsck_corpus.torch_save(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    (report,) = judge(tmp_path).reports
    assert report.state is State.WHOLE
    assert report.crc == 0
    assert report.uncovered > 0
    assert "no CRC" in report.findings[0].what


@pytest.mark.parametrize(
    "names",
    [
        [f"actor/model_world_size_4_rank_{rank}.pt" for rank in range(4)],
        [f"model-{part:05d}-of-00003.bin" for part in (1, 2, 3)],
    ],
    ids=["ranks", "parts"],
)
def test_a_missing_file_of_a_numbered_set_is_named(names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "global_step_7"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.ones(2)}, folder / name)
    assert judge(tmp_path).state is State.WHOLE
    for name in names:
        (folder / name).rename(tmp_path / "aside")
        (report,) = judge(tmp_path).reports
        assert report.state is State.INCOMPLETE
        missing = [one.file for one in report.findings if one.kind is Kind.MISSING]
        assert missing == [name]
        (tmp_path / "aside").rename(folder / name)


def test_a_numbered_set_beside_other_checkpoints_stays_one(tmp_path: Path) -> None:
    for name in ("step_3.pt", "last.pt", *(f"w-{part:05d}-of-00002.pt" for part in (1, 2))):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE
    assert len(judged.reports) == 3


def test_metadata_only_reads_no_payload(corpus: dict[str, Path]) -> None:
    for root in corpus.values():
        judged = judge(root, Options(metadata_only=True))
        assert judged.state is State.WHOLE
        assert sum(one.crc for one in judged.reports) == 0


def test_the_newest_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    """Names sort as text: 9 is after 10 there, and times say what a copy made of them."""
    for step in (10, 9, 100):
        torch.save({"step": step}, tmp_path / f"epoch=1-step={step}.ckpt")
    steps = [one.step for one in judge(tmp_path).reports]
    assert steps == [100, 10, 9]
