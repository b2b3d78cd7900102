"""Sums of long records by several threads: the same verdicts as by one, on real checkpoints."""

from __future__ import annotations

import io
import os
import random
import sys
import zlib
from typing import TYPE_CHECKING, Any

import fsck_corpus
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_conformance.fault_injectors import at_rest
from ckpt_conformance.fsck.formats import manifest
from ckpt_conformance.fsck.judge import judge, judging, reference
from ckpt_conformance.fsck.judge.judge import Judged, Options
from ckpt_conformance.fsck.source import source, sums
from ckpt_conformance.fsck.source.findings import Kind, Malformed, State
from ckpt_conformance.fsck.source.sums import SAMPLED, Sizes

if TYPE_CHECKING:
    from pathlib import Path

LAYOUTS = ("torch", "dcp", "reference", "reference-dcp")
SMALL = Sizes(batch=700, part=100)
"""So little that every tensor of the corpus is divided."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sums")
    return {name: fsck_corpus.write(name, base / name / "run") for name in LAYOUTS}


def told(judged: Judged) -> dict[str, Any]:
    found = dict(judged.to_json())
    found.pop("path")
    return found


def divided(root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Judged:  # noqa: ANN401
    """Judge with parts, batches and large files of a few bytes."""
    with monkeypatch.context() as patch:
        patch.setattr(judge, "DIVIDED", SMALL)
        patch.setattr(manifest, "LARGE", 1000)
        patch.setattr(source, "AHEAD", 4096)
        return judge.judge(root, Options(jobs=3, **options))


# -- the arithmetic --------------------------------------------------------------------------------


@given(pieces=st.lists(st.binary(max_size=300), max_size=6))
def test_sums_of_pieces_join_to_the_sum_of_all(pieces: list[bytes]) -> None:
    found = 0
    for piece in pieces:
        found = sums.joined(found, zlib.crc32(piece), len(piece))
    assert found == zlib.crc32(b"".join(pieces))


def test_long_pieces_join_too() -> None:
    """Lengths beyond 32 bits: five billion zeros at once, and as one billion and four."""
    zeros = [zlib.crc32(b"\0")]  # of 2**0, 2**1, ... of them
    for power in range(33):
        zeros.append(sums.joined(zeros[-1], zeros[-1], 1 << power))
    assert zeros[16] == zlib.crc32(bytes(1 << 16))
    start, billion = zlib.crc32(b"x"), 1 << 30
    stepwise = sums.joined(sums.joined(start, zeros[30], billion), zeros[32], 4 * billion)
    together = sums.joined(zeros[30], zeros[32], 4 * billion)
    assert sums.joined(start, together, 5 * billion) == stepwise


@pytest.mark.parametrize("absent", [False, True])
def test_every_library_gives_the_same_sum(*, absent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if absent:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    sums.crc32.cache_clear()
    data = random.Random(1).randbytes(100_000)  # noqa: S311  any bytes
    try:
        assert sums.crc32()(memoryview(data), 7) == zlib.crc32(data, 7)
        assert not absent or sums.crc32() is zlib.crc32
    finally:
        sums.crc32.cache_clear()


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_whole_is_whole_in_parts(
    layout: str, corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte counts once, as if nothing were divided."""
    judged = divided(corpus[layout], monkeypatch)
    assert judged.state is State.WHOLE
    assert told(judged) == told(judge.judge(corpus[layout]))


@pytest.mark.parametrize("fault", ["bit-flip", "zeroed-block", "swapped-blocks", "truncation-half"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_told_in_the_same_words(
    layout: str,
    fault: str,
    corpus: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(3):
        copy = tmp_path / str(seed)
        rng = random.Random(seed)  # noqa: S311  which bytes, no secret
        at_rest.copy_damaged(corpus[layout], copy, fault, rng)
        assert told(divided(copy, monkeypatch)) == told(judge.judge(copy)), seed


def test_a_flip_in_any_part_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.arange(250.0)}, tmp_path / "step_5.pt")
    data = (tmp_path / "step_5.pt").read_bytes()
    begin = data.index(torch.arange(250.0).numpy().tobytes())
    for at in range(begin, begin + 1000, 50):
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "step_5.pt").write_bytes(changed)
        (finding,) = divided(tmp_path, monkeypatch).reports[0].findings
        assert (finding.kind, finding.tensors) == (Kind.DAMAGED, ("w",))
        assert (finding.start, finding.end) == (begin, begin + 1000)


def test_a_file_that_ends_while_it_is_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.arange(250.0)}, tmp_path / "step_5.pt")
    original = judging.examine

    def cut(*arguments: Any) -> Any:  # noqa: ANN401  as it takes
        structure = original(*arguments)
        os.truncate(tmp_path / "step_5.pt", 900)
        return structure

    monkeypatch.setattr(judging, "examine", cut)
    (report,) = divided(tmp_path, monkeypatch).reports
    assert report.state is State.DAMAGED
    assert "it ends at byte 900" in report.findings[0].what


def test_a_sample_divides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a record is verified by nothing: it would count as read, and prove nothing."""
    assert SAMPLED.part > 1 << 60
    torch.save({"w": torch.arange(250.0)}, tmp_path / "step_5.pt")
    data = (tmp_path / "step_5.pt").read_bytes()
    at = data.index(torch.arange(250.0).numpy().tobytes())
    (tmp_path / "step_5.pt").write_bytes(data[:at] + b"\1" + data[at + 1 :])
    assert divided(tmp_path, monkeypatch, sample=1e-6).state is State.DAMAGED


def test_metadata_only_keeps_no_work(
    corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    examine = judging.examine

    def counted(*arguments: Any) -> Any:  # noqa: ANN401  as it takes
        report, works = examine(*arguments)
        seen.append(sum(not one.is_look for one in works))
        return report, works

    monkeypatch.setattr(judging, "examine", counted)
    assert judge.judge(corpus["dcp"], Options(metadata_only=True)).state is State.WHOLE
    assert judge.judge(corpus["torch"], Options(metadata_only=True)).state is State.WHOLE
    assert seen == [0, 0]


def test_one_file_has_the_threads_that_are_left() -> None:
    def threads(large: int, jobs: int) -> int:
        files = {f"{at}.pt": manifest.Listed(manifest.LARGE, "0") for at in range(large)}
        files["small.pt"] = manifest.Listed(5, "0")
        return reference._threads(manifest.Manifest(5, "model", 1, files, {}, [], {}), jobs)

    assert [threads(1, 4), threads(2, 4), threads(3, 4), threads(9, 4), threads(1, 1)] == [
        *(4, 2, 1, 1, 1)
    ]


# -- reading ahead ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(size=st.integers(0, 5000), ahead=st.integers(1, 2000), short=st.integers(0, 50))
def test_reading_ahead_gives_all_bytes_or_says_where_they_end(
    size: int, ahead: int, short: int
) -> None:
    data = random.Random(size).randbytes(size)  # noqa: S311  any bytes
    found: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "AHEAD", ahead)
        pieces = source.chunks_ahead(io.BytesIO(data), 0, size + short)
        if short:
            with pytest.raises(Malformed, match=f"ends at byte {size}"):
                found.extend(map(bytes, pieces))
        else:
            found.extend(map(bytes, pieces))
    assert b"".join(found) == data
