"""Agent Lightning's rollouts as train data, and drop-ins for its advantages and for what its loss divides by.

Neither it nor verl is imported. Two assignments before training starts put the drop-ins in place:

    from agentlightning.verl import trainer
    from miles_norm.integrations import agent_lightning

    trainer.compute_rollout_level_advantage = agent_lightning.compute_rollout_level_advantage
    trainer.normalize_advantages_by_rollout = agent_lightning.normalize_advantages_by_rollout
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.ids import encode_ids
from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.conversion import convert_samples_to_train_data
from miles_norm.errors import ConfigError, format_rows, shown
from miles_norm.integrations.agent_lightning_batches import (
    bad_batch,
    batch_columns,
    checked_divisor,
    refuse_missing,
    rollout_counts,
    rollout_values,
)
from miles_norm.integrations.padded import check_values, refuse_infinite, trainable_tokens
from miles_norm.loss.checks import FLOATS
from miles_norm.normalize import normalize_columns
from miles_norm.session.trace import TraceLevel, trace_rows
from miles_norm.train_data import TrainData

__all__ = [
    "compute_rollout_level_advantage",
    "convert_rollouts_to_train_data",
    "normalize_advantages_by_rollout",
]

logger = logging.getLogger("miles_norm")

Ids = Sequence[Any] | np.ndarray[Any, Any]

_ESTIMATORS: Final = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
}
"""verl's names of the estimators that are computed here."""

_CLOSE: Final = 1e-5
"""How far sibling rows' rewards may differ, relative to the largest: what upstream allows as well."""


def convert_rollouts_to_train_data(
    rollouts: Iterable[Any],
    config: NormalizationConfig | None = None,
    *,
    level: TraceLevel = "trajectory",
    loss_config: LossConfig | None = None,
) -> TrainData:
    """Train data of ``CompletedRollout`` objects, or of the dicts of their JSON, for a trainer of one's own.

    A rollout without a sampled token has no row, as upstream, and its reward is in no statistic; a warning names it.

    Args:
        rollouts: As the rollout manager returns them; read by ``miles_norm.session.trace``, which decides what is a
            row, and never changed.
        config: Defaults to ``NormalizationConfig()``. Upstream's ``reward_fillna_value`` of 0 for a ``final_reward`` of
            None is ``missing_reward="zero"``.
        level: Of Agent Lightning's ``trace_aggregator``.
        loss_config: For the column ``weights``; upstream's is ``LossConfig(divisor="trained_rows")``.

    Raises:
        MilesNormError: whatever ``trace_rows`` and ``convert_samples_to_train_data`` raise.

    >>> def rollout(name, reward, *calls):
    ...     triplets = [{"prompt": {"token_ids": p}, "response": {"token_ids": r}} for p, r in calls]
    ...     return {"rollout_id": name, "data_id": "d", "final_reward": reward, "triplets": triplets}
    >>> rollouts = [rollout("a", 1.0, ([1], [2]), ([1, 2, 3], [4])), rollout("b", 0.0, ([1], [5]), ([6], [7]))]
    >>> data = convert_rollouts_to_train_data(rollouts, NormalizationConfig(advantage_estimator="dr_grpo"))
    >>> data["tokens"].tolists(), data["rewards"].tolist(), data["rollout_mask_sums"].tolist()
    ([[1, 2, 3, 4], [1, 5], [6, 7]], [0.5, -0.5, -0.5], [2, 2, 2])
    """
    rows = trace_rows(rollouts, level)
    if rows.without_rows:
        logger.warning(
            "%s: no row, since there is no sampled token, so that the rewards are in no statistic",
            format_rows(rows.without_rows, "rollout"),
        )
    return convert_samples_to_train_data(rows.samples, config, loss_config=loss_config)


def normalize_advantages_by_rollout(
    advantages: Tensor,
    response_mask: Tensor,
    rollout_ids: Ids,
    *,
    num_trained_rows: int | None = None,
    divisor: Literal["trained_rows", "rollouts"] | None = None,
) -> Tensor:
    r"""Advantages divided by the tokens of their rollout and a count, for a loss that is summed over tokens.

    .. math:: A'_{n,t} = \frac{A_{n,t}}{\max(L_r D, 1)}

    L_r: trainable tokens of the row's rollout. D: ``num_trained_rows``, or the number of rollouts.

    Why ``divisor``: upstream divides by rows where it is given their number, so that the total weight of a batch is
    rollouts / rows and shrinks when rollouts are cut into more rows; by rollouts it is 1 (docs/loss.md).

    Args:
        advantages: Per token ``[N, T]``.
        response_mask: 1 on trainable tokens ``[N, T]``.
        rollout_ids: ``[N]``, unique over the batch.
        num_trained_rows: Rows of the batch, as the trainer passes it; later versions pass none.
        divisor: None: ``trained_rows`` where ``num_trained_rows`` is given, else ``rollouts``, as upstream. Set it with
            ``functools.partial(normalize_advantages_by_rollout, divisor="rollouts")``.

    Returns:
        ``[N, T]`` in the dtype of the advantages; the divisor itself is float64, where upstream's has that dtype. A
        rollout without a trainable token keeps its advantages, as upstream.

    Raises:
        SampleError: no rows; advantages that are no floating-point numbers, a mask of another shape or with entries
            other than 0 and 1; NaN or an infinite advantage on a trainable token; another number of ids than rows, rows
            without an id. All rows are named.
        ConfigError: ``num_trained_rows`` that is no whole number from 1 on, or ``divisor="trained_rows"`` without it.

    Two rollouts on three rows, of 3 tokens each:

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    >>> for settings in ({"num_trained_rows": 3}, {"num_trained_rows": 3, "divisor": "rollouts"}):
    ...     scaled = normalize_advantages_by_rollout(torch.ones(3, 3), mask, ["A", "A", "B"], **settings)
    ...     print(round(float((scaled * mask).sum()), 4))
    0.6667
    1.0
    """
    if isinstance(advantages, Tensor) and not advantages.is_nested and advantages.shape[:1] == (0,):
        raise bad_batch("advantages", "no rows", "at least one row")
    keep = trainable_tokens("response_mask", response_mask)
    check_values("advantages", advantages, keep, FLOATS)
    refuse_infinite("advantages", advantages, keep)
    ids = encode_ids(rollout_ids, "rollout", len(keep), keep.device)
    refuse_missing(ids)
    unique, rollout = torch.unique(ids.codes, return_inverse=True)
    count = checked_divisor(num_trained_rows, divisor, len(unique))
    tokens = torch.zeros(len(unique), dtype=torch.float64, device=keep.device)
    tokens.index_add_(0, rollout, keep.sum(dim=-1).to(tokens))
    scale = (tokens * count).clamp_min(1.0)[rollout]
    return (advantages / scale[:, None]).to(advantages.dtype)


