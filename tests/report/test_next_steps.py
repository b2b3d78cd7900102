"""A finding tells its next step: the fix of what is broken, and what an UNKNOWN asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from ckpt_conformance.contract.catalogue import Catalogue, Invariant, Origin
from ckpt_conformance.contract.registry import AdapterInfo
from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Unknown, Verdict, control_failed
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.report import certificate, environment, files, next_steps
from ckpt_conformance.report.result import decode, encode

if TYPE_CHECKING:
    from ckpt_conformance.report.result import Result

SCHEMA = Path(certificate.__file__).parent / "schemas" / "result.schema.json"
INFO = AdapterInfo("toy", "1", "manager", [], ["model"], "lib 1", "r", "recipe", "")
ATOM, CORR, DISC, COMP = "CKC-ATOM-001", "CKC-CORR-001", "CKC-DISC-001", "CKC-COMP-001"
CATALOGUE = Catalogue(
    1,
    {
        name: Invariant(name, "It holds.", "So.", f"Mend {name} so.", basis, ("crash",))
        for name, basis in (
            (ATOM, "contract"),
            (CORR, "practice"),
            (DISC, "contract"),
            (COMP, "contract"),
        )
    },
    {"casts": Origin("casts", "library: lib", "It casts.", "a page", "no", "contract", ATOM)},
)


def build(*outcomes: CheckOutcome, only: tuple[str, ...] = ()) -> Result:
    """Build a result in which all other invariants are kept; hold it against the schema."""
    told = {one.invariant for one in outcomes}
    kept = [outcome(name, "PASS") for name in (only or CATALOGUE.invariants) if name not in told]
    facts = certificate.RunFacts(
        options=SessionOptions(adapters=("toy",), only=only),
        catalogue=CATALOGUE,
        profiles={"crash": "killed"},
        environment=environment.describe_environment(Path("/")),
    )
    content = encode(certificate.build_result(INFO, [*outcomes, *kept], facts))
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return decode(json.loads(json.dumps(content)))


def outcome(name: str, verdict: str, **more: Any) -> CheckOutcome:  # noqa: ANN401
    return CheckOutcome("toy", name, "s::c", Verdict(verdict), **{"reason": "it broke", **more})


def doubt(error: Unknown, name: str = DISC) -> CheckOutcome:
    return outcome(name, "UNKNOWN", reason=str(error), cause=error.cause, see=error.see)


def on_terminal(result: Result, width: int = 10_000) -> str:
    return files.render_text("result.txt.j2", width, result=result, known={}, asides={}, folder="")


def block(result: Result, name: str, width: int = 10_000) -> list[str]:
    """Return the lines of one finding on a terminal."""
    every = re.split(r"^(?=[✗○?] CKC)", on_terminal(result, width), flags=re.MULTILINE)
    (mine,) = [one for one in every if one[2:].startswith(name)]
    return [line.strip() for line in mine.split("\n\n")[0].splitlines()]


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html))


@pytest.mark.parametrize("name", [ATOM, CORR])
def test_what_is_broken_is_told_with_its_fix(name: str) -> None:
    result = build(outcome(name, "VIOLATION" if name == ATOM else "NOT_MET"))
    lines = block(result, name)
    (at,) = [at for at, line in enumerate(lines) if line.startswith("reproduce: ")]
    assert lines[at - 1] == f"fix: Mend {name} so."
    assert on_terminal(result).count("fix: ") == 1, "nothing is said of what is kept"
    html = files.render_html(result)
    assert words(html).count("How to fix it") == 1
    assert words(html).count(f"Mend {name} so.") == 1
    assert files.junit_xml(result).count(f"fix: Mend {name} so.") == 1
    remedies = [one.remedy for one in result.invariants.values()]
    assert remedies == [f"Mend {name} so." if one == name else "" for one in result.invariants]


def test_a_result_without_remedies_is_still_read() -> None:
    content = encode(build(outcome(ATOM, "VIOLATION")))
    for one in content["invariants"].values():
        del one["remedy"]
    result = decode(content)
    assert "fix: " not in on_terminal(result)
    assert "How to fix it" not in files.render_html(result)


def test_the_blame_comes_before_the_fix() -> None:
    evidence = {"detail": 1, "blame": "the old is removed"}
    lines = block(build(outcome(ATOM, "VIOLATION", evidence=evidence)), ATOM)
    assert lines.index("blame: the old is removed") < lines.index(f"fix: Mend {ATOM} so.")


def test_what_another_one_tells_has_no_fix_of_its_own() -> None:
    by_library = {"origin": "casts", "told_by": ATOM}
    result = build(
        outcome(ATOM, "VIOLATION", origin="casts"), outcome(DISC, "VIOLATION", **by_library)
    )
    assert result.invariants[DISC].verdict == "SAME_CAUSE"
    assert result.invariants[DISC].remedy == ""
    lines = block(result, ATOM)
    assert lines[-4:-1] == [
        "cause: It casts. Documented: a page",
        f"broken by the same cause, not counted again: {DISC}",
        f"fix: Mend {ATOM} so.",
    ]


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (Unknown("it died"), "report it with result.json"),
        (Unknown("no loop device", cause=Cause.MACHINE), "on a machine that has it"),
        (Unknown("no name", cause=Cause.ADAPTER), "docs/adapter-guide.md"),
        (control_failed("a plain run ends"), "by hand"),
    ],
)
def test_an_unknown_tells_its_next_step_by_its_cause(error: Unknown, step: str) -> None:
    result = build(doubt(error))
    (line,) = [line for line in block(result, DISC) if line.startswith("next: ")]
    assert step in line
    assert str(error) in block(result, DISC), "the reason is whole"
    html = words(files.render_html(result))
    assert html.count("What to do next") == 1
    assert line.removeprefix("next: ") in html
    assert line in files.junit_xml(result)


def test_a_control_refers_to_the_promise_to_mend_first_and_names_it_once() -> None:
    result = build(
        outcome(ATOM, "VIOLATION"), doubt(control_failed("no killed save resumes", ATOM))
    )
    lines = block(result, DISC)
    assert "control failed: no killed save resumes" in lines, "without the reference"
    assert f"next: mend {ATOM} first, then run the command below." in lines
    html = files.render_html(result)
    assert f'mend <a href="#{ATOM}">{ATOM}</a> first' in html
    details = words(html[html.index('class="all"') :])
    assert f"see {ATOM}" not in details
    assert result.invariants[DISC].reason.endswith(f"; see {ATOM}"), "result.json has all of it"


def test_a_control_that_was_not_judged_is_to_be_run() -> None:
    result = build(doubt(control_failed("nothing resumes", ATOM)), only=(DISC,))
    (line,) = [line for line in block(result, DISC) if line.startswith("next: ")]
    assert f"--only {ATOM}" in line


def test_a_control_that_is_unknown_itself_comes_first() -> None:
    result = build(doubt(control_failed("nothing resumes", ATOM)), doubt(Unknown("died"), ATOM))
    assert f"next: settle {ATOM} first, which is unknown too." in block(result, DISC)


def test_a_control_that_is_kept_after_all_is_looked_at_by_hand() -> None:
    lines = block(build(doubt(control_failed("nothing resumes", ATOM))), DISC)
    assert "control failed: nothing resumes" in lines, "nobody is sent to what is kept"
    assert any(line.startswith("next: ") and "by hand" in line for line in lines)


def test_every_cause_has_a_next_step() -> None:
    for cause in Cause:
        result = build(doubt(Unknown("so", cause=cause)))
        told = next_steps.advice(result.invariants[DISC], result)
        assert told is not None
        assert told.label == "next"


def test_a_fault_of_the_harness_tells_its_next_step() -> None:
    result = build(doubt(Unknown("a worker died"), ""))
    assert "    next: run it again; if it comes back, report it with result.json." in (
        on_terminal(result).splitlines()
    )
    assert "if it comes back, report it with result.json." in words(files.render_html(result))


# -- long evidence ---------------------------------------------------------------------------------

SCRIPT = [*(f"save step {step}" for step in range(2, 150, 2)), "load the latest: DECISIVE"]


@pytest.mark.parametrize("width", [80, 120, 10_000])
def test_a_script_is_never_cut_before_its_last_step(width: int) -> None:
    rest = {f"detail {number}": number for number in range(9)}
    result = build(outcome(ATOM, "VIOLATION", evidence={**rest, "script": SCRIPT}))
    text = on_terminal(result, width)
    assert " ".join(text.split()).count(f"script: {'; '.join(SCRIPT)}") == 1
    assert width > 1000 or max(map(len, text.split("reproduce:")[0].splitlines())) <= width
    assert "load the latest: DECISIVE" in files.render_html(result)


def test_a_script_of_an_older_result_is_whole_too() -> None:
    """It was one text then."""
    result = build(outcome(ATOM, "VIOLATION", evidence={"script": "; ".join(SCRIPT)}))
    assert "load the latest: DECISIVE" in on_terminal(result)


def test_a_list_ends_with_a_whole_entry_and_the_number_of_the_rest() -> None:
    names = [f"model/layer.{number}.weight" for number in range(40)]
    result = build(outcome(ATOM, "VIOLATION", evidence={"differs": names, "few": names[:2]}))
    lines = block(result, ATOM)
    assert f"few: {'; '.join(names[:2])}" in lines
    (line,) = [line for line in lines if line.startswith("differs: ")]
    shown, rest = line.removeprefix("differs: ").rsplit("; … ", 1)
    listed = shown.split("; ")
    assert listed == names[: len(listed)]
    assert rest == f"{40 - len(listed)} more"
    assert len(line) < 200


def test_one_long_entry_of_a_list_is_cut_like_any_text() -> None:
    lines = block(build(outcome(ATOM, "VIOLATION", evidence={"left": ["x" * 500, "y"]})), ATOM)
    (line,) = [line for line in lines if line.startswith("left: ")]
    assert line == f"left: {'x' * 160}…; … 1 more"
