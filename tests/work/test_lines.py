"""Lines of results: what was written is read, what is torn is passed over, parts go together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from ckpt_conformance.work import lines
from ckpt_conformance.work.identity import Identity
from ckpt_conformance.work.lines import End, Fact, Header, Line, LinesError, Writer

if TYPE_CHECKING:
    from pathlib import Path


def header(shard: str = "1/1", items: str = "ab", **given: object) -> Header:
    made = Header(
        command="mutants",
        version="1",
        request={"seed": 0},
        environment={"torch": "2"},
        created="2026-01-01",
        plan="p",
        shard=shard,
        items=list(items),
    )
    return msgspec.structs.replace(made, **given)


def result(item: str, value: object = 1) -> Line:
    return Line(item=item, result=msgspec.Raw(msgspec.json.encode(value)))


def part(shard: str, items: str, **given: object) -> lines.Results:
    return lines.gather([header(shard, items, **given), *map(result, items), End()])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with Writer(path) as writer:
        writer.write(header())
        writer.write(Fact(subject="reference", fact=msgspec.Raw(b'{"name":"reference"}')))
        writer.write(result("a"))
        writer.write(result("b", {"verdict": "PASS"}))
    read = lines.read(path)
    assert read == lines.gather(writer.lines)
    assert (read.undone, read.ended, read.missing) == ([], True, ())
    assert msgspec.json.decode(read.results["b"].result) == {"verdict": "PASS"}


def test_a_run_that_was_killed_keeps_all_but_its_last_line(tmp_path: Path) -> None:
    """Cut at every byte: a prefix of the results is read, and it is known that more is wanted."""
    path = tmp_path / "results.jsonl"
    with Writer(path) as writer:
        for line in (header(), result("a"), result("b")):
            writer.write(line)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        read = lines.read(path)
        assert list(read.results) == ["a", "b"][: whole[first:size].count(b"\n")]
        assert read.ended is False
    for size in range(first):
        path.write_bytes(whole[:size])
        with pytest.raises(LinesError, match="has no header line"):
            lines.read(path)


def test_ctrl_c_and_an_error_are_told_apart(tmp_path: Path) -> None:
    for error, kept in ((KeyboardInterrupt, [True]), (ValueError, [])):
        writer = Writer(tmp_path / "file")
        writer.write(header())
        writer.__exit__(error, None, None)
        ends = [line.interrupted for line in writer.lines if isinstance(line, End)]
        assert ends == kept
        assert lines.read(tmp_path / "file").ended is False


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(msgspec.json.encode(header()) + b"\nhello\n")
    with pytest.raises(LinesError, match=r"line 2, is no result: .*was the file edited"):
        lines.read(path)
    path.unlink()
    with pytest.raises(LinesError, match="cannot be read: No such file"):
        lines.read(path)


def test_shards_make_the_whole() -> None:
    parts = [part("2/3", "cd"), part("1/3", "ab"), part("3/3", "e")]
    whole = lines.combine(parts)
    assert (sorted(whole.results), whole.header.items) == (list("abcde"), list("abcde"))
    assert (whole.missing, whole.ended, whole.header.shard) == ((), True, "1/1")


def test_a_shard_that_is_missing_is_named() -> None:
    whole = lines.combine([part("1/3", "ab")])
    assert whole.missing == ("2/3", "3/3")


def test_a_shard_that_ran_again_counts_once_and_the_whole_one_wins() -> None:
    torn = lines.gather([header("1/2", "ab"), result("a")])
    for parts in ([part("1/2", "ab"), torn], [torn, part("1/2", "ab")]):
        whole = lines.combine([*parts, part("2/2", "c")])
        assert sorted(whole.results) == ["a", "b", "c"]
        assert whole.ended


def test_a_part_that_did_not_end_is_seen() -> None:
    torn = lines.gather([header("1/2", "ab"), result("a")])
    whole = lines.combine([torn, part("2/2", "c")])
    assert (whole.ended, whole.undone) == (False, ["b"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"command": "certify"}, "the command is 'mutants' and 'certify'"),
        ({"request": {"seed": 1}}, "--seed is 0 and 1"),
        ({"request": {"seed": 0, "budget": "full"}}, "--budget is None and 'full'"),
        ({"plan": "q"}, "planned as p and as q; install the same files of ckpt-conformance"),
        ({"shard": "2/4"}, "the number of shards is '3' and '4'"),
    ],
)
def test_parts_of_other_runs_are_refused(given: dict[str, object], reason: str) -> None:
    other = replace(part("2/3", "c"), header=header("2/3", "c"))
    other = replace(other, header=msgspec.structs.replace(other.header, **given))
    with pytest.raises(LinesError, match=reason):
        lines.combine([part("1/3", "ab"), other])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"version": "2"}, "by ckpt-conformance 1, and shard 2/3 by ckpt-conformance 2"),
        ({"commit": "abc"}, "by ckpt-conformance 1, and shard 2/3 by ckpt-conformance 1, commit a"),
    ],
)
def test_another_version_is_no_matter_of_arguments(given: dict[str, object], named: str) -> None:
    """Another version plans something else, too: the version is what is told."""
    other = replace(part("2/3", "c"), header=header("2/3", "c", plan="q", **given))
    with pytest.raises(LinesError) as error:
        lines.combine([part("1/3", "ab"), other])
    assert f"shard 1/3 was run {named}" in str(error.value)
    assert "install the same one on every machine" in str(error.value)
    assert "arguments" not in str(error.value)


def test_code_that_was_edited_between_two_shards_is_named() -> None:
    mine, yours = (Identity({"torch": "2"}, files={"my_adapter.py": text}) for text in "ab")
    other = replace(part("2/3", "c"), header=header("2/3", "c", depends=yours))
    with pytest.raises(LinesError) as error:
        lines.combine([part("1/3", "ab", depends=mine), other])
    assert "my_adapter.py is a in shard 1/3 and b in shard 2/3; use the same" in str(error.value)


def test_what_another_version_wrote_is_refused_with_its_name() -> None:
    old = header(schema="ckpt-conformance/lines/v0", version="0.9")
    with pytest.raises(LinesError, match=r"combine with the version that wrote it \(0\.9\)"):
        lines.gather([old])


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(LinesError, match=r"holds no results .*; move it away"):
        Writer(path)
    assert path.read_text() == '{"mine": 1}\n'


def test_a_run_that_was_killed_before_its_first_line_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").touch()
    with Writer(tmp_path / "results.jsonl") as writer:
        writer.write(header())
    assert lines.read(tmp_path / "results.jsonl").ended


def test_a_run_replaces_its_own_results(tmp_path: Path) -> None:
    for items in ("ab", "c"):
        with Writer(tmp_path / "results.jsonl") as writer:
            writer.write(header(items=items))
    assert lines.read(tmp_path / "results.jsonl").header.items == ["c"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LinesError, match="name another file"):
        Writer(tmp_path)


def test_lines_are_read_one_by_one_from_where_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with Writer(path, keep=False) as writer:
        for line in (header(), result("a"), result("b")):
            writer.write(line)
    assert writer.lines == []
    content = path.read_bytes()
    for offset, line in lines.stream(path):
        assert content[offset:].startswith(msgspec.json.encode(line) + b"\n")
    path.write_bytes(content[:-3])
    assert [type(line) for _, line in lines.stream(path)] == [Header, Line, Line]
