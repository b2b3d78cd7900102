"""What changes the dtype or the precision of a tensor (bugs K)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any, cast

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.encode import is_dict, is_scalar
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt_conformance.reference_impl.encode import StateDict


def _change(optimizer: Any, key: str, new: Callable[[Any, Any], Any]) -> None:
    """Replace a tensor of each parameter's state; an empty key means all but `step`."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(parameter, torch.Tensor) else ():
            is_meant = name == key or (not key and name != "step")
            if is_meant and isinstance(value, torch.Tensor):
                state[name] = new(parameter, value)


@mutant(
    "K01",
    url="pytorch/pytorch#43706",
    change="optimizer state is cast to the dtype of its parameter",
    violates={"CKC-COMP-003", "CKC-RSUM-010"},
)
class StateIsCast(CheckpointManager):
    """Fp32 masters and momentum of bf16 parameters lose their low bits."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then cast."""
        super().restore_optimizer(optimizer, state)
        _change(optimizer, "", lambda parameter, value: value.to(parameter.dtype))


@mutant(
    "K02",
    url="pytorch/torchtitan#4615",
    change="optimizer state of a narrower dtype than its parameter is promoted to it",
    violates={"CKC-COMP-003", "CKC-RSUM-010"},
)
class StateIsPromoted(CheckpointManager):
    """Bf16 momentum of fp32 parameters takes twice the memory and makes other updates."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then promote."""
        super().restore_optimizer(optimizer, state)
        wide = torch.promote_types
        _change(optimizer, "", lambda of, value: value.to(wide(value.dtype, of.dtype)))


@mutant(
    "K03",
    url="TensorAuto/OpenTau#185",
    change="fp32 masters are rebuilt from the bf16 parameters",
    violates={"CKC-COMP-003", "CKC-RSUM-010"},
)
class MastersAreRebuilt(CheckpointManager):
    """What the masters had beyond bf16 is lost at each resume."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then take the masters from the parameters."""
        super().restore_optimizer(optimizer, state)
        _change(optimizer, "master", lambda parameter, _: parameter.detach().float())


@mutant(
    "K04-known",
    url="NVIDIA/Megatron-LM#6666",
    change="an 8-bit float of a dtype that few know is saved by what its bits mean in another one",
    violates={"CKC-RTRP-004"},
)
class TakenForAKnownOne(CheckpointManager):
    """Has a table of two such dtypes."""

    KNOWN = (torch.float8_e4m3fn, torch.float8_e5m2)

    def capture_model(self, model: Any) -> StateDict:
        """Read the bits as e5m2."""
        state = super().capture_model(model)
        return {key: self._as_known(value) for key, value in state.items()}

    def _as_known(self, value: Any) -> Any:
        """Pass such a tensor through the wrong dtype; any other value is returned as it is."""
        is_short = isinstance(value, torch.Tensor) and str(value.dtype).startswith("torch.float8")
        if not is_short or value.dtype in self.KNOWN:
            return value
        return value.view(torch.float8_e5m2).float().to(value.dtype)


@mutant(
    "K04-signed",
    url="NVIDIA/Megatron-LM#6666",
    change="unsigned integers of more than 8 bits pass through float64, as those of NumPy may",
    violates={"CKC-RTRP-004"},
)
class UnsignedByArithmetic(CheckpointManager):
    """Loses what float64 cannot hold."""

    def capture_model(self, model: Any) -> StateDict:
        """Let NumPy do arithmetic with what torch does not."""
        state = super().capture_model(model)
        return {key: self._detour(value) for key, value in state.items()}

    def _detour(self, value: Any) -> Any:
        """Pass a tensor of uint64 through float64; any other value is returned as it is."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.uint64:
            return value
        return torch.from_numpy((value.numpy() * 1.0).astype("uint64"))


@mutant(
    "K01-first-group",
    url="pytorch/pytorch#43706",
    change="of an optimizer's groups the first gets its state back in its own dtype",
    violates={"CKC-COMP-003"},
)
class FirstGroupIsExact(CheckpointManager):
    """Undoes torch's cast for `param_groups[0]`, and has tried it on jobs with one group."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then cast the state of the other groups."""
        super().restore_optimizer(optimizer, state)
        first = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
        _change(optimizer, "", lambda of, value: value if id(of) in first else value.to(of.dtype))


