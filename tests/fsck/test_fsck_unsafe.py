"""Files that run code where they are loaded: never whole, whatever hides it; each is seen to run.

The payloads create one file, which is how they are known to have run.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import unsafe_corpus as evil
from torch.distributed import checkpoint as dcp_library

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.fsck.source.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Loads = Callable[[Sequence[Path], Path], list[bool]]

WAYS = tuple(evil.pickles(Path("m")))
IDLE = {"newobj", "newobj_ex"}  # the object's __init__ is not called
SOME = ("reduce, protocol 0", "reduce, protocol 1", "reduce, protocol 2", "reduce, protocol 4")


@pytest.fixture(scope="module")
def fired() -> Iterator[Loads]:
    """Load files in processes of their own; tell which made the marker.

    The processes are forks of one that has imported torch: the import takes longer than all else.
    """
    loader = Path(__file__).with_name("unsafe_loader.py")
    with subprocess.Popen(
        [sys.executable, str(loader)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        asks, answers = running.stdin, running.stdout
        assert asks is not None
        assert answers is not None

        def load(files: Sequence[Path], marker: Path) -> list[bool]:
            asks.write(json.dumps([[str(one), str(marker)] for one in files]) + "\n")
            asks.flush()
            outcome: list[bool] = json.loads(answers.readline())
            return outcome

        yield load


def assert_refused(path: Path) -> None:
    """Nothing calls it whole, nothing returns it, nothing compares it; and nothing runs it."""
    top = path if path.is_file() else path.parent
    judged = judge(path)
    assert judged.state is State.UNSAFE, (path, judged.reports[0].findings)
    assert judged.newest_whole is None
    assert judge_newest(top).newest_whole is None
    metadata = judge_newest(path, Options(metadata_only=True))
    assert metadata.newest_whole is None
    compared = diff(path, path)
    assert not compared.is_judged


@pytest.mark.parametrize("inner", [0, 3])
def test_what_follows_a_wrong_frame_is_looked_at(inner: int, fired: Loads, tmp_path: Path) -> None:
    """Python's machine minds no frame in a frame, and none that ends in a value."""
    path, marker = tmp_path / "weights.pt", tmp_path / "ran"
    run = evil.system(marker)
    frame = b"\x95" + struct.pack("<Q", inner)
    outer = b"\x95" + struct.pack("<Q", len(frame) + len(run))
    path.write_bytes(evil.FOUR + outer + frame + run + b".")
    assert fired([path], marker) == [True]
    (report,) = judge(path).reports
    assert report.state is State.UNSAFE, report.findings


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Where payloads leave their sign."""
    return tmp_path / "marker"


@pytest.mark.parametrize("kind", ["zip", "plain"])
def test_every_way_to_run_is_unsafe(kind: str, fired: Loads, tmp_path: Path, marker: Path) -> None:
    files: list[Path] = []
    for number, pickled in enumerate(evil.pickles(marker).values()):
        path = tmp_path / str(number) / "model.pt"
        path.parent.mkdir()
        evil.FILES[kind](path, pickled)
        files.append(path)
    for path in files:
        assert_refused(path)
    assert not marker.exists()
    ran = dict(zip(WAYS, fired(files, marker), strict=True))
    assert {way for way, did in ran.items() if not did} == IDLE


@pytest.mark.parametrize("kind", evil.FILES)
def test_every_file_that_holds_pickles_is_looked_at(
    kind: str, fired: Loads, tmp_path: Path, marker: Path
) -> None:
    files: list[Path] = []
    for number, way in enumerate(SOME):
        path = tmp_path / str(number) / "model.pt"
        path.parent.mkdir()
        evil.FILES[kind](path, evil.pickles(marker)[way])
        files.append(path)
    for path in files:
        assert_refused(path)
        told = " ".join(one.what for one in judge(path).reports[0].findings)
        assert "save it anew" not in told
    assert all(fired(files, marker))


@pytest.mark.parametrize("name", ["DATA.PKL", "Data.pkl", "data.PKL"])
def test_records_that_differ_in_case_are_one_for_torch(
    name: str, tmp_path: Path, marker: Path
) -> None:
    path = tmp_path / "model.pt"
    good = pickle.dumps({"other": 1}, 2)
    evil.other_case(path, good, name)
    report = judge(path).reports[0]
    assert report.state is State.DAMAGED
    assert "torch takes them for one" in report.findings[0].what
    evil.other_case(path, evil.pickles(marker)["reduce, protocol 2"], name)
    assert_refused(path)


def test_the_folder_of_a_record_has_no_case_either(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    evil.other_case(path, pickle.dumps({}, 2), "xxxxxxxx")
    path.write_bytes(path.read_bytes().replace(b"model/xxxxxxxx", b"MODEL/data.pkl"))
    assert judge(path).state is not State.WHOLE


@pytest.mark.parametrize(
    "name",
    [
        "data.pkl",
        "notes.pkl",
        "extra.bin",
        "weights",
        "x.dat",
        "y.th",
        "z.tar",
        "a.joblib",
        "b.txt",
    ],
)
@pytest.mark.parametrize("folder", ["step_5", "run"])
@pytest.mark.parametrize("way", ["reduce, protocol 0", "reduce, protocol 4"])
def test_a_pickle_of_any_name_beside_a_checkpoint_is_looked_at(
    way: str, folder: str, name: str, tmp_path: Path, marker: Path
) -> None:
    (tmp_path / folder).mkdir()
    evil.benign(tmp_path / folder / "model.pt")
    assert judge(tmp_path).state is State.WHOLE
    (tmp_path / folder / name).write_bytes(evil.pickles(marker)[way])
    if folder == "run" and name == "b.txt":
        return  # of a run's folder, texts are nobody's
    assert judge(tmp_path).state is State.UNSAFE
    assert judge_newest(tmp_path).newest_whole is None


def test_a_pickle_among_steps_is_unsafe_and_theirs_are_whole(tmp_path: Path, marker: Path) -> None:
    for step in (1, 2):
        evil.benign(tmp_path / f"step_{step}.pt")
    (tmp_path / "cache").write_bytes(evil.pickles(marker)["getattr"])
    states = {one.path.name: one.state for one in judge(tmp_path).reports}
    assert states["step_1.pt"] is states["step_2.pt"] is State.WHOLE
    assert judge(tmp_path).state is State.UNSAFE


def test_what_is_passed_over_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "step_5"
    folder.mkdir()
    evil.benign(folder / "model.pt")
    (folder / "tokens").write_bytes(b"\1\2\3" * 9)
    (folder / "names.p").write_bytes(pickle.dumps(["a"]))
    report = judge(tmp_path).reports[0]
    assert (report.state, report.passed_over) == (State.WHOLE, ["names.p", "tokens"])
    assert report.to_json()["passed_over"] == report.passed_over


@pytest.mark.parametrize(
    "text",
    ["cat\ndog\n", "class A(B):\n    x = 1\n", "iota\nkappa\n", "(a\nb)\n", "Vocabulary\n.\n"],
)
def test_a_text_is_no_pickle(text: str, tmp_path: Path) -> None:
    """Its first line may read as an instruction that asks for a name."""
    folder = tmp_path / "step_5"
    folder.mkdir()
    evil.benign(folder / "model.pt")
    for name in ("vocabulary", "merges.txt", "model.py"):
        (folder / name).write_text(text)
    assert judge(tmp_path).state is State.WHOLE


def test_a_pickle_that_breaks_off_behind_one_name_is_no_text(tmp_path: Path) -> None:
    """Found by the fuzz: the load imports the module of the name before it fails."""
    folder = tmp_path / "step_5"
    folder.mkdir()
    evil.benign(folder / "model.pt")
    (folder / "data").write_bytes(b"cantigravity\nfly\x00\x15away\np0\nNVa")
    assert judge(tmp_path).state is State.UNSAFE


@pytest.mark.parametrize("layout", ["reference", "reference-dcp"])
def test_a_manifest_vouches_for_no_code(
    layout: str, corpus: dict[str, Path], tmp_path: Path, marker: Path
) -> None:
    """Whoever writes a file into a checkpoint can write its digest."""
    blake3 = pytest.importorskip("blake3").blake3
    shutil.copytree(corpus[layout], tmp_path / "run")
    newest = judge(tmp_path / "run").newest_whole
    assert newest is not None
    path = Path(str(newest.path))
    folder = path if path.is_dir() else path.parent
    manifest = max(folder.glob("meta*.json"))
    body = json.loads(manifest.read_bytes())
    name = next(one for one in sorted(body["files"]) if one.startswith("extra"))
    evil.zipped(folder / name, evil.pickles(marker)["reduce, protocol 2"])
    data = (folder / name).read_bytes()
    body["files"][name] |= {"size": len(data), "blake3": blake3(data).hexdigest()}
    del body["manifest_digest"]
    body["tensors"] = {key: one for key, one in body["tensors"].items() if name not in str(one)}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    body["manifest_digest"] = blake3(text).hexdigest()
    manifest.write_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    for how in (Options(), Options(metadata_only=True), Options(sample=0.01)):
        judged = judge(tmp_path / "run", how)
        assert judged.reports[0].state is State.UNSAFE, judged.reports[0].findings
        assert judged.newest_whole is not judged.reports[0]


@pytest.mark.parametrize("length", [1 << 13, 3 << 20])
@pytest.mark.parametrize("kind", ["plain", "zip", "legacy", "tar"])
def test_what_stands_behind_much_is_read(
    kind: str, length: int, tmp_path: Path, marker: Path
) -> None:
    much = b"B" + length.to_bytes(4, "little") + bytes(length) + b"0"
    path = tmp_path / "state"
    evil.FILES[kind](path, evil.TWO + much + evil.system(marker) + b".")
    assert_refused(path)
    path.rename(tmp_path / "extra.p")
    evil.benign(tmp_path / "model.pt")
    assert judge(tmp_path).newest_whole is None


def test_arrays_of_objects_are_pickles(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "step_5"
    folder.mkdir()
    evil.benign(folder / "model.pt")
    np.save(folder / "good.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    np.savez(folder / "good.npz", a=np.array([{}, None], dtype=object), b=np.arange(3))
    assert judge(tmp_path).state is State.WHOLE
    good = (folder / "good.npy").read_bytes()
    start = 10 + int.from_bytes(good[8:10], "little")
    array = good[:start] + evil.pickles(marker)["reduce, protocol 4"]
    (folder / "evil.npy").write_bytes(array)
    assert judge(tmp_path).state is State.UNSAFE
    (folder / "evil.npy").unlink()
    import zipfile

    with zipfile.ZipFile(folder / "evil.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", array)
    assert judge(tmp_path).state is State.UNSAFE


def test_other_pickles_in_an_archive_are_looked_at(tmp_path: Path, marker: Path) -> None:
    inner = evil.pickles(marker)["reduce, protocol 2"]
    path = tmp_path / "model.pt"
    evil.zipped(path, pickle.dumps({}, 2), **{"more/state.pkl": inner})
    assert_refused(path)


def test_a_package_of_torch_is_unsafe(tmp_path: Path) -> None:
    from torch import package

    with package.PackageExporter(str(tmp_path / "model.pt")) as exporter:
        exporter.save_pickle("model", "model.pkl", {"a": 1})
        exporter.save_source_string("somebody", "print(1)")
    assert_refused(tmp_path / "model.pt")
    found = judge(tmp_path / "model.pt").reports[0].findings
    assert any("torch.package" in one.what for one in found)


def test_torchscript_is_a_remark(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "model.pt")
    report = judge(tmp_path).reports[0]
    assert report.state is State.WHOLE
    assert [one.kind for one in report.findings] == [Kind.NOTE]


# -- DCP -------------------------------------------------------------------------------------------


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    """A checkpoint of DCP with a tensor and another value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_library.save({"a": torch.ones(2), "b": {"n": 3}}, checkpoint_id=tmp_path / "step_1")
    return tmp_path / "step_1"


