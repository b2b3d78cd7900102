"""Fault injectors: a table of patched calls, and a module for each fault of another kind.

Each says what it models, what it does not, and how it proves that it fired: a row of the table
(`patched_calls`) in its fields, a module in its header. Those at a call are installed in a child by
`Child.arm`; `at_rest` damages files that nobody writes at the moment; those of `object_store`
strike requests, in a proxy in front of the store.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.harness.messages import Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AT_CALL: Mapping[str, str] = {
    "file-write": "file_write:FileWrite",
    "file-read": "file_read:FileRead",
    "torch-save": "patched_calls:TORCH_SAVE",
    "torch-load": "patched_calls:TORCH_LOAD",
    "safetensors-save": "patched_calls:SAFETENSORS_SAVE",
    "dcp-save": "patched_calls:DCP_SAVE",
    "dcp-load": "patched_calls:DCP_LOAD",
    "dcp-writer": "patched_calls:DCP_WRITER",
    "rename": "patched_calls:RENAME",
    "unlink": "patched_calls:UNLINK",
    "fsync": "patched_calls:FSYNC",
    "collecting": "collecting:Collecting",
    "cross-device": "cross_device:CrossDevice",
    "late-threads": "late_threads:LateThreads",
    "stale-listing": "stale_listing:StaleListing",
    "system-call": "system_call:SystemCall",
    "slow-disk": "slow_disk:SlowDisk",
    "no-patience": "no_patience:NoPatience",
    "no-room": "no_room:NoRoom",
    "process-id": "process_id:ProcessId",
    "other-release": "other_release:OtherRelease",
    "torch-cast": "torch_cast:TorchCast",
    "torch-tie": "torch_tie:TorchTie",
}
"""Where the injector of a name is: a class, or a row of the table, which makes one as a class does.

Both are called with `root`, `journal` and the arguments of the fault."""

_PARTS = re.compile(
    r"Models: (?P<models>.*?)\nDoes not model: (?P<not_models>.*?)\nProof: (?P<proof>.*)", re.DOTALL
)


@dataclass(frozen=True)
class FaultInfo:
    """What a fault models, what it does not, and how it proves that it fired; for users."""

    name: str
    models: str
    not_models: str
    proof: str


def spec(name: str, *, ranks: Sequence[int] | None = None, **args: object) -> Fault:
    """Make a fault at a call, by its name and the arguments of its injector; on some ranks only.

    Raises KeyError for a name that is not in `AT_CALL`.
    """
    only = None if ranks is None else tuple(ranks)
    return Fault(injector=f"{__name__}.{AT_CALL[name]}", args=args, ranks=only)


def all_faults() -> Mapping[str, FaultInfo]:
    """Describe every fault by name."""
    from ckpt_conformance.fault_injectors import at_rest
    from ckpt_conformance.fault_injectors.object_store import faults

    places = {
        **AT_CALL,
        **{name: f"object_store.faults:{kind.__name__}" for name, kind in faults.AT_STORE.items()},
        **dict.fromkeys((*at_rest.AT_REST, "other-step", "grown"), "at_rest"),
        "dcp-chunk-hole": "dcp_metadata",
        "slow-uploads": "slow_uploads",
        "cut-uploads": "cut_uploads",
        "clock-back": "clock_back",
    }
    return {name: _describe(name, place) for name, place in places.items()}


def _describe(name: str, place: str) -> FaultInfo:
    """Read a row of the table, or the header of a module or of a fault at a store.

    Raises ValueError where a part is missing.
    """
    from ckpt_conformance.fault_injectors.object_store.faults import StoreFault
    from ckpt_conformance.fault_injectors.patched_calls import PatchedCall

    module_name, _, attribute = place.partition(":")
    module = importlib.import_module(f"{__name__}.{module_name}")
    row = getattr(module, attribute, None)
    if isinstance(row, PatchedCall):
        return FaultInfo(name, row.models, row.not_models, row.proof)
    has_own = isinstance(row, type) and issubclass(row, StoreFault)
    parts = _PARTS.search(inspect.getdoc(row if has_own else module) or "")
    if parts is None:
        msg = f"the header of {module_name} lacks one of Models, Does not model, Proof"
        raise ValueError(msg)
    plain = {key: " ".join(value.split()) for key, value in parts.groupdict().items()}
    return FaultInfo(name, **plain)
