"""Damaged bytes are never served as a checkpoint, and are never taken for an empty directory."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import combinations, cycle, product
from pathlib import PurePath
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import REFUSALS, NotApplicable, Outcome, Unknown, Violation
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.harness.messages import (
    ExitKind,
    Fresh,
    LeavesResult,
    Load,
    LoadResult,
    Materialize,
    ReadLeaves,
    Train,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject import names as step_names
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED, Slot

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.at_rest import Cut, Damage
    from ckpt_conformance.fault_injectors.payload import Place
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves
    from ckpt_conformance.subject.subject import Golden, Subject

    Fault = Callable[[Path], Damage]  # does damage to a directory

NEVER_WRONG = {Outcome.NEW, Outcome.LOST_STEP, *REFUSALS}
OLDER, NEWEST, LATER = 2, 4, 6
BLOCKED = 2.0  # seconds after which a load of a FIFO is left to CKC-SECU-006
LONG = 10.0  # seconds of a CPU in which a load does not read a TiB, and need not
GENERATORS = "rng"  # the component whose tensors do not take any bits
SEVERAL = 9  # bits
NO_OLDER = f"step {OLDER} has no file of its own that the save of step {NEWEST} leaves as it is"
MISSED: Slot[list[str]] = Slot("files whose absence lets a load fall back")


def damaged(subject: Subject, faults: Sequence[Fault]) -> list[tuple[Damage, Case]]:
    """Apply each fault to a copy of the whole directory."""
    golden = subject.golden()
    made: list[tuple[Damage, Case]] = []
    for at, fault in enumerate(faults):
        folder = subject.scratch / str(at)
        trees.materialize(golden.snapshot(NEWEST), folder)
        made.append((fault(folder), Case(folder)))
    return made


def outcomes(
    subject: Subject, cases: Sequence[Case], allowed: set[Outcome]
) -> list[tuple[Outcome, ProcessResult]]:
    """Resume from each directory; give the outcome of each, and how its child ended."""
    legal = subject.legal(subject.golden())
    judge = partial(subject.classify, newest=NEWEST, acknowledged=(OLDER, NEWEST))
    results = resume_each(subject, cases, lambda result: judge(result, legal) in allowed)
    return [(judge(result, legal), result) for result in results]


def never_served(subject: Subject, faults: Sequence[Fault]) -> None:
    """Apply faults one at a time to a whole directory; none may be served, and all are tried."""
    made = damaged(subject, faults)
    legal = subject.legal(subject.golden())
    resumed = outcomes(subject, [case for _, case in made], NEVER_WRONG)
    wrong = [
        (damage, outcome, result)
        for (damage, _), (outcome, result) in zip(made, resumed, strict=True)
        if outcome not in NEVER_WRONG
    ]
    if wrong:
        damage, outcome, result = wrong[0]
        step, _ = oracle.arrival(result)
        evidence = subject.evidence(result, legal.get(step or 0), outcome=str(outcome))
        raise Violation(
            f"{damage.fault} of {damage.file}: {outcome}",
            evidence={"first": {"damage": damage.to_json(), **evidence}},
            rate=(len(wrong), len(faults)),
        )


def newest_files(subject: Subject) -> list[str]:
    """Name the files that the save of the newest step made or changed, if they hold a byte."""
    golden = subject.golden()
    folder = golden.snapshot(NEWEST)
    return [name for name in payload.of_step(golden, NEWEST) if (folder / name).stat().st_size]


def payload_of(subject: Subject, step: int = NEWEST) -> list[Place]:
    """Find the payload of a step, in a directory that is whole."""
    golden = subject.golden()
    files = payload.of_step(golden, step)
    return payload.places(golden.snapshot(step), golden.payload_samples.get(step, []), files)


@check("CKC-CORR-001")
def test_damaged_payload_is_never_served(subject: Subject) -> None:
    """No bit of a tensor, and no number, can change on disk and be served.

    Why: torch writes CRCs and never verifies them, safetensors has none; one flipped bit resumed a
    run silently from weights that nobody saved (O01, O02).
    How: flip one bit in tensors of each component in turn; flip several, zero a block, swap halves
    and swap two tensors where any bits are legal; change numbers in pickles by one, and the
    step's own before and behind the payload; resume. Then load, flip a bit, and load again, all by
    one manager: what was whole once need not be so now.
    """
    never_served(subject, of_payload(subject))
    if subject.info.shape == "manager":
        never_served_after_a_load(subject)


def never_served_after_a_load(subject: Subject) -> None:
    """Raise Violation if a manager serves damage that came after its first load of the step."""
    places = without_copies(subject.golden().snapshot(NEWEST), payload_of(subject))
    place = max((one for one in places if one.component != GENERATORS), key=_length, default=None)
    if place is None:
        return
    flip = probe("flip", file=place.file, offset=place.offset + place.length // 2)
    first, second = _loaded_twice(subject, flip)
    if first is None or second in (None, first):
        return
    undamaged, again = _loaded_twice(subject)
    if undamaged == again:
        message = "damage that comes after the first load of a process is served to the second"
        raise Violation(message, evidence={"differs": oracle.differences(second, first, first)})


def _length(place: Place) -> int:
    return place.length


def _loaded_twice(subject: Subject, *between: AnyOp) -> tuple[Leaves | None, Leaves | None]:
    """Load the newest step into two jobs by one manager; None for what is not that step."""
    subject.materialize(subject.golden())
    ops = (Load(go_on=True), ReadLeaves(), *between, Fresh(), Load(go_on=True), ReadLeaves())
    result = subject.execute(*ops, seed=OTHER_SEED)
    steps = [load.step for load in result.all_of(LoadResult)]
    states = [
        oracle.held(whole(x.leaves or {}), subject.holds) for x in result.all_of(LeavesResult)
    ]
    found = [state if step == NEWEST else None for step, state in zip(steps, states, strict=False)]
    first, second, *_ = [*found, None, None]
    return first, second


def of_payload(subject: Subject) -> list[Fault]:
    """Return faults that a manager without any protection serves."""
    full = subject.budget == "full"
    rng = subject.rng  # one for all: each flip is to hit another bit
    places = without_copies(subject.golden().snapshot(NEWEST), payload_of(subject))
    rng.shuffle(places)
    in_turn = payload.in_turn(places)
    faults = [flipped(place, rng) for place in (in_turn * 60)[: 60 if full else 6]]
    any_bits = [place for place in in_turn if place.component != GENERATORS]
    faults += of_any_bits(subject, any_bits, rng)
    changed = numbers_of(subject)[: None if full else 4]
    changed += step_numbers_of(subject)[: None if full else 4]
    return faults + [partial(at_rest.change_number, place=place) for place in changed]


def flipped(place: Place, rng: random.Random) -> Fault:
    """Flip a bit; of a generator several, since torch's has bits that it does not use."""
    bits = SEVERAL if place.component == GENERATORS else 1
    return partial(at_rest.flip_bits, place=place, rng=rng, bits=bits)


