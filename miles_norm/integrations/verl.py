"""verl: advantages over rollouts, and a policy loss in which each row has its weight.

    algorithm.adv_estimator=miles_norm                                   advantages, and verl's own mean over tokens
    algorithm.adv_estimator=miles_norm_weighted                          advantages that carry the loss weights, and
    actor_rollout_ref.actor.policy_loss.loss_mode=miles_norm_weighted    the clipped loss that sums them

Importing this module registers the names: verl 0.9.1 does so by itself (entry point ``verl.plugins``), any verl with
``VERL_USE_EXTERNAL_MODULES=miles_norm.integrations.verl``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.integrations.padded import check_values, trainable_tokens
from miles_norm.integrations.verl_config import ADVANTAGES, WEIGHTED, VerlSettings, policy_loss_settings
from miles_norm.integrations.verl_uids import RolloutUid, rollout_uids, uids_of_rows
from miles_norm.loss import clipped_loss, loss_weights, scale_advantages
from miles_norm.loss.tokens import trained_values
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards

__all__ = ["RolloutUid", "rollout_advantages", "rollout_uids", "weighted_advantages", "weighted_policy_loss"]


@register_adv_est(ADVANTAGES)
def rollout_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages of ``NormalizationConfig`` over rollouts, on each row's own trainable tokens.

    Args:
        token_level_rewards: ``[N, T]``; a row's reward is their sum.
        response_mask: ``[N, T]``.
        index: The uids ``[N]``. Rows with ``RolloutUid`` are siblings where both prompt and rollout agree; with plain
            uids each row is a rollout of its own.
        config: verl's ``config.algorithm``; see ``VerlSettings``.

    Returns:
        Advantages and returns, the same float32 ``[N, T]``.

    Raises:
        ConfigError: see ``VerlSettings``.
        SampleError: rewards and a mask of different shapes, mask entries other than 0 and 1, no uids or another number
            of them, uids of which only some name a rollout, or more rows with a plain uid than a prompt has rollouts.
            All rows are named.
        MilesNormError: whatever ``normalize_columns`` raises.
    """
    settings = VerlSettings(config, weighted=False)
    result = _normalize(token_level_rewards, response_mask, index, settings)
    values = result.token_advantages(response_mask)
    assert isinstance(values, Tensor)
    values = values.to(token_level_rewards.device)
    return values, values


@register_adv_est(WEIGHTED)
def weighted_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    r"""``rollout_advantages`` times the loss weight of each row, for a loss that is summed over tokens.

    .. math:: A'_{n,t} = K w_n A_n m_{n,t}

    The weights count the batch. verl makes K updates of it (rows by ``ppo_mini_batch_size * rollout.n``) and does not
    keep siblings together, so K makes the mass of an update that of one on average. K is 1 with ``scope: batch``, with
    ``divisor: nominal_rollouts``, which counts an update already, and where the config is not at hand.

    Arguments, results and errors as of ``rollout_advantages``.
    """
    settings = VerlSettings(config, weighted=True)
    result = _normalize(token_level_rewards, response_mask, index, settings)
    weights, loss = loss_weights(result, settings.loss), settings.loss
    if loss.scope == "update" and loss.divisor != "nominal_rollouts":
        weights = weights * settings.updates(len(weights))
    values = scale_advantages(result.advantages, response_mask, weights)
    assert isinstance(values, Tensor)
    values = values.to(token_level_rewards.device)
    return values, values


@register_policy_loss(WEIGHTED)
def weighted_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    r"""The clipped loss of advantages that carry weights: a sum over tokens, in any packing.

    .. math:: d \sum_{n,t} m_{n,t} \, l(A'_{n,t})

    with d the data-parallel ranks, over which gradients are averaged. verl's own ``vanilla`` with ``token-sum`` gives
    the same, from 0.9.1 on.

    Args:
        old_log_prob: ``[N, T]``.
        log_prob: ``[N, T]``.
        advantages: ``[N, T]``, of ``weighted_advantages``.
        response_mask: ``[N, T]``.
        loss_agg_mode: Not read: it stays with the KL loss and the entropy, which verl adds.
        config: verl's ``ActorConfig``: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c, dp_size.
        rollout_is_weights: Factor of each token loss ``[N, T]``, where rollout correction is on.

    Returns:
        The loss of the micro-batch, and verl's metrics of it.

    Raises:
        ConfigError: clip ratios that are none.
        SampleError: tensors of different shapes; on the CPU also NaN or an infinite value on a trainable token and mask
            entries other than 0 and 1, all rows named.
    """
    clip, dual_clip, data_parallel = policy_loss_settings(config)
    losses, metrics = clipped_loss(log_prob, old_log_prob, advantages, response_mask, clip=clip, dual_clip=dual_clip)
    if rollout_is_weights is None:
        rollout_is_weights = torch.ones_like(losses)
    losses, weights = trained_values(response_mask, losses=losses, weights=rollout_is_weights)
    return (losses * weights).sum() * data_parallel, {
        "actor/pg_clipfrac": metrics["clip_fraction"].item(),
        "actor/ppo_kl": metrics["kl"].item(),
        "actor/pg_clipfrac_lower": metrics["dual_clip_fraction"].item(),
    }


def _normalize(rewards: Tensor, mask: Tensor, index: Any, settings: VerlSettings) -> NormalizedRewards:
    keep = trainable_tokens("response_mask", mask)
    check_values("token_level_rewards", rewards, keep)
    uids = uids_of_rows(index, len(keep))
    columns = RolloutColumns(
        group=uids.prompts,
        rollout=uids.rollouts(settings.normalization.n_samples_per_prompt),
        reward=rewards.to(torch.float64).sum(dim=-1),
        trainable_tokens=keep.sum(dim=-1),
        padding=uids.padding if any(uids.padding) else None,
    )
    return normalize_columns(columns, settings.normalization)
