"""Samples to ``TrainData``: what a trainer eats, under Miles' keys, without copying token lists."""

from miles_norm.conversion.parts import joined_train_data
from miles_norm.conversion.samples import (
    convert_samples_to_train_data,
    result_columns,
    train_data_from_columns,
    train_data_from_result,
)

__all__ = [
    "convert_samples_to_train_data",
    "joined_train_data",
    "result_columns",
    "train_data_from_columns",
    "train_data_from_result",
]
