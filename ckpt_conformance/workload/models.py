"""Small models; each holds what some checkpoint manager has lost, so that the loss shows."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_conformance.contract import Feature
from ckpt_conformance.workload.loader import CLASSES, FEATURES

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Collection

    from ckpt_conformance.workload.state import StateDict


LARGE = 64 << 20  # bytes; more than any chunk or buffer of a manager that we know of
HUGE = (4 << 30) + LARGE  # bytes; a write takes 2 GiB at most, and zip counts 4 GiB in 32 bits
WIDE = (1 << 20) + 8  # elements of a parameter: more than what rules of a size call small
MANY = 66_000  # tensors; zip counts 65,535 records in 16 bits


class ScalingHistory(TypedDict):
    """What an fp8 recipe keeps beside the weights: the largest inputs of the last steps."""

    amax: list[float]


class Plain(nn.Module):
    """The default model: what every manager takes, and some lose.

    Tied weights, buffers that are no parameters, a frozen parameter, bf16 beside fp32, two layers
    of equal shape, dropout. `without` names what an adapter declares that its manager cannot hold.
    """

    constant: Tensor
    seen: Tensor
    average: Tensor

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__()
        narrow = torch.float32 if Feature.BFLOAT16 in without else torch.bfloat16
        self.embed = nn.Embedding(CLASSES, FEATURES)
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.twin = nn.Linear(FEATURES, FEATURES)
        self.narrow = nn.Linear(FEATURES, FEATURES, dtype=narrow)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)
        if Feature.TIED not in without:
            self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(FEATURES), requires_grad=False)
        self.register_buffer("constant", torch.randn(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(FEATURES))
        self.dropout = nn.Dropout(0.25)

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = torch.tanh(self.inner(x) + self.embed(classes.roll(1)))
        h = torch.tanh(self.twin(h)) + self.frozen + self.average
        dropped: Tensor = self.dropout(h)
        return dropped

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to logits [B, 16]."""
        with torch.no_grad():
            self.seen += len(x)
            self.average.lerp_(x.mean(0), 0.1)
        h = self.hidden(x, classes)
        h = h + self.narrow(h.to(self.narrow.weight.dtype)).float()
        logits: Tensor = self.head(h)
        return logits


class WithEmpty(Plain):
    """Beside what `Plain` has, a parameter without an element."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        if Feature.EMPTY not in without:
            self.empty = nn.Parameter(torch.empty(0, FEATURES))

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes)
        return h + self.empty.sum() if hasattr(self, "empty") else h


class WithScalar(Plain):
    """Beside what `Plain` has, a parameter without a dimension."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        if Feature.SCALAR not in without:
            self.scale = nn.Parameter(torch.rand(()) + 0.5)

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes)
        return h * self.scale if hasattr(self, "scale") else h


class WithPoints(Plain):
    """Beside what `Plain` has, buffers without a dimension, each of another dtype."""

    DTYPES = ("float64", "float16", "bfloat16", "int32", "bool")

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        for name in self.DTYPES:
            if Feature.SCALAR not in without and name not in without:
                drawn = 100 * torch.rand((), dtype=torch.float64)  # all 53 bits of it
                self.register_buffer(f"point_{name}", drawn.to(getattr(torch, name)))


class WithUnused(Plain):
    """Beside what `Plain` has, a trainable parameter that no forward pass uses.

    Its optimizer never makes a state for it.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        if Feature.UNUSED not in without:
            self.lazy = nn.Parameter(torch.randn(4))


class WithPairs(Plain):
    """Beside what `Plain` has, two pairs of buffers of one shape, and a matrix; nothing is tied.

    No other component names them, so the model alone shows that a pair is one in the destination.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__({*without, Feature.TIED})
        for name, size in (("left", FEATURES), ("right", FEATURES), ("gain", 1), ("lift", 1)):
            self.register_buffer(name, torch.rand(size) + 0.5)
        self.register_buffer("grid", torch.rand(6, 4))

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes)
        return h * self.get_buffer("gain") + self.get_buffer("left")


