"""Explicit intent (INTN): what was asked for is served, or the load refuses; it is never replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance import oracle, trees
from ckpt_conformance.checks import check
from ckpt_conformance.subject import OTHER_SEED
from ckpt_conformance.verdicts import Outcome, Unknown, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.client import Ending
    from ckpt_conformance.subject import Subject

KINDS = ("model", "dcp")
ARRIVE = {"op": "run", "until": None, "stop_after": 0}
LEAVES = {"op": "leaves"}
CLOSE = {"op": "close"}


def _call(method: str, *args: Any) -> dict[str, Any]:  # noqa: ANN401  JSON-plain arguments
    return {"op": "call", "method": method, "args": ["$job", *args]}


@dataclass(frozen=True)
class _Saved:
    """What one kind of a step holds: the state by component, the names in the directory."""

    state: dict[str, Any]
    names: set[str]


def _refused(ending: Ending) -> bool:
    return ending.how == "ended" and ending.error is not None


# -- an explicit step ----------------------------------------------------------------------------


@check("CKC-INTN-001")
def test_an_explicit_step_is_served_whole(subject: Subject) -> None:
    """A request for a step gives every component of that step, although a newer one is there.

    Why: one inner part that reads the pointer instead of the request gives the weights of another
    step (R09); a flag that is declared and never read resumes from anywhere (R06).
    How: save two steps, load the older one by its number, compare with what it gave when alone.
    """
    golden = subject.golden()
    wanted = subject.served(golden, 2)
    subject.lay_out(golden)
    ending = subject.resume(2)
    message = "step 2 was asked for, step 4 is there too"
    subject.judge(ending, {2: wanted}, {Outcome.NEW}, message, newest=2, acknowledged=[2])


@check("CKC-INTN-002")
def test_a_step_that_does_not_exist_is_refused(subject: Subject) -> None:
    """A request for a step that is not there raises; nothing else is served.

    Why: a typing error in a path became a warning, and the run began from scratch (B09).
    How: save steps 2 and 4; ask for one between them and one after them.
    """
    golden = subject.golden()
    for step in (3, 9):
        subject.lay_out(golden)
        ending = subject.resume(step)
        if not _refused(ending):
            raise Violation(
                f"step {step} does not exist and is not refused", evidence=subject.evidence(ending)
            )


@check("CKC-INTN-003")
def test_an_explicit_step_that_is_damaged_is_not_replaced(subject: Subject) -> None:
    """A request for a step that cannot be read raises; no other step is served in its place.

    Why: an evaluation or a rollback that was given another step reports numbers of the wrong model;
    a load that fell back in silence did that (R03, checklist M031).
    How: cut every file of the newest step in half, ask for that step by its number.
    """
    golden = subject.golden()
    older = set(trees.files(golden.snapshot(2)))
    subject.lay_out(golden)
    kept = {path.relative_to(golden.snapshot(2)) for path in older}
    new = [path for path in trees.files(subject.root) if path.relative_to(subject.root) not in kept]
    for path in new:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if not new:
        raise Unknown("the newest step has no file of its own to damage")
    ending = subject.resume(4)
    step, _ = oracle.arrival(ending)
    if step == 4:  # noqa: PLR2004  the damaged one
        raise Unknown("control failed: files cut in half are served; see the family CORR")
    if not _refused(ending):
        raise Violation(
            "step 4 was asked for by number and is damaged; it is not refused",
            evidence=subject.evidence(ending),
        )


# -- a destination that does not fit ---------------------------------------------------------------


def _misfit(subject: Subject, variant: str) -> Ending:
    """Load the newest step into a job whose model was altered; any refusal is right."""
    golden = subject.golden()
    subject.served(golden, 4)
    subject.lay_out(golden)
    return subject.resume(variant=variant)


def _altered(subject: Subject, ending: Ending, entries: Sequence[str]) -> dict[str, Any]:
    """Give the named model entries that arrived otherwise than they were saved."""
    _, state = oracle.arrival(ending)
    saved = subject.golden().served[4]["model"]
    arrived = state.get("model", {})
    return {
        name: f"{saved.get(name, 'absent')} was saved, {arrived.get(name, 'absent')} arrived"
        for name in entries
        if arrived.get(name) != saved.get(name)
    }


def _no_misfit(subject: Subject, cases: dict[str, tuple[str, ...]], message: str) -> None:
    """Raise Violation if an altered destination is filled in another way than it was saved."""
    for variant, entries in cases.items():
        ending = _misfit(subject, variant)
        wrong = {} if _refused(ending) else _altered(subject, ending, entries)
        if wrong or ending.how != "ended":
            evidence = subject.evidence(ending, destination=variant, entries=wrong)
            raise Violation(message, evidence=evidence)


@check("CKC-INTN-004")
def test_another_dtype_is_refused_never_cast(subject: Subject) -> None:
    """A destination of another dtype is refused, or takes the saved dtype; nothing is cast unsaid.

    Why: float32 weights were read into a bfloat16 template and lost their low bits without a word;
    shapes were checked, dtypes were not (J04).
    How: load into a model with a bfloat16 buffer, and into one with a float64 layer.
    """
    cases = {"dtype-buffer": ("constant",), "dtype": ("inner.weight", "inner.bias")}
    _no_misfit(subject, cases, "an entry was cast to the dtype of its destination, silently")


@check("CKC-INTN-005")
def test_another_shape_is_refused_never_cut(subject: Subject) -> None:
    """A destination of another shape is refused; no part of an entry is copied.

    Why: where the overlap of two shapes is copied, the rest stays as it was initialised (J05).
    How: load into a model with a longer buffer, and into one with a larger layer.
    """
    cases = {"shape-buffer": ("constant",), "shape": ("inner.weight",)}
    _no_misfit(subject, cases, "an entry of another shape was filled in part, silently")


@check("CKC-INTN-006")
def test_an_entry_that_the_checkpoint_lacks_is_refused(subject: Subject) -> None:
    """What the destination needs and the checkpoint lacks, whole or in part, is refused.

    Why: a load that is not strict leaves random weights: a file whose keys all had a foreign prefix
    loaded nothing and said nothing (M05); strict was accepted and ignored (J06); tensors of a hole
    in the list of chunks stay as they were (J07, checklist MX3).
    How: load into a model with a buffer more, with a parameter more; and, where a checkpoint lists
    chunks, load one in which half of a tensor has no chunk.
    """
    message = "an entry that the checkpoint lacks is left as it was initialised"
    _no_misfit(subject, {"missing-buffer": ("newcomer",), "missing": ("newcomer",)}, message)
    golden = subject.golden()
    subject.lay_out(golden)
    probe = {"op": "probe", "probe": "ckpt_conformance.fault_injectors.chunk_hole:punch"}
    ending = subject.life(probe, {**ARRIVE, "resume": True}, seed=OTHER_SEED)
    entry = ending.result("probe").get("value")
    if entry and oracle.arrival(ending)[0] == 4:  # noqa: PLR2004  else refused, or an older one
        wrong = _altered(subject, ending, [entry])
        if wrong:
            raise Violation(message, evidence=subject.evidence(ending, hole=entry, entries=wrong))


@check("CKC-INTN-007")
def test_an_entry_that_the_job_lacks_is_refused_or_reported(subject: Subject) -> None:
    """What the checkpoint holds and the destination lacks is refused or named in a message.

    Why: a plan that is made from the destination alone skips the optimizer that is not yet built,
    or half of a renamed model, and reports success (J01).
    How: load into a model with a buffer less, and with a parameter less; look for the entry's name
    in what the process printed.
    """
    for variant, entry in (("unexpected-buffer", "constant"), ("unexpected", "lazy")):
        ending = _misfit(subject, variant)
        if not _refused(ending) and entry not in ending.output:
            raise Violation(
                f"the saved entry {entry!r} has no destination and is dropped in silence",
                evidence=subject.evidence(ending, destination=variant),
            )


# -- an explicit kind ------------------------------------------------------------------------------


def _save_two_kinds(subject: Subject, order: Sequence[str]) -> dict[str, _Saved]:
    """Lay out step 4 in two kinds, with other bits in each; the second is saved last.

    Each is saved alone and then put beside the other: a manager may rightly remove the stale
    sibling when it saves the second.
    """
    found: dict[str, _Saved] = {}
    for kind in order:
        trees.clear(subject.root)
        change = [{"op": "perturb"}] if found else []
        save = _call("save_kind", 4, kind)
        ending = subject.life({"op": "train", "n": 4}, *change, save, LEAVES, CLOSE)
        if ending.error or ending.how != "ended":
            raise Unknown(f"control failed: kind {kind} does not save: {subject.tell(ending)}")
        names = {path.name for path in subject.root.iterdir()}
        found[kind] = _Saved(ending.result("leaves")["value"], names)
        trees.copy(subject.root, subject.scratch / kind)
    for path in (subject.scratch / order[0]).iterdir():
        if path.name not in found[order[1]].names:
            path.rename(subject.root / path.name)
    return found


def _taken_from(state: dict[str, Any], other: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Name the components that are the sibling's and not those that were wanted."""
    return [
        name
        for name, found in state.items()
        if found == other.get(name) and found != wanted.get(name)
    ]


