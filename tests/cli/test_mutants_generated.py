"""`mutants --generated`: who is asked next, what came of a mutant, and what is kept of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from typer.testing import CliRunner

from ckpt_conformance.cli import generated, main
from ckpt_conformance.cli.generated import first_kills
from ckpt_conformance.cli.generated.first_kills import Order, Pair, Reach, Search
from ckpt_conformance.cli.sessions import Work
from ckpt_conformance.cli.unreached import Recorded
from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.mutants import generated as mutants
from ckpt_conformance.plugin.plan import CheckItem, plan_of
from ckpt_conformance.plugin.trials import Trial, run_trials
from ckpt_conformance.report.generated import Fate, Judged
from ckpt_conformance.work.cache import Cache
from ckpt_conformance.work.items import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import Server
    from ckpt_conformance.mutants.generated import Mutant
    from ckpt_conformance.plugin.trials import Trials

pytestmark = pytest.mark.xdist_group(
    "mutants-generated"
)  # they share the mutants, which are made once
SMOKE = "test_smoke::test_a_new_process_loads_what_was_saved"
MUSTS = ("CKC-SMOK-001", "CKC-ATOM-001")
UNBROKEN = "mutant:unbroken-reference"
SHOULDS = ("CKC-CORR-001",)
ONLY = "layout.model_name:*"  # a few mutants of one line
ALL = Shard()


def chosen(pattern: str = ONLY) -> list[Mutant]:
    return generated.Request((pattern,)).mutants()


def checks(*ids: str) -> list[CheckItem]:
    request = generated.Request()
    options = replace(request.options([UNBROKEN]), only=ids)
    return list(plan_of(options).items)


def reach_of(
    items: Sequence[CheckItem],
    mutant: Mutant,
    verdict: str = "PASS",
    base: str = "reference",
    line: int = 0,
) -> Reach:
    """Say that checks run a statement: the one that a mutant changes, or that of another line."""
    outcome = {"verdict": verdict, "seconds": 0.1}
    run = frozenset({f"{mutant.function}#1,{line or mutant.line}"})
    return Reach({item: Recorded(outcome, run) for item in items}, {base: UNBROKEN})


def judge(
    mutant: Mutant,
    reach: Reach,
    verdict_of: Callable[[Trial], Verdict],
    hints: Mapping[str, str] | None = None,
) -> tuple[Judged, list[Trial]]:
    """Judge one mutant by what a table says instead of by children."""
    kept: list[Judged] = []
    asked: list[Trial] = []
    trials = Search(reach, kept.append, lambda: 0.0, hints=hints or {}).trials([mutant])
    trial = next(trials, None)
    while trial is not None:
        asked.append(trial)
        outcome = CheckOutcome(trial.adapter, "", trial.check, verdict_of(trial), "why")
        try:
            trial = trials.send(outcome)
        except StopIteration:
            trial = None
    return kept[0], asked


@pytest.fixture(scope="module")
def mutant() -> Mutant:
    return chosen()[0]


@pytest.fixture(scope="module")
def entering(mutant: Mutant) -> Reach:
    return reach_of(checks(*MUSTS, *SHOULDS), mutant)


def test_the_first_violation_is_the_last_check(mutant: Mutant, entering: Reach) -> None:
    judged, asked = judge(mutant, entering, lambda _: Verdict.VIOLATION)
    assert (judged.fate, judged.tried, len(asked)) == (Fate.MUST, 1, 1)
    assert judged.check == asked[0].check
    assert judged.invariant in MUSTS
    assert asked[0].adapter == f"generated:{mutant.name}@reference"


def test_who_is_killed_by_a_should_was_spared_by_every_must(
    mutant: Mutant, entering: Reach
) -> None:
    def verdict_of(trial: Trial) -> Verdict:
        return Verdict.NOT_MET if "damage" in trial.check else Verdict.PASS

    judged, asked = judge(mutant, entering, verdict_of)
    assert (judged.fate, judged.invariant) == (Fate.SHOULD, SHOULDS[0])
    musts = {item.check.key for item in checks(*MUSTS)}
    *spared, last = (trial.check for trial in asked)
    assert musts <= set(spared)
    assert "damage" in last


@pytest.mark.parametrize(
    ("verdict", "fate"),
    [
        (Verdict.PASS, Fate.SURVIVED),
        (Verdict.NOT_APPLICABLE, Fate.SURVIVED),
        (Verdict.UNKNOWN, Fate.UNKNOWN),
    ],
)
def test_what_no_check_kills_is_left(
    mutant: Mutant, entering: Reach, verdict: Verdict, fate: Fate
) -> None:
    judged, asked = judge(mutant, entering, lambda _: verdict)
    assert (judged.fate, judged.tried) == (fate, len(asked))
    assert bool(judged.unknown) is (fate is Fate.UNKNOWN)


@pytest.mark.parametrize(("verdict", "line"), [("PASS", 2), ("NOT_MET", 0), ("UNKNOWN", 0)])
def test_what_no_sound_check_runs_is_not_asked_about(
    mutant: Mutant, verdict: str, line: int
) -> None:
    reach = reach_of(checks(*MUSTS), mutant, verdict, line=line)
    judged, asked = judge(mutant, reach, lambda _: Verdict.VIOLATION)
    assert (judged.fate, asked) == (Fate.UNENTERED, [])


def test_the_check_that_has_killed_before_is_asked_first(mutant: Mutant, entering: Reach) -> None:
    keys = {pair.check for pair in entering.of(mutant)[0] if pair.level == "MUST"}
    for key in keys:
        _, asked = judge(mutant, entering, lambda _: Verdict.VIOLATION, {mutant.name: key})
        assert asked[0].check == key


def test_the_trainer_is_asked_about_its_own_module_alone(mutant: Mutant) -> None:
    items = checks("CKC-SMOK-001")
    assert not any(reach_of(items, mutant, base="reference-trainer").of(mutant))
    own = chosen("trainer.Trainer.schedule:*")[0]
    assert any(reach_of(items, own, base="reference-trainer").of(own))


def test_a_check_is_asked_on_the_first_base_and_then_on_the_others(mutant: Mutant) -> None:
    item, *_ = checks("CKC-SMOK-001")
    other = CheckItem.of("mutant:unbroken-reference-dcp", item.check)
    found = Recorded(
        {"verdict": "PASS", "seconds": 0.1}, frozenset({f"{mutant.function}#{mutant.line}"})
    )
    bases = {"reference": UNBROKEN, "reference-dcp": other.adapter}
    reach = Reach({item: found, other: found}, bases)
    first, others = reach.of(mutant)
    assert ([pair.base for pair in first], [pair.base for pair in others]) == (
        ["reference"],
        ["reference-dcp"],
    )
    (both,) = reach.of(mutant, whole=True)
    assert [pair.base for pair in both] == ["reference", "reference-dcp"]
    _, asked = judge(mutant, reach, lambda _: Verdict.PASS)
    assert [trial.adapter.rpartition("@")[2] for trial in asked] == ["reference", "reference-dcp"]


def test_what_kills_often_and_takes_little_comes_first() -> None:
    pairs = [
        Pair("reference", UNBROKEN, name, "", "MUST", 1.0) for name in ("cheap", "dear", "idle")
    ]
    order = Order()
    for _ in range(20):
        order.note("saving", "cheap", 0.1, killed=True)
        order.note("saving", "dear", 9.0, killed=True)
        order.note("saving", "idle", 0.1, killed=False)
    assert order.likeliest("saving", pairs).check == "cheap"
    assert order.likeliest("mirror", pairs).check == "cheap"  # what is known of others
    for _ in range(40):
        order.note("mirror", "cheap", 0.1, killed=False)
        order.note("mirror", "idle", 0.1, killed=True)
    assert order.likeliest("mirror", pairs).check == "idle"
    assert order.likeliest("saving", pairs).check == "cheap"


# ---- requests ------------------------------------------------------------------------------------


def test_a_sample_follows_from_its_seed() -> None:
    samples = [generated.Request(sample=40, seed=seed).mutants() for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert [len(one) for one in samples] == [40, 40, 40]
    assert not any(one.spans_ranks for one in samples[0])


def test_mutants_of_several_ranks_are_asked_for_by_themselves() -> None:
    alone, ranks = generated.Request().mutants(), generated.Request(ranks=True).mutants()
    assert {one.module for one in ranks} == set(mutants.RANKS)
    assert len(alone) + len(ranks) == len(mutants.all_generated())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--generated", "--only", "nothing*"], "names no generated mutant"),
        (["--generated", "--jobs", "2"], "does not go with --generated"),
        (["--generated", "--shard", "1/2"], "name a file with --results"),
        (["--sample", "3"], "goes with --generated"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(main.app, ["mutants", *arguments])
    assert result.exit_code != 0
    assert reason in result.output + str(result.exception)


def test_names_are_listed_with_their_changes() -> None:
    result = CliRunner().invoke(main.app, ["mutants", "--generated", "--list", "--only", ONLY])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines()] == [m.name for m in chosen()]


# ---- what is kept --------------------------------------------------------------------------------


def known_run(tmp_path: Path, shard: Shard = ALL) -> tuple[Work, list[Judged]]:
    """Put the fate of each mutant of a request into a cache, as an earlier run has."""
    request, cache = generated.Request((ONLY,)), Cache.open(tmp_path / "cache")
    work = Work(shard=shard, results=tmp_path / f"{shard.number}.jsonl", cache=cache)
    earlier = generated.Run(
        request, replace(work, shard=ALL), cast("Any", Nothing()), cast("Any", Nothing())
    )
    judged = [
        Judged(mutant=one.name, fate=Fate.MUST, check=SMOKE, tried=1, seconds=0.5)
        for one in earlier.mutants[1:]
    ]
    judged += [Judged(mutant=earlier.mutants[0].name, fate=Fate.SURVIVED, tried=9)]
    for one in judged:
        earlier._keep(one)
    return work, judged


class Nothing:
    """Writes and shows nothing."""

    def write(self, *_: object) -> None: ...

    def update(self, *_: object) -> None: ...


def test_what_is_known_is_not_judged_again(tmp_path: Path) -> None:
    work, judged = known_run(tmp_path)
    results = generated.run(generated.Request((ONLY,)), work)
    assert {line.origin for line in results.results.values()} == {"cache"}
    assert set(results.results) == {one.mutant for one in judged}


def test_shards_are_combined_into_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: list[str] = []
    for number in (1, 2):
        work, judged = known_run(tmp_path, Shard(number, 2))
        assert generated.command(generated.Request((ONLY,)), work, as_json=False) == 0
        files.append(str(work.results))
    capsys.readouterr()
    result = CliRunner().invoke(main.app, ["combine", *files, "--json"])
    table = json.loads(result.output)
    assert table["judged"] == len(judged)
    assert table["fates"] == {"killed by a MUST": len(judged) - 1, "survived": 1}
    assert [row["mutant"] for row in table["left"]] == [judged[-1].mutant]
    assert result.exit_code == 1, "of the one that is left nobody has said why"
    assert table["apart"] == len(generated.Request(ranks=True).mutants())


def test_of_a_mutant_of_an_older_suite_the_check_that_killed_it_is_known(tmp_path: Path) -> None:
    work, judged = known_run(tmp_path)
    later = generated.Run(
        generated.Request((ONLY,)), work, cast("Any", Nothing()), cast("Any", Nothing())
    )
    later.__dict__["_common"] = later._common | {"all sources": "others"}
    for mutant in later.mutants:
        assert not later._is_known(mutant)
    assert later.hints == {one.mutant: one.check for one in judged if one.check}


# ---- with children -------------------------------------------------------------------------------


def verdicts(server: Server, names: Sequence[str], *ids: str) -> dict[str, set[Verdict]]:
    """Run checks on changed adapters, in one session; return by name what they said."""
    options = replace(
        generated.Request().options(["reference"]), only=ids, server=str(server.socket)
    )
    found: dict[str, set[Verdict]] = {}

    def trials() -> Trials:
        for name in names:
            for item in plan_of(options).items:
                adapter = f"generated:{name}@reference"
                outcome = yield Trial(name, adapter, "reference", item.check.key)
                assert outcome.adapter == adapter
                found.setdefault(name, set()).add(outcome.verdict)

    run_trials(trials(), options)
    return found


def test_what_is_compiled_anew_is_kept_and_what_is_wrong_is_killed(server: Server) -> None:
    (wrong,) = [
        one.name
        for one in chosen("saving.Saving.publish_flat:drop-call:*")
        if "self.rename(staged," in one.before
    ]
    found = verdicts(server, [mutants.SAME, wrong, mutants.SAME], "CKC-SMOK-001")
    assert found == {mutants.SAME: {Verdict.PASS}, wrong: {Verdict.VIOLATION}}


@pytest.mark.slow
def test_the_reference_compiled_anew_passes_the_smoke_checks(server: Server) -> None:
    ids = [f"CKC-SMOK-00{number}" for number in range(1, 5)]
    assert verdicts(server, [mutants.SAME], *ids) == {mutants.SAME: {Verdict.PASS}}


def test_every_level_is_asked_for() -> None:
    assert first_kills.LEVELS == ("MUST", "SHOULD")
