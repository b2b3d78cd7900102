"""What a file holds by its structure: the state of an optimizer, of a scheduler, of a model.

Nothing here looks at names of files; `misplaced` holds what is found against them. A role is said
only where a library's own keys say it: what is not recognised has none, and nothing follows.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeGuard

from ckpt_conformance.fsck.formats import torch_file
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name
from ckpt_conformance.fsck.source.findings import Held, Malformed, Role
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import is_dict, is_sequence, is_tuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.formats.torch_file import Archive
    from ckpt_conformance.fsck.source.source import Readable

_MOST_COUNTED = 1 << 53  # JSON keeps such a number
_MOST_LEVELS = 4
_MOST_OPTIMIZERS = 16
_MOST_SEEN = 100_000  # containers of one file
_MOST_PARTS = 200  # entries of a dict that is looked into; a larger one is a model's or nobody's
_MOST_STEPS = 4  # parameters whose count of steps is read: each is a look at the payload
_OF_CPU, _OF_CUDA = (5056,), (16,)  # bytes of the state of torch's generators
_OF_PYTHON = 625  # words of that of Python's
_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval"}
_SCHEDULER = {"_step_count", "base_lrs", "_last_lr", "num_bad_epochs"}
_WARMUP = {"last_batch_iteration"}  # DeepSpeed's
_MEGATRON = {"max_lr", "lr_warmup_steps", "num_steps"}
_LOADER = {"_snapshot", "_num_yielded", "_sampler_iter_state", "_index_sampler_state", "yielded"}
_MOMENTS = ("exp_avg", "momentum", "moment", "square", "max_exp")
_PARAMETERS = ("weight", "bias")
_ARGUMENTS = ("Arguments", "Config", "Namespace")
_NUMBERS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


@dataclass
class _Found:
    """What a walk has met; `strange` is what no role is known for."""

    roles: set[Role] = field(default_factory=set[Role])
    optimizers: list[dict[object, object]] = field(default_factory=list["dict[object, object]"])
    schedulers: list[dict[object, object]] = field(default_factory=list["dict[object, object]"])
    strange: bool = False
    seen: set[int] = field(default_factory=set[int])


def held(file: Readable, archive: Archive) -> Held | None:
    """Say what an archive holds; None where its structure could not be read."""
    if archive.tree is None:
        return None
    found = _Found()
    _walk(archive.tree, found, 0)
    numbers = {
        Role.OPTIMIZER: _agreed(_steps(file, archive, found.optimizers)),
        Role.SCHEDULER: _agreed(map(_epochs, found.schedulers)),
    }
    counts = {role: number for role, number in numbers.items() if is_count(number)}
    return Held(frozenset(found.roles), not found.strange, counts, _mark(archive))


def is_count(number: int | None) -> TypeGuard[int]:
    """Return whether a number may be one of steps; 0 counts nothing yet."""
    return number is not None and 0 < number < _MOST_COUNTED


def _mark(archive: Archive) -> str:
    """Return a digest of the lengths and CRCs of all records; nothing where one has no CRC."""
    if archive.unsummed or not archive.records:
        return ""
    records = sorted((one.name, one.end - one.start, one.crc) for one in archive.records.values())
    return hashlib.blake2b(repr(records).encode(errors="replace"), digest_size=12).hexdigest()


# -- roles -----------------------------------------------------------------------------------------


def _walk(part: Any, found: _Found, level: int) -> None:  # noqa: ANN401  what a pickle holds
    """Note the role of a part, or those of what it holds; each part once, however it is shared."""
    if _is_plain(part) or id(part) in found.seen:
        return
    found.seen.add(id(part))
    role = _role_of(part)
    if role is not None:
        found.roles.add(role)
        if role is Role.OPTIMIZER:
            found.optimizers += _states_in(part)
        elif role is Role.SCHEDULER:
            found.schedulers.append(part)
        return
    if is_dict(part) and part.get("module") is not None and "global_steps" in part:
        found.roles.add(Role.MODEL)  # DeepSpeed's, whatever its parameters are called
    inner = _inner(part)
    is_deep = level >= _MOST_LEVELS or len(found.seen) > _MOST_SEEN
    if inner is None or is_deep or _has_moments(part):
        found.strange = True
        return
    for one in inner:
        _walk(one, found, level + 1)


def _is_plain(part: object) -> bool:
    """Return whether a part is a value that no role is asked of: a number, a text, a name."""
    return part is None or isinstance(part, bool | int | float | str | bytes | Name)


def _inner(part: object) -> list[Any] | None:
    """Return what a container holds, less plain values; None for what is none, or too large."""
    values = part.values() if is_dict(part) else part if is_sequence(part) else None
    if values is None:
        return None
    inner = list(islice((one for one in values if not _is_plain(one)), _MOST_PARTS + 1))
    return inner if len(inner) <= _MOST_PARTS else None


def _role_of(part: Any) -> Role | None:  # noqa: ANN401  as above
    """Return the role that a part has by its own keys; None where these say none."""
    if isinstance(part, Made):
        return _role_of_made(part)
    if is_dict(part):
        return _role_of_dict(part)
    return Role.GENERATORS if is_sequence(part) and _is_state(part) else None


def _role_of_dict(part: dict[object, object]) -> Role | None:
    if _is_optimizer(part) or _is_zero(part):
        return Role.OPTIMIZER
    if _is_scheduler(part):
        return Role.SCHEDULER
    if part.keys() >= _SCALER:
        return Role.SCALER
    if part.keys() & _LOADER:
        return Role.LOADER
    return Role.MODEL if _is_model(part) else None


def _role_of_made(part: Made) -> Role | None:
    """Return the role of an instance or a tensor."""
    if tensor := torch_file.as_tensor(part):
        return Role.GENERATORS if _shape(tensor) in (_OF_CPU, _OF_CUDA) else None
    name = part.of.name if isinstance(part.of, Name) else ""
    if name.endswith("Sampler"):
        return Role.LOADER
    return Role.ARGUMENTS if name.endswith(_ARGUMENTS) else None


def _shape(tensor: Made) -> object:
    """Return the shape of a tensor of bytes; None for any other."""
    storage = tensor.args[0] if is_tuple(tensor.args) and tensor.args else None
    pid = getattr(storage, "id", None)
    is_bytes = is_tuple(pid) and len(pid) > 1 and getattr(pid[1], "name", "") == "ByteStorage"
    return tensor.args[2] if is_bytes and len(tensor.args) > 2 else None  # noqa: PLR2004  v2's third


def _is_optimizer(part: dict[object, object]) -> bool:
    groups = part.get("param_groups")
    if not is_sequence(groups) or not groups or "state" not in part:
        return False
    return all(is_dict(one) and "params" in one for one in groups)


def _is_zero(part: dict[object, object]) -> bool:
    """Return whether it is what DeepSpeed's ZeRO writes of an optimizer."""
    return "zero_stage" in part and "partition_count" in part


