"""The files of a certificate: what they say, that hostile text stays text, how the page looks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance import report
from ckpt_conformance.certificate import SCHEMA
from ckpt_conformance.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = (
    "<script>document.title='owned';alert(1)</script>",
    "<img src=http://192.0.2.1/x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %} </style></details></html>",
    "\x1b[31mred\x1b[0m \x00 \u202edesrever\u2066 \udcff ]]>",
    "| cell | `code` [link](javascript:alert(1)) @someone #1 ~~x~~",
)
LONG = "w" * 600
EVIDENCE = {
    "step served": 20,
    "steps acknowledged": [10, 20, 30],
    "component": "optimizer",
    "digest saved": "blake2b:9f2c6b1d77e04a55a1b0c3d2e4f5061728394a5b",
    "digest served": "blake2b:03ac674216f3e15c761ee1a5e255f067953623c8",
    "file": "run-7/checkpoints/step-0000000030/__0_0.distcp",
    "damage": {"kind": "bit flip", "offset": 40961, "bit": 3, "file size": 1048576},
}
STATEMENTS = {
    "SMOK": "What was saved at a step can be loaded at that step in a new process",
    "RTRP": "Every tensor comes back bit for bit: dtype, shape, bytes and NaN payloads",
    "COMP": "The optimizer's moments, step counts and parameter groups come back",
    "RSUM": "The resumed run takes the same steps as a run that never stopped",
    "ATOM": "A process killed at any write leaves a whole checkpoint, and discovery serves it",
    "CORR": "One flipped bit in the payload is refused, never served",
    "IOER": "A save that met a full disk raises, and the step is not advertised",
    "DISC": "Discovery ignores what was never committed, whatever it is called",
    "RETN": "Rotation keeps the newest whole checkpoints and deletes its own files only",
    "INTN": "A request for a step that is not there raises; another step is never served",
    "SECU": "Loading runs no code from the checkpoint",
    "SIDE": "Saving changes nothing: the next training step has the same bits",
}
WHY = (
    "A power cut or a scheduler stops the job in the middle of a save. The run that resumes from "
    "what is left carries on from weights that nobody saved, and nothing in its log says so."
)
PROFILES = {
    "smoke": "the least that can be called a checkpoint",
    "resume": "a resumed run is the run that never stopped",
    "crash": "a process that is killed at any point loses nothing that was acknowledged",
    "damage": "damaged bytes are refused, never served",
    "io-error": "full disks and failing calls reach the caller",
    "retention": "rotation keeps what is needed and deletes only its own",
    "security": "a checkpoint is data, not a program",
}


def one_check(verdict: str, reason: str, number: int = 0) -> dict[str, Any]:
    """Make one entry of an invariant's checks."""
    name = f"ckpt_conformance.suites.test_damage::bit_flip[payload-{number}]"
    found = {"name": name, "verdict": verdict, "reason": reason, "seconds": 0.25 + number}
    return found | {"rate": None, "evidence": dict(EVIDENCE)}


def one_invariant(family: str, number: int, verdict: str) -> dict[str, Any]:
    """Make one invariant of a result."""
    practice = verdict == Verdict.NOT_MET or number % 4 == 3
    reason = REASONS[verdict]
    told = verdict in {"VIOLATION", "NOT_MET"}
    return {
        "family": family,
        "statement": STATEMENTS[family] + (f", case {number}" if number > 1 else ""),
        "why": WHY,
        "basis": "practice" if practice else ("contract", "promise")[number % 2],
        "level": "SHOULD" if practice else "MUST",
        "profiles": list(PROFILES)[1 : 2 + number % 3],
        "incidents": ["A01", "https://example.org/issues/7", "javascript:alert(1)"][: number % 4],
        "verdict": verdict,
        "owner": "library" if told else None,
        "grade": "reproduced with a real process" if told else None,
        "rate": [40, 64] if told else None,
        "reason": reason,
        "checks": [one_check(verdict, reason, index) for index in range(1 + number % 3)],
        "evidence": dict(EVIDENCE) if told else {},
        "reproduce": f"ckpt-conformance certify torch-save-inplace --only CKC-{family}-{number:03}"
        " --seed 0 --budget quick",
    }


