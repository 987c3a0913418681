"""Find the rows, rollouts and groups that ``explain`` is asked about."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from miles_norm.audit.summary import label
from miles_norm.errors import ConfigError, format_rows

if TYPE_CHECKING:
    from miles_norm.result import NormalizedRewards

__all__ = ["check_row", "find_groups", "find_rollouts"]

_SHOWN = 10


def check_row(result: NormalizedRewards, row: int) -> int:
    """The row, if there is such a one.

    Raises:
        ConfigError: there is not.
    """
    last = result.index.num_rows - 1
    if 0 <= row <= last:
        return row
    raise ConfigError(
        f"--row {row}",
        got=f"a dump of {last + 1} rows",
        expected=f"a row number from 0 to {last}",
        reason="rows are numbered as the dump holds them",
        remedy="name an existing row, or ask with --rollout or --group",
    )


def find_rollouts(result: NormalizedRewards, text: str) -> tuple[list[int], list[str]]:
    """Numbers of the rollouts that ``text`` names, and remarks where it names several.

    Raises:
        ConfigError: it names none.
    """
    index, adapter = result.index, result.columns.adapter
    ids: list[Hashable] = index.rollout_ids
    if adapter is not None:
        ids = [(adapter.label(row), name) for row, name in zip(index.first_row.tolist(), ids, strict=True)]
    found = _matches(ids, text)
    if not found:
        named = [name for name, bare in zip(ids, index.rollout_ids, strict=True) if bare is not None]
        raise _unknown("--rollout", text, "rollout id", named)
    remarks = _both_types([index.rollout_ids[n] for n in found], text)
    groups = list(dict.fromkeys(index.rollout_group[found].tolist()))
    if len(groups) > 1:
        names = ", ".join(label(index.group_ids[group]) for group in groups)
        remarks.append(f"rollout id {text} occurs in {len(groups)} prompt groups ({names}), as {len(found)} rollouts")
    return found, remarks


def find_groups(result: NormalizedRewards, text: str) -> tuple[list[int], list[str]]:
    """Numbers of the prompt groups that ``text`` names, and remarks where it names several.

    Raises:
        ConfigError: it names none.
    """
    ids = result.index.group_ids
    found = _matches(ids, text)
    if not found:
        raise _unknown("--group", text, "group id", ids)
    remarks = _both_types([ids[n] for n in found], text)
    names = list(dict.fromkeys(label(ids[n]) for n in found))
    if len(names) > 1:
        remarks.append(f"group id {text} is used by several adapters: {', '.join(names)}")
    return found, remarks


def _matches(ids: Sequence[Hashable], text: str) -> list[int]:
    """Positions of ids that read as ``text``; with adapters ``name/ID``, or ``ID`` for those of all adapters."""
    found = [n for n, name in enumerate(ids) if name is not None and label(name) == text]
    return found or [n for n, name in enumerate(ids) if isinstance(name, tuple) and label(name[-1]) == text]


def _both_types(ids: list[Hashable], text: str) -> list[str]:
    kinds = sorted({type(name[-1] if isinstance(name, tuple) else name).__name__ for name in ids})
    return [f"{text} is an id of type {' and one of type '.join(kinds)}"] if len(kinds) > 1 else []


def _unknown(option: str, text: str, noun: str, ids: list[Hashable]) -> ConfigError:
    names = list(dict.fromkeys(label(name) for name in ids))
    return ConfigError(
        f"{option} {text}",
        got=f"no such {noun}",
        expected=format_rows(names, noun, _SHOWN) if names else f"a {noun}, but no row has one",
        reason="ids are compared as they are written in the dump",
        remedy="name an existing id, or a row with --row" if names else "name a row with --row",
    )
