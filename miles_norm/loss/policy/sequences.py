"""Which tokens share a ratio: those of a row, or those of a whole rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles_norm.columns.ids import entries_of
from miles_norm.errors import SampleError, shown
from miles_norm.grouping import RolloutIndex
from miles_norm.loss.checks import NUMBERS, check_type, checked_index, is_dense, is_whole, out_of_range, wrong_tensor
from miles_norm.result import NormalizedRewards

__all__ = ["Sequences", "checked_sequences", "rollout_sequences", "row_sequences"]

_MOST_ROWS = 2**31 - 1
"""More are a mistake, for which no memory is asked."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which tokens share a ratio."""

    index: Tensor
    """int64: the sequence of each row ``[N]`` of padded tokens, or of each packed token ``[T]``."""
    tokens: Tensor
    """int64 ``[S]``: trainable tokens of each sequence, those in other micro-batches too."""
    log_ratio: Tensor | None = None
    """``[S]``: mean log-ratio of each sequence, where it was computed beforehand; never carries a gradient."""
    complete: bool = False
    """All tokens of every sequence are in this micro-batch, so that a device is not asked."""
    rollouts: RolloutIndex | None = None
    """Where the sequences are the rollouts of a result: their ids, for errors."""


def row_sequences(mask: Tensor, rows: Tensor | None = None, num_rows: int | None = None) -> Sequences:
    """Each row is a sequence.

    Args:
        mask: 1 on trainable tokens, padded ``[N, T]``, or packed ``[T]`` with the two others.
        rows: The row of each packed token ``[T]`` (``row_of_tokens``).
        num_rows: Rows of the packed tokens, at most 2³¹ - 1.

    Raises:
        SampleError: packed tokens without ``rows`` or ``num_rows``, or an index that does not fit them; its range is
            checked on the CPU.

    >>> row_sequences(torch.tensor([[1, 1, 0], [1, 0, 0]])).tokens.tolist()
    [2, 1]
    """
    if not is_dense(mask) or mask.ndim not in (1, 2) or (mask.ndim == 1 and rows is None):
        raise wrong_tensor("mask", mask, "[N, T], or packed [T] together with rows and num_rows")
    keep = (mask != 0).to(torch.int64)
    if mask.ndim == 2 and rows is None and num_rows is None:
        return Sequences(torch.arange(len(mask), device=mask.device), keep.sum(dim=-1), complete=True)
    expected = f"the row of each packed token of {list(mask.shape)}, and num_rows"
    if num_rows is None:
        raise wrong_tensor("row index", rows, expected)
    if not is_whole(num_rows) or num_rows > _MOST_ROWS:
        raise SampleError(
            "num_rows",
            got=shown(num_rows),
            expected=f"the number of rows of the packed tokens, from 0 to {_MOST_ROWS}",
            reason="each of them is a sequence, with or without tokens",
            remedy="pass how many rows the micro-batch has",
        )
    index = checked_index("row index", rows, num_rows, expected).to(mask.device)
    if index.shape != mask.shape:
        raise wrong_tensor("row index", rows, expected)
    return Sequences(index, keep.new_zeros(num_rows).index_add_(0, index, keep), complete=True)


def rollout_sequences(
    result: NormalizedRewards,
    batch_rows: Tensor | Sequence[int],
    *,
    rows: Tensor | None = None,
    kept: Tensor | None = None,
) -> Sequences:
    """Each rollout is a sequence, over all of its rows.

    Args:
        result: Knows the rollouts and all of their trainable tokens.
        batch_rows: Which rows of the result the micro-batch holds, in its order ``[N]``, as
            ``UpdatePlan.micro_batches`` gives them.
        rows: The row of each packed token, counted within the micro-batch ``[T]``; None for padded tokens.
        kept: bool ``[N]`` of all rows of the result: which are trained at all; None for all. Siblings that a plan drops
            are not waited for: ``plan.row_update >= 0``.

    Raises:
        SampleError: rows that are no whole numbers, or out of range (checked on the CPU); ``kept`` of another type or
            length.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0, 0, 0], rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 3, 2])
    >>> sequences = rollout_sequences(normalize_columns(columns), [1, 2])
    >>> sequences.index.tolist(), sequences.tokens.tolist()
    ([0, 1], [7, 2])
    """
    check_type("result", result, NormalizedRewards, "pass what normalize_rewards returned, or plan.result")
    index, tokens = result.index, result.trainable_tokens
    if kept is not None:
        if not is_dense(kept) or kept.dtype != torch.bool or kept.shape != tokens.shape:
            raise wrong_tensor("kept", kept, f"a bool for each of the {index.num_rows} rows of the result")
        tokens = tokens.masked_fill(~kept.to(tokens.device), 0)
    total = tokens.new_zeros(index.num_rollouts).index_add_(0, index.row_rollout, tokens)
    rollout = index.row_rollout.index_select(0, _batch_rows(batch_rows, index))
    if rows is not None:
        rows = checked_index("row index", rows, len(rollout), "the row of each packed token in the micro-batch")
        rollout = rollout.index_select(0, rows.to(rollout.device))
    return Sequences(rollout, total, rollouts=index)


def _batch_rows(given: Tensor | Sequence[int], index: RolloutIndex) -> Tensor:
    expected = "rows of the result that are in the micro-batch"
    if isinstance(given, Tensor):
        return checked_index("batch_rows", given, index.num_rows, expected).to(index.row_rollout.device)
    entries = entries_of(given)
    if entries is None:
        raise wrong_tensor("batch_rows", given, expected)
    outside = [n for n, row in enumerate(entries) if not (is_whole(row) and row < index.num_rows)]
    if outside:
        raise out_of_range("batch_rows", [entries[n] for n in outside], outside, index.num_rows, expected)
    return torch.tensor([int(row) for row in entries], dtype=torch.int64, device=index.row_rollout.device)


def checked_sequences(sequences: Sequences, tokens: Tensor) -> Sequences:
    """The sequences on the device of the tokens, the index int64."""
    check_type("sequences", sequences, Sequences, "pass what row_sequences or rollout_sequences returns")
    counts, log_ratio = sequences.tokens, sequences.log_ratio
    if not is_dense(counts) or counts.ndim != 1 or counts.dtype not in NUMBERS:
        raise wrong_tensor("tokens of sequences", counts, "the trainable tokens of each sequence, [S]")
    if log_ratio is not None and (
        not is_dense(log_ratio) or log_ratio.shape != counts.shape or log_ratio.dtype not in NUMBERS
    ):
        raise wrong_tensor("log_ratio", log_ratio, f"one for each of the {len(counts)} sequences")
    expected = f"the sequence of each row or packed token of {list(tokens.shape)}"
    index = checked_index("sequence index", sequences.index, len(counts), expected)
    if index.shape != tokens.shape[:1]:
        raise wrong_tensor("sequence index", index, expected)
    return replace(sequences, index=index.to(tokens.device))
