"""Columns of train data as plain numpy arrays, and back without a copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from miles_norm.train_data.ragged import Ragged
from miles_norm.train_data.ragged_build import as_array, as_tensor

__all__ = ["received", "sent"]


def sent(column: Ragged | Tensor | list[Any]) -> Any:
    """A column without tensors: arrays, or the list that it is."""
    if isinstance(column, Ragged):
        return ("ragged", *as_array(column.values), as_array(column.offsets)[0])
    return column if isinstance(column, list) else ("tensor", *as_array(column))


def received(given: Any) -> Ragged | Tensor | list[Any]:
    """The column that ``sent`` was given; a ragged one flat, tensors on the memory of the arrays."""
    if isinstance(given, list):
        return given
    kind, values, dtype, *rest = given
    return as_tensor(values, dtype) if kind == "tensor" else Ragged(as_tensor(values, dtype), as_tensor(rest[0], None))
