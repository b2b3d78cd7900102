"""Fuzz fsck and diff, with what the libraries do as the truth: `make fuzz-fsck`.

python fuzz_fsck.py [--seconds N] [--jobs N] [--cache DIR] [--coverage]
python fuzz_fsck.py --replay FILE...     judge kept inputs, and print what they break

What it does to files, and what must hold then, is in docs/fsck.md. The corpus stays in DIR
(.cache/fuzz-fsck), and the next run goes on with it. Exit status: 0 nothing was found, 1 something
was, 2 it cannot be run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import fuzz_inputs  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = Path(".cache/fuzz-fsck")
HINT = (
    "error: the fuzz needs atheris (libFuzzer for Python; for Linux, Python 3.11 to 3.13):\n"
    "       pip install -c constraints/dev.txt -e '.[fuzz]'"
)
_TOLD = 30.0  # seconds between two lines
_DEATHS = 20  # of workers, one after the other, until the fuzz gives up
_MINIMIZED = 10  # seconds for each
_COVERED = 1500  # inputs of the corpus that are run for the coverage of modules
_WATCHED = "ckpt_conformance/fsck"


def main() -> int:
    """Run the command."""
    asked = _arguments()
    if not (asked.replay or asked.coverage or is_installed("atheris")):
        sys.stderr.write(HINT + "\n")
        return 2
    warnings.simplefilter("ignore")
    for name in ("seeds", "corpus", "faults", "notes"):
        (asked.cache / name).mkdir(parents=True, exist_ok=True)
    seeds = prepared(asked.cache)
    if asked.replay:
        return replay(asked.replay, seeds)
    if asked.coverage:
        return coverage(asked.cache, seeds)
    _again(asked.cache, seeds)
    known = set(_faults(asked.cache))
    before = len(list((asked.cache / "corpus").iterdir()))
    told = fuzz(asked.cache, asked.seconds, asked.jobs)
    after = len(list((asked.cache / "corpus").iterdir()))
    with (asked.cache / "runs.txt").open("a") as runs:
        runs.write(f"{told}\n")
    sys.stdout.write(f"{told}\ncorpus: {after} inputs, {after - before} of them new\n")
    _covered(asked.cache)
    return _report(asked.cache, seeds, known)


def is_installed(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz fsck and diff.")
    parser.add_argument("--seconds", type=int, default=3600, help="how long (default: an hour)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the corpus is kept")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="judge kept inputs")
    parser.add_argument("--coverage", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- seeds -----------------------------------------------------------------------------------------


def prepared(cache: Path) -> fuzz_inputs.Seeds:
    """Return the seeds; they are written where they are not there, or were written by others."""
    folder, stamp = cache / "seeds", cache / "seeds.stamp"
    if not stamp.exists() or stamp.read_text() != made_by():
        shutil.rmtree(folder)
        command = [sys.executable, str(HERE / "fuzz_seeds.py"), str(folder)]
        subprocess.run(command, check=True)
        stamp.write_text(made_by())
    seeds = fuzz_inputs.load_seeds(folder)
    for name in seeds.names:
        data = fuzz_inputs.encode(fuzz_inputs.Input(name))
        (cache / "corpus").mkdir(exist_ok=True)
        (cache / "corpus" / fuzz_inputs.name_of(data)).write_bytes(data)
    return seeds


def made_by() -> str:
    """Name what seeds are made by: others are to be written where it has changed."""
    text = hashlib.sha256((HERE / "fuzz_seeds.py").read_bytes()).hexdigest()[:16]
    return f"{text} torch {importlib.metadata.version('torch')}"


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a folder on a disk in memory, if there is one."""
    memory = Path("/dev/shm")  # noqa: S108  a folder of our own in it
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-fsck-", dir=base) as folder:
        yield Path(folder)


# -- workers ---------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """A process that fuzzes, its folder, and what it says."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path


