"""Judges one input by fsck and diff, and holds what they say against what the libraries do.

What must hold:
  runs     nothing that a load executes is whole, and no load of what is whole asks for a name that
           fsck calls unsafe
  covered  what changed blindly under a digest or a CRC is not whole, unless it loads the same
  loads    what is whole is loaded by its library
  values   what a library loads of it is what diff reads in it
  raises   no exception but those that are documented
  schema   the JSON is as its schema says, and the same from results that were kept
  time     10 seconds of processor time, and 1 GiB, for a file
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_inputs import Disk, Input, Seeds, encode, name_of

from ckpt_conformance.cli.disk import plan as plans
from ckpt_conformance.cli.disk import results
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.diff.compare import Difference, Status
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.formats import dcp
from ckpt_conformance.fsck.formats.written_names import judge_names
from ckpt_conformance.fsck.judge import judging
from ckpt_conformance.fsck.judge.examine import find
from ckpt_conformance.fsck.judge.judge import Judged, Options, judge
from ckpt_conformance.fsck.layouts.layouts import Format
from ckpt_conformance.fsck.pickled.asked import Asked
from ckpt_conformance.fsck.pickled.pickle_values import Name
from ckpt_conformance.fsck.source import source
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.report import diff_lines, fsck_lines
from ckpt_conformance.work.items import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.fsck.layouts.layouts import Candidate, Part

REPOSITORY = Path(__file__).parents[2]
SECONDS = 10.0  # of processor time
MEMORY = 640 << 20  # bytes more than before: 1 GiB less what a process with torch holds anyway
_SCHEMAS = REPOSITORY / "ckpt_conformance" / "report" / "schemas"
_RUN = "run"  # what the folder of an input is called


@dataclass(frozen=True)
class Fault:
    """Something that must not be: which rule it breaks, and how; `sign` tells like ones apart."""

    rule: str
    sign: str
    what: str

    @property
    def key(self) -> str:
        """Name all faults that are like this one."""
        return f"{self.rule}: {self.sign}"


@dataclass
class Counts:
    """What was done so far."""

    inputs: int = 0
    loads: int = 0
    whole: int = 0
    states: dict[str, int] = field(default_factory=dict[str, int])
    worst_seconds: float = 0.0
    worst_memory: int = 0


def options_of(number: int) -> Options:
    """Return how fsck is asked; 0 and most others ask for everything."""
    if number < 40:
        return Options(jobs=1 + (number & 1), nan=bool(number & 2))
    share = 0.3 if number & 8 else 1.0
    return Options(jobs=1, metadata_only=bool(number & 4), sample=share, seed=number)


class Loader:
    """Asks the server of `fuzz_loads`."""

    def __init__(self) -> None:
        """Start it; that imports torch once."""
        command = [sys.executable, str(Path(__file__).with_name("fuzz_loads.py"))]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(
        self, how: str, path: Path, like: Path | None = None, again: Path | None = None
    ) -> dict[str, Any]:
        """Load a file or a folder; see `fuzz_loads.answer`."""
        if self._server.stdin is None or self._server.stdout is None:
            raise RuntimeError("the server of loads has no pipes")
        asked = {
            "how": how,
            "path": str(path),
            "like": like and str(like),
            "again": again and str(again),
        }
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the server of loads has ended")
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """End it."""
        if self._server.stdin:
            self._server.stdin.close()
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:  # some library has threads that do not end
            self._server.kill()
            self._server.wait()
        if self._server.stdout:
            self._server.stdout.close()


# -- which library -------------------------------------------------------------------------------

_LOADERS = {
    Format.TORCH: "torch",
    Format.SAFETENSORS: "safetensors",
    Format.HF_SHARDS: "safetensors",
    Format.DCP: "dcp",
    Format.JSON: "json",
    Format.ORBAX: "orbax",
    Format.GGUF: "gguf",
    Format.FLAX: "flax-msgpack",
    Format.NPZ: "numpy",
    Format.KERAS: "zip",
    Format.EXPORT: "zip",
}
_COVERED = {"torch", "dcp", "numpy", "zip"}  # loads of formats in which each value has a CRC
_SAVED_AGAIN = {"torch", "safetensors", "dcp"}
_NOT_INSTALLED = ("ModuleNotFoundError", "ImportError")  # of the library whose class it is


def _names_changed(one: Input) -> bool:
    """Return whether a metadata of DCP is another: no sum covers the names of tensors in it."""
    return any(path.rpartition("/")[2] == dcp.METADATA for path in one.files)


def _loads_of(candidate: Candidate, changed: set[str]) -> Iterator[tuple[str, Path, Part]]:
    """Yield how to load the parts of a checkpoint in which a file has changed."""
    for part in candidate.parts:
        how = _LOADERS.get(part.form)
        if how is None:
            continue
        if part.form in (Format.DCP, Format.ORBAX, Format.HF_SHARDS):
            inside = [path for path in changed if path.startswith(part.base)]
            if part.form is Format.HF_SHARDS:
                # Nothing tells that the file with the highest number is gone (docs/fsck.md).
                there = [path for path in inside if (candidate.root / path).exists()]
                ours = [path for path in there if path.endswith(".safetensors")]
                yield from ((how, candidate.root / path, part) for path in ours)
            elif part.form is Format.ORBAX:
                items = {_OF_DATABASE.sub("", path).rpartition("/")[0] for path in inside}
                yield from _orbax(candidate.root, items, part)
            elif inside and (candidate.root / part.base / ".metadata").exists():
                yield how, candidate.root / part.base, part
        elif part.base + part.name in changed:
            yield how, candidate.root / part.base / part.name, part


_OF_DATABASE = re.compile(r"(?:ocdbt\.process_\d+/.*|(?<=/)d/.*|^d/.*)$")  # what is of its parent


def _orbax(root: Path, folders: set[str], part: Part) -> Iterator[tuple[str, Path, Part]]:
    for folder in sorted(folders):
        at = root / folder
        while at != root and not (at / "_METADATA").exists():
            at = at.parent
        if (
            (at / "manifest.ocdbt").exists()
            or any(at.glob("*/.zarray"))
            or any(at.glob("*/zarr.json"))
        ):
            yield "orbax", at, part


# -- threads ---------------------------------------------------------------------------------------


class _AtOnce(ThreadPoolExecutor):
    """Does what is submitted at once: nothing here is worth waiting for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  as the threads do
            done.set_exception(error)
        return done


