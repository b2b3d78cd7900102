"""What the suites ask of the explorer: one exploration of each workload, shared by all checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract.verdicts import NotApplicable, Outcome, Violation, joined
from ckpt_conformance.crash.explore import (
    audit,
    bundles,
    engine,
    reproduced,
    summary,
    workloads,
)
from ckpt_conformance.crash.explore.stores import store_saves
from ckpt_conformance.crash.model.models import OF_A_DISK, OF_POWER_LOSS, OF_STORES
from ckpt_conformance.subject import bundle, roles
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ckpt_conformance.crash.explore.engine import Explorer
    from ckpt_conformance.crash.explore.exploration import ModelReport
    from ckpt_conformance.crash.explore.exploration import Violation as FoundViolation
    from ckpt_conformance.harness.messages import Fault
    from ckpt_conformance.subject.subject import Subject

MODELS_OF_RANKS = ("ranks", "node-loss")  # what `nfs` loses `node-loss` loses, too
MODELS_OF_POWER_LOSS = OF_POWER_LOSS
SAME = ("same",)
NEWEST = 4  # the step that the workload `second` saves
RANKS = {"fsdp": 2}  # the layout of a world whose saves are recorded
EXPLORED: Slot[Explorer] = Slot("the exploration of a workload")
CONTROL: Slot[list[str | None]] = Slot("what going on without a crash gives, where it is known")
ALL = frozenset(Outcome)
LOST = frozenset({Outcome.LOST_STEP})  # a whole step is loaded, and a newer one was acknowledged
TORN = ALL - LOST  # nothing whole is loaded


def saves(subject: Subject) -> tuple[str, ...]:
    """Return the workloads of the subject's budget that save new steps."""
    return tuple(name for name in workloads.usual(subject) if name not in SAME)


def explored(subject: Subject, name: str) -> Explorer:
    """Explore a workload under every model, once per subject; raises Unknown as it says."""
    return require_usable(subject, subject.once(EXPLORED, lambda: _explore(subject, name), name))


def _explore(subject: Subject, name: str) -> Explorer:
    recorded = workloads.record(subject, name)
    full = subject.budget == "full"
    explorer = engine.Explorer(subject, recorded, engine.FULL_CHECK if full else engine.QUICK)
    controls = subject.once(CONTROL, lambda: [None])  # the last one found is at the end
    explorer.result.control = None if full else controls[-1]
    explorer.roles = roles.of_manager(subject)
    engine.run(explorer, OF_A_DISK)
    reproduced.reproduce(explorer)
    controls.append(explorer.result.control)
    carry(subject, name, explorer)
    return explorer


def explored_large(subject: Subject, name: str) -> Explorer:
    """Explore a save of tensors of many MiB under power losses, once per subject.

    Each recovery costs what a load of it costs, and a database writes such a tensor by thousands of
    pages. So nothing is explored unless the trace shows data that was not synced (NotApplicable),
    and then only what lacks something right after the acknowledgement.
    """

    def explore() -> Explorer:
        recorded = workloads.record(subject, name)
        if not any(one.rule in audit.OF_DATA for one in audit.audit(recorded.recording)):
            raise NotApplicable("all data of the save was synced when it was acknowledged")
        explorer = engine.Explorer(subject, recorded, engine.OF_A_LARGE_SAVE)
        engine.run(explorer, MODELS_OF_POWER_LOSS, share=explorer.lacking)
        carry(subject, name, explorer)
        return explorer

    return require_usable(subject, subject.once(EXPLORED, explore, name))


def explore_injected(subject: Subject, fault: Fault) -> str:
    """Explore the save of step 4 under a fault that it survives; give the name of that workload.

    Every state that the quick budget enumerates is recovered from: it is about the few in which the
    data of a failed sync is gone.
    """
    recorded = workloads.injected(subject, "second", fault, NEWEST)
    limits = replace(engine.FULL_CHECK, candidates=engine.QUICK.candidates, onward=0)
    explorer = engine.Explorer(subject, recorded, limits)
    engine.run(explorer, OF_A_DISK)
    subject.forget(EXPLORED, recorded.name)  # that of another fault
    subject.once(EXPLORED, lambda: explorer, recorded.name)
    return recorded.name


def explore_tried_again(subject: Subject, fault: Fault) -> str:
    """Explore the save of step 4 that a fault makes raise, and that is made again; name it."""
    recorded = workloads.tried_again(subject, "second", fault)
    limits = engine.FULL_CHECK if subject.budget == "full" else engine.QUICK
    explorer = engine.Explorer(subject, recorded, replace(limits, onward=0, strata=0))
    engine.run(explorer, OF_A_DISK)
    subject.forget(EXPLORED, recorded.name)  # that of another fault
    subject.once(EXPLORED, lambda: explorer, recorded.name)
    return recorded.name


def explored_of_ranks(subject: Subject, name: str) -> Explorer:
    """Explore a workload of two ranks, once per subject; raises Unknown as it says."""
    key = f"{name} of ranks"
    return require_usable(
        subject, subject.once(EXPLORED, lambda: _explore_with_ranks(subject, name), key)
    )


