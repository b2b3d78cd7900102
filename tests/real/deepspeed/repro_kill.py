"""DeepSpeed: a kill in save_checkpoint.

CKC-ATOM-001: `latest` is emptied before it is written; after a kill in between no load without a
tag finds a checkpoint. CKC-ATOM-002: a tag that is saved again is written in place, file by file;
after a kill a load gives the model of one save and the optimizer of the other. CKC-IOER-002: after
an error of the disk in such a save nothing loads.
"""

import logging
import os
import resource
import signal
import sys

os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is to be compiled


def engine_of(steps: int):
    """Train some steps of ZeRO-1 on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    return engine


def in_child(work) -> str:
    """Run in a process of its own; return what it says, or the signal that ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        logging.disable(logging.CRITICAL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            said = str(work())
        except Exception as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    return said or f"killed by signal {os.WTERMSIG(status)}"


def save(folder: str, steps: int, tag: str) -> bool:
    """Train, and save."""
    return engine_of(steps).save_checkpoint(folder, tag=tag)


def dying(folder: str, steps: int, tag: str, name: str) -> None:
    """Train, and be killed once the file `name` was opened for writing."""
    import builtins

    engine, real = engine_of(steps), builtins.open

    def opened(file, *words, **named):
        made = real(file, *words, **named)
        if str(file).endswith(name) and "w" in (*words, "")[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    builtins.open = opened
    engine.save_checkpoint(folder, tag=tag)


def dying_between(folder: str, steps: int, tag: str) -> None:
    """Train, and be killed in a save before the file of the optimizer."""
    engine, real = engine_of(steps), torch.save

    def saving(state, file, *words, **named) -> None:
        if "optim_states" in str(file):
            os.kill(os.getpid(), signal.SIGKILL)
        real(state, file, *words, **named)

    torch.save = saving
    engine.save_checkpoint(folder, tag=tag)


def failing(folder: str, steps: int, tag: str) -> None:
    """Train, and save where no file may get larger than 1 kB, as on a full disk."""
    engine = engine_of(steps)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    engine.save_checkpoint(folder, tag=tag)


def loaded(folder: str) -> str:
    """Load what `latest` names; return how many steps the engine and the optimizer have made."""
    engine = engine_of(0)
    path, _ = engine.load_checkpoint(folder)
    states = engine.optimizer.optimizer.state.values()
    adam = [int(state["step"]) for state in states if "step" in state]
    return f"{path and os.path.basename(path)}: engine at {engine.global_steps}, Adam at {adam}"


def main() -> None:
    """Try all three."""
    first = os.path.abspath("first")
    in_child(lambda: save(first, 2, "two"))
    died = in_child(lambda: dying(first, 4, "four", "latest"))
    after = in_child(lambda: loaded(first))
    print(f"killed in the write of `latest` ({died}): load_checkpoint gives {after}")
    second = os.path.abspath("second")
    in_child(lambda: save(second, 2, "same"))
    died = in_child(lambda: dying_between(second, 4, "same"))
    mixed = in_child(lambda: loaded(second))
    print(f"killed in a second save of a tag ({died}): load_checkpoint gives {mixed}")
    third = os.path.abspath("third")
    in_child(lambda: save(third, 2, "same"))
    failed = in_child(lambda: failing(third, 4, "same"))
    destroyed = in_child(lambda: loaded(third))
    print(f"a second save of a tag failed ({failed[:60]}): load_checkpoint gives {destroyed}")
    lost = not after.startswith(("mp_rank", "two", "four"))
    mixture = "engine at 4, Adam at [2" in mixed
    gone = "Error" in failed and "Error" in destroyed
    print(f"nothing loads after a kill: {lost}; nor after an error: {gone}; a mixture: {mixture}")
    sys.exit(lost and gone and mixture)


main()
