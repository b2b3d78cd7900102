"""Metadata of Zarr and OCDBT that TensorStore refuses: found by the fuzz.

What TensorStore 0.1.86 says of each was noted when the tests were made.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.fsck.formats import ocdbt, zarr, zstd
from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.places import folder_at

if TYPE_CHECKING:
    from pathlib import Path

Values = dict[str, object]
BYTES: Values = {"name": "bytes", "configuration": {"endian": "little"}}


def version2(**changed: object) -> zarr.Array:
    values: Values = {"shape": [2], "chunks": [2], "dtype": "<i4", "compressor": None}
    values |= {"fill_value": None, "order": "C", "filters": None, "zarr_format": 2}
    return zarr.read(".zarray", json.dumps(values | changed).encode())


def version3(**changed: object) -> zarr.Array:
    values: Values = {"zarr_format": 3, "node_type": "array", "shape": [2], "data_type": "int32"}
    values["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    values |= {"chunk_key_encoding": {"name": "default"}, "codecs": [BYTES], "fill_value": 0}
    return zarr.read("zarr.json", json.dumps(values | changed).encode())


def codec(name: str, **settings: object) -> Values:
    return {"name": name, "configuration": settings}


KNOWN2 = "|b1 <b1 |i1 <i2 >i4 <u8 <f2 <f4 >f8 <c8 <c16 |S3 |V3 bfloat16 int4 float8_e4m3fn"
KNOWN3 = "bool int2 int8 uint64 float16 bfloat16 complex64 float8_e5m2 float4_e2m1fn float8_e8m0fnu"
NOT2 = "|b2 <i3 <i16 |i4 <u16 <f1 <f3 <f12 <f16 |f4 <c4 <c32 <U2 float32 bool float8_e4m3 uint4"
NOT3 = "int128 int24 float8 float128 bfloat32 complex32 float8_e4m3 uint4 string <f4"


@pytest.mark.parametrize("dtype", KNOWN2.split())
def test_a_dtype_that_is_loaded_is_read(dtype: str) -> None:
    assert version2(dtype=dtype).item > 0


@pytest.mark.parametrize("dtype", KNOWN3.split())
def test_a_dtype_of_version_3_that_is_loaded_is_read(dtype: str) -> None:
    assert version3(data_type=dtype).item > 0


@pytest.mark.parametrize("dtype", NOT2.split())
def test_a_dtype_that_is_not_loaded_is_not_looked_into(dtype: str) -> None:
    with pytest.raises(NotRead):
        version2(dtype=dtype)


@pytest.mark.parametrize("dtype", NOT3.split())
def test_a_dtype_of_version_3_that_is_not_loaded_is_not_looked_into(dtype: str) -> None:
    with pytest.raises(NotRead):
        version3(data_type=dtype)


@pytest.mark.parametrize("dtype", [["bfloat16"], [["a"]], [], 5, True, None, [["a", "<i4"], 5]])
def test_a_dtype_that_is_none_and_no_list_of_fields_is_damage(dtype: object) -> None:
    for read in (lambda: version2(dtype=dtype), lambda: version3(data_type=dtype)):
        with pytest.raises(Malformed, match="its dtype"):
            read()


def test_a_dtype_of_several_fields_has_no_name() -> None:
    assert version2(dtype=[["a", "<i4"], ["b", "<f4", [2]]]).dtype == ""
    with pytest.raises(NotRead):
        version3(data_type={"name": "numpy.datetime64"})


LEVELS = [("gzip", 0), ("gzip", 9), ("gzip", 5.0), ("zstd", 22), ("zstd", -131072)]
NO_LEVELS = [
    *(("gzip", level) for level in (10, -1, "1", None, True, 1.5)),
    *(("zstd", level) for level in (23, -131073, "array", [1])),
]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_a_level_that_there_is_is_read(name: str, level: object) -> None:
    assert version3(codecs=[BYTES, codec(name, level=level)]).packing.packer == name
    assert version2(compressor={"id": name, "level": level}).packing.packer == name


@pytest.mark.parametrize(("name", "level"), NO_LEVELS)
def test_a_level_that_there_is_not_is_damage(name: str, level: object) -> None:
    inner = [BYTES, codec(name, level=level)]
    shard = codec(
        "sharding_indexed",
        chunk_shape=[2],
        codecs=inner,
        index_codecs=[BYTES, {"name": "crc32c"}],
    )
    for codecs in (inner, [shard]):
        with pytest.raises(Malformed, match="settings"):
            version3(codecs=codecs)
    with pytest.raises(Malformed, match="settings"):
        version2(compressor={"id": name, "level": level})


@pytest.mark.parametrize(
    "codecs",
    [
        [codec("bytes", endian="middle")],
        [codec("bytes", endian=None)],
        [BYTES, codec("zstd", level=1, checksum=1)],
        [BYTES, codec("gzip")],
        [BYTES, {"name": "zstd"}],
        [codec("transpose", order="K"), BYTES],
        [codec("transpose"), BYTES],
    ],
)
def test_settings_that_there_are_not_are_damage(codecs: object) -> None:
    with pytest.raises(Malformed):
        version3(codecs=codecs)


def test_an_order_may_have_the_name_of_a_language() -> None:
    shape = {"shape": [2, 4], "chunk_grid": {"configuration": {"chunk_shape": [2, 4]}}}
    for name, order in {"C": (0, 1), "F": (1, 0)}.items():
        packing = version3(codecs=[codec("transpose", order=name), BYTES], **shape).packing
        assert packing.order == order


def test_a_compressor_without_a_level_has_its_own() -> None:
    assert version2(compressor={"id": "zstd"}).packing.packer == "zstd"


# -- OCDBT -----------------------------------------------------------------------------------------


def _manifest(folder: Path, change: bytes) -> ocdbt.Root:
    """Read a manifest of which the settings were changed, and its sum made to fit."""
    data = (folder / "manifest.ocdbt").read_bytes()
    body = zstd.unpack(data[14:-4], 1 << 20) if data[13] else data[14:-4]
    start = body.index(b"\x01\0\0\0\0", 16)
    body = body[:start] + change + body[start + 5 :]
    head = data[:4] + struct.pack("<Q", 18 + len(body)) + bytes(2)
    (folder / "manifest.ocdbt").write_bytes(
        head + body + struct.pack("<I", zstd.crc32c(head + body))
    )
    return ocdbt.read_root(folder_at(folder), "", ocdbt.Read())


@pytest.fixture
def database(repository: Path, tmp_path: Path) -> Path:
    try:
        zstd.check_installed()
    except zstd.NotInstalled as error:
        pytest.skip(str(error))
    golden = repository / "tests" / "golden" / "fsck" / "orbax" / "ocdbt3" / "manifest.ocdbt"
    (tmp_path / "manifest.ocdbt").write_bytes(golden.read_bytes())
    return tmp_path


@pytest.mark.parametrize("level", [0, 3, 22, -131072])
def test_a_level_of_a_database_that_there_is_is_read(database: Path, level: int) -> None:
    _manifest(database, b"\x01" + struct.pack("<i", level))


@pytest.mark.parametrize(
    "change",
    [
        b"\x02",
        b"\x7f",
        *(b"\x01" + struct.pack("<i", level) for level in (23, 99, -131073, (1 << 31) - 1)),
    ],
)
def test_a_packer_or_level_of_a_database_that_there_is_not_is_damage(
    database: Path, change: bytes
) -> None:
    with pytest.raises(Malformed, match="which there is not"):
        _manifest(database, change)