@check("CKC-INTN-008")
def test_an_explicit_kind_is_honoured_beside_its_sibling(subject: Subject) -> None:
    """A request for a kind gives that kind, although the same step is there in another one.

    Why: a loader that prefers one format served weights of an older save beside the new one (R01);
    an explicit request for the DCP directory was answered with the model file (checklist M031).
    How: save a step in both kinds with different content, in both orders; ask for each by name.
    """
    for order in subject.sample([KINDS, KINDS[::-1]], quick=1):
        subject.reset()
        saved = _save_two_kinds(subject, order)
        for kind in KINDS:
            ending = subject.life(_call("load_kind", 4, kind), ARRIVE, seed=OTHER_SEED)
            _, state = oracle.arrival(ending)
            other = saved[KINDS[1 - KINDS.index(kind)]].state
            wrong = _taken_from(state, other, saved[kind].state)
            if wrong or not state:
                raise Violation(
                    f"kind {kind} was asked for; the sibling is served, or nothing",
                    evidence=subject.evidence(ending, saved=order, from_the_sibling=wrong),
                )
            if state["model"] != saved[kind].state["model"]:
                raise Unknown("control failed: the model does not come back; see CKC-RTRP-001")


@check("CKC-INTN-009")
def test_a_kind_that_is_absent_is_refused_although_a_sibling_exists(subject: Subject) -> None:
    """A request for a kind that is not there raises, whatever else is there of the same step.

    Why: a request for the safe format was quietly served from a pickle (R03).
    How: save a step in one kind only and ask for the other; both ways round.
    """
    for kind in KINDS:
        subject.reset()
        saved = subject.life({"op": "train", "n": 4}, _call("save_kind", 4, kind), CLOSE)
        if saved.error:
            raise Unknown(f"control failed: kind {kind} does not save: {subject.tell(saved)}")
        other = KINDS[1 - KINDS.index(kind)]
        ending = subject.life(_call("load_kind", 4, other), ARRIVE, seed=OTHER_SEED)
        if not _refused(ending):
            raise Violation(
                f"kind {other} was asked for, only {kind} is there, and the load does not refuse",
                evidence=subject.evidence(ending),
            )


