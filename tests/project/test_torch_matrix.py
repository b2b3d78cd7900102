"""The matrix of releases: one environment at a time, removed by who made it, nothing run twice.

No environment is made here: pip and the commands are stood in for, folders and results are real.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

ADAPTERS = ("reference", "dcp-per-step")


@pytest.fixture(scope="module")
def tool(repository: Path) -> Any:  # noqa: ANN401  a script, no package
    path = repository / "benchmarks" / "torch_matrix.py"
    spec = importlib.util.spec_from_file_location("torch_matrix", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_matrix"] = module
    spec.loader.exec_module(module)
    return module


class Commands:
    """Stands for `run`: leaves what the commands would leave, and counts the environments."""

    def __init__(self, tool: Any, envs: Path) -> None:  # noqa: ANN401
        """Begin with nothing made."""
        self.tool, self.envs = tool, envs
        self.ran: list[list[str]] = []
        self.made: list[str] = []
        self.most = 0
        self.stop_at = ""

    def run(self, command: list[str], *_: object, **__: object) -> None:
        words = command[command.index("ckpt_conformance") + 1 :]
        self.ran.append(words)
        self.most = max(self.most, len(list(self.envs.iterdir())))
        if self.stop_at and self.stop_at in " ".join(words):
            raise KeyboardInterrupt
        folder = self.tool.Path(words[words.index("--out") + 1])
        options = [at for at, word in enumerate(words) if word.startswith("--")]
        adapters = words[1 : options[0]]
        for name in adapters:
            target = folder if len(adapters) == 1 else folder / name
            target.mkdir(parents=True, exist_ok=True)
            if words[0] == "write":
                (target / "written.json").write_text("{}")
            else:
                result = {"interrupted": False, "invariants": {"x": {"verdict": "PASS"}}}
                (target / "result.json").write_text(json.dumps(result))

    def make(self, path: Path, release: Any) -> None:  # noqa: ANN401
        path.mkdir(parents=True)
        (path / self.tool.OURS).touch()
        (path / self.tool.WHOLE).touch()
        self.made.append(release.name)


@pytest.fixture
def commands(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:  # noqa: ANN401
    fake = Commands(tool, tmp_path / "envs")
    monkeypatch.setattr(tool, "run", fake.run)
    monkeypatch.setattr(tool, "make", fake.make)
    monkeypatch.setattr(tool, "note", lambda *_: None)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("torch_matrix.py", "2.7", "2.13", "2.15", "--results", str(tmp_path / "results")),
            *("--envs", str(tmp_path / "envs")),
            *(word for name in ADAPTERS for word in ("--adapter", name)),
        ],
    )
    return fake


def ended(tool: Any) -> int:  # noqa: ANN401
    with pytest.raises(SystemExit) as left:
        tool.main()
    return int(left.value.code or 0)


def test_each_reads_what_each_other_one_wrote(
    tool: Any,  # noqa: ANN401
    commands: Commands,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(tool) == 0
    assert commands.made == ["2.7", "2.13", "2.15", "2.13", "2.7"]
    assert commands.most == 1
    assert list(commands.envs.iterdir()) == []
    written = [words[1] for words in commands.ran if words[0] == "write"]
    assert written == [*ADAPTERS] * 3
    reads = [words for words in commands.ran if "--written-by" in words]
    assert len(reads) == 6
    assert all(words[1:3] == [*ADAPTERS] for words in reads)
    alone = [words for words in commands.ran if words[0] == "certify" and words not in reads]
    assert len(alone) == 6
    assert "not run" not in capsys.readouterr().out


def test_what_is_done_is_not_run_again(tool: Any, commands: Commands) -> None:  # noqa: ANN401
    ended(tool)
    commands.ran.clear()
    commands.made.clear()
    assert ended(tool) == 0
    assert (commands.ran, commands.made) == ([], [])


def test_ctrl_c_removes_the_environment_and_the_next_run_goes_on(
    tool: Any,  # noqa: ANN401
    commands: Commands,
) -> None:
    commands.stop_at = "2.13/certificates/dcp-per-step"
    assert ended(tool) == 130
    assert list(commands.envs.iterdir()) == []
    before = len(commands.ran)
    commands.stop_at = ""
    assert ended(tool) == 0
    again = [words for words in commands.ran[before:] if "2.13/certificates" in " ".join(words)]
    assert [words[1] for words in again] == ["dcp-per-step"]


def test_an_interrupted_certificate_is_made_again(
    tool: Any,  # noqa: ANN401
    commands: Commands,
    tmp_path: Path,
) -> None:
    ended(tool)
    path = tmp_path / "results" / "2.7" / "certificates" / "reference" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"interrupted": True}))
    commands.ran.clear()
    ended(tool)
    assert [words[:2] for words in commands.ran] == [["certify", "reference"]]


def test_an_environment_from_before_stays(
    tool: Any,  # noqa: ANN401
    commands: Commands,
    tmp_path: Path,
) -> None:
    mine = tmp_path / "envs" / "torch-2.13"
    mine.mkdir(parents=True)
    (mine / "precious").touch()
    commands.stop_at = "2.13/certificates/dcp-per-step"
    assert ended(tool) == 130
    assert (mine / "precious").exists()
    assert commands.made == ["2.7"]


def test_what_a_killed_run_left_half_made_is_made_again(
    tool: Any,  # noqa: ANN401
    commands: Commands,
    tmp_path: Path,
) -> None:
    half = tmp_path / "envs" / "torch-2.7"
    half.mkdir(parents=True)
    (half / tool.OURS).touch()
    (half / "half").touch()
    assert ended(tool) == 0
    assert commands.made[0] == "2.7"
    assert not half.exists()


@pytest.mark.usefixtures("commands")
def test_a_reference_that_is_not_certified_fails_the_matrix(
    tool: Any,  # noqa: ANN401
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended(tool)
    path = tmp_path / "results" / "2.7" / "read" / "2.15" / "reference" / "result.json"
    bad = {"interrupted": False, "invariants": {"x": {"verdict": "VIOLATION"}}}
    path.write_text(json.dumps(bad))
    assert ended(tool) == 1
    assert "reference on torch 2.7, reads 2.15: violated" in capsys.readouterr().err
    shutil.copy(path, tmp_path / "results" / "2.7" / "read" / "2.15" / "dcp-per-step")
    path.write_text(json.dumps({"interrupted": False, "invariants": {"x": {"verdict": "PASS"}}}))
    assert ended(tool) == 0  # of the others the matrix shows it, and that is what it is for


def test_no_room_is_said_before_anything_is_installed(
    tool: Any,  # noqa: ANN401
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool, "NEEDED", 1 << 60)
    (release, *_) = tool.releases_of(["--envs", str(tmp_path / "envs")])
    with pytest.raises(tool.MatrixError, match="free, and an environment takes up to"):
        tool.make(tmp_path / "envs" / "torch-2.7", release)
    assert not (tmp_path / "envs" / "torch-2.7").exists()


def test_an_unknown_release_is_a_usage_error(
    tool: Any,  # noqa: ANN401
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        tool.releases_of(["2.99"])
    assert left.value.code == 2
    assert "'2.99' is no release of the matrix: 2.7, 2.10, 2.13, 2.15" in capsys.readouterr().err


def test_each_release_has_its_constraints(tool: Any, repository: Path) -> None:  # noqa: ANN401
    for name, stem in tool.CONSTRAINTS.items():
        text = (repository / "constraints" / f"{stem}.txt").read_text()
        assert f"torch=={name}." in text
        assert "-c common.txt" in text
