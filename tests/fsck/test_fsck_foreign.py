"""Files of formats that others than torch write: named, judged as far as a reader goes.

Those in `golden/fsck/foreign` were written by the libraries that `foreign.json` names.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from unsafe_corpus import Evil

from ckpt_conformance.contract import trees
from ckpt_conformance.fsck.code import keras_hdf5
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.report import diff_lines

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Finding, Report

LAYOUTS = {
    "apart.onnx": "onnx",
    "flax_model.msgpack": "flax-msgpack",
    "latest.hdf5": "hdf5",
    "model.gguf": "gguf",
    "model.h5": "hdf5",
    "model.onnx": "onnx",
    "model.pt2": "pt2",
    "packed.npz": "npz",
    "state.npz": "npz",
}
ZIPS = ("model.pt2", "packed.npz", "state.npz")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch.export writes: it has paths of the machine in it, so it is made anew."""
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
    torch.export.save(program, path)
    return path


@pytest.fixture
def golden(repository: Path, exported: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "golden"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / "foreign", copy)
    shutil.copy(exported, copy)
    return copy


def only(path: Path) -> Report:
    (report,) = judge(path).reports
    return report


def wrong(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.kind is not Kind.NOTE]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_is_named_and_what_was_judged_is_said(golden: Path, name: str) -> None:
    report = only(golden / name)
    assert (report.layout, report.state, wrong(report)) == (LAYOUTS[name], State.WHOLE, [])
    (told,) = report.findings
    assert told.what.startswith("this is ")
    assert "; judged: " in told.what


def test_all_in_one_folder(golden: Path) -> None:
    report = only(golden)
    assert report.state is State.WHOLE
    assert {one.file for one in report.findings} == set(LAYOUTS)
    assert report.passed_over == ["apart.data"]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("left", [0, 0.5, -1])
def test_a_file_that_was_cut_is_damage(golden: Path, name: str, left: float) -> None:
    path = golden / name
    size = path.stat().st_size
    last = 33 if name == "model.gguf" else 1  # behind its last tensor it is filled up to 32 bytes
    os.truncate(path, size - last if left < 0 else int(size * left))
    assert only(path).state is State.DAMAGED