def without_copies(folder: Path, places: Sequence[Place]) -> list[Place]:
    """Leave out tensors that a component holds twice: a load may take the other one."""
    texts = {file: (folder / file).read_bytes() for file in {place.file for place in places}}
    contents = [
        (place.component, texts[place.file][place.offset : place.offset + place.length])
        for place in places
    ]
    held = Counter(contents)
    alone = [place for place, key in zip(places, contents, strict=True) if held[key] == 1]
    return alone or list(places)


def of_any_bits(subject: Subject, places: Sequence[Place], rng: random.Random) -> list[Fault]:
    """Return faults that keep nothing of a tensor as it was; a generator would refuse such bits."""
    if not places:
        return []
    long = max(places, key=lambda place: place.length)
    faults: list[Fault] = [
        partial(at_rest.flip_bits, place=places[0], rng=rng, bits=SEVERAL),
        partial(at_rest.zero_block, place=long),
        partial(at_rest.swap_blocks, place=long),
    ]
    alike = [pair for pair in combinations(places, 2) if are_alike(*pair)]
    return faults + [
        partial(at_rest.swap_blocks, place=a, other=b) for a, b in subject.sample(alike, 1)
    ]


def are_alike(a: Place, b: Place) -> bool:
    """Whether two tensors of one file are of one component and size."""
    return (a.file, a.length, a.component) == (b.file, b.length, b.component)


