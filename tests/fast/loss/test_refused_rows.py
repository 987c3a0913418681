"""Row numbers that are refused: of packed tokens, of micro-batches, of sequences; rows that do not exist are named."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from miles_norm import RolloutColumns, normalize_columns
from miles_norm.errors import SampleError
from miles_norm.loss import (
    Sequences,
    gspo_loss,
    reduce_token_losses,
    rollout_sequences,
    row_of_tokens,
    row_sequences,
    sequence_log_ratio,
)

X, MASK = torch.full((2, 3), -0.5), torch.tensor([[1, 1, 0], [1, 0, 0]])
# Rollouts "a" on rows 0 and 1, "b" and "c" on one row each.
RESULT = normalize_columns(
    RolloutColumns(group=[0] * 4, rollout=["a", "a", "b", "c"], reward=[1, 1, 0, 1], trainable_tokens=[2, 1, 2, 1])
)


NO_INDEX: list[Any] = [
    None,
    5,
    torch.tensor(0),
    torch.tensor([[0, 0, 1]]),
    torch.tensor([0.0, 0.0, 1.0]),
    torch.tensor([]),
    torch.tensor([True, False, True]),
]
PACKED, PACKED_MASK = torch.full((3,), -0.5), torch.tensor([1, 1, 0])


@pytest.mark.parametrize("rows", NO_INDEX[1:])
def test_a_row_index_that_is_none(rows: Any) -> None:
    for call in (
        lambda: reduce_token_losses(PACKED, torch.ones(2), PACKED_MASK, rows=rows),
        lambda: row_sequences(PACKED_MASK, rows, 2),
        lambda: rollout_sequences(RESULT, [0, 2], rows=rows),
    ):
        with pytest.raises(
            SampleError, match=r"^row index\n.*\n +expected: whole numbers: the row of each packed token"
        ):
            call()


@pytest.mark.parametrize(("rows", "said"), [([0, -1, 1], "position 1\n.*-1"), ([0, 2, 9], "positions 1, 2\n.*2, 9")])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_rows_that_do_not_exist_are_named(rows: list[int], said: str, dtype: torch.dtype) -> None:
    index = torch.tensor(rows, dtype=dtype)
    for call in (
        lambda: reduce_token_losses(PACKED, torch.ones(2), PACKED_MASK, rows=index),
        lambda: row_sequences(PACKED_MASK, index, 2),
        lambda: rollout_sequences(RESULT, torch.tensor([0, 2]), rows=index),
    ):
        with pytest.raises(SampleError, match=rf"^row index at {said}\n.*, 0 to 1\n"):
            call()


def test_an_index_of_bytes_is_no_mask() -> None:
    # torch takes x[uint8] for a mask; rows 0, 0 and 1 have the weights 1, 1 and 3, the last token is masked.
    rows = torch.tensor([0, 1, 1], dtype=torch.uint8)
    loss = reduce_token_losses(torch.ones(3), torch.tensor([1.0, 3.0]), PACKED_MASK, rows=rows)
    assert loss.item() == 4.0
    assert row_sequences(PACKED_MASK, rows, 2).tokens.tolist() == [1, 1]
    assert rollout_sequences(RESULT, [0, 2], rows=rows).index.tolist() == [0, 1, 1]


def test_an_index_into_no_row_at_all() -> None:
    with pytest.raises(SampleError, match=r"^row index at position 0\n.*0\n.*of which there are none"):
        reduce_token_losses(torch.ones(1), torch.ones(0), torch.ones(1), rows=torch.tensor([0]))
    assert (
        reduce_token_losses(torch.ones(0), torch.ones(0), torch.ones(0), rows=torch.tensor([], dtype=torch.int64)) == 0
    )


@pytest.mark.parametrize("number", [2.0, "2", True, -1, torch.tensor(2), 2**31, 2**40], ids=repr)
def test_a_number_of_rows_that_is_none(number: Any) -> None:
    with pytest.raises(SampleError, match=rf"^num_rows\n.*{re.escape(repr(number))}\n.*from 0 to 2147483647"):
        row_sequences(PACKED_MASK, torch.tensor([0, 0, 1]), number)


@pytest.mark.parametrize("rows", [*NO_INDEX, {0: 1}, {0}, "01", (row for row in (0, 1))])
def test_rows_of_a_micro_batch_that_are_none(rows: Any) -> None:
    with pytest.raises(SampleError, match=r"^batch_rows\n"):
        rollout_sequences(RESULT, rows)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0, 4], "position 1\n.*: +4\n"),
        ([-1, 0, 7], "positions 0, 2\n.*: +-1, 7\n"),
        ([0.0, True, None], "positions 0, 1, 2\n.*: +0.0, True, None\n"),
        ([2**63], "position 0\n.*9223372036854775808"),
        (torch.tensor([0, 4, -1]), "positions 1, 2\n.*: +4, -1\n"),
    ],
)
def test_rows_of_a_micro_batch_that_the_result_has_not(rows: Any, said: str) -> None:
    with pytest.raises(SampleError, match=rf"^batch_rows at {said}(.*\n)*.*0 to 3\n"):
        rollout_sequences(RESULT, rows)


@pytest.mark.parametrize("rows", [[3, 1], (3, 1), np.array([3, 1]), torch.tensor([3, 1], dtype=torch.int32)])
def test_rows_of_a_micro_batch_in_every_form(rows: Any) -> None:
    assert rollout_sequences(RESULT, rows).index.tolist() == [2, 0]
    assert rollout_sequences(RESULT, []).index.tolist() == []


@pytest.mark.parametrize(
    "kept", [torch.ones(4, dtype=torch.int64), torch.tensor([True]), torch.ones(2, 2).bool(), [True] * 4, 5]
)
def test_kept_rows_that_are_none(kept: Any) -> None:
    with pytest.raises(SampleError, match=r"^kept\n.*\n +expected: a bool for each of the 4 rows of the result"):
        rollout_sequences(RESULT, [0, 1], kept=kept)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (torch.tensor([0, -1]), r"^sequence index at position 1\n.*-1"),
        (torch.tensor([0, 2]), r"^sequence index at position 1\n.*2"),
        (torch.tensor([0.0, 1.0]), r"^sequence index\n +got: +torch.float32"),
        (None, r"^sequence index\n +got: +a value of type NoneType"),
    ],
)
def test_sequences_that_do_not_exist(index: Any, match: str) -> None:
    for ratio in (None, torch.zeros(2)):
        with pytest.raises(SampleError, match=match):
            gspo_loss(X, X, X, MASK, Sequences(index, torch.tensor([2, 1]), ratio))
    with pytest.raises(SampleError, match=match):
        sequence_log_ratio(X, X, MASK, Sequences(index, torch.tensor([2, 1])))


@pytest.mark.parametrize(
    ("sequences", "match"),
    [
        (None, r"^sequences\n +got: +a value of type NoneType\n +expected: a value of type Sequences"),
        (torch.tensor([0, 1]), r"^sequences\n +got: +torch.int64 of shape \[2\]"),
        (Sequences(torch.tensor([0, 1]), None), r"^tokens of sequences\n"),  # type: ignore[arg-type]
        (Sequences(torch.tensor([0, 1]), torch.ones(2, 1)), r"^tokens of sequences\n"),
        (Sequences(torch.tensor([0, 1]), torch.ones(2), [0.0, 0.0]), r"^log_ratio\n"),  # type: ignore[arg-type]
    ],
)
def test_sequences_that_are_none(sequences: Any, match: str) -> None:
    with pytest.raises(SampleError, match=match):
        gspo_loss(X, X, X, MASK, sequences)


def test_sequences_counted_under_another_mask() -> None:
    with pytest.raises(SampleError, match=r"^ratio of sequence 1\n.*1 of 2 trainable tokens"):
        gspo_loss(X, X, X, MASK, row_sequences(torch.tensor([[1, 1, 0], [1, 1, 0]])))


def test_rollouts_are_named_by_number_and_id() -> None:
    x = torch.full((2, 2), -0.5)
    columns = RolloutColumns(
        group=[0] * 6, rollout=["a", "a", 7, 7, None, "b"], reward=[0] * 6, trainable_tokens=[2, 1, 2, 2, 2, 2]
    )
    sequences = rollout_sequences(normalize_columns(columns), [0, 2])
    with pytest.raises(SampleError, match=r"^ratio of rollouts 0 \(id 'a'\), 1 \(id 7\)\n.*2 of 3, 2 of 4") as raised:
        gspo_loss(x, x, x, torch.ones(2, 2), sequences)
    assert raised.value.rows == (0, 1, 2, 3)
    # A row without an id is a rollout without one.
    with pytest.raises(SampleError, match=r"^ratio of rollout 2\n.*1 of 2"):
        gspo_loss(x[:1], x[:1], x[:1], torch.tensor([[1, 0]]), rollout_sequences(normalize_columns(columns), [4]))


@pytest.mark.parametrize("number", [4.0, "4", None, True, -1, torch.tensor(4)], ids=lambda value: repr(value)[:40])
def test_a_number_of_tokens_that_is_none(number: Any) -> None:
    with pytest.raises(SampleError, match=r"^num_tokens\n"):
        row_of_tokens(torch.tensor([0, 4]), number)


@pytest.mark.parametrize(
    "ends",
    [None, [0, 4], np.array([0, 4]), torch.tensor([0.0, 1.5, 4.0]), torch.tensor(4), torch.tensor([[0, 4]])],
)
def test_ends_that_are_none(ends: Any) -> None:
    with pytest.raises(SampleError, match=r"^cu_seqlens\n.*\n +expected: whole numbers: where each row begins"):
        row_of_tokens(ends, 4)
