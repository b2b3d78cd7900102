"""torchsnapshot fails on empty tensors and on float8 (CKC-RTRP-011, CKC-RTRP-004)."""

import sys

import torch
from torchsnapshot import Snapshot, StateDict

TENSORS = {
    "float32": torch.ones(3),
    "empty": torch.ones(0, 8),
    "float8_e4m3fn": torch.ones(3).to(torch.float8_e4m3fn),
}


def main() -> None:
    """Take a snapshot of each tensor."""
    failed = {}
    for name, tensor in TENSORS.items():
        try:
            Snapshot.take(path=f"kept-{name}", app_state={"tensors": StateDict(value=tensor)})
        except Exception as error:  # whatever refuses
            failed[name] = f"{type(error).__name__}: {str(error)[:60]}"
    print(f"a snapshot was taken of {sorted(TENSORS.keys() - failed)}; failed: {failed}")
    sys.exit(failed.keys() == {"empty", "float8_e4m3fn"})


main()
