"""torchtitan: states that do not come back, or are changed by a save.

CKC-RTRP-006 (a module's extra state that is a dict), CKC-RTRP-010 (a parameter that the optimizer
lists and never updates), CKC-SIDE-009 (a save before the first step).
"""

import logging
import os
import sys

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import utils


class Nothing:
    """A part of a training without state."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict) -> None:
        """Nothing."""


class Optimizer:
    """What torchtitan's OptimizersContainer does, for one optimizer."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict:
        utils.init_optim_state(self.optimizer)
        return utils.get_flat_optim_state_dict(self.optimizer)

    def load_state_dict(self, state_dict) -> None:
        utils.init_optim_state(self.optimizer)
        utils.load_flat_optim_state_dict(self.optimizer, state_dict)


class Recipe(torch.nn.Linear):
    """A module that gives a dict by get_extra_state, as fp8 recipes do."""

    def get_extra_state(self) -> dict:
        return {"amax": [1.0]}

    def set_extra_state(self, state) -> None:
        """Nothing."""


def manager(folder: str, model, optimizer) -> CheckpointManager:
    """Make a manager of a model and its optimizer."""
    return CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0, folder=folder),
        dataloader=Nothing(),
        model_parts=[model],
        optimizers=Optimizer(optimizer) if optimizer else Nothing(),
        lr_schedulers=Nothing(),
        states={},
        sd_adapter=None,
        base_folder=os.path.abspath("kept"),
    )


def extra_state() -> str:
    """Save a model with such a module; return the error."""
    try:
        manager("extra", Recipe(2, 2), None).save(1)
    except AttributeError as error:
        return repr(error)
    return ""


def trained(seed: int) -> tuple:
    """Train a step, in which the second layer takes no part."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.named_parameters())
    return model, optimizer


def unused() -> str:
    """Save after a step, load into a new job; return the error."""
    model, optimizer = trained(1)
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager("unused", model, optimizer).save(1)
    try:
        manager("unused", *trained(2)).load()
    except BaseException as error:  # DCP's error is none of Exception
        return str(error).strip().splitlines()[-1]
    return ""


def early() -> bool:
    """Train two steps, with and without a save before the first; tell whether that differs."""
    weights = []
    for saves in (False, True):
        model, optimizer = trained(1)
        if saves:
            manager("early", model, optimizer).save(0)
        for _ in range(2):
            torch.manual_seed(5)
            (model(torch.randn(4, 2)) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model[0].weight.detach().clone())
    return not torch.equal(*weights)


def main() -> None:
    """Try all three."""
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {"extra state": extra_state(), "unused parameter": unused(), "early save": early()}
    print(f"extra state: {found['extra state']}; unused parameter: {found['unused parameter']}")
    print(f"a save at step 0 changes the weights after two steps: {found['early save']}")
    print(f"shown: {[name for name, shown in found.items() if shown]}")
    sys.stdout.flush()
    # At an ordinary exit gloo's threads may abort the process.
    os._exit(all(found.values()))


main()