class WithNames(Plain):
    """Beside what `Plain` has, parameters whose names become one where they are rewritten.

    Without a `module` in the middle of a name; with each dot as an underscore, or each underscore
    as a dot; without the dots; in lower case. All have one shape: no size tells them apart.
    """

    TWINS = (
        ("stem.module.gain", "stem.gain"),
        ("up.to_date", "up_to.date"),
        ("in.side", "ins.ide"),
        ("Gate.lift", "gate.lift"),
    )

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        for name in itertools.chain.from_iterable(self.TWINS):
            *folders, last = name.split(".")
            inside: nn.Module = self
            for folder in folders:
                if not hasattr(inside, folder):
                    inside.add_module(folder, nn.Module())
                inside = inside.get_submodule(folder)
            inside.register_parameter(last, nn.Parameter(torch.rand(FEATURES) + 0.5))

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes)
        for one, other in self.TWINS:
            h = h * self.get_parameter(one) + self.get_parameter(other)
        return h


class WithSparse(Plain):
    """Beside what `Plain` has, a sparse tensor: indices and values, and no element at its place."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        places = torch.randperm(FEATURES * FEATURES)[:5]
        listed = torch.stack((places // FEATURES, places % FEATURES)), torch.rand(5)
        size = (FEATURES, FEATURES)
        links = torch.sparse_coo_tensor(*listed, size, check_invariants=False)  # unsaid, it warns
        self.register_buffer("links", links)

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes)
        return h + h @ self.get_buffer("links").to_dense()


class WithQuantized(Plain):
    """Beside what `Plain` has, a quantized tensor: its bytes say little without scale and zero."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor, and the scale, from the global generator."""
        super().__init__(without)
        scale = float(torch.rand(()) / 16) + 0.01
        with warnings.catch_warnings(action="ignore"):  # a deprecation: such jobs are still about
            codes = torch.quantize_per_tensor(torch.randn(FEATURES), scale, 3, torch.qint8)
        self.register_buffer("codes", codes)

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        return super().hidden(x, classes) + self.get_buffer("codes").dequantize()


class WithMeta(Plain):
    """Beside what `Plain` has, a tensor on the device meta: shape and dtype, and no element yet."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        self.register_buffer("later", torch.empty(FEATURES, device="meta"))


class WithLazy(Plain):
    """Beside what `Plain` has, tensors whose memory holds the conjugate, or the negative, of them.

    torch marks such a tensor and computes later. Both are contiguous: who writes the memory as it
    lies writes other numbers.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        if Feature.COMPLEX64 not in without:
            self.register_buffer("phase", torch.randn(FEATURES, dtype=torch.complex64).conj())
        # Whatever else gives such a tensor gives a part of a complex one.
        negative: Any = vars(torch)["_neg_view"]
        self.register_buffer("sink", negative(torch.randn(FEATURES)))

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes) + self.get_buffer("sink")
        return h + self.get_buffer("phase").imag if hasattr(self, "phase") else h


class WithBits(Plain):
    """Beside what `Plain` has, numbers that arithmetic or text would not give back bit for bit."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every other tensor, and the bits of the NaNs, from the generator."""
        super().__init__(without)
        payload = torch.randint(1, 1 << 16, (4,))
        quiet32, quiet64 = torch.tensor(0x7FC0 << 16), torch.tensor(0x7FF8 << 48)
        self.register_buffer("nan32", (quiet32 | payload).to(torch.int32).view(torch.float32))
        self.register_buffer("nan64", (quiet64 | payload).view(torch.float64))
        self.register_buffer("signed", torch.tensor([-0.0, 0.0, float("inf"), float("-inf")]))
        self.register_buffer("tiny", payload.to(torch.int32).view(torch.float32))  # subnormal
        self.register_buffer("thirds", payload.double() / 3)
        self.register_buffer("wide", payload * 2 + 2**53 + 1)
        # Signalling: a detour over a wider dtype gives other bits, as arithmetic does. Three, so
        # that their bytes are no whole number of wider elements.
        signal = payload[:3] % 63 + 1
        self.register_buffer("loud32", (0x7F800000 | payload).to(torch.int32).view(torch.float32))
        self.register_buffer("loud16", (0x7C00 | signal).to(torch.int16).view(torch.float16))
        if Feature.BFLOAT16 not in without:
            self.register_buffer("loudb16", (0x7F80 | signal).to(torch.int16).view(torch.bfloat16))


