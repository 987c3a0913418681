"""The columns of a rank's share of slime's batch, read before anything is computed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.columns.ids import encode_ids, entries_of, plain_id
from miles_norm.columns.masks import count_each_mask
from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.loss.checks import FLOATS, is_dense, is_number, is_whole

__all__ = ["finite_numbers", "kl_rows", "rank_columns"]

_LOWEST = torch.finfo(torch.float32).min


def rank_columns(data: Any, step: str, more: Sequence[str] = ()) -> dict[str, list[Any]]:
    """The columns as lists: ``rollout_ids`` (the row numbers where they did not come), ``rollout_mask_sums`` as ints,
    ``tokens``, the ones of each row's loss mask, and those that are asked for.

    Raises:
        SampleError: a column that is missing or is none, columns of different lengths, sums that are no whole numbers,
            rows without an id, masks with entries other than 0 and 1; all rows are named.
    """
    if not isinstance(data, Mapping):
        raise _bad(f"rollout data of the trainer{step}", f"a value of type {type(data).__name__}", "columns by name")
    if data.get("rollout_mask_sums") is None:
        raise SampleError(
            f"rollout data of the trainer{step}",
            got="no rollout_mask_sums",
            expected="one entry per row",
            reason="the loss of a rollout is divided by the trainable tokens of all of its rows",
            remedy="use a slime that shards this column, and a conversion that returns it: slime's own, or "
            "miles_norm.integrations.miles.convert_samples_to_train_data",
        )
    ids = () if data.get("rollout_ids") is None else ("rollout_ids",)
    names = ("rollout_mask_sums", "loss_masks", *ids, *more)
    columns = {name: entries for name in names if (entries := entries_of(data.get(name))) is not None}
    rows = len(columns.get("rollout_mask_sums", ()))
    odd = {name: f"{len(columns[name])} entries" for name in columns if len(columns[name]) != rows}
    odd |= {name: f"a value of type {type(data.get(name)).__name__}" for name in names if name not in columns}
    if odd:
        got = ", ".join(f"{name}: {found}" for name, found in odd.items())
        raise _bad(f"columns of the trainer's rollout data{step}", got, f"one entry per row, {rows} in each")
    columns["rollout_mask_sums"] = _sums(columns["rollout_mask_sums"], step)
    columns["rollout_ids"] = _ids(columns["rollout_ids"], step) if ids else list(range(rows))
    columns["tokens"], problems = count_each_mask(columns["loss_masks"])
    if problems:
        bad = list(problems)
        got = "; ".join(f"row {row}: {problems[row]}" for row in bad[:10])
        raise _bad(f"loss_masks of {format_rows(bad)}{step}", got, "a list or tensor of 0 and 1 per row", bad)
    return columns


def finite_numbers(name: str, values: list[Any]) -> list[float]:
    """One number per row, out of tensors of one entry too.

    Raises:
        SampleError: NaN, infinite, or no number; all rows are named.

    >>> finite_numbers("rewards", [0.5, torch.tensor(1.0)])
    [0.5, 1.0]
    """
    numbers = [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in values]
    bad = [row for row, value in enumerate(numbers) if not is_number(value, _LOWEST)]
    if bad:
        raise _bad(f"{name} of {format_rows(bad)}", _some(values, bad), "a finite number per row", bad)
    return [float(value) for value in numbers]


def kl_rows(values: list[Any]) -> list[Tensor]:
    """The KL of each row's tokens in float32.

    Raises:
        SampleError: no one-dimensional tensors, or entries that are NaN or infinite; all rows are named.
    """
    bad = [n for n, kl in enumerate(values) if not is_dense(kl) or kl.is_meta or kl.ndim != 1 or kl.dtype not in FLOATS]
    if not bad and values and not bool(torch.isfinite(torch.cat([kl.detach() for kl in values])).all()):
        bad = [row for row, kl in enumerate(values) if not bool(torch.isfinite(kl).all())]
    if bad:
        raise _bad(f"kl of {format_rows(bad)}", _some(values, bad), "a tensor of finite numbers, one per token", bad)
    return [kl.float() for kl in values]


def _sums(values: list[Any], step: str) -> list[int]:
    numbers = [plain_id(value) for value in values]
    bad = [row for row, value in enumerate(numbers) if not is_whole(value)]
    if bad:
        subject = f"rollout_mask_sums of {format_rows(bad)}{step}"
        raise _bad(subject, _some(values, bad), "a whole number from 0 on", bad)
    return [int(value) for value in numbers]


def _ids(values: list[Any], step: str) -> list[Any]:
    column = encode_ids(values, "rollout", len(values))
    if column.missing is not None:
        bad: list[int] = torch.nonzero(column.missing)[:, 0].tolist()
        raise _bad(f"rollout_ids of {format_rows(bad)}{step}", "None", "an id on every row", bad)
    return column.labels_at(torch.arange(len(values)))


def _some(values: list[Any], rows: list[int]) -> str:
    return ", ".join(shown(values[row]) for row in rows[:5])


def _bad(subject: str, got: str, expected: str, rows: Sequence[int] = ()) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected=expected,
        reason="a row is the same entry of every column, and what does not fit would train other rows",
        remedy="look for what changes the columns between conversion and the trainer",
        rows=rows,
    )
