"""torchsnapshot takes no bfloat16 tensor without dimensions, such as a buffer (CKC-RTRP-012).

bfloat16 is looked at as float32, as in repro_odd.py: of one element nothing is left.
"""

import sys

import torch
from torchsnapshot import Snapshot


class Scaled(torch.nn.Module):
    """A model whose one buffer is a number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=dtype))


def main() -> None:
    """Take a snapshot of such a buffer in each of three dtypes."""
    failed = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        try:
            Snapshot.take(path=f"kept-{dtype}", app_state={"model": Scaled(dtype)})
        except Exception as error:  # whatever refuses
            failed[str(dtype)] = f"{type(error).__name__}: {str(error)[:80]}"
    print(f"of three dtypes a number can't be saved in {failed}")
    sys.exit(failed.keys() == {"torch.bfloat16"})


main()
