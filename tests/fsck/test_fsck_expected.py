"""What is missing by the rules of more than one library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path


def shards(folder: Path, stem: str, index: str = "") -> Path:
    """Two files of weights, with an index under a name."""
    folder.mkdir()
    places = {}
    for at in (1, 2):
        name = f"{stem}-{at:05d}-of-00002.safetensors"
        save_file({f"w{at}": np.ones(3, np.float32)}, folder / name)
        places[f"w{at}"] = name
    (folder / "config.json").write_text("{}")
    if index:
        plain = {"metadata": {"total_size": 24}, "weight_map": places}
        (folder / index).write_text(json.dumps(plain))
    return folder


@pytest.mark.parametrize(
    ("stem", "index"),
    [
        ("model", "model.safetensors.index.json"),
        ("diffusion_pytorch_model.fp16", "diffusion_pytorch_model.safetensors.index.fp16.json"),
    ],
)
@pytest.mark.parametrize("folder", ["step_5", "exported"])
def test_weights_in_several_files_have_an_index(
    tmp_path: Path, folder: str, stem: str, index: str
) -> None:
    """A save that was killed before it, or a copy without it: no library loads them."""
    (report,) = judge(shards(tmp_path / folder, stem, index)).reports
    assert report.state is State.WHOLE, report.findings
    (tmp_path / folder / index).unlink()
    (report,) = judge(tmp_path / folder).reports
    assert report.state is State.INCOMPLETE
    (finding,) = report.findings
    assert finding.file == f"{stem}.safetensors.index.json"
    (report,) = judge(tmp_path / folder / f"{stem}-00001-of-00002.safetensors").reports
    assert report.state is State.WHOLE  # one file was asked for, and it is told that there are more
