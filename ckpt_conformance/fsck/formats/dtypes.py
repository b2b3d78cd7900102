"""Sizes of elements by name, so that nothing has to import torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import MOST_COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

_BYTES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "quint8 qint8 bits8 float4_e2m1fn_x2",
    2: "uint16 int16 float16 bfloat16 bits16",
    4: "uint32 int32 float32 qint32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
ITEM_SIZE = {name: size for size, names in _BYTES.items() for name in names.split()}
"""Bytes of an element, by the name of its torch dtype."""

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "UntypedStorage": "uint8",
}
"""The dtype of the classes of storage that `torch.save` names."""

SAFETENSORS_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of an element, by its name in a safetensors header."""

FROM_SAFETENSORS = {
    "BOOL": "bool",
    **{
        f"{sign}{bits}": f"{name}{bits}"
        for sign, name in (("U", "uint"), ("I", "int"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The torch dtype of a name in a safetensors header; those below a byte have none here."""


_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


def of_numpy(text: str) -> str:
    """Return torch's name of a dtype as numpy writes it, as `<f4`; another one where it has none.

    Bytes that stand in the other order make it a dtype of its own.
    """
    kind, width = text[1:2], text[2:]
    if text[1:] == "b1":
        return "bool"
    name = f"{_KINDS.get(kind, kind)}{int(width) * 8 if width.isdecimal() else width}"
    return f"{name} (big-endian)" if text[0] == ">" and text[1:2] in _KINDS else name


def elements(shape: Sequence[int]) -> int:
    """Multiply the sizes; Malformed where no file could hold so many."""
    total = math.prod(shape)
    if total >= MOST_COUNT:
        raise Malformed(
            f"a shape of {len(shape)} dimensions has more elements than a file can hold"
        )
    return total