class WithEighths(Plain):
    """Beside what `Plain` has, floats of 8 bits of the dtypes that fewer formats know."""

    DTYPES = ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        for name in self.DTYPES:
            bits = torch.randint(1, 120, (FEATURES,), dtype=torch.uint8)  # numbers in each of them
            self.register_buffer(name, bits.view(getattr(torch, name)))


class WithUnsigned(Plain):
    """Beside what `Plain` has, unsigned integers, with which torch can do little but keep them."""

    DTYPES = ("uint16", "uint32", "uint64")

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        for name in self.DTYPES:
            bits = torch.randint(0, 256, (8 * FEATURES,), dtype=torch.uint8)
            self.register_buffer(name, bits.view(getattr(torch, name)))


class WithPages(Plain):
    """Beside what `Plain` has, parameters of a page of memory, which is given out again at once."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        self.pages = nn.ParameterList(nn.Parameter(torch.randn(1024)) for _ in range(24))

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes)
        for at, page in enumerate(self.pages):
            h = h + (page * (at + 1)).sin().mean()
        return h


class WithSlightChanges(Plain):
    """Beside what `Plain` has, tensors whose change a quick comparison does not see.

    `zeros` change their sign between two saves, `ring` the order of its elements, one element of
    `many` its last bit, `endless` and `unknown` what stands beside an infinity and a NaN, `table`
    one element in the middle of half a MiB. The `teacher` follows by writes to `.data`, as that of
    a self-supervised job does: torch counts no such write in its `_version`.
    """

    zeros: Tensor
    ring: Tensor
    many: Tensor
    endless: Tensor
    unknown: Tensor
    table: Tensor

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every other tensor from the global generator."""
        super().__init__(without)
        self.teacher = nn.Parameter(torch.randn(FEATURES), requires_grad=False)
        self.register_buffer("table", torch.randn(1 << 17))
        self.register_buffer("zeros", torch.zeros(FEATURES))
        self.register_buffer("ring", torch.randn(4 * FEATURES))
        self.register_buffer("many", torch.randn(1000))
        self.register_buffer("endless", torch.randn(FEATURES))
        self.register_buffer("unknown", torch.randn(FEATURES))
        self.endless[0], self.unknown[0] = -torch.inf, torch.nan

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to logits [B, 16]; change the buffers."""
        logits = super().forward(x, classes)
        with torch.no_grad():
            if int(self.seen) // len(x) % 3 == 0:  # once between the two saves
                self.zeros.neg_()
            self.ring.copy_(self.ring.roll(1))
            self.many.view(torch.int32)[7] += 1
            self.table.view(torch.int32)[behind_the_middle(self.table)] += 1
            self.teacher.data.lerp_(self.average, 0.5)
            self.endless[1:] += 1
            self.unknown[1:] += 1
        return logits


class WithLayouts(Plain):
    """Beside what `Plain` has, tensors of images and volumes, whose channels lie side by side.

    The order of their memory is none that a shape tells: who writes bytes as they lie, and the
    shape beside them, reads other numbers at each place. `row` is a column that was turned, and
    `entry` one element of a column: torch calls both contiguous, though the stride of their
    dimension of one element is not that of C order.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__(without)
        plain = Feature.CHANNELS_LAST in without
        images = torch.contiguous_format if plain else torch.channels_last
        volumes = torch.contiguous_format if plain else torch.channels_last_3d
        filters = torch.rand(2, 3, 4, FEATURES) + 0.5
        self.filters = nn.Parameter(filters.to(memory_format=images))
        self.register_buffer("pixels", torch.rand(2, 3, 4, FEATURES).to(memory_format=images))
        self.register_buffer("voxels", torch.rand(2, 3, 2, 3, FEATURES).to(memory_format=volumes))
        self.register_buffer("row", torch.rand(FEATURES, 1).t())
        entry = torch.empty_strided((1,), (FEATURES,)).copy_(torch.rand(1))  # and no view of more
        self.register_buffer("entry", entry)

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        h = super().hidden(x, classes) * self.filters[1, 2, 3]
        h = h + self.get_buffer("pixels")[1, 2, 3] + self.get_buffer("voxels")[1, 2, 1, 2]
        return h + self.get_buffer("row")[0] + self.get_buffer("entry")


