"""How far apart numbers are that differ in their bits: absolute, and in units in the last place.

A unit is one step to the next number of the dtype, so 1 means neighbours. Signed zeros are 0 apart.
NaNs have no distance: they are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

# exponent bits, mantissa bits, bias, and which magnitudes are special
_EIGHT = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}
_NUMPY = {"float16": "f2", "float32": "f4", "float64": "f8"}
_PARTS = {"complex32": ("float16", "u2"), "complex64": ("float32", "u4")}
_PARTS["complex128"] = ("float64", "u8")
_SIGNED = {"int8", "int16", "int32", "int64", "qint8", "qint32"}
_UNSIGNED = {"bool", "uint8", "uint16", "uint32", "uint64", "quint8"}
FLOATS = {*_EIGHT, *_NUMPY, *_PARTS, "bfloat16", "float8_e8m0fnu"}
"""The dtypes that have NaNs."""


@dataclass(frozen=True)
class Distance:
    """How far the elements of two tensors are apart.

    Attributes:
        max_abs: the largest absolute difference; None where the dtype has no numbers.
        max_ulps: the largest distance in units in the last place; None for anything but floats.
        nans: pairs of which at least one is NaN; they are in neither number.

    """

    max_abs: float | None
    max_ulps: int | None
    nans: int = 0

    def __or__(self, other: Distance) -> Distance:
        """Join the distances of two tiles."""
        return Distance(
            _larger(self.max_abs, other.max_abs),
            _larger(self.max_ulps, other.max_ulps),
            self.nans + other.nans,
        )


NO_DISTANCE = Distance(None, None)


def _larger(number: Any, other: Any) -> Any:  # noqa: ANN401  numbers, or None
    return other if number is None else number if other is None else max(number, other)


def distance(dtype: str, left: Array, right: Array) -> Distance:
    """Measure elements that differ; both arrays carry bits, as `tiles` reads them."""
    if dtype in _PARTS:
        return _complex(dtype, left, right)
    if dtype in FLOATS:
        return _floats(dtype, left, right)
    if dtype in _SIGNED | _UNSIGNED:
        return Distance(_integers(left, right, signed=dtype in _SIGNED), None)
    return NO_DISTANCE


def nan_inf(dtype: str, bits: Array) -> tuple[int, int]:
    """Count NaNs and infinities; of complex numbers, those with either in a part."""
    if dtype in _PARTS:
        part, carrier = _PARTS[dtype]
        values = numbers(part, np.ascontiguousarray(bits).view(carrier)).reshape(-1, 2)
        nan = np.isnan(values).any(1)
        return int(nan.sum()), int((np.isinf(values).any(1) & ~nan).sum())
    values = numbers(dtype, bits)
    return int(np.isnan(values).sum()), int(np.isinf(values).sum())


def numbers(dtype: str, bits: Array) -> Array:
    """Return the numbers that bits of a float dtype stand for, in a float that holds them all."""
    if dtype in _NUMPY:
        return bits.view(_NUMPY[dtype])
    if dtype == "bfloat16":
        return (bits.astype("u4") << 16).view("f4")
    values: Array = _TABLES[dtype][bits]
    return values


def _table(dtype: str) -> Array:
    """Decode all 256 numbers of a float of 8 bits."""
    bits = np.arange(256)
    if dtype == "float8_e8m0fnu":  # an exponent alone; its last number is the one NaN
        return np.where(bits == bits[-1], np.nan, np.exp2(bits - 127.0))
    exponent_bits, mantissa_bits, bias = _EIGHT[dtype]
    mantissa = bits & ((1 << mantissa_bits) - 1)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    normal = np.exp2(exponent - float(bias)) * (1 + mantissa / (1 << mantissa_bits))
    small = np.exp2(1.0 - bias) * mantissa / (1 << mantissa_bits)
    values: Array = np.where(bits >> 7, -1.0, 1.0) * np.where(exponent == 0, small, normal)
    if dtype.endswith("fnuz"):  # no infinity, no negative zero: its bits are the one NaN
        values[0x80] = np.nan
    elif dtype == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = (np.inf, -np.inf)
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


_TABLES = {dtype: _table(dtype) for dtype in (*_EIGHT, "float8_e8m0fnu")}


def _floats(dtype: str, left: Array, right: Array) -> Distance:
    """Measure real numbers."""
    with np.errstate(all="ignore"):  # signalling NaNs, and inf less inf
        a, b = numbers(dtype, left), numbers(dtype, right)
        real = ~(np.isnan(a) | np.isnan(b))
        nans = int(len(real) - real.sum())
        if nans == len(real):
            return Distance(None, None, nans)
        wide = "f8" if a.dtype.itemsize < 8 else a.dtype  # noqa: PLR2004  bytes of a double
        max_abs = float(np.abs(a[real].astype(wide) - b[real].astype(wide)).max())
    return Distance(max_abs, _steps(dtype, left[real], right[real]), nans)


def _steps(dtype: str, left: Array, right: Array) -> int:
    """Count the steps between numbers: bits are a sign and a magnitude that grows with them."""
    width = left.dtype.itemsize * 8
    sign = np.uint64(0 if dtype == "float8_e8m0fnu" else 1 << (width - 1))
    a, b = left.astype("u8"), right.astype("u8")
    magnitude_a, magnitude_b = a & ~sign, b & ~sign
    far = np.maximum(magnitude_a, magnitude_b) - np.minimum(magnitude_a, magnitude_b)
    return int(np.where((a & sign) == (b & sign), far, magnitude_a + magnitude_b).max())


def _complex(dtype: str, left: Array, right: Array) -> Distance:
    """Measure complex numbers: the distance in the plane, and the most steps of a part."""
    part, carrier = _PARTS[dtype]
    a, b = (np.ascontiguousarray(bits).view(carrier) for bits in (left, right))
    differ = a != b
    max_ulps = _floats(part, a[differ], b[differ]).max_ulps
    with np.errstate(all="ignore"):
        gaps = numbers(part, a).astype("f8") - numbers(part, b).astype("f8")
        gaps[~differ] = 0  # the same infinity twice is no difference
        lengths = np.hypot(gaps[::2], gaps[1::2])
    lost = np.isnan(lengths)
    max_abs = None if lost.all() else float(lengths[~lost].max())
    return Distance(max_abs, max_ulps, int(lost.sum()))


def _integers(left: Array, right: Array, *, signed: bool) -> int:
    """Return the largest difference of whole numbers, exactly."""
    if signed:
        form = f"i{left.dtype.itemsize}"
        left, right = left.view(form).astype("i8"), right.view(form).astype("i8")
    high, low = np.maximum(left, right), np.minimum(left, right)
    return int((high.astype("u8") - low.astype("u8")).max())
