"""What the scripts share: a small module, and a Trainer that saves every step."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Module(pl.LightningModule):  # type: ignore[misc]  # known at run time only
    """One layer."""

    def __init__(self, width: int = 8) -> None:
        """Make the layer."""
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters())


class Hook(pl.Callback):  # type: ignore[misc]  # as above
    """Calls a function before each batch, with the step, and at the start."""

    def __init__(self, function: Any) -> None:
        """Keep the function."""
        self.function = function

    def on_train_batch_start(self, trainer: Any, module: Any, *_: object) -> None:
        """Call it."""
        self.function(trainer.global_step, module)


def fit(  # noqa: PLR0913, PLR0917  what the scripts vary
    folder: str,
    steps: int,
    resume: str | None = None,
    hook: Any = None,
    module: Any = None,
    width: int = 8,
) -> None:
    """Train, and save after each step: one file by its number, and `last.ckpt`."""
    saves = pl.callbacks.ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        monitor="step",
        mode="max",
        every_n_train_steps=1,
        save_top_k=-1,
        save_last=True,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[saves, *([Hook(hook)] if hook else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(torch.randn(64, width), batch_size=4)
    trainer.fit(module or Module(width), batches, ckpt_path=resume)