# -- a path --------------------------------------------------------------------------------------


def _load_paths(subject: Subject, paths: Sequence[Path]) -> dict[str, Any]:
    """Load each path into a fresh job, in one life; give (step, model) of each, None if refused."""
    ops: list[dict[str, Any]] = []
    for path in paths:
        ops += [{"op": "fresh"}, {"op": "load", "step": str(path), "continue": True}, LEAVES]
    ending = subject.life(*ops, seed=OTHER_SEED)
    if ending.how != "ended":
        raise Violation("a load of a path does not end", evidence=subject.evidence(ending))
    found: dict[str, Any] = {}
    for at, path in enumerate(paths):
        load, leaves = ending.results[3 * at + 1 : 3 * at + 3]
        found[path.name] = (load["value"], leaves["value"]["model"]) if "value" in load else None
    return found


def _all_are(found: dict[str, Any], step: int, model: Any, message: str) -> None:  # noqa: ANN401
    """Raise Violation unless some path resolves and every one that does gives this step."""
    wrong = [
        f"{name}: step {one[0]}, {'other' if one[1] != model else 'same'} weights"
        for name, one in found.items()
        if one is not None and one != (step, model)
    ]
    if wrong or not any(found.values()):
        raise Violation(message, evidence={"wrong": wrong, "paths": sorted(found)})


