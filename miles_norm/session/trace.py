"""Agent Lightning's rollouts to rows, at its two trace levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from miles_norm.errors import ConfigError, MilesNormError, SampleError, format_rows, shown
from miles_norm.samples import Sample
from miles_norm.session.assembly import response_arrays
from miles_norm.session.token_ids import TokenIds, as_token_ids

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


def read_completed_rollouts(rollouts: Iterable[Any]) -> list[CompletedRollout]:
    """Read CompletedRollout objects, or the dicts of their JSON. They are not changed, and nothing of them is kept.

    ``final_reward`` stays None where there is none, and else becomes a float; the rewards of single calls, which Agent
    Lightning does not train on, are not read.

    Args:
        rollouts: Objects or dicts with rollout_id, data_id, final_reward and triplets, each of which has prompt
            (token_ids) and response (token_ids, log_probs).

    Raises:
        SampleError: rollouts that lack a field or whose values do not fit; all of them are named.
    """
    read, bad, problem = [], [], ""
    if isinstance(rollouts, str | bytes | Mapping | Tensor | np.ndarray) or not isinstance(rollouts, Iterable):
        raise _no_rollouts("CompletedRollout", f"a value of type {type(rollouts).__name__}", [])
    for number, rollout in enumerate(rollouts):
        try:
            read.append(_rollout(rollout))
        except (
            MilesNormError,
            LookupError,
            AttributeError,
            ArithmeticError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:
            bad.append(number)
            got = f"{error.subject}: {error.got}" if isinstance(error, MilesNormError) else f"{error!r:.200}"
            problem = problem or f"{format_rows([number], 'rollout')}: {got}"
    if bad:
        raise _no_rollouts(f"CompletedRollout: {format_rows(bad, 'item')}", problem, bad)
    return read


def _no_rollouts(subject: str, got: str, rows: Sequence[int]) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="a list of objects or dicts with rollout_id, data_id, final_reward (a number or None) and triplets "
        "with prompt.token_ids, response.token_ids and as many response.log_probs, all finite",
        reason="rows and their rollouts are read from these fields",
        remedy="pass the rollouts as Agent Lightning's rollout manager returns them",
        rows=rows,
    )


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
        SampleError: rollouts that cannot be read.
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
    return TraceRows(samples, mismatches, unmerged, skipped, without_trace)


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
    reward = _field(given, "final_reward")
    if isinstance(reward, str):
        raise TypeError(f"final_reward {reward!r}")
    return CompletedRollout(
        rollout_id=_field(given, "rollout_id"),
        data_id=_field(given, "data_id"),
        final_reward=None if reward is None else float(reward),
        calls=tuple(_call(triplet) for triplet in _field(given, "triplets") or ()),
    )


def _call(triplet: Any) -> Call:
    response = _field(triplet, "response")
    ids = as_token_ids(response["token_ids"], "response.token_ids").copy()
    given = response.get("log_probs")
    log_probs = None if given is None else np.asarray(given)
    if log_probs is not None and log_probs.shape != ids.shape:
        raise ValueError(f"{len(ids)} response tokens and {log_probs.size} log_probs")
    # As float32 None would become NaN, and text would be parsed.
    if (
        log_probs is not None
        and log_probs.size
        and not (log_probs.dtype.kind in "iuf" and np.isfinite(log_probs).all())
    ):
        raise ValueError("log_probs that are no finite numbers")
    server = (_field(triplet, "metadata", None) or {}).get("server") or {}
    return Call(
        prompt_token_ids=as_token_ids(_field(triplet, "prompt")["token_ids"], "prompt.token_ids").copy(),
        response_token_ids=ids,
        log_probs=None if log_probs is None else log_probs.astype(np.float32),
        finish_reason=server.get("finish_reason"),
    )


def _field(value: Any, name: str, *default: Any) -> Any:
    """Of an object or of a dict; an error where it is missing and there is no default."""
    if isinstance(value, Mapping):
        return value.get(name, *default) if default else value[name]
    return getattr(value, name, *default)
