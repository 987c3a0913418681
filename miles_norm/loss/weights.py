r"""One loss weight per row, so that ``loss = sum_n w_n * sum_t mask_nt * l_nt`` is any of the usual means.

Because a weight belongs to a row, sums over micro-batches, ranks or accumulation steps add up to the same loss in any
packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_norm.config import LossConfig
from miles_norm.result import NormalizedRewards

__all__ = ["loss_weights"]


def loss_weights(result: NormalizedRewards, config: LossConfig | None = None) -> Tensor:
    r"""Weight of each row's trainable tokens in the loss.

    With :math:`L_n` and :math:`L_r` the trainable tokens of a row and of its rollout, R counted rollouts, N rows with a
    trainable token and G prompt groups with one:

    ================== =====================================================================================
    token_mean         :math:`1 / \sum L`
    sample_mean        :math:`1 / (N L_n)`
    rollout_mean       :math:`1 / (R L_r)`; Eq. 16 of arXiv:2608.17528. ``divisor`` replaces R
    rollout_row_mean   :math:`1 / (R \cdot \text{rows of } r \cdot L_n)`: the mean over rollouts of the mean over rows
    prompt_mean        :math:`1 / (G \cdot \text{tokens of the group})`
    constant           :math:`1 / (R \cdot \text{max\_tokens})`; Dr. GRPO (arXiv:2503.20783)
    ================== =====================================================================================

    Several adapters are stepped each on its own, so all of these count within the rows of one adapter.

    Returns:
        float64 ``[N]`` on the device of the result; 0 for a row without a trainable token, and for all rows where there
        is none.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0, 0, 0], rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 4, 2])
    >>> loss_weights(normalize_columns(columns)).tolist()
    [0.0625, 0.0625, 0.25]
    """
    config = config or LossConfig()
    counts = _count(result, config)
    tokens = result.trainable_tokens
    scope, rollout = counts.row_scope, result.index.row_rollout
    match config.aggregation:
        case "token_mean":
            denominator = counts.scope_tokens[scope]
        case "sample_mean":
            denominator = counts.rows[scope] * tokens
        case "rollout_mean":
            denominator = counts.divisor(config)[scope] * counts.rollout_tokens[rollout]
        case "rollout_row_mean":
            denominator = counts.rollouts[scope] * counts.rollout_rows[rollout] * tokens
        case "prompt_mean":
            group = counts.row_group
            denominator = counts.groups[scope] * counts.group_tokens[group]
        case "constant":
            denominator = counts.rollouts[scope] * (config.max_tokens or 1)
    return torch.where(tokens > 0, 1.0 / denominator.to(torch.float64), 0.0)


@dataclass(frozen=True, eq=False)
class _Counts:
    """Numbers of tokens, rows, rollouts and groups, per scope: what is stepped together."""

    row_scope: Tensor
    row_group: Tensor
    """The prompt group of each row within its scope."""
    rollout_tokens: Tensor
    rollout_rows: Tensor
    group_tokens: Tensor
    scope_tokens: Tensor
    rows: Tensor
    rollouts: Tensor
    groups: Tensor

    def divisor(self, config: LossConfig) -> Tensor:
        if config.divisor == "trained_rows":
            return self.rows
        if config.divisor == "nominal_rollouts":
            return torch.full_like(self.rollouts, config.nominal_rollouts or 0)
        return self.rollouts


def _count(result: NormalizedRewards, config: LossConfig) -> _Counts:
    index, tokens = result.index, result.trainable_tokens
    row_scope, scopes = _row_scopes(result)
    scope_of = row_scope[index.first_row]
    padding, counted = result.columns.padding, result.counted_rollouts
    trained = tokens > 0
    rows = trained
    if config.count_empty_rows:
        rows = counted[index.row_rollout] if padding is None else counted[index.row_rollout] & ~padding
    rollout_tokens = _sum(tokens, index.row_rollout, index.num_rollouts)
    rollouts = counted if config.count_empty_rollouts else counted & (rollout_tokens > 0)
    # Groups given by sizes may mix adapters: a group counts once in each scope that it has tokens in.
    row_group = index.row_group * scopes + row_scope
    group_tokens = _sum(tokens, row_group, index.num_groups * scopes)
    group_scope = torch.arange(scopes, device=tokens.device).repeat(index.num_groups)
    return _Counts(
        row_scope=row_scope,
        row_group=row_group,
        rollout_tokens=rollout_tokens,
        rollout_rows=_sum(rows.to(torch.int64), index.row_rollout, index.num_rollouts),
        group_tokens=group_tokens,
        scope_tokens=_sum(tokens, row_scope, scopes),
        rows=_sum(rows.to(torch.int64), row_scope, scopes),
        rollouts=_sum(rollouts.to(torch.int64), scope_of, scopes),
        groups=_sum((group_tokens > 0).to(torch.int64), group_scope, scopes),
    )


def _row_scopes(result: NormalizedRewards) -> tuple[Tensor, int]:
    """A number per row for what it is stepped with: its adapter, or everything."""
    adapter = result.columns.adapter
    if adapter is None:
        return torch.zeros_like(result.index.row_rollout), 1
    names, scope = torch.unique(adapter.codes, return_inverse=True)
    return scope, len(names)


def _sum(values: Tensor, where: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add_(0, where, values)