@contextlib.contextmanager
def _without_threads(*, is_on: bool) -> Iterator[None]:
    """Judge in one thread: that is the same work in half the time."""
    if is_on:
        judging.ThreadPoolExecutor = source.ThreadPoolExecutor = _AtOnce  # type: ignore[misc]
    try:
        yield
    finally:
        judging.ThreadPoolExecutor = source.ThreadPoolExecutor = ThreadPoolExecutor  # type: ignore[misc]


# -- the rules -------------------------------------------------------------------------------------


def _is_metadata(name: str) -> bool:
    """Return whether a file is the metadata of a DCP, of one of its ranks, or a copy of it."""
    return name.startswith(dcp.METADATA) or name.endswith(dcp.METADATA)


class Judge:
    """Judges inputs, one after the other, on one disk."""

    def __init__(self, base: Path, seeds: Seeds, loader: Loader) -> None:
        """Take an empty folder on a fast disk."""
        self.counts = Counts()
        self._seeds, self._loader = seeds, loader
        self._disk = Disk(base / "inputs", seeds)
        self._again = base / "again"
        self._loaded: dict[tuple[str, str, str], bool] = {}
        self._schema = _validator("fsck")
        self._diff_schema = _validator("diff")

    def check(self, one: Input) -> list[Fault]:
        """Return every rule that an input breaks; none for one that no disk can hold."""
        try:
            path = self._disk.put(one)
        except (OSError, ValueError):
            self._disk = Disk(self._fresh_folder(), self._seeds)
            return []
        self.counts.inputs += 1
        number = int(name_of(encode(one)), 16)
        _reset_memory()
        held, began = _memory(), time.process_time()
        with _without_threads(is_on=bool(number % 16)):
            faults = self._rules(one, path, number)
        seconds, memory = time.process_time() - began, _memory() - held
        self.counts.worst_seconds = max(self.counts.worst_seconds, seconds)
        self.counts.worst_memory = max(self.counts.worst_memory, memory)
        if seconds > SECONDS:
            faults.append(Fault("time", one.seed, f"{seconds:.1f} s of processor time"))
        if memory > MEMORY:
            faults.append(Fault("time", f"memory {one.seed}", f"{memory} bytes more at once"))
        return faults

    def _fresh_folder(self) -> Path:
        folder = self._again.parent / f"inputs-{time.monotonic_ns()}"
        folder.mkdir(parents=True)
        return folder

    def _rules(self, one: Input, path: Path, number: int) -> list[Fault]:
        options, faults = options_of(one.options), list[Fault]()
        if not path.exists():
            return []
        judged = _tried(faults, "judge", lambda: judge(path, options))
        if judged is None:
            return faults
        state = str(judged.state)
        self.counts.states[state] = self.counts.states.get(state, 0) + 1
        _tried(faults, "told", lambda: "\n".join(fsck_lines.lines(judged)).encode())
        faults += self._told(judged)
        if number % 8 == 0:
            faults += _kept(path, options, judged)
        is_whole = judged.newest_whole is not None
        if is_whole or number % 4 == 1:
            faults += self._compared(path, path, is_same=True)
        if is_whole and one.files:
            self.counts.whole += 1
            faults += self._truth(one, path, judged)
        return faults

    def _told(self, judged: Judged) -> Iterator[Fault]:
        told = json.loads("".join(fsck_lines.json_text(judged)))
        for error in self._schema.iter_errors(told):
            yield Fault("schema", f"fsck {error.json_path}", error.message[:300])

    def _compared(self, a: Path, b: Path, *, is_same: bool) -> list[Fault]:
        """Compare two checkpoints; where they are one, nothing may differ."""
        faults: list[Fault] = []
        try:
            compared = diff(a, b)
            told = json.loads(json.dumps(compared.to_json()))
            list(diff_lines.lines(compared))
        except RequestError:
            return faults
        except Exception as error:  # noqa: BLE001  that is what is looked for
            return [_raised("diff", error)]
        faults += [
            Fault("schema", f"diff {one.json_path}", one.message[:300])
            for one in self._diff_schema.iter_errors(told)
        ]
        if is_same and compared.is_judged and compared.differences:
            first = compared.differences[0]
            faults.append(Fault("values", f"itself {first.status}", f"{first.name}: {first}"[:400]))
        return faults

    def _truth(self, one: Input, path: Path, judged: Judged) -> list[Fault]:
        """Hold what fsck calls whole against what libraries do with it."""
        changed = self._seeds.changed(one)
        top = path if path.is_dir() else path.parent
        root = top
        while root.name != _RUN:
            root = root.parent
        there = {str(root / name) for name, data in changed.items() if data is not None}
        gone = {str(root / name) for name, data in changed.items() if data is None}
        whole = {str(report.path) for report in judged.reports if report.state is State.WHOLE}
        faults: list[Fault] = []
        looked: set[str] = set()
        for candidate in find(path).candidates:
            if str(candidate.path) not in whole:
                continue
            base = str(candidate.root)
            own = {
                at
                for at in there
                if at.startswith(base + "/") and at[len(base) + 1 :] in candidate.files
            }
            looked |= own
            for at in sorted(own):
                faults += self._runs(Path(at))
            inside = {
                at[len(base) + 1 :] for at in own | {at for at in gone if at.startswith(base + "/")}
            }
            if one.options < 40:
                for how, where, part in _loads_of(candidate, inside):
                    faults += self._loads(one, root, how, where, part)
        return faults

    def _runs(self, path: Path) -> Iterator[Fault]:
        """Load a file in each way in which somebody may; nothing may run."""
        ways = ["torch", "pickle"]
        if path.suffix in (".npy", ".npz"):
            ways.append("numpy")
        for how in ways:
            told = self._ask(how, path)
            if ran := told.get("ran"):
                yield Fault("runs", f"{how} {ran.partition(' ')[0]}", f"{path}: {ran}")
                return
            names = {Name(*name.split("\n", 1)) for name in told["names"]}
            names -= dcp._ALLOWED if _is_metadata(path.name) else set()
            # A module of another name has no file that an import looks for.
            names = {one for one in names if all(map(str.isidentifier, one.module.split(".")))}
            for kind, text, name in judge_names(Asked(names=names), ("__torch__",)):
                if kind is Kind.UNSAFE:
                    yield Fault("runs", f"{how} asks for {name}", f"{path}: the load {text}")

    def _ask(
        self, how: str, path: Path, like: Path | None = None, again: Path | None = None
    ) -> dict[str, Any]:
        self.counts.loads += 1
        return self._loader.ask(how, path, like, again)

    def _loads(self, one: Input, root: Path, how: str, where: Path, part: Part) -> Iterator[Fault]:
        """Load a part of what is whole as its library does: that gives what is there."""
        shutil.rmtree(self._again, ignore_errors=True)
        again = self._again / "saved"
        again.mkdir(parents=True)
        is_covered = one.is_blind and how in _COVERED and not _names_changed(one)
        like = self._original(one, root, where) if is_covered else None
        told = self._ask(how, where, like, again if how in _SAVED_AGAIN else None)
        error = told.get("error")
        if error:
            is_other = error.startswith(_NOT_INSTALLED) or is_known(
                how, error, is_blind=one.is_blind
            )
            if not is_other and self._loads_as_it_was(one, root, how, where):
                sign = f"{how} {part.form} {error.partition(':')[0]} {_words(error)}"
                yield Fault("loads", sign, f"{where}: {error}")
        elif told.get("same") is False:
            yield Fault("covered", f"{how} {one.seed}", f"{where} loads, and gives other values")
        elif told.get("saved"):
            yield from self._read_alike(where, again, how)

    def _loads_as_it_was(self, one: Input, root: Path, how: str, where: Path) -> bool:
        """Return whether what a library had written there is loaded in this way at all."""
        key = (one.seed, how, where.relative_to(root).as_posix())
        if key not in self._loaded:
            original = self._original(one, root, where)
            self._loaded[key] = original is None or "error" not in self._ask(how, original)
        return self._loaded[key]

    def _original(self, one: Input, root: Path, where: Path) -> Path | None:
        """Write what a library had written there; None where it was not there."""
        own = self._seeds.by_name[one.seed].files
        name = where.relative_to(root).as_posix()
        prefix = "" if name == "." else f"{name}/"
        chosen = {
            path: data for path, data in own.items() if path == name or path.startswith(prefix)
        }
        if not chosen:
            return None
        base = self._again / "like"
        for path, data in chosen.items():
            target = base / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return base / name

    def _read_alike(self, where: Path, again: Path, how: str) -> Iterator[Fault]:
        """Compare what diff reads in a file with what it reads in what the library made of it."""
        saved = next(iter(sorted(again.iterdir())))
        copy = self._again / "alone" / where.name
        copy.parent.mkdir()
        if where.is_dir():  # other files of the folder belong to other parts
            beside = [one.name for one in where.iterdir() if not dcp.is_file(one.name)]
            shutil.copytree(where, copy, ignore=lambda *_: beside)
        else:
            shutil.copyfile(where, copy)
        try:
            compared = diff(copy, saved)
        except RequestError:
            return
        except Exception as error:  # noqa: BLE001  that is what is looked for
            yield _raised("diff", error)
            return
        for one in compared.differences if compared.is_judged else ():
            if not _is_told_otherwise(how, one):
                yield Fault("values", f"{how} {one.status}", f"{where}: {one}"[:600])
                return


