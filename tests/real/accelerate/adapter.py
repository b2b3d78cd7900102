"""accelerate: `save_state` and `load_state`; the adapter is the bundled one."""

from ckpt_conformance.adapters.accelerate_state import make

__all__ = ["make"]
