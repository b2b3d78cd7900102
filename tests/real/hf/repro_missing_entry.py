"""transformers: what the model needs and the checkpoint lacks stays as it was initialised.

`load_state_dict(state_dict, False)` is followed by a warning in the log. Ends with 1 where a resume
goes on so.
"""

from __future__ import annotations

import logging
import sys
import tempfile

import tiny
import torch

lines: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("transformers").addHandler(handler)


def larger(model: torch.nn.Module) -> torch.nn.Module:
    """Add a buffer that no checkpoint holds."""
    model.register_buffer("newcomer", torch.full((4,), 0.5))
    return model


with tempfile.TemporaryDirectory() as folder:
    trainer = tiny.trainer_of(folder, 2)
    trainer.train()
    kept: list[torch.Tensor] = []

    def keep(trainer: tiny.Trainer) -> None:
        """Copy what was loaded."""
        kept.append(trainer.model.get_buffer("newcomer").clone())

    model = larger(tiny.GPT2LMHeadModel(trainer.model.config))
    tiny.trainer_of(folder, 3, keep, model).train(resume_from_checkpoint=True)
print("log:", [line for line in lines if "newcomer" in line])
print(f"the checkpoint lacks 'newcomer'; train() goes on with its initial value {kept[0].tolist()}")
sys.exit(torch.equal(kept[0], torch.full((4,), 0.5)))