REASONS = {
    "PASS": "",
    "VIOLATION": "step 30 was acknowledged, and after the kill step 20 was served: LOST_STEP",
    "NOT_MET": "a flipped bit in the payload loads without an error",
    "UNKNOWN": "the control without the fault failed: the worker ended with signal 9",
    "NOT_APPLICABLE": "the manager does not declare the capability `mirror`",
    "WAIVED": "accepted until 2.14, see the project's issue 12",
}


def make_result(verdicts: list[str], name: str = "torch-save-inplace") -> dict[str, Any]:
    """Make a result whose invariants have these verdicts, spread over the families."""
    wheel = zip(itertools.cycle(STATEMENTS), itertools.count(), verdicts, strict=False)
    invariants = {
        f"CKC-{family}-{1 + index // len(STATEMENTS):03}": one_invariant(
            family, 1 + index // len(STATEMENTS), verdict
        )
        for family, index, verdict in wheel
    }
    details = {
        profile: {
            "verdict": ("PASS", "VIOLATION", "UNKNOWN", "NOT_APPLICABLE")[index % 4],
            "description": description,
            "counts": {"PASS": 4 + index, "NOT_MET": 1 + index % 3},
        }
        for index, (profile, description) in enumerate(PROFILES.items())
    }
    return {
        "schema": SCHEMA,
        "suite": {"version": "0.1.0", "commit": "a" * 40, "catalogue": 1},
        "created": "2026-01-31T12:00:00+00:00",
        "interrupted": False,
        "environment": {
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "kernel": "Linux 6.18.44",
            "machine": "x86_64",
            "filesystem": "ext4",
            "cpus": 4,
        },
        "adapter": {
            "name": name,
            "version": "2.13.0",
            "shape": "manager",
            "capabilities": ["explicit-step", "retention"],
            "holds": ["extra", "model", "optimizer", "rng", "scheduler"],
            "library": "torch 2.13.0+cpu",
            "recipe": "torch.save to the final name, one file for all steps",
            "owner": "recipe",
            "notes": "",
        },
        "seed": 0,
        "budget": "quick",
        "claims": ["damage"],
        "asked": {"profiles": [], "only": []},
        "profiles": {profile: one["verdict"] for profile, one in details.items()},
        "profile_details": details,
        "invariants": invariants,
        "harness": [],
        "crash": {},
        "waivers": [],
    }


def rich_result() -> dict[str, Any]:
    """Make a result with every verdict, hostile text everywhere, and very long words."""
    verdicts = ["VIOLATION", "NOT_MET", "UNKNOWN", "NOT_APPLICABLE", "WAIVED", *["PASS"] * 5]
    result = make_result((verdicts * 7)[:70])
    for text, one in zip([*HOSTILE, LONG], result["invariants"].values(), strict=False):
        one |= {"reason": text, "why": text, "statement": one["statement"] + " " + text}
        one["evidence"] = {text: text, "nested": {text: [text, {"deep": text}]}, "n": 1.5}
        one["checks"][0]["name"] = text
        one["profiles"] = [*one["profiles"], text]
        one["reproduce"] += " " + text
        one["incidents"] = ["A01", text]
    result["adapter"] |= {"notes": HOSTILE[0] + LONG, "capabilities": [LONG, HOSTILE[1]]}
    result["harness"] = [one_check("UNKNOWN", HOSTILE[0] + LONG)]
    result["waivers"] = [{"invariant": "CKC-ATOM-001", "reason": HOSTILE[2]}]
    result["crash"] = {"kill": {"states": 137, "unique": 40, "outcomes": {"NEW": 30, LONG: 10}}}
    return result


