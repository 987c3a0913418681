"""From a dump to train data: rows are packed into arrays while they are read."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from miles_norm.cli.inputs import group_sizes, kept_warnings, reading
from miles_norm.cli.waiting import bar, status
from miles_norm.config import NormalizationConfig
from miles_norm.conversion import convert_samples_to_train_data
from miles_norm.storage import write_train_data
from miles_norm.train_data import TrainData

__all__ = ["convert_dump"]

# array and bytearray refuse what they cannot hold exactly as a kind; numpy would cut 0.5 down to 0.
_PACKED: dict[str, Callable[[list[Any]], np.ndarray[Any, Any]]] = {
    "tokens": lambda values: np.frombuffer(array("q", values), np.int64),
    "loss_mask": lambda values: np.frombuffer(bytearray(values), np.uint8),
    "rollout_log_probs": lambda values: np.frombuffer(array("f", values), np.float32),
    "teacher_log_probs": lambda values: np.frombuffer(array("f", values), np.float32),
    "opd_reverse_kl": lambda values: np.frombuffer(array("f", values), np.float32),
}
_UNUSED = ("prompt", "response", "label", "multimodal_inputs")


def convert_dump(path: Path, out: Path, config: NormalizationConfig, sizes: str | None) -> tuple[TrainData, list[str]]:
    """Read a dump, convert it, write the train data; return it and the warnings.

    Lists of tokens become arrays row by row: a list takes 8 to 40 bytes a token.
    """
    with kept_warnings() as warnings:
        with reading(path) as stream:
            rows = [_packed(row) for row in stream.rows]
        given = group_sizes(path, stream.metadata, sizes)
        with status("converting"):
            data = convert_samples_to_train_data(rows, config, {**stream.metadata, "prompt_group_sizes": given})
        with bar(f"writing {out.name}") as progress:
            write_train_data(data, out, progress=progress)
    return data, warnings


def _packed(row: dict[str, Any]) -> dict[str, Any]:
    packed = {name: value for name, value in row.items() if name not in _UNUSED}
    for name, pack in _PACKED.items():
        value = packed.get(name)
        if isinstance(value, list):
            with suppress(TypeError, ValueError, OverflowError):  # conversion names the row and what is wrong with it
                packed[name] = pack(value)
    return packed