class Sizes(nn.Module):
    """Tensors of as many bytes as a block of 512 to 2**15 bytes has, and of a byte more or less.

    Some have several such blocks and a byte. The parameter has 2**18 bytes and the last buffer one
    more; all together have a MiB and a byte: whole multiples of each block, and one byte. So a loop
    over blocks that loses the last byte loses it here, whether it goes over a tensor or over all of
    a component. What an optimizer and an average keep of the parameter is whole blocks.
    """

    EXPONENTS = range(9, 16)
    LARGEST = 1 << 18

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator; nothing here can be left out."""
        del without
        super().__init__()
        self.table = nn.Parameter(torch.randn(1024, self.LARGEST // 4 // 1024))
        sizes = [2**n + more for n in self.EXPONENTS for more in (-1, 0, 1)]
        sizes += [times * 2**n + 1 for n in (9, 12, 13) for times in (3, 5)]
        last = int(torch.randint(1, 256, ()))
        for size in (*sizes, 2 * self.LARGEST - sum(sizes), self.LARGEST + 1):
            content = torch.randint(1, 256, (size,), dtype=torch.uint8)
            content[-1] = last  # that of another seed is not the same by chance
            self.register_buffer(f"n{size}", content)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] to logits [B, 16]; classes are not used."""
        del classes
        logits: Tensor = x @ self.table[:FEATURES, :CLASSES]
        return logits


def behind_the_middle(tensor: Tensor) -> int:
    """Return the index of an element that no sample of the ends or of the middle has."""
    return tensor.numel() * 5 // 8


def large_first(
    _module: nn.Module, state: OrderedDict[str, Tensor], prefix: str, _metadata: object
) -> None:
    """Move the entry `large` to the front; a hook of `Module.state_dict`."""
    state.move_to_end(prefix + "large", last=False)


