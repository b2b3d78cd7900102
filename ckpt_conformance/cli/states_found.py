"""`explore --cache` and `--on`: evidence of batches that needs no recovery here.

A batch is kept under a digest of all that its recoveries depend on; so is a recording, for most
managers write other bytes each time, and with another recording every state is another one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.cli.recordings import SCRIPT
from ckpt_conformance.cli.scripts import words_of
from ckpt_conformance.contract import trees, written
from ckpt_conformance.crash.explore.evidence import Evidence, from_json, to_json
from ckpt_conformance.plugin import depends
from ckpt_conformance.plugin.openings import Seen
from ckpt_conformance.plugin.options import CheckOptions
from ckpt_conformance.report import environment
from ckpt_conformance.work.cache import KeyParts, key_of
from ckpt_conformance.work.identity import SUITE
from ckpt_conformance.work.session_variables import is_of_a_session, named_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckpt_conformance.cli.explore import Order
    from ckpt_conformance.cli.recordings import Kit
    from ckpt_conformance.cli.remote.states_client import Spread
    from ckpt_conformance.crash.explore.evidence import Basis
    from ckpt_conformance.crash.script.command import Script
    from ckpt_conformance.work.cache import Cache
    from ckpt_conformance.work.identity import Identity

CRASH = "ckpt_conformance.crash"
EXPLORE = ("engine", "evidence", "kept", "recovery", "workloads")
# What recovers from a state: what lays it out and judges it, and the server that forks children.
OF_ADAPTER = (
    *(f"{CRASH}.explore.{name}" for name in EXPLORE),
    *(f"ckpt_conformance.harness.{name}" for name in ("server", "child", "facts", "probes")),
)
OF_SCRIPT = tuple(f"{CRASH}.script.{name}" for name in ("explore", "kept", "rehearsal", "worker"))
RECORDINGS = "recordings"  # a folder in that of a cache
Machine = KeyParts


class KeptRecording(msgspec.Struct, frozen=True):
    """A folder of recordings in a cache, and the digest of each file: a damaged one is absent."""

    folder: str
    files: dict[str, str]


@dataclass
class Found:
    """Finds evidence in a cache, then on a cluster, and keeps in the cache what is new."""

    cached: Cached | None
    kit: Kit
    spread: Spread | None = None
    known: set[str] = field(default_factory=set[str])  # batches that were in the cache
    seen: Callable[[], Seen] = Seen  # what recoveries here depend on, of those made so far
    not_kept: Counter[str] = field(default_factory=Counter[str])  # batches, by the reason

    def elsewhere(
        self, basis: Basis, batches: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[str, Evidence]]:
        """Yield the evidence of batches that are known, and on a cluster of all others."""
        left = dict(batches)
        for name, contents in batches.items():
            evidence = self._known(basis, contents)
            if evidence is not None:
                del left[name]
                self.known.add(name)
                yield name, evidence
        if self.spread is None:
            return
        for name, evidence, seen, worker in self.spread.find(basis, left):
            machine = self.spread.machines().get(worker)
            if machine is not None:
                self._keep(basis, machine, left[name], evidence, seen)
            yield name, evidence

    def keep(self, basis: Basis, contents: Sequence[str], evidence: Evidence) -> None:
        """Keep evidence that was found here."""
        if self.cached:
            self._keep(basis, self.cached.machine, contents, evidence, self.seen())

    def _keep(
        self,
        basis: Basis,
        machine: Machine,
        contents: Sequence[str],
        evidence: Evidence,
        seen: Seen,
    ) -> None:
        if seen.why_not:
            self.not_kept[seen.why_not] += 1
        elif self.cached:
            inputs = self._inputs(basis, contents)
            self.cached.put(inputs, machine, contents, evidence, seen.opened)

    def _known(self, basis: Basis, contents: Sequence[str]) -> Evidence | None:
        if self.cached is None:
            return None
        machines = self.spread.machines().values() if self.spread else [self.cached.machine]
        different = {key_of(machine): machine for machine in machines}
        inputs = self._inputs(basis, contents)
        known = (self.cached.get(inputs, machine, contents) for machine in different.values())
        return next((evidence for evidence in known if evidence is not None), None)

    def _inputs(self, basis: Basis, contents: Sequence[str]) -> KeyParts:
        """Return what a batch depends on, beside the code and the machine."""
        return {
            "states": basis.digest,
            "contents": key_of({"contents": list(contents)}),
            "recording": self._recording_of(basis.workload),
        }

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        return {}

    def _recording_of(self, workload: str) -> str:
        if workload not in self._digests:
            folder = self.kit.folder / workload
            there = folder if folder.is_dir() else self.kit.folder / SCRIPT
            self._digests[workload] = key_of(written.digests(there))
        return self._digests[workload]


@dataclass(frozen=True)
class Cached:
    """A cache, and what everything in it depends on that is explored here."""

    cache: Cache
    explored: KeyParts  # what it is, and the digest of its code
    machine: Machine

    @classmethod
    def open(cls, order: Order, cache: Cache) -> Cached:
        """Read the code of what is explored, of what explores it, and the machine."""
        scratch = environment.filesystem_type(Path(tempfile.gettempdir()))
        asked = {"explored": list(order.what), "options": order.of_command}
        adapters = () if order.script else tuple(order.what)
        around = OF_SCRIPT if order.script else OF_ADAPTER
        inputs = depends.inputs(CheckOptions(adapters=adapters), scratch, around)
        machine = dict(inputs.machine)
        if order.script:
            code = inputs.tree.digest(inputs.tree.closure(around))
            known = {"sources": code, **_start_of(order.script)}
        else:
            known = replace(inputs, machine={}).of_other(order.what[0], {})
        known["depends"] = _depends_of(order.depends)
        workloads = list(order.asked.workloads)
        return cls(cache, {**asked, **known, "workloads": workloads}, machine)

    def get(
        self, inputs: Mapping[str, Any], machine: Machine, contents: Sequence[str]
    ) -> Evidence | None:
        """Return the evidence that was kept of a batch, if it is there and whole."""
        content = self.cache.get(key_of(self._all(inputs, machine)))
        if content is None:
            return None
        with contextlib.suppress(ValueError):
            evidence = from_json(content, Evidence)
            return evidence if _is_sure(evidence, contents) else None
        return None

    def put(
        self,
        inputs: Mapping[str, Any],
        machine: Machine,
        contents: Sequence[str],
        evidence: Evidence,
        opened: Mapping[str, str],
    ) -> None:
        """Keep evidence, with what was opened for it.

        What is in doubt may be the machine's doing, and is not kept.
        """
        if _is_sure(evidence, contents):
            self.cache.put(self._all(inputs, machine), to_json(evidence), opened)

    def _all(self, inputs: Mapping[str, Any], machine: Machine) -> KeyParts:
        own = {name: value for name, value in self.explored.items() if name != "workloads"}
        return {**inputs, **own, "machine": key_of(machine)}

    # -- recordings ------------------------------------------------------------------------------

    def recording(self) -> Path | None:
        """Return the folder of recordings that is kept of what is explored, if it is whole."""
        content = self.cache.get(key_of(self._of_recording()))
        if content is None:
            return None
        with contextlib.suppress(ValueError, OSError):
            entry = msgspec.json.decode(content, type=KeptRecording)
            folder = self.cache.folder / RECORDINGS / entry.folder
            if entry.files and written.digests(folder) == entry.files:
                return folder
        return None

    def keep_recording(self, made: Path, seen: Seen) -> Path | None:
        """Copy a folder of recordings into the cache; return its place, None where that fails.

        None, too, where it depends on what cannot be held against what is there later.
        """
        if seen.why_not or self.cache.is_read_only:
            return None
        place = self.cache.folder / RECORDINGS
        name = secrets.token_hex(8)
        partial = place / f"{name}.tmp"
        try:
            place.mkdir(exist_ok=True)
            trees.copy(made, partial)
            partial.replace(place / name)
        except OSError:  # a disk that is full: the recording itself is there
            shutil.rmtree(partial, ignore_errors=True)
            return None
        entry = KeptRecording(name, written.digests(place / name))
        self.cache.put(self._of_recording(), msgspec.json.encode(entry), seen.opened)
        return place / name

    def _of_recording(self) -> KeyParts:
        return {"recorded": True, **self.explored, "machine": key_of(self.machine)}


def _is_sure(evidence: Evidence, contents: Sequence[str]) -> bool:
    """Return whether every state of a batch was recovered from, without a doubt."""
    is_whole = all(content in evidence.recoveries for content in contents)
    return is_whole and not (evidence.doubts or evidence.failed or evidence.not_applicable)


def _depends_of(identity: Identity) -> KeyParts:
    """Return what a recording is refused for, so none that is kept here ever is.

    The suite is left out: modules of it count that have to do with exploring.
    """
    return {"versions": identity.without(SUITE).values, "files": identity.files}


def _start_of(script: Script) -> KeyParts:
    """Describe how a command is started; what it opens then is noted when it runs."""
    return {
        "cwd": script.cwd,
        "program": str(shutil.which(script.command[0], path=os.environ.get("PATH"))),
        "environment": _environment_of_runs(script),
    }


def _environment_of_runs(script: Script) -> dict[str, str]:
    """Return what a command finds in its environment, but for what is new in each session.

    A line for a shell may name a variable, whose name then stands in the command.
    """
    named = named_by(os.fsencode(" ".join(words_of(script))))
    names = (name for name in os.environ if name in named or not is_of_a_session(name))
    return {name: os.environ[name] for name in sorted(names)}
