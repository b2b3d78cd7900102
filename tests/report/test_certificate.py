"""The certificate: verdicts merged and judged, files that CI reads, baselines, the kill matrix."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace as struct_replace

from ckpt_conformance.contract.catalogue import Catalogue, Invariant, Origin
from ckpt_conformance.contract.registry import AdapterInfo
from ckpt_conformance.contract.verdicts import (
    Cause,
    CheckOutcome,
    Remarks,
    Unknown,
    Verdict,
    control_failed,
)
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.report import certificate, environment, kill_matrix
from ckpt_conformance.report import files as report
from ckpt_conformance.report.result import Result, decode, encode

SCHEMA = Path(certificate.__file__).parent / "schemas" / "result.schema.json"
ATOM, CORR, LATER = "CKC-ATOM-001", "CKC-CORR-001", "CKC-ATOM-002"
PROFILES = {"crash": "killed", "damage": "damaged"}
HOSTILE = "a|b `c` <script> ]]> \x1b[31m\x00 \udcff\n| new row | @me #1"


def invariant(identifier: str, basis: str, *profiles: str, since: int = 1) -> Invariant:
    texts = ("It holds.", "Because.", "Hold it.")
    return Invariant(identifier, *texts, basis, profiles, ("A01",), since=since)


AGAIN = "--budget quick --out reproduced"
CATALOGUE = Catalogue(
    2,
    {
        ATOM: invariant(ATOM, "contract", "crash"),
        CORR: invariant(CORR, "practice", "damage"),
        LATER: invariant(LATER, "promise", "crash", "damage", since=2),
    },
    {
        "casts": Origin("casts", "library: lib", "It casts.", "a page", "a must", "contract", ATOM),
        "documented": Origin("documented", "library: lib", "So.", "a page", "no", "practice", CORR),
    },
)
INFO = AdapterInfo("toy", "1", "manager", ["b", "a"], ["rng", "model"], "lib 1", "r", "recipe", "")


def outcome(identifier: str, verdict: str, reason: str = "", **more: Any) -> CheckOutcome:  # noqa: ANN401
    cause = {"cause": Cause.HARNESS} if verdict == "UNKNOWN" else {}
    return CheckOutcome(
        "toy", identifier, "suite::check", Verdict(verdict), reason, **(cause | more)
    )


def build(*outcomes: CheckOutcome, interrupted: bool = False, **options: Any) -> Result:  # noqa: ANN401
    """Build a result, hold it against the schema, and read it again."""
    given = SessionOptions(adapters=("toy",), seed=7, **options)
    facts = certificate.RunFacts(
        options=given,
        catalogue=CATALOGUE,
        profiles=PROFILES,
        environment=environment.describe_environment(Path("/")),
        commit=None,
        interrupted=interrupted,
    )
    made = encode(certificate.build_result(INFO, outcomes, facts))
    content = json.loads(json.dumps(made, allow_nan=False))
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return decode(content)


def all_pass() -> list[CheckOutcome]:
    return [outcome(name, "PASS") for name in CATALOGUE.invariants]


def test_what_passes_is_certified() -> None:
    result = build(*all_pass())
    assert certificate.judge(result) == certificate.CERTIFIED
    assert result.profiles == {"crash": "PASS", "damage": "PASS"}
    assert result.adapter.capabilities == ["a", "b"]
    assert result.invariants[ATOM].owner is None


def test_verdicts_merge_by_worst_and_the_worst_speaks() -> None:
    bad = outcome(ATOM, "VIOLATION", "lost", evidence={"step": 3}, rate=(2, 9))
    result = build(outcome(ATOM, "PASS", rate=(0, 3)), bad, outcome(ATOM, "UNKNOWN", "?"))
    one = result.invariants[ATOM]
    assert (one.verdict, one.reason, one.evidence) == ("VIOLATION", "lost", {"step": 3})
    assert (one.rate, one.owner) == ((2, 12), "recipe")
    assert one.grade == "reproduced with a real process"
    assert [check.verdict for check in one.checks] == ["VIOLATION", "UNKNOWN", "PASS"]
    assert certificate.judge(result) == certificate.VIOLATED


def test_a_check_may_name_owner_and_grade() -> None:
    told = {"owner": "library", "grade": "allowed by the model only"}
    one = build(outcome(ATOM, "VIOLATION", evidence=told)).invariants[ATOM]
    assert {key: getattr(one, key) for key in told} == told


@pytest.mark.parametrize(
    ("other", "kept"),
    [("PASS", None), ("NOT_APPLICABLE", None), ("UNKNOWN", ATOM), ("VIOLATION", ATOM), ("", ATOM)],
)
def test_nobody_is_sent_to_a_promise_that_is_kept(other: str, kept: str | None) -> None:
    doubt = outcome(CORR, "UNKNOWN", f"it ends; see {ATOM}", cause=Cause.CONTROL, see=ATOM)
    one = build(doubt, *([outcome(ATOM, other)] if other else [])).invariants[CORR]
    assert (one.see, one.reason) == (kept, f"it ends; see {ATOM}" if kept else "it ends")


def cast(identifier: str, told_by: str = "") -> CheckOutcome:
    return outcome(identifier, "VIOLATION", "cast", origin="casts", told_by=told_by)


def test_a_cause_outside_of_the_manager_counts_once_and_has_its_owner() -> None:
    result = build(cast(ATOM), outcome(CORR, "PASS"), cast(LATER, ATOM))
    told, follower = result.invariants[ATOM], result.invariants[LATER]
    assert (told.verdict, told.owner, told.see) == ("VIOLATION", "library: lib", None)
    assert (follower.verdict, follower.owner, follower.see) == ("SAME_CAUSE", "library: lib", ATOM)
    assert result.origins["casts"].statement == "It casts."
    assert result.following(ATOM) == [LATER]
    assert f"--only {LATER} --only {ATOM} " in follower.reproduce  # alone it would count
    assert result.profiles == {"crash": "VIOLATION", "damage": "VIOLATION"}
    assert [name for name, _ in report.attention(result)] == [ATOM]
    assert report.headline(result).sentence == "3 invariants: 1 violated, 1 same cause, 1 kept."
    assert certificate.judge(result) == certificate.VIOLATED
    assert certificate.judge(result, {ATOM}) == certificate.CERTIFIED
    for text in (
        report.render_html(result),
        report.render_summary(result),
        report.render_text("result.txt.j2", 100, result=result, known={}, asides={}, folder=""),
    ):
        assert LATER in text
        assert "not counted again" in text
    assert 'failures="1"' in report.junit_xml(result)


def test_what_follows_counts_where_nobody_tells_the_cause() -> None:
    alone = build(outcome(ATOM, "PASS"), outcome(CORR, "PASS"), cast(LATER, ATOM))
    other = build(outcome(ATOM, "VIOLATION"), outcome(CORR, "PASS"), cast(LATER, ATOM))
    for result in (alone, other):  # ATOM is kept, or violated by the manager itself
        assert result.invariants[LATER].verdict == "VIOLATION"
        assert result.invariants[LATER].see is None
        assert certificate.judge(result, {ATOM}) == certificate.VIOLATED


def test_what_the_manager_does_is_told_before_what_a_library_does() -> None:
    both = replace(cast(ATOM), check="suite::a"), outcome(ATOM, "VIOLATION", "its own")
    told = build(*both).invariants[ATOM]
    assert (told.reason, told.owner, told.origin) == ("its own", "recipe", None)


def test_what_a_library_documents_is_a_should() -> None:
    found = outcome(ATOM, "NOT_MET", "cast", origin="documented")
    told = build(found, outcome(CORR, "PASS"), outcome(LATER, "PASS")).invariants[ATOM]
    assert (told.level, told.basis, told.owner) == ("SHOULD", "practice", "library: lib")


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_did_not_run_is_unknown_never_a_pass(*, interrupted: bool) -> None:
    result = build(outcome(ATOM, "PASS"), outcome(CORR, "PASS"), interrupted=interrupted)
    one = result.invariants[LATER]
    assert one.verdict == "UNKNOWN"
    assert one.reason.startswith("not run")
    assert ("interrupted" in one.reason) is interrupted
    assert result.profiles == {"crash": "UNKNOWN", "damage": "UNKNOWN"}
    assert certificate.judge(result) == certificate.UNDECIDED


def test_unmet_should_leaves_the_profile_green_and_is_counted() -> None:
    result = build(*all_pass()[::2], outcome(CORR, "NOT_MET", "silent", rate=(40, 64)))
    assert result.profiles["damage"] == "PASS"
    assert result.profile_details["damage"].counts == {"NOT_MET": 1, "PASS": 1}
    assert result.invariants[CORR].level == "SHOULD"
    assert certificate.judge(result) == certificate.CERTIFIED


def test_a_claim_makes_practice_a_must_and_stands_in_the_command() -> None:
    result = build(outcome(CORR, "VIOLATION"), claims=("damage",))
    one = result.invariants[CORR]
    assert one.level == "MUST"
    assert one.reproduce == (
        f"ckpt-conformance certify toy --only {CORR} --seed 7 --budget quick --claim damage "
        "--out reproduced"
    )
    assert "--claim" not in result.invariants[ATOM].reproduce


def test_commands_are_quoted_for_a_shell() -> None:
    facts = certificate.RunFacts(
        options=SessionOptions(adapters=("a b",), catalogue=1),
        catalogue=CATALOGUE,
        profiles=PROFILES,
        environment=environment.describe_environment(Path("/")),
    )
    result = certificate.build_result(replace(INFO, name="a b;$(c)"), [], facts)
    command = result.invariants[ATOM].reproduce
    assert command.startswith("ckpt-conformance certify 'a b;$(c)' --only")
    assert command.endswith("--catalogue 1 --out reproduced")


def test_only_judges_no_profile_that_it_did_not_cover() -> None:
    result = build(outcome(ATOM, "PASS"), outcome(CORR, "VIOLATION"), only=(ATOM,))
    assert list(result.invariants) == [ATOM]
    assert result.profiles == {}
    assert certificate.judge(result) == certificate.CERTIFIED


def test_profile_and_catalogue_select() -> None:
    assert list(build(profiles=("damage",)).invariants) == [CORR, LATER]
    assert list(build(profiles=("damage",)).profiles) == ["damage"]
    pinned = build(outcome(ATOM, "PASS"), outcome(LATER, "VIOLATION"), catalogue=1)
    assert list(pinned.invariants) == [ATOM, CORR]
    assert pinned.suite.catalogue == 1
    assert pinned.profiles["crash"] == "PASS"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, certificate.CERTIFIED),
        ({"profiles": ("damage",)}, certificate.UNDECIDED),
        ({"profiles": ("crash",)}, certificate.CERTIFIED),
        ({"claims": ("damage",)}, certificate.UNDECIDED),
        ({"only": (CORR,)}, certificate.UNDECIDED),
    ],
)
def test_limit_of_the_machine_counts_only_where_asked(options: Any, status: int) -> None:  # noqa: ANN401
    limit = outcome(CORR, "UNKNOWN", "no loop device", cause=Cause.MACHINE)
    result = build(*all_pass()[::2], limit, **options)
    assert certificate.judge(result) == status
    # A fault of the harness beside it is never forgiven.
    worse = build(
        *all_pass()[::2], limit, outcome(CORR, "UNKNOWN", "control failed", cause=Cause.CONTROL)
    )
    assert certificate.judge(worse) == certificate.UNDECIDED


def test_what_is_silently_wrong_stands_for_the_invariant() -> None:
    """Two checks find it; which of them ends first must not decide what a reader sees."""
    loud = outcome(CORR, "VIOLATION", "loud", evidence={"outcome": "LOST_ALL"})
    silent = replace(
        loud, reason="silent", check="suite::later", evidence={"outcome": "SILENT_WRONG"}
    )
    for both in ((loud, silent), (silent, loud)):
        assert build(*both).invariants[CORR].reason == "silent"


def test_an_outcome_of_no_invariant_is_a_fault_of_the_harness() -> None:
    result = build(*all_pass(), outcome("", "PASS", "a worker died"))
    assert [one.reason for one in result.harness] == ["a worker died"]
    assert certificate.judge(result) == certificate.UNDECIDED


def test_statuses_merge_with_a_violation_first() -> None:
    assert certificate.merge_status([0, 3, 1, 0]) == 1
    assert certificate.merge_status([0, 3]) == 3
    assert certificate.merge_status([]) == 0


def test_evidence_of_any_kind_becomes_json() -> None:
    deep: list[Any] = []
    for _ in range(50):
        deep = [deep]
    evidence = {"nan": float("nan"), "bytes": b"ab", "set": {2, 1}, 3: (1,), "o": object()}
    evidence |= {"half": "\udcff", "deep": deep, "path": Path("x")}
    one = build(outcome(ATOM, "VIOLATION", evidence=evidence)).invariants[ATOM].evidence
    assert (one["nan"], one["set"], one["3"], one["half"]) == ("nan", [1, 2], [1], "\\udcff")
    assert one["bytes"].startswith("<2 bytes, sha256 fb8e20fc2e4c3f24")


def test_a_result_is_judged_again_from_its_file(tmp_path: Path) -> None:
    result = build(outcome(ATOM, "VIOLATION", HOSTILE))
    report.write_certificate(result, tmp_path)
    assert certificate.judge(certificate.load_result(tmp_path / "result.json")) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "result.json: Expecting"),
        ("[]", "schema is None"),
        ('{"schema": "ckpt-conformance/result/v9"}', "schema is 'ckpt-conformance/result/v9'"),
        ('{"schema": "ckpt-conformance/result/v1"}', "lacks adapter, asked, claims"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(certificate.ResultError, match=re.escape(message)):
        certificate.load_result(path)


def test_junit_is_keyed_by_invariant_and_survives_hostile_text() -> None:
    result = build(outcome(ATOM, "VIOLATION", HOSTILE), outcome(CORR, "NOT_MET", HOSTILE))
    root = ET.fromstring(report.junit_xml(result))  # noqa: S314  our own file
    cases = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert cases == {ATOM: ["failure"], CORR: ["skipped"], LATER: ["error"]}
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("3", "1", "1")
    assert {case.get("classname") for case in root.iter("testcase")} == {"toy"}


def test_summary_escapes_what_markdown_would_run() -> None:
    result = build(outcome(ATOM, "VIOLATION", HOSTILE), outcome("", "UNKNOWN", HOSTILE))
    text = report.render_summary(result)
    assert text.startswith("<!-- ckpt-conformance -->\n## ✗ toy: Not certified\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {4, 5}
    assert "<script" not in text
    assert "\x1b" not in text
    assert f"\n    ckpt-conformance certify toy --only {ATOM} --seed 7 {AGAIN}\n" in text
    assert "Fault of the harness" in text


def test_output_folders_of_several_adapters_never_meet(tmp_path: Path) -> None:
    assert environment.output_folders(tmp_path, ["pkg:make"]) == {"pkg:make": tmp_path}
    names = ["my_pkg.adapter:make", "my_pkg.adapter/make", "../..", "a/../b", "MY_PKG.adapter:make"]
    folders = environment.output_folders(tmp_path, names)
    assert folders["my_pkg.adapter:make"] == tmp_path / "my_pkg.adapter-make"
    assert all(one.parent == tmp_path for one in folders.values())
    assert len({one.name.casefold() for one in folders.values()}) == len(names)


def test_certificate_is_written_over_its_own_files_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment.prepare_output(out)
    (out / "notes.txt").write_text("mine")
    for _ in range(2):
        report.write_certificate(build(*all_pass()), out)
        environment.prepare_output(out)
    files = sorted(one.name for one in out.iterdir())
    assert files == sorted([*environment.FILES, "notes.txt"])


@pytest.mark.parametrize("name", environment.FILES)
def test_foreign_files_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(environment.OutputError, match="was not written by ckpt-conformance"):
        environment.prepare_output(tmp_path)
    assert (tmp_path / name).read_text() == "{}"


def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path / "file", "File exists; name another folder with --out"),
        (tmp_path / "file" / "below", "Not a directory"),
        (Path("/proc/1"), "cannot write to /proc/1"),
    ):
        with pytest.raises(environment.OutputError, match=reason):
            environment.prepare_output(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    certificate.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        certificate.write_text(path, "\udcff")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "old")]


def test_environment_is_read_without_torch(tmp_path: Path) -> None:
    found = environment.describe_environment(tmp_path)
    assert found["python"].count(".") == 2
    assert found["kernel"].startswith("Linux ")
    assert environment.distribution_version("no-such-distribution") is None


def test_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    folder = tmp_path / "with space"
    point = str(folder).replace(" ", "\\040")
    line = "1 0 8:1 / {} rw shared:1 - {} /dev/x rw\n"
    mounts.write_text(
        line.format("/", "ext4") + line.format(point, "xfs") + line.format(point, "btrfs") + "bad\n"
    )
    assert environment.filesystem_type(folder / "a", mounts) == "btrfs"
    assert environment.filesystem_type(Path("/"), mounts) == "ext4"
    assert environment.filesystem_type(Path("/"), tmp_path / "absent") == "unknown"


def test_commit_is_ours_only(tmp_path: Path) -> None:
    (tmp_path / "contract").mkdir()
    (tmp_path / "contract" / "verdicts.py").write_text("")
    assert environment.suite_commit(tmp_path) is None
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    # A wheel inside somebody's checkout is not tracked there.
    assert environment.suite_commit(tmp_path) is None


def test_kill_matrix_compares_exactly() -> None:
    info = SimpleNamespace(
        id="A01", bug="A01", url="u", change="c", base="reference", violates=frozenset({ATOM})
    )
    killed, extra = outcome(ATOM, "VIOLATION", "lost"), outcome(CORR, "VIOLATION", "silent")
    unknown = outcome(CORR, "UNKNOWN", "?")
    limit = outcome(CORR, "UNKNOWN", "no", cause=Cause.MACHINE)

    def matrix(mutant: list[CheckOutcome], control: list[CheckOutcome]) -> kill_matrix.KillMatrix:
        return kill_matrix.kill_matrix({"A01": info}, {"mutant:A01": mutant, "reference": control})

    good = matrix([killed, unknown], [*all_pass(), limit])
    assert good.exact
    assert good.mutants["A01"].unknown == [CORR]
    skipped = outcome(ATOM, "NOT_APPLICABLE", "no such capability")
    verdicts = matrix([skipped, extra], all_pass()).mutants["A01"].verdicts
    assert verdicts == {
        ATOM: {skipped.check: "NOT_APPLICABLE"},
        CORR: {extra.check: "VIOLATION"},
    }
    assert matrix([extra], all_pass()).mutants["A01"].missed == [ATOM]
    assert matrix([killed, extra], all_pass()).mutants["A01"].extra == [CORR]
    # A control that violates, is undecided, or did not run proves nothing.
    for control in ([killed], [unknown], []):
        assert not matrix([killed], control).exact


def test_a_certificate_repeats_how_its_checks_were_made() -> None:
    told = "recorded by patched entry points"
    points = [Remarks({"save": "all 9"}, crash=told), Remarks({"load": "a sample of 4"})]
    ones = [outcome(ATOM, "PASS", remarks=remarks) for remarks in points]
    result = encode(build(*ones, outcome(CORR, "PASS")))
    assert result["environment"]["crash"] == told
    assert result["environment"]["io_points"] == "load: a sample of 4; save: all 9"
    told_by_none = {"crash", "ranks", "io_points", "planted"}
    assert not told_by_none & encode(build(*all_pass()))["environment"].keys()


def test_a_certificate_says_what_was_planted_and_where() -> None:
    planted = [Remarks(planted={what: "28 names"}) for what in ("rotation", "discovery")]
    ones = [outcome(ATOM, "PASS", remarks=remarks) for remarks in planted]
    result = encode(build(*ones, outcome(CORR, "PASS")))
    assert result["environment"]["planted"] == "discovery: 28 names; rotation: 28 names"


def as_version_1(result: Result) -> Any:  # noqa: ANN401  what a file holds
    """Write a result as the suite did before results named causes."""
    content = encode(result) | {"schema": "ckpt-conformance/result/v1"}
    invariants = list(content["invariants"].values())
    checks = [check for invariant in invariants for check in invariant["checks"]]
    for one in (*invariants, *checks, *content["harness"]):
        del one["cause"], one["see"]
    return content


@pytest.mark.parametrize(
    "unknown",
    [
        Unknown("no outcome"),
        Unknown(f"the harness failed; see {ATOM}"),
        Unknown("this machine can't make system calls fail", cause=Cause.MACHINE),
        control_failed("no killed save loads"),
        control_failed("no killed save loads;\nno whole one either", ATOM),
        control_failed("this machine is mentioned"),
    ],
    ids=str,
)
def test_a_result_of_version_1_is_read_as_if_it_named_its_causes(unknown: Unknown) -> None:
    """There the cause stood in the sentence alone."""
    undecided = outcome(CORR, "UNKNOWN", str(unknown), cause=unknown.cause, see=unknown.see)
    broken, stray = outcome(ATOM, "VIOLATION", "lost"), outcome("", "UNKNOWN", "died")
    result = build(broken, undecided, outcome(LATER, "PASS"))
    again = decode(json.loads(json.dumps(as_version_1(result))))
    assert replace_schema(again) == result
    assert certificate.judge(again, {ATOM}) == certificate.judge(result, {ATOM})
    strange = build(undecided, stray, interrupted=True)
    assert replace_schema(decode(as_version_1(strange))) == strange


def replace_schema(result: Result) -> Result:
    return struct_replace(result, schema=certificate.SCHEMA)


def test_a_result_that_was_edited_is_refused() -> None:
    content = encode(build(*all_pass()))
    content["invariants"][ATOM]["verdict"] = "GOOD"
    with pytest.raises(certificate.ResultError, match=r"Invalid enum value 'GOOD'.*cut or edited"):
        decode(content)
