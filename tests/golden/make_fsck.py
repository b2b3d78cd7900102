"""Make the checkpoints of other libraries that the tests of fsck judge, as those write them.

    python tests/golden/make_fsck.py NAME

NAME is accelerate, transformers, lightning, deepspeed, orbax, torchsnapshot, or foreign; or
accelerate_run, transformers_run, deepspeed_run, fsdp_run: three steps of one run, since what lies
beside a checkpoint tells of it, too.

Each is written by its library, in an environment that has it: never by hand. The folder says the
versions. What exists is not made anew; remove it first. Paths in it are those of a folder of its
own below the temporary directory.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "fsck"
RANKS = {"accelerate": 2, "deepspeed": 2, "deepspeed_run": 2, "fsdp_run": 2}
LIBRARY = {"fsdp_run": "torch"}  # the others are named after theirs


def layer() -> Any:  # noqa: ANN401  untyped libraries
    """Make something to train, the same on every rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Linear(4, 3)


def accelerate() -> None:
    """Save with two ranks: a model, an optimizer, a scheduler."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    scheduler.step()
    accelerator.save_state()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Some rows of tokens."""

    def __len__(self) -> int:
        """Give how many."""
        return 8

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        """Give one."""
        return {"input_ids": torch.tensor([at % 5, 1, 2]), "labels": torch.tensor([1, 2, 3])}


def transformers() -> None:
    """Train a tiny GPT-2 for two steps."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    arguments = TrainingArguments(
        output_dir="run", max_steps=2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Rows()).train()


def lightning() -> None:
    """Train for two steps; keep the last, too."""
    import lightning as library
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(library.LightningModule):  # type: ignore[misc]  # the library may not be here
        """One layer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def training_step(self, batch: torch.Tensor, _: int) -> Any:  # noqa: ANN401
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    keep = ModelCheckpoint(dirpath="run", every_n_train_steps=2, save_last=True)
    trainer = library.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[keep]
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))


def deepspeed() -> None:
    """Save ZeRO stages 1 and 3 with two ranks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as library

    library.init_distributed("gloo")
    for stage in (1, 3):
        model = layer()
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": optimizer,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
        }
        made = library.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine = made[0]
        engine.backward(engine(torch.randn(2, 4).bfloat16()).float().sum())
        engine.step()
        engine.save_checkpoint(f"stage{stage}", tag="global_step1")


def accelerate_run() -> None:
    """Save three times: two optimizers, two schedulers, a sampler, an object of one's own."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    naming = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True)
    seeded = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, project_config=naming, dataloader_config=seeded)
    models = [layer(), layer()]
    optimizers = [torch.optim.AdamW(one.parameters()) for one in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 4) for one in optimizers]
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2, shuffle=True)
    accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(models[0]))
    prepared = accelerator.prepare(*models, *optimizers, *schedulers, loader)
    models, optimizers, schedulers = prepared[:2], prepared[2:4], prepared[4:6]
    for _ in range(3):
        for batch in prepared[6]:
            accelerator.backward(models[0](batch).sum() + models[1](batch).sum())
            for one in (*optimizers, *schedulers):
                one.step()
        accelerator.save_state()


def transformers_run() -> None:
    """Train a tiny GPT-2 for six steps, and save every second one."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    arguments = TrainingArguments(
        output_dir="run", max_steps=6, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Rows()).train()


def deepspeed_run() -> None:
    """Save ZeRO stage 1 with two ranks, three times."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as library

    library.init_distributed("gloo")
    model = layer()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for _ in range(3):
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 4).bfloat16()).float().sum())
            engine.step()
        engine.save_checkpoint("run")


