"""The cache: what was kept is found again whole, or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.work.cache import Cache, key_of

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {"item": "check reference", "seed": 0}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "cache")


def entries(cache: Cache) -> list[Path]:
    return [path for path in cache.folder.rglob("*.json") if path.is_file()]


def test_what_was_kept_is_found_by_another_process(cache: Cache) -> None:
    cache.put(INPUTS, b'{"verdict":"PASS"}')
    again = Cache.open(cache.folder)
    assert again.get(key_of(INPUTS)) == b'{"verdict":"PASS"}'
    assert again.get(key_of({**INPUTS, "seed": 1})) is None


def test_the_order_of_inputs_does_not_matter() -> None:
    assert key_of({"a": 1, "b": {"c": 2, "d": 3}}) == key_of({"b": {"d": 3, "c": 2}, "a": 1})


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 3)), st.text(max_size=3), st.integers())
def test_other_inputs_have_another_key(inputs: dict[str, int], name: str, value: int) -> None:
    other = {**inputs, name: value}
    assert (key_of(inputs) == key_of(other)) == (inputs == other)


def test_a_damaged_entry_is_no_entry(cache: Cache) -> None:
    """Every byte that changes, and every cut, is either seen or changes nothing that is read."""
    content = b'{"verdict":"PASS","reason":""}'
    cache.put(INPUTS, content)
    (path,) = entries(cache)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        assert cache.get(key_of(INPUTS)) is None
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cache.get(key_of(INPUTS)) in (None, content)


def test_a_pipe_in_the_place_of_an_entry_is_not_waited_for(cache: Cache) -> None:
    cache.put(INPUTS, b'{"verdict":"PASS"}')
    (path,) = entries(cache)
    path.unlink()
    os.mkfifo(path)
    assert cache.get(key_of(INPUTS)) is None


def test_an_entry_under_another_name_is_no_entry(cache: Cache) -> None:
    cache.put(INPUTS, b"{}")
    (path,) = entries(cache)
    other = key_of({**INPUTS, "seed": 1})
    (cache.folder / other[:2]).mkdir(exist_ok=True)
    path.rename(cache.folder / other[:2] / f"{other}.json")
    assert cache.get(other) is None


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds other files; name an empty one"):
        Cache.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_cache_that_cannot_be_written_is_read(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(INPUTS, b"{}")

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    again = Cache.open(cache.folder)
    assert again.is_read_only
    assert again.get(key_of(INPUTS)) == b"{}"
    again.put({**INPUTS, "seed": 1}, b"{}")
    assert len(entries(cache)) == 1


def test_an_empty_folder_that_cannot_be_written_has_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    cache = Cache.open(tmp_path)
    assert cache.is_read_only
    assert cache.get(key_of(INPUTS)) is None


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot be written: .*; name another folder"):
        Cache.open(tmp_path / "file" / "cache")


def test_what_cannot_be_kept_is_only_not_kept(cache: Cache) -> None:
    key = key_of(INPUTS)
    (cache.folder / key[:2]).write_text("in the way")
    cache.put(INPUTS, b"{}")
    assert cache.get(key) is None
    assert cache.unwritten == {"File exists": 1}


def test_others_who_share_the_folder_can_read_it(cache: Cache) -> None:
    before = os.umask(0o022)
    try:
        cache.put(INPUTS, b"{}")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in entries(cache)] == [0o644]


def test_nothing_temporary_stays(cache: Cache) -> None:
    for seed in range(20):
        cache.put({"seed": seed}, b"[]")
    names = [name for _, _, files in os.walk(cache.folder) for name in files]
    assert len(names) == 21  # and the file that says whose folder it is
    assert not [name for name in names if name.endswith(".tmp")]
