"""The files of a certificate: what they say, that hostile text stays text, how the page looks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from browser import CONTRAST, HOSTILE, LONG, OVERFLOW, Browser
from msgspec.structs import replace

from ckpt_conformance.contract.catalogue import Catalogue, Invariant
from ckpt_conformance.contract.registry import AdapterInfo
from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Verdict
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.report import files
from ckpt_conformance.report.certificate import RunFacts, build_result
from ckpt_conformance.report.environment import describe_environment
from ckpt_conformance.report.result import Result, decode, encode

pytestmark = pytest.mark.xdist_group("pages")  # they share a browser
EVIDENCE = {
    "step served": 20,
    "steps acknowledged": [10, 20, 30],
    "digest saved": "blake2b:9f2c6b1d77e04a55a1b0c3d2e4f5061728394a5b",
    "digest served": "blake2b:03ac674216f3e15c761ee1a5e255f067953623c8",
    "bundle": "CKC-ATOM-001-test_a_kill",
    "file": "run-7/checkpoints/step-0000000030/__0_0.distcp",
    "damage": {"kind": "bit flip", "offset": 40961, "bit": 3, "file size": 1048576},
}
STATEMENTS = {
    "SMOK": "What was saved at a step can be loaded at that step in a new process",
    "RTRP": "Every tensor comes back bit for bit: dtype, shape, bytes and NaN payloads",
    "RSUM": "The resumed run takes the same steps as a run that never stopped",
    "ATOM": "A process killed at any write leaves a whole checkpoint, and discovery serves it",
    "CORR": "One flipped bit in the payload is refused, never served",
    "DISC": "Discovery ignores what was never committed, whatever it is called",
    "INTN": "A request for a step that is not there raises; another step is never served",
    "SECU": "Loading runs no code from the checkpoint",
}
WHY = (
    "A power cut or a scheduler stops the job in the middle of a save. The run that resumes from "
    "what is left carries on from weights that nobody saved, and nothing in its log says so."
)
REMEDY = "Write to a temporary name, rename it, and move the pointer last."
PROFILES = {
    "smoke": "the least that can be called a checkpoint",
    "resume": "a resumed run is the run that never stopped",
    "crash": "a process that is killed at any point loses nothing that was acknowledged",
    "damage": "damaged bytes are refused, never served",
    "security": "a checkpoint is data, not a program",
}


REASONS = {
    "PASS": "",
    "VIOLATION": "step 30 was acknowledged, and after the kill step 20 was served: LOST_STEP",
    "NOT_MET": "a flipped bit in the payload loads without an error",
    "UNKNOWN": "the control without the fault failed: the worker ended with signal 9",
    "NOT_APPLICABLE": "the manager does not declare the capability `mirror`",
    "WAIVED": "accepted until 2.14, as the project's tracker says",
}
INFO = AdapterInfo(
    name="torch-save-inplace",
    version="2.13.0+cpu",
    shape="manager",
    capabilities=["explicit-step", "retention"],
    holds=["extra", "model", "optimizer", "rng", "scheduler"],
    library="torch",
    recipe="torch.save to the final name, one file for all steps",
    owner="recipe",
    notes="",
)


def an_invariant(family: str, number: int, verdict: str) -> Invariant:
    practice = verdict == "NOT_MET" or number % 4 == 3
    return Invariant(
        id=f"CKC-{family}-{number:03}",
        statement=STATEMENTS[family] + (f", case {number}" if number > 1 else ""),
        why=WHY,
        remedy=REMEDY,
        basis="practice" if practice else ("contract", "promise")[number % 2],
        profiles=tuple(PROFILES)[number % 5 : number % 5 + 2],
        incidents=("A01", "https://example.org/issues/7", "javascript:alert(1)")[: number % 4],
    )


def outcomes_of(invariant: Invariant, verdict: str) -> list[CheckOutcome]:
    told = verdict in {"VIOLATION", "NOT_MET"}
    return [
        CheckOutcome(
            INFO.name,
            invariant.id,
            f"test_damage::bit_flip_{number}",
            Verdict(verdict),
            REASONS[verdict],
            dict(EVIDENCE) if told else {},
            (40, 64) if told else None,
            seconds=number + 0.25,
            cause=Cause.CONTROL if verdict == "UNKNOWN" else None,
        )
        for number in range(1 + int(invariant.id[-1]) % 3)
    ]


def make_result(verdicts: list[str], harness: str = "") -> Result:
    """Make a result whose invariants have these verdicts, spread over the families."""
    wheel = enumerate(zip(itertools.cycle(STATEMENTS), verdicts, strict=False))
    made = [(an_invariant(family, 1 + i // 8, verdict), verdict) for i, (family, verdict) in wheel]
    facts = RunFacts(
        options=SessionOptions(adapters=(INFO.name,), claims=("damage",)),
        catalogue=Catalogue(1, {one.id: one for one, _ in made}),
        profiles=PROFILES,
        environment=describe_environment(Path("/")),
        commit="a" * 40,
        created="2026-01-31T12:00:00+00:00",
    )
    outcomes = [one for invariant, verdict in made for one in outcomes_of(invariant, verdict)]
    outcomes += (
        [CheckOutcome(INFO.name, "", "x", Verdict.UNKNOWN, harness, cause=Cause.HARNESS)]
        if harness
        else []
    )
    return build_result(INFO, outcomes, facts)


def rich_result() -> Result:
    """Make a result with every verdict, hostile text everywhere, and very long words."""
    verdicts = ["VIOLATION", "NOT_MET", "UNKNOWN", "NOT_APPLICABLE", "WAIVED", *["PASS"] * 5]
    result = encode(make_result(verdicts * 7, harness=HOSTILE[0] + LONG))
    for text, one in zip([*HOSTILE, LONG], result["invariants"].values(), strict=False):
        one |= {"reason": text, "why": text, "statement": one["statement"] + " " + text}
        one["evidence"] = {text: text, "nested": {text: [text, {"deep": text}]}, "n": 1.5}
        one["checks"][0]["name"] = text
        one["profiles"] = [*one["profiles"], text]
        one["reproduce"] += " " + text
        one["incidents"] = ["A01", text]
    first, *_, last = result["invariants"]
    result["invariants"][last] |= {"verdict": "SAME_CAUSE", "see": first, "owner": "library: torch"}
    result["adapter"] |= {"notes": HOSTILE[0] + LONG, "capabilities": [LONG, HOSTILE[1]]}
    result["waivers"] = [{"invariant": "CKC-ATOM-001", "reason": HOSTILE[2]}]
    result["crash"] = {"kill": {"states": 137, "unique": 40, "outcomes": {"NEW": 30, LONG: 10}}}
    return decode(result)


SHOWN = """[...document.querySelectorAll('.inv')]
  .filter(one => one.checkVisibility()).map(one => one.classList[1])"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    files.write_text(path, files.render_html(rich_result()))
    return path


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_silent_and_fits(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width, scheme)
    assert browser.run(f"{OVERFLOW}({width})") == []
    assert browser.complaints() == []
    assert browser.run(CONTRAST) == []