def step_numbers_of(subject: Subject) -> list[Place]:
    """Find the newest step's own number before and behind its payload: in headers and trailers."""
    golden = subject.golden()
    old, new = (golden.payload_samples.get(step, []) for step in (OLDER, NEWEST))
    shared = {sample.bytes for sample in old} & {sample.bytes for sample in new}
    older, newer = (golden.snapshot(step) for step in (OLDER, NEWEST))
    return payload.steps_beside(
        older,
        newer,
        (OLDER, NEWEST),
        payload.find(older, [sample for sample in old if sample.bytes not in shared]),
        payload.find(newer, [sample for sample in new if sample.bytes not in shared]),
    )


def numbers_of(subject: Subject) -> list[Place]:
    """Find numbers of the newest step in its pickles: counters, positions, rates; one of a key."""
    golden = subject.golden()
    leaves = oracle.held(golden.at[NEWEST], subject.holds).values()
    keys = {path.rpartition(".")[2] for component in leaves for path in component}
    files = payload.of_step(golden, NEWEST)
    found = payload.numbers(golden.snapshot(NEWEST), keys, files)
    subject.rng.shuffle(found)
    return list({place.tensor: place for place in found}.values())


@check("CKC-CORR-002")
def test_a_file_cut_short_is_never_served(subject: Subject) -> None:
    """No file of a checkpoint can be cut short or emptied, and the rest be served as whole.

    Why: an empty record passed for a valid one, a torn file of generators was skipped with a note
    in the log, and the run went on with other random numbers (O04, M025, E06).
    How: cut each file of the newest step, small ones too, at 0, 1, half or len-1; resume.
    """
    names = newest_files(subject)
    full = subject.budget == "full"
    cuts: list[tuple[str, Cut]] = [(n, c) for n in names for c in at_rest.CUTS if full or c == "0"]
    if not full:
        cuts = subject.sample(cuts, 12)
        cuts += [(name, subject.rng.choice(at_rest.CUTS[1:])) for name in subject.sample(names, 3)]
    never_served(subject, [partial(at_rest.truncate, file=name, cut=cut) for name, cut in cuts])


def counterparts(golden: Golden) -> dict[str, str]:
    """Map files of the newest step to the files of the older one that play the same part."""
    older = payload.names(golden.snapshot(OLDER))
    newer = payload.of_step(golden, NEWEST)
    pairs: dict[str, str] = {}
    for name in newer:
        alike = [old for old in older if trees.pattern(old) == trees.pattern(name)]
        if len(alike) > 1:  # files that are numbered: 00.pt, 01.pt
            alike = [old for old in alike if PurePath(old).name == PurePath(name).name]
        same = [name] if name in older else alike
        if len(same) == 1 and _differ(golden, same[0], name):
            pairs[name] = same[0]
    return pairs


def _differ(golden: Golden, older: str, newer: str) -> bool:
    left = (golden.snapshot(OLDER) / older).read_bytes()
    return left != (golden.snapshot(NEWEST) / newer).read_bytes()


@check("CKC-CORR-003")
def test_a_file_of_another_step_is_never_served(subject: Subject) -> None:
    """Files of two steps, or two of one step, can't be exchanged and be served as a checkpoint.

    Why: a retried copy put a shard of an older step of the same layout in its place, and it was
    loaded without a word (MX3, A10).
    How: put a file of step 2 under its name in step 4, swap two files, copy one over another; put
    all of step 2 under the names of step 4, as a copied or renamed directory is.
    """
    golden = subject.golden()
    pairs = subject.sample(list(counterparts(golden).items()), 5)
    folder = golden.snapshot(OLDER)
    faults: list[Fault] = [
        partial(at_rest.replace_file, file=new, source=folder / old) for new, old in pairs
    ]
    data = {name: (golden.snapshot(NEWEST) / name).read_bytes() for name in newest_files(subject)}
    pair_up = [(a, b) for a in data for b in data if a < b and suffix(a) == suffix(b)]
    twins = [(a, b) for a, b in pair_up if data[a] != data[b]]
    for a, b in subject.sample(twins, 2):
        faults += [
            partial(at_rest.swap_files, file=a, other=b),
            partial(at_rest.duplicate, file=a, source=b),
        ]
    older, newer = (step_names.of_step(golden, step) for step in (OLDER, NEWEST))
    if older and [name.of(NEWEST) for name in older] == [name.path for name in newer]:
        moves = {name.path: name.of(NEWEST) for name in older}
        faults.append(partial(at_rest.copy_over, copies=moves, source=folder))
    if not faults:
        raise NotApplicable("no file of the older step plays the part of one of the newer step")
    never_served(subject, faults)