def _is_told_otherwise(how: str, one: Difference) -> bool:
    """Return whether a difference is one that saving anew makes in other formats than torch's."""
    is_extra = how == "dcp" and (one.a or "").startswith("bytes [")  # a file that nothing refers to
    return is_extra or (how != "torch" and one.status in (Status.GRAD, Status.KEY))


_KNOWN: tuple[tuple[str, str], ...] = (
    ("torch", "TypeError"),
    ("torch", "AttributeError"),
    ("torch", "Can't get attribute"),
    ("dcp", "TypeError"),
    ("dcp", "AttributeError"),
    ("dcp", "expected str, bytes or os.PathLike object"),  # a TypeError that torch tells as its own
)
"""How, and words of the error, of loads that fail and are whole all the same.

docs/fsck.md says that pickles are followed and not executed: what a call makes of its arguments is
not seen. Only of what somebody has built: a CRC covers each pickle, so that no disk makes one."""


def is_known(how: str, error: str, *, is_blind: bool) -> bool:
    """Return whether the documentation says that such a load cannot be foreseen."""
    return not is_blind and any(how == one and words in error for one, words in _KNOWN)


def _words(error: str) -> str:
    """Return the beginning of a message without what changes from one to the next."""
    text = error.partition(":")[2].strip()[:60]
    return "".join("#" if char.isdigit() else char for char in text)


