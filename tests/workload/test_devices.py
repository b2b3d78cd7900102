"""Where ranks compute: children see no GPU, and CUDA is refused where there are too few.

What runs on GPUs is not tested here: see `docs/fault-model.md`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.harness import facts
from ckpt_conformance.subject import worlds
from ckpt_conformance.workload import devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.harness.client import Server
    from ckpt_conformance.subject.subject import Subject

without_gpus = pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs here")
PYTEST = "pytest -c /dev/null -p no:cacheprovider --pyargs ckpt_conformance.suites"
TOLD = "device cuda needs a GPU for each rank, 2 or more, and torch sees 0: leave the device out"


@pytest.mark.parametrize("seen", [None, "", "1,3"])
def test_what_is_hidden_is_shown_again(seen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.KEPT, raising=False)
    if seen is None:
        monkeypatch.delenv(devices.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(devices.VISIBLE, seen)
    for name, value in devices.hidden(os.environ).items():
        monkeypatch.setenv(name, value)
    assert os.environ[devices.VISIBLE] == ""
    devices.show()
    assert os.environ.get(devices.VISIBLE) == seen


def test_a_gpu_for_each_of_two_ranks_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus() -> int:
        return 2

    monkeypatch.setattr(torch.cuda, "device_count", gpus)
    devices.check(devices.count(None))
    with pytest.raises(RequestError, match="torch sees 1: "):
        devices.check(1)


@without_gpus
def test_too_few_gpus_are_a_usage_error(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=TOLD):
        facts.check_device(server.socket, "dcp-per-step", tmp_path, "cuda")
    facts.check_device(server.socket, "dcp-per-step", tmp_path, "cpu")


def test_more_ranks_than_gpus_are_a_limit_of_the_machine(
    new_subject: Callable[..., Subject],
) -> None:
    subject = new_subject("dcp-per-step", device="cuda")
    subject.once(worlds.GPUS, lambda: 2)
    with pytest.raises(Unknown, match="this machine has 2 GPUs for 3 ranks on cuda"):
        worlds.run(subject, {"fsdp": 3}, 1)


@without_gpus
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "ckpt_conformance certify dcp-per-step --device cuda",
        f"{PYTEST} --ckpt-adapter dcp-per-step --ckpt-device cuda",
    ],
    ids=["certify", "pytest"],
)
def test_every_command_says_that_there_are_none(command: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == (2 if "certify" in command else pytest.ExitCode.USAGE_ERROR)
    assert TOLD in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