@mutant(
    "K01-nested",
    url="pytorch/pytorch#43706",
    change="of an optimizer's state what lies in lists and dicts is cast to its parameter's dtype",
    violates={"CKC-COMP-003"},
)
class NestedStateIsCast(CheckpointManager):
    """Undoes torch's cast for tensors that lie in the state itself."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then cast what is nested."""
        super().restore_optimizer(optimizer, state)
        for parameter, entry in optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                for key, value in entry.items():
                    entry[key] = _nested_cast(value, parameter.dtype)


def _nested_cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors of a list or dict; any other value is returned as it is."""
    if isinstance(value, list):
        items = cast("Iterable[Any]", value)
        return [one.to(dtype) if isinstance(one, torch.Tensor) else one for one in items]
    if is_dict(value):
        return {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in value.items()}
    return value


@mutant(
    "K04",
    url="NVIDIA/Megatron-LM#6666",
    change="fp8 tensors are quantised anew, with a scale of their own, when they are loaded",
    violates={"CKC-RTRP-004", "CKC-RSUM-010"},
)
class QuantisedAgain(CheckpointManager):
    """What was saved is the dequantised value; the load makes other fp8 numbers of it."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Quantise to the full range before the load."""
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn:
                wide = value.float()
                value.copy_((wide * (448.0 / wide.abs().max())).to(value.dtype))
        super().restore_model(model, state)


@mutant(
    "K06",
    url="pytorch/pytorch#75214",
    change="the optimizer's step counter is cast to the dtype of its parameter",
    violates={"CKC-COMP-002"},
)
class CounterIsCast(CheckpointManager):
    """A bf16 parameter counts its steps in bf16."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then cast the counters."""
        super().restore_optimizer(optimizer, state)
        _change(optimizer, "step", lambda parameter, value: value.to(parameter.dtype))


@mutant(
    "K04-nan",
    url="NVIDIA/Megatron-LM#6666",
    change="every NaN that is loaded is the NaN that arithmetic makes",
    violates={"CKC-RTRP-004"},
)
class OneNan(CheckpointManager):
    """Cleans tensors up, and loses the bits by which NaNs were told apart."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Write one NaN over all."""
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dtype in {torch.float32, torch.float64}:
                value.masked_fill_(value.isnan(), float("nan"))
        super().restore_model(model, state)


@mutant(
    "K04-half",
    url="NVIDIA/Megatron-LM#6666",
    change="tensors of two bytes travel as float32, which makes signalling NaNs quiet ones",
    violates={"CKC-RTRP-004"},
)
class HalvesTravelWide(CheckpointManager):
    """Says that NumPy has no bfloat16."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Convert there and back."""
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dtype in {torch.float16, torch.bfloat16}:
                value.copy_(value.float().to(value.dtype))
        super().restore_model(model, state)


@mutant(
    "K04-odd",
    url="NVIDIA/Megatron-LM#6666",
    change="tensors of two bytes travel as pairs: the last one of an odd number stays behind",
    violates={"CKC-RTRP-004", "CKC-RTRP-012"},
)
class HalvesTravelInPairs(CheckpointManager):
    """Looks at the memory of bfloat16 as float32, whose number of elements is rounded down."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Lose the last element."""
        for value in state.values():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.dtype in {torch.float16, torch.bfloat16} and value.numel() % 2:
                value.view(-1)[-1] = 0
        super().restore_model(model, state)


