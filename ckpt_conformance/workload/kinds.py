"""Kinds of job: which model, optimizers, schedule and loader a job is built from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler

from ckpt_conformance.contract import DEFAULT_KIND, Feature
from ckpt_conformance.workload import models
from ckpt_conformance.workload.loader import FEATURES, ShuffledLoader
from ckpt_conformance.workload.state import (
    CountingSgd,
    Ema,
    Extra,
    FreshEma,
    Gradients,
    Live,
    MasterSgd,
    NestingSgd,
    Phased,
    Phases,
    Rex,
    Scalar,
    Scalars,
    Scaling,
    SharingSgd,
    SteadySgd,
    Unusual,
    ViewingSgd,
    let_draw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from ckpt_conformance.workload.state import ParameterGroup

HORIZON = 24  # steps that the schedules are laid out for


@dataclass(frozen=True)
class Kind:
    """How to build a job."""

    model: Callable[[Collection[str]], nn.Module] = models.Plain  # takes what it leaves out
    optimizer: str = "adamw"
    is_frozen_optimized: bool = False  # the optimizer lists frozen parameters, too
    schedule: str = "warmup"
    workers: int = 0
    accumulate: int = 1
    packing: int = 1  # samples in one row of a batch
    own: Callable[[int, Collection[str]], Extra] = Extra  # the user's own dict, from the seed
    is_normal: bool = False  # generators hold back the second of two normal draws at each save
    average: type[Ema] = Ema
    is_drawing: bool = False  # its parts draw from the generators while they take their state
    shows: str = ""  # what only this kind shows


KINDS: dict[str, Kind] = {
    DEFAULT_KIND: Kind(
        shows="tied, frozen and bf16 parameters; buffers; two groups; every generator"
    ),
    "empty": Kind(models.WithEmpty, shows="a parameter without elements"),
    "scalar": Kind(models.WithScalar, shows="a parameter without dimensions"),
    "points": Kind(models.WithPoints, shows="buffers without dimensions, of five dtypes"),
    "unused": Kind(
        models.WithUnused,
        is_frozen_optimized=True,
        shows="an optimizer that lists parameters for which it never makes a state",
    ),
    "transformer": Kind(models.Transformer, shows="attention with tied embedding and head"),
    "conv": Kind(models.Convolution, shows="batch norm: running statistics and their counter"),
    "two-optimizers": Kind(
        optimizer="two", shows="several optimizers with different numbers of keys"
    ),
    "alike-optimizers": Kind(
        optimizer="alike",
        shows="two optimizers of one class, each of a matrix of one shape, beside a third: only "
        "their names tell them apart",
    ),
    "steady": Kind(
        optimizer="steady",
        shows="an optimizer that adds state of its own beside state and param_groups",
    ),
    "counters": Kind(
        optimizer="counting",
        shows="an optimizer whose state is numbers, lists and None, and whose factor is a tensor",
    ),
    "nested": Kind(
        optimizer="nesting",
        shows="an optimizer that keeps lists and dicts of fp32 tensors of bf16 parameters, and "
        "state that is no parameter's",
    ),
    "scaled": Kind(
        optimizer="scaled",
        shows="parameter groups with keys that torch does not know, such as a factor of the rate",
    ),
    "accumulate": Kind(
        accumulate=3, shows="a save between two micro-batches: held gradients are state"
    ),
    "computed": Kind(
        models.WithPages,
        accumulate=3,
        average=FreshEma,
        shows="two components whose state is made anew, tensors of equal shapes, at each call",
    ),
    "rare-dtypes": Kind(
        models.Dtypes, shows="fp8, complex, bool and int8 tensors, views of one storage"
    ),
    "masters": Kind(
        optimizer="master", shows="fp32 masters of bf16 parameters, bf16 momentum of fp32 ones"
    ),
    "extra-state": Kind(
        models.ExtraState, shows="a module that gives a dict by get_extra_state, as fp8 recipes do"
    ),
    "values": Kind(
        own=Unusual, shows="integers beyond 53 bits, NaN bits, -0.0, dotted keys, foreign names"
    ),
    "live": Kind(
        own=Live, shows="a component that gives its own dicts and lists, which it goes on to fill"
    ),
    "scalars": Kind(own=Scalars, shows="scalars of NumPy in the user's own dict"),
    "double": Kind(own=Scalar, shows="one scalar of NumPy there, which is a float, too"),
    "bits": Kind(models.WithBits, shows="tensors with NaN bits, -0.0, subnormal numbers"),
    "slight": Kind(
        models.WithSlightChanges,
        shows="tensors that change between two saves, and not for a quick comparison",
    ),
    "layouts": Kind(
        models.WithLayouts,
        optimizer="viewing",
        shows="tensors of images; an optimizer of two groups that keeps views of one memory, and "
        "state in another dtype than the parameter's",
    ),
    "sizes": Kind(
        models.Sizes,
        optimizer="momentum",
        shows="tensors, and a component, of whole blocks of bytes, of a byte more or less",
    ),
    "normal": Kind(is_normal=True, shows="generators that hold back a normal draw at the save"),
    "drawing": Kind(
        is_drawing=True,
        shows="model, optimizer, scheduler, scaler, average and loader that draw while they take "
        "their state",
    ),
    "pairs": Kind(
        models.WithPairs,
        shows="tensors of one shape, which a destination may tie; a matrix, which it may transpose",
    ),
    "names": Kind(models.WithNames, shows="names that become one where a manager rewrites them"),
    "eighths": Kind(models.WithEighths, shows="8-bit floats of the dtypes that few formats know"),
    "unsigned": Kind(models.WithUnsigned, shows="unsigned integers of 16, 32 and 64 bits"),
    "sparse": Kind(models.WithSparse, shows="a sparse tensor: no element lies at its place"),
    "quantized": Kind(models.WithQuantized, shows="a quantized tensor: bytes, scale and zero"),
    "meta": Kind(models.WithMeta, shows="a tensor on meta: what it holds is not there yet"),
    "lazy": Kind(
        models.WithLazy, shows="tensors whose memory is the conjugate or the negative of them"
    ),
    "small": Kind(models.Small, shows="one layer: files that are shorter than a writer's buffer"),
    "least": Kind(
        models.Least,
        optimizer="plain-sgd",
        shows="one parameter, no buffer, and an optimizer without state",
    ),
    "sharing": Kind(
        optimizer="sharing",
        shows="an optimizer whose state begins as one tensor for all parameters",
    ),
    "large": Kind(models.WithLarge, shows="a tensor of 64 MiB: larger than chunks and buffers"),
    "huge": Kind(models.WithHuge, shows="a tensor of more than 4 GiB; at the full budget"),
    "many": Kind(models.WithMany, shows="66,000 tensors; at the full budget"),
    "workers": Kind(workers=2, shows="a loader with two worker processes that prefetch"),
    "packed": Kind(
        packing=2, shows="rows of several samples: a batch consumes more than its size says"
    ),
    "cosine": Kind(schedule="cosine", shows="CosineAnnealingLR"),
    "linear": Kind(schedule="linear", shows="LinearLR"),
    "wsd": Kind(schedule="wsd", shows="warm-up, stable, decay in sequence (SequentialLR)"),
    "rex": Kind(
        schedule="rex", shows="REX as a callable object in a LambdaLR, whose own state counts"
    ),
    "constant": Kind(schedule="constant", shows="ConstantLR"),
    "steps": Kind(schedule="steps", shows="MultiStepLR: an integer-keyed Counter in its state"),
    "phases": Kind(
        schedule="phases",
        own=Phases,
        shows="a phase of the training: it scales the rate beyond what the schedule says, and adds "
        "a key to the user's own dict",
    ),
}

FORMER = {
    "mixed": Kind(models.Mixed, is_frozen_optimized=True),
    "dtypes": Kind(models.DtypesAndHistory, "master"),
}
"""Kinds that are written no more, and read where a release of torch wrote them (`written`)."""

SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "warmup": lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 6) * 0.97**n),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, HORIZON),
    "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, HORIZON),
    "wsd": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
            lr_scheduler.ConstantLR(o, 1.0, 1),
            lr_scheduler.LinearLR(o, 1.0, 0.0, 9),
        ],
        [4, 6],
    ),
    "rex": lambda o: lr_scheduler.LambdaLR(o, Rex(HORIZON)),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 5),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [3, 3, 5], 0.5),
    "phases": lambda o: Phased(o, lambda n: 0.97**n),
}


@dataclass(frozen=True)
class Parts:
    """What a job is made of; optimizers and schedulers are keyed by component name."""

    model: nn.Module
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, LRScheduler]
    scaler: GradScaler
    ema: Ema
    loader: ShuffledLoader
    extra: Extra
    gradients: Gradients | None
    accumulate: int  # micro-batches of one optimizer step
    is_normal: bool


def build(name: str, seed: int, variant: str, without: Collection[str] = ()) -> Parts:
    """Build the parts of a kind from the global generators (seeded by the caller) and `seed`."""
    kind = FORMER[name] if name in FORMER else KINDS[name]
    model = _varied(kind.model(without), variant)
    narrow = torch.float16 if Feature.BFLOAT16 in without else torch.bfloat16
    rate = 0.02 * (3.0 if variant == "drift" else 1.0)
    if Feature.UNUSED in without:
        kind = replace(kind, is_frozen_optimized=False)
    optimizers = _optimizers(kind, model, rate, variant, narrow)
    schedulers = {
        f"scheduler{key[9:]}": SCHEDULES[kind.schedule](o) for key, o in optimizers.items()
    }
    scaler = GradScaler("cpu", init_scale=64.0 + 8 * (seed % 7), growth_interval=3)
    gradients = Gradients(model) if kind.accumulate > 1 else None
    loader = ShuffledLoader(
        seed, workers=kind.workers, packing=kind.packing, is_drawing=kind.is_drawing
    )
    ema = kind.average(model)
    if kind.is_drawing:
        for part in (model, scaler, ema, *optimizers.values(), *schedulers.values()):
            let_draw(part)
    return Parts(
        model,
        optimizers,
        schedulers,
        scaler,
        ema,
        loader,
        kind.own(seed, without),
        gradients,
        kind.accumulate,
        kind.is_normal,
    )


def _varied(model: nn.Module, variant: str) -> nn.Module:
    """Alter the destination, so that what was saved no longer fits it.

    A variant that ends in `-buffer` leaves the parameters alone: optimizers fit as before, so that
    only a comparison of the model's own entries shows it.
    """
    inner: Any = model.get_submodule("inner") if hasattr(model, "inner") else None
    if variant == "dtype":
        inner.to(torch.float64 if inner.weight.dtype != torch.float64 else torch.float32)
    elif variant == "width":
        model.get_submodule("narrow").half()
    elif variant == "shape":
        inner.weight = nn.Parameter(torch.randn(FEATURES + 1, FEATURES))
    elif variant == "missing":
        model.register_parameter("newcomer", nn.Parameter(torch.randn(FEATURES)))
    elif variant == "unexpected":
        model.get_submodule("twin").register_parameter("bias", None)
    elif variant == "tied":
        model.register_buffer("right", model.get_buffer("left"))
    elif variant == "tied-small":
        model.register_buffer("lift", model.get_buffer("gain"))
    elif variant.endswith("-buffer"):
        _vary_buffer(model, variant.removesuffix("-buffer"))
    return model


def _vary_buffer(model: nn.Module, variant: str) -> None:
    if variant == "dtype":
        model.constant = model.get_buffer("constant").bfloat16()
    elif variant == "width":
        model.constant = torch.randint(1 << 20, (3,), dtype=torch.int32)
    elif variant == "count":
        model.constant = torch.randn(3, 1)
    elif variant == "turned":
        model.grid = torch.randn(4, 6)
    elif variant == "shape":
        model.constant = torch.randn(4)
    elif variant == "missing":
        model.register_buffer("newcomer", torch.randn(FEATURES))
    elif variant == "counter":
        norm = nn.Module()
        norm.register_buffer("num_batches_tracked", torch.randint(1 << 20, ()))
        model.norm = norm
    elif variant == "unexpected":
        del model.constant


def _optimizers(
    kind: Kind, model: nn.Module, rate: float, variant: str, narrow: torch.dtype
) -> dict[str, Optimizer]:
    """Build the optimizers by component name; matrices decay, vectors do not."""
    is_listed = [p.requires_grad or kind.is_frozen_optimized for p in model.parameters()]
    named = list(itertools.compress(model.named_parameters(), is_listed))
    params = [p for _, p in named]
    of_one_group: dict[str, Callable[[], Optimizer]] = {
        "master": lambda: MasterSgd(params, rate, narrow),
        "counting": lambda: CountingSgd(params, rate),
        "steady": lambda: SteadySgd(params, rate),
        "nesting": lambda: NestingSgd(params, rate),
        "sharing": lambda: SharingSgd(params, rate, is_apart=variant == "apart"),
        "plain-sgd": lambda: optim.SGD(params, rate),
        "momentum": lambda: optim.SGD(params, rate, momentum=0.9),
    }
    if kind.optimizer in of_one_group:
        return {"optimizer": of_one_group[kind.optimizer]()}
    matrices = [(name, p) for name, p in named if p.ndim > 1]
    vectors = [(name, p) for name, p in named if p.ndim <= 1]
    if variant == "reordered":
        matrices.reverse()
    elif variant == "swapped":  # two of one shape and dtype
        names = [name for name, _ in matrices]
        one, other = names.index("inner.weight"), names.index("twin.weight")
        matrices[one], matrices[other] = matrices[other], matrices[one]
    decaying: ParameterGroup = {
        "params": matrices,
        "weight_decay": 0.3 if variant == "drift" else 0.1,
    }
    constant: ParameterGroup = {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.95)}
    if kind.optimizer == "viewing":
        return {"optimizer": ViewingSgd([decaying, constant], rate, narrow)}
    if kind.optimizer == "scaled":
        return {"optimizer": Scaling([decaying, constant], rate)}
    if kind.optimizer == "alike":
        of_one_shape = {"inner.weight": "optimizer", "twin.weight": "optimizer.second"}
        rest = [p for name, p in named if name not in of_one_shape]
        third = optim.SGD(rest, rate, momentum=0.9)
        alike = {
            key: optim.AdamW([model.get_parameter(name)], rate)
            for name, key in of_one_shape.items()
        }
        return {**alike, "optimizer.third": third}
    if kind.optimizer == "two":
        second = optim.SGD([p for _, p in vectors], rate, momentum=0.9, nesterov=True)
        first: dict[str, Optimizer] = {"optimizer": optim.AdamW([decaying], rate)}
        return first if variant == "fewer" else {**first, "optimizer.second": second}
    groups = [decaying, constant]
    if variant == "regrouped":
        groups = [{**decaying, "params": [*matrices, *vectors]}]
    optimizers: dict[str, Optimizer] = {"optimizer": optim.AdamW(groups, rate)}
    if variant == "another":
        optimizers["optimizer.second"] = optim.SGD([model.get_parameter("frozen")], rate)
    return optimizers
