"""`explore --cache`: what has not changed is not recovered again, and the report is the same."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from explorations import IN_PLACE, REFERENCE, ckpt, result_of

from ckpt_conformance.cli import explore, states_found
from ckpt_conformance.crash.explore import engine, recovering
from ckpt_conformance.crash.explore.recovering import Answers
from ckpt_conformance.plugin import openings
from ckpt_conformance.work import lines
from ckpt_conformance.work.sources import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.crash.explore.messages import Task

    Run = Callable[..., tuple[int, str]]

__all__ = ["ckpt"]
pytestmark = pytest.mark.xdist_group("explore-cache")  # they share the cache below
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "in_place.py"
QUICK = (REFERENCE, "--workload", "second", "--model", "kill", "--cache", "cache")
MATTERS = (
    "ckpt_conformance.crash.explore.recovery",
    "ckpt_conformance.crash.model.kill",
    "ckpt_conformance.harness.child",
    "ckpt_conformance.reference_impl.manager",
)
OTHERS = (
    "ckpt_conformance.fsck.judge.judging",
    "ckpt_conformance.plugin.outcomes",
    "ckpt_conformance.suites.test_side_effects",
    "ckpt_conformance.report.exploration",
    "ckpt_conformance.adapters.lightning_checkpoint",
)
WORDS = ("--workload", "second", "--model", "kill", "--model", "ext4", "--cache", "cache")


class Tasks:
    """The tasks that children did; those in `fail` are answered with a failure of the harness."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fail = 0, set[int]()
        self._recover = recovering.recover
        monkeypatch.setattr(recovering, "recover", self.recover)

    def recover(self, subject: object, task: Task, options: object) -> Answers:
        self.count += 1
        if self.count in self.fail:
            return Answers([], failure="the machine burns")
        return self._recover(subject, task, options)  # type: ignore[arg-type]

    def take(self) -> int:
        """Return how many there were since the last time."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    return Tasks(monkeypatch)


def batches() -> int:
    """Count the batches with states: of these the report says that they were recovered from."""
    written = lines.read(Path("all.jsonl")).results.values()
    contents = [json.loads(bytes(line.result)).get("recoveries", {}) for line in written]
    return sum(map(bool, contents))


def test_what_has_not_changed_is_not_recovered_again(ckpt: Run, tasks: Tasks) -> None:
    status, text = ckpt("explore", REFERENCE, *WORDS, "--out", "first", "--results", "all.jsonl")
    assert status == 0, text
    count = batches()
    assert tasks.take() == count > 3
    assert "from the cache" not in text
    status, text = ckpt("explore", REFERENCE, *WORDS, "--out", "again", "--results", "all.jsonl")
    assert (status, tasks.take()) == (0, 0), text
    assert f"batches of states from the cache: {count}" in text
    assert result_of("again") == result_of("first")
    origins = [line.origin for line in lines.read(Path("all.jsonl")).results.values()]
    assert origins.count("cache") == count
    status, text = ckpt("explore", REFERENCE, *WORDS, "--seed", "7", "--out", "other")
    assert (status, tasks.take()) == (0, count), text


def test_a_violation_is_shrunk_and_kept_all_the_same(ckpt: Run, tasks: Tasks) -> None:
    assert ckpt("explore", IN_PLACE, *WORDS, "--out", "first")[0] == 1
    first = tasks.take()
    status, text = ckpt("explore", IN_PLACE, *WORDS, "--out", "again")
    assert status == 1, text
    assert tasks.take() < first
    assert result_of("again") == result_of("first")
    kept = result_of("again")["bundles"]
    assert kept
    assert ckpt("replay", f"again/bundles/{next(iter(kept))}")[0] == 1


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "explored"


@pytest.fixture
def filled(ckpt: Run, tasks: Tasks, kept: Path) -> int:
    """Put a cache here that holds all of an exploration, and its lines; return its tasks.

    The first test to ask makes it; each has a copy.
    """
    if not kept.exists():
        assert ckpt("explore", *QUICK, "--results", "all.jsonl")[0] == 0
        kept.mkdir()
        (kept / "tasks").write_text(str(tasks.take()))
        shutil.copytree("cache", kept / "cache")
        shutil.copy("all.jsonl", kept)
    else:
        shutil.copytree(kept, ".", dirs_exist_ok=True)
    count = int((kept / "tasks").read_text())
    assert count > 0
    return count


class Edited:
    """Sources with other digests, and the names of those that were asked for theirs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.names = set[str]()
        usual = Source.digest

        def digest(source: Source) -> str:
            self.names.add(source.name)
            return "edited" if source.name in modules else usual.func(source)

        monkeypatch.setattr(Source, "digest", property(digest))


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "module", [MATTERS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in MATTERS[1:])]
)
def test_an_edit_of_what_matters_runs_again(
    ckpt: Run, tasks: Tasks, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    edited = Edited(monkeypatch, module)
    assert ckpt("explore", *QUICK)[0] == 0
    assert module in edited.names
    assert tasks.take() > 0


@pytest.mark.usefixtures("filled")
def test_an_edit_of_all_that_does_not_matter_runs_nothing_again(
    ckpt: Run, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = Edited(monkeypatch, *OTHERS)
    assert ckpt("explore", *QUICK)[0] == 0
    assert set(OTHERS) <= edited.names, "the whole suite is a value of what is depended on"
    assert tasks.take() == 0


def test_code_beside_an_adapter_counts(
    ckpt: Run, tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = explore.subject_of  # whose server knows no adapter of a test
    monkeypatch.setattr(explore, "subject_of", lambda _, *given, **__: shared(REFERENCE, *given))
    for module in (openings, states_found):  # nor does it note what adapters open
        monkeypatch.setattr(module, "of_adapter", lambda *_: openings.Seen())
    text = "from ckpt_conformance.adapters.reference import make\n"
    (tmp_path / "mine_to_explore.py").write_text(text)
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("a\n")
    words = ("--workload", "second", "--model", "kill", "--cache", "cache")
    name = "mine_to_explore:make"
    assert ckpt("explore", name, *words)[0] == 0
    count = tasks.take()
    (tmp_path / "notes.txt").write_text("b\n")
    assert ckpt("explore", name, *words)[0] == 0
    assert tasks.take() == 0 < count
    (tmp_path / "helper.py").write_text("x = 2\n")
    assert ckpt("explore", name, *words)[0] == 0
    assert tasks.take() == count


def test_what_is_unknown_is_not_kept(ckpt: Run, tasks: Tasks) -> None:
    assert ckpt("explore", REFERENCE, *WORDS, "--out", "whole")[0] == 0
    count = tasks.take()
    words = (REFERENCE, *WORDS[:-1], "other", "--jobs", "1")
    tasks.fail = {3}
    status, text = ckpt("explore", *words, "--out", "failed")
    assert (status, tasks.take()) == (3, count), text
    assert "the machine burns" in text
    tasks.fail = set()
    status, text = ckpt("explore", *words, "--out", "again")
    assert status == 0, text
    assert tasks.take() == count - 2  # what came before the doubt is kept, and nothing after it
    assert result_of("again")["unknown"] == []
    assert ckpt("explore", *words, "--out", "again")[0] == 0
    assert tasks.take() == 0


@pytest.mark.usefixtures("filled")
def test_a_cache_and_its_recording_say_what_they_depend_on() -> None:
    """So what was found with a cache is combined with nothing that other code has found."""
    header = lines.read(Path("all.jsonl")).header
    (file,) = Path("cache/recordings").glob("*/recorded.json")
    depends = json.loads(file.read_text())["depends"]
    assert depends == msgspec.to_builtins(header.depends)
    assert depends["values"]["torch"]


def test_a_damaged_recording_is_made_again(ckpt: Run, tasks: Tasks, filled: int) -> None:
    (folder,) = Path("cache/recordings").iterdir()
    with (folder / "second" / "recording" / "recording.json").open("a") as file:
        file.write(" ")
    assert ckpt("explore", *QUICK)[0] == 0
    assert tasks.take() == filled
    assert len(list(Path("cache/recordings").iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ranks 2 --cache x", "--ranks 2 and --cache: the recoveries of several ranks"),
        ("--record x --cache y", "--cache does not go with --record"),
        ("--cache full", "--cache full: the folder holds other files"),
        ("--ranks 2 --on local:2", "--ranks 2 and --on: the recoveries of several ranks"),
        ("--record x --on local:2", "--on does not go with --record"),
        ("--on nowhere", "--on 'nowhere' is no cluster; it may be dask://HOST:PORT"),
        ("--on local:2 --jobs 3", "--jobs 3 is a number of processes here, and --on local:2"),
    ],
)
def test_what_can_not_be_done_is_refused(ckpt: Run, words: str, told: str) -> None:
    Path("full").mkdir()
    Path("full/thesis.txt").write_text("")
    status, text = ckpt("explore", IN_PLACE, *words.split())
    assert status == 2, text
    assert told in " ".join(text.split())
    assert [path.name for path in Path().iterdir()] == ["full"]


@pytest.mark.slow
def test_a_script_is_recorded_and_resumed_once(
    ckpt: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ckpt_conformance.crash.script.explore import ScriptExplorer

    runs = list[str]()
    take = ScriptExplorer._take

    def count(explorer: ScriptExplorer, run: object, case: engine.Case) -> None:
        runs.append(case.content)
        take(explorer, run, case)  # type: ignore[arg-type]

    monkeypatch.setattr(ScriptExplorer, "_take", count)
    shutil.copytree(SCRIPT.parent, tmp_path / "scripts")
    words = ("--model", "kill", "--jobs", "2", "--cache", "cache")
    command = ("--", sys.executable, "scripts/in_place.py", "--out", "{out}")
    assert ckpt("explore", *words, "--out", "first", *command)[0] == 1
    first = len(runs)
    assert ckpt("explore", *words, "--out", "again", *command)[0] == 1
    assert len(runs) - first < first / 2  # what shrinks is run again
    assert result_of("again") == result_of("first")
    beside = tmp_path / "scripts" / "training.py"
    beside.write_text(f"{beside.read_text()}\n# edited\n")
    runs.clear()
    assert ckpt("explore", *words, "--out", "edited", *command)[0] == 1
    assert len(runs) == first


READS = """
import json, os, sys
import {module}
out = sys.argv[sys.argv.index("--out") + 1]
where, step = os.path.join(out, "ck.json"), 0
if os.path.exists(where):
    with open(where) as file:
        step = json.load(file)["step"]
for step in range(step + 1, 3):
    with open(where + ".tmp", "w") as file:
        json.dump({{"step": step}}, file)
        file.flush()
        os.fsync(file.fileno())
    if {condition}:
        os.replace(where + ".tmp", where)
    else:
        os.remove(where) if os.path.exists(where) else None
        os.rename(where + ".tmp", where)
    print(f"step {{step}} saved")
"""
HOW = {
    "started anew": ("json", "json.loads(open(sys.argv[1][1:]).read())", ("--no-fork",)),
    # What is imported before a fork has read the file by then.
    "imported before a fork": ("set_up", "set_up.RIGHT", ("--preload", "set_up")),
}


@pytest.mark.parametrize(
    "how", ["started anew", pytest.param("imported before a fork", marks=pytest.mark.slow)]
)
def test_what_a_command_reads_counts(
    how: str, ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen while it runs: no word of the command says that `@right` names a file."""
    module, condition, options = HOW[how]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "set_up.py").write_text("import json; RIGHT = json.load(open('right'))")
    (tmp_path / "right").write_text("true")
    (tmp_path / "train.py").write_text(READS.format(module=module, condition=condition))
    words = ("--model", "kill", "--jobs", "1", *options, "--result-file", "ck.json", "--cache")
    command = (
        "cache",
        "--out",
        "out",
        "--",
        sys.executable,
        "train.py",
        "@right",
        "--out",
        "{out}",
    )
    first = ckpt("explore", *words, *command)
    assert first[0] == 0, first[1]
    assert "not kept" not in first[1]
    again = ckpt("explore", *words, *command)
    assert again[0] == 0
    assert "from the cache" in again[1]
    (tmp_path / "right").write_text("false")
    status, text = ckpt("explore", *words, *command)
    assert status == 1, text
    assert "not taken; changed since: the file ./right" in text
