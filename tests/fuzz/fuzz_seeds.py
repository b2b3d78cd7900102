"""The seeds of the fuzz: a small checkpoint of each layout that fsck knows, by its own library.

python fuzz_seeds.py FOLDER
"""

from __future__ import annotations

import io
import json
import pickle
import random
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "fsck"), str(TESTS / "fuzz")]

import fsck_corpus  # noqa: E402
import fsck_swaps  # noqa: E402
import megatron_layouts  # noqa: E402
import test_fsck_dcp_ranks  # noqa: E402
import test_fsck_hf_shards  # noqa: E402
import unsafe_corpus  # noqa: E402
from fuzz_inputs import Seed, save_seeds  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GOLDEN = TESTS / "golden"
MOST = 150_000  # bytes of a seed: a larger one is slow, and shows no more
_OF_LIBRARIES = {
    "accelerate": "fsck/accelerate/checkpoints",
    "transformers": "fsck/transformers/run",
    "deepspeed": "fsck/deepspeed/stage1",
    "deepspeed-3": "fsck/deepspeed/stage3",
    "lightning": "fsck/lightning/run",
    "verl-fsdp": "fsck/fsdp_run/run",
    "orbax": "fsck/orbax/manager",
    "orbax-zarr2": "fsck/orbax/zarr2",
    "orbax-zarr3": "fsck/orbax/zarr3",
    "orbax-ocdbt3": "fsck/orbax/ocdbt3",
    "orbax-deep": "fsck/orbax/deep",
    "torchsnapshot": "fsck/torchsnapshot",
    "reference-ranks": "ranks-schema-2/model",
    "reference-ranks-dcp": "ranks-schema-2/dcp",
    "reference-schema-1": "schema-1/model",
}
_NEWEST = {
    "verl-fsdp",
    "orbax",
    "torchsnapshot",
    "transformers",
}  # of whose runs one step is enough
_MARKER = Path("fuzz-canary")  # no load of a seed gets as far as to make it: see fuzz_loads


def collected(name: str, root: Path, target: str = ".") -> Seed:
    """Take the files below a folder as a seed."""
    paths = sorted(one for one in root.rglob("*") if one.is_file() and not one.is_symlink())
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    return Seed(name, files, target)


def _golden() -> Iterator[Seed]:
    for name, where in _OF_LIBRARIES.items():
        seed = collected(name, GOLDEN / where)
        yield _newest(seed) if name in _NEWEST else seed
    for path in sorted((GOLDEN / "fsck" / "foreign").iterdir()):
        files = {path.name: path.read_bytes()}
        if path.suffix == ".onnx":
            files["apart.data"] = path.with_name("apart.data").read_bytes()
        if path.suffix != ".data":
            yield Seed(f"foreign-{path.stem}-{path.suffix[1:]}", files, path.name)


def _newest(seed: Seed) -> Seed:
    """Keep one folder of a run."""
    steps = sorted({path.partition("/")[0] for path in seed.files if "/" in path})
    own = {path: data for path, data in seed.files.items() if path.startswith(f"{steps[-1]}/")}
    return Seed(seed.name, own)


# -- written here ----------------------------------------------------------------------------------


def small() -> dict[str, object]:
    """Return a state with what readers have to tell apart, in few bytes."""
    torch.manual_seed(0)
    base = torch.arange(12.0)
    return {
        "w": base.view(3, 4),
        "t": base.view(3, 4).t(),
        "p": torch.nn.Parameter(base[4:6]),
        "h": torch.ones(3).half(),
        "z": torch.zeros(0, 2),
        "c": torch.ones(2, dtype=torch.complex64).conj(),
        "step": 5,
        "lr": [1e-3, float("nan")],
        "deep": {"a": {1: True, "1": None}, "name": "run"},
    }


def _one_file(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def named(write: Callable[[Path], None]) -> Callable[[Path], None]:
        _FILES[name] = write
        return write

    return named


_FILES: dict[str, Callable[[Path], None]] = {
    "small.pt": lambda path: torch.save(small(), path),
    "legacy.pt": lambda path: torch.save(small(), path, _use_new_zipfile_serialization=False),
    "plain.pkl": lambda path: torch.save({"w": torch.ones(2)}, path),
    "objects.npy": lambda path: np.save(path, np.array([{}, None], object), allow_pickle=True),
}


@_one_file("no_crc.pt")
def _without_crc(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(4)}, path)
    finally:
        torch.serialization.set_crc32_options(True)


