"""What a load of pt2 of torch.export, and of Keras, evaluates: what they write passes, no more."""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.fsck.code.exported import is_size
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.fsck.source.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.fsck.source.findings import Report


class _Sizes(torch.nn.Module):
    """Sizes that divide, powers, maxima, sizes that come from data, a branch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[object, ...]:
        torch._check(x.shape[0] % 2 == 0)
        k = y.sum().item()
        torch._check(k > 0)
        torch._check(k < 50)
        branch = torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
        larger = torch.nn.functional.interpolate(x[None, None], scale_factor=1.5)
        some = torch.zeros((x.shape[0] ** 2 + 3) // 4)
        return x.reshape(x.shape[0] // 2, -1, 2), torch.zeros(k), max(x.shape), branch, larger, some


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    auto = torch.export.Dim.AUTO
    shapes = ({0: auto, 1: auto}, {0: auto})
    args = (torch.randn(4, 4), torch.tensor([3, 4]))
    torch.export.save(torch.export.export(_Sizes(), args, dynamic_shapes=shapes), path)
    return path


def changed(source: Path, path: Path, change: Callable[[str], str]) -> Path:
    """Write an archive anew, with another program in it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for one in old.infolist():
            data = old.read(one)
            if one.filename.endswith("models/model.json"):
                text = data.decode()
                assert change(text) != text
                data = change(text).encode()
            new.writestr(one.filename, data)
    return path


def only(path: Path, options: Options | None = None) -> Report:
    (report,) = judge(path, options or Options()).reports
    return report


def unsafe(report: Report) -> list[str]:
    return [one.what for one in report.findings if one.kind is Kind.UNSAFE]


def test_what_torch_exports_is_whole(exported: Path) -> None:
    report = only(exported)
    assert (report.state, unsafe(report)) == (State.WHOLE, [])


def _evil(marker: Path | str) -> dict[str, Callable[[str], str]]:
    size, guards = r'("expr_str": ?)"[^"]*"', r'("guards_code": ?)\[.*?"\]'
    run = json.dumps(f"__import__('pathlib').Path('{marker}').touch()")
    tree = json.dumps([1, {"context": json.dumps({"default_factory_module": "antigravity"})}])
    return {
        "a size": lambda text: re.sub(size, lambda m: m[1] + run, text),
        "a guard": lambda text: re.sub(guards, lambda m: f"{m[1]}[{run}]", text),
        "an operator": lambda text: text.replace("torch.ops.aten.cos.default", "torch.os.system"),
        "a tree": lambda text: re.sub(
            r'("in_spec": ?)"(?:[^"\\]|\\.)*"', lambda m: m[1] + json.dumps(tree), text
        ),
    }


@pytest.mark.parametrize("way", _evil(""))
@pytest.mark.parametrize("name", ["model.pt2", "model.bundle"])
def test_a_program_that_runs_code_is_unsafe(
    way: str, name: str, exported: Path, tmp_path: Path
) -> None:
    marker, step = tmp_path / "ran", tmp_path / "step_2"
    step.mkdir()
    torch.save({"w": torch.ones(3)}, step / "model.pt")
    path = changed(exported, step / name, _evil(marker)[way])
    if way == "a size":
        with contextlib.suppress(Exception):  # what it evaluated is no size
            torch.export.load(path)
        assert marker.exists()
    report = only(step)
    assert report.state is State.UNSAFE, report.findings
    assert only(step, Options(metadata_only=True)).state is State.UNSAFE
    assert only(step, Options(trust=Trust(everything=True))).state is State.WHOLE


def test_native_code_is_unsafe(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/data/aotinductor/model/any.name", b"\x7fELF\2\1\1" + bytes(99))
    report = only(path)
    assert report.state is State.UNSAFE
    assert "native code" in unsafe(report)[0]


@pytest.mark.parametrize(
    "text", ["x()", "s0.evil", "Symbol('a b()')", "lambda: 1", "[1]", "exec('1')"]
)
def test_only_sizes_are_sizes(text: str) -> None:
    assert not is_size(text)
    assert is_size("FloorDiv(Symbol('s77', positive=True, integer=True), Integer(2)) + 2*u0")


WEIGHTS = Path(__file__).parents[1] / "golden" / "fsck" / "foreign" / "model.h5"


def _keras(path: Path, layer: dict[str, object]) -> Path:
    config = {"module": "keras", "class_name": "Sequential", "config": {"layers": [layer]}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", json.dumps(config))
        archive.write(WEIGHTS, "model.weights.h5")
    return path


def test_a_layer_of_keras_that_holds_code_is_unsafe(tmp_path: Path) -> None:
    """As Keras 3 writes a Lambda: the code is marshalled."""
    function = {"class_name": "__lambda__", "config": {"code": "4wEAAAA=", "defaults": None}}
    layer = {"module": "keras.layers", "class_name": "Lambda", "config": {"function": function}}
    report = only(_keras(tmp_path / "model.keras", layer))
    assert report.state is State.UNSAFE
    assert any("Lambda" in one for one in unsafe(report))


def test_a_module_that_keras_imports_is_unsafe_and_can_be_vouched_for(tmp_path: Path) -> None:
    dense = {"module": "keras.layers", "class_name": "Dense", "config": {"units": 3}}
    assert only(_keras(tmp_path / "model.keras", dense)).state is State.WHOLE
    own = {"module": "my_team.layers", "class_name": "Mine", "config": {}}
    path = _keras(tmp_path / "model.keras", own)
    assert only(path).state is State.UNSAFE
    known = Options(trust=Trust(names=frozenset({"my_team.layers.Mine"})))
    assert only(path, known).state is State.WHOLE