def _is_scheduler(part: dict[object, object]) -> bool:
    known = "last_epoch" in part and part.keys() & _SCHEDULER
    return bool(known) or part.keys() >= _WARMUP or part.keys() >= _MEGATRON


def _is_model(part: dict[object, object]) -> bool:
    """Return whether all values are tensors, and their names those of layers."""
    if not all(isinstance(key, str) for key in part):
        return False
    if not any(isinstance(key, str) and key.endswith(_PARAMETERS) for key in part):
        return False
    if _has_moments(part):
        return False
    kept = (value for key, value in part.items() if not str(key).endswith("_extra_state"))
    return all(isinstance(value, Made) and _role_of_made(value) is None for value in kept)


def _has_moments(part: object) -> bool:
    """Return whether a key is one of an optimizer's own format: what is below it is no model."""
    keys = (key for key in part if isinstance(key, str)) if is_dict(part) else ()
    return any(word in key for key in keys for word in _MOMENTS)


def _is_state(part: Any) -> bool:  # noqa: ANN401  as above
    """Return whether a sequence is the state of Python's generator, or of numpy's old one."""
    if len(part) > 1 and is_sequence(part[1]):
        return len(part[1]) == _OF_PYTHON
    return bool(part) and part[0] == "MT19937"


# -- counts ----------------------------------------------------------------------------------------


def _agreed(numbers: Iterator[int | None]) -> int | None:
    """Return the number that all agree on; None where one is not known."""
    known = set(numbers)
    return known.pop() if len(known) == 1 else None


def _epochs(scheduler: dict[object, object]) -> int | None:
    """Return how often a scheduler was stepped; one that follows a metric is asked seldom."""
    if "num_bad_epochs" in scheduler:
        return None
    number = scheduler.get("last_epoch", scheduler.get("last_batch_iteration"))
    return number if type(number) is int else None


def _states_in(part: dict[object, object]) -> list[dict[object, object]]:
    """Return the states of optimizers in a part: ZeRO holds one of torch."""
    if _is_optimizer(part):
        return [part]
    inner = (part.get("base_optimizer_state"), part.get("optimizer_state_dict"))
    return [one for one in inner if is_dict(one) and _is_optimizer(one)]


def _steps(
    file: Readable, archive: Archive, optimizers: list[dict[object, object]]
) -> Iterator[int | None]:
    """Yield the steps that some parameters of each optimizer have counted."""
    for optimizer in optimizers[:_MOST_OPTIMIZERS]:
        state = optimizer.get("state")
        entries = [one for one in state.values() if is_dict(one)] if is_dict(state) else []
        entries = [one for one in entries if "step" in one]
        for one in entries[:: max(len(entries) // _MOST_STEPS, 1)][:_MOST_STEPS]:
            yield _number(file, archive, one["step"])


def _number(file: Readable, archive: Archive, value: object) -> int | None:
    """Return a whole number, which may be a tensor; None for anything else."""
    if type(value) is int:
        return value
    made = torch_file.as_tensor(value)
    if made is None:
        return None
    try:
        tensor = torch_file.tensor_of("step", made, archive.records)
        code = _NUMBERS.get(tensor.dtype)
        if code is None or tensor.last - tensor.first != struct.calcsize(code):
            return None
        (number,) = struct.unpack(code, exactly(file, tensor.start, struct.calcsize(code)))
        return int(number)
    except (Malformed, OSError, ValueError, OverflowError):  # infinities and NaN are no count
        return None
