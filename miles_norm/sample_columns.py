"""Rows of any kind, flat or nested, to ``RolloutColumns``, in one pass and without touching token lists."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from miles_norm.columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.errors import RewardError, SampleError, format_rows
from miles_norm.masks import count_mask

__all__ = ["columns_from_samples", "flatten_samples"]


@dataclass(frozen=True, slots=True)
class RolloutList:
    """Id of a rollout that was a list of its own in the input: the number of that list. It equals no id of a row."""

    number: int

    def __repr__(self) -> str:
        return f"<list {self.number}>"


def columns_from_samples(samples: Iterable[Any], config: NormalizationConfig | None = None) -> RolloutColumns:
    """Read the index columns of a batch of rows.

    Args:
        samples: Rows (``Sample``, Miles' or slime's own objects, or dicts with their field names), flat or nested:
            an inner list is a prompt group, a list inside it is a rollout.
        config: Says where the reward and the group id stand: ``reward_key``, ``group_key``, ``coerce_numeric_strings``.

    Read per row: the group id (``group_key``, in the row or its metadata), ``rollout_id`` or else ``index``,
    ``reward``, ``loss_mask`` (without one all ``response_length`` tokens are trainable), ``remove_sample``, ``status``,
    ``adapter``, ``is_padding``. Fields that a row lacks take Miles' defaults.

    Raises:
        SampleError: something that is no row, an id that cannot be used, a mask that is no list of 0 and 1.
        RewardError: a reward that is no number, or a dict without ``reward_key``.

    >>> rows = [{"group_index": 0, "index": i, "reward": r, "response_length": 2} for i, r in enumerate((1.0, 0.0))]
    >>> columns_from_samples(rows).trainable_tokens.tolist()
    [2, 2]
    """
    config = config or NormalizationConfig()
    rows, sizes, rollout_lists = flatten_samples(samples)
    _check_rows(rows)
    rollouts, collisions = _rollout_ids(rows, rollout_lists)
    removed, padding = _field(rows, "remove_sample"), _field(rows, "is_padding")
    status = [_status(value) for value in _field(rows, "status")]
    adapters = [_adapter_name(value) for value in _field(rows, "adapter")]
    groups = _group_ids(rows, config.group_key)
    reward = _rewards(_field(rows, "reward"), config)
    columns = RolloutColumns(
        group=groups if any(value is not None for value in groups) else None,
        rollout=rollouts,
        reward=_as_float64(reward, config),
        trainable_tokens=_trainable_tokens(rows),
        scored=None if None not in reward else [value is not None for value in reward],
        removed=[bool(flag) for flag in removed] if any(removed) else None,
        truncated=[value == "truncated" for value in status] if "truncated" in status else None,
        padding=[bool(flag) for flag in padding] if any(padding) else None,
        adapter=adapters if any(value is not None for value in adapters) else None,
    )
    columns.nested_sizes, columns.status, columns.id_collisions = sizes, status, collisions
    return columns


def flatten_samples(samples: Iterable[Any]) -> tuple[list[Any], tuple[int, ...] | None, list[int | None] | None]:
    """Rows in flattened order, the rows of each inner list, and for each row the number of the rollout list it was in.

    The second part is None for flat input, the third where no rollout has a list of its own.

    >>> flatten_samples([["a", ["b", "c"]], ["d"]])
    (['a', 'b', 'c', 'd'], (3, 1), [None, 0, 0, None])
    """
    if isinstance(samples, str | bytes | Mapping) or not isinstance(samples, Iterable):
        raise _not_rows("samples", type(samples).__name__, ())
    outer = list(samples)
    inner = [isinstance(item, list | tuple) for item in outer]
    if not any(inner):
        return outer, None, None
    if not all(inner):
        flat = [i for i, nested in enumerate(inner) if not nested]
        raise SampleError(
            f"samples: {format_rows(flat, 'item', 10)}",
            got="single rows beside lists of rows",
            expected="either a flat list of rows or one list per prompt group",
            reason="an inner list is a prompt group, and a row beside it would belong to none",
            remedy="put each prompt's rows into a list of their own, or flatten them all",
        )
    rows: list[Any] = []
    lists: list[int | None] = []
    sizes, rollout_lists = [], 0
    for group in outer:
        before = len(rows)
        for item in group:
            if isinstance(item, list | tuple):
                rows.extend(item)
                lists.extend([rollout_lists] * len(item))
                rollout_lists += 1
            else:
                rows.append(item)
                lists.append(None)
        sizes.append(len(rows) - before)
    return rows, tuple(sizes), lists if rollout_lists else None


def _check_rows(rows: list[Any]) -> None:
    for i, row in enumerate(rows):
        if isinstance(row, Mapping) and not isinstance(row, dict):
            rows[i] = dict(row)
    readable = {kind: kind is dict or issubclass(kind, dict) for kind in set(map(type, rows))}
    bad = [i for i, row in enumerate(rows) if not (readable[type(row)] or hasattr(row, "reward"))]
    if bad:
        raise _not_rows(f"samples: {format_rows(bad)}", ", ".join(sorted({type(rows[i]).__name__ for i in bad})), bad)


def _not_rows(subject: str, got: str, rows: Sequence[int]) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="rows: Sample objects, objects with Miles' field names, or dicts, in a list or in lists of lists",
        reason="rewards, ids and masks are read by field name",
        remedy="pass the list of samples that the rollout function returned (of a dump: its 'samples')",
        rows=rows,
    )


def _field(rows: list[Any], name: str) -> list[Any]:
    return [row.get(name) if isinstance(row, dict) else getattr(row, name, None) for row in rows]


def _group_ids(rows: list[Any], key: str) -> list[Any]:
    ids = _field(rows, key)
    if key != "group_index":
        metadata = _field(rows, "metadata")
        ids = [m.get(key) if i is None and isinstance(m, Mapping) else i for i, m in zip(ids, metadata, strict=True)]
    return ids


def _rollout_ids(rows: list[Any], lists: list[int | None] | None) -> tuple[list[Hashable], tuple[tuple[int, int], ...]]:
    """Rollout id of each row, and pairs of rows that share one although their own ``index`` differs."""
    explicit, index = _known(_field(rows, "rollout_id")), _known(_field(rows, "index"))
    ids = [i if e is None else e for e, i in zip(explicit, index, strict=True)]
    if lists is not None:
        return [i if n is None else RolloutList(n) for i, n in zip(ids, lists, strict=True)], ()
    borrowed = {i: row for row, (e, i) in enumerate(zip(explicit, index, strict=True)) if e is None and _is_id(i)}
    if not borrowed or len(borrowed) == len(rows):
        return ids, ()
    pairs = [
        (row, borrowed[e])
        for row, (e, i) in enumerate(zip(explicit, index, strict=True))
        if e is not None and i is not None and _is_id(e) and e != i and e in borrowed
    ]
    return ids, tuple(pairs)


def _known(values: list[Any]) -> list[Any]:
    return [None if isinstance(v, float | np.floating) and math.isnan(v) else v for v in values]


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str)


def _status(value: Any) -> str | None:
    value = getattr(value, "value", value)
    return None if value is None else str(value).lower()


def _adapter_name(value: Any) -> Hashable:
    """An adapter is named by a string, by a mapping or object with a ``name``, or by any other id."""
    if isinstance(value, Mapping):
        return value.get("name")
    return getattr(value, "name", value)  # type: ignore[no-any-return]


def _rewards(values: list[Any], config: NormalizationConfig) -> list[Any]:
    """Rewards as Python numbers, None where a row has none."""
    if set(map(type, values)) <= {int, float, bool, type(None)} and config.reward_key is None:
        return values
    numbers, problems = [], {}
    for row, value in enumerate(values):
        try:
            numbers.append(_number(value, config))
        except (TypeError, ValueError) as problem:
            problems[row] = str(problem)
    if problems:
        raise _bad_rewards(values, problems, config)
    return numbers


def _as_float64(numbers: list[Any], config: NormalizationConfig) -> np.ndarray[Any, Any]:
    try:
        return np.array([math.nan if value is None else value for value in numbers], dtype=np.float64)
    except OverflowError:
        rows = [row for row, value in enumerate(numbers) if value is not None and abs(value) > 2**1000]
        raise _bad_rewards(numbers, dict.fromkeys(rows, "an integer beyond float64"), config) from None


def _number(value: Any, config: NormalizationConfig) -> Any:
    """A reward as a Python number, None where there is none; TypeError or ValueError says what is wrong with it."""
    if config.reward_key is not None and value is not None:
        if not isinstance(value, Mapping):
            raise TypeError(f"{_kind(value)}, not a dict with the key {config.reward_key!r}")
        if config.reward_key not in value:
            raise ValueError(f"a dict with the keys {sorted(map(str, value))}")
        value = value[config.reward_key]
    if isinstance(value, Mapping):
        raise TypeError(f"a dict with the keys {sorted(map(str, value))}")
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) != 1:
        raise TypeError(f"{_kind(value)} of shape {tuple(value.shape)}")
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item()
    if isinstance(value, str) and config.coerce_numeric_strings:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"the str {value[:40]!r}, which is no number") from None
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        raise TypeError(f"the str {value[:40]!r}")
    if isinstance(value, bytes | bytearray):  # float() would parse them
        raise TypeError(_kind(value))
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(_kind(value)) from None


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:60] if isinstance(value, int | float | str) else type(value).__name__


def _bad_rewards(values: list[Any], problems: dict[int, str], config: NormalizationConfig) -> RewardError:
    rows = list(problems)
    got = "; ".join(f"row {row}: {problems[row]}" for row in rows[:10])
    keys = {str(key) for row in rows if isinstance(values[row], Mapping) for key in values[row]}
    if config.reward_key is not None:
        expected = f"a dict with the key {config.reward_key!r} whose value is a number"
        remedy = "give every row the same kind of reward, or set reward_key to a key that all have"
    else:
        expected = "a number per row, None where there is none"
        remedy = "convert rewards to numbers when they are made"
        if keys:
            remedy = f"set reward_key to the entry to train on (keys seen: {', '.join(sorted(keys))})"
        elif any(isinstance(values[row], str) for row in rows):
            remedy += "; coerce_numeric_strings=True reads strings such as '0.5' as numbers"
    return RewardError(
        f"reward of {format_rows(rows)}",
        got=got + ("; ..." if len(rows) > 10 else ""),
        expected=expected,
        reason="rewards of a prompt group are averaged, and what is no number cannot be",
        remedy=remedy,
        rows=rows,
    )


def _trainable_tokens(rows: list[Any]) -> list[int]:
    counts: list[int] = []
    problems: dict[int, str] = {}
    lengths = _field(rows, "response_length")
    for row, (mask, length) in enumerate(zip(_field(rows, "loss_mask"), lengths, strict=True)):
        try:
            counts.append(_length(length) if mask is None else count_mask(mask))
        except (TypeError, ValueError) as problem:
            problems[row] = f"loss_mask {problem}" if mask is not None else str(problem)
    if problems:
        bad = list(problems)
        raise SampleError(
            f"trainable tokens of {format_rows(bad)}",
            got="; ".join(f"row {row}: {problems[row]}" for row in bad[:10]) + ("; ..." if len(bad) > 10 else ""),
            expected="a loss_mask of 0 and 1, or without one a response_length that is a count",
            reason="the sibling with the most trainable tokens speaks for its rollout",
            remedy="set loss_mask or response_length on every row",
            rows=bad,
        )
    return counts


def _length(value: Any) -> int:
    if value is None:
        raise ValueError("neither loss_mask nor response_length")
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise ValueError(f"response_length {value!r}")
    return int(value)
