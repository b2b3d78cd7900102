"""What a load of TorchScript runs: what may write is never whole, models of torch are.

The payloads map a file with `torch.from_file`, which makes it: so they are known to have run.
"""

from __future__ import annotations

import copy
import io
import warnings
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.ao import quantization

from ckpt_conformance.fsck.formats import torchscript
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_RUN = 'torch.from_file("{}", True, 3)'
_HERE = f"__torch__.{__name__}"


class M(nn.Module):
    """Exports its state, as quantized modules of torch do."""

    def __init__(self) -> None:  # noqa: D107
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.training = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:  # noqa: D105
        return (self.w, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:  # noqa: D105
        self.w = state[0]
        self.training = state[1]


def scripted(model: nn.Module) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files of it are still there
        torch.jit.save(torch.jit.script(model), stream)
    return stream.getvalue()


def changed(data: bytes, change: Callable[[str], str]) -> bytes:
    """Write an archive anew, with torch's own writer, after a change of the first source in it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [one.filename for one in archive.infolist()]
        folder = names[0].partition("/")[0]
        writer = torch._C.PyTorchFileWriter(stream)
        for name in names:
            content, short = archive.read(name), name.removeprefix(f"{folder}/")
            if short == f"code/{_HERE.replace('.', '/')}.py":
                text = content.decode()
                content = change(text).encode()
                assert content.decode() != text
            if not short.startswith((".data", "version", "byteorder")):
                writer.write_record(short, content, len(content))
        writer.write_end_of_file()
    return stream.getvalue()


def _sets(line: str) -> Callable[[str], str]:
    first = "    self.training = (state)[1]\n"
    return lambda text: text.replace(first, f"{first}    {line}\n")


def _later(line: str, behind: str) -> Callable[[str], str]:
    return lambda text: _sets(line)(text) + behind


_EVIL: dict[str, Callable[[str], Callable[[str], str]]] = {
    "a call": lambda run: _sets(f"self.w = {run}"),
    "a call by another name": lambda run: _sets(
        f"f = torch.from_file\n    self.w = {run.replace('torch.from_file', 'f')}"
    ),
    "a call of a function": lambda run: _later(
        f"self.w = {_HERE}.other((state)[0], )",
        f"def other(x: Tensor) -> Tensor:\n  y = {run}\n  return y\n",
    ),
    "a call of a method": lambda run: (
        lambda text: _sets("self.w = (self).other()")(text).replace(
            "  def forward",
            f"  def other(self: {_HERE}.M) -> Tensor:\n    y = {run}\n    return y\n  def forward",
        )
    ),
    "a constant": lambda run: (
        lambda text: text.replace(
            "  training : bool\n", f"  training : bool\n  foo : Final[Tensor] = {run}\n"
        )
    ),
    "a default": lambda run: lambda text: text.replace("x: Tensor)", f"x: Tensor={run})"),
    "an operator by ops": lambda run: _sets(f"self.w = {run.replace('torch.', 'ops.aten.')}"),
}


@pytest.mark.parametrize("way", _EVIL)
@pytest.mark.parametrize("name", ["model.pt", "reward_model.jit"])
def test_torchscript_that_writes_at_a_load_is_unsafe(way: str, name: str, tmp_path: Path) -> None:
    marker, step = tmp_path / "ran", tmp_path / "step_2"
    step.mkdir()
    data = changed(scripted(M()), _EVIL[way](_RUN.format(marker)))
    (step / name).write_bytes(data)
    if name != "model.pt":
        torch.save({"w": torch.ones(3)}, step / "model.pt")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            torch.jit.load(step / name)
        except RuntimeError:
            assert way == "a constant"  # it is no constant in the end, and was computed
    assert marker.exists(), way
    judged = judge(tmp_path)
    assert judged.state is State.UNSAFE
    assert judged.newest_whole is None


class _Stack(nn.Module):
    """Layers that are quantized in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.d = quantization.QuantStub(), quantization.DeQuantStub()
        self.c, self.b, self.r = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.l, self.s, self.e = nn.Linear(4, 2), nn.Conv1d(2, 3, 1), nn.Embedding(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.l(self.r(self.b(self.c(self.q(x)))).permute(0, 2, 3, 1))
        return self.d(self.s(x[:, :, 0].permute(0, 2, 1)))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.g, self.f = nn.LSTM(4, 5), nn.GRUCell(5, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.l(x)
        return self.f(self.g(y[0]))


def _static() -> nn.Module:
    model = _Stack().eval()
    model.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    model.e.qconfig = quantization.float_qparams_weight_only_qconfig
    ready = quantization.prepare(quantization.fuse_modules(model, [["c", "b", "r"]]))
    ready(torch.randn(1, 3, 8, 8))
    return quantization.convert(ready)


def _dynamic(dtype: torch.dtype) -> nn.Module:
    kinds = {nn.LSTM, nn.Linear, nn.GRUCell}
    return quantization.quantize_dynamic(copy.deepcopy(_Recurrent().eval()), kinds, dtype=dtype)


_WHOLE: dict[str, Callable[[], nn.Module]] = {
    "a state of its own": M,
    "recurrent": _Recurrent,
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, batch_first=True), 1
    ).eval(),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.BatchNorm2d(4)),
    "traced": lambda: torch.jit.trace(_Recurrent().eval(), torch.zeros(1, 3, 4)),
    "quantized": _static,
    "quantized, frozen": lambda: torch.jit.freeze(torch.jit.script(_static())),
    "quantized, qint8": lambda: _dynamic(torch.qint8),
    "quantized, float16": lambda: _dynamic(torch.float16),
}