def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((_SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)


def _tried(faults: list[Fault], what: str, run: Callable[[], Any]) -> Any:  # noqa: ANN401  what it gives
    try:
        return run()
    except RequestError:
        return None
    except Exception as error:  # noqa: BLE001  that is what is looked for
        faults.append(_raised(what, error))
        return None


def _raised(what: str, error: Exception) -> Fault:
    """Return a fault for an exception: like ones come from the same line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "ckpt_conformance" in one.filename] or list(frames)
    last = ours[-1]
    where = f"{Path(last.filename).name} {last.name}"
    text = "".join(traceback.format_exception(error))[-3000:]
    return Fault("raises", f"{what} {type(error).__name__} in {where}", text)


def _kept(path: Path, options: Options, judged: Judged) -> list[Fault]:
    """Judge once more through results that are kept, as the command does."""
    faults: list[Fault] = []

    def run() -> None:
        with (
            plans.made(path, is_weighed=False, tell=lambda *_: None) as plan,
            results.spool() as spool,
        ):
            taker = results.Taker(spool)
            for job, judgement in judging.Judging(path, options).run(
                plan.jobs(options, Shard(1, 1))
            ):
                taker.take(job, judgement)
            kept = [report.to_json() for report in taker.index.reports()]
        if kept != [report.to_json() for report in judged.reports]:
            faults.append(Fault("schema", "results that were kept differ", f"{path}"))

    _tried(faults, "kept", run)
    return faults


def _reset_memory() -> None:
    """Forget the most memory that was held until now."""
    try:
        Path("/proc/self/clear_refs").write_bytes(b"5")
    except OSError:
        return


def _memory() -> int:
    """Return the most bytes that were held since then."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