class _Told(NamedTuple):
    """How far the workers of this run are together."""

    inputs: int
    loads: int
    whole: int
    processor: float
    seconds: float
    worst_seconds: float
    worst_memory: int
    states: Counter[str]
    faults: Counter[str]

    def __str__(self) -> str:
        """Write it in a line."""
        rate = self.inputs / self.seconds if self.seconds else 0.0
        own = self.inputs / self.processor if self.processor else 0.0
        states = ", ".join(f"{number} {state}" for state, number in self.states.most_common())
        return (
            f"{self.inputs:,} inputs in {self.seconds:.0f} s: {rate:.0f} a second, {own:.0f} in a "
            f"second of a processor; {states}; {self.loads:,} loads by libraries, for "
            f"{self.whole:,} changed and whole; at most {self.worst_seconds:.1f} s and "
            f"{self.worst_memory >> 20} MiB; {len(self.faults)} faults"
        )


def fuzz(cache: Path, seconds: int, jobs: int) -> _Told:
    """Run workers, and others where one ends too early; return what they did together."""
    began = time.monotonic()
    for old in (cache / "notes").iterdir():
        old.unlink()
    with scratch() as base:
        running = [_start(cache, base, number, seconds) for number in range(jobs)]
        deaths, told = 0, began
        try:
            while running:
                time.sleep(0.5)
                for at, one in reversed(list(enumerate(running))):
                    if one.process.poll() is None:
                        continue
                    del running[at]
                    left = int(began + seconds - time.monotonic())
                    if one.process.returncode and left > 0:
                        deaths += 1
                        _died(cache, one)
                        if deaths < _DEATHS:
                            running.append(_start(cache, base, at + deaths * jobs, left))
                if time.monotonic() > told + _TOLD:
                    told = time.monotonic()
                    print(_sum(cache, told - began), flush=True)  # noqa: T201  how far it is
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
    return _sum(cache, time.monotonic() - began)


