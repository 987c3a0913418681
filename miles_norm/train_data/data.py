"""What a trainer eats, in columns: one entry per row, and ragged columns for what has one entry per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.train_data.batches import packed_fields, padded_fields
from miles_norm.train_data.checks import RESPONSE_COLUMNS, bad_data, check_kinds, check_lengths, length_column
from miles_norm.train_data.ragged import Ragged
from miles_norm.train_data.ragged_checks import row_numbers
from miles_norm.train_data.sending import received, sent

__all__ = ["OWN_COLUMNS", "RESPONSE_COLUMNS", "Column", "TrainData"]

Column = Ragged | Tensor | list[Any]

OWN_COLUMNS = ("weights", "trained")
"""Columns that Miles' trainer does not know: the loss weight of a row (float64), and whether it is trained (bool)."""

_COUNTS = ("truncated", "loss_masks")  # bools that Miles writes as 0 and 1


class TrainData:
    """N rows ready for training, in columns named by Miles' keys.

    Why: tens of millions of tokens go from rollout to trainer without passing through Python lists. A column that came
    as lists stays lists until its flat tensor is asked for.

    Args:
        columns: A ``Ragged`` for what has an entry per token (``tokens``, ``loss_masks``, log-probs, routed experts), a
            tensor ``[N, ...]`` or a list of N objects for what has one per row. ``tokens`` and ``response_lengths``
            are required.
        step: What belongs to the step as a whole: ``prompt_group_sizes``, ``step_slots``, ``step_adapter_names``,
            ``step_adapter_batch_sizes``, ``dynamic_global_batch_size``, ...

    Alignment: the response is the last ``response_lengths[n]`` tokens of row n. Entry k of a response column belongs to
    the token at position ``len(tokens) - response_length + k``, whose logits a model gives one position earlier.

    Pickled, it is flat arrays on the CPU. Where these come out of shared memory they are not copied, and must not be
    written to.

    Raises:
        SampleError: columns of another length than N, a response column that is not as long as its response, a
            response longer than its tokens, a name used in both arguments. All rows are named.

    >>> tokens, masks = (Ragged.from_rows(rows, torch.int64) for rows in ([[7, 8, 9], [7, 5]], [[1, 0], [1]]))
    >>> data = TrainData({"tokens": tokens, "response_lengths": [2, 1], "loss_masks": masks,
    ...                   "rewards": torch.tensor([0.5, -0.5])})
    >>> data
    TrainData(2 rows, 5 tokens: tokens, response_lengths, loss_masks, rewards)
    >>> data.select([1]).as_miles_dict()
    {'tokens': [[7, 5]], 'response_lengths': [1], 'loss_masks': [[1]], 'rewards': [-0.5]}
    >>> data.padded_batch()["advantages"].tolist()
    [[0.0, 0.5, 0.0], [0.0, -0.5, 0.0]]
    """

    def __init__(self, columns: Mapping[str, Column], step: Mapping[str, Any] | None = None) -> None:
        self.columns: dict[str, Column] = dict(columns)
        """The columns, in the order given."""
        self.step: dict[str, Any] = dict(step or {})
        """What belongs to the whole step."""
        check_kinds(self.columns, self.step)
        lengths = length_column(self.columns["response_lengths"])
        self.columns["response_lengths"] = lengths
        check_lengths(self.columns, lengths)

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.columns["tokens"])

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, prompts included."""
        return int(self._tokens.offsets[-1])

    def __len__(self) -> int:
        return self.num_rows

    def __contains__(self, name: object) -> bool:
        return name in self.columns or name in self.step

    def __getitem__(self, name: str) -> Any:
        """A column, or an entry of ``step``."""
        return self.columns[name] if name in self.columns else self.step[name]

    def as_miles_dict(self, *, own_columns: bool = False) -> dict[str, Any]:
        """The dict of lists that Miles' own conversion returns, made now.

        Token columns become lists of Python numbers, or one array per row if they have trailing dimensions. Lists that
        back a column are handed over, not copied. The entries of ``step`` are merged in.

        Args:
            own_columns: Add ``weights`` and ``trained``, which Miles does not know.
        """
        kept = {name: value for name, value in self.columns.items() if own_columns or name not in OWN_COLUMNS}
        return {**{name: _as_list(name, value) for name, value in kept.items()}, **self.step}

    def select(self, rows: Any) -> TrainData:
        """Some rows, in any order, repeated or not: a slice, row numbers or a bool mask ``[N]``.

        ``step`` stays as it is. A slice copies no token data of flat columns.

        Raises:
            SampleError: row numbers that do not exist; all of them are named.
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            rows = row_numbers(rows, self.num_rows)
        return _unchecked({name: _select(value, rows) for name, value in self.columns.items()}, self.step)

    @classmethod
    def concat(cls, parts: Sequence[TrainData]) -> TrainData:
        """The rows of all parts, one part after the other.

        Raises:
            SampleError: no parts, parts with different columns, columns of different kinds, or entries of ``step`` that
                differ; all of them are named.
        """
        if not parts:
            raise bad_data("parts of train data", "no parts", "at least one part")
        first = parts[0]
        odd = sorted({name for part in parts for name in part.columns.keys() ^ first.columns.keys()})
        if odd:
            raise bad_data(
                "parts of train data", f"{', '.join(odd)} in some parts only", "the same columns in all parts"
            )
        differing = [
            name
            for name in {name: None for part in parts for name in part.step}
            if not all(name in part.step and _same(part.step[name], first.step.get(name)) for part in parts)
        ]
        if differing:
            raise bad_data(
                "step of train data",
                f"different values of {', '.join(differing)}",
                "the same value in all parts",
                "set these entries to what holds for all rows together, or remove them, before parts are joined",
            )
        names = list(first.columns)
        return cls({name: _concat(name, [part.columns[name] for part in parts]) for name in names}, first.step)

    def to(self, device: torch.device | str) -> TrainData:
        """The same data with tensors and ragged columns on another device; lists of objects stay where they are."""
        moved = {name: v if isinstance(v, list) else v.to(device) for name, v in self.columns.items()}
        return _unchecked(moved, self.step)

    def padded_batch(self, length: int | None = None, pad_token_id: int = 0) -> dict[str, Tensor]:
        """One rectangle per field, each row from position 0 on.

        .. math:: A_{n,t} = r_n m_{n,t}

        with r_n the row's entry of ``rewards`` and m its loss mask. Every field is aligned to token positions: the
        entry of response token k stands at position ``len(tokens) - response_length + k``.

        Args:
            length: T; the longest row by default.
            pad_token_id: Stands in ``input_ids`` where no token is; all other fields are 0 or False there.

        Returns:
            ``input_ids`` int64 ``[N, T]``; ``attention_mask`` bool, True on tokens; ``response_mask`` bool, True on
            response tokens; ``loss_mask`` bool, True on trainable ones (all response tokens without ``loss_masks``);
            ``advantages`` in the dtype of ``rewards``, 0 where ``loss_mask`` is False; each log-prob column and
            ``opd_reverse_kl`` under its own name; ``weights`` float64 ``[N]``. Fields without a column are absent.

        Raises:
            SampleError: rows longer than ``length``, loss masks with entries other than 0 and 1; all rows are named.
        """
        return padded_fields(packed_fields(self.columns, RESPONSE_COLUMNS), self._tokens.offsets, length, pad_token_id)

    def packed_batch(self) -> dict[str, Tensor]:
        """The same fields as ``padded_batch`` without padding: rows one after the other, ``[num_tokens]`` each.

        Returns:
            ``input_ids``, ``response_mask``, ``loss_mask``, ``advantages`` and log-probs, flat; ``position_ids`` int64,
            from 0 in each row; ``cu_seqlens`` int32 ``[N + 1]``, where each row begins, and the end; ``weights``
            float64 ``[N]``.

        Raises:
            SampleError: loss masks with entries other than 0 and 1, or more tokens than int32 counts.
        """
        total = len(self._tokens.values)
        if total >= 2**31:
            raise bad_data("packed batch", f"{total} tokens", "fewer than 2**31", "select fewer rows")
        offsets = self._tokens.offsets
        return {**packed_fields(self.columns, RESPONSE_COLUMNS), "cu_seqlens": offsets.to(torch.int32)}

    def __getstate__(self) -> dict[str, Any]:
        # As numpy arrays, which a shared object store hands out without a copy; tensors it would copy.
        return {"columns": {name: sent(value) for name, value in self.columns.items()}, "step": self.step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.columns = {name: received(value) for name, value in state["columns"].items()}
        self.step = state["step"]

    def __repr__(self) -> str:
        step = f"; step: {', '.join(self.step)}" if self.step else ""
        return f"TrainData({self.num_rows} rows, {self.num_tokens} tokens: {', '.join(self.columns)}{step})"

    @property
    def _tokens(self) -> Ragged:
        tokens = self.columns["tokens"]
        assert isinstance(tokens, Ragged)
        return tokens


def _unchecked(columns: dict[str, Column], step: Mapping[str, Any]) -> TrainData:
    data = object.__new__(TrainData)
    data.columns, data.step = columns, dict(step)
    return data


def _as_list(name: str, value: Column) -> list[Any]:
    if isinstance(value, list):
        return list(value)
    if name in _COUNTS and value.dtype == torch.bool:
        value = Ragged(value.values.view(torch.uint8), value.offsets) if isinstance(value, Ragged) else value.int()
    if isinstance(value, Ragged):
        return value.arrays() if value.row_shape else value.tolists()
    entries: list[Any] = value.tolist()
    return entries


def _select(value: Column, rows: slice | Tensor) -> Column:
    if isinstance(value, Ragged):
        return value.select(rows)
    if isinstance(rows, slice):
        return value[rows]
    if isinstance(value, Tensor):
        return value[rows.to(value.device)]
    return [value[n] for n in rows.tolist()]


def _concat(name: str, parts: list[Column]) -> Column:
    if all(isinstance(part, Ragged) for part in parts):
        return Ragged.concat([part for part in parts if isinstance(part, Ragged)])
    if all(isinstance(part, list) for part in parts):
        return [entry for part in parts for entry in part]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    kinds = {(part.dtype, part.shape[1:]) for part in tensors}
    if len(tensors) == len(parts) and len(kinds) == 1:
        return torch.cat(tensors)
    found = sorted({f"{type(part).__name__} {getattr(part, 'dtype', '')}".strip() for part in parts})
    raise bad_data(f"column {name!r} of train data", " and ".join(found), "one kind of column, dtype and shape")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "tolist"):
        return _same(one.tolist(), other.tolist())
    return bool(one == other or (one != one and other != other))
