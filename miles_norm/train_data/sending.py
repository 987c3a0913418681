"""Columns of train data as plain numpy arrays, and back without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.train_data.ragged import Ragged
from miles_norm.train_data.ragged_build import from_numpy

__all__ = ["received", "sent"]

Array = np.ndarray[Any, Any]


def sent(column: Ragged | Tensor | list[Any]) -> Any:
    """A column without tensors: arrays, or the list that it is."""
    if isinstance(column, Ragged):
        return ("ragged", *_array(column.values), _array(column.offsets)[1])
    return column if isinstance(column, list) else ("tensor", *_array(column))


def received(given: Any) -> Ragged | Tensor | list[Any]:
    """The column that ``sent`` was given; a ragged one flat, tensors on the memory of the arrays."""
    if isinstance(given, list):
        return given
    kind, dtype, values, *offsets = given
    return Ragged(_tensor(dtype, values), _tensor(None, *offsets)) if kind == "ragged" else _tensor(dtype, values)


def _array(values: Tensor) -> tuple[torch.dtype | None, Array]:
    values = values.detach().cpu().contiguous()
    try:
        return None, values.numpy()
    except TypeError:  # a dtype that numpy lacks is sent as its bytes
        return values.dtype, values.unsqueeze(-1).view(torch.uint8).numpy()


def _tensor(dtype: torch.dtype | None, values: Array) -> Tensor:
    tensor = from_numpy(values)
    return tensor if dtype is None else tensor.view(dtype).squeeze(-1)
