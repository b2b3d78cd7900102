"""CRC-32: by the fastest library that is here, and of pieces that were summed apart."""

from __future__ import annotations

import functools
import importlib
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_POLYNOMIAL = 0xEDB88320  # of CRC-32, with the lowest power in the highest bit
_ONE = 1 << 31


@functools.cache
def crc32() -> Callable[[memoryview, int], int]:
    """Give what sums: that of isal, some times as fast where it is installed; else zlib's."""
    try:
        found: Callable[[memoryview, int], int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found


def joined(first: int, second: int, length: int) -> int:
    """Give the CRC of two pieces from those of each; the second has `length` bytes."""
    return _times(_power(8 * length), first) ^ second


def _power(exponent: int) -> int:
    """Give x to a power, modulo the polynomial."""
    found, base = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            found = _times(base, found)
        base = _times(base, base)
        exponent >>= 1
    return found


def _times(one: int, other: int) -> int:
    """Multiply two polynomials over bits, modulo the polynomial."""
    product, bit = 0, _ONE
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product
