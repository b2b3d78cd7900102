"""The crash map: what an exploration's files say, how the page looks, what a click on it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from browser import CONTRAST, HOSTILE, LONG, OVERFLOW, Browser
from traces import Trace, atomic

from ckpt_conformance.contract.verdicts import Outcome, Verdict
from ckpt_conformance.crash.explore import bundles, crashmap, engine
from ckpt_conformance.crash.explore.engine import Explorer, Limits, Recorded
from ckpt_conformance.report import environment, exploration, files
from ckpt_conformance.report.map_geometry import LOOKS, NARROW, WIDE, draw
from ckpt_conformance.trace.operations import Kind, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.subject.subject import Subject

pytestmark = pytest.mark.xdist_group("pages")  # they share a browser, and the result below
NAME = "torch-save-atomic-per-step"
MODELS = ("kill", "ext4")
SCHEMAS = Path(files.__file__).parent / "schemas"
PANEL = "document.querySelector('.panel').innerText"


@pytest.fixture(scope="module")
def result(
    new_subject: Callable[..., Subject], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Explore one save without any sync, from a trace made by hand."""
    folder = tmp_path_factory.mktemp("map")
    subject = new_subject(NAME)
    golden = subject.golden()
    trace = Trace(folder / "recording", subject.root, golden.snapshot(2))
    data = (golden.snapshot(4) / "checkpoint-4.pt").read_bytes()
    atomic(trace, "checkpoint-4.pt", data, 4, ["fsync", "directory"])
    recorded = Recorded("second", trace.finish(), [(2, golden.snapshot(2))])
    explorer = Explorer(subject, recorded, Limits(candidates=300, recoveries=60, alone=5, rounds=1))
    explored = engine.run(explorer, MODELS)
    kept = {
        key: str(bundles.write(folder / "bundles", explorer, group[0]))
        for key, group in explored.classes().items()
    }
    findings = exploration.Findings(exploration.Asked(models=MODELS))
    findings.add(explorer, kept)
    exploration.write(findings, {"adapter": subject.info.to_json()}, folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def page_of(result: dict[str, Any], folder: Path) -> Path:
    path = folder / "report.html"
    files.write_text(path, exploration.render_html(result))
    return path


def hostile(text: str) -> dict[str, Any]:
    """Make a result in which everything that a manager names is one text."""
    state = {
        **dict.fromkeys(("why", "promised", "gave"), text),
        "point": 1,
        "content": "c",
        "alone": True,
        "files": [{"path": text, "told": text, "lost": True}, {"path": text, "told": "1 bytes"}],
        "differs": [text],
        "more": 3,
    }
    columns: list[dict[str, Any]] = [{"first": 0, "last": 0, "kind": "start"}]
    columns += [
        {
            "first": 1,
            "last": 1,
            "kind": "mark",
            "marks": [{"mark": "begun", "step": 2}, {"mark": "said", "step": 2}],
        },
        *({**column(at), "path": text, "target": text, "source": text} for at in range(2, 50)),
    ]
    cell = {
        "worst": "LOST_ALL",
        "bad": True,
        "counts": {"LOST_ALL": 2},
        "state": 0,
        "grade": text,
        "bundle": text,
    }
    numbers = {"states": 2, "unique": 1, "visited": 1, "points": 1, "violating": 2}
    crash = {"kill": {**numbers, "outcomes": {"LOST_ALL": 2}, "grades": {}}}
    found = {"outcome": "LOST_ALL", "models": ["kill"], "states": 2, "state": 0, "where": text}
    found |= {"source": text, "blame": text, "bundle": text, "grades": [text]}
    model = {"violations": [{"outcome": "LOST_ALL"}], "unusable": [text]}
    one = {"workload": text, "told": text, "recorder": "seccomp", "operations": [], "visited": 1}
    one |= {"models": {"kill": model}, "audit": [], "unknown": [text], "interrupted": True}
    one["map"] = {
        "columns": columns,
        "rows": {"kill": [None, *[cell] * 49]},
        "classes": [found],
        "states": [state],
    }
    audit = {"rule": text, "told": f"{text}: {text}", "source": text, "workloads": [text]}
    return {
        "suite": {"version": "1", "commit": None},
        "created": "now",
        "interrupted": True,
        "seed": 0,
        "budget": "quick",
        "environment": environment.describe_environment(Path("/")),
        "adapter": {"name": text, "version": text, "library": text, "recipe": text},
        "asked": {"models": ["kill"], "workloads": [text], "real": []},
        "verdict": "VIOLATION",
        "crash": crash,
        "hygiene": [audit],
        "not_applicable": [text],
        "notes": [text],
        "without_a_crash": [text],
        "unknown": [text],
        "explorations": [one, one],
    }


def column(at: int) -> dict[str, Any]:
    return {"first": at, "last": at, "kind": "rename"}


# ---- what is written -----------------------------------------------------------------------------


def test_the_result_obeys_its_schema(result: dict[str, Any]) -> None:
    schema = json.loads((SCHEMAS / "exploration.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(result, schema)
    assert result["verdict"] == "VIOLATION"
    ext4 = result["crash"]["ext4"]
    assert ext4["states"] >= ext4["unique"] >= ext4["visited"] > 0
    assert ext4["outcomes"]["REFUSED_UNTYPED"] > 0
    assert ext4["violating"] > result["crash"]["kill"]["violating"] == 0
    assert {one["rule"] for one in result["hygiene"]} == {
        "renamed-unsynced",
        "directory-not-synced",
    }


def test_a_finding_of_several_workloads_stands_there_once() -> None:
    audit = {"rule": "r", "source": "s", "other_source": "", "path": "p"}
    two = {"workload": "first", "audit": [audit, {**audit, "path": "q"}]}
    found = exploration._hygiene([two, {**two, "workload": "second"}])
    assert [one["workloads"] for one in found] == [["first", "second"]]


def test_the_crash_section_is_one_that_a_certificate_may_have(result: dict[str, Any]) -> None:
    schema = json.loads((SCHEMAS / "result.schema.json").read_text())
    jsonschema.validate(result["crash"], schema["properties"]["crash"])


def test_the_map_names_what_is_left_and_lost(result: dict[str, Any]) -> None:
    (one,) = result["explorations"]
    drawn = one["map"]
    assert len(drawn["columns"]) == len(one["operations"]) + 1
    cells = drawn["rows"]["ext4"]
    (renamed,) = (at for at, one in enumerate(drawn["columns"]) if one["kind"] == "rename")
    assert (cells[renamed]["worst"], cells[renamed]["bad"]) == ("REFUSED_UNTYPED", True)
    state = drawn["states"][cells[renamed]["state"]]
    assert state["files"][0]["path"] == "checkpoint-4.pt"
    assert "empty" in state["files"][0]["told"]
    assert state["promised"].startswith("step 2, which was acknowledged")
    assert drawn["rows"]["kill"][renamed]["bad"] is False
    counted = sum(sum(cell["counts"].values()) for cell in cells if cell)
    assert counted == sum(one["models"]["ext4"]["outcomes"].values())
    assert {found["outcome"] for found in drawn["classes"]} == {"REFUSED_UNTYPED", "LOST_STEP"}


def test_a_violating_point_names_a_bundle_that_is_there(result: dict[str, Any]) -> None:
    drawn = result["explorations"][0]["map"]
    bad = [cell for row in drawn["rows"].values() for cell in row if cell and cell["bad"]]
    assert bad
    assert all((Path(cell["bundle"]) / "violation.json").is_file() for cell in bad)
    assert any("simplest" not in cell for cell in bad), "one of them is the state that was kept"


def test_a_certificate_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"schema": "ckpt-conformance/result/v1"}')
    with pytest.raises(environment.OutputError, match="is a certificate"):
        exploration.prepare(tmp_path)


# ---- size ----------------------------------------------------------------------------------------


def many(kinds: Sequence[Kind], count: int) -> list[Operation]:
    operations = [Operation(0, Kind.MARK, mark="begun", step=2)]
    for at in range(1, count):
        kind = kinds[at % len(kinds)]
        operations.append(Operation(at, kind, object=at, path=f"file-{at}", source="saving.py:1"))
    return operations


@pytest.mark.parametrize("count", [63, 1000, 20_000])
def test_a_map_of_any_recording_is_small(count: int) -> None:
    columns = crashmap._columns(many((Kind.CREATE, Kind.WRITE, Kind.FSYNC), count), {})
    assert len(columns) <= crashmap.MOST
    assert [point for column in columns for point in column] == list(range(count + 1))


def test_writes_to_one_file_that_end_alike_are_one_column() -> None:
    writes = [Operation(at, Kind.WRITE, object=1, path="file", source="a") for at in range(200)]
    assert [len(column) for column in crashmap._columns(writes, {})] == [1, 200]
    good, bad = (
        crashmap.Cell(outcome=Outcome.NEW),
        crashmap.Cell(outcome=Outcome.LOST_ALL, bad=True),
    )
    ends = {"kill": {10: good, 20: good, 100: bad, 150: bad}}
    assert [len(column) for column in crashmap._columns(writes, ends)] == [1, 99, 101]


def test_every_column_is_drawn_once_in_each_width() -> None:
    drawn = hostile("x")["explorations"][0]["map"]
    found = draw(drawn, {"kill": {}})
    for lines, most in ((found.wide, WIDE), (found.narrow, NARROW)):
        assert sum(len(line.columns) for line in lines) == 50
        assert all(len(line.rows[0]["cells"]) == len(line.columns) <= most for line in lines)


def test_every_outcome_has_a_look_of_its_own() -> None:
    """Why: colour is never the only thing that tells two outcomes apart."""
    assert set(LOOKS) == set(Outcome)
    assert len({look.letter for look in LOOKS.values()}) == len(Outcome)


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
@pytest.mark.parametrize("text", ["", *HOSTILE, LONG], ids=range(len(HOSTILE) + 2))
def test_the_page_is_silent_and_fits(
    browser: Browser, tmp_path: Path, result: dict[str, Any], view: tuple[int, str], text: str
) -> None:
    width, scheme = view
    browser.open(page_of(hostile(text) if text else result, tmp_path), width, scheme)
    kind = "wide" if width > 500 else "narrow"
    browser.run(f"document.querySelector('svg.{kind} use.bad').focus()")
    assert browser.run(PANEL), "focus alone shows the state"
    assert browser.run(f"{OVERFLOW}({width})") == []
    assert browser.complaints() == []
    assert browser.run(CONTRAST) == []
    assert browser.run("document.querySelectorAll('img, iframe, object').length") == 0
    assert browser.run("document.title").endswith(f"Violated: {3 if text else 2} findings")
    if text:
        assert files.shown(text) in browser.run("document.body.textContent")


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_a_click_shows_the_state_and_its_replay(
    browser: Browser, tmp_path: Path, result: dict[str, Any], kind: str
) -> None:
    browser.open(page_of(result, tmp_path), 1280 if kind == "wide" else 390)
    assert browser.run(PANEL) == ""
    row = list(result["crash"]).index("ext4")
    drawn = result["explorations"][0]["map"]
    at = next(n for n, cell in enumerate(drawn["rows"]["ext4"]) if cell and cell["bad"])
    find = f'document.querySelector(\'svg.{kind} use[data-r="{row}"][data-c="{at}"]\')'
    middle = browser.run(
        f"(() => {{ {find}.scrollIntoView(); const box = {find}.getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    for what in ("mousePressed", "mouseReleased"):
        place = {"x": middle[0], "y": middle[1], "button": "left", "clickCount": 1}
        browser.page("Input.dispatchMouseEvent", type=what, **place)
    told = browser.run(PANEL)
    assert "REFUSED_UNTYPED under ext4: violates" in told
    assert "empty" in told
    assert "allowed by the model only" in told
    assert f"ckpt-conformance replay {drawn['rows']['ext4'][at]['bundle']}" in told
    assert browser.complaints() == []


def test_the_keyboard_leads_from_point_to_point(
    browser: Browser, tmp_path: Path, result: dict[str, Any]
) -> None:
    browser.open(page_of(result, tmp_path), 1280)
    assert browser.run("document.querySelectorAll('svg.wide use[tabindex=\"0\"]').length") == 1

    def press(key: str) -> str:
        browser.page("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        return str(browser.run(PANEL))

    browser.run("document.querySelector('svg.wide use[tabindex=\"0\"]').focus()")
    assert "under ext4: violates" in browser.run(PANEL)
    assert "under kill: keeps the promise" in press("ArrowUp")
    assert "PREVIOUS under kill" in press("ArrowLeft")
    assert press("Escape") == ""


def test_a_page_without_any_exploration_says_so(
    browser: Browser, tmp_path: Path, result: dict[str, Any]
) -> None:
    nothing = {**result, "explorations": [], "crash": {}, "hygiene": [], "verdict": "UNKNOWN"}
    browser.open(page_of(nothing, tmp_path), 390)
    assert "Undecided" in browser.run("document.title")
    assert browser.complaints() == []


def test_the_page_prints(browser: Browser, tmp_path: Path, result: dict[str, Any]) -> None:
    browser.open(page_of(result, tmp_path), 390, "dark")
    browser.page("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelector('svg.wide').checkVisibility()") is True
    assert browser.page("Page.printToPDF")["data"].startswith("JVBERi")  # %PDF in base64


def test_a_scripts_page_is_headed_by_its_command(tmp_path: Path) -> None:
    told = hostile("plain")
    del told["adapter"]
    told["script"] = {"name": "train.py", "command": ["python", "my train.py", "--out", "{out}"]}
    page = page_of(told, tmp_path).read_text()
    assert "<h1>train.py</h1>" in page
    assert "python &#39;my train.py&#39; --out" in page
    assert "Wrong without any crash" in page


def test_what_was_stopped_is_no_pass() -> None:
    model = {"violations": [], "unusable": []}
    found = exploration.Findings(exploration.Asked(), [{"models": {"kill": model}}])
    assert found.verdict is Verdict.PASS
    found.interrupted = True
    assert found.verdict is Verdict.UNKNOWN
