"""List what may be checkpoints, one by one, from names alone: no file is opened for it.

What a name does not tell (a `.bin` may be anything) is found out where the checkpoint is judged. So
a bucket of ten million files can be listed in the memory of its largest folder.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckpt_conformance.fsck.layouts import layouts, leftovers, linked, one_file, step_names
from ckpt_conformance.fsck.layouts import names as written
from ckpt_conformance.fsck.layouts.layouts import Candidate, Format, Overview, Part
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.places import changed, folder_at
from ckpt_conformance.fsck.source.remote import Url
from ckpt_conformance.fsck.source.source import DEEPEST, EntryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder

T = TypeVar("T")

_TRIES = 3  # to look at a folder from which names go meanwhile
_AT_ONCE = 16  # folders that are listed at the same time
_UNSUMMED = ".safetensors"  # of these the header alone is read
_STRUCTURE = (".metadata", ".json")  # these are read as a whole, whatever is asked for


class Sort(StrEnum):
    """How the files of a checkpoint are known."""

    FOLDER = "folder"  # all below a folder
    FILES = "files"  # files of one step, or of one set, among others
    PER_RANK = "per-rank"  # those of a step of the reference manager
    LINK = "link"  # a step that lies elsewhere, or nowhere
    FILE = "file"  # the file that the user named
    UNCOMMITTED = "uncommitted"  # a folder among steps, in which nothing was saved
    DEEP = "deep"  # a folder of a run that is too deep to be looked into
    DENIED = "denied"  # a folder of a run that this user may not read


@dataclass(frozen=True)
class Weight:
    """How much there is of some files.

    Attributes:
        files: how many.
        size: their bytes.
        summed: bytes that are held against digests and CRCs.
        structure: bytes of files that are read as a whole even if no payload is read.

    """

    files: int = 0
    size: int = 0
    summed: int = 0
    structure: int = 0

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]]) -> Weight:
        """Weigh files, each a name and its bytes."""
        files = size = summed = structure = 0
        for name, length in sizes:
            files += 1
            size += length
            if name.endswith(_STRUCTURE):
                structure += length
            elif not name.endswith(_UNSUMMED):
                summed += length
        return cls(files, size, summed, structure)


@dataclass(frozen=True)
class Found:
    """What may be one checkpoint, by the names of a listing.

    Attributes:
        base: its folder below the place that was listed: empty, or with a slash at its end.
        names: its files, relative to the folder; none for `FOLDER`, which is listed again; for
            `UNCOMMITTED` the format of the others.
        step: what its name says.
        depth: how many levels below the folder belong to it.
        links: links among the names that are not followed, and why.
        is_sure: whether names alone show that it is a checkpoint.
        changed: when it was changed, as a store says it; None where it is asked for on the disk.

    """

    sort: Sort
    base: str
    names: tuple[str, ...] = ()
    step: int | None = None
    depth: int = DEEPEST
    links: tuple[tuple[str, str], ...] = ()
    is_sure: bool = True
    changed: float | None = None
    weight: Weight = Weight()

    @property
    def is_folder(self) -> bool:
        """Whether a folder and what is below it is the checkpoint."""
        return self.sort in (Sort.FOLDER, Sort.UNCOMMITTED)

    @property
    def may_hide_newer(self) -> bool:
        """Whether it is a folder of a run that was not looked into, and no step's.

        What the system keeps for itself (`lost+found`, names with a dot) is none.
        """
        is_own = self.sort is Sort.DENIED and self.step is None
        return is_own and not self.names[0].startswith((".", "lost+found"))

    @property
    def parent(self) -> str:
        """The folder that it is in: empty, or with a slash at its end."""
        if not self.is_folder:
            return self.base
        above, slash, _ = self.base.rstrip("/").rpartition("/")
        return above + slash

    def folders(self, top: Where) -> list[str]:
        """List the folders in it, less work in progress; raises OSError."""
        if not self.is_folder:
            return []
        below = folder_at(top).inner(self.base).walk(self.depth)
        is_kept = ((name, kind) for name, kind in below if not leftovers.is_below(name))
        return [name for name, kind in is_kept if kind is EntryKind.FOLDER]

    @property
    def name(self) -> str:
        """Its name below the place that was listed, for people and as its id."""
        if self.sort in (Sort.FOLDER, Sort.UNCOMMITTED):
            return self.base.rstrip("/") or "."
        return self.base + self.names[0]


class _Look(NamedTuple):
    """What was seen of a folder first: its names, links that lead out, folders in it."""

    entries: dict[str, EntryKind]
    links: dict[str, str]
    inner: list[str]
    is_one: bool


class Listing:
    """Lists the checkpoints below a folder.

    Attributes:
        leftovers: names of work in progress, as far as the listing has come.

    """

    def __init__(self, path: Where, *, is_weighed: bool = False) -> None:
        """Take a folder; `is_weighed` asks for the size of each file, too."""
        self.leftovers: list[str] = []
        self._folder = folder_at(path)
        self._is_weighed = is_weighed
        self._sure = 0
        self._formats: dict[str, Format] = {}  # of folders of one library that were just found
        self._unsure: list[Found] = []  # since the last sure one

    def __iter__(self) -> Iterator[Found]:
        """Yield what may be checkpoints, folder by folder; raises OSError and Malformed."""
        return self._look("", 0)

    def _look(self, base: str, level: int) -> Iterator[Found]:
        """Look into one folder of a run, or take it as a checkpoint."""
        try:
            looked = self._while_there(base, lambda: self._first_look(base))
        except PermissionError:
            if not base:
                raise
            above, _, name = base.rstrip("/").rpartition("/")
            step = step_names.step_of(name) if layouts.OF_A_STEP.match(name) else None
            denied = Found(Sort.DENIED, f"{above}/" if above else "", (name,), step)
            yield from self._take(denied)
            return
        if looked is None:
            return
        entries, links, inner, is_one = looked
        is_signed = written.is_signed(entries)
        if is_one:
            yield from self._take(self._whole(base))
            return
        before = self._sure, len(self._unsure)
        yield from self._linked_steps(base, entries)
        if level < DEEPEST:
            yield from self._inner(base, inner, level)
        else:
            for name in inner:
                yield from self._take(Found(Sort.DEEP, base, (name,)))
        if is_signed:
            yield from self._take(self._whole(base, depth=1))
            return
        yield from self._flat(base, entries, links, before)

    def _first_look(self, base: str) -> _Look:
        """List a folder, and find out whether it is one checkpoint."""
        entries, links = self._entries(base)
        inner = [name for name, kind in entries.items() if kind is EntryKind.FOLDER]
        names = [name for name in entries if not layouts.is_beside(name)]
        is_one = layouts.is_one(self._folder, base, names, inner)
        return _Look(entries, links, inner, is_one)

    def _while_there(self, base: str, look: Callable[[], T]) -> T | None:
        """Look again where something below a folder went meanwhile; None where it went itself.

        A job may rotate. Raises FileNotFoundError for the folder that the user named.
        """
        for left in reversed(range(_TRIES)):
            before = len(self.leftovers)
            try:
                return look()
            except (FileNotFoundError, NotADirectoryError):
                where = self._folder.root / base
                is_there = isinstance(where, Path) and where.is_dir()
                if not left or not (is_there or base):
                    raise
                del self.leftovers[before:]
                if not is_there:
                    return None
        return None

    def _inner(self, base: str, inner: Sequence[str], level: int) -> Iterator[Found]:
        """Look into the folders of a run; among a library's steps one without a save is told."""
        barren: dict[str, list[Found]] = {}  # with what may be in each
        heads: dict[str, Format] = {}
        for at, name in enumerate(inner):
            if at % _AT_ONCE == 0:
                self._folder.prefetch([base + one for one in inner[at : at + _AT_ONCE]])
            before, may_be = self._sure, len(self._unsure)
            yield from self._look(own := f"{base}{name}/", level + 1)
            if self._sure == before:
                barren[name] = self._unsure[may_be:]
            head = layouts.head_of_step(name)
            if (form := self._formats.pop(own, None)) is not None and head is not None:
                heads[head] = form if form is not Format.EMPTY else heads.get(head, form)
        for name, found in barren.items():
            head = layouts.head_of_step(name)
            form = heads.get(head) if head is not None else None
            if form is not None:
                yield from self._take(self._uncommitted(base, name, form, found))

    def _uncommitted(
        self, base: str, name: str, form: Format, found: Sequence[Found]
    ) -> Found | None:
        """Take a folder among steps; None where something is in it, or it is none of them."""
        own = f"{base}{name}/"
        if form is Format.EMPTY:
            is_step = layouts.OF_A_STEP.match(name)
            if not is_step or not self._while_there(own, lambda: self._is_empty(own, found)):
                return None
        time = _changed(self._folder.inner(own).root)
        return Found(Sort.UNCOMMITTED, own, (str(form),), step_names.step_of(name), changed=time)

    def _is_empty(self, own: str, found: Iterable[Found]) -> bool:
        """Return whether no file of a folder holds a state; samples are meant to be there."""
        below = files_below(self._folder.inner(own), DEEPEST)
        files = [name for name in below if not layouts.is_beside(name)]
        are_samples = any(map(layouts.is_picture, files)) and all(
            layouts.is_picture(file) or layouts.is_text(file) for file in files
        )
        return not are_samples and not self._are_any(found)

    def _entries(self, base: str) -> tuple[dict[str, EntryKind], dict[str, str]]:
        """List a folder: the kind of each name, less leftovers; and its links that lead out."""
        kept: dict[str, EntryKind] = {}
        links: dict[str, str] = {}
        for name, kind in self._folder.listing(base).items():
            if leftovers.is_one(name):
                self.leftovers.append(base + name)
                continue
            if kind is EntryKind.LINK and (why := self._folder.link_problem(base + name)):
                links[name] = why
            kept[name] = kind
        return kept, links

    def _take(self, found: Found | None) -> Iterator[Found]:
        """Yield what may be a checkpoint, and remember that there is one."""
        if found is None:
            return
        if found.is_sure:
            self._sure += 1
            self._unsure.clear()
        else:
            self._unsure.append(found)
        yield found

    def _is_run(self, before: tuple[int, int]) -> bool:
        """Return whether any checkpoint was found since; files are read where names do not say."""
        sure, unsure = before
        if self._sure > sure:
            return True
        return self._are_any(self._unsure[unsure:])

    def _are_any(self, found: Iterable[Found]) -> bool:
        """Return whether any of what may be a checkpoint is one: files are read for that."""
        return any(resolved(self._folder, one).candidates for one in found)

    def _linked_steps(self, base: str, entries: Mapping[str, EntryKind]) -> Iterator[Found]:
        """Take links that hide a step as checkpoints, so that a finding explains each."""
        for name, kind in entries.items():
            if self._is_linked_step(base, name, kind):
                step = layouts.step_of_link(self._folder, base, name)
                yield from self._take(Found(Sort.LINK, base, (name,), step))

    def _is_linked_step(self, base: str, name: str, kind: EntryKind) -> bool:
        """Return whether a link hides a step."""
        return kind is EntryKind.LINK and layouts.hides_a_step(self._folder, base, name)

    def _whole(self, base: str, depth: int = DEEPEST) -> Found | None:
        """Take what is below a folder, so many levels, as one checkpoint; None for no data."""
        return self._while_there(base, lambda: self._walked(base, depth))

    def _walked(self, base: str, depth: int) -> Found | None:
        inner = self._folder.inner(base)
        names: list[str] = []
        is_sure = may_be = False
        for name, kind in inner.walk(depth):
            if leftovers.is_below(name):
                self.leftovers.append(base + name)
            elif layouts.is_file(kind) and not layouts.is_beside(name):
                is_sure = is_sure or layouts.is_data(name)
                may_be = may_be or layouts.may_be_data(name)
                names.append(name)
        if not (is_sure or may_be):
            return None
        form = next(filter(None, map(layouts.form_by_name, names)), None)
        if form is not None or is_sure:
            self._formats[base] = form or Format.EMPTY
        return Found(
            Sort.FOLDER,
            base,
            step=step_names.step_of(inner.root.resolve().name),
            depth=depth,
            is_sure=is_sure,
            changed=_changed(inner.root),
            weight=self._weight(inner, names),
        )

    def _flat(
        self,
        base: str,
        entries: Mapping[str, EntryKind],
        links: Mapping[str, str],
        before: tuple[int, int],
    ) -> Iterator[Found]:
        """Take the manifests and the loose files of a run's folder.

        Files that share no step with any other are one checkpoint, if there is nothing beside them;
        of names that differ in a date or a metric alone each is one, and so is each of Lightning's.
        """
        names = [
            name
            for name, kind in entries.items()
            if kind is not EntryKind.FOLDER and not self._is_linked_step(base, name, kind)
        ]
        steps, rest = layouts.per_rank_steps(names)
        for digits, own in steps:
            found = self._some(Sort.PER_RANK, base, own, int(digits), links)
            yield from self._take(found)
        self._folder.prefetch([base])  # what is below may have displaced it: no file is asked for
        loose = [name for name in rest if layouts.may_be_loose(name)]
        others = [
            name
            for name in rest
            if not layouts.may_be_loose(name)
            and entries[name] is EntryKind.FILE
            and (layouts.is_beside(name) or not layouts.is_text(name))
        ]
        groups, alone = step_names.together(loose)
        for group in groups:
            step = step_names.step_of(group[0])
            yield from self._take(self._some(Sort.FILES, base, group, step, links))
        is_run = len(alone) > 1 and self._is_run(before)
        if not is_run and alone:
            alone, others = [*alone, *others], []
        step = None if is_run or groups else self._step_above(base)
        for group in layouts.sets(alone) if is_run else filter(None, [alone]):
            yield from self._take(self._some(Sort.FILES, base, group, step, links))
        if others:  # no checkpoint, unless one of them runs code
            yield from self._take(self._some(Sort.FILES, base, others, None, links))

    def _step_above(self, base: str) -> int | None:
        """Return the step that a folder's own name says, for files whose names say none."""
        return step_names.step_of_folder(self._folder.inner(base).root.resolve().name)

    def _some(
        self,
        sort: Sort,
        base: str,
        names: Sequence[str],
        step: int | None,
        links: Mapping[str, str],
    ) -> Found:
        """Take some files of a folder as one checkpoint."""
        root = self._folder.inner(base).root
        is_named = step_names.step_of(names[0]) is not None
        is_root = sort is Sort.FILES and len(names) > 1 and not is_named
        inner = self._folder.inner(base) if self._is_weighed else self._folder
        return Found(
            sort,
            base,
            tuple(names),
            step,
            links=tuple((name, links[name]) for name in names if name in links),
            is_sure=sort is Sort.PER_RANK or any(map(layouts.is_loose, names)),
            changed=_changed(root if is_root else root / names[0]),
            weight=self._weight(inner, names),
        )

    def _weight(self, folder: Folder, names: Sequence[str]) -> Weight:
        if not self._is_weighed:
            return Weight(len(names))
        return Weight.of(zip(names, folder.sizes(names), strict=True))


