"""Distances of numbers, for every float that torch has: against torch's own values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_conformance.fsck.contents import ulps

EIGHT = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
CARRIER = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def bits(values: torch.Tensor) -> np.ndarray:
    """Give the bits of numbers as `tiles` reads them."""
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(CARRIER[values.element_size()]).copy()


@pytest.mark.parametrize("dtype", EIGHT)
def test_every_number_of_8_bits_is_what_torch_says(dtype: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(ulps.numbers(dtype, every.numpy()), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_16_bits_is_what_torch_says(dtype: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    expected = every.view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(ulps.numbers(dtype, every.numpy()), expected)


@pytest.mark.parametrize("dtype", [*EIGHT, "float16", "bfloat16", "float32", "float64"])
def test_neighbours_are_one_unit_apart(dtype: str) -> None:
    one = torch.tensor([1.0]).to(getattr(torch, dtype))
    a, b = bits(one), bits(one) + 1
    found = ulps.distance(dtype, a, b.astype(a.dtype))
    assert found.max_ulps == 1
    gap = ulps.numbers(dtype, b.astype(a.dtype)) - ulps.numbers(dtype, a)
    assert found.max_abs == pytest.approx(float(gap[0]))


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_units_are_counted_across_zero(one: float, other: float) -> None:
    """The bits of floats, mapped to numbers that grow with them, are as far apart."""

    def place(value: float) -> int:
        raw = int(np.float32(value).view("u4"))
        return raw if raw < 1 << 31 else (1 << 31) - raw

    values = torch.tensor([one, other], dtype=torch.float32)
    found = ulps.distance("float32", bits(values[:1]), bits(values[1:]))
    assert found.max_ulps == abs(place(one) - place(other))
    gap = abs(float(values[0]) - float(values[1]))
    assert (found.max_abs is None and math.isnan(gap)) or found.max_abs == gap or math.isnan(gap)


def test_signed_zeros_are_0_apart_and_nans_are_counted() -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([0.0, nan, 1.0, inf])
    b = torch.tensor([-0.0, 1.0, nan, -inf])
    zero = ulps.distance("float32", bits(a[:1]), bits(b[:1]))
    assert (zero.max_abs, zero.max_ulps, zero.nans) == (0.0, 0, 0)
    assert ulps.distance("float32", bits(a[1:3]), bits(b[1:3])) == ulps.Distance(None, None, 2)
    assert ulps.distance("float32", bits(a[3:]), bits(b[3:])).max_abs == inf


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_have_a_distance_in_the_plane() -> None:
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        a = torch.tensor([1 + 1j, 0j]).to(dtype)
        b = torch.tensor([4 + 5j, 0j]).to(dtype)
        found = ulps.distance(str(dtype).removeprefix("torch."), bits(a)[:1], bits(b)[:1])
        assert found.max_abs == 5.0
        assert found.max_ulps
        assert found.nans == 0


def test_whole_numbers_are_compared_exactly() -> None:
    low, high = -(1 << 63), (1 << 63) - 1
    a, b = torch.tensor([low]), torch.tensor([high])
    assert ulps.distance("int64", bits(a), bits(b)) == ulps.Distance((1 << 64) - 1, None)
    one, other = torch.tensor([-1], dtype=torch.int8), torch.tensor([1], dtype=torch.int8)
    assert ulps.distance("int8", bits(one), bits(other)).max_abs == 2
    assert ulps.distance("uint8", bits(one), bits(other)).max_abs == 254


def test_nans_and_infinities_are_counted() -> None:
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf, -math.nan])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        assert ulps.nan_inf(name, bits(values.to(dtype))) == (2, 2)
    whole = torch.complex(values, torch.zeros(5))
    assert ulps.nan_inf("complex64", bits(whole)) == (2, 2)
    assert ulps.nan_inf("complex128", bits(whole.to(torch.complex128))) == (2, 2)
