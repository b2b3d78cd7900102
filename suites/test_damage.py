"""Damaged bytes are never served as a checkpoint, and are never taken for an empty directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance import oracle
from ckpt_conformance.checks import check
from ckpt_conformance.fault_injectors import at_rest, payload, points
from ckpt_conformance.verdicts import REFUSALS, NotApplicable, Outcome, Unknown, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.fault_injectors.at_rest import Cut, Damage
    from ckpt_conformance.fault_injectors.payload import Place
    from ckpt_conformance.subject import Golden, Subject

    Fault = Callable[[], Damage]

NEVER_WRONG = {Outcome.NEW, Outcome.LOST_STEP, *REFUSALS}
SILENT = {Outcome.SILENT_WRONG, Outcome.COLD_START}
OLDER, NEWEST = 2, 4


def never_served(subject: Subject, faults: Sequence[Fault]) -> None:
    """Apply faults one at a time to a whole directory; none may be served, and all are tried."""
    golden = subject.golden()
    legal = subject.legal(golden)
    silent: list[dict[str, Any]] = []
    for fault in faults:
        subject.lay_out(golden)
        done = fault()
        ending = subject.resume()
        outcome = subject.classify(ending, legal, newest=NEWEST, acknowledged=(OLDER, NEWEST))
        if outcome not in NEVER_WRONG:
            step, _ = oracle.arrival(ending)
            told = subject.evidence(ending, legal.get(step or 0), outcome=str(outcome))
            silent.append({"damage": done.to_json(), **told})
    if silent:
        first = silent[0]
        message = f"{first['damage']['fault']} of {first['damage']['file']}: {first['outcome']}"
        rate = (len(silent), len(faults))
        raise Violation(message, evidence={"first": first}, rate=rate)


def newest_files(subject: Subject) -> list[str]:
    """Name the files that the save of the newest step made or changed, if they hold a byte."""
    golden = subject.golden()
    folder = golden.snapshot(NEWEST)
    return [name for name in payload.of_step(golden, NEWEST) if (folder / name).stat().st_size]


def payload_of(subject: Subject, step: int = NEWEST) -> list[Place]:
    """Find the payload of a step, in a directory that is whole."""
    golden = subject.golden()
    files = payload.of_step(golden, step)
    return payload.places(golden.snapshot(step), golden.needles.get(step, []), files)


@check("CKC-CORR-001")
def test_damaged_payload_is_never_served(subject: Subject) -> None:
    """No bit of a tensor can change on disk and be served.

    Why: torch writes CRCs and never verifies them, safetensors has none; one flipped bit resumed a
    run silently from weights that nobody saved (O01, O02).
    How: flip one bit, flip several, zero a block, swap blocks, where tensors lie; resume.
    """
    rng, root = subject.rng, subject.root
    found = payload_of(subject)
    tries = 60 if subject.budget == "full" else 3
    faults: list[Fault] = [
        lambda place=place: at_rest.flip_bits(root, place, rng)  # type: ignore[misc]
        for place in (rng.choice(found) for _ in range(tries))
    ]
    place, long = rng.choice(found), max(found, key=lambda each: each.length)
    faults += [
        lambda: at_rest.flip_bits(root, place, rng, bits=9),
        lambda: at_rest.zero_block(root, long),
        lambda: at_rest.swap_blocks(root, long),
    ]
    never_served(subject, faults)


@check("CKC-CORR-002")
def test_a_file_cut_short_is_never_served(subject: Subject) -> None:
    """No file of a checkpoint can be cut short or emptied and the rest be served as if it were whole.

    Why: an empty record passed for a valid one, a torn file of generators was skipped with a note
    in the log, and the run went on with other random numbers (O04, M025, E06).
    How: cut each file of the newest step, small ones too, at 0, 1, half or all but one byte; resume.
    """
    root = subject.root
    names = newest_files(subject)
    cuts: list[tuple[str, Cut]] = [(name, cut) for name in names for cut in at_rest.CUTS]
    if subject.budget == "quick":
        empty: list[tuple[str, Cut]] = [(name, "0") for name in subject.sample(names, 6)]
        cuts = empty + subject.sample([each for each in cuts if each[1] != "0"], 2)
    never_served(
        subject, [lambda n=name, c=cut: at_rest.truncate(root, n, c) for name, cut in cuts]
    )


def counterparts(golden: Golden) -> dict[str, str]:
    """Map files of the newest step to the files of the older one that play the same part."""
    older = payload.names(golden.snapshot(OLDER))
    newer = payload.of_step(golden, NEWEST)
    found: dict[str, str] = {}
    for name in newer:
        alike = [each for each in older if points.pattern(each) == points.pattern(name)]
        same = [name] if name in older else alike
        if len(same) == 1 and _differ(golden, same[0], name):
            found[name] = same[0]
    return found


def _differ(golden: Golden, older: str, newer: str) -> bool:
    left = (golden.snapshot(OLDER) / older).read_bytes()
    return left != (golden.snapshot(NEWEST) / newer).read_bytes()


@check("CKC-CORR-003")
def test_a_file_of_another_step_is_never_served(subject: Subject) -> None:
    """Files of two steps, or two files of one step, can't be exchanged and be served as one checkpoint.

    Why: a retried copy put a shard of an older step of the same layout in its place, and it was
    loaded without a word (MX3, A10).
    How: put a file of step 2 under its name in step 4, swap the two, or copy one file over another.
    """
    golden, root = subject.golden(), subject.root
    pairs = counterparts(golden)
    if not pairs:
        raise NotApplicable("no file of the older step plays the part of one of the newer step")
    folder = golden.snapshot(OLDER)
    faults: list[Fault] = [
        lambda new=new, old=old: at_rest.replace_file(root, new, folder / old)  # type: ignore[misc]
        for new, old in subject.sample(list(pairs.items()), 4)
    ]
    both = [
        (new, old)
        for new, old in pairs.items()
        if (golden.snapshot(NEWEST) / old).exists() and new != old
    ]
    faults += [lambda n=n, o=o: at_rest.swap_files(root, n, o) for n, o in subject.sample(both, 1)]  # type: ignore[misc]
    names = newest_files(subject)
    twins = [
        (a, b)
        for a in names
        for b in names
        if a != b and a.rpartition(".")[2] == b.rpartition(".")[2]
    ]
    faults += [lambda a=a, b=b: at_rest.duplicate(root, a, b) for a, b in subject.sample(twins, 1)]  # type: ignore[misc]
    never_served(subject, faults)


@check("CKC-CORR-004")
def test_edited_metadata_is_never_served_wrong(subject: Subject) -> None:
    """Metadata that was edited, or is no longer text, is refused or changes nothing that is served.

    Why: a step number edited by hand, or a metadata file in another encoding, gave weights under
    the wrong step (M026, M039).
    How: change a number or a name in each JSON file of the newest step, break its UTF-8; resume.
    """
    golden, root, rng = subject.golden(), subject.root, subject.rng
    found = at_rest.json_files(golden.snapshot(NEWEST), newest_files(subject))
    if not found:
        raise NotApplicable("no file of the checkpoint holds JSON")
    faults: list[Fault] = []
    for name in subject.sample(found, 2):
        faults += [
            lambda n=name: at_rest.edit_json(root, n, rng, "number", key_like="step"),  # type: ignore[misc]
            lambda n=name: at_rest.edit_json(root, n, rng, "number"),  # type: ignore[misc]
            lambda n=name: at_rest.edit_json(root, n, rng, "name"),  # type: ignore[misc]
            lambda n=name: at_rest.break_utf8(root, n),  # type: ignore[misc]
        ]
    never_served(subject, faults if subject.budget == "full" else faults[:5])


@check("CKC-CORR-005")
def test_where_nothing_is_whole_the_load_refuses(subject: Subject) -> None:
    """If there are checkpoints and none of them is whole, the load refuses; it never starts cold.

    Why: an unreadable checkpoint was logged as not found; the run began at step 0 and wrote over
    what could have been repaired (B08).
    How: cut the payload of every step in half, and in a second try every file; resume.
    """
    golden, root = subject.golden(), subject.root
    legal = subject.legal(golden)
    large = {place.file for step in (OLDER, NEWEST) for place in payload_of(subject, step)}
    for what in ("payload", "every file"):
        subject.lay_out(golden)
        present = [name for name in payload.names(root) if (root / name).stat().st_size > 1]
        for name in present if what == "every file" else sorted(large & set(present)):
            at_rest.truncate(root, name, "half")
        ending = subject.resume()
        message = f"{what} is cut in half, and the load does not refuse"
        outcome = subject.classify(ending, legal, newest=NEWEST, acknowledged=(OLDER, NEWEST))
        if outcome not in REFUSALS:
            raise Violation(f"{message}: {outcome}", evidence=subject.evidence(ending))


@check("CKC-CORR-006")
def test_the_newest_whole_step_is_served_when_the_newest_is_damaged(subject: Subject) -> None:
    """With the newest step damaged a load falls back to the newest whole one.

    Why: a job could not restart until a person deleted the broken directory, although an older
    checkpoint beside it was whole (B07).
    How: cut a file of step 4 in half, then by its last byte only; resume, expect step 2.
    """
    golden, root = subject.golden(), subject.root
    legal = subject.legal(golden)
    if not older_stays(golden):
        raise NotApplicable("only the newest step is on disk")
    file = max(payload_of(subject), key=lambda place: place.length).file
    cuts: tuple[Cut, ...] = ("half", "len-1")
    for cut in cuts:
        subject.lay_out(golden)
        done = at_rest.truncate(root, file, cut)
        subject.judge(
            subject.resume(),
            legal,
            {Outcome.LOST_STEP},
            f"{done.fault} of {file}: the whole step {OLDER} is not served",
            newest=NEWEST,
            acknowledged=(OLDER, NEWEST),
            damage=done.to_json(),
        )


def older_stays(golden: Golden) -> bool:
    """Tell whether the payload of the older step still lies there beside the newer one."""
    files = {place.file for place in payload.places(golden.snapshot(OLDER), golden.needles[OLDER])}
    return not files & set(payload.of_step(golden, NEWEST))


@check("CKC-CORR-007")
def test_a_refused_load_leaves_the_job_as_it_was(subject: Subject) -> None:
    """A load that refuses has changed nothing of the live job.

    Why: a mismatch or damage was found after half of the weights had been overwritten; the caller
    caught the error and trained on with a mixture (I03, J05).
    How: damage the same file in every step, load into a live job, compare it with itself before.
    """
    golden = subject.golden()
    pairs = counterparts(golden)
    refused = 0
    for name, cut in subject.sample(spoilt(subject, sorted(pairs)), 4):
        subject.lay_out(golden)
        for each in {name, pairs[name]}:
            spoil(subject, golden, each, cut=cut)
        ending = subject.life(
            {"op": "train", "n": 1},
            {"op": "leaves"},
            {"op": "load", "continue": True},
            {"op": "leaves"},
            seed=97,
        )
        if "error" not in ending.result("load"):
            continue
        refused += 1
        before, after = ending.result("leaves", 0)["value"], ending.result("leaves")["value"]
        differ = oracle.differences(before, after, subject.holds)
        if differ:
            told = subject.evidence(ending, changed=differ, file=name)
            raise Violation(
                f"{name} is damaged, the load refuses and has changed the job", evidence=told
            )
    if not refused:
        raise Unknown("no load was refused")


def spoilt(subject: Subject, names: Sequence[str]) -> list[tuple[str, bool]]:
    """List which files to spoil and how: cut in half, or a bit flipped in the last tensor."""
    with_payload = {place.file for place in payload_of(subject)}
    return [(name, cut) for name in names for cut in (False, True) if cut or name in with_payload]


def spoil(subject: Subject, golden: Golden, name: str, *, cut: bool) -> None:
    """Cut a file in half, or flip a bit of its last tensor, so that all others are loaded before."""
    if cut:
        at_rest.truncate(subject.root, name, "half")
        return
    needles = [each for found in golden.needles.values() for each in found]
    at_rest.flip_bits(subject.root, payload.places(subject.root, needles, [name])[-1], subject.rng)
