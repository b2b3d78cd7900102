"""accelerate: a model whose buffers view parts of one storage is saved, and can not be loaded.

Ends with 1 where that shows.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator


class Halves(torch.nn.Module):
    """A parameter, and two buffers that are the halves of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        both = torch.arange(8.0)
        self.register_buffer("left", both[:4])
        self.register_buffer("right", both[4:])


with tempfile.TemporaryDirectory() as folder:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Halves())
    accelerator.save_state(folder)
    print("save_state returned")
    try:
        accelerator.load_state(folder)
    except RuntimeError as error:
        print(f"load_state: {error}")
        sys.exit(1)
print("load_state returned, too")
