"""Agent Lightning's rollouts to rows, at its two trace levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import ConfigError, MilesNormError, SampleError, format_rows, shown
from miles_norm.samples import Sample
from miles_norm.session.path_rows import response_arrays
from miles_norm.session.token_ids import TokenIds, as_log_probs, as_token_ids

__all__ = ["Call", "CompletedRollout", "TraceLevel", "TraceRows", "read_completed_rollouts", "trace_rows"]

TraceLevel = Literal["transition", "trajectory"]


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """One model request of a rollout."""

    prompt_token_ids: TokenIds
    response_token_ids: TokenIds
    log_probs: NDArray[np.float32] | None
    """Of the response tokens; None where the engine gave none."""
    finish_reason: str | None


@dataclass(frozen=True, eq=False, slots=True)
class CompletedRollout:
    """What Agent Lightning recorded of one execution of an agent."""

    rollout_id: str
    data_id: str
    """Of the prompt; the rollouts of one prompt are a prompt group."""
    final_reward: float | None
    """None: unscored."""
    calls: tuple[Call, ...]


@dataclass(frozen=True, eq=False, slots=True)
class TraceRows:
    """Rows of a batch of rollouts, and how its traces merged."""

    samples: list[Sample]
    """In the order of the rollouts, the rows of one in the order of its calls."""
    mismatches: int
    """Calls whose prompt does not continue the tokens before; each began a row. 0 at the level ``transition``."""
    unmerged_rollouts: int
    """Rollouts with such a call."""
    skipped_empty_rows: int
    """Rows without a response token, which are left out."""
    without_trace: tuple[str, ...]
    """Ids of rollouts without a call, which have no row."""
    without_rows: tuple[str, ...]
    """Ids of rollouts that have no row for lack of a call or of a response token: no statistic sees their rewards."""


def read_completed_rollouts(rollouts: Iterable[Any]) -> list[CompletedRollout]:
    """Read CompletedRollout objects, or the dicts of their JSON. They are not changed, and nothing of them is kept.

    ``final_reward`` stays None where there is none, and else becomes a float; the rewards of single calls, which Agent
    Lightning does not train on, are not read.

    Args:
        rollouts: Objects or dicts with rollout_id, data_id, final_reward and triplets, each of which has prompt
            (token_ids) and response (token_ids, log_probs).

    Raises:
        SampleError: rollouts that lack a field or whose values do not fit, or several with the ids of one rollout; all
            of them are named.
    """
    read: list[CompletedRollout] = []
    problems: dict[int, str] = {}
    try:
        # One rollout by itself would be read as a list of its fields.
        given = None if isinstance(rollouts, str | bytes | Mapping) else list(rollouts)
    except TypeError:
        given = None
    if given is None:
        raise _unreadable("CompletedRollouts", f"{shown(rollouts)}, which is no list of them", [])
    for number, rollout in enumerate(given):
        try:
            read.append(_rollout(rollout))
        except Exception as error:  # noqa: BLE001  # Reading an object runs its code; what it raises names the rollout.
            got = f"{error.subject}: {error.got}" if isinstance(error, MilesNormError) else f"{error!r:.200}"
            problems[number] = f"rollout {number}: {got}"
    if problems:
        got = "; ".join(list(problems.values())[:10]) + ("; ..." if len(problems) > 10 else "")
        raise _unreadable(f"CompletedRollout: {format_rows(list(problems), 'item')}", got, list(problems))
    _check_ids(read)
    return read


def trace_rows(rollouts: Iterable[Any], level: TraceLevel = "trajectory") -> TraceRows:
    """Rows of a batch of rollouts.

    ``transition``: one row per call. ``trajectory``: a call whose prompt begins with all tokens of the row so far is
    merged into it, what the prompt adds is masked; where it does not, the row ends and another one begins.

    Every row has the ids of its rollout and prompt group and the whole final reward, as float64. ``metadata`` says the
    number of its first call (``turn_index``), of its calls (``turns``).

    Args:
        rollouts: As ``read_completed_rollouts`` takes them.
        level: Of Agent Lightning's ``trace_aggregator``.

    Raises:
        SampleError: rollouts that cannot be read, or several with the ids of one rollout.
        ConfigError: an unknown level.

    >>> calls = [([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([9], [7])]
    >>> triplets = [{"prompt": {"token_ids": p}, "response": {"token_ids": r, "log_probs": None}} for p, r in calls]
    >>> rollout = {"rollout_id": "ro-1", "data_id": "d0", "final_reward": 1.0, "triplets": triplets}
    >>> rows = trace_rows([rollout])
    >>> [(row.tokens.tolist(), row.loss_mask.tolist()) for row in rows.samples], rows.mismatches
    ([([1, 2, 3, 4, 5, 6], [1, 0, 1, 1]), ([9, 7], [1])], 1)
    """
    if not isinstance(level, str) or level not in get_args(TraceLevel):
        raise ConfigError(
            "trace level",
            got=shown(level),
            expected=" or ".join(map(repr, get_args(TraceLevel))),
            reason="it decides which calls share a row",
            remedy="choose one of these",
        )
    samples, mismatches, unmerged, skipped = [], 0, 0, 0
    read = read_completed_rollouts(rollouts)
    for index, rollout in enumerate(read):
        parts = _merged(rollout.calls) if level == "trajectory" else [[call] for call in rollout.calls]
        if level == "trajectory" and len(parts) > 1:
            mismatches += len(parts) - 1
            unmerged += 1
        first = 0
        for part in parts:
            row = _row(rollout, index, first, part)
            first += len(part)
            if row.loss_mask is not None and np.any(row.loss_mask):
                samples.append(row)
            else:
                skipped += 1
    without_trace = tuple(rollout.rollout_id for rollout in read if not rollout.calls)
    seen = {(row.group_index, row.rollout_id) for row in samples}
    without_rows = tuple(each.rollout_id for each in read if (each.data_id, each.rollout_id) not in seen)
    return TraceRows(samples, mismatches, unmerged, skipped, without_trace, without_rows)


def _merged(calls: Sequence[Call]) -> list[list[Call]]:
    """Calls in parts; the prompt of each but the first of a part begins with all tokens of the one before."""
    parts: list[list[Call]] = []
    for call in calls:
        if parts and _continues(call.prompt_token_ids, parts[-1][-1]):
            parts[-1].append(call)
        else:
            parts.append([call])
    return parts


def _continues(prompt: TokenIds, before: Call) -> bool:
    middle = len(before.prompt_token_ids)
    end = middle + len(before.response_token_ids)
    return np.array_equal(prompt[:middle], before.prompt_token_ids) and np.array_equal(
        prompt[middle:end], before.response_token_ids
    )


def _row(rollout: CompletedRollout, index: int, first: int, part: Sequence[Call]) -> Sample:
    """The row of calls that continue each other."""
    ends = [len(call.prompt_token_ids) + len(call.response_token_ids) for call in part]
    gaps = [0, *(len(call.prompt_token_ids) - end for call, end in zip(part[1:], ends, strict=False))]
    # Without log-probs there is still a mask.
    given = [
        np.zeros(len(call.response_token_ids), np.float32) if call.log_probs is None else call.log_probs
        for call in part
    ]
    mask, log_probs = response_arrays(gaps, given)
    last = part[-1]
    return Sample(
        group_index=rollout.data_id,
        index=index,
        rollout_id=rollout.rollout_id,
        tokens=np.concatenate([last.prompt_token_ids, last.response_token_ids]),
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=None if any(call.log_probs is None for call in part) else log_probs,
        reward=rollout.final_reward,
        status="truncated" if last.finish_reason == "length" else "completed",
        metadata={"turn_index": first, "turns": len(part)},
    )


def _rollout(given: Any) -> CompletedRollout:
    return CompletedRollout(
        rollout_id=_id(given, "rollout_id"),
        data_id=_id(given, "data_id"),
        final_reward=_reward(_field(given, "final_reward")),
        calls=tuple(_call(triplet) for triplet in _list(_field(given, "triplets"))),
    )


def _reward(value: Any) -> float | None:
    """A number, or an array or tensor of one entry, as float."""
    if getattr(value, "size", None) == 1 or callable(getattr(value, "numel", None)):
        value = value.item()
    if isinstance(value, Real | None):
        return None if value is None else float(value)
    raise TypeError(f"final_reward {shown(value)}")


def _id(given: Any, name: str) -> Any:
    value = _field(given, name)
    if isinstance(value, bool) or not isinstance(value, str | Integral):
        raise TypeError(f"{name} {shown(value)}")
    return value


def _list(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"triplets {shown(value)}")
    return value


def _call(triplet: Any) -> Call:
    response = _field(triplet, "response")
    ids = as_token_ids(_field(response, "token_ids"), "response.token_ids").copy()
    given = _field(response, "log_probs", None)
    server = _field(_field(triplet, "metadata", None) or {}, "server", None) or {}
    return Call(
        prompt_token_ids=as_token_ids(_field(_field(triplet, "prompt"), "token_ids"), "prompt.token_ids").copy(),
        response_token_ids=ids,
        log_probs=None if given is None else as_log_probs(given, len(ids), "response.log_probs"),
        finish_reason=_field(server, "finish_reason", None),
    )


def _field(value: Any, name: str, *default: Any) -> Any:
    """Of an object or of a dict; an error where it is missing and there is no default."""
    if isinstance(value, Mapping):
        return value.get(name, *default) if default else value[name]
    return getattr(value, name, *default)


def _check_ids(rollouts: Sequence[CompletedRollout]) -> None:
    """Every rollout has a pair of ids of its own."""
    found: dict[tuple[Any, Any], list[int]] = {}
    for number, rollout in enumerate(rollouts):
        found.setdefault((rollout.data_id, rollout.rollout_id), []).append(number)
    shared = {ids: numbers for ids, numbers in found.items() if len(numbers) > 1}
    if shared:
        rows = sorted(number for numbers in shared.values() for number in numbers)
        named = [
            f"data_id {data_id!r} and rollout_id {rollout_id!r} on {format_rows(numbers, 'item')}"
            for (data_id, rollout_id), numbers in shared.items()
        ]
        raise SampleError(
            f"CompletedRollout: {format_rows(rows, 'item')}",
            got="; ".join(named[:10]) + ("; ..." if len(named) > 10 else ""),
            expected="one item for each pair of data_id and rollout_id",
            reason="rows with equal ids are siblings, so that several executions would count as one rollout",
            remedy="pass each rollout once; give attempts at one prompt a rollout_id each",
            rows=rows,
        )


def _unreadable(subject: str, got: str, rows: Sequence[int]) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="rollout_id and data_id (strings or whole numbers), final_reward (a number or None) and triplets with "
        "prompt.token_ids, response.token_ids and as many response.log_probs",
        reason="rows and their rollouts are read from these fields",
        remedy="pass the rollouts as Agent Lightning's rollout manager returns them",
        rows=rows,
    )
