"""Fault injectors: one module per fault.

Each says what it models, what it does not, and how it proves that it fired. Those at a call are
installed in a child by `Child.arm`; `at_rest` damages files that nobody writes at the moment.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.harness.messages import Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AT_CALL: Mapping[str, str] = {
    "file-write": "file_write:FileWrite",
    "file-read": "file_read:FileRead",
    "torch-save": "torch_save:TorchSave",
    "torch-load": "torch_load:TorchLoad",
    "safetensors-save": "safetensors_save:SafetensorsSave",
    "dcp-save": "dcp_calls:DcpSave",
    "dcp-load": "dcp_calls:DcpLoad",
    "dcp-writer": "dcp_writer:DcpWriter",
    "rename": "rename:Rename",
    "unlink": "unlink:Unlink",
    "fsync": "fsync:Fsync",
    "collecting": "collecting:Collecting",
    "cross-device": "cross_device:CrossDevice",
    "stale-listing": "stale_listing:StaleListing",
    "system-call": "system_call:SystemCall",
    "slow-disk": "slow_disk:SlowDisk",
}

_PARTS = re.compile(
    r"Models: (?P<models>.*?)\nDoes not model: (?P<not_models>.*?)\nProof: (?P<proof>.*)", re.DOTALL
)


@dataclass(frozen=True)
class FaultInfo:
    """A fault, in the words of its module's header."""

    name: str
    models: str
    not_models: str
    proof: str


def spec(name: str, *, ranks: Sequence[int] | None = None, **args: object) -> Fault:
    """Make a fault at a call, by its name and the arguments of its injector; on some ranks only."""
    where = None if ranks is None else tuple(ranks)
    return Fault(injector=f"{__name__}.{AT_CALL[name]}", args=args, ranks=where)


def all_faults() -> Mapping[str, FaultInfo]:
    """Describe every fault by name."""
    from ckpt_conformance.fault_injectors import at_rest

    found = {name: where.partition(":")[0] for name, where in AT_CALL.items()}
    found |= dict.fromkeys((*at_rest.AT_REST, "other-step"), "at_rest")
    found["dcp-chunk-hole"] = "dcp_metadata"
    return {name: _describe(name, module) for name, module in found.items()}


def _describe(name: str, module: str) -> FaultInfo:
    text = importlib.import_module(f"{__name__}.{module}").__doc__ or ""
    parts = _PARTS.search(text)
    if parts is None:
        msg = f"the header of {module} lacks one of Models, Does not model, Proof"
        raise ValueError(msg)
    plain = {key: " ".join(value.split()) for key, value in parts.groupdict().items()}
    return FaultInfo(name, **plain)