@pytest.mark.parametrize("name", ZIPS)
def test_a_flip_in_a_member_of_an_archive_is_damage(golden: Path, name: str) -> None:
    path = golden / name
    with zipfile.ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda one: one.compress_size)
    data = bytearray(path.read_bytes())
    data[member.header_offset + 30 + len(member.filename) + member.compress_size // 2 + 20] ^= 0x10
    path.write_bytes(data)
    report = only(path)
    assert report.state is State.DAMAGED
    assert member.filename in wrong(report)[0].what


def test_a_format_is_known_by_its_first_bytes_where_the_name_says_none(golden: Path) -> None:
    for name, layout in (("model.gguf", "gguf"), ("model.h5", "hdf5")):
        path = (golden / name).rename(golden / "weights")
        assert only(path).layout == layout


@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_data_of_onnx_in_another_file(golden: Path, fault: str) -> None:
    data = golden / "apart.data"
    if fault == "missing":
        data.unlink()
    else:
        os.truncate(data, data.stat().st_size - 1)
    (told,) = wrong(only(golden / "apart.onnx"))
    kind = Kind.MISSING if fault == "missing" else Kind.DAMAGED
    assert (told.kind, told.file, told.tensors) == (kind, "apart.data", ("w",))


def test_data_of_onnx_lead_out_of_no_folder(golden: Path) -> None:
    path = golden / "apart.onnx"
    path.write_bytes(path.read_bytes().replace(b"apart.data", b"../../../x"))
    (told,) = wrong(only(path))
    assert (told.kind, "name of a file" in told.what) == (Kind.DAMAGED, True)


def test_objects_in_npz_are_judged_as_pickles(tmp_path: Path) -> None:
    np.savez(tmp_path / "state.npz", a=np.array([Evil()], dtype=object))
    assert only(tmp_path / "state.npz").state is State.UNSAFE


def test_an_npz_whose_header_asks_for_more_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    np.save(tmp_path / "a.npy", np.ones(8, np.float32))
    data = (tmp_path / "a.npy").read_bytes().replace(b"(8,)", b"(9,)")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", data)
    assert only(path).state is State.DAMAGED


def test_keras_files_have_three_members(tmp_path: Path) -> None:
    """By the documentation of Keras 3; Keras was not installed."""
    path = tmp_path / "model.keras"
    names = ("config.json", "metadata.json", "model.weights.h5")
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")
    assert (only(path).state, only(path).layout) == (State.WHOLE, "keras")
    with zipfile.ZipFile(path, "w") as archive:
        for name in names[:2]:
            archive.writestr(name, b"{}")
    assert only(path).state is State.INCOMPLETE


def of_baselines(path: Path, data: str = "{}", *names: str) -> None:
    """Write the members that stable-baselines3 2.9 writes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", data)
        for name in names or ("pytorch_variables.pth", "policy.pth", "policy.optimizer.pth"):
            with archive.open(name, "w", force_zip64=True) as member:
                torch.save({"weight": torch.ones(4)}, member)
        archive.writestr("_stable_baselines3_version", "2.9.2")


def test_each_file_of_stable_baselines3_is_a_checkpoint(tmp_path: Path) -> None:
    for step in (64, 128, 192):
        of_baselines(tmp_path / f"rl_model_{step}_steps.zip")
    found = {one.step: (one.state, one.layout) for one in judge(tmp_path).reports}
    assert found == dict.fromkeys((64, 128, 192), (State.WHOLE, "stable-baselines3"))
    of_baselines(tmp_path / "rl_model_192_steps.zip", "{}", "pytorch_variables.pth")
    path = tmp_path / "rl_model_128_steps.zip"
    data = bytearray(path.read_bytes())
    data[data.index(b"\0\0\x80\x3f")] ^= 1
    path.write_bytes(data)
    states = {one.step: one.state for one in judge(tmp_path).reports}
    assert states == {64: State.WHOLE, 128: State.DAMAGED, 192: State.INCOMPLETE}


def test_what_stable_baselines3_has_pickled_is_judged(tmp_path: Path) -> None:
    code = base64.b64encode(pickle.dumps(Evil())).decode()
    data = json.dumps({"policy_class": {":type:": "x", ":serialized:": code}})
    of_baselines(tmp_path / "rl_model_64_steps.zip", data)
    assert only(tmp_path).state is State.UNSAFE


def test_numbers_beside_checkpoints_are_none(tmp_path: Path) -> None:
    """Else a file of metrics could be the newest whole checkpoint of a run."""
    (tmp_path / "step_5").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "step_5" / "model.pt")
    np.savez(tmp_path / "metrics.npz", loss=np.ones(3))
    assert [one.path.name for one in judge(tmp_path).reports] == ["step_5"]
    shutil.rmtree(tmp_path / "step_5")
    assert judge(tmp_path).reports == []
    (tmp_path / "metrics.npz").rename(tmp_path / "model_5.npz")
    assert only(tmp_path).step == 5


def test_steps_in_other_formats_are_ordered(golden: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (9, 10):
        shutil.copy(golden / "flax_model.msgpack", run / f"checkpoint_{step}.msgpack")
    os.truncate(run / "checkpoint_10.msgpack", 100)
    told = [(one.step, one.state) for one in judge(run).reports]
    assert told == [(10, State.DAMAGED), (9, State.WHOLE)]


def headers() -> list[tuple[str, bytes]]:
    """Make files that claim more than they have, or what no reader can follow."""
    huge = struct.pack("<Q", 1 << 62)
    gguf = b"GGUF" + struct.pack("<I", 3)
    text = struct.pack("<Q", 1) + b"k"
    nested = struct.pack("<I", 9) + struct.pack("<I", 9) + struct.pack("<Q", 1)
    return [
        ("a.gguf", gguf + huge + struct.pack("<Q", 0)),
        ("a.gguf", gguf + struct.pack("<Q", 0) + huge),
        ("a.gguf", gguf + struct.pack("<QQ", 0, 1) + huge),
        ("a.gguf", gguf + struct.pack("<QQ", 0, 1) + text + nested * 20),
        ("a.gguf", gguf + struct.pack("<QQ", 1, 0) + text + struct.pack("<I", 1 << 31)),
        ("a.h5", b"\x89HDF\r\n\x1a\n" + b"\x07" * 60),
        ("a.h5", b"\x89HDF\r\n\x1a\n\0"),
        ("a.msgpack", b"\xdd\xff\xff\xff\xff"),
        ("a.msgpack", b"\xc6\xff\xff\xff\xff"),
        ("a.msgpack", b"\x91" * 100_000),
        ("a.msgpack", b"\xc1"),
        ("a.msgpack", b"\x01\x01"),
        ("a.onnx", b"\xff" * 20),
        ("a.onnx", b"\x3a\xff\xff\xff\xff\x0f"),
        ("a.onnx", b"\x08\x07"),
        ("a.npz", b"PK\x03\x04" + bytes(40)),
        ("a.npz", b""),
        ("a.pt2", b"PK\x05\x06" + b"\xff" * 18),
    ]


@pytest.mark.parametrize(("name", "data"), headers())
def test_headers_are_taken_for_nothing(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert only(tmp_path / name).state in (State.DAMAGED, State.UNKNOWN)


def test_the_golden_files_are_small(repository: Path) -> None:
    files = list(trees.files(repository / "tests" / "golden" / "fsck" / "foreign"))
    assert sum(one.stat().st_size for one in files) < 1 << 16


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout == "hdf5"])
def test_no_nan_is_said_of_numbers_that_were_not_read(golden: Path, name: str) -> None:
    (report,) = judge(golden / name, Options(nan=True)).reports
    assert report.not_finite is None
    assert any("NaNs were not counted" in one.what for one in report.findings)


def test_diff_compares_the_data_of_onnx_in_another_file(golden: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(golden, other)
    assert not diff(golden / "apart.onnx", other / "apart.onnx").differences
    data = bytearray((other / "apart.data").read_bytes())
    data[300] ^= 1
    (other / "apart.data").write_bytes(data)
    compared = diff(golden / "apart.onnx", other / "apart.onnx")
    assert [(one.name, one.count) for one in compared.differences] == [("w", 1)]


def test_diff_says_that_it_compared_bytes_of_a_file(golden: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.h5"
    data = bytearray((golden / "model.h5").read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    compared = diff(golden / "model.h5", other)
    assert [one.name for one in compared.differences] == ["model.h5"]
    assert [*diff_lines.lines(compared)][-1].startswith("different bytes in files; tensors in 1")


@pytest.mark.parametrize("name", ["state.npz", "packed.npz"])
def test_a_member_that_the_directory_has_lost_is_seen(
    name: str, golden: Path, tmp_path: Path
) -> None:
    """The standard library does not count: a length that swallows the next entry hides it."""
    data = bytearray((golden / name).read_bytes())
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    struct.pack_into("<H", data, first + 32, second - first)  # its comment: longer than all of it
    path = tmp_path / name
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) < len(np.load(golden / name, allow_pickle=True).files)
    assert only(path).state is State.DAMAGED


@pytest.mark.parametrize("name", ["state.npz", "packed.npz"])
def test_an_archive_that_lost_its_begin_or_has_another_one_is_seen(
    name: str, golden: Path, tmp_path: Path
) -> None:
    data = (golden / name).read_bytes()
    path = tmp_path / name
    for changed in (data[64:], b"\0" * 64 + data):
        path.write_bytes(changed)
        assert only(path).state is not State.WHOLE


def array(text: str, data: bytes = bytes(24), version: bytes = b"\x01\x00") -> bytes:
    header = text.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    "changed",
    [
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }"),
        array("{'descr': '<i8', 'fortran_orde': False, 'shape': (3,), }"),
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (3,), 'more': 1}"),
        array("{'descr': '<i8', 'fortran_order': 2, 'shape': (3,), }"),
        array("{'descr': '<i9', 'fortran_order': False, 'shape': (3,), }"),
        array("{'descr': 'little', 'fortran_order': False, 'shape': (3,), }"),
        array("{'descr': 7, 'fortran_order': False, 'shape': (3,), }"),
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }", version=b"\x09\x00"),
        array("{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (3,), }"),
        array("{'descr': '<U2', 'fortran_order': True, 'shape': (3,), }"),
        array("{'descr': [('a', '<i4'), ('b', '<i4')], 'fortran_order': False, 'shape': (3,), }"),
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (True, 3), }"),
        array("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"),
        array("{'descr': '<c8', 'fortran_order': False, 'shape': (), }", bytes(8)),
    ],
)
def test_a_header_of_numpy_is_taken_where_numpy_takes_it(changed: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", changed)
    try:
        with np.load(path, allow_pickle=True) as held:
            held["a"]
        loads = True
    except (ValueError, TypeError, pickle.UnpicklingError):
        loads = False
    assert (only(path).state is State.WHOLE) == loads


@pytest.mark.parametrize(
    ("data", "is_told"),
    [(b"\x81\xa1a\x01", True), (b"\x81\xa1a\xc7\x00\x05", False), (b"\xc7\x01\x01\xc0", False)],
    ids=["flax", "an extension that flax does not write", "an array that is none of flax"],
)
def test_arrays_of_msgpack_are_told_where_they_were_checked(
    data: bytes, tmp_path: Path, *, is_told: bool
) -> None:
    path = tmp_path / "model.msgpack"
    path.write_bytes(data)
    (told,) = only(path).findings
    assert ("arrays by dtype and shape" in told.what) == is_told


def _gguf(key: bytes, *tensors: tuple[bytes, int]) -> bytes:
    """Make a file with two keys, the first empty, and tensors of no elements, of given types."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    for one in (b"", key):
        head += struct.pack("<Q", len(one)) + one + struct.pack("<II", 4, 7)
    for name, kind in tensors:
        head += struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 0, kind, 0)
    return head + bytes(-len(head) % 32)