class Browser:
    """Headless chromium, spoken to over a pipe: the DevTools protocol without any library."""

    FLAGS = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    )

    def __init__(self, program: str, profile: Path) -> None:
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The protocol wants descriptors 3 and 4; our ends must not be among them.
        moved = [os.dup(one) for one in (theirs, answers)]
        for one in (theirs, answers):
            os.close(one)
        actions = [(os.POSIX_SPAWN_DUP2, moved[0], 103), (os.POSIX_SPAWN_DUP2, moved[1], 104)]
        actions += [(os.POSIX_SPAWN_DUP2, 103, 3), (os.POSIX_SPAWN_DUP2, 104, 4)]
        log = str(profile.parent / "chromium.log")
        actions.append((os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT, 0o644))
        command = [program, *self.FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # A session of its own: chromium's children end with it.
        self._process = os.posix_spawn(
            program, command, os.environ, file_actions=actions, setsid=True
        )
        for one in moved:
            os.close(one)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")

    def close(self) -> None:
        """End the browser and everything it started."""
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        """Call one method of the protocol and wait for its answer; events are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def page(self, method: str, **params: object) -> dict[str, Any]:
        """Call one method of the page."""
        return self.send(method, self._session, **params)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "chromium closed its pipe; see chromium.log"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Open a file at one width of the window and wait until it is laid out."""
        self.page(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.page("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.page("Page.navigate", url=path.as_uri())
        while not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self.events.append(self._receive())

    def run(self, script: str) -> Any:  # noqa: ANN401  whatever the script gives
        """Evaluate a script in the page."""
        answer = self.page("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[object]:
        """Give console messages, errors, and requests for anything but the file itself."""
        self.run("1")  # what the page said so far has arrived after this
        wanted = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        said: list[object] = [one for one in self.events if one["method"] in wanted]
        sent = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        urls = [one["params"]["request"]["url"] for one in sent]
        return said + [url for url in urls if not url.startswith(("file:", "data:"))]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = Browser(CHROMIUM, Path(folder) / "profile")
        try:
            yield started
        finally:
            started.close()


# Opens everything, then names what reaches past the right edge or past its own box.
OVERFLOW = """(width => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const name = one => one.tagName + '.' + one.getAttribute('class');
  const seen = [...document.querySelectorAll('body *')].filter(one => !one.closest('svg, .away'));
  const wide = seen.filter(one => one.getBoundingClientRect().right > width + 0.5);
  const cut = seen.filter(one => one.clientWidth && one.scrollWidth > one.clientWidth + 1);
  const page = document.documentElement.scrollWidth > width ? ['page'] : [];
  return [...page, ...[...wide, ...cut].map(name)].slice(0, 8);
})"""
# WCAG 2: text against the first opaque background behind it.
CONTRAST = """(() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const linear = one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
  const light = rgb => rgb.slice(0, 3).map(one => linear(one / 255))
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const colour = parts(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || parent.closest('.away, svg')) continue;
    const [a, b] = [light(parts(getComputedStyle(parent).color)), light(behind(parent))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([ratio, parent.className, walk.currentNode.data.trim().slice(0, 40)]);
  }
  return low.slice(0, 8);
})()"""
SHOWN = """[...document.querySelectorAll('.inv')]
  .filter(one => one.checkVisibility()).map(one => one.classList[1])"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    report.write_text(path, report.render_html(rich_result()))
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
    report.write_text(path, report.render_html(result))
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
        assert report.shown(one) in text


def test_filters_work_without_a_script(browser: Browser, page: Path) -> None:
    assert "<script>" not in page.read_text().replace("&lt;", "")
    browser.open(page, 1280)
    assert len(browser.run(SHOWN)) == 70
    for verdict in Verdict:
        # A click on the label, as a user's: the page itself holds no script.
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
    html = report.render_html(result)
    one = result["invariants"]["CKC-SMOK-001"]
    wanted = [one["statement"], one["why"], one["reason"], one["reproduce"], "promise (MUST)"]
    wanted += ["40 of 64 (62.5 %)", "reproduced with a real process", "ext4", "Linux 6.18.44"]
    wanted += ["https://github.com/Lightning-AI/pytorch-lightning/issues/688", "practice (SHOULD)"]
    assert [text for text in wanted if text not in html.replace("&#39;", "'")] == []


def test_headline_is_never_better_than_the_verdict() -> None:
    good = make_result(["PASS", "NOT_MET", "WAIVED"])
    assert report.headline(good).title == "Certified"
    assert report.headline(make_result(["PASS", "VIOLATION"])).title == "Not certified"
    assert report.headline(make_result(["PASS", "UNKNOWN"])).title == "Undecided"
    assert report.headline(make_result(["NOT_APPLICABLE"])).title == "Nothing was shown"
    assert report.headline(make_result([])).title == "Nothing was shown"
    assert report.headline(good | {"profiles": {}}).title == "No violation in a selection"
    stopped = report.headline(make_result(["PASS", "UNKNOWN"]) | {"interrupted": True})
    assert stopped.sentence.startswith("Stopped before the end.")
    harness = report.headline(good | {"harness": [one_check("UNKNOWN", "died")]})
    assert harness.title == "Undecided"
    assert "1 fault of the harness" in harness.sentence


def test_junit_is_keyed_by_invariant_and_survives_hostile_text() -> None:
    result = rich_result()
    root = ET.fromstring(report.junit_xml(result))  # noqa: S314  our own file
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert result["invariants"].keys() <= cases.keys()
    assert {case.get("classname") for case in cases.values()} == {"torch-save-inplace"}
    kinds = {
        "VIOLATION": ["failure"],
        "UNKNOWN": ["error"],
        "NOT_MET": ["skipped"],
        "WAIVED": ["skipped"],
        "NOT_APPLICABLE": ["skipped"],
        "PASS": [],
    }
    for name, one in result["invariants"].items():
        assert [child.tag for child in cases[name]] == kinds[one["verdict"]]
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("71", "7", "8")


def test_summary_escapes_what_markdown_would_run() -> None:
    text = report.summary_markdown(rich_result())
    assert text.startswith("<!-- ckpt-conformance -->\n## ✗ torch-save-inplace: Not certified")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {4, 5}
    cells = "".join(tables)
    assert "<script" not in cells
    assert "&lt;script" in cells
    assert "\n    ckpt-conformance certify torch-save-inplace --only CKC-SMOK-001" in text
    assert "\x1b" not in text


def test_summary_of_a_clean_run_is_short() -> None:
    text = report.summary_markdown(make_result(["PASS"] * 70))
    assert len(text.splitlines()) < 20
    assert "Reproduce" not in text


def test_incidents_are_links_only_to_http() -> None:
    known = report.incident("A01")
    assert known.url == "https://github.com/Lightning-AI/pytorch-lightning/issues/688"
    assert known.label == "A01 Lightning-AI/pytorch-lightning#688"
    assert report.incident("https://example.org/7").url == "https://example.org/7"
    for name in ("javascript:alert(1)", "Z99", "https://a b", "https://x\njavascript:1"):
        assert report.incident(name).url == ""


def test_pretty_and_clip() -> None:
    assert report.pretty("two\nlines\x00") == "two\nlines\\x00"
    assert report.pretty([1, 2]) == "[1, 2]"
    assert report.pretty(list(range(40))).startswith("[\n  0,")
    assert report.pretty("x" * 5000).endswith("… 1,000 more characters in result.json")
    assert report.percent([1, 3]) == "1 of 3 (33.3 %)"
    assert report.percent([0, 0]) == "0 of 0"


def test_output_folders_of_several_adapters_never_meet(tmp_path: Path) -> None:
    assert report.output_folders(tmp_path, ["pkg:make"]) == {"pkg:make": tmp_path}
    names = ["my_pkg.adapter:make", "my_pkg.adapter/make", "../..", "a/../b", "MY_PKG.adapter:make"]
    folders = report.output_folders(tmp_path, names)
    assert folders["my_pkg.adapter:make"] == tmp_path / "my_pkg.adapter-make"
    assert all(one.parent == tmp_path for one in folders.values())
    assert len({one.name.casefold() for one in folders.values()}) == len(names)


def test_certificate_is_written_over_its_own_files_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report.prepare_output(out)
    (out / "notes.txt").write_text("mine")
    for _ in range(2):
        report.write_certificate(make_result(["PASS"]), out)
        report.prepare_output(out)
    assert sorted(one.name for one in out.iterdir()) == sorted([*report.FILES, "notes.txt"])


@pytest.mark.parametrize("name", report.FILES)
def test_foreign_files_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(report.OutputError, match="was not written by ckpt-conformance"):
        report.prepare_output(tmp_path)
    assert (tmp_path / name).read_text() == "{}"


def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(report.OutputError, match="File exists; name another folder with --out"):
        report.prepare_output(tmp_path / "file")
    with pytest.raises(report.OutputError, match="Not a directory"):
        report.prepare_output(tmp_path / "file" / "below")
    with pytest.raises(report.OutputError, match="cannot write to /proc"):
        report.prepare_output(Path("/proc/1"))