def suffix(name: str) -> str:
    """Return what follows the last dot."""
    return name.rpartition(".")[2]


@check("CKC-CORR-004")
def test_edited_metadata_is_never_served_wrong(subject: Subject) -> None:
    """Metadata that was edited, or is no longer text, is refused or changes nothing that is served.

    Why: a step number edited by hand, or a metadata file in another encoding, gave weights under
    the wrong step (M026, M039).
    How: change a number or a name in each JSON file of the newest step, break its UTF-8; resume.
    """
    rng = subject.rng
    names = at_rest.json_files(subject.golden().snapshot(NEWEST), newest_files(subject))
    faults: list[partial[Damage]] = []
    for name in subject.sample(names, 3):
        edit: partial[Damage] = partial(at_rest.edit_json, file=name, rng=rng)
        faults += [
            partial(edit, what="number", key_like="step"),
            *[partial(edit, what="number")] * (20 if subject.budget == "full" else 1),
            partial(edit, what="name"),
            partial(at_rest.break_utf8, file=name),
        ]
    if not faults:
        raise NotApplicable("no file of the checkpoint holds JSON")
    never_served(subject, [partial(if_it_can, fault) for fault in faults])


def if_it_can(fault: partial[Damage], folder: Path) -> Damage:
    """Apply a fault; where the file holds nothing of the kind, break it instead."""
    try:
        return fault(folder)
    except Unknown:
        return at_rest.break_utf8(folder, fault.keywords["file"])


@check("CKC-CORR-005")
def test_where_nothing_is_whole_the_load_refuses(subject: Subject) -> None:
    """If there are checkpoints and none of them is whole, the load refuses; it never starts cold.

    Why: an unreadable checkpoint was logged as not found; the run began at step 0 and wrote over
    what could have been repaired (B08).
    How: cut the payload of every step in half, and in a second try every file; resume. A file that
    holds several steps is cut to its first byte: half of it may be a whole one.
    """
    large = {place.file for step in (OLDER, NEWEST) for place in payload_of(subject, step)}
    cut = partial(cut_all, of_several=of_several(subject.golden()))
    made = damaged(subject, [partial(cut, only=large), partial(cut, only=None)])
    resumed = outcomes(subject, [case for _, case in made], set(REFUSALS))
    for what, (outcome, result) in zip(("its payload", "every file"), resumed, strict=True):
        if outcome not in REFUSALS:
            message = f"of every step {what} is cut in half, and the load does not refuse"
            raise Violation(f"{message}: {outcome}", evidence=subject.evidence(result))


def of_several(golden: Golden) -> set[str]:
    """Name the files that may hold both steps: of the older one, and changed by the newest.

    Where the newest step's own bytes are seen and the older one's are not, the file was replaced.
    """
    place = golden.snapshot(NEWEST)
    both = set(payload.names(golden.snapshot(OLDER))) & set(payload.of_step(golden, NEWEST))
    older, newest = (golden.payload_samples.get(step, ()) for step in (OLDER, NEWEST))
    shared = {sample.bytes for sample in older} & {sample.bytes for sample in newest}
    old, new = ([s for s in own if s.bytes not in shared] for own in (older, newest))
    return {
        name
        for name in both
        if payload.find(place, old, [name]) or not payload.find(place, new, [name])
    }


def cut_all(folder: Path, only: set[str] | None, of_several: set[str]) -> Damage:
    """Cut all files of some names in half, those of several steps to one byte; gives the last."""
    names = [n for n in payload.names(folder) if (folder / n).stat().st_size > 1]
    chosen = [n for n in names if only is None or n in only]
    return [at_rest.truncate(folder, n, "1" if n in of_several else "half") for n in chosen][-1]


