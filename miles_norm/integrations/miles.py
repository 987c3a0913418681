"""Hooks of Miles and slime, whose contracts are the same: rewards, train data, and the policy loss.

    --custom-reward-post-process-path miles_norm.integrations.miles.post_process_rewards
    --custom-convert-samples-to-train-data-path miles_norm.integrations.miles.convert_samples_to_train_data
    --custom-pg-loss-reducer-function-path miles_norm.integrations.miles.pg_loss_reducer

One of the first two is enough. Neither package is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from miles_norm.columns.sample_columns import row_field
from miles_norm.conversion import train_data_from_result
from miles_norm.errors import ConfigError, SampleError, shown
from miles_norm.integrations.miles_checks import (
    check_indices,
    flat_samples,
    refuse_settings_that_remove_rows,
    refuse_steps_with_metadata,
    warn_of_rows_left_out,
    warn_of_trainers_without_mask_sums,
)
from miles_norm.integrations.miles_flags import LOSS_CONFIG_VARIABLE, loss_settings, normalization_settings
from miles_norm.integrations.miles_masks import joined_masks
from miles_norm.integrations.token_fields import check_token_fields
from miles_norm.loss.checks import described, is_dense
from miles_norm.loss.tokens import trained_values
from miles_norm.normalize import normalize_rewards
from miles_norm.result import NormalizedRewards
from miles_norm.train_data import TrainData

__all__ = ["convert_samples_to_train_data", "pg_loss_reducer", "post_process_rewards"]

_SLIME_FIELDS: Final = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
"""Fields of a sample that slime's trainer reads as columns of the same name, where sampling was cut to a nucleus."""


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Rewards as given and one advantage per row, which the trainer's own conversion then uses.

    Args:
        args: The trainer's; see ``normalization_settings``.
        samples: Flat, as the trainer passes them. Loss masks may be None, and removed rows may still have theirs.

    Prompt groups come from ``group_index``, with adapters from (adapter, ``group_index``): the trainer passes no group
    sizes here.

    Returns:
        Two lists of floats, one entry per sample.

    Raises:
        ConfigError: settings that conflict, or that take rows out of the loss, which this hook cannot do.
        SampleError: no samples, or nested ones.
        MilesNormError: whatever ``normalize_rewards`` raises.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(advantage_estimator="grpo", grpo_std_normalization=False, rewards_normalization=True)
    >>> rows = [{"group_index": 0, "index": k, "reward": r, "response_length": 8} for k, r in ((0, 1), (0, 1), (1, 0))]
    >>> post_process_rewards(args, rows)
    ([1.0, 1.0, 0.0], [0.5, 0.5, -0.5])
    """
    rows = flat_samples(samples)
    config = normalization_settings(args)
    refuse_settings_that_remove_rows(config)
    result = normalize_rewards(rows, config)
    warn_of_trainers_without_mask_sums(result)
    return _raw_rewards(result).tolist(), result.advantages.tolist()


def convert_samples_to_train_data(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The dict of columns that the trainer shards, in place of its own conversion.

    As ``miles_norm.convert_samples_to_train_data`` without ``metadata``, which the trainer keeps to itself. Rows of
    excluded rollouts and padding rows are left out, since the trainer divides by the distinct ``rollout_ids`` that it
    finds; a warning names them.

    Args:
        args: The trainer's; see ``normalization_settings``.
        samples: Flat, as the trainer passes them. They are read, never changed.

    Raises:
        ConfigError: settings that conflict; a multi-LoRA step or ``--use-dynamic-global-batch-size``, which need the
            metadata.
        SampleError: no samples, nested ones, rows without an ``index`` that int64 holds, tokens that are no token ids,
            log-probs that are no finite numbers, or no rollout that counts; all rows are named.
        MilesNormError: whatever ``miles_norm.convert_samples_to_train_data`` raises.

    >>> from types import SimpleNamespace
    >>> rows = [{"group_index": 0, "index": k, "reward": r, "tokens": [5, 6, 7], "response_length": 2}
    ...         for k, r in ((0, 1), (0, 1), (1, 0))]
    >>> data = convert_samples_to_train_data(SimpleNamespace(advantage_estimator="gspo"), rows)
    >>> data["rollout_ids"], data["rollout_mask_sums"], data["loss_masks"]
    ([0, 0, 1], [4, 4, 2], [[1, 1], [1, 1], [1, 1]])
    """
    rows = flat_samples(samples)
    refuse_steps_with_metadata(args, rows)
    check_indices(rows)
    check_token_fields(rows)
    result = normalize_rewards(rows, normalization_settings(args))
    warn_of_trainers_without_mask_sums(result)
    raw = {"raw_reward": _raw_rewards(result)}
    data = TrainData(train_data_from_result(rows, result).columns | raw | _slime_columns(rows))
    kept = result.counted_rollouts[result.index.row_rollout]
    if result.columns.padding is not None:
        kept &= ~result.columns.padding
    if not bool(kept.all()):
        warn_of_rows_left_out(result, kept, getattr(args, "global_batch_size", None))
        data = data.select(kept)
    return data.as_miles_dict()


def pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool,
) -> Callable[[Tensor], Tensor]:
    r"""The policy loss divided by a constant, as Dr. GRPO has it: ``aggregation: constant`` of ``LossConfig``.

    .. math:: \frac{1}{\text{max tokens}} \sum_n \sum_t m_{n,t} \, l_{n,t}

    The trainer divides what this returns by the rollouts of the step. ``max_tokens`` stands in the file of the
    environment variable ``MILES_NORM_LOSS_CONFIG``. Source: arXiv:2503.20783.

    Args:
        total_lengths: Not read.
        response_lengths: Response tokens of each row of the micro-batch.
        loss_masks: Their masks.
        calculate_per_token_loss: The flag, which must be off.

    Raises:
        ConfigError: another aggregation; ``--calculate-per-token-loss``; no file.
        SampleError: masks that are not one tensor per row of the length of its response, or, on the CPU, have entries
            other than 0 and 1, all rows named; of the reducer, losses of another number of tokens, as context-parallel
            ranks have them, or NaN on a trainable token.

    Other aggregations: ``rollout_mean`` is the trainer's own, without this flag; ``token_mean`` is
    ``--calculate-per-token-loss``. ``sample_mean``, ``rollout_row_mean`` and ``prompt_mean`` divide by rows or groups
    of the whole step, and a reducer sees one micro-batch.
    """
    config = loss_settings()
    if calculate_per_token_loss is not False or config.aggregation != "constant":
        flag = "" if calculate_per_token_loss is True else f" {shown(calculate_per_token_loss)}"
        per_token = "" if calculate_per_token_loss is False else f" with --calculate-per-token-loss{flag}"
        raise ConfigError(
            f"aggregation in the file of {LOSS_CONFIG_VARIABLE}",
            got=f"{config.aggregation!r}{per_token}",
            expected="'constant', without --calculate-per-token-loss",
            reason="a reducer sees the tokens of one micro-batch, so that it can divide by a constant and nothing else",
            remedy="for rollout_mean leave --custom-pg-loss-reducer-function-path away, for token_mean give "
            "--calculate-per-token-loss instead; no other aggregation can be had here",
        )
    mask, divisor = joined_masks(loss_masks, response_lengths), float(config.max_tokens or 1)

    def reduce(losses: Tensor) -> Tensor:
        if not is_dense(losses) or losses.shape != mask.shape:
            raise SampleError(
                "token losses of a micro-batch",
                got=f"shape {list(losses.shape)}" if is_dense(losses) else described(losses),
                expected=f"{list(mask.shape)}, one per response token",
                reason="with context parallelism a rank has a part of each response, and the masks of all of it",
                remedy="use this reducer without context parallelism",
            )
        return trained_values(mask, token_losses=losses)[0].sum() / divisor

    return reduce


def _raw_rewards(result: NormalizedRewards) -> Tensor:
    """Rewards as given; 0 where ``missing_reward="zero"`` scored the row, since trainers log their mean."""
    return result.raw_rewards.nan_to_num(nan=0.0) if result.config.missing_reward == "zero" else result.raw_rewards


def _slime_columns(rows: list[Any]) -> dict[str, list[Any]]:
    columns = {name: row_field(rows, name) for name in _SLIME_FIELDS}
    return {name: column for name, column in columns.items() if all(value is not None for value in column)}
