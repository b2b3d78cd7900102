"""Certify managers on several releases of torch, and let each release load what the others wrote.

    python benchmarks/torch_matrix.py 2.7 2.15 --results DIR --envs DIR

One environment at a time: made, used, removed. An environment that was there before is used and
left alone. What is done stays in the folder of results, and is not run again: after Ctrl-C the same
command goes on. A release reads what a later one wrote on a second visit, so all but the newest are
made twice. Ends with 1 if a manager that must be certified is not, with 2 if it cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = {"2.7": "torch27", "2.10": "torch210", "2.13": "dev", "2.15": "torch215"}
# Both formats of the reference, torch.save, DCP, safetensors: one manager of each format.
ADAPTERS = (
    "reference",
    "reference-dcp",
    "torch-save-atomic-per-step",
    "dcp-per-step",
    "safetensors-per-step",
)
CERTIFIED = ("reference", "reference-dcp")  # the project promises that these are
OURS, WHOLE = ".made-by-torch-matrix", ".whole"  # marks of an environment that this program made
NEEDED = 16 << 30  # bytes that must be free to make one: the wheels, and what is unpacked of them
ENDINGS = {0: "certified", 1: "violations", 3: "undecided"}
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEFT_OUT = (".git", ".tox", ".cache", ".venv*", "reports", "build", "dist", "*.egg-info")


class MatrixError(Exception):
    """The matrix cannot go on; the message says why, and what to do."""


@dataclass
class Usage:
    """How much of the disk some folders took at most, seen every now and then by a thread."""

    folders: Sequence[Path]
    peak: int = 0  # bytes
    _end: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Look while something else runs, and once more at its end."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()
            self.look()

    def look(self) -> None:
        """Measure."""
        self.peak = max(self.peak, sum(map(size_of, self.folders)))

    def _watch(self) -> None:
        while not self._end.wait(3.0):
            self.look()


@dataclass(frozen=True)
class Settings:
    """Where things are, and how much is run."""

    results: Path
    envs: Path
    adapters: tuple[str, ...]
    budget: str
    jobs: int


@dataclass(frozen=True)
class Release:
    """One release of torch, as it was asked for, and what is known of it."""

    name: str
    settings: Settings

    @property
    def folder(self) -> Path:
        """Where its results are."""
        return self.settings.results / self.name

    def written(self, adapter: str) -> Path:
        """Return the folder of what an adapter wrote under it."""
        return self.folder / "written" / adapter

    def certificate(self, adapter: str) -> Path:
        """Return the folder of an adapter's certificate."""
        return self.folder / "certificates" / adapter

    def reading(self, writer: Release) -> Path:
        """Return the folder of the certificates of reading what another release wrote."""
        return self.folder / "read" / writer.name

    def unwritten(self) -> list[str]:
        """Name the adapters that have written nothing yet."""
        have = (
            name
            for name in self.settings.adapters
            if (self.written(name) / "written.json").is_file()
        )
        return sorted(set(self.settings.adapters) - set(have), key=self.settings.adapters.index)

    def uncertified(self) -> list[str]:
        """Name the adapters without a whole certificate."""
        return [name for name in self.settings.adapters if not is_whole(self.certificate(name))]

    def unread(self, writer: Release) -> list[str]:
        """Name the adapters that have not read what another release wrote."""
        folder = self.reading(writer)
        return [name for name in self.settings.adapters if not is_whole(folder / name)]

    def ready(self, writers: Iterable[Release]) -> list[Release]:
        """Return the releases whose checkpoints are there, and not yet read by this one."""
        return [
            one
            for one in writers
            if one.name != self.name and not one.unwritten() and self.unread(one)
        ]


def is_whole(folder: Path) -> bool:
    """Return whether a folder has a certificate whose run came to its end."""
    try:
        return json.loads((folder / "result.json").read_text())["interrupted"] is False
    except (OSError, ValueError, KeyError):
        return False


