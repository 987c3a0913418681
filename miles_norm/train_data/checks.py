"""What the columns of train data must be, and how they must fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows
from miles_norm.train_data.ragged import Ragged

__all__ = ["RESPONSE_COLUMNS", "bad_data", "check_kinds", "check_lengths", "length_column"]

RESPONSE_COLUMNS = ("loss_masks", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl")
"""Columns with one entry per response token; a row of theirs is as long as ``response_lengths`` says."""


def check_kinds(columns: Mapping[str, Any], step: Mapping[str, Any]) -> None:
    """Refuse missing columns, names used twice, and values that are no columns."""
    missing = [name for name in ("tokens", "response_lengths") if name not in columns]
    if missing:
        raise bad_data(
            "train data", f"no column {' and none '.join(missing)}", "the columns tokens and response_lengths"
        )
    wrong = [name for name in (*columns, *step) if not isinstance(name, str)]
    if wrong or columns.keys() & step.keys():
        clash = sorted(columns.keys() & step.keys(), key=str)
        got = f"names that are no strings: {wrong!r:.100}" if wrong else f"{', '.join(clash)} in columns and in step"
        raise bad_data("names of train data", got, "strings, each a column or an entry of the step")
    for name, value in columns.items():
        ragged_only = name == "tokens" or name in RESPONSE_COLUMNS
        if isinstance(value, Ragged) and not (ragged_only and value.row_shape):
            continue
        if not ragged_only and (isinstance(value, list) or (isinstance(value, Tensor) and value.ndim >= 1)):
            continue
        got = f"entries of shape {list(value.row_shape)}" if isinstance(value, Ragged) else type(value).__name__
        expected = "a Ragged of numbers" if ragged_only else "a Ragged, a tensor [N, ...] or a list of N objects"
        raise bad_data(f"column {name!r} of train data", got, expected, "Ragged.from_rows(rows, dtype) takes lists")


def length_column(given: Any) -> Tensor:
    """``response_lengths`` as int64 ``[N]``."""
    if isinstance(given, Ragged):
        raise bad_data("response_lengths of train data", "a Ragged", "one whole number per row")
    try:
        lengths = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64 if not given else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise bad_data("response_lengths of train data", f"{error}", "one whole number per row") from None
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        got = f"shape {list(lengths.shape)}, dtype {lengths.dtype}"
        raise bad_data("response_lengths of train data", got, "one whole number per row")
    return lengths.detach().to(torch.int64)


def check_lengths(columns: Mapping[str, Any], lengths: Tensor) -> None:
    """Refuse columns that have not N rows, and response columns that are not as long as the responses."""
    rows = len(columns["tokens"])
    odd = {name: len(value) for name, value in columns.items() if len(value) != rows}
    if odd:
        got = ", ".join(f"{name} with {count}" for name, count in odd.items())
        raise bad_data("columns of train data", got, f"{rows} rows, as tokens has")
    for name in ("tokens", *RESPONSE_COLUMNS):
        column = columns.get(name)
        if not isinstance(column, Ragged):
            continue
        found, wanted = column.lengths, lengths.to(column.offsets.device)
        wrong = (found < wanted) | (wanted < 0) if name == "tokens" else found != wanted
        if bool(wrong.any()):
            bad: list[int] = torch.nonzero(wrong)[:, 0].tolist()
            pairs = ", ".join(f"{found[n]} for a response of {wanted[n]}" for n in bad[:5])
            raise bad_data(
                f"{name} of {format_rows(bad)}",
                f"lengths {pairs}{', ...' if len(bad) > 5 else ''}",
                "prompt and response tokens" if name == "tokens" else "one entry per response token",
                rows=bad,
            )


def bad_data(
    subject: str,
    got: str,
    expected: str,
    remedy: str = "build all columns from the same rows",
    rows: Sequence[int] = (),
) -> SampleError:
    """The error for columns that do not fit together."""
    return SampleError(
        subject, got=got, expected=expected, reason="a row is the same entry of every column", remedy=remedy, rows=rows
    )