def fsdp_run() -> None:
    """Save torch's FSDP with two ranks, three times, under the names that verl gives the files."""
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo")
    rank, model = int(os.environ["RANK"]), layer()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    for step in range(1, 7):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        if step % 2:
            continue
        folder = Path("run") / f"global_step_{step}" / "actor"
        folder.mkdir(parents=True, exist_ok=True)
        rng = {"cpu": torch.get_rng_state(), "random": random.getstate()}
        extra = {"lr_scheduler": scheduler.state_dict(), "rng": rng}
        parts = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
        for name, part in parts.items():
            torch.save(part, folder / f"{name}_world_size_2_rank_{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def orbax() -> None:
    """Save steps with a manager, and trees in each of the formats of TensorStore."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    import tensorstore

    here, numbers = Path.cwd(), np.random.default_rng(0)
    weight = jnp.asarray(numbers.normal(size=(24, 16)))
    moment = numbers.normal(size=(30, 20)).astype(np.float32)
    tree = {"params": {"w": weight, "b": jnp.ones(16, jnp.bfloat16)}, "moment": moment, "step": 3}
    with ocp.CheckpointManager(here / "manager") as manager:
        for step in (1, 10):
            named = {"state": ocp.args.StandardSave(tree), "extra": ocp.args.JsonSave({"a": 1})}
            manager.save(step, args=ocp.args.Composite(**named))
        manager.wait_until_finished()
    tree["name"] = "text"
    for name, options in {
        "zarr2": {"use_ocdbt": False, "use_zarr3": False},
        "zarr3": {"use_ocdbt": False, "use_zarr3": True},
        "ocdbt3": {"use_ocdbt": True, "use_zarr3": True},
    }.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            how = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=512), tree)
            checkpointer.save(here / name, args=ocp.args.PyTreeSave(tree, save_args=how))
    deep = {"driver": "ocdbt", "base": f"file://{here}/deep/"}  # a tree of several levels
    deep["config"] = {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 0}
    made = tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {**deep, "path": "a/"},
            "metadata": {"compressor": {"id": "zstd"}},
        },
        create=True,
        dtype=tensorstore.int32,
        shape=[4, 100],
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=[1, 5]),
    ).result()
    made.write(np.arange(400, dtype=np.int32).reshape(4, 100) + 1).result()

    forms()


def forms() -> None:
    """Write arrays to one database in the ways of Zarr that Orbax does not choose, one by one."""
    import numpy as np
    import tensorstore

    numbers = np.arange(35).reshape(5, 7) - 9.0
    transpose = {"name": "transpose", "configuration": {"order": [1, 0]}}
    order = {"name": "bytes", "configuration": {"endian": "big"}}
    gzip = {"name": "gzip", "configuration": {"level": 5}}
    inner = {"chunk_shape": [2, 2], "codecs": [transpose, {"name": "bytes"}, gzip]}
    shards = {"name": "sharding_indexed", "configuration": inner}
    old = {
        "gzip": ("float32", {"compressor": {"id": "gzip"}, "order": "F", "chunks": [2, 3]}),
        "zlib": ("int16", {"compressor": {"id": "zlib"}, "chunks": [5, 2]}),
        "plain": ("bfloat16", {"compressor": None, "chunks": [2, 4], "dimension_separator": "/"}),
        "blosc": ("float32", {"compressor": {"id": "blosc"}, "chunks": [4, 4]}),
        "swapped": (">f4", {"compressor": None, "chunks": [5, 7]}),
        "some": ("float32", {"compressor": None, "chunks": [2, 2], "fill_value": 1.5}),
    }
    new = {
        "transposed": ("float64", [transpose, {"name": "bytes"}], [3, 7], None),
        "summed": ("int32", [order, {"name": "crc32c"}], [2, 7], None),
        "shards": ("float16", [shards], [4, 4], None),
        "few": ("bfloat16", [shards], [4, 8], -2.5),
    }
    base = {"driver": "ocdbt", "base": f"file://{Path.cwd()}/forms/"}
    for name, (dtype, how) in old.items():
        spec = {"driver": "zarr", "kvstore": {**base, "path": f"{name}/"}}
        spec |= {
            "metadata": {**how, "dtype": dtype if dtype == "bfloat16" else np.dtype(dtype).str}
        }
        _write(tensorstore, spec, numbers, name)
    for name, (dtype, codecs, chunk, fill) in new.items():
        spec = {"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}}
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        about = {"codecs": codecs, "chunk_grid": grid, "data_type": dtype}
        about |= {} if fill is None else {"fill_value": fill}
        _write(tensorstore, spec | {"metadata": about}, numbers, name)


def _write(library: Any, spec: dict[str, Any], numbers: Any, name: str) -> None:  # noqa: ANN401
    """Write all of an array, or a row of it."""
    made = library.open(spec, create=True, shape=[5, 7]).result()
    part = numbers.astype(made.dtype.numpy_dtype)
    if name in ("some", "few"):
        made[1].write(part[1]).result()
    else:
        made.write(part).result()


def torchsnapshot() -> None:
    """Save two steps, and tensors in parts; small ones are put together in a file."""
    from torchsnapshot import Snapshot, StateDict, knobs

    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    extra = StateDict(step=5, rate=0.5, name="a/b", flag=True, raw=b"xx", nothing=None)
    extra["a/b%"] = torch.zeros(3, dtype=torch.complex64)
    for step in (1, 2):
        Snapshot.take(f"step_{step}", {"model": model, "optim": optimizer, "extra": extra})
    with (
        knobs.override_max_chunk_size_bytes(500),
        knobs.override_is_batching_disabled(disabled=True),
    ):
        Snapshot.take("parts", {"extra": StateDict(w=torch.arange(400.0).reshape(100, 4))})


def foreign() -> None:
    """Save some numbers in formats of others, each by its own library."""
    import flax.serialization
    import gguf
    import h5py
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    numbers = np.arange(256, dtype=np.float32).reshape(4, 64)
    for name, version in (("model.h5", None), ("latest.hdf5", "latest")):
        with h5py.File(name, "w", libver=version) as file:
            file["a"] = file["b/c"] = numbers
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_array("tokens", ["a", "bc"])
    writer.add_tensor("w", numbers)
    packed = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("q", gguf.quants.quantize(numbers, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez("state.npz", a=numbers, b=np.int64(3), c=np.array(["x", "yy"]))
    np.savez_compressed("packed.npz", a=numbers, z=np.zeros(0))
    sides = [
        helper.make_tensor_value_info(one, onnx.TensorProto.FLOAT, [4, 64]) for one in ("x", "y")
    ]
    node, held = helper.make_node("Add", ["x", "w"], ["y"]), numpy_helper.from_array(numbers, "w")
    model = helper.make_model(helper.make_graph([node], "g", sides[:1], sides[1:], [held]))
    onnx.save(model, "model.onnx")
    apart = {"save_as_external_data": True, "location": "apart.data", "size_threshold": 0}
    onnx.save(model, "apart.onnx", **apart)
    state = {"p": {"w": numbers, "b": np.ones(3, np.float16)}, "step": 5, "rate": 1.5, "n": None}
    Path("flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(state))


SINGLE = (accelerate, transformers, lightning, deepspeed, orbax, torchsnapshot, foreign)
RUNS = (accelerate_run, transformers_run, deepspeed_run, fsdp_run)
WRITERS = {one.__name__: one for one in (*SINGLE, *RUNS)}
PACKAGES = {
    "orbax": ("orbax-checkpoint", "tensorstore"),
    "foreign": ("flax", "gguf", "h5py", "numpy", "onnx"),
}


def main(name: str) -> None:
    """Run a writer on its ranks, and keep what it wrote with the versions."""
    target = FOLDER / name
    if target.exists():
        sys.exit(f"{target} exists: remove it first")
    ranks = RANKS.get(name, 1)
    with tempfile.TemporaryDirectory(prefix="run-") as run:
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631", "HF_HUB_OFFLINE": "1"}
        started = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), name, "rank"],
                cwd=run,
                env=os.environ
                | (shared if ranks > 1 else {"HF_HUB_OFFLINE": "1"})
                | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            )
            for rank in range(ranks)
        ]
        ended = [one.wait() for one in started]
        if any(ended):
            sys.exit(f"{name} failed")
        shutil.copytree(run, target, ignore=shutil.ignore_patterns("*.py"))  # theirs, no data
    library = LIBRARY.get(name, name.removesuffix("_run"))
    packages = (*PACKAGES.get(name, (library,)), "torch")
    versions = {one: importlib.metadata.version(one) for one in packages}
    about = {"library": library, "ranks": ranks, "versions": versions}
    (FOLDER / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    WRITERS[sys.argv[1]]() if sys.argv[2:] else main(sys.argv[1])
