"""Hostile files: the reference manager refuses them by type, runs nothing in them, stays small."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_reference_job import KINDS, Quick

from ckpt_conformance.harness.child import memory_kib
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointMismatch,
    durable,
    import_unverified,
)
from ckpt_conformance.reference_impl.manifest import canonical
from ckpt_conformance.reference_impl.torch_zip import read_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RAN: list[str] = []


def run(what: str) -> dict[str, Any]:
    RAN.append(what)
    return {}


class Canary:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:  # noqa: D105
        return run, ("unpickled",)


@contextmanager
def within(mib: int) -> Iterator[None]:
    """Fail where the peak of resident memory rises by more; the peak of earlier tests is let go."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_kib("VmRSS")
    yield
    assert memory_kib("VmHWM") - before < mib << 10


def test_memory_that_is_let_go_is_counted() -> None:
    """The control: a peak below that of an earlier test is seen."""
    bytearray(256 << 20)
    with pytest.raises(AssertionError), within(64):
        bytearray(128 << 20)


def small(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 3)
    return {"model": model, "optimizers": torch.optim.SGD(model.parameters(), momentum=0.9)}


def rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the digest that an attacker would give it."""
    for path in [*root.glob("meta_*.json"), *root.glob("*/meta.json")]:
        body = json.loads(path.read_bytes())
        body.pop("manifest_digest")
        change(body)
        body["manifest_digest"] = durable.digest_bytes(canonical(body))
        path.write_bytes(canonical(body))


@pytest.mark.parametrize(
    "name", ["../secret.pt", "/etc/passwd", "a/b", "..", ".", "", "x\0y", "a\\b", "n" * 300]
)
def test_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    """No path of a manifest leads out of the checkpoint, even one with a matching digest (L01)."""
    root = tmp_path / "root"
    Quick(root).save(1, **small())
    (tmp_path / "secret.pt").write_bytes((root / "model_000001.pt").read_bytes())

    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop("model_000001.pt")
        for entry in body["tensors"].values():
            entry["file"] = name if entry["file"] == "model_000001.pt" else entry["file"]

    rewrite(root, change)
    with pytest.raises(CheckpointDamaged, match="leaves the checkpoint"):
        CheckpointManager(root).load(**small())


@pytest.mark.parametrize("what", ["link", "fifo", "linked_directory"])
def test_links_and_pipes_are_refused(tmp_path: Path, what: str) -> None:
    """A link out of the root, or a FIFO that would block, is not opened (L01)."""
    root, away = tmp_path / "root", tmp_path / "away"
    CheckpointManager(root, use_dcp=what == "linked_directory").save(1, **small())
    if what == "linked_directory":
        (root / "dcp_000001").rename(away)
        (root / "dcp_000001").symlink_to(away)
    else:
        (root / "model_000001.pt").rename(away)
        os.mkfifo(root / "model_000001.pt") if what == "fifo" else None
        if what == "link":
            (root / "model_000001.pt").symlink_to(away)
    with pytest.raises(CheckpointDamaged):
        CheckpointManager(root).load(**small())


@KINDS
def test_lies_of_a_manifest_are_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    """Sizes, offsets and shapes of 10**15 meet the real files before any allocation (L01)."""
    lies: list[Callable[[dict[str, Any]], None]] = [
        lambda body: body["files"].update(
            {name: {"size": 10**15, "blake3": "0" * 64} for name in body["files"]}
        ),
        lambda body: [one.update(offset=10**15) for one in body["tensors"].values()],
        lambda body: [
            one.update(shape=[10**15], nbytes=4 * 10**15) for one in body["tensors"].values()
        ],
        lambda body: [one.update(shape=[-1]) for one in body["tensors"].values()],
        lambda body: [one.update(dtype="object") for one in body["tensors"].values()],
        lambda body: body.update(step=True),
        lambda body: body.update(schema_version=99),
        lambda body: body.update(more=1),
        lambda body: body.update(config=[]),
        lambda body: body.update(ties=[[1]]),
        lambda body: body.pop("files"),
        lambda body: body.update(components={**body["components"], "scheduler": {}}),
        lambda body: body["tensors"].popitem(),
    ]
    for number, lie in enumerate(lies):
        root = tmp_path / str(number)
        Quick(root, use_dcp=kind == "dcp").save(1, **small())
        rewrite(root, lie)
        with within(64), pytest.raises(CheckpointDamaged):
            CheckpointManager(root).load(**small())


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    """Per-rank files of several ranks are no checkpoint of one rank: it says so (M034, I03)."""
    Quick(tmp_path).save(1, **small())
    rewrite(tmp_path, lambda body: body.update(world_size=8))
    with pytest.raises(CheckpointMismatch, match="DCP"):
        CheckpointManager(tmp_path).load(**small())


def resign(root: Path, name: str, data: bytes) -> None:
    """Put bytes in the place of a file, with a manifest that vouches for them."""
    path = root / name
    path.write_bytes(data)
    entry = {"size": len(data), "blake3": durable.digest_bytes(data)}
    rewrite(root, lambda body: body["files"].update({path.name: entry}))


def torch_bytes(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "model_000001.pt",
        "optim_000001_rank0.pt",
        "extra_000001.pt",
        "meta_000001.json",
        "dcp_000001/.metadata",
        "dcp_000001/extra_state.pt",
        "dcp_000001/__0_0.distcp",
        "dcp_000001/meta.json",
        "latest",
        "run_id",
    ],
)
@pytest.mark.parametrize("wrap", [pickle.dumps, torch_bytes], ids=["pickle", "torch"])
def test_load_raises_before_executing_pickle(
    tmp_path: Path, name: str, wrap: Callable[[object], bytes]
) -> None:
    """A pickle that runs code never runs, in no file, even with a manifest that vouches for it.

    (L02, L03, MX11, K019)
    """
    RAN.clear()
    CheckpointManager(tmp_path, use_dcp="dcp" in name).save(1, **small())
    data = wrap({"model": Canary()})
    if name in ("latest", "run_id") or "meta" in name.rpartition("/")[2][:4]:
        (tmp_path / name).write_bytes(data)
    else:
        resign(tmp_path, name, data)
    if name in ("latest", "run_id"):
        assert CheckpointManager(tmp_path).load(**small()).step == 1
    else:
        with pytest.raises(CheckpointDamaged):
            CheckpointManager(tmp_path).load(**small())
    Quick(tmp_path).save(2, **small())
    assert RAN == []
    pickle.loads(pickle.dumps(Canary()))  # noqa: S301 - the control: it does run when it may
    assert RAN == ["unpickled"]


@KINDS
@pytest.mark.parametrize("which", ["manifest", "data"])
def test_rejects_foreign_owned_file(tmp_path: Path, kind: str, which: str) -> None:
    """With `owners`, a file of another user is refused by name; without, it is served (K019)."""
    saved = CheckpointManager(tmp_path, use_dcp=kind == "dcp").save(1, **small())
    files = [saved] if saved.is_file() else sorted(saved.glob("*.distcp"))
    victim = next(tmp_path.rglob("meta*.json")) if which == "manifest" else files[0]
    me, other = os.geteuid(), os.geteuid() + 4321
    if me == 0:
        os.chown(victim, other, -1)
        mine = {me}
    else:  # nobody else can be made the owner: let the files be a stranger's
        mine = {other}
    assert CheckpointManager(tmp_path).load(**small()).step == 1
    with pytest.raises(CheckpointDamaged, match=f"{victim.name} belongs to user"):
        CheckpointManager(tmp_path, owners=mine).load(**small())
    assert CheckpointManager(tmp_path, owners={me, other}).load(**small()).step == 1


@KINDS
def test_warns_on_group_writable(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that others may write to is reported once, by name (K019)."""
    CheckpointManager(tmp_path, use_dcp=kind == "dcp").save(1, **small())
    manifest = next(tmp_path.rglob("meta*.json"))
    manifest.chmod(0o644)
    CheckpointManager(tmp_path).load(**small())
    assert "can be written by others" not in caplog.text
    manifest.chmod(0o664)
    CheckpointManager(tmp_path).load(**small())
    assert caplog.text.count("can be written by others") == 1
    assert manifest.name in caplog.text


