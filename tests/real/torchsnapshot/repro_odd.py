"""torchsnapshot takes no bfloat16 tensor with an odd number of elements (CKC-RTRP-004)."""

import sys

import torch
from torchsnapshot import Snapshot, StateDict


def main() -> None:
    """Take a snapshot of tensors of two and of three elements, in each of two dtypes."""
    failed = {}
    for dtype in (torch.float16, torch.bfloat16):
        for count in (2, 3):
            name = f"{count} of {dtype}"
            state = StateDict(value=torch.ones(count, dtype=dtype))
            try:
                Snapshot.take(path=f"kept-{dtype}-{count}", app_state={"tensors": state})
            except AssertionError as error:
                failed[name] = str(error)[-40:]
    print(f"of four tensors these can't be saved: {failed}")
    sys.exit(bool(failed))


main()