@check("CKC-CORR-006")
def test_the_newest_whole_step_is_served_when_the_newest_is_damaged(subject: Subject) -> None:
    """With the newest step damaged a load falls back to the newest whole one.

    Why: a job could not restart until a person deleted the broken directory, although an older
    checkpoint beside it was whole (B07).
    How: cut a file of step 4, and its copies, in half, then by the last byte only; resume, expect
    step 2, or step 4 whole. Then cut one of step 4 and one of step 6; resume, expect step 2.
    """
    if not older_stays(subject.golden()):
        raise NotApplicable(NO_OLDER)
    file = max(payload_of(subject), key=lambda place: place.length).file
    cuts: list[Fault] = [
        partial(at_rest.truncate_all, file=file, cut=cut) for cut in ("half", "len-1")
    ]
    made = damaged(subject, cuts)
    legal = subject.legal(subject.golden())
    fine = {Outcome.NEW, Outcome.LOST_STEP}  # what is cut may not be needed
    resumed = outcomes(subject, [case for _, case in made], fine)
    for (damage, _), (_, result) in zip(made, resumed, strict=True):
        subject.judge(
            result,
            legal,
            fine,
            f"{damage.fault} of {damage.file}: the whole step {OLDER} is not served",
            newest=NEWEST,
            acknowledged=(OLDER, NEWEST),
            damage=damage.to_json(),
        )
    if subject.info.max_keep is None or subject.info.max_keep > 2:  # noqa: PLR2004  three steps
        _serves_the_third(subject)


@check("CKC-CORR-006")
def test_what_is_no_file_does_not_hide_an_older_step(subject: Subject) -> None:
    """With the newest step damaged a load falls back to the newest whole one.

    Why: what was no file any more ended the load with an error that its fallback did not expect
    (B07).
    How: put a directory, a socket and a FIFO in the place of a file of step 4, each alone, at the
    full budget of each file; resume, expect step 2. Only files count whose absence lets a load fall
    back. A load that waits for a FIFO is told by CKC-SECU-006, and an error of the operating system
    may reach the caller: it might not last (CKC-IOER-005).
    """
    if not older_stays(subject.golden()):
        raise NotApplicable(NO_OLDER)
    files = those_fallen_back_from(subject)
    if not files:
        raise NotApplicable(f"no file of step {NEWEST} is missed, and step {OLDER} served instead")
    pairs: Iterable[tuple[str, at_rest.NoFile]] = zip(cycle(files), at_rest.NO_FILES, strict=False)
    if subject.budget == "full":
        pairs = product(files, at_rest.NO_FILES)
    for file, kind in pairs:
        put = partial(at_rest.put_in_place, file=file, kind=kind)
        _serves_the_older(subject, put, f"a {kind} in the place of {file}", BLOCKED)


@check("CKC-CORR-006")
def test_a_file_that_grew_does_not_hide_an_older_step(subject: Subject) -> None:
    """With the newest step damaged a load falls back to the newest whole one.

    Why: a copy that was cut and then padded, or a write far behind the end, leaves a file of a TiB
    that takes no room. A load that reads all of it before it looks at the size does not end (B07).
    How: let the largest file of step 4 grow to a TiB by a hole, at the full budget each file, one
    at a time; resume, expect step 2 or 4 within ten seconds. Only files count whose absence
    lets a load fall back. An error of the operating system, or for want of memory, may
    reach the caller.
    """
    if not older_stays(subject.golden()):
        raise NotApplicable(NO_OLDER)
    files = list(those_fallen_back_from(subject))
    if not files:
        raise NotApplicable(f"no file of step {NEWEST} is missed, and step {OLDER} served instead")
    place = subject.golden().snapshot(NEWEST)
    files.sort(key=lambda file: (place / file).stat().st_size, reverse=True)
    for file in files if subject.budget == "full" else files[:1]:
        grow = partial(at_rest.grow, file=file)
        _serves_the_older(subject, grow, f"{file} grew by a hole", LONG)