def files_below(folder: Folder, depth: int) -> Iterator[str]:
    """Yield the files of a checkpoint's folder, less work in progress; those behind links, too."""
    links: list[str] = []
    for name, kind in folder.walk(depth):
        if layouts.is_file(kind) and not leftovers.is_below(name):
            yield name
            if kind is EntryKind.LINK:
                links.append(name)
    yield from (name for name, kind in linked.below(folder, links, depth) if layouts.is_file(kind))


def _changed(where: Where) -> float | None:
    """Return when something was changed where a listing said it."""
    return changed(where) if isinstance(where, Url) else None


def file_found(path: Where, *, is_weighed: bool) -> Found:
    """Take the file that the user named."""
    size = 0
    with contextlib.suppress(OSError, Malformed):  # who judges it gets the same error
        size = folder_at(path.parent).size(path.name) if is_weighed else 0
    weight = Weight.of([(path.name, size)])
    return Found(Sort.FILE, "", (path.name,), step_names.step_of(path.name), weight=weight)


def resolved(folder: Folder, found: Found) -> Overview:
    """Find out what was found: one candidate with its parts, or none where there is no data.

    Raises OSError and Malformed where it cannot be listed any more.
    """
    overview = Overview(links={found.base + name: why for name, why in found.links})
    root = folder.inner(found.base).root
    match found.sort:
        case Sort.FOLDER:
            layouts.take_folder(folder, found.base, overview, found.depth)
        case Sort.UNCOMMITTED:
            layouts.take_uncommitted(folder, found.base, Format(found.names[0]), overview)
        case Sort.FILES:
            layouts.take_loose(folder, found.base, found.names, found.step, overview)
        case Sort.PER_RANK:
            layouts.take_per_rank(folder.inner(found.base), found.names, overview)
        case Sort.LINK:
            (name,) = found.names
            part = Part(Format.LINK, "", name)
            overview.candidates.append(Candidate(root / name, root, "link", found.step, [part]))
        case Sort.DEEP | Sort.DENIED:
            (name,) = found.names
            part = Part(Format(found.sort), "", name)
            overview.candidates.append(Candidate(root / name, root, "unknown", found.step, [part]))
        case Sort.FILE:
            return one_file.find_file(root / found.names[0])
    return overview


def find_below(path: Where) -> Overview:
    """Find the checkpoints at a folder: that of a checkpoint, or of a run."""
    folder, listing, whole = folder_at(path), Listing(path), Overview()
    for found in listing:
        overview = resolved(folder, found)
        whole.candidates += overview.candidates
        whole.links |= overview.links
    whole.leftovers = listing.leftovers
    return whole
