"""What is too large for fsck is a finding, and never a traceback or a machine without memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors

from ckpt_conformance.fsck.formats import gguf, safetensors_file
from ckpt_conformance.fsck.judge import parts
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, Malformed, State, TooLarge
from ckpt_conformance.fsck.source.untrusted import MOST_WEIGHT, parse_json, weight

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report

MANY, SIZE = 2_500_000, 200_000


# JSON of so many values, of each sort. It is made where a test runs: `keys` alone takes seconds.
SORTS: dict[str, Callable[[int], bytes]] = {
    "lists": lambda many: b'{"a":[' + b"[]," * many + b"[]]}",
    "objects": lambda many: b'{"a":[' + b"{}," * many + b"{}]}",
    "nested": lambda many: b'{"a":[' + b"[[{}]]," * (many // 2) + b"[]]}",
    "texts": lambda many: b'{"a":[' + b'"abc",' * many + b'""]}',
    "keys": lambda many: b"{" + b",".join(b'"%07d":{}' % number for number in range(many)) + b"}",
}


def only(root: Path) -> Report:
    (report,) = judge(root).reports
    return report


@pytest.mark.parametrize("sort", SORTS)
def test_json_of_too_many_values_is_a_finding(sort: str, tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-500"
    step.mkdir()
    text = SORTS[sort](MANY)
    (step / "config.json").write_bytes(text)
    (step / "a.safetensors").write_bytes(header({}))
    tracemalloc.start()
    report = only(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (found,) = [one for one in report.findings if one.file == "config.json"]
    assert (found.kind, report.state) == (Kind.UNKNOWN, State.UNKNOWN)
    assert "more than is looked into" in found.what
    assert peak < 2 * len(text) + (8 << 20)


@pytest.mark.parametrize("sort", SORTS)
def test_the_weight_of_json_is_at_least_what_its_values_take(sort: str) -> None:
    text = SORTS[sort](SIZE)
    tracemalloc.start()
    kept = parse_json(text)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept
    assert weight(text) >= used


def test_a_large_tokenizer_is_read() -> None:
    """As many texts and pairs as the largest vocabularies in use have."""
    merges = [[f"▁a{number}", f"b{number}"] for number in range(515_000)]
    vocab = {f"▁token{number}": number for number in range(262_000)}
    text = json.dumps({"model": {"vocab": vocab, "merges": merges}}).encode()
    assert weight(text) <= MOST_WEIGHT
    assert len(parse_json(text)) == 1


def header(entries: object, body: int = 0) -> bytes:
    """Return a safetensors file of a header, given as values or as text, and zeros."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


def test_a_header_of_many_tensors_takes_little_memory(tmp_path: Path) -> None:
    entry = b'"%07d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    each = (entry % (number, 4 * number, 4 * number + 4) for number in range(SIZE))
    text = b"{" + b",".join(each) + b"}"
    (tmp_path / "model.safetensors").write_bytes(header(text, 4 * SIZE))
    tracemalloc.start()
    report = only(tmp_path / "model.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.state, report.tensors) == (State.WHOLE, SIZE)
    assert peak < 8 * len(text)


ENTRY = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
TEXTS = {
    "plain": (b'{"a":' + ENTRY + b"}", True),
    "notes": (b'{"__metadata__":{"a":"\\"b\\""},"a":' + ENTRY + b"}", True),
    "escaped name": (b'{"\\u0061\\"":' + ENTRY + b"}", True),
    "twice": (b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", False),
    "twice, escaped": (b'{"a":' + ENTRY + b',"\\u0061":' + ENTRY + b"}", False),
    "a quote and twice": (b'{"a\\u0022":' + ENTRY + b',"a\\"":' + ENTRY + b"}", False),
    "notes twice": (b'{"__metadata__":{},"__metadata__":{},"a":' + ENTRY + b"}", False),
    "notes with a key twice": (b'{"__metadata__":{"b":"","b":""},"a":' + ENTRY + b"}", False),
    "a field twice": (b'{"a":' + ENTRY.replace(b"{", b'{"dtype":"U8",') + b"}", False),
    "a field twice, escaped": (
        b'{"a":' + ENTRY.replace(b"{", b'{"\\u0064type":"U8",') + b"}",
        False,
    ),
    "a surrogate": (b'{"\\ud800":' + ENTRY + b"}", False),
    "no UTF-8": (b'{"\xff":' + ENTRY + b"}", False),
    "a float": (b'{"a":' + ENTRY.replace(b"[1]", b"[1.0]") + b"}", False),
    "a bool": (b'{"a":' + ENTRY.replace(b"[1]", b"[true]") + b"}", False),
    "a huge number": (b'{"a":' + ENTRY.replace(b"[1]", b"[%d]" % 10**4000) + b"}", False),
    "too many digits": (b'{"a":' + ENTRY.replace(b"[1]", b"[" + b"9" * 5000 + b"]") + b"}", False),
    "a number below": (b'{"a":' + ENTRY.replace(b"[0,1]", b"[-1,0]") + b"}", False),
    "three offsets": (b'{"a":' + ENTRY.replace(b"[0,1]", b"[0,0,1]") + b"}", False),
    "another field": (b'{"a":' + ENTRY.replace(b"{", b'{"b":1,') + b"}", True),
    "deep": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, False),
    "a list": (b"[]", False),
    "a number": (b'{"a":1}', False),
    "trailing": (b'{"a":' + ENTRY + b"}x", False),
}


@pytest.mark.parametrize("sort", TEXTS)
def test_headers_are_refused_as_the_library_refuses_them(sort: str, tmp_path: Path) -> None:
    text, is_good = TEXTS[sort]
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(text, 1))
    with path.open("rb") as file:
        if is_good:
            assert len(safetensors_file.read(file)) == 1
            from_safetensors(path.read_bytes())
        else:
            with pytest.raises(Malformed) as refused:
                safetensors_file.read(file)
            assert not isinstance(refused.value, TooLarge)
    assert only(path).state is (State.WHOLE if is_good else State.DAMAGED)


