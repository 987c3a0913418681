"""The dtypes that files can hold, by their names."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["COLUMN_DTYPES", "DTYPES", "DTYPE_NAMES", "tensor_bytes", "tensor_from_bytes"]

_COLUMN_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
_OTHER_NAMES = (
    "uint16", "uint32", "uint64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip

COLUMN_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _COLUMN_NAMES}
"""dtypes of whole columns, which every format has."""

DTYPES: dict[str, torch.dtype] = {
    **COLUMN_DTYPES,
    **{name: getattr(torch, name) for name in _OTHER_NAMES if hasattr(torch, name)},
}
"""dtypes of single tensors inside other values."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor in row-major order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor that ``tensor_bytes`` wrote.

    Raises:
        ValueError: another number of bytes than the shape has.
    """
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor whose data does not fill its shape")
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == torch.bool and int(raw.max()) > 1:
        raise ValueError("a bool tensor with bytes other than 0 and 1")
    return raw.view(dtype).reshape(tuple(shape))