class WithLarge(Plain):
    """Beside what `Plain` has, a buffer that is larger than what programs read or write at once.

    No element is like another, so that no part can stand for another one. It is the first entry of
    the state, and one element behind its middle is all that changes: so files of two steps begin
    alike, as where a frozen embedding comes before a head that is trained, and it ends alike, too.
    And a parameter of more than 2**20 elements, so that an optimizer has moments of that size.
    """

    large: Tensor

    def __init__(self, without: Collection[str] = (), elements: int = LARGE // 4) -> None:
        """Draw every small tensor, and the first element of the large one, from the generator."""
        super().__init__(without)
        first = int(torch.randint(1 << 20, ()))
        self.register_buffer("large", torch.arange(first, first + elements, dtype=torch.int32))
        self.wide = nn.Parameter(torch.rand(WIDE) + 0.5)
        hook = cast("Any", self.register_state_dict_post_hook)  # torch declares no types
        hook(large_first)

    def hidden(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to [B, 8]."""
        return super().hidden(x, classes) * self.wide[-FEATURES:]

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Compute as the parent does; in training one element of the large tensor counts."""
        if self.training:
            self.large[behind_the_middle(self.large)] += 1 << 24  # as no neighbour is
        return super().forward(x, classes)


class WithHuge(WithLarge):
    """As `WithLarge`, beyond what one system call writes and a plain zip archive holds."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw as the parent does."""
        super().__init__(without, HUGE // 4)


class WithMany(Plain):
    """Beside what `Plain` has, more buffers than a plain zip archive has records."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every small tensor, and the first value, from the generator."""
        super().__init__(without)
        self.many = nn.Module()
        first = int(torch.randint(1 << 20, ()))
        for number in range(MANY):
            self.many.register_buffer(f"n{number}", torch.tensor([first + number]))


class Small(nn.Module):
    """One layer: what a manager writes of it, or about it, fits into a buffer of 4096 bytes."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator; nothing here can be left out."""
        del without
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] to logits [B, 16]; classes are not used."""
        del classes
        logits: Tensor = self.inner(x)
        return logits


class Least(nn.Module):
    """One parameter and no more: with an optimizer that keeps no state, the only tensor of both."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw the tensor from the global generator; nothing here can be left out."""
        del without
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] to logits [B, 16]; classes are not used."""
        del classes
        logits: Tensor = self.inner(x)
        return logits


class Mixed(nn.Module):
    """The default model of former releases: what `Plain` and the hard kinds have, in one.

    Tied weights, buffers that are no parameters, a frozen parameter, bf16 beside fp32, a 0-dim and
    an empty parameter, a parameter that never gets a gradient, two of equal shape, dropout.
    """

    constant: Tensor
    seen: Tensor
    average: Tensor

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator; nothing is left out."""
        del without
        super().__init__()
        self.embed = nn.Embedding(CLASSES, FEATURES)
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.twin = nn.Linear(FEATURES, FEATURES)
        self.narrow = nn.Linear(FEATURES, FEATURES, dtype=torch.bfloat16)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.empty = nn.Parameter(torch.empty(0, FEATURES))
        self.lazy = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(FEATURES), requires_grad=False)
        self.register_buffer("constant", torch.randn(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(FEATURES))
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to logits [B, 16]."""
        with torch.no_grad():
            self.seen += len(x)
            self.average.lerp_(x.mean(0), 0.1)
        h = torch.tanh(self.inner(x) + self.embed(classes.roll(1)) + self.empty.sum())
        h = self.dropout(torch.tanh(self.twin(h)) * self.scale + self.frozen + self.average)
        h = h + self.narrow(h.bfloat16()).float()
        logits: Tensor = self.head(h)
        return logits


class Transformer(nn.Module):
    """One attention block with tied embedding and head."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__()
        self.embed = nn.Embedding(CLASSES, FEATURES)
        self.block = nn.TransformerEncoderLayer(FEATURES, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)
        if Feature.TIED not in without:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to logits [B, 16]."""
        tokens = torch.stack([x, self.embed(classes.roll(1))], dim=1)
        logits: Tensor = self.head(self.block(tokens)[:, 0])
        return logits


class Convolution(nn.Module):
    """Convolution and batch norm: running statistics and their counter are state too."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator; nothing here can be left out."""
        del without
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4, momentum=None)  # cumulative: uses num_batches_tracked
        self.head = nn.Linear(4 * FEATURES, CLASSES)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] to logits [B, 16]; classes are not used."""
        del classes
        h = torch.relu(self.norm(self.conv(x.unsqueeze(1))))
        mean = self.norm.running_mean
        shift = mean.mean() if mean is not None else 0.0
        logits: Tensor = self.head(h.flatten(1) + shift)
        return logits


class Dtypes(nn.Module):
    """Every dtype and storage shape: fp8, bf16, int, bool, complex, views of one storage.

    `cache` is a non-persistent buffer that is derived from `table`. `without` names dtypes that are
    left out: float32 stands in their place; and the views: then each has a storage of its own.
    """

    left: Tensor
    right: Tensor
    strided: Tensor
    eighth: Tensor
    mask: Tensor
    turns: Tensor
    counts: Tensor
    table: Tensor
    cache: Tensor

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__()

        def of(dtype: Feature) -> torch.dtype:
            return torch.float32 if dtype in without else getattr(torch, dtype)

        self.inner = nn.Linear(FEATURES, FEATURES, dtype=of(Feature.BFLOAT16))
        self.head = nn.Linear(FEATURES, CLASSES)
        flat = torch.randn(24)
        is_shared = Feature.VIEWS not in without
        self.register_buffer("left", flat[:8] if is_shared else flat[:8].clone())
        self.register_buffer("right", flat[8:16] if is_shared else flat[8:16].clone())
        self.register_buffer("strided", torch.randn(4, 6).t())
        self.register_buffer("eighth", torch.randn(8).to(of(Feature.FLOAT8)))
        self.register_buffer("mask", torch.rand(8).round().to(of(Feature.BOOL)))
        self.register_buffer("turns", torch.randn(4, dtype=of(Feature.COMPLEX64)))
        self.register_buffer("counts", torch.randint(-128, 127, (8,), dtype=of(Feature.INT8)))
        self.register_buffer("table", torch.randn(FEATURES))
        self.register_buffer("cache", self.table * 2, persistent=False)

    def scaled(self, x: Tensor) -> Tensor:
        """Return the features as they go into the first layer."""
        return x

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] to logits [B, 16]; classes are not used."""
        del classes
        with torch.no_grad():
            self.counts += 1
            self.left += 0.125
            self.eighth.copy_((self.eighth.float() * 0.5).to(self.eighth.dtype))
            self.table *= 1.0 + self.right.mean() * 0.01
            self.cache.copy_(self.table * 2)
        h = self.inner((self.scaled(x) + self.left).to(self.inner.weight.dtype)).float()
        h = h * self.mask.float() + self.cache + self.turns.real.sum() + self.eighth.float()
        logits: Tensor = self.head(h)
        return logits


