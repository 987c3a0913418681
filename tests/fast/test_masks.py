"""Counting loss masks: every kind, every length around the change of method, everything that is no mask."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.columns.masks import count_mask, count_masks
from miles_norm.columns.sample_columns import columns_from_samples, row_field
from miles_norm.errors import SampleError

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


@pytest.mark.parametrize(
    "masks",
    [
        [np.array([1, 0, 1], dtype=np.uint8), np.zeros(0, dtype=np.uint8), np.array([True, True])],
        [[1, 0, 1], [], [True, 1]],
    ],
    ids=["arrays", "lists"],
)
def test_many_masks_at_once(masks: list[Any]) -> None:
    masks = masks * 30
    assert count_masks(masks) == [count_mask(mask) for mask in masks] == [2, 0, 2] * 30


@pytest.mark.parametrize(
    "odd",
    [
        np.array([0, 2], dtype=np.uint8),
        np.array([0, 255], dtype=np.uint8),
        np.zeros((1, 2), dtype=np.uint8),
        np.array([1, -1], dtype=np.int8),
        np.array([1, 2], dtype=np.int64),
        np.array([1.0]),
        [1, 0],
        None,
    ],
)
def test_other_masks_are_left_to_the_one_that_names_rows(odd: Any) -> None:
    byte = np.ones(3, dtype=np.uint8)
    assert count_masks([byte, odd]) is None
    assert count_masks([byte] * 40 + [odd]) is None


@pytest.mark.parametrize("odd", [[0, 2], [1, -1], [0, 256], [1.0], [[1]], ["1"], (1, 0), None])
def test_other_lists_too(odd: Any) -> None:
    assert count_masks([[1, 0], odd]) is None
    assert count_masks([[1, 0]] * 40 + [odd]) is None


def test_byte_masks_with_other_entries_are_errors_that_name_the_row() -> None:
    rows = [{"reward": 1.0, "loss_mask": np.array(mask, dtype=np.uint8)} for mask in ([1, 0], [1, 3], [2, 0])]
    with pytest.raises(
        SampleError, match=r"(?s)trainable tokens of rows 1, 2\n.*row 1: .*such as 3; row 2: .*such as 2"
    ):
        columns_from_samples(rows)


def test_a_field_name_with_a_dot_is_one_name() -> None:
    """A group key such as task.id must not be followed through attributes."""
    rows = [type("Row", (), {"reward": 1.0, "task.id": 7, "task": type("Task", (), {"id": 8})})() for _ in range(2)]
    assert row_field(rows, "task.id") == [7, 7]
    assert row_field([*rows, {"task.id": 9}], "task.id") == [7, 7, 9]
    assert row_field(rows, "absent") == [None, None]