@pytest.mark.parametrize("where", [".metadata", "0.distcp", "extra_state.pt", "train_state.pt"])
def test_import_runs_nothing_either(tmp_path: Path, where: str) -> None:
    """A foreign directory is read without running it: metadata, shards, sidecars (L02, M045)."""
    import torch.distributed.checkpoint as dcp

    RAN.clear()
    path = tmp_path / "dcp_000001"
    model = {"weight": torch.ones(3), "object": {"a": 1}}
    dcp.save(model, checkpoint_id=path)
    if where == "0.distcp":
        dcp.save({**model, "canary": Canary()}, checkpoint_id=path)
    else:
        (path / where).write_bytes(
            torch_bytes(Canary()) if "pt" in where else pickle.dumps(Canary())
        )
    with pytest.raises(CheckpointDamaged):
        import_unverified(path)
    assert RAN == []


def zip_of(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
    return data.getvalue()


def hostile_archives() -> dict[str, bytes]:
    """Files that look like torch's and lie."""
    good = torch_bytes({"weight": torch.ones(1000)})
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    lying = bytearray(good)
    at = good.rindex(b"PK\x01\x02")
    lying[at + 20 : at + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    shared: list[Any] = []
    for _ in range(60):
        shared = [shared, shared]
    deep = b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."
    zeros = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R."
    shadowed = b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb."
    memo = b"\x80\x02Nr" + struct.pack("<I", 0xFFFFFFFF) + b"."
    claim = entries["data.pkl"].replace(b"M\xe8\x03", b"J\xff\xff\xff\x7f")
    return {
        "bomb": zip_of({**entries, "data/0": bytes(64 << 20)}, zipfile.ZIP_DEFLATED),
        "lying_size": bytes(lying),
        "memo_of_64_GiB": zip_of({**entries, "data.pkl": memo}),
        "parts_2**60": zip_of({**entries, "data.pkl": pickle.dumps(shared, 2)}),
        "levels_100000": zip_of({**entries, "data.pkl": deep}),
        "bytearray_of_2_GiB": zip_of({**entries, "data.pkl": zeros}),
        "no_items": zip_of({**entries, "data.pkl": shadowed}),
        "shape_of_2_GiB": zip_of({**entries, "data.pkl": claim}),
        "no_structure": zip_of({"byteorder": b"little"}),
        "empty_structure": zip_of({**entries, "data.pkl": b""}),
        "truncated": good[:-100],
        "appended": good + b"x",
        "big_endian": zip_of({**entries, "byteorder": b"big"}),
        "not_a_zip": b"partial garbage",
        "nothing": b"",
    }


def test_an_honest_archive_of_another_writer_is_read(tmp_path: Path) -> None:
    """The control: the same archive without a lie gives its structure (M006)."""
    good = torch_bytes({"weight": torch.ones(1000)})
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    (tmp_path / "model.pt").write_bytes(zip_of(entries))
    with durable.open_regular(tmp_path / "model.pt") as file:
        [(key, ref)] = read_tree(file, "model.pt").items()
        assert (key, ref.shape, ref.nbytes) == ("weight", (1000,), 4000)
        assert durable.read_exact(file, ref.offset, 4000) == torch.ones(1000).numpy().tobytes()


@pytest.mark.parametrize("which", hostile_archives())
def test_lies_of_a_torch_file_are_refused_in_little_memory(tmp_path: Path, which: str) -> None:
    """Bombs and false sizes are refused before anything is allocated by a claim (L01, O04)."""
    path = tmp_path / "model.pt"
    path.write_bytes(hostile_archives()[which])
    with durable.open_regular(path) as file, within(96), pytest.raises(CheckpointDamaged):
        read_tree(file, "model.pt")


def lies_of_metadata() -> dict[str, Callable[[Any], object]]:
    """Changes of DCP metadata; each makes it speak of what is not there."""

    def info(found: Any) -> Any:  # noqa: ANN401
        return next(iter(found.storage_data.values()))

    def tensor(found: Any) -> Any:  # noqa: ANN401
        return found.state_dict_metadata["model.weight"]

    return {
        "hole": lambda found: tensor(found).chunks.clear(),
        "overlap": lambda found: tensor(found).chunks.extend(tensor(found).chunks),
        "shape": lambda found: setattr(tensor(found), "size", torch.Size([10**15, 2])),
        "chunk": lambda found: setattr(
            tensor(found).chunks[0], "sizes", torch.Size([10**9, 10**9])
        ),
        "dtype": lambda found: setattr(tensor(found).properties, "dtype", torch.float64),
        "no_dtype": lambda found: setattr(tensor(found).properties, "dtype", "float32"),
        "key_gone": lambda found: found.state_dict_metadata.pop("model.bias"),
        "key_more": lambda found: found.state_dict_metadata.update(x=tensor(found)),
        "place_gone": lambda found: found.storage_data.clear(),
        "path": lambda found: setattr(info(found), "relative_path", "../x"),
        "offset": lambda found: setattr(info(found), "offset", -1),
        "transform": lambda found: setattr(info(found), "transform_descriptors", ["zstd"]),
        "not_a_dict": lambda found: setattr(found, "state_dict_metadata", 3),
    }


@pytest.mark.parametrize("lie", lies_of_metadata())
def test_lies_of_dcp_metadata_are_refused(tmp_path: Path, lie: str) -> None:
    """Holes, overlaps, false places and types in `.metadata`, with matching digests (MX3, MX11)."""
    Quick(tmp_path, use_dcp=True).save(1, **small())
    found = pickle.loads((tmp_path / "dcp_000001/.metadata").read_bytes())  # noqa: S301 - our own
    lies_of_metadata()[lie](found)
    resign(tmp_path, "dcp_000001/.metadata", pickle.dumps(found))
    with within(64), pytest.raises(CheckpointDamaged):
        CheckpointManager(tmp_path).load(**small(1))
