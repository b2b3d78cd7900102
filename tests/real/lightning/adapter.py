"""Lightning: `ModelCheckpoint` in a `Trainer`; the adapter is the bundled one."""

from ckpt_conformance.adapters.lightning_checkpoint import make

__all__ = ["make"]