def _explore_with_ranks(subject: Subject, name: str) -> Explorer:
    recorded = workloads.record(subject, name, RANKS)
    limits = engine.FULL_OF_RANKS if subject.budget == "full" else engine.QUICK_OF_RANKS
    explorer = engine.RanksExplorer(subject, recorded, limits)
    engine.run(explorer, MODELS_OF_RANKS)
    explorer.confirm_worst()
    reproduced.reproduce_ranks(explorer)
    carry(subject, f"{name} of ranks", explorer)
    return explorer


def explored_in_store(subject: Subject, name: str) -> Explorer:
    """Explore saves with a mirror in a store, once per subject; raises Unknown as it says."""
    found = subject.once(EXPLORED, lambda: _explore_in_store(subject), name)
    return require_usable(subject, found)


def _explore_in_store(subject: Subject) -> Explorer:
    recorded = store_saves.record(subject)
    full = subject.budget == "full"
    limits = engine.FULL_CHECK if full else engine.QUICK
    explorer = engine.Explorer(subject, recorded, replace(limits, onward=0, strata=0))
    engine.run(explorer, OF_STORES)
    carry(subject, recorded.name, explorer)
    return explorer


def carry(subject: Subject, name: str, explorer: Explorer) -> None:
    """Add the summary of an exploration to the next outcome, for the certificate."""
    subject.explored[name] = summary.of_exploration(explorer.result)


def require_usable(subject: Subject, explorer: Explorer) -> Explorer:
    """Return an exploration whose verdicts count.

    Raises Unknown with its doubts, and KeyboardInterrupt if Ctrl-C cut it short.
    """
    if explorer.recording.remark:
        subject.remarks.crash = explorer.recording.remark
    if explorer.result.interrupted:
        raise KeyboardInterrupt
    if explorer.result.doubts:
        raise joined(explorer.result.doubts[:3])
    return explorer


def reports(
    subject: Subject,
    names: Sequence[str],
    models: Sequence[str],
    explore: Callable[[Subject, str], Explorer] = explored,
) -> Iterator[tuple[Explorer, ModelReport]]:
    """Yield the reports of the workloads that apply; raises NotApplicable if none does."""
    reasons: list[str] = []
    for name in names:
        try:
            explorer = explore(subject, name)
        except NotApplicable as error:
            reasons.append(str(error))
            continue
        for model in models:
            yield explorer, explorer.result.models[model]
    if len(reasons) == len(names):
        raise NotApplicable(reasons[0])


def require_clean(
    subject: Subject,
    names: Sequence[str],
    models: Sequence[str],
    bad_ones: Collection[Outcome] = ALL,
    explore: Callable[[Subject, str], Explorer] = explored,
) -> None:
    """Raise Violation for the worst state of any workload and model; the rest is counted.

    `bad_ones` are the outcomes that this check is about, `explore` is one of the two above.
    """
    violations: list[tuple[Explorer, FoundViolation]] = []
    bad = total = 0
    for explorer, report in reports(subject, names, models, explore):
        total += sum(report.outcomes.values())
        of_check = [v for v in report.worst.values() if v.outcome in bad_ones]
        bad += sum(violation.states for violation in of_check)
        violations += [(explorer, violation) for violation in of_check]
    if violations:
        explorer, worst = min(violations, key=_order)
        others = sorted({f"{e.result.workload} {v.case.model} {v.outcome}" for e, v in violations})
        message = f"{worst.outcome} after {worst.case.model} in {explorer.result.workload}"
        raise Violation(
            f"{message}: {worst.recovery.summary}",
            evidence=evidence(subject, explorer, worst) | {"all": others},
            rate=(bad, total),
        )


def _order(pair: tuple[Explorer, FoundViolation]) -> tuple[int, int, str]:
    """Return a sort key: the worst outcome first, then the earliest crash."""
    from ckpt_conformance.crash.explore.judging import RANK

    explorer, violation = pair
    return -RANK[violation.outcome], violation.case.state.point, explorer.result.workload


def evidence(subject: Subject, explorer: Explorer, worst: FoundViolation) -> dict[str, object]:
    """Return what a reader needs; write the state itself to where a bundle takes it from."""
    path = bundles.write(subject.scratch, explorer, worst)
    path.rename(subject.scratch / bundle.CRASH)  # `bundle.write` takes it along
    record = msgspec.to_builtins(worst.record())
    wanted = ("outcome", "model", "point", "why", "operation", "source", "blame", "grade", "told")
    found = explorer.result.audit_of([worst.case.model])
    told = [finding.summary for finding in found[:8]]
    fields = {key: record[key] for key in wanted if record[key]}
    if differs := record["differs"][:4]:  # what is lost differs from nothing
        fields["differs"] = differs
    return {**fields, "audit": told}


def unusable(subject: Subject, models: Sequence[str]) -> list[str]:
    """List what went wrong when a job went on after a recovery.

    Raises NotApplicable where it goes wrong without a crash, too.
    """
    errors: list[str] = []
    applicable = list(reports(subject, workloads.usual(subject), models))
    if not any(explorer.result.control == "" for explorer, _ in applicable):
        error = next((explorer.result.control for explorer, _ in applicable), None)
        without = f"without a crash, too, a job does not go on: {error}"
        raise NotApplicable(without if error else "the manager has threads, so none can fork")
    for explorer, report in applicable:
        name = f"{explorer.result.workload}, {report.name}"
        errors += [f"{name}: {error}" for error in report.unusable]
    return errors
