"""What is noted of rows: strips of masks, paths in the tree, digests, and nothing that a hostile row could break."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.audit.row_notes import STRIP, RowNotes, mask_strip


@given(st.lists(st.integers(0, 1), min_size=1, max_size=1000))
def test_a_strip_holds_the_share_of_each_part(mask: list[int]) -> None:
    strip = mask_strip(mask, len(mask))
    assert len(strip) == min(len(mask), STRIP)
    if len(mask) <= STRIP:
        assert strip == "".join("09"[value] for value in mask)
    # Parts are as equal as whole tokens allow, and none is lost.
    edges = [len(mask) * cell // len(strip) for cell in range(len(strip) + 1)]
    for digit, (low, high) in zip(strip, itertools.pairwise(edges), strict=True):
        part = mask[low:high]
        assert (digit == "0") == (sum(part) == 0)
        assert (digit == "9") == (sum(part) == len(part))
        assert abs(int(digit) - 9 * sum(part) / len(part)) <= 1


@pytest.mark.parametrize(
    ("mask", "strip"),
    [
        ([0, 1], "09"),
        ((0, 1), "09"),
        (np.array([0, 1]), "09"),
        (np.array([False, True]), "09"),
        (torch.tensor([0, 1]), "09"),
        (None, "999"),
        ([], ""),
        ([0, 2], ""),
        ([0, None], ""),
        ([0, -1], ""),
        ([[0, 1]], ""),
        ("01", ""),
        (5, ""),
        ({"a": 1}, ""),
        (np.array([[0, 1]]), ""),
        ([10**30], ""),
    ],
    ids=str,
)
def test_masks_of_any_kind(mask: object, strip: str) -> None:
    assert mask_strip(mask, 3) == strip


def notes_of(*rows: dict) -> RowNotes:
    notes = RowNotes()
    assert list(notes.reading(rows)) == list(rows)
    return notes


def leaf(path: object) -> dict:
    return {"metadata": {"leaf": {"path_node_ids": path}}}


def test_paths() -> None:
    notes = notes_of(leaf([0, 2, 4]), leaf(["a", "b"]), leaf([]), {}, {"metadata": None}, {"metadata": {"leaf": 5}})
    assert notes.paths == [(0, 2, 4), ("a", "b"), (), (), (), ()]


@pytest.mark.parametrize(
    "path", [[0, 0], [1.5], [None], "ab", {0: 1}, [True, 2], list(range(1000)), [[0]], [1, "1"]], ids=str
)
def test_paths_that_are_none(path: object) -> None:
    assert notes_of(leaf(path)).paths == [()]


def test_sizes() -> None:
    notes = notes_of(
        {"tokens": [1, 2, 3], "loss_mask": [1], "response_length": 2},
        {"tokens": np.arange(4), "loss_mask": [1, 1]},
        {"response_length": math.nan},
        {"tokens": 7, "response_length": -1},
        {"tokens": "text"},
    )
    assert notes.tokens == [3, 4, None, None, None]
    assert notes.lengths == [2, 2, None, None, None]


def test_digests_are_equal_where_tokens_and_masks_are() -> None:
    one = {"tokens": [1, 2, 3], "loss_mask": [1, 0]}
    same = [
        one,
        {"tokens": np.array([1, 2, 3]), "loss_mask": np.array([1, 0])},
        {"tokens": torch.tensor([1, 2, 3]), "loss_mask": [1, 0]},
    ]
    others = [
        {"tokens": [1, 2], "loss_mask": [1, 0]},
        {"tokens": [1, 2, 3], "loss_mask": [1, 1]},
        {"tokens": [1, 2, 3]},
    ]
    digests = notes_of(*same, *others).digests
    assert len({digests[0], *digests[:3]}) == 1
    assert len(set(digests)) == 4


@pytest.mark.parametrize("tokens", [None, [], ["a"], [None], [1.5], [10**30], 5, "abc"], ids=str)
def test_rows_without_a_digest(tokens: object) -> None:
    assert notes_of({"tokens": tokens, "loss_mask": [1]}).digests == [None]