@check("CKC-INTN-010")
def test_a_path_means_what_it_names(subject: Subject) -> None:
    """A file or a directory of a checkpoint gives its step; their parent gives the newest.

    Why: a second entry point with a rule of its own took the newest directory instead of the named
    one (B04); a folder that happened to exist won over the explicit source (R05); the model file
    won over the directory that was named (checklist M028, M029, M030, M031).
    How: save steps 2, 4 and 6; load every name that step 4 brought, then the parent, then a copy of
    an older state of the directory that lies elsewhere.
    """
    golden = subject.golden((2, 4, 6))
    wanted = {step: subject.served(golden, step)["model"] for step in golden.saves}
    elsewhere = subject.scratch / "elsewhere"
    trees.copy(golden.snapshot(2), elsewhere)
    subject.lay_out(golden)
    names = {path.name for path in golden.snapshot(4).iterdir()}
    names -= {path.name for path in golden.snapshot(2).iterdir()}
    of_four = [subject.root / name for name in sorted(names)]
    found = _load_paths(subject, [*of_four, subject.root, elsewhere])
    parent, moved = found.pop(subject.root.name), found.pop(elsewhere.name)
    _all_are(found, 4, wanted[4], "a path of step 4 gives another checkpoint, or none does")
    _all_are({"parent": parent}, 6, wanted[6], "the parent directory does not give its newest step")
    _all_are({"copy": moved}, 2, wanted[2], "a path outside of the directory is not what is loaded")
    if "kinds" in subject.info.capabilities:
        _paths_of_kinds(subject)


def _paths_of_kinds(subject: Subject) -> None:
    """Load each name of one step that is there in two kinds: it gives the kind it belongs to."""
    subject.reset()
    saved = _save_two_kinds(subject, KINDS)
    alone = _load_paths(subject, [subject.scratch / kind for kind in KINDS])
    for kind, one in saved.items():
        own = one.names - saved[KINDS[1 - KINDS.index(kind)]].names
        found = _load_paths(subject, [subject.root / name for name in sorted(own)])
        message = f"a path of kind {kind} gives the sibling, or none resolves"
        _all_are(found, 4, alone[kind][1] if alone[kind] else None, message)


# -- what may be absent --------------------------------------------------------------------------