def _start(cache: Path, base: Path, number: int, seconds: int) -> _Running:
    folder = base / str(number)
    folder.mkdir()
    log = cache / f"worker-{number}.log"
    seed = str(time.time_ns() % (1 << 31))
    command = [
        sys.executable,
        str(HERE / "fuzz_worker.py"),
        str(cache),
        str(number),
        str(seconds),
        seed,
        str(folder),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    return _Running(process, folder, log)


def _died(cache: Path, one: _Running) -> None:
    """Keep the input that a worker did not come back from."""
    current = one.folder / "current"
    tail = one.log.read_text(errors="replace")[-4000:]
    if not current.exists():
        sys.stderr.write(f"a worker ended with {one.process.returncode}:\n{tail}\n")
        return
    data = current.read_bytes()
    key = f"time: a worker ended with {one.process.returncode} {fuzz_inputs.name_of(data)}"
    _save(cache, key, tail, data)


def _save(cache: Path, key: str, what: str, data: bytes) -> None:
    path = cache / "faults" / f"{fuzz_inputs.name_of(key.encode())}.input"
    path.write_bytes(data)
    path.with_suffix(".json").write_text(json.dumps({"key": key, "what": what}))


def _sum(cache: Path, seconds: float) -> _Told:
    notes = [json.loads(path.read_text() or "{}") for path in (cache / "notes").iterdir()]
    notes = [one for one in notes if one]
    states, faults = Counter[str](), Counter[str]()
    for one in notes:
        states.update(one["states"])
        faults.update(one["faults"])

    def add(name: str) -> Any:  # noqa: ANN401  a number
        return sum(one[name] for one in notes)

    worst = [
        max((one[name] for one in notes), default=0) for name in ("worst_seconds", "worst_memory")
    ]
    return _Told(
        add("inputs"),
        add("loads"),
        add("whole"),
        add("processor"),
        seconds,
        worst[0],
        worst[1],
        states,
        faults,
    )


# -- what was found --------------------------------------------------------------------------------


def _faults(cache: Path) -> list[Path]:
    return sorted((cache / "faults").glob("*.input"))


def _again(cache: Path, seeds: fuzz_inputs.Seeds) -> None:
    """Judge what earlier runs have found; what breaks nothing any more goes into the corpus."""
    known = _faults(cache)
    if not known:
        return
    with judging(seeds) as check:
        for path in known:
            key = json.loads(path.with_suffix(".json").read_text())["key"]
            one = fuzz_inputs.decode(path.read_bytes(), seeds)
            faults = check(one) if one else []
            if key in faults:
                print(f"still: {key}\n    replay: {_command(path)}")  # noqa: T201
            else:
                path.rename(cache / "corpus" / fuzz_inputs.name_of(path.read_bytes()))
                path.with_suffix(".json").unlink()


@contextmanager
def judging(seeds: fuzz_inputs.Seeds) -> Iterator[Any]:
    """Give what judges one input: the faults by their names, and what each says."""
    import fuzz_judge

    with scratch() as base:
        loader = fuzz_judge.Loader()
        judge = fuzz_judge.Judge(base, seeds, loader)
        try:
            yield lambda one: {fault.key: fault.what for fault in judge.check(one)}
        finally:
            loader.close()


def _command(path: Path) -> str:
    return f"{sys.executable} {os.path.relpath(__file__)} --replay {path}"


def _report(cache: Path, seeds: fuzz_inputs.Seeds, known: set[Path]) -> int:
    """Make new inputs small, and print what each breaks."""
    from fuzz_minimize import smaller

    found = _faults(cache)
    if not found:
        print("nothing was found")  # noqa: T201
        return 0
    with judging(seeds) as check:
        for path in found:
            told = json.loads(path.with_suffix(".json").read_text())
            key, one = told["key"], fuzz_inputs.decode(path.read_bytes(), seeds)
            if path not in known and one and key in check(one):
                less = smaller(one, seeds, lambda other, key=key: key in check(other), _MINIMIZED)
                path.write_bytes(fuzz_inputs.encode(less))
            print(f"{key}\n    {told['what'].strip()[-300:]}\n    replay: {_command(path)}")  # noqa: T201
    return 1


def replay(paths: list[Path], seeds: fuzz_inputs.Seeds) -> int:
    """Judge kept inputs, and print what they are and what they break."""
    is_found = False
    with judging(seeds) as check:
        for path in paths:
            one = fuzz_inputs.decode(path.read_bytes(), seeds)
            if one is None:
                print(f"{path} is no input of the fuzz, or of another release of it")  # noqa: T201
                return 2
            files = {
                name: "gone" if data is None else f"{len(data)} bytes"
                for name, data in one.files.items()
            }
            print(f"{path}: {one.seed}, with {files or 'nothing changed'}, options {one.options}")  # noqa: T201
            for key, what in check(one).items():
                is_found = True
                print(f"  {key}\n{what}")  # noqa: T201
    return int(is_found)


# -- coverage --------------------------------------------------------------------------------------


def _covered(cache: Path) -> None:
    """Print how much of each parser the corpus runs."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "COVERAGE_FILE": str(Path(folder) / "data")}
        run = [sys.executable, "-m", "coverage", "run", "--source", _WATCHED]
        own = [str(Path(__file__)), "--coverage", "--cache", str(cache)]
        subprocess.run([*run, *own], check=True, env=env)
        show = [sys.executable, "-m", "coverage", "report", "--precision", "0", "--sort", "cover"]
        subprocess.run(show, check=True, env=env)


def coverage(cache: Path, seeds: fuzz_inputs.Seeds) -> int:
    """Judge a part of the corpus; `coverage` watches."""
    paths = sorted((cache / "corpus").iterdir())
    share = max(len(paths) // _COVERED, 1)
    with judging(seeds) as check:
        for path in paths[::share]:
            one = fuzz_inputs.decode(path.read_bytes(), seeds)
            if one:
                check(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
