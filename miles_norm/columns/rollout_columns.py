"""Index columns of a batch: one number per row and field, which is all that normalization reads.

Token lists are never touched: of a loss mask only the sum is taken. ``columns_from_samples`` (in ``sample_columns``)
builds the columns from rows of any kind; ``RolloutColumns`` also takes tensors or arrays that already exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.host import host_numbers
from miles_norm.columns.ids import IdColumn, check_length, encode_ids, is_readable, shared_tensor, unreadable
from miles_norm.columns.parts import joined_columns, packed_columns, selected_columns, unpacked_columns
from miles_norm.errors import RewardError, SampleError, format_rows

__all__ = ["RolloutColumns"]


class RolloutColumns:
    """The columns that normalization reads, one entry per row.

    Args:
        group: Prompt group ids ``[N]``: tensor, array or list of ints or of any hashable ids; None or NaN in a row says
            that it has none. None if no row has one.
        rollout: Rollout ids ``[N]``, likewise; unique within their group. A row without one is a rollout of its own.
        reward: Rewards ``[N]``, any real dtype, converted to float64; NaN or infinite means unscored.
        trainable_tokens: Sum of each row's loss mask ``[N]``, non-negative integers.
        scored: bool ``[N]``; False overrides a reward that happens to be finite.
        removed: bool ``[N]``; Miles' ``remove_sample``. Such a row has no trainable token.
        truncated: bool ``[N]``; the row ended by length.
        padding: bool ``[N]``; a copy that fills a batch and enters nothing.
        adapter: Adapter ids ``[N]``; with adapters the prompt group is named by (adapter, group).
        components: Reward components by name, each a float column ``[N]``; NaN where a row lacks it. ``reward`` is
            their weighted sum.

    Columns that fit are referred to, not copied: do not write into them while a result made from them is in use.

    All columns must be on one device; the device of ``reward`` decides where it is not a list.

    Pickled, as processes exchange them, they take at most 64 bytes a row: 12 for reward and tokens, at most 8 for each
    id that is an integer, 1 for all flags, 8 for each component. An id of another kind is sent once.

    Raises:
        SampleError: a column that is not one-dimensional, has another length, or holds values that do not fit.
        RewardError: a finite reward too large for the float32 output.

    >>> columns = RolloutColumns(group=["a", "a", "b"], rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[5, 3, 2])
    >>> len(columns), columns.group.codes.tolist(), columns.group.label(2)
    (3, [0, 0, 1], 'b')
    """

    _COLUMNS = (
        "group", "rollout", "reward", "trainable_tokens", "scored", "removed", "truncated", "padding", "adapter",
        "components",
    )  # fmt: skip
    __slots__ = (*_COLUMNS, "id_collisions", "nested_sizes", "odd_masks", "status", "without_id")

    def __init__(
        self,
        *,
        group: Any,
        rollout: Any,
        reward: Any,
        trainable_tokens: Any,
        scored: Any = None,
        removed: Any = None,
        truncated: Any = None,
        padding: Any = None,
        adapter: Any = None,
        components: Mapping[str, Any] | None = None,
    ) -> None:
        self.reward = _reward_column(reward)
        rows, device = len(self.reward), self.reward.device
        if not rows:
            raise SampleError(
                "reward",
                got="no rows",
                expected="at least one row",
                reason="there is nothing to normalize",
                remedy="check that the rollouts arrived, or skip the step",
            )
        self.group = None if group is None else encode_ids(group, "group", rows, device)
        self.rollout = None if rollout is None else encode_ids(rollout, "rollout", rows, device)
        self.adapter = None if adapter is None else encode_ids(adapter, "adapter", rows, device)
        self.trainable_tokens = _token_column(trainable_tokens, rows, device)
        self.scored = _flag_column("scored", scored, rows, device)
        self.removed = _flag_column("removed", removed, rows, device)
        self.truncated = _flag_column("truncated", truncated, rows, device)
        self.padding = _flag_column("padding", padding, rows, device)
        self.components: dict[str, Tensor] | None = None
        if components is not None:
            self.components = {name: _reward_column(values).to(device) for name, values in components.items()}
            for name, column in self.components.items():
                check_length(f"component {name!r}", tuple(column.shape), rows)
        self.nested_sizes: tuple[int, ...] | None = None
        self.status: list[str | None] | None = None
        self.id_collisions: tuple[tuple[int, int], ...] = ()
        self.without_id: tuple[int, ...] = ()
        self.odd_masks: tuple[int, ...] = ()

    @classmethod
    def checked(cls, columns: object) -> RolloutColumns:
        """``columns`` themselves.

        Raises:
            SampleError: a value of another type.
        """
        if not isinstance(columns, cls):
            raise SampleError(
                "columns",
                got=f"a value of type {type(columns).__name__}",
                expected="RolloutColumns",
                reason="groups, rollouts and rewards are read from columns, and never guessed",
                remedy="make them with RolloutColumns(...), or pass samples to normalize_rewards",
            )
        return columns

    def __len__(self) -> int:
        return self.reward.shape[0]

    def __repr__(self) -> str:
        present = [name for name in self._COLUMNS if getattr(self, name) is not None]
        return f"RolloutColumns({len(self)} rows on {self.reward.device}: {', '.join(present)})"

    @property
    def notes(self) -> tuple[str, ...]:
        """What reading the rows had to say."""
        notes, lacking, odd = [], self.without_id, self.odd_masks
        if lacking:
            has, each = (
                ("has", "is a rollout of its own") if len(lacking) == 1 else ("have", "are each a rollout of their own")
            )
            notes.append(f"{format_rows(lacking)} {has} neither rollout_id nor index and {each}")
        if odd:
            notes.append(f"loss_mask of {format_rows(odd)} has another length than response_length")
        return tuple(notes)

    def to(self, device: torch.device | str) -> RolloutColumns:
        """The same columns on another device; self if they are there already."""
        target = torch.device(device)
        if self.reward.device == target:
            return self
        moved = self._state()
        for name, value in moved.items():
            if isinstance(value, dict):
                moved[name] = {key: column.to(target) for key, column in value.items()}
            elif isinstance(value, Tensor | IdColumn):
                moved[name] = value.to(target)
        return self._of(moved)

    def with_padding(self, padding: Tensor) -> RolloutColumns:
        """The same columns with other rows as padding: bool ``[N]`` on their device."""
        return self._of(self._state() | {"padding": padding})

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def _of(cls, state: Mapping[str, Any]) -> RolloutColumns:
        """Columns of attributes that have been checked already."""
        columns = object.__new__(cls)
        for name, value in state.items():
            setattr(columns, name, value)
        return columns

    def __getstate__(self) -> dict[str, Any]:
        return packed_columns(self._state())

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in unpacked_columns(state).items():
            setattr(self, name, value)

    def select(self, rows: Tensor) -> RolloutColumns:
        """Some rows, by number and in any order; how the whole was nested is not kept.

        >>> columns = RolloutColumns(group=[0, 1], rollout=["a", "b"], reward=[1.0, 0.0], trainable_tokens=[2, 3])
        >>> columns.select(torch.tensor([1])).rollout.label(0)
        'b'
        """
        return self._of(selected_columns(self._state(), rows))

    @classmethod
    def concat(cls, parts: Sequence[RolloutColumns]) -> RolloutColumns:
        """The rows of all parts, one part after the other, as if they had been read together.

        A column that only some parts have is filled up with what its absence means. Of nested parts the inner lists are
        joined. A ``rollout_id`` that equals the ``index`` of a row in another part makes them siblings without the
        warning that it gives within a part.

        Raises:
            SampleError: no parts, nested parts beside flat ones, or different reward components; all are named.

        >>> parts = [RolloutColumns(group=[0], rollout=[name], reward=[1.0], trainable_tokens=[2]) for name in "ab"]
        >>> RolloutColumns.concat(parts).rollout.codes.tolist()
        [0, 1]
        """
        return cls._of(joined_columns([part._state() for part in parts]))


def _reward_column(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        if not is_readable(values):
            raise _no_column(RewardError, "reward", unreadable(values))
        reward = values.detach()
    else:
        try:
            reward = torch.from_numpy(_real_numbers(values))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise RewardError(
                "reward column",
                got=str(error),
                expected="one real number per row, NaN where there is none",
                reason="rewards are averaged",
                remedy="use normalize_rewards(samples, ...) for rewards that are dicts, strings or None",
            ) from None
    if reward.ndim != 1 or reward.is_complex():
        raise RewardError(
            "reward column",
            got=f"shape {tuple(reward.shape)}, dtype {reward.dtype}",
            expected="one real number per row: shape [N]",
            reason="a row has one reward",
            remedy="pass a one-dimensional column",
        )
    return reward.to(torch.float64)


def _real_numbers(values: Any) -> np.ndarray[Any, Any]:
    """A float64 copy; numpy by itself would parse strings and drop imaginary parts."""
    array = np.asarray(values)
    if array.dtype.kind == "O" and any(isinstance(value, str | bytes) for value in array.flat):
        raise TypeError("strings among the values")
    if array.dtype.kind not in "biufO":
        raise TypeError(f"values of dtype {array.dtype}")
    return np.array(array, dtype=np.float64)


def _no_column(kind: type[SampleError], name: str, got: str) -> SampleError:
    return kind(
        f"{name} column",
        got=got,
        expected="a number in every place of one shape [N]",
        reason="every column has one entry per row",
        remedy="pass one-dimensional columns of one length",
    )


def _column(name: str, values: Any, rows: int) -> Tensor:
    if isinstance(values, Tensor):
        if not is_readable(values):
            raise _no_column(SampleError, name, unreadable(values))
        column = values.detach()
    else:
        try:
            column = shared_tensor(np.asarray(values))
        except (TypeError, ValueError) as error:
            raise SampleError(
                f"{name} column",
                got=str(error),
                expected=f"[{rows}] numbers or bools",
                reason="every column has one entry per row",
                remedy="pass one-dimensional columns of one length",
            ) from None
    check_length(name, tuple(column.shape), rows)
    return column


def _token_column(values: Any, rows: int, device: torch.device) -> Tensor:
    tokens = _column("trainable_tokens", values, rows)
    whole = tokens.to(device).to(torch.int64)
    if (
        tokens.dtype == torch.bool
        or tokens.is_complex()
        or (tokens.is_floating_point() and bool((whole != tokens.to(device)).any()))
    ):
        bad = torch.nonzero(whole != tokens.to(device))[:, 0].tolist()
    else:
        low, high = host_numbers(*torch.aminmax(whole))
        if low >= 0 and high < 2**31:
            return whole
        bad = torch.nonzero((whole < 0) | (whole >= 2**31))[:, 0].tolist()
    raise SampleError(
        f"trainable_tokens of {format_rows(bad)}" if bad else "trainable_tokens",
        got=", ".join(str(tokens[row].item()) for row in bad[:5]) or f"dtype {tokens.dtype}",
        expected="a whole number from 0 to 2**31 - 1 per row",
        reason="they are counts of loss-mask entries that are 1",
        remedy="pass the sum of each row's loss mask",
        rows=bad,
    )


def _flag_column(name: str, values: Any, rows: int, device: torch.device) -> Tensor | None:
    if values is None:
        return None
    flags = _column(name, values, rows)
    if flags.dtype != torch.bool and not bool(((flags == 0) | (flags == 1)).all()):
        raise SampleError(
            name,
            got=f"dtype {flags.dtype} with values other than 0 and 1",
            expected="one bool per row",
            reason="a row has the property or not",
            remedy="pass a bool column",
        )
    return flags.to(device=device, dtype=torch.bool)