@check("CKC-INTN-011")
def test_nothing_is_cold_in_silence(subject: Subject) -> None:
    """A missing file never leaves a part of the state as it was initialised without a word.

    Why: without its optimizer file a run resumed with trained weights and a cold optimizer, without
    its train state at step 0 with trained weights; nothing was said (checklist M027, KX5).
    How: remove each file of the newest step in turn; the load refuses, falls back, or names what it
    did not find.
    """
    golden = subject.golden()
    wanted = subject.served(golden, 4)
    for name in _removable(subject):
        subject.lay_out(golden)
        (subject.root / name).unlink()
        ending = subject.resume()
        step, state = oracle.arrival(ending)
        if step is None or state.get("model") != wanted["model"]:
            continue
        cold = [
            part
            for part, leaves in oracle.held(wanted, subject.holds).items()
            if state.get(part) != leaves
        ]
        told = name.rpartition("/")[2] in ending.output or all(
            part in ending.output for part in cold
        )
        if cold and not told:
            raise Violation(
                f"{name} is missing: trained weights with cold {', '.join(cold)}, in silence",
                evidence=subject.evidence(ending, wanted),
            )


def _removable(subject: Subject) -> list[str]:
    """Name the files that the newest step brought or changed."""
    golden = subject.golden()
    old, new = golden.snapshot(2), golden.snapshot(4)
    files = [path.relative_to(new).as_posix() for path in trees.files(new)]
    changed = [
        name
        for name in files
        if not (old / name).exists() or (old / name).read_bytes() != (new / name).read_bytes()
    ]
    return subject.sample(changed, quick=4)


@check("CKC-INTN-012")
def test_what_is_left_cold_on_request_is_the_only_thing(subject: Subject) -> None:
    """A load without the optimizer gives every other component of the step that was named.

    Why: with the tag of an earlier step and without optimizer states, the weights came from the
    step that the pointer named (R09); a partial load counted as success (checklist MX6, M027).
    How: with a newer step there, load the older one without its optimizer.
    """
    subject.need(holds=["optimizer"])
    golden = subject.golden()
    wanted = subject.served(golden, 2)
    subject.lay_out(golden)
    load = _call("load_without", 2, "optimizer")
    ending = subject.life(LEAVES, load, ARRIVE, seed=OTHER_SEED)
    step, state = oracle.arrival(ending)
    cold = ending.result("leaves").get("value", {}).get("optimizer")
    moments = {name for name in state.get("optimizer", {}) if name.startswith("state.")}
    others = oracle.held(state, subject.holds - {"optimizer"})
    legal = (wanted, golden.at[2])  # a full load's own flaws are no matter of this check
    wrong = [part for part, found in others.items() if found not in [one[part] for one in legal]]
    if step != 2 or wrong:  # noqa: PLR2004  the step asked for
        raise Violation(
            "a load without the optimizer changes what else is served",
            evidence=subject.evidence(ending, {**wanted, "optimizer": {}}, wrong=wrong),
        )
    if moments and cold is not None:
        raise Violation(
            "a load without the optimizer gives optimizer state", evidence=subject.evidence(ending)
        )


@check("CKC-INTN-013")
def test_loading_does_not_depend_on_how_saving_is_set_up(subject: Subject) -> None:
    """A manager that is set up to save one kind loads a directory of the other kind.

    Why: an option of the new run's saves also switched off what was loaded (E10); a loader that
    knew one format only called a valid checkpoint invalid (R04).
    How: save with each kind, resume with a manager that was opened for the other.
    """
    for kind in KINDS:
        subject.reset()
        saved = subject.run(4, (4,), options={"kind": kind}, then=[LEAVES, CLOSE])
        if saved.error:
            raise Unknown(f"control failed: kind {kind} does not save: {subject.tell(saved)}")
        other = KINDS[1 - KINDS.index(kind)]
        ending = subject.resume(options={"kind": other})
        step, state = oracle.arrival(ending)
        model = saved.result("leaves")["value"]["model"]
        if step == 4 and state["model"] == model:  # noqa: PLR2004  the step that was saved
            continue
        alone = subject.resume(options={"kind": kind})
        if not oracle.same(oracle.arrival(alone)[1], state, {"model"}):
            raise Violation(
                f"saved as {kind}; a manager opened for {other} does not load it",
                evidence=subject.evidence(ending),
            )