@pytest.mark.parametrize("verdict", [None, "PASS", "VIOLATION", "UNKNOWN", "NOT_APPLICABLE"])
def test_page_of_one_verdict_fits(browser: Browser, tmp_path: Path, verdict: str | None) -> None:
    result = make_result([verdict] if verdict else [])
    path = tmp_path / "report.html"
    files.write_text(path, files.render_html(result))
    browser.open(path, 390)
    assert browser.run(f"{OVERFLOW}(390)") == []
    assert browser.complaints() == []


def test_detectors_of_this_file_can_fail(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<!DOCTYPE html><body style='background:#fff'><div style='width:2000px'>x</div>"
        "<p style='color:#999'>faint</p><img src='http://192.0.2.1/x.png'>"
        "<script>console.error('heard')</script>"
    )
    browser.open(path, 390)
    assert "page" in browser.run(f"{OVERFLOW}(390)")
    assert browser.run(CONTRAST)[0][2] == "faint"
    assert "heard" in str(browser.complaints())
    assert "http://192.0.2.1/x.png" in browser.complaints()


def test_hostile_text_is_shown_and_does_nothing(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    assert browser.run("document.title") == "torch-save-inplace: Not certified"
    assert browser.run("document.querySelectorAll('script, img, iframe, object').length") == 0
    links = browser.run("[...document.links].map(one => one.protocol)")
    assert set(links) <= {"https:", "file:"}
    text = browser.run("document.body.textContent")
    for one in HOSTILE:
        assert files.shown(one) in text


def test_filters_work_without_a_script(browser: Browser, page: Path) -> None:
    assert "<script>" not in page.read_text().replace("&lt;", "")
    browser.open(page, 1280)
    assert len(browser.run(SHOWN)) == 70
    for verdict in Verdict:
        browser.run(f"document.getElementById('f-{verdict}').click()")
        assert set(browser.run(SHOWN)) == {f"v-{verdict}"}


def test_links_lead_to_every_open_finding(browser: Browser, page: Path) -> None:
    browser.open(page, 390)
    lost = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(one => !document.getElementById"
    assert browser.run(f"{lost}(one.hash.slice(1))).length") == 0
    folded = "[...document.querySelectorAll('.inv.v-VIOLATION, .inv.v-UNKNOWN')].every(x => x.open)"
    assert browser.run(folded) is True


def test_not_met_is_never_red(browser: Browser, page: Path) -> None:
    for scheme in ("light", "dark"):
        browser.open(page, 1280, scheme)
        script = "getComputedStyle(document.querySelector('.inv.v-NOT_MET .i')).color"
        red, green, blue = (int(part) for part in browser.run(script)[4:-1].split(","))
        assert green > 0.6 * red > blue / 2, (red, green, blue)  # ochre: green close behind red


def test_page_prints(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, "dark")
    browser.page("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelector('.filter').checkVisibility()") is False
    assert browser.page("Page.printToPDF")["data"].startswith("JVBERi")  # %PDF in base64


def test_page_names_everything_a_reader_needs() -> None:
    result = make_result(["VIOLATION", "NOT_MET"])
    html = files.render_html(result)
    one = result.invariants["CKC-SMOK-001"]
    wanted = [one.statement, one.why, one.reason, one.reproduce, "promise (MUST)"]
    wanted += ["40 of 64 (62.5 %)", "reproduced with a real process", "ext4", "Linux 6.18.44"]
    wanted += ['<a href="bundles/CKC-ATOM-001-test_a_kill/violation.json">']
    wanted += ["https://github.com/Lightning-AI/pytorch-lightning/issues/688", "practice (SHOULD)"]
    assert [text for text in wanted if text not in html.replace("&#39;", "'")] == []


def test_headline_is_never_better_than_the_verdict() -> None:
    good = make_result(["PASS", "NOT_MET", "WAIVED"])
    assert files.headline(good).title == "Certified"
    assert files.headline(make_result(["PASS", "VIOLATION"])).title == "Not certified"
    assert files.headline(make_result(["PASS", "UNKNOWN"])).title == "Undecided"
    assert files.headline(make_result(["NOT_APPLICABLE"])).title == "Nothing was shown"
    assert files.headline(make_result([])).title == "Nothing was shown"
    assert files.headline(replace(good, profiles={})).title == "No violation in a selection"
    stopped = files.headline(replace(make_result(["PASS", "UNKNOWN"]), interrupted=True))
    assert stopped.sentence.startswith("Stopped before the end.")
    harness = files.headline(make_result(["PASS"], harness="died"))
    assert harness.title == "Undecided"
    assert "1 fault of the harness" in harness.sentence