def size_of(folder: Path) -> int:
    """Return the bytes that a folder takes on the disk; files come and go meanwhile."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_blocks * 512  # noqa: PTH118
    return total


# -- environments ----------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(release: Release) -> Iterator[Path]:
    """Yield the environment of a release; one that is made here is removed, whatever happens."""
    path = release.settings.envs / f"torch-{release.name}"
    if path.exists() and not (path / OURS).exists():
        say(f"{path} was there before: it is used, and stays")
        yield path
        return
    if (path / OURS).exists() and not (path / WHOLE).exists():
        say(f"{path} was left half made by a run that was killed: it is made again")
        shutil.rmtree(path)
    try:
        if not path.exists():
            make(path, release)
        yield path
    finally:
        say(f"removing {path}")
        shutil.rmtree(path, ignore_errors=True)


def make(path: Path, release: Release) -> None:
    """Install this project with a release of torch; note versions, seconds and the disk it took.

    Raises MatrixError if there is no room, or pip does not come to its end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < NEEDED:
        raise MatrixError(
            f"{path.parent} has {gib(free)} free, and an environment takes up to {gib(NEEDED)}: "
            "make room, or name another disk with --envs"
        )
    say(f"making {path}")
    begin = time.monotonic()
    path.mkdir()
    (path / OURS).touch()
    temporary = path / "tmp"
    usage = Usage([path])
    with usage.watch():
        run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(path / "env")])
        temporary.mkdir()
        source = temporary / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        constraint = ROOT / "constraints" / f"{CONSTRAINTS[release.name]}.txt"
        command = [sys.executable, "-m", "pip", "--python", str(path / "env"), "install", "--quiet"]
        variables = {"TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        run(
            [*command, "-c", str(constraint), f"{source}[all]"], {**variables, "PIP_CONSTRAINT": ""}
        )
    shutil.rmtree(temporary)
    (path / WHOLE).touch()
    seconds = round(time.monotonic() - begin)
    say(f"made in {seconds} s; {gib(size_of(path))} on the disk, {gib(usage.peak)} at most")
    note(release, path, made={"seconds": seconds, "peak_bytes": usage.peak})


def python_of(path: Path) -> Path:
    """Return the interpreter of an environment: of this program's own, or of another one."""
    inside = path / "env" / "bin" / "python"
    return inside if inside.exists() else path / "bin" / "python"