@_one_file("script.pt")
def _script(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


@_one_file("rng.pt")
def _generators(path: Path) -> None:
    numpy = ("MT19937", np.arange(4, dtype=np.uint32), 4, 0, 0.0)
    state = {"python": random.getstate(), "numpy": numpy, "torch": torch.arange(9).byte()}
    torch.save(state, path)


@_one_file("model.npz")
def _arrays(path: Path) -> None:
    np.savez(path, a=np.arange(6).reshape(2, 3), b=np.array([{}, None], dtype=object))


@_one_file("model.keras")
def _keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("config.json", "metadata.json", "model.weights.h5"):
            archive.writestr(name, b"{}")


@_one_file("model.pt2")
def _exported(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), str(path))


@_one_file("tarred.pt")
def _tar(path: Path) -> None:
    unsafe_corpus.tarred(path, pickle.dumps({"a": 1}, 2))


def _single(base: Path) -> Iterator[Seed]:
    """Yield files that are a checkpoint each, and pickles of each protocol among steps."""
    for name, write in _FILES.items():
        path = base / "single" / name
        path.parent.mkdir(exist_ok=True)
        write(path)
        yield Seed(name.replace(".", "-"), {name: path.read_bytes()}, name)
    values = {"a": [1, (2, "x")], 3: {4.5, None}, "b": b"\0\1", "n": 1 << 70, "neg": -3}
    for protocol in range(6):
        beside = io.BytesIO()
        torch.save({"w": torch.ones(2)}, beside)
        files = {"step_1/data": pickle.dumps(values, protocol), "step_1/m.pt": beside.getvalue()}
        yield Seed(f"pickle-{protocol}", files)


def _unsafe(base: Path) -> Iterator[Seed]:
    """Yield files that run code in every way; half of the fuzz's words come from them."""
    for number, (way, pickled) in enumerate(unsafe_corpus.pickles(_MARKER).items()):
        kinds = (
            unsafe_corpus.FILES if way == "reduce, protocol 4" else {"zip": unsafe_corpus.zipped}
        )
        for kind, write in kinds.items():
            path = base / "unsafe.pt"
            write(path, pickled)
            name = f"unsafe-{number:02}-{kind.replace(' ', '-').replace(',', '')}"
            yield Seed(name, {"model.pt": path.read_bytes()}, "model.pt")


def _folders(base: Path, *, is_quick: bool) -> Iterator[Seed]:
    """Yield folders that libraries write, and that no golden file is of."""
    for name in fsck_corpus.WRITERS:
        if is_quick and name == "dcp-4-ranks":
            continue
        root = fsck_corpus.write(name, base / name / "run")
        yield _newest(collected(name, root)) if name == "reference-dcp" else collected(name, root)
    folder = base / "dcp-small"
    dcp.save(
        {"a": torch.arange(6.0).view(2, 3), "b": {"n": 3, "e": []}}, checkpoint_id=folder / "s_1"
    )
    yield collected("dcp-small", folder)
    yield collected("dcp-alone", test_fsck_dcp_ranks.write_ranks(base / "dcp-alone" / "step_1", 2))
    yield collected("hf-shards", test_fsck_hf_shards.write(base / "hf-shards" / "step_1"))
    consolidated = test_fsck_hf_shards.write(base / "hf-both" / "x", enable_consolidation=True)
    yield collected("hf-consolidated", consolidated)
    extended = base / "dcp-zstd" / "step_1"
    from torch.distributed.checkpoint._extension import ZStandard

    if ZStandard.is_available():
        writer = dcp.FileSystemWriter(extended, _extensions=[ZStandard()])
        dcp.save({"a": torch.arange(99.0)}, storage_writer=writer)
        yield collected("dcp-zstd", extended.parent)
    serial = dcp.filesystem.SerializationFormat.SAFETENSORS
    bare = dcp.FileSystemWriter(base / "dcp-safe" / "step_1", serialization_format=serial)
    dcp.save({"a": torch.arange(9.0), "n": 3}, storage_writer=bare)
    yield collected("dcp-safetensors", base / "dcp-safe")
    for name, write in megatron_layouts.WRITERS.items():
        if name in ("v2", "pre-v2"):
            yield collected(f"megatron-{name}", write(base / f"megatron-{name}"))
    yield collected("script-run", fsck_swaps.script(base / "script", (10, 20)))
    step = base / "mixed" / "step_5"
    step.mkdir(parents=True)
    torch.save(small(), step / "model.pt")
    (step / "config.json").write_text(json.dumps({"size": [1, 2], "deep": {"x": None}, "step": 5}))
    np.save(step / "order.npy", np.arange(4))
    yield collected("mixed", base / "mixed")


def build(base: Path, *, is_quick: bool = False) -> Iterator[Seed]:
    """Write every seed below an empty folder; `is_quick` leaves out what needs ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in (_golden(), _single(base), _unsafe(base), _folders(base, is_quick=is_quick)):
            for seed in source:
                if sum(map(len, seed.files.values())) < MOST:
                    yield seed


def main() -> None:
    """Write all seeds into a folder."""
    with tempfile.TemporaryDirectory() as base:
        save_seeds(build(Path(base)), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