@pytest.mark.parametrize(
    ("data", "state"),
    [
        (_gguf(b"k", (b"w", 0), (b"v", 1)), State.WHOLE),
        (_gguf(b"", (b"w", 0)), State.DAMAGED),
        (_gguf(b"k", (b"w", 0), (b"w", 0)), State.DAMAGED),
        (_gguf(b"\xff", (b"w", 0)), State.DAMAGED),
        (_gguf(b"k", (b"\xc3", 0)), State.DAMAGED),
        (_gguf(b"k", (b"w", 4)), State.UNKNOWN),
        (_gguf(b"k", (b"w", 65536)), State.UNKNOWN),
    ],
)
def test_what_the_library_of_gguf_refuses_is_not_whole(
    data: bytes, state: State, tmp_path: Path
) -> None:
    """A key or a name that occurs twice, or is no text, and a type that is not known."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert only(path).state is state


def test_a_file_of_zeros_under_a_name_of_hdf5_is_not_called_short(tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    (bad,) = wrong(only(path))
    assert "does not begin as HDF5" in bad.what


def test_a_number_of_too_many_digits_is_told_in_words_of_a_user(tmp_path: Path) -> None:
    step = tmp_path / "step_2"
    step.mkdir()
    torch.save({"w": torch.ones(2)}, step / "model.pt")
    (step / "n.json").write_text("1" * 5000)
    (bad,) = wrong(only(step))
    assert "digits" in bad.what
    assert "sys." not in bad.what


@pytest.mark.parametrize("sign", ["\v", "\x1c", "\x85"])
def test_a_header_of_numpy_that_ends_in_what_is_no_space_to_it_is_damage(
    sign: str, tmp_path: Path
) -> None:
    """Found by the fuzz: `str.strip` takes more signs for spaces than the parser of Python."""
    whole = io.BytesIO()
    np.save(whole, np.arange(3))
    data = bytearray(whole.getvalue())
    data[data.index(b"\n", 10)] = ord(sign)
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        archive.writestr("a.npy", bytes(data))
    with np.load(tmp_path / "model.npz") as found, pytest.raises(ValueError, match="Cannot parse"):
        found["a"]
    assert judge(tmp_path).reports[0].state is State.DAMAGED


def test_a_text_of_flax_that_is_no_unicode_is_damage(golden: Path) -> None:
    """Found by the fuzz: flax raises. Without arrays another writer may have put bytes so."""
    path = golden / "flax_model.msgpack"
    data = path.read_bytes()
    at = next(at for at in range(len(data)) if 0xA1 <= data[at] < 0xC0)  # a short text
    path.write_bytes(data[: at + 1] + b"\xc7" + data[at + 2 :])
    report = only(path)
    assert report.state is State.DAMAGED
    assert "no UTF-8" in report.findings[0].what
    path.write_bytes(b"\x81\xa1\xc7\x01")
    assert only(path).state is State.WHOLE


# -- models of Keras in HDF5 -----------------------------------------------------------------------


def of_keras(golden: Path, target: Path, config: object) -> None:
    """Put a configuration where the attribute of a model is: anywhere behind what is there."""
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    target.write_bytes(
        (golden / "model.h5").read_bytes() + b"\0model_config\0\0" + text + b"\0\xff"
    )


def layers(*layers: dict[str, object]) -> dict[str, object]:
    config = [{"class_name": "Dense", "module": "keras.layers", "config": {}}, *layers]
    return {"class_name": "Sequential", "config": {"name": "s", "layers": config}}


LAMBDA = {"class_name": "Lambda", "config": {"function": {"class_name": "__lambda__"}}}


def test_a_model_of_keras_in_hdf5_is_looked_at(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    of_keras(golden, path, layers())
    assert only(path).state is State.WHOLE
    of_keras(golden, path, layers(LAMBDA))
    assert only(path).state is State.UNSAFE
    of_keras(golden, path, layers({"class_name": "C", "module": "my.own", "config": {}}))
    assert only(path).state is State.UNSAFE


@pytest.mark.parametrize("before", [b"{", b'{"a": ', b'{"x": 1}', b"\xff" * 100])
def test_what_lies_before_the_configuration_hides_nothing(
    before: bytes, golden: Path, tmp_path: Path
) -> None:
    escaped = json.dumps(layers(LAMBDA)).replace("Lambda", "\\u004cambda").encode()
    of_keras(golden, tmp_path / "model.h5", before + escaped)
    assert only(tmp_path / "model.h5").state is State.UNSAFE


def test_a_model_without_a_configuration_is_unknown(golden: Path, tmp_path: Path) -> None:
    of_keras(golden, tmp_path / "model.h5", b"none")
    assert only(tmp_path / "model.h5").state is State.UNKNOWN


def test_a_configuration_that_is_too_long_is_unknown(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keras_hdf5, "_MOST", 100)
    padded = LAMBDA | {"name": "x" * 200}
    of_keras(golden, tmp_path / "model.h5", layers(padded))
    assert only(tmp_path / "model.h5").state is State.UNKNOWN


def test_a_configuration_that_two_pieces_share_is_found(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keras_hdf5, "_PIECE", 50)
    of_keras(golden, tmp_path / "model.h5", layers(LAMBDA))
    assert only(tmp_path / "model.h5").state is State.UNSAFE


@pytest.mark.parametrize("key", [b"\x90", b"\x80", b"\xdc\0\0", b"\x91\x01"])
def test_a_key_of_msgpack_that_no_dict_takes_is_damage(key: bytes, tmp_path: Path) -> None:
    (tmp_path / "flax_model.msgpack").write_bytes(b"\x81" + key + b"\x01")
    assert only(tmp_path / "flax_model.msgpack").state is State.DAMAGED
    (tmp_path / "flax_model.msgpack").write_bytes(b"\x82\xa1k" + key + b"\x01\x02")
    assert only(tmp_path / "flax_model.msgpack").state is State.WHOLE
