"""Train data that was converted in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from miles_norm.conversion.fields import EMPTY_ENTRIES
from miles_norm.train_data import TrainData
from miles_norm.train_data.data import Column

__all__ = ["joined_train_data"]

_SIZES = "step_adapter_batch_sizes"


def joined_train_data(parts: Sequence[TrainData]) -> TrainData:
    """The rows of all parts, as if their samples had been converted together.

    What a part does not have because none of its rows does is filled in: images, weight versions, batch sizes of other
    adapters. Ids are a tensor if they are one in all parts.

    Raises:
        SampleError: a field that only some parts have, and what else ``TrainData.concat`` raises.

    >>> import torch
    >>> from miles_norm.train_data import Ragged
    >>> plain = {"tokens": Ragged.from_rows([[1, 2]], torch.int64), "response_lengths": [1]}
    >>> parts = [TrainData(plain), TrainData(plain | {"weight_versions": [["v1"]]})]
    >>> joined_train_data(parts)["weight_versions"]
    [[], ['v1']]
    """
    names = dict.fromkeys(name for part in parts for name in part.columns)
    filled = [name for name in EMPTY_ENTRIES if name in names]
    sizes: dict[Any, Any] = {}
    for part in parts:
        sizes |= part.step.get(_SIZES, {})
    mixed = {
        name
        for name in names
        if len({isinstance(part.columns[name], list) for part in parts if name in part.columns}) > 1
    }
    alike = []
    for part in parts:
        columns: dict[str, Column] = {name: [EMPTY_ENTRIES[name]] * len(part) for name in filled}
        columns |= {name: _listed(value) if name in mixed else value for name, value in part.columns.items()}
        step = part.step | ({_SIZES: sizes} if _SIZES in part.step else {})
        alike.append(TrainData({name: columns[name] for name in names if name in columns}, step))
    return TrainData.concat(alike)


def _listed(column: Column) -> Column:
    return column.tolist() if isinstance(column, Tensor) else column
