"""Rewards of any kind to numbers: plain numbers, tensors of one entry, dicts with a key or with components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from miles_norm.columns.ids import is_readable
from miles_norm.config import NormalizationConfig
from miles_norm.errors import RewardError, format_rows

FLOAT32_MAX = float(np.finfo(np.float32).max)

__all__ = ["as_float64", "read_rewards", "reward_components", "weighted_sum"]


def reward_components(
    values: list[Any], config: NormalizationConfig, padding: list[bool]
) -> dict[str, np.ndarray[Any, Any]]:
    """The components that ``gdpo`` normalizes, each float64 ``[N]`` with NaN where a row lacks it.

    A reward of None has none of them, and the row is unscored.

    Raises:
        RewardError: a reward that is no dict, a component that is no number, or, unless ``gdpo_partial``, one that a
            row lacks; all rows are named.
    """
    names = config.options.gdpo_components
    numbers: dict[str, list[Any]] = {name: [] for name in names}
    problems: dict[int, str] = {}
    for row, value in enumerate(values):
        found: dict[str, Any] = {}
        if isinstance(value, Mapping):
            try:
                found = {name: _plain_number(value.get(name), config) for name in names}
            except (TypeError, ValueError, OverflowError) as problem:
                problems[row] = str(problem)
        elif value is not None:
            problems[row] = f"{_kind(value)}, not a dict with the components {', '.join(names)}"
        lacking = [name for name in names if not _usable(found.get(name))]
        if isinstance(value, Mapping) and lacking and row not in problems and not config.options.gdpo_partial:
            problems[row] = f"no {', '.join(lacking)}"
        if padding[row]:
            problems.pop(row, None)  # it enters nothing
        for name in names:
            numbers[name].append(math.nan if name in lacking else found[name])
    if problems:
        rows = list(problems)
        raise RewardError(
            f"reward of {format_rows(rows)}",
            got="; ".join(f"row {row}: {problems[row]}" for row in rows[:10]) + ("; ..." if len(rows) > 10 else ""),
            expected=f"a dict with a number under each of {', '.join(names)}, or None for a row without a reward",
            reason="gdpo normalizes each component over the rollouts of the group",
            remedy="give every row all components, or set options.gdpo_partial to let a lacking one add nothing",
            rows=rows,
        )
    return {name: np.array(column, dtype=np.float64) for name, column in numbers.items()}


def weighted_sum(components: Mapping[str, np.ndarray[Any, Any]], config: NormalizationConfig) -> list[float | None]:
    """The reward of each row: its components times their weights; None for a row that has none of them."""
    weights = config.options.component_weights
    table = np.stack([components[name] for name in weights])
    total = np.nansum(table * np.array(list(weights.values()))[:, None], axis=0)
    none = np.isnan(table).all(axis=0)
    return [None if lacking else float(number) for number, lacking in zip(total, none, strict=True)]


def _usable(value: Any) -> bool:
    return value is not None and abs(value) <= FLOAT32_MAX


def read_rewards(values: list[Any], config: NormalizationConfig, padding: list[bool]) -> list[Any]:
    """Rewards as Python numbers, None where a row has none."""
    if set(map(type, values)) <= {int, float, bool, type(None)} and config.reward_key is None:
        return values
    numbers, problems = [], {}
    for row, value in enumerate(values):
        try:
            numbers.append(_number(value, config))
        except (TypeError, ValueError) as problem:
            numbers.append(None)
            if not padding[row]:  # padding enters nothing
                problems[row] = str(problem)
    if problems:
        raise _bad_rewards(values, problems, config)
    return numbers


def as_float64(numbers: list[Any], config: NormalizationConfig, padding: list[bool]) -> np.ndarray[Any, Any]:
    """Numbers as a float64 column, NaN where there is none."""
    try:
        if set(map(type, numbers)) != {float}:
            numbers = [math.nan if value is None else value for value in numbers]
        return np.array(numbers, dtype=np.float64)
    except OverflowError:
        rows = [row for row, value in enumerate(numbers) if value is not None and abs(value) > 2**1000]
        if all(padding[row] for row in rows):  # padding enters nothing
            return as_float64([None if row in set(rows) else n for row, n in enumerate(numbers)], config, padding)
        rows = [row for row in rows if not padding[row]]
        raise _bad_rewards(numbers, dict.fromkeys(rows, "an integer beyond float64"), config) from None


def _number(value: Any, config: NormalizationConfig) -> Any:
    """A reward as a Python number, None where there is none; TypeError or ValueError says what is wrong with it."""
    if config.reward_key is not None and value is not None:
        if not isinstance(value, Mapping):
            raise TypeError(f"{_kind(value)}, not a dict with the key {config.reward_key!r}")
        if config.reward_key not in value:
            raise ValueError(f"a dict with the keys {sorted(map(str, value))}")
        value = value[config.reward_key]
    return _plain_number(value, config)


def _plain_number(value: Any, config: NormalizationConfig) -> Any:
    if isinstance(value, Mapping):
        raise TypeError(f"a dict with the keys {sorted(map(str, value))}")
    if isinstance(value, Tensor) and not is_readable(value):
        raise TypeError("a tensor that is nested, sparse or on meta")
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) != 1:
        raise TypeError(f"{_kind(value)} of shape {tuple(value.shape)}")
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item()
    if isinstance(value, str) and config.coerce_numeric_strings:
        try:
            if "_" not in value:
                return float(value)
            raise ValueError
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
