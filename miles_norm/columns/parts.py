"""Index columns that come in parts: small enough to be sent, and joined as if they had been read together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.ids import IdColumn, RolloutList
from miles_norm.errors import SampleError

__all__ = ["joined_columns", "packed_columns", "selected_columns", "unpacked_columns"]

Array = np.ndarray[Any, Any]
State = Mapping[str, Any]

_ABSENT_FLAGS = {"scored": True, "removed": False, "truncated": False, "padding": False}
_IDS = ("group", "rollout", "adapter")
_ROOM = 2**63
_INTEGERS = (np.int8, np.int16, np.int32)


def packed_columns(state: State) -> dict[str, Any]:
    """The attributes of ``RolloutColumns`` in few bytes: numpy arrays of the narrowest dtype, a bit per flag."""
    return {name: _packed(value) for name, value in state.items()}


def unpacked_columns(state: State) -> dict[str, Any]:
    """What ``packed_columns`` was given, on the CPU."""
    return {name: _unpacked(value) for name, value in state.items()}


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        array = value.detach().cpu().numpy()
        if array.dtype == bool:
            return ("flags", len(array), np.packbits(array))
        return ("numbers", _narrow(array))
    if isinstance(value, IdColumn):
        return (
            "ids",
            *(None if part is None else _packed(part) for part in (value.codes, value.missing)),
            value.labels,
        )
    if isinstance(value, dict):
        return {name: _packed(column) for name, column in value.items()}
    if isinstance(value, list):
        names = tuple(dict.fromkeys(value))
        numbers = {name: number for number, name in enumerate(names)}
        return ("names", _narrow(np.array([numbers[name] for name in value], np.int64)), names)
    return value


def _unpacked(value: Any) -> Any:
    match value:
        case ("flags", rows, bits):
            return torch.from_numpy(np.unpackbits(bits, count=rows).view(bool))
        case ("numbers", array):
            return torch.from_numpy(array.astype(array.dtype if array.dtype.kind == "f" else np.int64))
        case ("ids", codes, missing, labels):
            return IdColumn(_unpacked(codes), labels, _unpacked(missing))
        case ("names", numbers, names):
            return [names[number] for number in numbers.tolist()]
        case dict():
            return {name: _unpacked(column) for name, column in value.items()}
    return value


def _narrow(array: Array) -> Array:
    if array.dtype.kind == "i" and array.size:
        low, high = int(array.min()), int(array.max())
        for dtype in _INTEGERS:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return array.astype(dtype)
    return array


def selected_columns(state: State, rows: Tensor) -> dict[str, Any]:
    """The attributes of ``RolloutColumns`` for some rows."""
    chosen: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            value = value[rows]
        elif isinstance(value, IdColumn):
            missing = None if value.missing is None else value.missing[rows]
            value = IdColumn(value.codes[rows], value.labels, missing)
        elif isinstance(value, dict):
            value = {key: column[rows] for key, column in value.items()}
        chosen[name] = value
    numbers = rows.tolist()
    place = {row: position for position, row in enumerate(numbers)}
    chosen["nested_sizes"] = None
    chosen["status"] = None if state["status"] is None else [state["status"][row] for row in numbers]
    for name in ("without_id", "odd_masks"):
        chosen[name] = tuple(place[row] for row in state[name] if row in place)
    pairs = state["id_collisions"]
    chosen["id_collisions"] = tuple((place[a], place[b]) for a, b in pairs if a in place and b in place)
    return chosen


def joined_columns(states: Sequence[State]) -> dict[str, Any]:
    """The attributes of the parts of ``RolloutColumns.concat`` joined, in their order."""
    if not states:
        raise _unlike("no parts", "at least one part")
    sizes = [len(state["reward"]) for state in states]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    device = states[0]["reward"].device
    joined: dict[str, Any] = {name: torch.cat(_of(states, name)) for name in ("reward", "trainable_tokens")}
    for name, absent in _ABSENT_FLAGS.items():
        joined[name] = None
        if any(flags is not None for flags in _of(states, name)):
            joined[name] = torch.cat([
                torch.full((size,), absent, device=device) if flags is None else flags
                for flags, size in zip(_of(states, name), sizes, strict=True)
            ])  # fmt: skip
    for name in _IDS:
        joined[name] = _joined_ids(_of(states, name), sizes, device)
    joined["status"] = None
    if any(status is not None for status in _of(states, "status")):
        statuses = zip(_of(states, "status"), sizes, strict=True)
        joined["status"] = [one for status, size in statuses for one in status or [None] * size]
    joined["components"] = _joined_components(_of(states, "components"))
    joined["nested_sizes"] = _joined_sizes(_of(states, "nested_sizes"))
    for name in ("without_id", "odd_masks"):
        rows = zip(_of(states, name), starts, strict=True)
        joined[name] = tuple(row + start for found, start in rows for row in found)
    pairs = zip(_of(states, "id_collisions"), starts, strict=True)
    joined["id_collisions"] = tuple((row + start, other + start) for found, start in pairs for row, other in found)
    return joined


def _of(states: Sequence[State], name: str) -> list[Any]:
    return [state[name] for state in states]


def _joined_ids(parts: Sequence[IdColumn | None], sizes: Sequence[int], device: torch.device) -> IdColumn | None:
    """Ids of all parts; rows of a part without the column have none."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    missing = torch.cat([
        torch.full((size,), part is None, device=device) if part is None or part.missing is None else part.missing
        for part, size in zip(parts, sizes, strict=True)
    ])  # fmt: skip
    labels: tuple[Hashable, ...] | None = None
    room = _ROOM - len(missing)
    if all(part.labels is None and int(part.codes.max()) < room for part in given):
        codes = torch.cat([
            torch.zeros(size, dtype=torch.int64, device=device) if part is None else part.codes
            for part, size in zip(parts, sizes, strict=True)
        ])  # fmt: skip
    else:
        codes, labels = _renumbered(parts, sizes)
        codes = codes.to(device)
    if not bool(missing.any()):
        return IdColumn(codes, labels)
    # As in a column that was read at once, rows without an id have codes unlike all others.
    known = codes[~missing]
    fresh = (int(known.max()) + 1 if len(known) else 0) if labels is None else len(labels)
    return IdColumn(torch.where(missing, fresh + torch.arange(len(codes), device=device), codes), labels, missing)


