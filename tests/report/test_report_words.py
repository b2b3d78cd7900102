"""What the reports say in words, and what becomes of the files of an earlier run."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from msgspec.structs import replace
from test_report import INFO, make_result

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.report import files, incidents, words
from ckpt_conformance.report.result import decode, encode
from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.report.result import Result


def test_incidents_are_links_only_to_http() -> None:
    known = incidents.incident("A01")
    assert known.url == "https://github.com/Lightning-AI/pytorch-lightning/issues/688"
    assert known.label == "A01 Lightning-AI/pytorch-lightning#688"
    assert incidents.incident("https://example.org/7").url == "https://example.org/7"
    for name in ("javascript:alert(1)", "Z99", "https://a b", "https://x\njavascript:1"):
        assert incidents.incident(name).url == ""


def test_pretty_and_clip() -> None:
    assert files.pretty("two\nlines\x00") == "two\nlines\\x00"
    assert files.pretty([1, 2]) == "[1, 2]"
    assert files.pretty(list(range(40))).startswith("[\n  0,")
    assert files.pretty("x" * 5000).endswith("… 1,000 more characters in result.json")
    assert files.percent((1, 3)) == "1 of 3 (33.3 %)"
    assert files.percent((0, 0)) == "0 of 0"


def kept(folder: Path, name: str, schema: str = bundle.SCHEMA) -> Path:
    """Make a bundle by hand."""
    made = folder / "bundles" / name
    made.mkdir(parents=True)
    (made / "violation.json").write_text(json.dumps({"schema": schema}))
    return made


def naming(*names: str) -> Result:
    """Make a result whose violations name these bundles."""
    result = encode(make_result(["VIOLATION"] * len(names)))
    for one, name in zip(result["invariants"].values(), names, strict=True):
        one["evidence"] = {"bundle": name}
        one["checks"] = [{**each, "evidence": {"bundle": name}} for each in one["checks"]]
    return decode(result)


def test_stale_bundles_go_with_their_certificate_and_nothing_else(tmp_path: Path) -> None:
    strange = kept(tmp_path, "of-somebody-else", schema="theirs")
    stays = [kept(tmp_path, name) for name in ("again", "of-explore-or-the-user")]
    gone = kept(tmp_path, "old")
    outside = kept(tmp_path.parent / f"{tmp_path.name}-outside", "x")
    up = f"../../{outside.parent.parent.name}/bundles/x"
    files.write_certificate(naming("again", "old", "of-somebody-else", up), tmp_path)
    assert gone.exists(), "there was no certificate before: nothing is stale"
    files.write_certificate(naming("again"), tmp_path)
    assert not gone.exists()
    assert all(one.exists() for one in (*stays, strange, outside))


def test_an_earlier_certificate_that_does_not_read_takes_nothing_along(tmp_path: Path) -> None:
    made = kept(tmp_path, "old")
    for text in ("{", "[]", '{"schema": "ckpt-conformance/result/v1"}', "\udcff"):
        (tmp_path / "result.json").write_text(text, errors="surrogateescape")
        files.write_certificate(make_result(["PASS"]), tmp_path)
        assert made.exists()


def on_terminal(result: Result) -> str:
    return files.render_text("result.txt.j2", 100, result=result, known={}, asides={}, folder="")


def test_a_profile_with_unmet_shoulds_does_not_read_as_if_all_held() -> None:
    """The same words in the summary, the page and the lines of a terminal."""
    result = make_result(["PASS", "PASS", "NOT_MET", "PASS", "PASS"])
    unmet = [name for name, one in result.profile_details.items() if "NOT_MET" in one.counts]
    assert unmet
    page = files.render_html(result)
    for name in unmet:
        assert f"| {name} | ○ SHOULD not met |" in files.render_summary(result)
        assert re.search(rf"  ○ SHOULD not met +{name} ", on_terminal(result))
        head = page[page.index(f"<h3>{name}</h3>") :]
        assert "SHOULD not met" in head[: head.index("</div>")]
    assert result.profiles[unmet[0]] == "PASS", "the certificate stands"
    assert "Every MUST holds; 1 SHOULD not met." in files.headline(result).sentence


def test_words_are_explained_where_they_are_used() -> None:
    content = encode(make_result(["VIOLATION", "UNKNOWN"]))
    one = next(iter(content["invariants"].values()))
    one |= {"reason": "killed after x: LOST_ALL <i>; see CKC-RTRP-001, CKC-DISC-099"}
    result = decode(content)
    page = files.render_html(result)
    assert 'LOST_ALL &lt;i&gt;; see <a href="#CKC-RTRP-001">CKC-RTRP-001</a>, CKC-DISC-099' in page
    assert "no checkpoint loads any more" in page
    assert "does not end within its deadline" not in page, "only what is mentioned"
    first = page[page.index('class="attention"') : page.index('class="all"')]
    assert "killed after x: LOST_ALL" in first, "the list says what happened, not only the promise"
    assert "the way of using the library that its documentation shows" in page
    assert set(words.OUTCOMES) == set(Outcome)


def test_the_name_that_an_adapter_gives_itself_is_shown() -> None:
    result = make_result(["PASS"])
    assert words.called(result.adapter) == INFO.name, "nothing is told twice"
    result = replace(result, adapter=replace(result.adapter, title="Mine <b>"))
    named = f"{INFO.name} (Mine <b> {INFO.version})"
    assert on_terminal(result).splitlines()[0] == f"✓ {named}: Certified"
    assert "(Mine &lt;b>" in files.render_summary(result)
    page = files.render_html(result)
    assert "<h1>Mine &lt;b&gt;</h1>" in page
    assert f"<code>{INFO.name}</code>" in page
