"""verl's batches as Agent Lightning's trainer passes them: columns in, one value per rollout out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.columns.ids import IdColumn
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.errors import ConfigError, SampleError, format_rows, shown
from miles_norm.integrations.padded import check_values, trainable_tokens
from miles_norm.loss.checks import is_whole
from miles_norm.result import NormalizedRewards

__all__ = ["bad_batch", "batch_columns", "checked_divisor", "refuse_missing", "rollout_counts", "rollout_values"]


def batch_columns(batch: Any) -> RolloutColumns:
    """What normalization reads of a ``DataProto``.

    Raises:
        SampleError: a field that is missing, tensors or ids that do not fit each other, a row without a rollout id.
    """
    ids = _field(batch, "non_tensor_batch", "rollout_id_list")
    uid = _given(batch, "non_tensor_batch", "uid")
    if uid is None:
        uid = _field(batch, "non_tensor_batch", "data_id_list")
    keep = trainable_tokens("response_mask", _field(batch, "batch", "response_mask"))
    rewards = _field(batch, "batch", "token_level_rewards")
    check_values("token_level_rewards", rewards, keep)
    columns = RolloutColumns(
        group=uid,
        rollout=ids,
        reward=rewards.detach().to(torch.float64).sum(dim=-1),
        trainable_tokens=keep.sum(dim=-1),
    )
    refuse_missing(columns.rollout)
    batch.non_tensor_batch["uid"] = uid
    return columns


def refuse_missing(ids: IdColumn | None) -> None:
    """Refuse rows without a rollout id, all of them named."""
    if ids is not None and ids.missing is not None:
        rows = torch.nonzero(ids.missing)[:, 0].tolist()
        raise bad_batch(f"rollout id of {format_rows(rows)}", "None", "an id on every row", rows)


def checked_divisor(num_trained_rows: Any, divisor: Any, rollouts: int) -> int:
    """What the advantages are divided by beside the tokens of their rollout.

    Raises:
        ConfigError: a number of rows that is none, another divisor, or one whose number is not given.
    """
    if num_trained_rows is not None and not is_whole(num_trained_rows, low=1):
        got, expected = f"num_trained_rows={shown(num_trained_rows)}", "at least 1, and a whole number"
    elif divisor is not None and not (isinstance(divisor, str) and divisor in ("trained_rows", "rollouts")):
        got, expected = f"divisor={shown(divisor)}", "'trained_rows' or 'rollouts'"
    elif divisor == "trained_rows" and num_trained_rows is None:
        got, expected = "divisor='trained_rows' without num_trained_rows", "the number of rows"
    else:
        return rollouts if divisor == "rollouts" or num_trained_rows is None else int(num_trained_rows)
    raise ConfigError(
        "normalize_advantages_by_rollout",
        got=got,
        expected=expected,
        reason="the advantages are divided by it",
        remedy="pass num_trained_rows=len(batch), or divisor='rollouts'",
    )


def rollout_values(computed: Any, result: NormalizedRewards) -> dict[str, Tensor]:
    """What an estimator of verl's gave each rollout's row, as one number ``[R]`` per field.

    Raises:
        SampleError: no advantages, values of another shape than the rows that it was given, values that are not finite
            or differ between tokens; the rows of the whole batch are named.
    """
    keep = trainable_tokens("response_mask of compute_advantage_fn", _field(computed, "batch", "response_mask"))
    if len(keep) != result.index.num_rollouts:
        expected = f"{result.index.num_rollouts} rows, one per rollout"
        raise bad_batch("what compute_advantage_fn returned", f"{len(keep)} rows", expected)
    first = keep.to(torch.uint8).argmax(dim=-1, keepdim=True)
    values = {}
    for name in ("advantages", "returns"):
        tokens = _given(computed, "batch", name) if name == "returns" else _field(computed, "batch", name)
        if tokens is None:
            continue
        check_values(f"{name} of compute_advantage_fn", tokens, keep)
        scalars = tokens.gather(1, first)
        odd = (keep & ~(torch.isclose(tokens, scalars) & torch.isfinite(tokens))).any(dim=-1)
        if bool(odd.any()):
            rows = result.mainstream_rows[odd.to(result.mainstream_rows.device)].tolist()
            got = "values that differ between tokens or are not finite"
            raise bad_batch(f"{name} of {format_rows(rows)}", got, "one number on all tokens of a row", rows)
        values[name] = scalars[:, 0].masked_fill(~keep.any(dim=-1), 0)
    return values


def rollout_counts(result: NormalizedRewards) -> dict[str, int]:
    """Counts of rows and rollouts, under the names of upstream's log."""
    fan_out = torch.bincount(result.index.row_rollout, minlength=result.index.num_rollouts)
    prefix = "training/rollout_level_advantage"
    return {
        f"{prefix}/n_rows": result.index.num_rows,
        f"{prefix}/n_rollouts": result.index.num_rollouts,
        f"{prefix}/n_multi_row_rollouts": int((fan_out > 1).sum()),
        f"{prefix}/max_rows_per_rollout": int(fan_out.max()),
    }


def bad_batch(subject: str, got: str, expected: str, rows: Sequence[int] = ()) -> SampleError:
    """What to raise for a batch whose rows cannot be put together."""
    return SampleError(
        subject,
        got=got,
        expected=expected,
        reason="rows are put together into rollouts, and rollouts into prompt groups, by their ids",
        remedy="pass the batch that Agent Lightning's rollout adapter made, response_mask and rewards filled in",
        rows=rows,
    )


def _given(batch: Any, where: str, name: str) -> Any:
    """A field of a batch, None where there is none."""
    fields: Any = getattr(batch, where, None)
    if not hasattr(fields, "keys"):
        got = f"a value of type {type(batch).__name__} with {where} of type {type(fields).__name__}"
        raise bad_batch("batch", got, "a DataProto: fields by name in batch and non_tensor_batch")
    return fields[name] if name in fields.keys() else None  # noqa: SIM118  # a TensorDict is no plain mapping


def _field(batch: Any, where: str, name: str) -> Any:
    value = _given(batch, where, name)
    if value is None:
        raise bad_batch(f"{name} in {where}", "no such field", "one entry per row")
    return value
