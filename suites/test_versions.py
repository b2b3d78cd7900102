"""Versions (VERS): what one release of torch wrote the next one loads, or refuses in words.

Only the first check needs no second release: it gives torch another name while it saves. All others
read folders that `ckpt-conformance write` made under other releases. A round trip under one release
says nothing about another one: without such a folder they are NOT_APPLICABLE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Violation
from ckpt_conformance.harness.messages import Steps, StepsResult
from ckpt_conformance.subject import controls, resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites import layouts, releases
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import Layout
    from ckpt_conformance.suites.releases import Checkpoint

NEWEST = releases.NEWEST
SIZES = ({"fsdp": 1}, {"fsdp": 3})  # other than the two ranks that wrote


def _is_found(subject: Subject, tree: Path, step: int, who: str) -> None:
    """Raise Violation if discovery leaves a step out that is there, and says nothing.

    Raises Unknown where it leaves out what this release saves, too.
    """
    if "steps" not in subject.info.capabilities:
        return
    trees.materialize(tree, subject.root)
    result = subject.execute(Steps())
    if releases.is_refused(result):
        return
    steps = result.of(StepsResult).steps
    if steps is None or step not in steps:
        controls.require(smoke.test_discovery_names_an_acknowledged_step, subject)
        trees.materialize(tree, subject.root)  # where a bundle takes it from
        raise Violation(
            f"{who}: discovery names {steps}, and not step {step}",
            evidence=subject.evidence(result),
        )


@check("CKC-VERS-002")
def test_a_checkpoint_that_names_another_release_is_not_passed_over(subject: Subject) -> None:
    """A checkpoint that names another release of torch is loaded or refused in words.

    Why: a manager that skips what does not fit it starts the run anew, from step 0, after an
    upgrade, and rotation then deletes what it skipped (M10).
    How: save while torch bears the name of a release that does not exist; load, and ask discovery,
    under its own name. NOT_APPLICABLE where no file of the checkpoint holds that name.
    """
    resumption.arrive(subject)
    golden = subject.golden(faults=(releases.pretended_fault(),))
    release, tree = releases.pretended_release(), golden.snapshot(NEWEST)
    if not any(release.encode() in path.read_bytes() for path in trees.files(tree)):
        raise NotApplicable("nothing that a save leaves names the release of torch")
    _is_found(subject, tree, NEWEST, f"saved under the name of torch {release}")
    trees.materialize(tree, subject.root)
    result = subject.resume()
    if message := releases.passed_over(subject, result, NEWEST):
        raise Violation(
            f"saved under the name of torch {release}: {message}",
            evidence=subject.evidence(result),
        )


@check("CKC-VERS-002")
def test_what_another_release_wrote_is_not_passed_over(subject: Subject) -> None:
    """What another release of torch wrote is loaded or refused in words.

    Why: as above; and what a new release does with old files no name can pretend (M08, M10).
    How: load each directory of `--written-by`, and ask discovery: the newest step, or an error.
    """
    for checkpoint in releases.of_one_process(subject):
        _is_found(subject, checkpoint.tree, checkpoint.run.step, checkpoint.title)
        result = releases.arrived(subject, checkpoint)
        if message := releases.passed_over(subject, result, checkpoint.run.step):
            raise Violation(
                f"{checkpoint.title}: {message}",
                evidence=releases.evidence(subject, checkpoint, result),
            )


@check("CKC-VERS-003")
def test_what_another_release_wrote_is_not_loaded_as_something_else(subject: Subject) -> None:
    """What another release of torch wrote arrives bit for bit, unless it is refused.

    Why: the order of parameters, the settings of an optimizer and the layout of a file change with
    a release while names and shapes stay: every tensor fits, in the wrong place (M09, M02, M03).
    How: load each directory of `--written-by`; compare the state at the first training step with
    the digests that its writer noted. A leaf that only one of the two releases has is noted.
    """
    _is_served(subject)
    for checkpoint in releases.of_one_process(subject):
        releases.demand_same(subject, checkpoint)


@check("CKC-VERS-004")
def test_what_another_release_wrote_loads(subject: Subject) -> None:
    """What another release of torch wrote loads.

    Why: after an upgrade a run of weeks had no checkpoint that it could go on from: a setting was
    new, a name was another one (M07, M08, M01).
    How: load each directory of `--written-by`; an error is the violation.
    """
    _is_served(subject)
    for checkpoint in releases.of_one_process(subject):
        releases.demand_loads(subject, checkpoint)


@check("CKC-VERS-004")
def test_what_ranks_of_another_release_wrote_loads(subject: Subject) -> None:
    """What ranks wrote under another release of torch loads, where declared on others too.

    Why: the form in which ranks say who holds what changed, and the new reader knew no other (J13).
    How: load it on as many ranks as wrote, and where `reshard` is declared on one and on three; an
    error is the violation.
    """
    for checkpoint in releases.of_ranks(subject):
        for layout in _layouts(subject, checkpoint):
            releases.demand_loads(subject, checkpoint, layout)


@check("CKC-VERS-005")
def test_ranks_get_what_ranks_of_another_release_saved(subject: Subject) -> None:
    """Ranks get from another release of torch what was saved, bit for bit, or all of them refuse.

    Why: which rows a rank holds is written in a form that changes with a release: each rank cut the
    wrong ones out of a matrix of the right shape (M11, J13).
    How: load what two ranks wrote under another release, on two ranks, and where `reshard` is
    declared on one and on three; join what they hold, compare with what was saved.
    """
    for checkpoint in releases.of_ranks(subject):
        for layout in _layouts(subject, checkpoint):
            releases.demand_same_on_ranks(subject, checkpoint, layout)


def _layouts(subject: Subject, checkpoint: Checkpoint) -> list[Layout]:
    """Return the layouts of ranks that load what ranks wrote: their own, and where declared others.

    Raises Unknown if one of them does not come back under the installed release.
    """
    own = dict(checkpoint.run.layout or {})
    chosen = [own, *(SIZES if "reshard" in subject.info.capabilities else ())]
    for layout in chosen:
        layouts.pair(subject, own, layout)
    return chosen


def _is_served(subject: Subject) -> None:
    """Raise Unknown if what another release wrote is passed over: see CKC-VERS-002."""
    controls.require(test_what_another_release_wrote_is_not_passed_over, subject)
