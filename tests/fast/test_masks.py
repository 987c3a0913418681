"""Counting loss masks: every kind, every length around the change of method, everything that is no mask."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.masks import count_mask

KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "bools": lambda mask: [bool(entry) for entry in mask],
    "floats": lambda mask: [float(entry) for entry in mask],
    "bytes": bytes,
    "bool array": lambda mask: np.array(mask, dtype=bool),
    "uint8 array": lambda mask: np.array(mask, dtype=np.uint8),
    "int64 array": lambda mask: np.array(mask, dtype=np.int64),
    "float16 array": lambda mask: np.array(mask, dtype=np.float16),
    "int64 tensor": lambda mask: torch.tensor(mask, dtype=torch.int64),
    "bool tensor": lambda mask: torch.tensor(mask, dtype=torch.bool),
    "bfloat16 tensor": lambda mask: torch.tensor(mask, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    runs=st.lists(st.integers(0, 700), max_size=8),
)
def test_counts_the_ones(kind: str, runs: list[int]) -> None:
    mask = [n % 2 for n, length in enumerate(runs) for _ in range(length)]
    assert count_mask(KINDS[kind](mask)) == sum(mask)


@pytest.mark.parametrize("padding", [0, 2000])
@pytest.mark.parametrize("kind", ["list", "tuple", "bytes", "uint8 array", "int64 tensor", "bfloat16 tensor"])
def test_refuses_a_two(kind: str, padding: int) -> None:
    with pytest.raises(ValueError, match="entries other than 0 and 1"):
        count_mask(KINDS[kind]([0, 2] + [1] * padding))


@pytest.mark.parametrize("padding", [0, 2000])
@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([3, -1], id="sum equals the number of entries"),
        pytest.param([2, 0], id="as many ones as a half-masked row"),
        pytest.param([0.5, 0.5], id="halves"),
        pytest.param([float("nan"), 1], id="NaN"),
        pytest.param([300, 0], id="no byte"),
        pytest.param([None, 1], id="None"),
    ],
)
def test_refuses_lists_and_arrays_of_other_entries(entries: list[Any], padding: int) -> None:
    mask = entries + [1] * padding
    with pytest.raises(ValueError, match="entries other than 0 and 1"):
        count_mask(mask)
    if None not in entries:
        with pytest.raises(ValueError, match="entries other than 0 and 1"):
            count_mask(np.array(mask))


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (np.ones((2, 2)), ValueError, r"of shape \(2, 2\)"),
        (torch.ones(2, 2, dtype=torch.bfloat16), ValueError, r"of shape \(2, 2\)"),
        (np.array(["1"]), TypeError, "of dtype"),
        ("11", TypeError, "of type str"),
        (5, TypeError, "of type int"),
    ],
)
def test_refuses_what_is_no_mask(mask: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        count_mask(mask)
