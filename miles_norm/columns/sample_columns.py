"""Rows of any kind, flat or nested, to ``RolloutColumns``, in one pass and without touching token lists."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor

from miles_norm.columns.ids import RolloutList, plain_id
from miles_norm.columns.masks import count_mask, count_masks, counted
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.columns.row_values import adapter_name, read_flags, read_statuses, response_length, row_length
from miles_norm.columns.sample_rewards import as_float64, read_rewards, reward_components, weighted_sum
from miles_norm.config import NormalizationConfig
from miles_norm.errors import RewardError, SampleError, format_rows

__all__ = [
    "columns_from_fields",
    "columns_from_rows",
    "columns_from_samples",
    "flatten_samples",
    "index_fields",
    "plain_rows",
    "row_field",
    "row_fields",
]


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
    flat, sizes, rollout_lists = flatten_samples(samples)
    rows = plain_rows(flat)
    _check_rewards_exist(rows)
    return _columns(row_fields(rows), config, sizes, rollout_lists)


def columns_from_rows(rows: Iterable[Mapping[str, Any]], config: NormalizationConfig | None = None) -> RolloutColumns:
    """``columns_from_samples`` for dicts that come one by one and are not kept: memory holds the index fields only.

    >>> columns_from_rows({"index": i, "reward": 1.0, "loss_mask": [1, 0]} for i in range(3)).trainable_tokens.tolist()
    [1, 1, 1]
    """
    config = config or NormalizationConfig()
    key = config.group_key
    fields: dict[str, list[Any]] = {name: [] for name in (*_INDEX_FIELDS, key)}
    first, scored = None, False
    for row in rows:
        first, scored = first or row, scored or "reward" in row
        for name, values in fields.items():
            values.append(row.get(name))
        fields["loss_mask"][-1] = counted(row.get("loss_mask"))
        if key != "group_index":
            fields[key][-1] = _group_id(row.get(key), row.get("metadata"), key)
    if first is not None and not scored:
        raise _no_reward(first)
    return _columns(lambda name: fields.get(name) or [None] * len(fields["reward"]), config, None, None)


def columns_from_fields(
    field: Callable[[str], list[Any] | None], rows: int, config: NormalizationConfig | None = None
) -> RolloutColumns:
    """``columns_from_samples`` for rows whose fields are columns already, as in a table.

    Args:
        field: The values of a field in all rows, None if no row has it. ``index_fields`` names those that are asked
            for.
        rows: Number of rows.
        config: As there.

    Raises:
        SampleError, RewardError: as there.

    >>> table = {"group_index": [0, 0], "index": [0, 1], "reward": [1.0, 0.0], "response_length": [3, 2]}
    >>> columns_from_fields(table.get, 2).trainable_tokens.tolist()
    [3, 2]
    """
    config = config or NormalizationConfig()

    @cache
    def read(name: str) -> list[Any]:
        values = field(name)
        return [None] * rows if values is None else values

    if rows and field("reward") is None:
        raise _no_reward([name for name in index_fields(config) if field(name) is not None])
    return _columns(read, config, None, None)


def index_fields(config: NormalizationConfig) -> tuple[str, ...]:
    """The fields of a row that are looked at.

    >>> index_fields(NormalizationConfig(group_key="prompt"))[-2:]
    ('prompt', 'metadata')
    """
    key = config.group_key
    return (*_INDEX_FIELDS, key) if key == "group_index" else (*_INDEX_FIELDS, key, "metadata")


_INDEX_FIELDS = (
    "rollout_id", "index", "reward", "loss_mask", "response_length", "remove_sample", "is_padding", "status", "adapter",
)  # fmt: skip


def _columns(
    field: Callable[[str], list[Any]],
    config: NormalizationConfig,
    sizes: tuple[int, ...] | None,
    rollout_lists: list[int | None] | None,
) -> RolloutColumns:
    """Columns from the fields of all rows."""
    rollouts, collisions = _rollout_ids(field("rollout_id"), field("index"), rollout_lists)
    removed, padding = (read_flags(name, field(name)) for name in ("remove_sample", "is_padding"))
    status, adapters = read_statuses(field("status")), field("adapter")
    if set(map(type, adapters)) != {NoneType}:
        adapters = [adapter_name(value) for value in adapters]
    groups = _group_ids(field, config.group_key)
    given = field("reward")
    components = reward_components(given, config, padding) if config.options.gdpo_components else None
    reward = read_rewards(given, config, padding) if components is None else weighted_sum(components, config)
    columns = RolloutColumns(
        group=None if set(map(type, groups)) == {NoneType} else groups,
        rollout=rollouts,
        reward=as_float64(reward, config, padding),
        trainable_tokens=_trainable_tokens(field("loss_mask"), field("response_length"), padding),
        scored=None if None not in reward else [value is not None for value in reward],
        removed=removed if any(removed) else None,
        truncated=[value == "truncated" for value in status] if "truncated" in status else None,
        padding=padding if any(padding) else None,
        adapter=None if set(map(type, adapters)) == {NoneType} else adapters,
        components=components,
    )
    columns.nested_sizes, columns.status, columns.id_collisions = sizes, status, collisions
    columns.without_id = () if sizes is not None else _without_id(rollouts, padding)
    columns.odd_masks = _masks_of_another_length(field("loss_mask"), field("response_length"))
    return columns


def _without_id(rollouts: list[Hashable], padding: list[bool]) -> tuple[int, ...]:
    """Rows with neither ``rollout_id`` nor ``index``."""
    if NoneType not in set(map(type, rollouts)):
        return ()
    return tuple(row for row, value in enumerate(rollouts) if value is None and not padding[row])


def _masks_of_another_length(masks: list[Any], lengths: list[Any]) -> tuple[int, ...]:
    if set(map(type, lengths)) == {int} and list(map(row_length, masks)) == lengths:
        return ()
    pairs = enumerate(zip(masks, lengths, strict=True))
    return tuple(
        row for row, (mask, length) in pairs if mask is not None and type(length) is int and row_length(mask) != length
    )


def flatten_samples(samples: Iterable[Any]) -> tuple[list[Any], tuple[int, ...] | None, list[int | None] | None]:
    """Rows in flattened order, the rows of each inner list, and for each row the number of the rollout list it was in.

    The second part is None for flat input, the third where no rollout has a list of its own.

    >>> flatten_samples([["a", ["b", "c"]], ["d"]])
    (['a', 'b', 'c', 'd'], (3, 1), [None, 0, 0, None])
    """
    if isinstance(samples, str | bytes | Mapping | Tensor) or not isinstance(samples, Iterable) or _is_scalar(samples):
        raise _not_rows("samples", type(samples).__name__, ())
    outer = list(samples)
    if not any(issubclass(kind, list | tuple) for kind in set(map(type, outer))):
        return outer, None, None
    inner = [isinstance(item, list | tuple) for item in outer]
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


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0


def plain_rows(rows: list[Any]) -> list[Any]:
    """Rows as dicts or objects with fields; mappings of other kinds become dicts.

    Raises:
        SampleError: something that is no row; all of them are named.

    >>> from types import MappingProxyType
    >>> plain_rows([MappingProxyType({"reward": 1.0})])
    [{'reward': 1.0}]
    """
    if any(issubclass(kind, Mapping) and not issubclass(kind, dict) for kind in set(map(type, rows))):
        rows = [dict(row) if isinstance(row, Mapping) and not isinstance(row, dict) else row for row in rows]
    readable = {kind: kind is dict or issubclass(kind, dict) for kind in set(map(type, rows))}
    bad = [i for i, row in enumerate(rows) if not (readable[type(row)] or hasattr(row, "reward"))]
    if bad:
        raise _not_rows(f"samples: {format_rows(bad)}", ", ".join(sorted({type(rows[i]).__name__ for i in bad})), bad)
    return rows


def _check_rewards_exist(rows: list[Any]) -> None:
    if rows and all(isinstance(row, dict) and "reward" not in row for row in rows):
        raise _no_reward(rows[0])


def _no_reward(fields: Iterable[Any]) -> RewardError:
    return RewardError(
        "samples",
        got=f"no field 'reward' on any row; the first row has {', '.join(map(str, list(fields)[:20])) or 'no fields'}",
        expected="a field 'reward' on every row, None where there is none",
        reason="advantages are computed from it",
        remedy="name the field 'reward'; for an entry of a dict that stands there set reward_key",
    )


def _not_rows(subject: str, got: str, rows: Sequence[int]) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="dicts or objects with a field 'reward' and those in docs/semantics.md, in a list of rows, "
        "of prompt groups of rows, or of prompt groups of rollouts of rows",
        reason="rewards, ids and masks are read by field name",
        remedy="pass the samples that the rollout function returned (of a dump: its 'samples'), or rename your fields",
        rows=rows,
    )


def row_field(rows: list[Any], name: str) -> list[Any]:
    """One field of all rows, None where a row lacks it."""
    return row_fields(rows)(name)


def row_fields(rows: list[Any]) -> Callable[[str], list[Any]]:
    """``row_field`` for several fields of the same rows, each of them read once; the lists are not to be changed."""
    kinds = set(map(type, rows))
    dicts = [issubclass(kind, dict) for kind in kinds]

    @cache
    def field(name: str) -> list[Any]:
        if all(dicts):
            return [row.get(name) for row in rows]
        if not any(dicts) and name.isidentifier():  # attrgetter would follow dots
            try:
                return list(map(attrgetter(name), rows))
            except AttributeError:
                pass
        return [row.get(name) if isinstance(row, dict) else getattr(row, name, None) for row in rows]

    return field


def _group_ids(field: Callable[[str], list[Any]], key: str) -> list[Any]:
    ids = field(key)
    if key != "group_index":
        ids = [_group_id(value, metadata, key) for value, metadata in zip(ids, field("metadata"), strict=True)]
    return ids


def _group_id(value: Any, metadata: Any, key: str) -> Any:
    return metadata.get(key) if value is None and isinstance(metadata, Mapping) else value


def _rollout_ids(
    explicit: list[Any], index: list[Any], lists: list[int | None] | None
) -> tuple[list[Hashable], tuple[tuple[int, int], ...]]:
    """Rollout id of each row, and pairs of rows that share one although their own ``index`` differs."""
    explicit, index = _plain(explicit), _plain(index)
    if lists is None and set(map(type, explicit)) == {NoneType}:
        return index, ()
    ids = [i if e is None else e for e, i in zip(explicit, index, strict=True)]
    if lists is not None:
        return [i if n is None else RolloutList(n) for i, n in zip(ids, lists, strict=True)], ()
    borrowed = {i: row for row, (e, i) in enumerate(zip(explicit, index, strict=True)) if e is None and _is_id(i)}
    if not borrowed or len(borrowed) == len(ids):
        return ids, ()
    pairs = [
        (row, borrowed[e])
        for row, (e, i) in enumerate(zip(explicit, index, strict=True))
        if _is_id(e) and _is_id(i) and e != i and e in borrowed
    ]
    return ids, tuple(pairs)


def _plain(values: list[Any]) -> list[Any]:
    return values if set(map(type, values)) <= {int, str, NoneType} else [plain_id(value) for value in values]


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str)


def _trainable_tokens(masks: list[Any], lengths: list[Any], padding: list[bool]) -> list[int]:
    counts: list[int] | None = count_masks(masks)
    if counts is not None:
        return counts
    counts = []
    problems: dict[int, str] = {}
    for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        try:
            counts.append(response_length(length) if mask is None else count_mask(mask))
        except (TypeError, ValueError, RuntimeError) as problem:  # the last of tensors that have no values
            if padding[row]:
                counts.append(0)  # it enters nothing
                continue
            problems[row] = f"loss_mask {problem}" if mask is not None else str(problem)
    if problems:
        bad = list(problems)
        raise SampleError(
            f"trainable tokens of {format_rows(bad)}",
            got="; ".join(f"row {row}: {problems[row]}" for row in bad[:10]) + ("; ..." if len(bad) > 10 else ""),
            expected="a loss_mask of 0 and 1, or without one a response_length that is a count",
            reason="the sibling with the most trainable tokens speaks for its rollout",
            remedy="set loss_mask, or without one response_length, on every row; a mask holds 1 on the tokens to train",
            rows=bad,
        )
    return counts
