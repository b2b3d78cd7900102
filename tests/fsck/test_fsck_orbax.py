"""Checkpoints of Orbax, as it wrote them: whole, and what damage and a save that did not end do.

`golden/make_fsck.py orbax` wrote the golden ones with the library. What it says of each fault at a
load was noted when the tests were made: where it serves other values, no byte tells.
"""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING

import pytest
import unsafe_corpus as evil
from fsspec.implementations.memory import MemoryFileSystem
from url_stores import upload

from ckpt_conformance.contract import trees
from ckpt_conformance.fsck.formats import ocdbt, zarr, zstd
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, Malformed, State, TooLarge
from ckpt_conformance.fsck.source.places import folder_at, place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Finding, Report

STEP, TREE, MARK = "_CHECKPOINT_METADATA", "_METADATA", "commit_success.txt"
TREES = ("zarr2", "zarr3", "ocdbt3", "deep")


@pytest.fixture(autouse=True)
def _packages() -> None:
    """Ask for what the extra `orbax` brings."""
    try:
        zstd.check_installed()
    except zstd.NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture
def golden(repository: Path, tmp_path: Path) -> Path:
    """A copy of what the library wrote."""
    copy = tmp_path / "golden"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / "orbax", copy)
    return copy


@pytest.fixture
def run(golden: Path) -> Path:
    return golden / "manager"


@pytest.fixture
def step(run: Path) -> Path:
    return run / "10"


def only(path: Path) -> Report:
    (report,) = judge(path).reports
    return report


def wrong(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.kind is not Kind.NOTE]


def files(root: Path) -> list[Path]:
    return sorted(trees.files(root))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


# -- what the library wrote ------------------------------------------------------------------------


def test_what_orbax_wrote_is_recognised_and_whole(golden: Path) -> None:
    reports = {one.path.name: one for one in judge(golden).reports}
    assert set(reports) == {"1", "10", "forms", *TREES}
    for report in reports.values():
        assert (report.layout, report.state, wrong(report)) == ("orbax", State.WHOLE, [])
        assert report.passed_over == []
    assert [reports[name].tensors for name in ("10", *TREES)] == [4, 4, 4, 4, 1]
    assert [reports[name].step for name in ("1", "10", "zarr2")] == [1, 10, None]


def test_a_tree_of_several_levels_is_walked(golden: Path) -> None:
    folder, read = folder_at(golden / "deep"), ocdbt.Read()
    root = ocdbt.read_root(folder, "", read)
    assert root.height > 1
    found = dict(ocdbt.entries(folder, "", root, read))
    assert len(found) == root.keys == read.keys
    assert {"a/.zarray", "a/0.0", "a/3.19"} <= set(found)


def test_metadata_only_reads_no_chunk(golden: Path) -> None:
    chunk = golden / "zarr2" / "moment" / "0.0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    assert judge(golden / "zarr2", Options(metadata_only=True)).state is State.WHOLE
    assert judge(golden / "zarr2").state is State.DAMAGED


@pytest.mark.parametrize("asked", [Options(metadata_only=True), Options(sample=0.3)])
def test_what_runs_in_the_place_of_a_chunk_is_unsafe(golden: Path, asked: Options) -> None:
    """The chunk is not unpacked then, and `torch.load` of this file would run it."""
    evil.zipped(golden / "zarr2/moment/0.0", evil.system(golden / "ran") + b".")
    assert judge(golden / "zarr2", asked).state is State.UNSAFE
    assert not (golden / "ran").exists()


# -- a save that did not end -----------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "state", "state/d", "state/ocdbt.process_0/d"])
def test_a_step_in_which_nothing_was_saved_is_incomplete(run: Path, inside: str) -> None:
    """Orbax lists it, takes it for the newest step, and raises when it loads it."""
    (run / "20" / inside).mkdir(parents=True)
    if inside.endswith("d"):
        (run / "20" / inside / "0123456789abcdef0123456789abcdef").write_bytes(b"some bytes")
    judged = judge(run)
    assert [(one.step, one.state) for one in judged.reports] == [
        (20, State.INCOMPLETE),
        (10, State.WHOLE),
        (1, State.WHOLE),
    ]
    newest = judge_newest(run).newest_whole
    assert newest is not None
    assert newest.path == run / "10"


def test_a_folder_of_another_name_is_no_step(run: Path) -> None:
    for name in ("metrics", "logs", "descriptor"):
        (run / name).mkdir()
    assert [one.step for one in judge(run).reports] == [10, 1]