def compute_rollout_level_advantage(
    batch: Any,
    *,
    adv_estimator: Any,
    gamma: float,
    lam: float,
    num_repeat: int,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any | None = None,
    compute_advantage_fn: Callable[..., Any] | None = None,
) -> tuple[Any, dict[str, int]]:
    """One advantage per rollout, on the trainable tokens of all of its rows.

    Args:
        batch: A ``DataProto``. Read: ``token_level_rewards`` and ``response_mask`` ``[N, T]``; ``rollout_id_list`` and
            ``uid``, or ``data_id_list`` in its place. Written: ``advantages`` and ``returns``, float32 ``[N, T]``;
            ``uid`` where it was not there.
        adv_estimator: ``grpo``, ``rloo``, ``opo`` or the vectorized two, as names or as verl's enum.
        gamma: Of outcome rewards nothing is discounted; read by ``compute_advantage_fn`` only, as are ``lam``,
            ``num_repeat`` and ``config``.
        lam: See ``gamma``.
        num_repeat: See ``gamma``.
        norm_adv_by_std_in_grpo: Divide by the standard deviation in ``grpo``.
        config: See ``gamma``.
        compute_advantage_fn: verl's ``compute_advantage``, for an estimator that is not computed here: it is called on
            the row of each rollout that has the most trainable tokens, and what it gives is broadcast.

    Unlike upstream: the arithmetic is float64, where upstream's is in the dtype of the scores, bfloat16; a prompt with
    one rollout gives 0, where verl keeps the raw reward in ``grpo``; ``opo`` weighs a rollout by the tokens of all of
    its rows; a rollout without a trainable token is in the statistics, where upstream fails.

    Returns:
        The same batch, and counts of rows and rollouts for the log.

    Raises:
        ConfigError: another estimator without ``compute_advantage_fn``; ``norm_adv_by_std_in_grpo`` that is no bool.
        GroupingError: rows without a uid.
        MissingRewardError: rewards that are NaN or infinite.
        SampleError: a missing field or rollout id; tensors of other shapes, a mask with entries other than 0 and 1; of
            ``compute_advantage_fn``, no advantages, or tokens of a row with different values.
        DisagreeingRewardsError: sibling rows whose rewards differ by more than 1e-5 of the largest, as a KL penalty in
            the rewards (``algorithm.use_kl_in_reward``) makes them.
    """
    columns = batch_columns(batch)
    settings = NormalizationConfig(
        advantage_estimator=_estimator(adv_estimator, compute_advantage_fn),  # type: ignore[arg-type]
        grpo_std_normalization=norm_adv_by_std_in_grpo,
        rollout_reward="shared",
        shared_reward_tolerance=_CLOSE,
        group_fallback="error",
    )
    result = normalize_columns(columns, settings)
    mask = batch.batch["response_mask"]
    if compute_advantage_fn is None:
        values = dict.fromkeys(("advantages", "returns"), result.rollout_advantages)
    else:
        computed = compute_advantage_fn(
            batch[result.mainstream_rows.tolist()],
            adv_estimator=adv_estimator,
            gamma=gamma,
            lam=lam,
            num_repeat=num_repeat,
            norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
            config=config,
        )
        values = rollout_values(computed, result)
    for key, value in values.items():
        rows = value[result.index.row_rollout]
        batch.batch[key] = rows[:, None] * mask.to(rows.dtype)
    return batch, rollout_counts(result)


def _estimator(adv_estimator: Any, compute_advantage_fn: Any) -> str:
    """Ours of verl's estimator; any one where verl computes the advantages."""
    name = getattr(adv_estimator, "value", adv_estimator)
    known = isinstance(name, str) and name in _ESTIMATORS
    if callable(compute_advantage_fn) or (known and compute_advantage_fn is None):
        return _ESTIMATORS[name] if known else "grpo"
    function = "" if compute_advantage_fn is None else f" with compute_advantage_fn={shown(compute_advantage_fn)}"
    raise ConfigError(
        "algorithm.adv_estimator",
        got=shown(name) + function,
        expected=f"{', '.join(_ESTIMATORS)}; or a function that computes another",
        reason="verl's other estimators whiten, discount or need a critic",
        remedy="choose one of these, or pass compute_advantage_fn=verl.trainer.ppo.ray_trainer.compute_advantage",
    )