def _renumbered(parts: Sequence[IdColumn | None], sizes: Sequence[int]) -> tuple[Tensor, tuple[Hashable, ...]]:
    """One number for each id that appears in any part, and the ids by number; 0 for rows that have none."""
    numbers: dict[Hashable, int] = {}
    codes, lists = [], 0
    for part, size in zip(parts, sizes, strict=True):
        found = np.zeros(size, np.int64)
        if part is not None:
            known = np.ones(size, bool) if part.missing is None else ~part.missing.cpu().numpy()
            plain, places = np.unique(part.codes.cpu().numpy()[known], return_inverse=True)
            labels = plain.tolist() if part.labels is None else [part.labels[code] for code in plain.tolist()]
            own = [label.number for label in labels if isinstance(label, RolloutList)]
            if own:
                # Lists are numbered within a part, and no list is in two.
                labels = [RolloutList(lists + x.number) if isinstance(x, RolloutList) else x for x in labels]
                lists += max(own) + 1
            mapped = [numbers.setdefault(label, len(numbers)) for label in labels]
            found[known] = np.asarray(mapped, np.int64)[places]
        codes.append(torch.from_numpy(found))
    return torch.cat(codes), tuple(numbers)


def _joined_components(parts: Sequence[dict[str, Tensor] | None]) -> dict[str, Tensor] | None:
    names = [sorted(part or ()) for part in parts]
    if any(each != names[0] for each in names):
        found = " and ".join(sorted({", ".join(each) or "none" for each in names}))
        raise _unlike(f"reward components {found}", "the same reward components in all parts")
    first = parts[0]
    return None if first is None else {name: torch.cat([part[name] for part in parts if part]) for name in first}


def _joined_sizes(parts: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    nested = [part for part in parts if part is not None]
    if nested and len(nested) < len(parts):
        raise _unlike(f"{len(nested)} nested parts of {len(parts)}", "all parts nested, or none")
    return tuple(size for part in nested for size in part) if nested else None


def _unlike(got: str, expected: str) -> SampleError:
    return SampleError(
        "parts of a batch",
        got=got,
        expected=expected,
        reason="the parts are normalized together",
        remedy="read all parts in the same way",
    )