class History:
    """What an fp8 recipe keeps beside the weights: a history of maxima, by `get_extra_state`.

    It is a dict: torch takes "any extra state" there, and asks only that it can be pickled. Where
    the manager holds no dict there, it is a tensor.
    """

    amax: list[float]
    is_dict = True

    def get_extra_state(self) -> StateDict | Tensor:
        """Return the amax history, as `ScalingHistory` or as float64 of shape [at most 4]."""
        return (
            {"amax": list(self.amax)}
            if self.is_dict
            else torch.tensor(self.amax, dtype=torch.float64)
        )

    def set_extra_state(self, state: ScalingHistory | Tensor) -> None:
        """Take the amax history."""
        self.amax = state.tolist() if isinstance(state, Tensor) else list(state["amax"])

    def scaled(self, x: Tensor) -> Tensor:
        """Return the features over the last maximum, and add theirs to the history."""
        with torch.no_grad():
            self.amax = [*self.amax[-3:], float(x.abs().max())]
        return x / self.amax[-1]


class ExtraState(History, nn.Module):
    """Two layers and a history of maxima, of which the largest scales the features."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator."""
        super().__init__()
        self.is_dict = Feature.EXTRA_STATE not in without
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.amax = [float(torch.rand(()))]

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] to logits [B, 16]; classes are not used."""
        del classes
        before = max(self.amax)
        logits: Tensor = self.head(self.inner(self.scaled(x) * before))
        return logits


class DtypesAndHistory(History, Dtypes):
    """Both in one, as this suite wrote them before it kept them apart."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Draw every tensor from the global generator; nothing is left out."""
        del without
        super().__init__()
        self.amax = [float(torch.rand(()))]


def cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the mean loss of logits [B, 16] and classes [B], a float32 scalar."""
    return functional.cross_entropy(logits.float(), classes)
