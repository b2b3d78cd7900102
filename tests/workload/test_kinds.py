"""The kinds of job: the same seed gives the same run, another seed differs wherever a load writes.

And each kind is worth its time: a mutant of the table shows on it, and on no kind that lacks what
it is there for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.contract import DEFAULT_KIND
from ckpt_conformance.mutants import all_mutants
from ckpt_conformance.subject import resumption
from ckpt_conformance.subject.subject import JOB_SEED, OTHER_SEED, SAVES, Subject, steps_after
from ckpt_conformance.workload.job import Job
from ckpt_conformance.workload.kinds import KINDS
from ckpt_conformance.workload.models import Plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_conformance.contract import StepRecord

# kind -> a mutant that shows on it; on no other, but for kind plain, whose model most others share.
SHOWN_BY = {
    DEFAULT_KIND: "M05-frozen",
    "unused": "G04-unused",
    "empty": "Q01-empty",
    "scalar": "I08-scalar",
    "points": "K04-points",
    "transformer": "I01-fused",
    "conv": "M03-norm",
    "two-optimizers": "G18",
    "alike-optimizers": "G05-class",
    "steady": "J02-own",
    "lazy": "K04-lazy",
    "accumulate": "H08",
    "computed": "G14-address",
    "rare-dtypes": "K04",
    "masters": "K01",
    "extra-state": "J02-extra-state",
    "least": "G04-none",
    "sharing": "S04-state",
    "large": "M06-blocks",
    "names": "M05-module",
    "counters": "G18-numbers",
    "nested": "G18-shared",
    "bits": "K04-nan",
    "layouts": "O05-memory-order",
    "sizes": "M06-last-byte",
    "normal": "E05-gauss",
    "drawing": "E03-first",
    "workers": "H09",
    "packed": "H15",
    "cosine": "F07-cosine",
    "linear": "F07-linear",
    "wsd": "F09-last-epoch",
    "rex": "F03-callable",
    "constant": "F07-constant",
    "steps": "M01-json",
    "scaled": "F05-own",
    "phases": "F02-rates",
}
# Kinds that no record of a step shows, and what shows them instead.
SHOWN_ELSEWHERE = {
    "values": "tests/suites/test_mutants.py: its check compares the dict itself",
    "scalars": "tests/suites/test_mutants.py: its check compares the dict itself, or it is refused",
    "double": "tests/suites/test_mutants.py: its check compares the dict itself",
    "live": "tests/suites/test_mutants.py: what it fills after the call is compared itself",
    "slight": "tests/suites/test_mutants.py: what is stale is the second save",
    "eighths": "tests/suites/test_mutants.py: it may be refused",
    "unsigned": "tests/suites/test_mutants.py: it may be refused",
    "pairs": "tests/suites/test_mutants.py: its destination ties what was saved apart",
    "sparse": "tests/suites/test_mutants.py: it may be refused",
    "quantized": "tests/suites/test_mutants.py: it may be refused",
    "meta": "tests/suites/test_mutants.py: it may be refused",
    "small": "tests/crash/test_crash_workloads.py: a crash state that lacks a short file",
}
# Whose optimizer keeps the same state, and views of it; whose counter is a number, too; which has
# several optimizers.
ALSO = {
    "masters": {"layouts"},
    "counters": {"nested"},
    "accumulate": {"computed"},
    "two-optimizers": {"alike-optimizers"},
}
REFUSED = {"sparse", "quantized", "meta"}  # by the reference, as it may
BEYOND = {"huge", "many"}  # of GiB and minutes: tests/strangers/test_verdicts.py has them
ORDINARY = {name: kind for name, kind in KINDS.items() if name not in BEYOND}
LIKE_PLAIN = {name for name, kind in ORDINARY.items() if issubclass(kind.model, Plain)} - REFUSED


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run_of(kind: str, seed: int) -> tuple[list[StepRecord], Mapping[str, str]]:
    """Train across the end of an epoch; the generators are the process's: one job at a time."""
    job = Job(kind, seed)
    return job.train(6), job.digest()


@pytest.mark.parametrize("kind", ORDINARY)
def test_the_same_seed_gives_the_same_run(kind: str) -> None:
    assert run_of(kind, JOB_SEED) == run_of(kind, JOB_SEED)


@pytest.mark.parametrize("kind", ORDINARY)
def test_another_seed_gives_another_run(kind: str) -> None:
    one, other = run_of(kind, JOB_SEED)[0], run_of(kind, OTHER_SEED)[0]
    for here, there in zip(one, other, strict=True):
        assert here.loss != there.loss
        assert here.batch != there.batch
        assert not set(here.draws) & set(there.draws)
        assert here.parameters != there.parameters


@pytest.mark.parametrize("kind", ORDINARY)
def test_another_seed_differs_in_every_component(kind: str) -> None:
    saved = Job(kind, JOB_SEED)
    saved.train(SAVES[-1])
    wanted, fresh = saved.digest(), Job(kind, OTHER_SEED).digest()
    assert wanted.keys() == fresh.keys()
    assert not [name for name in wanted if wanted[name] == fresh[name]]


def test_every_kind_is_in_the_table() -> None:
    assert SHOWN_BY.keys() == ORDINARY.keys() - SHOWN_ELSEWHERE.keys()
    assert set(SHOWN_BY.values()) <= all_mutants().keys()
    assert all(kind.shows for kind in KINDS.values())


def shows(subject: Subject, kind: str) -> bool:
    """Tell whether the run that resumes at the first save leaves the unbroken one."""
    golden = subject.golden(kind=kind)
    records = resumption.records_of(resumption.resumed(subject, golden, SAVES[0]))
    return len(records) != steps_after(kind) or bool(resumption.divergence(golden, records))


@pytest.mark.parametrize("kind", sorted(SHOWN_BY.keys() - {DEFAULT_KIND}))
def test_each_kind_shows_what_the_default_does_not(
    kind: str, new_subject: Callable[..., Subject]
) -> None:
    subject = new_subject(f"mutant:{SHOWN_BY[kind]}")
    assert [name for name in (DEFAULT_KIND, kind) if shows(subject, name)] == [kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHOWN_BY)
def test_each_kind_shows_what_no_other_does(kind: str, new_subject: Callable[..., Subject]) -> None:
    subject = new_subject(f"mutant:{SHOWN_BY[kind]}")
    shown = {name for name in ORDINARY.keys() - REFUSED if shows(subject, name)}
    assert shown == (LIKE_PLAIN if kind == DEFAULT_KIND else {kind} | ALSO.get(kind, set()))