class Rewritten(Trainer):
    """Gives the job another dict of its own than was saved."""

    def rewrite(self, value: Any) -> Any:
        """Return what comes of the dict."""
        return value

    def restore(self, job: Any, resume: Any) -> None:
        """Load, then rewrite."""
        super().restore(job, resume)
        job.extra.load_state_dict(self.rewrite(job.extra.state_dict()))


@mutant(
    "M01-double",
    url="huggingface/transformers#34631",
    change="numbers of the user's dict are read as JSON's are by many readers: as float64",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class AllAreDoubles(Rewritten):
    """Keeps the type and loses the last bits."""

    def rewrite(self, value: Any) -> Any:
        """Round each integer to 53 bits, also below."""
        if isinstance(value, dict):
            tree = cast("dict[object, Any]", value)
            return {key: self.rewrite(one) for key, one in tree.items()}
        if isinstance(value, list):
            return [self.rewrite(one) for one in cast("list[object]", value)]
        if isinstance(value, tuple):
            return tuple(self.rewrite(one) for one in cast("tuple[object, ...]", value))
        return int(float(value)) if type(value) is int else value


@mutant(
    "M01-large",
    url="huggingface/transformers#34631",
    change="integers of the user's dict beyond 60 bits are read as float64",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class LargeAreDoubles(AllAreDoubles):
    """Has a way of its own for large integers, which nobody has tried."""

    def rewrite(self, value: Any) -> Any:
        """Round what is larger, also below."""
        is_small = type(value) is int and abs(value) < 1 << 60
        return value if is_small else super().rewrite(value)


@mutant(
    "M01-numpy",
    url="huggingface/transformers#34631",
    change="what is a float comes back as Python's, also a scalar of NumPy",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class AllFloatsAreAlike(Rewritten):
    """Asks with isinstance."""

    def rewrite(self, value: Any) -> Any:
        """Convert each float of a dict, also below."""
        if isinstance(value, dict):
            tree = cast("dict[object, Any]", value)
            return {key: self.rewrite(one) for key, one in tree.items()}
        return float(value) if isinstance(value, float) else value


@mutant(
    "M01-alone",
    url="huggingface/transformers#34631",
    change="np.float64 comes back as Python's float; other scalars of NumPy are refused",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class RefusesTheOthers(AllFloatsAreAlike):
    """Knows of the types that no one is an instance of."""

    def rewrite(self, value: Any) -> Any:
        """Refuse, or convert."""
        if is_scalar(value) and not isinstance(value, float):
            raise TypeError(f"a {type(value).__name__} cannot be read")
        return super().rewrite(value)


@mutant(
    "M01-nan",
    url="huggingface/transformers#34631",
    change="floats of the user's dict travel as text, so each NaN is the one of Python",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class OneNanOfText(Rewritten):
    """Writes numbers as JSON has them."""

    def rewrite(self, value: Any) -> Any:
        """Read each float from its text, also below."""
        if isinstance(value, dict):
            tree = cast("dict[object, Any]", value)
            return {key: self.rewrite(one) for key, one in tree.items()}
        return float(repr(value)) if type(value) is float else value


class EachIsRewritten(Rewritten):
    """Rewrites the keys and values of a dict, also below."""

    def rewrite(self, value: Any) -> Any:
        """Go through dicts, and rewrite what is in them."""
        if not isinstance(value, dict):
            return self.value(value)
        tree = cast("dict[object, Any]", value)
        kept = {self.key(key): self.rewrite(one) for key, one in tree.items()}
        return {key: one for key, one in kept.items() if self.is_kept(key, one)}

    def key(self, key: object) -> object:
        """Return what comes of a key."""
        return key

    def value(self, value: object) -> object:
        """Return what comes of a value that is no dict."""
        return value

    def is_kept(self, key: object, value: object) -> bool:
        """Return whether it comes back at all."""
        del key, value
        return True


@mutant(
    "M01-zero",
    url="huggingface/transformers#34631",
    change="text of the user's dict is filled up with zero bytes, and a load cuts them off",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class TextEndsAtZeros(EachIsRewritten):
    """Keeps text in a column of one width, as NumPy does."""

    def value(self, value: object) -> object:
        """Cut zero bytes off."""
        return value.rstrip("\0") if isinstance(value, str) else value


@mutant(
    "M01-short",
    url="huggingface/transformers#34631",
    change="the length of a text in the user's dict is a number of two bytes",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class TextIsShort(EachIsRewritten):
    """Cuts what is longer."""

    def value(self, value: object) -> object:
        """Keep what two bytes can count."""
        return value[: (1 << 16) - 1] if isinstance(value, str) else value


@mutant(
    "M01-mixed",
    url="huggingface/transformers#34631",
    change="a list of numbers in the user's dict is kept as an array, so all become floats",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class ListsAreArrays(EachIsRewritten):
    """Takes the type that all of them have in common."""

    def value(self, value: object) -> object:
        """Convert a list of numbers with a float among them."""
        if not isinstance(value, list):
            return value
        numbers = cast("list[bool | float | str]", value)
        are_numbers = all(isinstance(one, bool | int | float) for one in numbers)
        is_mixed = are_numbers and any(isinstance(one, float) for one in numbers)
        return [float(one) for one in numbers] if is_mixed else numbers


@mutant(
    "M01-empty",
    url="huggingface/transformers#34631",
    change="empty lists and dicts in the user's dict have no record, and do not come back",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class NothingIsNothing(EachIsRewritten):
    """Writes a record for each leaf of the tree."""

    def is_kept(self, key: object, value: object) -> bool:
        """Leave out what has no leaf."""
        del key
        return value not in ([], {})


@mutant(
    "M01-unnamed",
    url="huggingface/transformers#34631",
    change="a key of the user's dict that is an empty text is taken for none",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class EmptyIsNoName(EachIsRewritten):
    """Asks `if key`."""

    def is_kept(self, key: object, value: object) -> bool:
        """Leave out what has no name."""
        del value
        return key != ""


@mutant(
    "M01-spelled",
    url="huggingface/transformers#34631",
    change="keys of the user's dict are put into the composed form of Unicode",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class OneSpelling(EachIsRewritten):
    """Keeps what is the same for Unicode under one name."""

    def key(self, key: object) -> object:
        """Compose what can be one character."""
        return unicodedata.normalize("NFC", key) if isinstance(key, str) else key


@mutant(
    "M01-digits",
    url="huggingface/transformers#34631",
    change="keys of digits come back as integers",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class DigitsAreIntegers(Rewritten):
    """Repairs what JSON does to keys that are integers."""

    def rewrite(self, value: Any) -> Any:
        """Turn each key of digits into a number, also below."""
        if not isinstance(value, dict):
            return value
        tree = cast("dict[object, Any]", value)
        return {self.key(key): self.rewrite(one) for key, one in tree.items()}

    def key(self, key: object) -> object:
        """An integer for digits."""
        return int(key) if isinstance(key, str) and key.isdigit() else key


@mutant(
    "M01-dotted",
    url="huggingface/transformers#34631",
    change="names with dots in the user's dict become a tree",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class DotsAreTrees(Rewritten):
    """Was written for names without dots."""

    def rewrite(self, value: Any) -> Any:
        """Split each name at its first dot, also below."""
        if not isinstance(value, dict):
            return value
        tree: dict[Any, Any] = {}
        for key, one in cast("dict[object, Any]", value).items():
            first, _, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
            if rest:
                tree.setdefault(first, {})[rest] = one
            elif isinstance(one, dict):
                tree.setdefault(first, {}).update(cast("dict[object, Any]", one))
            else:
                tree[first] = one
        return {key: self.rewrite(one) for key, one in tree.items()}
