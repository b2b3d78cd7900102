"""torchtitan: a save of a step that is there destroys it before the new one is whole.

CKC-ATOM-002 (a kill in that save), CKC-IOER-002 (an error of the disk in it). A job that is started
again from an older step saves the later ones again.
"""

import logging
import os
import resource
import signal
import sys

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager

LIMIT = 4096  # bytes: a file may not get larger, as on a full disk


class Nothing:
    """A part of a training without state."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict) -> None:
        """Nothing."""


def manager(folder: str, model) -> CheckpointManager:
    """Make a manager of a model."""
    return CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0, folder=folder),
        dataloader=Nothing(),
        model_parts=[model],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={},
        sd_adapter=None,
        base_folder=os.path.abspath("kept"),
    )


def model_of(value: float):
    """Return a model of 64 kB whose every weight has a value."""
    model = torch.nn.Linear(128, 128)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def in_child(work) -> str:
    """Run in a process of its own; return what it says, or the signal that ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        logging.disable(logging.CRITICAL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            said = str(work())
        except BaseException as error:  # DCP's error is none of Exception
            said = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    return said or f"killed by signal {os.WTERMSIG(status)}"


def again(folder: str, action) -> bool:
    """Save step 4 once more, while no file may grow; `action` is what the signal does."""
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    return manager(folder, model_of(5.0)).save(4)


def latest(folder: str) -> str:
    """Load the latest; return the smallest and the largest weight."""
    model = model_of(-1.0)
    loaded = manager(folder, model).load()
    return f"{loaded}, weights {model.weight.min().item()} to {model.weight.max().item()}"


def main() -> None:
    """Save steps 2 and 4; die, or fail, in a second save of 4; load the latest."""
    lost = []
    for how, action in (("kill", signal.SIG_DFL), ("error", signal.SIG_IGN)):
        for step in (2, 4):
            in_child(lambda step=step, how=how: manager(how, model_of(step)).save(step))
        before = in_child(lambda how=how: latest(how))
        saved = in_child(lambda how=how, action=action: again(how, action))
        after = in_child(lambda how=how: latest(how))
        print(f"{how}: load gave {before}; the second save: {saved}; load gives {after}")
        lost += [how] * (after not in {before, "True, weights 5.0 to 5.0"})
    print(f"step 4 was whole, and is lost after: {lost}")
    sys.exit(lost == ["kill", "error"])


main()