@pytest.mark.parametrize("ending", ["", "-1795487040"])
def test_a_temporary_folder_is_a_leftover_and_never_the_newest(run: Path, ending: str) -> None:
    name = f"20.orbax-checkpoint-tmp{ending}"
    shutil.copytree(run / "10", run / name)
    judged = judge(run)
    assert [one.step for one in judged.reports] == [10, 1]
    assert judged.leftovers == [name]
    assert only(run / name).state is State.INCOMPLETE


def test_a_step_without_the_time_of_its_commit_is_incomplete(step: Path) -> None:
    known = json.loads((step / STEP).read_text())
    (step / STEP).write_text(json.dumps({**known, "commit_timestamp_nsecs": None}))
    report = only(step)
    assert (report.state, [one.file for one in wrong(report)]) == (State.INCOMPLETE, [MARK])


def test_a_step_without_the_marker_that_its_items_have_is_incomplete(step: Path) -> None:
    """In a bucket, Orbax passes over it."""
    (step / MARK).unlink()
    report = only(step)
    assert (report.state, [one.file for one in wrong(report)]) == (State.INCOMPLETE, [MARK])


def test_releases_that_wrote_no_marker_and_no_metadata_of_a_step(run: Path) -> None:
    for path in files(run):
        if path.name in (MARK, STEP):
            path.unlink()
    reports = judge(run).reports
    assert [(one.step, one.state) for one in reports] == [(10, State.WHOLE), (1, State.WHOLE)]
    assert [one for report in reports for one in wrong(report)] == []


@pytest.mark.parametrize("item", ["state", "extra"])
def test_a_missing_item_is_told(step: Path, item: str) -> None:
    shutil.rmtree(step / item)
    report = only(step)
    assert report.state is State.INCOMPLETE
    assert [one.file for one in wrong(report)] == [item]


# -- damage ----------------------------------------------------------------------------------------


def harmless(path: Path, root: Path) -> bool:
    """Return whether Orbax loads the same without a file, and nothing says that it was there."""
    name = str(path.relative_to(root))
    is_joined = "ocdbt.process_0/" in name and path not in used(root)
    beside = (MARK, "_sharding", "process_0", STEP)
    return is_joined or path.name in beside or (path.name == "metadata" and root.name != "10")


def used(root: Path) -> set[Path]:
    """Return the files of the databases that a load reads."""
    found: set[Path] = set()
    for manifest in root.rglob(ocdbt.MANIFEST):
        if manifest.parent.name.startswith("ocdbt.process_"):
            continue
        folder, read = folder_at(manifest.parent), ocdbt.Read()
        root_of = ocdbt.read_root(folder, "", read)
        for _, value in ocdbt.entries(folder, "", root_of, read):
            found.add(manifest.parent / value.file)
    return found