@pytest.mark.parametrize("sort", ["a surrogate", "no UTF-8", "a float", "trailing", "deep"])
def test_the_library_refuses_it_too(sort: str) -> None:
    with pytest.raises(SafetensorError):
        from_safetensors(header(TEXTS[sort][0], 1))


# -- --nan: the bytes that exist, not the elements that are shown ----------------------------------


def nans(root: Path) -> Report:
    (report,) = judge(root, Options(nan=True)).reports
    return report


def test_an_element_that_is_shown_again_and_again_is_read_once(tmp_path: Path) -> None:
    shown = 10**15
    values = torch.tensor([1.0, float("nan")])
    state = {"a": values[1].expand(shown), "b": values[:1].expand(shown), "c": values.expand(3, 2)}
    torch.save(state, tmp_path / "a.pt")
    report = nans(tmp_path)
    assert report.state is State.WHOLE
    counts = {one.tensor: (one.nan, one.elements) for one in report.not_finite or []}
    assert counts == {"a": (shown, shown), "c": (3, 6)}


def test_elements_that_overlap_are_not_counted(tmp_path: Path) -> None:
    values = torch.zeros(10_000)
    torch.save({"w": values.as_strided((5_000, 5_000), (1, 1))}, tmp_path / "a.pt")
    report = nans(tmp_path)
    (found,) = report.findings
    assert (found.kind, report.state) == (Kind.UNKNOWN, State.UNKNOWN)
    assert "25000000 elements overlap in 39996 bytes" in found.what


def test_many_views_of_the_same_bytes_are_not_all_counted(tmp_path: Path) -> None:
    values = torch.zeros(100_000)
    torch.save({str(number): values[number:] for number in range(20)}, tmp_path / "a.pt")
    report = nans(tmp_path)
    assert {one.kind for one in report.findings} == {Kind.UNKNOWN}
    assert len(report.findings) == 12


def test_a_gguf_of_too_many_tensors_is_a_finding(tmp_path: Path) -> None:
    step = tmp_path / "step_5"
    step.mkdir()
    many = gguf.MOST_TENSORS + 1
    (step / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, many, 0) + bytes(many))
    report = only(tmp_path)
    assert report.state is State.UNKNOWN
    assert any("500001 tensors" in one.what for one in report.findings)


def test_no_more_elements_are_counted_than_json_has_numbers() -> None:
    """With strides of 0 a shape may claim any number, and what is known of a file is kept."""
    assert parts.tensors_in([("w", (1 << 40, 1 << 40)), ("b", (3,))]).elements == 1 << 62
    assert parts.tensors_in([("w", (2, 3)), ("b", (3,))]).elements == 9
