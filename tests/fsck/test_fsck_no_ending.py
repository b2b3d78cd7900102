"""Files that a script saved under the name of a step, without an ending."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import commands
import pytest
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("step_{}", "checkpoint-{}", "epoch={}", "iter_{:07}", "ckpt_{}", "global_step{}")


class Runs:
    """Its pickle runs code when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        """Print."""
        return print, ("ran",)


def fsck(run: Path) -> dict[str, str]:
    done = commands.run("fsck", "--json", run)
    found = json.loads(done.stdout)["checkpoints"]
    return {one["path"].rpartition("/")[2]: one["state"] for one in found}


def newest(run: Path) -> str:
    return commands.run("fsck", "--newest-whole", run).stdout.strip()


def save(path: Path, number: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.full((3,), float(number))}, path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_file_that_is_named_as_a_step_is_one(name: str, tmp_path: Path) -> None:
    paths = [save(tmp_path / "run" / name.format(step), step) for step in (9, 10)]
    assert fsck(tmp_path / "run") == {path.name: "whole" for path in paths}
    assert newest(tmp_path / "run") == str(paths[1])
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    assert fsck(tmp_path / "run") == {paths[0].name: "whole", paths[1].name: "damaged"}
    assert newest(tmp_path / "run") == str(paths[0])


@pytest.mark.parametrize("name", NAMES)
def test_so_is_one_of_safetensors(name: str, tmp_path: Path) -> None:
    paths = [tmp_path / "run" / name.format(step) for step in (9, 10)]
    paths[0].parent.mkdir()
    for step, path in enumerate(paths):
        save_file({"w": torch.full((3,), float(step))}, path)
    assert fsck(tmp_path / "run") == {path.name: "whole" for path in paths}
    assert newest(tmp_path / "run") == str(paths[1])
    paths[1].write_bytes(paths[1].read_bytes()[:-4])
    assert newest(tmp_path / "run") == str(paths[0])


@pytest.mark.parametrize("name", ["step_2", "weights", "model.of_mine"])
def test_a_file_of_safetensors_that_is_named_is_judged_as_one(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / name)
    assert fsck(tmp_path / name) == {name: "whole"}


def test_beside_folders_of_steps_it_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path / "run" / "step_1" / "model.pt")
    last = save(tmp_path / "run" / "step_2")
    assert newest(tmp_path / "run") == str(last)


def test_an_empty_one_is_not_the_newest(tmp_path: Path) -> None:
    first = save(tmp_path / "run" / "step_1")
    (tmp_path / "run" / "step_2").touch()
    assert fsck(tmp_path / "run") == {"step_1": "whole", "step_2": "damaged"}
    assert newest(tmp_path / "run") == str(first)


def test_one_that_runs_code_is_never_the_newest(tmp_path: Path) -> None:
    first = save(tmp_path / "run" / "step_1")
    torch.save({"w": Runs()}, tmp_path / "run" / "step_2")
    (tmp_path / "run" / "step_3").write_bytes(pickle.dumps(Runs()))
    assert fsck(tmp_path / "run")["step_2"] == "unsafe"
    assert newest(tmp_path / "run") == str(first)


def test_a_text_of_such_a_name_is_no_checkpoint(tmp_path: Path) -> None:
    first = save(tmp_path / "run" / "step_1.pt")
    (tmp_path / "run" / "step_2").write_text("loss 0.5\n")
    assert newest(tmp_path / "run") == str(first)