@pytest.mark.filterwarnings("ignore")  # quantization in eager mode is old, and in many files
@pytest.mark.parametrize("model", _WHOLE)
def test_models_of_torch_are_whole(model: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(scripted(_WHOLE[model]()))
    (report,) = judge(path).reports
    told = [one for one in report.findings if one.kind is not Kind.NOTE]
    assert (report.state, told) == (State.WHOLE, [])


def test_large_sources_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchscript, "_PIECE", 100)
    plain = "".join(f"class C{at}(Module):\n  a : int\n  b : int = {at}\n" for at in range(200))
    name = "code/__torch__.py"
    assert list(torchscript.problems({name: plain.encode()})) == []
    evil = plain + "class E(Module):\n  x : Tensor = torch.from_file('a', True, 3)\n"
    assert len(list(torchscript.problems({name: evil.encode()}))) == 1
    sets = plain + (
        "class E(Module):\n  def __setstate__(self,\n      state: Tensor) -> NoneType:\n"
        "    torch.save(state, 'a')\n    return None\n"
    )
    assert any("save" in why for why in torchscript.problems({name: sets.encode()}))
    hidden = plain + "x = '''\nclass E(Module):\n  a : int\n'''\n" + plain
    assert list(torchscript.problems({name: hidden.encode()})) != []


def test_a_class_of_many_megabytes_is_not_parsed() -> None:
    """Its tree would take gigabytes, and no signal would end the parser."""
    source = "class C(Module):\n" + "  a : int\n" * 300_000
    (why,) = torchscript.problems({"code/__torch__.py": source.encode()})
    assert "nobody knows" in why


@pytest.mark.filterwarnings("ignore")  # TorchScript is old, and in many files
def test_a_class_that_no_source_defines_is_damage(tmp_path: Path) -> None:
    """A source that is empty runs nothing, and `torch.jit.load` finds no class in it."""
    whole, path = tmp_path / "whole.pt", tmp_path / "empty.pt"
    whole.write_bytes(scripted(nn.Linear(2, 2)))
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            is_source = name.endswith(".py")
            changed.writestr(name, b"" if is_source else archive.read(name))
    with pytest.raises(RuntimeError):
        torch.jit.load(path)  # type: ignore[no-untyped-call]
    assert judge(whole).state is State.WHOLE
    report = judge(path).reports[0]
    assert report.state is State.DAMAGED
    assert any("no source below code/ defines it" in one.what for one in report.findings)


def test_constants_that_break_off_are_damage(tmp_path: Path) -> None:
    """The load of TorchScript reads them; another file of pickles beside it, it does not."""
    path = tmp_path / "model.pt"
    source, target = io.BytesIO(scripted(nn.Linear(2, 2))), io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:-1] if name.endswith("constants.pkl") else data)
    path.write_bytes(target.getvalue())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        with pytest.raises(RuntimeError, match="pickler"):
            torch.jit.load(path)
    (report,) = judge(path).reports
    assert report.state is State.DAMAGED