@pytest.mark.parametrize("way", ["reduce, protocol 2", "build on a class", "by a computed name"])
def test_metadata_that_runs_is_unsafe(way: str, dcp: Path, marker: Path) -> None:
    assert judge(dcp).state is State.WHOLE
    (dcp / ".metadata").write_bytes(evil.pickles(marker)[way])
    assert_refused(dcp)


def test_an_item_that_runs_is_unsafe_and_no_sample_misses_it(dcp: Path, marker: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.rmtree(dcp)
        held = {f"t{number}": torch.ones(9999) for number in range(9)}
        dcp_library.save(held | {"b": evil.Evil(f"touch {marker}")}, checkpoint_id=dcp)
    assert_refused(dcp)
    for seed in range(5):
        judged = judge_newest(dcp, Options(sample=0.01, seed=seed))
        assert judged.newest_whole is None


# -- classes of libraries --------------------------------------------------------------------------

NAMESPACE = evil.ask("argparse", "Namespace")
OBJECT = evil.ask("builtins", "object")


@pytest.mark.parametrize(
    ("pickled", "state"),
    [
        (evil.made("argparse", "Namespace", evil.text("lr") + b"K\x01"), State.WHOLE),
        (
            evil.call(evil.ask("copyreg", "_reconstructor"), NAMESPACE, OBJECT, b"N"),
            State.WHOLE,
        ),
        (b"(iargparse\nNamespace\n", State.WHOLE),
        (b"(" + NAMESPACE + b"o", State.WHOLE),
        (b"}" + NAMESPACE + b"K\x01s", State.WHOLE),  # as a key
        (NAMESPACE + b")R", State.UNSAFE),
        (NAMESPACE + b"(" + evil.text("a") + b"t\x81", State.UNSAFE),
        (b"(" + evil.text("a") + b"iargparse\nNamespace\n", State.UNSAFE),
        (b"(" + NAMESPACE + evil.text("a") + b"o", State.UNSAFE),
        (b"}" + evil.text("a") + NAMESPACE + b"s", State.UNSAFE),  # whoever gets it may call it
        (
            NAMESPACE + b"q\x000h\x00)\x81",
            State.UNSAFE,
        ),  # told once, used once, and once on the stack
        (
            evil.call(evil.ask("copyreg", "_reconstructor"), OBJECT, NAMESPACE, b"N"),
            State.UNSAFE,
        ),
        (evil.call(evil.ask("functools", "partial"), NAMESPACE), State.UNSAFE),
        (evil.call(evil.ask("collections", "defaultdict"), NAMESPACE), State.UNSAFE),
        (
            evil.call(evil.ask("numpy.random._pickle", "__bit_generator_ctor"), NAMESPACE),
            State.UNSAFE,
        ),
        (
            evil.call(
                evil.ask("torch._tensor", "_rebuild_from_type_v2"),
                evil.ask("transformers.training_args", "TrainingArguments"),
                evil.ask("torch", "Tensor"),
                b"(" + evil.text("out") + b"t",
                b"}",
            ),
            State.UNSAFE,
        ),
        (
            evil.call(evil.ask("transformers.training_args", "TrainingArguments"), evil.text("o")),
            State.UNSAFE,
        ),
        (b"Nq\x05N\x94h\x01", State.DAMAGED),  # Python counts the places of a memo in another way
    ],
)
def test_a_librarys_class_is_told_where_it_is_made_and_unsafe_elsewhere(
    pickled: bytes, state: State, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    evil.zipped(path, evil.TWO + pickled + b".")
    report = judge(path).reports[0]
    assert report.state is state, report.findings
    trust = Trust(frozenset(one.name for one in report.findings if one.name))
    allowed = judge(path, Options(trust=trust)).state
    assert allowed is (State.DAMAGED if state is State.DAMAGED else State.WHOLE)


def test_who_trusts_all_code_sees_other_damage_only(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "model.pt"
    evil.zipped(path, evil.pickles(marker)["getattr"])
    everything = Options(trust=Trust(everything=True))
    assert judge(path, everything).state is State.WHOLE
    evil.zipped(path, evil.pickles(marker)["before a fault"])
    assert judge(path, everything).state is State.DAMAGED
    evil.legacy(path, evil.pickles(marker)["getattr"])
    assert judge(path, everything).state is not State.WHOLE  # nothing in it can be checked


# -- Orbax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "state/d/y.npz",
        "state/d/" + "0" * 32,
        "state/ocdbt.process_0/d/y.npz",
        "state/ocdbt.process_0/d/" + "0" * 32,
        "state/ocdbt.process_0/d/632087977b74cc463466f56767de615a",  # an older node
        "state/commit_success.txt",
        "commit_success.txt",
        "state/array_metadatas/other",
    ],
)
@pytest.mark.parametrize("kind", ["zip", "plain"])
def test_code_beside_the_files_of_a_database_is_unsafe(
    kind: str, name: str, repository: Path, tmp_path: Path, marker: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / "orbax" / "manager" / "10", run)
    assert judge(tmp_path).state is State.WHOLE
    evil.FILES[kind](run / name, evil.pickles(marker)["reduce, protocol 2"])
    assert judge(tmp_path).state is State.UNSAFE
    assert judge_newest(tmp_path).newest_whole is None