@pytest.mark.parametrize("name", ["manager/10", *TREES])
@pytest.mark.parametrize("fault", ["missing", "empty", "half"])
def test_no_file_that_a_load_reads_is_missed(golden: Path, name: str, fault: str) -> None:
    """Orbax raises at each of these, but where its own metadata of the step is damaged."""
    root = golden / name
    tried = 0
    for path in files(root):
        if harmless(path, root) and (fault == "missing" or path.name in (MARK, "process_0")):
            continue
        if harmless(path, root) and "/d/" in str(path):
            continue
        if (name, path.name, fault) == ("deep", ocdbt.MANIFEST, "missing"):
            continue  # nothing else shows that it is one
        kept = path.read_bytes()
        path.unlink()
        if fault != "missing":
            path.write_bytes(kept[: len(kept) // 2 if fault == "half" else 0])
        report = only(root)
        path.write_bytes(kept)
        expected = {State.DAMAGED} if fault != "missing" else {State.INCOMPLETE}
        assert report.state in expected, path
        tried += 1
    assert tried > 1
    assert only(root).state is State.WHOLE


@pytest.mark.parametrize("name", ["manager/10/state", "ocdbt3", "deep"])
def test_any_bit_of_a_manifest_and_of_a_node_is_covered(golden: Path, name: str) -> None:
    root = golden / name
    (top,) = [root / ocdbt.MANIFEST]
    for at in range(0, top.stat().st_size, 5):
        flip(top, at)
        assert judge(root).state is State.DAMAGED, at
        flip(top, at)
    folder, read = folder_at(root), ocdbt.Read()
    place_of = ocdbt.read_root(folder, "", read).place
    assert place_of is not None
    for at in range(place_of.start, place_of.start + place_of.length, 29):
        flip(root / place_of.file, at)
        report = only(root)
        flip(root / place_of.file, at)
        assert [(one.kind, one.file, one.start) for one in wrong(report)] == [
            (Kind.DAMAGED, place_of.file, place_of.start)
        ]


@pytest.mark.parametrize("name", ["zarr2", "zarr3"])
def test_a_flip_that_orbax_refuses_in_metadata_is_damage(golden: Path, name: str) -> None:
    """`.zarray`, `zarr.json` and the tree: a key that is another one, or a value of no meaning."""
    root = golden / name
    array = ".zarray" if name == "zarr2" else "zarr.json"
    for file, words in {
        TREE: ("key_metadata", '"key_type"', "value_type", "skip_deserialize", "tree_metadata"),
        f"params.w/{array}": ('"shape"', "fill_value", "zarr_format", "zstd"),
        "array_metadatas/process_0": ("param_name", "write_shape", "chunk_shape", "params.w"),
    }.items():
        kept = (root / file).read_bytes()
        for word in words:
            at = kept.index(word.encode()) + 2
            flip(root / file, at)
            report = only(root)
            (root / file).write_bytes(kept)
            assert report.state in (State.DAMAGED, State.UNKNOWN), (file, word)


@pytest.mark.parametrize("kind", [None, 3, {}])
def test_a_way_to_name_chunks_that_is_no_text_is_damage(golden: Path, kind: object) -> None:
    path = golden / "zarr3" / "moment" / "zarr.json"
    known = json.loads(path.read_text())
    assert known["chunk_key_encoding"].pop("name") == "default"
    if kind is not None:
        known["chunk_key_encoding"]["name"] = kind
    path.write_text(json.dumps(known))
    assert only(golden / "zarr3").state is State.DAMAGED


def test_a_chunk_that_is_not_what_it_should_be_names_its_array(golden: Path) -> None:
    chunk = golden / "zarr2" / "moment" / "0.0"
    data = chunk.read_bytes()
    other = (golden / "zarr2" / "params.b" / "0").read_bytes()
    for bytes_of in (data[:-1], data + b"x", other, b"\0" * len(data)):
        chunk.write_bytes(bytes_of)
        report = only(golden / "zarr2")
        (bad,) = wrong(report)
        assert (bad.kind, bad.file, bad.tensors) == (
            Kind.DAMAGED,
            "moment/0.0",
            ("moment",),
        )


def test_chunks_that_may_be_left_out_are_a_remark(golden: Path) -> None:
    """Older releases left out chunks of zeros: nobody can tell them from lost ones."""
    tree = golden / "zarr2" / TREE
    known = json.loads(tree.read_text())
    del known["store_array_data_equal_to_fill_value"]
    tree.write_text(json.dumps(known))
    (golden / "zarr2" / "moment" / "0.0").unlink()
    report = only(golden / "zarr2")
    assert report.state is State.WHOLE
    (told,) = [one for one in report.findings if one.tensors == ("moment",)]
    assert "not there" in told.what


def test_a_url_has_the_verdicts_of_a_path(golden: Path) -> None:
    (golden / "manager" / "10" / "state" / ocdbt.MANIFEST).unlink()
    try:
        upload(golden, "memory://golden")
        here, there = judge(golden), judge(place("memory://golden"))
    finally:
        MemoryFileSystem.store.clear()
    told = [
        {one.path.name: (one.layout, one.state, one.step, one.findings) for one in judged.reports}
        for judged in (here, there)
    ]
    assert told[0] == told[1]
    assert len(told[0]) == 7


# -- bytes that nobody vouches for -----------------------------------------------------------------


def node(body: bytes, magic: int) -> bytes:
    """Wrap the body of a node, unpacked, in a header and a sum that are right."""
    head = struct.pack(">I", magic) + struct.pack("<Q", 12 + 2 + len(body) + 4) + b"\0\0"
    return head + body + struct.pack("<I", zstd.crc32c(head + body))


def manifest(table: bytes, place_of: bytes) -> bytes:
    """Make a manifest of one version; it is unpacked."""
    config = bytes(16) + b"\0" + b"\x80\x08" + b"\x80\x08" + b"\4" + b"\0"
    return node(config + table + place_of + b"\0", 0x0CDB3A2A)


def version(length: int = 9) -> bytes:
    """Make the one version: generation, height, file, place, length, keys and two more sums."""
    sizes = bytes([1, length, 1, length, 0])
    return b"\1" + b"\1" + b"\0" + b"\0" + sizes[:1] + sizes[1:2] + b"\1\1\0" + bytes(8)


@pytest.mark.parametrize(
    "path", ["../../secret", "/etc/passwd", "d/../../x", "", "d//x", "d/\0", "..", "d\\x"]
)
def test_a_manifest_leads_out_of_no_checkpoint(tmp_path: Path, path: str) -> None:
    table = b"\1" + bytes([len(path), 0]) + path.encode()
    (tmp_path / ocdbt.MANIFEST).write_bytes(manifest(table, version()))
    with pytest.raises(Malformed, match=r"name of|leaves"):
        ocdbt.read_root(folder_at(tmp_path), "", ocdbt.Read())
    assert judge(tmp_path).state is State.DAMAGED


@pytest.mark.parametrize("count", [0, 2, 3, 0x7F, 0xFF])
def test_a_manifest_that_claims_more_than_it_has(tmp_path: Path, count: int) -> None:
    table = bytes([count, 1 if count > 0x7F else 0])
    (tmp_path / ocdbt.MANIFEST).write_bytes(manifest(table, version()))
    assert judge(tmp_path).state is State.DAMAGED


def test_a_node_that_unpacks_without_end_is_no_crash(tmp_path: Path) -> None:
    from importlib import import_module

    packed = import_module("backports.zstd").compress(bytes(ocdbt.MOST_NODE + 1))
    head = struct.pack(">I", 0x0CDB3A2A) + struct.pack("<Q", 12 + 2 + len(packed) + 4) + b"\0\1"
    data = head + packed
    (tmp_path / ocdbt.MANIFEST).write_bytes(data + struct.pack("<I", zstd.crc32c(data)))
    report = only(tmp_path)
    assert (report.state, "unpacked" in report.findings[0].what) == (State.UNKNOWN, True)


def arrays() -> Iterator[dict[str, object]]:
    """Yield metadata of arrays that no save writes."""
    good = {"chunks": [5], "compressor": None, "dtype": "<f4", "fill_value": None, "filters": None}
    good |= {"order": "C", "shape": [10], "zarr_format": 2}
    yield {**good, "shape": [1 << 62, 1 << 62], "chunks": [1, 1]}
    yield {**good, "shape": [-1]}
    yield {**good, "shape": [True]}
    yield {**good, "chunks": [0]}
    yield {**good, "chunks": [5, 5]}
    yield {**good, "shape": 10**400}
    yield {**good, "dtype": {"a": 1}, "order": "X"}
    yield {**good, "dimension_separator": "../"}
    yield {**good, "shape": [1] * 40, "chunks": [1] * 40}


@pytest.mark.parametrize("values", list(arrays()), ids=lambda values: str(values)[:40])
def test_metadata_of_an_array_are_taken_for_nothing(
    values: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises((Malformed, TooLarge)):
        list(zarr.read(".zarray", json.dumps(values).encode()).keys())
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".zarray").write_text(json.dumps(values))
    (tmp_path / TREE).write_text('{"tree_metadata": {}}')
    assert judge(tmp_path).state in (State.DAMAGED, State.UNKNOWN)


def test_a_link_out_of_the_checkpoint_is_not_followed(golden: Path, tmp_path: Path) -> None:
    chunk = golden / "zarr2" / "moment" / "0.0"
    outside = tmp_path / "outside"
    chunk.rename(outside)
    chunk.symlink_to(outside)
    assert judge(golden / "zarr2").state is State.DAMAGED


def test_half_of_a_surrogate_pair_in_a_sharding_is_damage(repository: Path, tmp_path: Path) -> None:
    """Found by `make fuzz-fsck`: JSON may have it in a text, and no UTF-8 can."""
    run = shutil.copytree(
        repository / "tests" / "golden" / "fsck" / "orbax" / "zarr2", tmp_path / "run"
    )
    values = dict.fromkeys(json.loads((run / "_sharding").read_bytes()), "\ud800")
    (run / "_sharding").write_text(json.dumps(values))
    assert judge(run).state is State.DAMAGED


def test_a_manifest_with_more_nodes_of_versions_than_there_can_be_is_damage(
    tmp_path: Path,
) -> None:
    """Found by the fuzz: TensorStore refuses more than 14 where a node has 16 versions."""
    table = b"\1\1\0d"
    good = manifest(table, version())[:-4]  # the sum comes last
    for older, reason in ((14, None), (15, "too many")):
        body = good[14:-1] + bytes([older])
        (tmp_path / ocdbt.MANIFEST).write_bytes(node(body, 0x0CDB3A2A))
        if reason is None:
            ocdbt.read_root(folder_at(tmp_path), "", ocdbt.Read())
            continue
        with pytest.raises(Malformed, match=reason):
            ocdbt.read_root(folder_at(tmp_path), "", ocdbt.Read())
