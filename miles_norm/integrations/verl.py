"""verl: advantages over rollouts, and a policy loss in which each row has its weight.

    algorithm.adv_estimator=miles_norm                                   advantages, and verl's own mean over tokens
    algorithm.adv_estimator=miles_norm_weighted                          advantages that carry the loss weights, and
    actor_rollout_ref.actor.policy_loss.loss_mode=miles_norm_weighted    the clipped loss that sums them

Importing this module registers the names: verl 0.9.1 does so by itself (entry point ``verl.plugins``), any verl with
``VERL_USE_EXTERNAL_MODULES=miles_norm.integrations.verl``.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from miles_norm.columns.ids import plain_id
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.errors import SampleError, format_rows
from miles_norm.integrations.verl_config import ADVANTAGES, WEIGHTED, VerlSettings
from miles_norm.loss import clipped_loss, loss_weights, reduce_token_losses, scale_advantages
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards

__all__ = ["RolloutUid", "rollout_advantages", "rollout_uids", "weighted_advantages", "weighted_policy_loss"]

# What verl fills a batch up with has uids of its own, and no trainable token.
_PADDING_UID = re.compile("pad[0-9a-f]{32}")

logger = logging.getLogger("miles_norm")


class RolloutUid(str):
    """The uid of a prompt that also says which rollout the row belongs to.

    verl hands an estimator nothing of a row but its uid. To all of verl this is the prompt's uid, since it compares and
    hashes as the string: groups, filters and metrics do not change.

    >>> uid = RolloutUid("9f2c", 3)
    >>> uid == "9f2c", uid.rollout
    (True, 3)
    """

    rollout: Hashable

    def __new__(cls, prompt: str, rollout: Hashable) -> RolloutUid:
        """``rollout`` is unique within the prompt."""
        uid = super().__new__(cls, prompt)
        uid.rollout = rollout
        return uid

    def __getnewargs__(self) -> tuple[str, Hashable]:  # type: ignore[override]
        return str(self), self.rollout


def rollout_uids(prompts: Iterable[str], rollouts: Iterable[Hashable]) -> np.ndarray[Any, Any]:
    """The column ``uid`` for rows of several rollouts: ``data.non_tensor_batch["uid"] = rollout_uids(...)``.

    Args:
        prompts: The prompt's uid of each row.
        rollouts: The rollout's id of each row, unique within its prompt; None for a row that is a rollout of its own.

    >>> rollout_uids(["p", "p"], [0, 1])
    array(['p', 'p'], dtype=object)
    """
    return np.array(
        [RolloutUid(uid, plain_id(rollout)) for uid, rollout in zip(prompts, rollouts, strict=True)], dtype=object
    )


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
        SampleError: no uids, uids of which only some name a rollout, or more rows with a plain uid than a prompt has
            rollouts.
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
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    losses, metrics = clipped_loss(
        log_prob, old_log_prob, advantages, response_mask, clip=(low, high), dual_clip=config.get("clip_ratio_c", 3.0)
    )
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    total = reduce_token_losses(losses, losses.new_ones(len(losses)), response_mask)
    return total * config.global_batch_info.get("dp_size", 1), {
        "actor/pg_clipfrac": metrics["clip_fraction"].item(),
        "actor/ppo_kl": metrics["kl"].item(),
        "actor/pg_clipfrac_lower": metrics["dual_clip_fraction"].item(),
    }


def _normalize(rewards: Tensor, mask: Tensor, index: Any, settings: VerlSettings) -> NormalizedRewards:
    if index is None:
        raise SampleError(
            "uid",
            got="no such column in data.non_tensor_batch",
            expected="the uid of each row's prompt",
            reason="advantages are relative to the other rollouts of the prompt",
            remedy='set data.non_tensor_batch["uid"], for rollouts of several rows to rollout_uids(...)',
        )
    uids = list(index)
    padding = [_PADDING_UID.fullmatch(uid) is not None if isinstance(uid, str) else False for uid in uids]
    columns = RolloutColumns(
        group=uids,
        rollout=_rollouts(uids, padding, settings.normalization.n_samples_per_prompt),
        reward=rewards.to(torch.float64).sum(dim=-1),
        trainable_tokens=(mask != 0).sum(dim=-1),
        padding=padding if any(padding) else None,
    )
    return normalize_columns(columns, settings.normalization)


def _rollouts(uids: Sequence[Any], padding: Sequence[bool], n: int | None) -> list[Hashable] | None:
    """The rollout of each row; None if no uid says one."""
    plain = [row for row, uid in enumerate(uids) if not isinstance(uid, RolloutUid) and not padding[row]]
    if plain and len(plain) < len(uids) - sum(padding):
        raise SampleError(
            f"uid of {format_rows(plain)}",
            got="no rollout, while other rows have one",
            expected="a RolloutUid on every row, or on none",
            reason="a row without one would be a rollout of its own",
            remedy="make the column with rollout_uids(...)",
            rows=plain,
        )
    if not plain:
        # The same ids are used for every prompt.
        return [None if (rollout := getattr(uid, "rollout", None)) is None else (str(uid), rollout) for uid in uids]
    if n is None:
        _warn_of_plain_uids()
        return None
    counts = Counter(uids[row] for row in plain)
    extra = [row for row in plain if counts[uids[row]] > n]
    if extra:
        raise SampleError(
            f"uid of {format_rows(extra)}",
            got=f"up to {max(counts.values())} rows of one prompt, and no rollout ids",
            expected=f"at most rollout.n={n} rows with a plain uid, since each is then a rollout",
            reason="siblings would be counted as rollouts",
            remedy="with verl's v1 trainer set VERL_USE_EXTERNAL_MODULES=miles_norm.integrations.verl_v1 in its "
            'environment; in a trainer of your own set data.non_tensor_batch["uid"] to rollout_uids(...)',
            rows=extra,
        )
    return None


@functools.cache
def _warn_of_plain_uids() -> None:
    logger.warning(
        "the uids name no rollouts, and rollout.n is not at hand to compare with: each row counts as a rollout; "
        "if rollouts have several rows, make the column uid with rollout_uids(...)"
    )
