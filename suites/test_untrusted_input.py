"""Untrusted input (SECU, VERS): a checkpoint is data; it runs no code and leads nowhere else."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Violation, control_failed
from ckpt_conformance.fault_injectors import at_rest, crafted
from ckpt_conformance.harness.messages import ExitKind, Fresh, Materialize, Probe, Run, RunResult
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject

RESUME = Run(resume=True, stop_after=0, go_on=True)
NEEDED: Slot[list[str]] = Slot("files without which the newest step is not given")
FIRE = "ckpt_conformance.fault_injectors.crafted:fire"
NEWEST = 4
GIB = 1 << 30
DEADLINE = 10.0  # seconds that a load of a crafted file may take
BLOCKED = 6.0  # seconds after which a load of a FIFO is taken to wait for ever


def _files(subject: Subject) -> list[str]:
    """Name the files that the newest step brought or changed."""
    golden = subject.golden()
    old, new = golden.snapshot(2), golden.snapshot(NEWEST)
    names = [path.relative_to(new).as_posix() for path in trees.files(new)]
    return [
        name
        for name in names
        if not (old / name).exists() or (old / name).read_bytes() != (new / name).read_bytes()
    ]


def _tree(subject: Subject, name: str) -> Path:
    """Return a copy of the directory after the newest save, to be crafted."""
    target = subject.scratch / name
    trees.copy(subject.golden().snapshot(NEWEST), target)
    return target


def _series(folders: Iterable[Path]) -> list[AnyOp]:
    """Return the operations that resume from each folder in turn."""
    ops: list[AnyOp] = []
    for folder in folders:
        ops += [Materialize(tree=str(folder)), Fresh(), RESUME]
    return ops


def _load_each(subject: Subject, folders: Sequence[Path]) -> list[ProcessResult]:
    """Resume from each folder in turn, in one child; give one result each.

    A child that dies takes the rest with it: those folders are then loaded alone, one child each.
    """
    process_result = subject.execute(*_series(folders), seed=OTHER_SEED)
    runs = process_result.all_of(RunResult)
    if process_result.exit_kind is not ExitKind.ENDED or len(runs) < len(folders):
        return [_alone(subject, folder) for folder in folders]
    return [replace(process_result, results=(run,)) for run in runs]


def _alone(subject: Subject, folder: Path) -> ProcessResult:
    trees.materialize(folder, subject.root)
    return subject.resume()


def _loads_newest(subject: Subject, result: ProcessResult) -> bool:
    """Return whether a load gave the newest step, bit for bit what an undamaged load gives."""
    step, state = oracle.arrival(result)
    wanted = subject.loaded(subject.golden(), NEWEST)
    return step == NEWEST and oracle.same(state, wanted, subject.holds)


def _needed(subject: Subject) -> list[str]:
    """Name the files without which, and their copies, the newest step is not given."""
    return subject.once(NEEDED, lambda: _find_needed(subject), subject.golden().folder)


def _find_needed(subject: Subject) -> list[str]:
    names = _files(subject)
    folders: list[Path] = []
    for at, name in enumerate(names):
        folders.append(_tree(subject, f"without-{at}"))
        _remove(folders[-1], name, *at_rest.copies_of(folders[-1], name))
    pairs = zip(names, _load_each(subject, folders), strict=True)
    return [name for name, result in pairs if not _loads_newest(subject, result)]


def _remove(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).unlink()


# -- code ----------------------------------------------------------------------------------------


@check("CKC-SECU-001")
def test_no_pickle_of_a_checkpoint_is_run(subject: Subject) -> None:
    """A canary in any pickled position of a checkpoint never runs.

    Why: a load with weights_only=False runs whatever the file says (L02); a refused safe load was
    tried again without safety (L03); metadata and byte items are pickles (MX11, VX14).
    How: put a pickle that creates a file into each pickled position in turn, and in place of each
    file (M025); load; look for the file.
    """
    places = subject.sample(crafted.spots(subject.golden().snapshot(NEWEST), _files(subject)), 12)
    markers = [subject.scratch / f"marker-{at}" for at in range(len(places))]
    folders = [_tree(subject, f"canary-{at}") for at in range(len(places))]
    for folder, place, marker in zip(folders, places, markers, strict=True):
        crafted.plant(folder, place, marker)
    _reseal(subject, folders)
    _canary_works(subject)
    _load_each(subject, folders)
    ran = [at for at, marker in enumerate(markers) if marker.exists()]
    if ran:
        at = ran[0]
        markers[at].unlink()
        _alone(subject, folders[at])
        if not markers[at].exists():
            raise Unknown("the canary ran in a series of loads and not in a load alone")
        raise Violation(
            "loading a checkpoint runs code that is in it",
            evidence={"file": places[at].file, "position": places[at].how},
            rate=(len(ran), len(places)),
        )


def _canary_works(subject: Subject) -> None:
    marker = subject.scratch / "control"
    subject.execute(Probe(probe=FIRE, args={"marker": str(marker)}))
    if not marker.exists():
        raise control_failed("the canary does not run where a pickle is run")


@check("CKC-VERS-001")
def test_a_checkpoint_holds_state_and_no_objects(subject: Subject) -> None:
    """Pickles of a checkpoint name no class of the training code, and no optimizer or module.

    Why: a pickled optimizer did not load in the next release of torch, which had one attribute more
    (M02); a moved class makes every older checkpoint unreadable.
    How: list what the pickles of a save import: only plain types, tensors, and DCP's own metadata.
    """
    golden = subject.golden()
    for name in _files(subject):
        asked = crafted.globals_of((golden.snapshot(NEWEST) / name).read_bytes())
        odd = sorted(entry for entry in asked if not _is_plain(entry))
        if odd:
            raise Violation(
                "a checkpoint holds instances of classes", evidence={"file": name, "classes": odd}
            )


PLAIN = {
    "torch",
    "numpy",
    "collections",
    "builtins",
    "__builtin__",
    "copyreg",
    "copy_reg",
    "_codecs",
    "pathlib",
    "datetime",
}
OBJECTS = ("torch.optim.", "torch.nn.modules.", "torch.utils.data.")


def _is_plain(entry: str) -> bool:
    return entry.partition(".")[0] in PLAIN and not entry.startswith(OBJECTS)


# -- names ---------------------------------------------------------------------------------------


def _reads_elsewhere(subject: Subject, crafts: dict[str, Path], message: str) -> None:
    """Raise Violation if a crafted directory, which lacks a needed file, still gives the step."""
    results = dict(zip(crafts, _load_each(subject, list(crafts.values())), strict=True))
    suspects = [what for what, result in results.items() if _loads_newest(subject, result)]
    bad = [what for what in suspects if _loads_newest(subject, _alone(subject, crafts[what]))]
    if bad:
        raise Violation(message, evidence={"crafted": bad[0]}, rate=(len(bad), len(crafts)))


@check("CKC-SECU-002")
def test_a_name_that_leads_outside_is_not_followed(subject: Subject) -> None:
    """A manifest, index or metadata that names a file outside of the checkpoint is not served.

    Why: an index with `../` made a loader read, and a server hand out, files of other users;
    weights were injected without a trace (L01).
    How: where files name another one, make them name a path above, put the good bytes there, and
    remove them here: whoever still serves the step has read outside. Checksums are renewed where
    the adapter can. Who refuses it even if the new name stays inside was not asked anything.
    """
    named = _named(subject)
    if not named:
        raise NotApplicable("no file of the checkpoint names another one")
    followed = _followed(subject, named)
    if not followed:
        first, by = next(iter(named.items()))
        raise NotApplicable(
            f"an edited {by[0]} is refused even where the new name of {first} stays inside, so a "
            f"refusal says nothing of the names{_how_to_ask(subject)}"
        )
    crafts: dict[str, Path] = {}
    outside: set[Path] = set()
    try:
        for at, (name, files) in enumerate(followed):
            folder = _tree(subject, f"names-{at}")
            target = crafted.lead_outside(folder, files, name)
            if not target.is_relative_to(folder):
                target = subject.root.parent / target.relative_to(folder.parent)
                outside.add(target)
            shutil.move(folder / name, target)
            crafts[f"{' and '.join(files)} name ../{target.name}"] = folder
        _reseal(subject, list(crafts.values()))
        _reads_elsewhere(subject, crafts, "a name that leads outside of the checkpoint is followed")
    finally:
        for path in outside:
            path.unlink(missing_ok=True)


def _how_to_ask(subject: Subject) -> str:
    if Capability.RESEAL in subject.info.capabilities:
        return ""
    return "; if it is a checksum that refuses, declare RESEAL"


def _named(subject: Subject) -> dict[str, list[str]]:
    """Give the files that name it of each file that a load needs; some at the quick budget."""
    by_name: dict[str, list[str]] = {}
    for file, other in crafted.names_in(subject.golden().snapshot(NEWEST), _files(subject)):
        by_name.setdefault(other, []).append(file)
    needed = [name for name in by_name if name in _needed(subject)]
    return {name: by_name[name] for name in subject.sample(needed, 4)}


def _followed(
    subject: Subject, named: Mapping[str, Sequence[str]]
) -> list[tuple[str, Sequence[str]]]:
    """Give (file, files that name it) of edits that are served where the new name stays inside.

    The file gets that name, or keeps its own and is named with `./` before it.

    Each file that names another one is edited alone, and all of them together.
    """
    edits = [
        (name, files)
        for name, by in named.items()
        for files in ([*([file] for file in by), by] if len(by) > 1 else [by])
    ]
    folders: list[Path] = []
    for at, (name, files) in enumerate(edits):
        for lead in (crafted.lead_inside, crafted.lead_here):  # a name may be a digest of the bytes
            folders.append(_tree(subject, f"{lead.__name__}-{at}"))
            lead(folders[-1], files, name)
    _reseal(subject, folders)
    served = [_loads_newest(subject, result) for result in _load_each(subject, folders)]
    pairs = zip(served[::2], served[1::2], strict=True)
    return [edit for edit, pair in zip(edits, pairs, strict=True) if any(pair)]


def _reseal(subject: Subject, folders: Sequence[Path]) -> None:
    """Renew the manager's own checksums in crafted folders, as a forger would, where that can be.

    A folder that is beyond it stays as it is.
    """
    if Capability.RESEAL in subject.info.capabilities:
        places = [str(folder) for folder in folders]
        result = subject.execute(probe("reseal", folders=places, step=NEWEST))
        if not result.went_well:
            raise Unknown(f"reseal did not come to its end: {subject.tell(result)}")


@check("CKC-SECU-003")
def test_a_link_that_leads_outside_is_not_followed(subject: Subject) -> None:
    """A symbolic link in place of a file of a checkpoint, leading out of it, is not served.

    Why: a link makes a loader read, and a copy or a mirror hand out, what lies anywhere (L01).
    How: move each needed file elsewhere and leave a link to it; whoever still serves the step has
    followed the link.
    """
    elsewhere = subject.scratch / "elsewhere"
    elsewhere.mkdir()
    crafts: dict[str, Path] = {}
    for at, name in enumerate(subject.sample(_needed(subject), 4)):
        folder = _tree(subject, f"link-{at}")
        _remove(folder, *at_rest.copies_of(folder, name))
        target = elsewhere / f"{at}-{(folder / name).name}"
        shutil.move(folder / name, target)
        (folder / name).symlink_to(target)
        crafts[f"{name} is a link"] = folder
    if not crafts:
        raise Unknown("no file is needed for the newest step")
    _reads_elsewhere(subject, crafts, "a link that leads outside of the checkpoint is followed")


# -- resources -----------------------------------------------------------------------------------


def _stays_small(
    subject: Subject, crafts: Mapping[str, Callable[[Path], None]], message: str
) -> None:
    """Raise Violation if a load of a crafted directory needs over 1 GiB, over 10 s, or dies."""
    if not crafts:
        raise NotApplicable("no file of the checkpoint has such a header")
    chosen = subject.sample(sorted(crafts), 5)
    folders: dict[str, Path] = {}
    for at, what in enumerate(chosen):
        folders[what] = _tree(subject, f"large-{at}")
        crafts[what](folders[what])
    _reseal(subject, list(folders.values()))
    ops = _series(folders.values())
    if _is_small(subject.execute(*ops, seed=OTHER_SEED, memory=GIB, deadline=DEADLINE)):
        return
    for what, folder in folders.items():
        trees.materialize(folder, subject.root)
        result = subject.resume(memory=GIB, deadline=DEADLINE)
        if not _is_small(result):
            grown = max(0, result.peak_kib - result.baseline_kib) >> 10
            evidence = subject.evidence(result, crafted=what, grown=f"{grown} MiB")
            raise Violation(message, evidence=evidence)


def _is_small(result: ProcessResult) -> bool:
    ended = result.exit_kind is ExitKind.ENDED
    return ended and result.peak_kib - result.baseline_kib <= GIB >> 10


@check("CKC-SECU-004")
def test_a_header_that_claims_too_much_is_refused_at_once(subject: Subject) -> None:
    """A header that claims 10**15 bytes costs no more than 1 GiB of memory and 10 seconds.

    Why: a reader that allocates what a header says is ended by the kernel, and with it the job that
    could have used the step before (L01).
    How: in each file raise lengths, sizes and shapes of headers, archives, pickles and JSON; in any
    other file the first number that may be the length of what follows.
    """
    golden = subject.golden()
    headers = crafted.claims(golden.snapshot(NEWEST), _files(subject), golden.snapshot(2))
    crafts = {str(header): partial(crafted.claim, header=header) for header in headers}
    _stays_small(subject, crafts, "a load allocates, or reads, what a header claims")


@check("CKC-SECU-005")
def test_a_record_that_inflates_is_refused_at_once(subject: Subject) -> None:
    """A compressed record that inflates to 2 GiB costs no more than 1 GiB of memory and 10 seconds.

    Why: formats that store their records uncompressed are read by libraries that inflate them all
    the same; two megabytes of file became more memory than the machine has (L01).
    How: replace a record of each archive by zeros that were deflated a thousandfold.
    """
    snapshot = subject.golden().snapshot(NEWEST)
    headers = crafted.claims(snapshot, _files(subject))
    archives = [header.file for header in headers if header.how == "record sizes"]
    crafts = {
        f"{record} of {file}": partial(crafted.bomb, file=file, record=record)
        for file in archives
        for record in ("/data.pkl", "/data/0")
        if crafted.has_record(snapshot / file, record)
    }
    _stays_small(subject, crafts, "a load inflates a record without limit")


@check("CKC-SECU-006")
def test_a_fifo_does_not_stop_the_load(subject: Subject) -> None:
    """A FIFO in place of a file of a checkpoint is refused; the load does not wait for a writer.

    Why: to open a FIFO waits until somebody writes: the restart hangs, and no watchdog knows why
    (L01).
    How: replace the largest needed file by a FIFO, and at the full budget each of them; load.
    """
    golden = subject.golden()
    needed = sorted(
        _needed(subject), key=lambda name: -(golden.snapshot(NEWEST) / name).stat().st_size
    )
    for name in needed if subject.budget == "full" else needed[:1]:
        subject.materialize(golden)
        path = subject.root / name
        _remove(subject.root, name, *at_rest.copies_of(subject.root, name))
        os.mkfifo(path)
        try:
            result = subject.resume(deadline=BLOCKED)
        finally:
            with suppress(OSError):
                path.unlink()
        if result.exit_kind is not ExitKind.ENDED:
            raise Violation("a load waits for a FIFO", evidence=subject.evidence(result, fifo=name))