@check("CKC-CORR-006")
def test_metadata_that_lacks_a_key_does_not_hide_an_older_step(subject: Subject) -> None:
    """With the newest step damaged a load falls back to the newest whole one.

    Why: a key that was not there ended the load with an error that its fallback did not expect
    (B07).
    How: rename each outermost key of each JSON file of step 4, one at a time; resume, expect step 2
    or 4. Only files count whose absence lets a load fall back. That what is served is right is
    asked by CKC-CORR-004.
    """
    if not older_stays(subject.golden()):
        raise NotApplicable(NO_OLDER)
    folder = subject.golden().snapshot(NEWEST)
    files = at_rest.json_files(folder, sorted(those_fallen_back_from(subject)))
    pairs = [(file, key) for file in files for key in at_rest.keys_of(folder / file)]
    if not pairs:
        raise NotApplicable("no file that a load can do without holds a JSON object")
    faults = [partial(at_rest.rename_key, file=file, key=key) for file, key in pairs]
    hiding = {Outcome.LOST_ALL, *REFUSALS}
    made = damaged(subject, faults)
    resumed = outcomes(subject, [case for _, case in made], set(Outcome) - hiding)
    wrong = [one for one in zip(made, resumed, strict=True) if one[1][0] in hiding]
    if wrong:
        (damage, _), (outcome, result) = wrong[0]
        message = f"{damage.file}: {damage.detail}: the whole step {OLDER} is not served: {outcome}"
        evidence = subject.evidence(result, damage=damage.to_json())
        raise Violation(message, evidence=evidence, rate=(len(wrong), len(pairs)))


def those_fallen_back_from(subject: Subject) -> list[str]:
    """Name files of the newest step without which a load serves the older one; in drawn order."""
    return subject.once(MISSED, lambda: _fallen_back_from(subject))


def _fallen_back_from(subject: Subject) -> list[str]:
    files = newest_files(subject)
    made = damaged(subject, [partial(at_rest.remove, file=file) for file in files])
    resumed = outcomes(subject, [case for _, case in made], {Outcome.LOST_STEP})
    found = [f for f, (end, _) in zip(files, resumed, strict=True) if end is Outcome.LOST_STEP]
    return subject.sample(found, len(found))


def _serves_the_older(subject: Subject, fault: Fault, what: str, deadline: float) -> None:
    """Raise Violation where damage to a file of the newest step hides the older step.

    A load that has not ended after `BLOCKED` seconds is not judged here.
    """
    subject.materialize(subject.golden())
    damage = fault(subject.root)
    try:
        result = subject.resume(deadline=deadline)
    finally:
        # No copy of the directory can be made with it.
        at_rest.remove_all(subject.root / damage.file)
    if deadline == BLOCKED and result.exit_kind is ExitKind.HANG:
        return
    if result.exit_kind is ExitKind.MEMORY or (result.error and result.error.disk):
        return
    subject.judge(
        result,
        subject.legal(subject.golden()),
        {Outcome.NEW, Outcome.LOST_STEP},
        f"{what}: the whole step {OLDER} is not served",
        newest=NEWEST,
        acknowledged=(OLDER, NEWEST),
        damage=damage.to_json(),
    )


def _serves_the_third(subject: Subject) -> None:
    """Raise Violation unless step 2 is served where steps 4 and 6 are damaged."""
    golden = subject.golden((OLDER, NEWEST, LATER))
    if not older_stays(golden):
        return
    subject.materialize(golden)
    files = [largest_of(golden, step) for step in (NEWEST, LATER)]
    for file in files:
        at_rest.truncate_all(subject.root, file, "half")
    subject.judge(
        subject.resume(),
        {OLDER: subject.loaded(subject.golden(), OLDER)},
        {Outcome.LOST_STEP},
        f"{' and '.join(files)} are cut in half: the whole step {OLDER} is not served",
        newest=LATER,
        acknowledged=golden.saves,
    )


def largest_of(golden: Golden, step: int) -> str:
    """Name the file that holds the longest payload of a step."""
    samples, files = golden.payload_samples[step], payload.of_step(golden, step)
    places = payload.places(golden.snapshot(step), samples, files)
    return max(places, key=lambda place: place.length).file


