"""What the scripts share: a tiny GPT-2 and a Trainer that saves every second step."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)

logging.disable_progress_bar()


class Stop(TrainerCallback):
    """Calls a function with the Trainer once everything is loaded."""

    def __init__(self, function: Any) -> None:
        """Keep the function."""
        self.function, self.trainer = function, None

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Call it."""
        self.function(self.trainer)


def trainer_of(
    folder: str,
    steps: int,
    loaded: Any = None,
    model: Any = None,
    **options: Any,
) -> Trainer:
    """Make a Trainer; `loaded` is called with it when train() has loaded what it resumes from."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    ids = torch.randint(0, 64, (40, 8))
    trainer = Trainer(
        model=model or GPT2LMHeadModel(config),
        args=TrainingArguments(
            folder,
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            report_to=[],
            logging_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )
    if loaded:
        callback = Stop(loaded)
        callback.trainer = trainer
        trainer.add_callback(callback)
    return trainer


def in_child(function: Any, *arguments: Any, **options: Any) -> int:
    """Call a function in a process of its own; return how that ended.

    What has trained can't be forked: whatever trains runs in such a process.
    """
    process = os.fork()
    if process == 0:
        try:
            function(*arguments, **options)
        except OSError as error:
            print(f"  train() raised {error!r}", flush=True)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