def note(release: Release, path: Path, made: dict[str, int] | None = None) -> None:
    """Write down which versions an environment has, and what it cost to make it.

    Raises MatrixError if it has another release of torch, or not this project.
    """
    code = (
        "import importlib.metadata as m, json, sys, torch, ckpt_conformance as c;"
        "print(json.dumps({'torch': torch.__version__, 'python': sys.version.split()[0],"
        "'packages': {n: m.version(n) for n in ('numpy', 'safetensors')}, 'suite': c.__version__}))"
    )
    done = subprocess.run(  # noqa: S603  our own environment
        [python_of(path), "-c", code], capture_output=True, text=True, check=False, cwd=path
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise MatrixError(f"{path} is no environment of this project ({last[0]}): remove it")
    versions: dict[str, Any] = json.loads(done.stdout)
    if not versions["torch"].startswith(f"{release.name}."):
        raise MatrixError(
            f"{path} has torch {versions['torch']}, and not {release.name}: remove it, or name "
            "another folder with --envs"
        )
    release.folder.mkdir(parents=True, exist_ok=True)
    target = release.folder / "release.json"
    known: dict[str, Any] = json.loads(target.read_text()) if target.is_file() else {}
    known |= {**versions, "asked": release.name, "commit": commit()}
    known |= {"date": datetime.now(UTC).date().isoformat(), "machine": platform.machine()}
    if made:
        known["made"] = made
    target.write_text(json.dumps(known, indent=1) + "\n")


def commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" after local changes; None without git."""
    git = ["git", "-C", str(ROOT)]
    head, changed = (
        subprocess.run([*git, *words], capture_output=True, text=True, check=False)  # noqa: S603
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    if head.returncode:
        return None
    return head.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


# -- what is run in them ---------------------------------------------------------------------------


def visit(release: Release, every: Sequence[Release]) -> None:
    """Do in the environment of a release all that can be done now; nothing if there is nothing."""
    if not (release.unwritten() or release.uncertified() or release.ready(every)):
        return
    with environment(release) as path:
        note(release, path)
        command = [str(python_of(path)), "-m", "ckpt_conformance"]
        for adapter in release.unwritten():
            run([*command, "write", adapter, "--out", str(release.written(adapter))])
        for writer in release.ready(every):
            read(command, release, writer)
        for adapter in release.uncertified():
            certify([*command, "certify", adapter], release.certificate(adapter), release.settings)


def read(command: list[str], release: Release, writer: Release) -> None:
    """Let the adapters of one release load what another one wrote, in one run."""
    asked = [*command, "certify", *release.unread(writer), "--profile", "versions"]
    asked += ["--written-by", str(writer.folder / "written")]
    folder = release.reading(writer)
    one = len(release.unread(writer)) == 1
    certify(asked, folder / release.unread(writer)[0] if one else folder, release.settings)


def certify(command: list[str], out: Path, settings: Settings) -> None:
    """Run `certify` into a folder."""
    more = ["--budget", settings.budget, "--jobs", str(settings.jobs), "--out", str(out)]
    run([*command, *more], allowed=ENDINGS)


def run(
    command: Sequence[str],
    variables: dict[str, str] | None = None,
    allowed: Iterable[int] = (0,),
) -> None:
    """Run a program that prints what it does; raises MatrixError if it ends otherwise."""
    say("$ " + " ".join(command))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= variables or {}
    with subprocess.Popen(command, env=environ, cwd=ROOT.parent) as process:  # noqa: S603
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C reached it, too; SIGTERM did not
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if code not in allowed:
        raise MatrixError(f"{' '.join(command[:4])} ... ended with {code}; see above")


# -- the end ---------------------------------------------------------------------------------------


def report(releases: Sequence[Release]) -> int:
    """Print what came of it; return the exit status."""
    bad: list[str] = []
    for release in releases:
        for adapter in release.settings.adapters:
            folders = {"alone": release.certificate(adapter)}
            folders |= {
                f"reads {one.name}": release.reading(one) / adapter
                for one in releases
                if one.name != release.name
            }
            for what, folder in folders.items():
                verdict = verdict_of(folder)
                say(f"torch {release.name:5} {adapter:28} {what:11} {verdict}")
                if adapter in CERTIFIED and verdict != "kept":
                    bad.append(f"{adapter} on torch {release.name}, {what}: {verdict}")
    print(*bad, sep="\n", file=sys.stderr)
    return int(bool(bad))


def verdict_of(folder: Path) -> str:
    """Say the worst verdict of a certificate in a word."""
    if not is_whole(folder):
        return "not run"
    verdicts = {
        one["verdict"]
        for one in json.loads((folder / "result.json").read_text())["invariants"].values()
    }
    for verdict, word in (
        ("VIOLATION", "violated"),
        ("UNKNOWN", "unknown"),
        ("NOT_MET", "not met"),
    ):
        if verdict in verdicts:
            return word
    return "kept" if "PASS" in verdicts else "nothing applied"


def gib(size: int) -> str:
    """Write a number of bytes."""
    return f"{size / 2**30:.1f} GiB"


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def stop(number: int, _frame: object) -> None:
    """End, so that the environment that is in use is removed; whoever asks again has to wait."""
    for later in STOPPING:
        signal.signal(later, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Take the signals that end this program, and give them back."""
    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def releases_of(words: Sequence[str] | None = None) -> list[Release]:
    """Read the command line; ends with a message and 2 for what cannot be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = ", ".join(CONSTRAINTS)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"of {known}; default: all")
    parser.add_argument("--results", type=Path, default=ROOT / ".cache" / "torch-matrix")
    parser.add_argument("--envs", type=Path, default=ROOT / ".cache" / "torch-matrix-envs")
    parser.add_argument("--adapter", action="append", help="instead of one of each format")
    parser.add_argument("--budget", choices=("quick", "full"), default="quick")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args(words)
    for name in given.releases:
        if name not in CONSTRAINTS:
            parser.error(f"{name!r} is no release of the matrix: {known}")
    settings = Settings(
        results=given.results.resolve(),
        envs=given.envs.resolve(),
        adapters=tuple(dict.fromkeys(given.adapter or ADAPTERS)),
        budget=given.budget,
        jobs=given.jobs,
    )
    chosen = given.releases or CONSTRAINTS
    return [Release(name, settings) for name in CONSTRAINTS if name in chosen]


def main() -> None:
    """Visit each release, then each again, backwards, for what later ones wrote."""
    releases = releases_of()
    try:
        with stoppable():
            for release in (*releases, *reversed(releases)):
                visit(release, releases)
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it was")
        sys.exit(130)
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(report(releases))


if __name__ == "__main__":
    main()