def older_stays(golden: Golden) -> bool:
    """Return whether the payload of the oldest step still lies there beside the newer ones."""
    oldest, *newer = golden.saves
    places = payload.places(golden.snapshot(oldest), golden.payload_samples[oldest])
    files = {place.file for place in places}
    return not any(files & set(payload.of_step(golden, step)) for step in newer)


@check("CKC-CORR-007")
def test_a_refused_load_leaves_the_job_as_it_was(subject: Subject) -> None:
    """A load that refuses has changed nothing of the live job.

    Why: a mismatch or damage was found after half of the weights had been overwritten; the caller
    caught the error and trained on with a mixture (I03, J05).
    How: damage the same file in every step, load into a live job, compare it with itself before.
    Where no file of the older step plays the same part, every file of it is damaged.
    """
    golden = subject.golden()
    parts = played_by(golden)
    ops: list[AnyOp] = []
    every = spoilt(subject, sorted(parts))
    flips, cuts = ([one for one in every if one[1] is cut] for cut in (False, True))
    tried = [*subject.sample(flips, 8), *subject.sample(cuts, 3)]  # a length may be seen at once
    for at, (name, cut) in enumerate(tried):
        folder = subject.scratch / str(at)
        trees.materialize(golden.snapshot(NEWEST), folder)
        hurt = {name, *parts[name]} & set(payload.names(folder))
        for file in sorted(hurt.union(*(at_rest.copies_of(folder, file) for file in hurt))):
            spoil(golden, folder, file, cut=cut, rng=subject.rng)
        ops += [Materialize(tree=str(folder)), Fresh(), Train(n=1)]
        ops += [ReadLeaves(), Load(go_on=True), ReadLeaves()]
    result = subject.execute(*ops, seed=OTHER_SEED)
    refused = 0
    for at, (name, _) in enumerate(tried):
        error = result.of(LoadResult, at).error
        if error is None:
            continue
        refused += 1
        before, after = (result.of(LeavesResult, 2 * at + i).leaves or {} for i in (0, 1))
        changed = oracle.differences(before, after, subject.holds)
        if changed:
            raise Violation(
                f"{name} is damaged: the refused load changed the job",
                evidence={"error": error.message, "changed": changed},
            )
    if not refused:
        silent = (test_a_file_cut_short_is_never_served, test_damaged_payload_is_never_served)
        reason = f"no damage is refused: {subject.tell(result)}"
        about = (*silent, test_where_nothing_is_whole_the_load_refuses)
        raise controls.blame(subject, reason, *about)


def played_by(golden: Golden) -> dict[str, list[str]]:
    """Map files of the newest step to those of the older one that have the same part, or to all."""
    pairs = counterparts(golden)
    older = [name for name in payload.of_step(golden, OLDER) if _holds_bytes(golden, OLDER, name)]
    newer = [name for name in payload.of_step(golden, NEWEST) if _holds_bytes(golden, NEWEST, name)]
    others = {name: [other for other in older if other != name] for name in newer}
    return others | {new: [old] for new, old in pairs.items()}


def _holds_bytes(golden: Golden, step: int, name: str) -> bool:
    return (golden.snapshot(step) / name).stat().st_size > 1


def spoilt(subject: Subject, names: Sequence[str]) -> list[tuple[str, bool]]:
    """List which files to spoil and how: cut in half, or a bit flipped in the last tensor."""
    with_payload = {place.file for place in payload_of(subject)}
    return [(name, cut) for name in names for cut in (False, True) if cut or name in with_payload]


def spoil(golden: Golden, folder: Path, name: str, *, cut: bool, rng: random.Random) -> None:
    """Cut a file in half, or flip a bit of its last tensor, so that all others are read before.

    A file of several steps is cut to one byte: half of it may hold a step that loads.
    """
    if cut:
        at_rest.truncate(folder, name, "1" if name in of_several(golden) else "half")
        return
    payload_samples = [one for samples in golden.payload_samples.values() for one in samples]
    at_rest.flip_bits(folder, payload.places(folder, payload_samples, [name])[-1], rng)
