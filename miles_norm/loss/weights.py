r"""One loss weight per row, so that ``loss = sum_n w_n * sum_t mask_nt * l_nt`` is any of the usual means.

Because a weight belongs to a row, sums over micro-batches, ranks or accumulation steps add up to the same loss in any
packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_norm.config import LossConfig
from miles_norm.errors import SampleError
from miles_norm.loss.updates import UpdatePlan
from miles_norm.result import NormalizedRewards

__all__ = ["loss_weights"]


def loss_weights(result: NormalizedRewards, config: LossConfig | None = None, plan: UpdatePlan | None = None) -> Tensor:
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

    With a plan all of these count what the plan keeps, within the row's update (``scope="update"``) or over all updates
    (``scope="batch"``). Several adapters are stepped each on its own, so they also count within one adapter.

    Args:
        result: Of ``normalize_rewards``; with a plan whose ``order`` is ``drop_first``, ``plan.result``.
        config: Defaults to ``LossConfig()``: the mean over rollouts of the mean over their tokens.
        plan: Of ``plan_updates``; None: the batch is one update.

    Returns:
        float64 ``[N]`` on the device of the result; 0 for a row without a trainable token or in no update, and for all
        rows where there is no token at all.

    Raises:
        SampleError: a plan for another number of rows.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0, 0, 0], rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 4, 2])
    >>> loss_weights(normalize_columns(columns)).tolist()
    [0.0625, 0.0625, 0.25]
    """
    config = config or LossConfig()
    counts = _count(result, config, plan)
    tokens, scope = counts.tokens, counts.row_scope
    match config.aggregation:
        case "token_mean":
            denominator = counts.scope_tokens[scope]
        case "sample_mean":
            denominator = counts.rows[scope] * tokens
        case "rollout_mean":
            denominator = counts.divisor(config)[scope] * counts.rollout_tokens[counts.row_rollout]
        case "rollout_row_mean":
            denominator = counts.rollouts[scope] * counts.rollout_rows[counts.row_rollout] * tokens
        case "prompt_mean":
            denominator = counts.groups[scope] * counts.group_tokens[counts.row_group]
        case "constant":
            denominator = counts.rollouts[scope] * (config.max_tokens or 1)
    return torch.where(tokens > 0, 1.0 / denominator.to(torch.float64), 0.0)


@dataclass(frozen=True, eq=False)
class _Counts:
    """Numbers of tokens, rows, rollouts and groups per scope: what is stepped together."""

    tokens: Tensor
    """int64 ``[N]``: trainable tokens of the rows that are in an update."""
    row_scope: Tensor
    row_rollout: Tensor
    """The part of its rollout that is in the row's scope."""
    row_group: Tensor
    """The part of its group that is in the row's scope."""
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


def _count(result: NormalizedRewards, config: LossConfig, plan: UpdatePlan | None) -> _Counts:
    index, padding = result.index, result.columns.padding
    kept = result.counted_rollouts[index.row_rollout]
    if padding is not None:
        kept = kept & ~padding
    if plan is not None:
        _check_plan(plan, index.num_rows)
        kept = kept & (plan.row_update >= 0)
    tokens = result.trainable_tokens.masked_fill(~kept, 0)
    scope, scopes = _scopes(result, config, plan)
    rollout, rollouts = _parts(scope, scopes, index.row_rollout, index.num_rollouts)
    group, groups = _parts(scope, scopes, index.row_group, index.num_groups)
    rows = kept if config.count_empty_rows else tokens > 0
    rollout_tokens = _sum(tokens, rollout, rollouts)
    present = _sum(kept.to(torch.int64), rollout, rollouts) > 0
    if not config.count_empty_rollouts:
        present = present & (rollout_tokens > 0)
    group_tokens = _sum(tokens, group, groups)
    return _Counts(
        tokens=tokens,
        row_scope=scope,
        row_rollout=rollout,
        row_group=group,
        rollout_tokens=rollout_tokens,
        rollout_rows=_sum(rows.to(torch.int64), rollout, rollouts),
        group_tokens=group_tokens,
        scope_tokens=_sum(tokens, scope, scopes),
        rows=_sum(rows.to(torch.int64), scope, scopes),
        rollouts=_sum(present.to(torch.int64), _scope_of(scope, rollout, rollouts), scopes),
        groups=_sum((group_tokens > 0).to(torch.int64), _scope_of(scope, group, groups), scopes),
    )


def _check_plan(plan: UpdatePlan, rows: int) -> None:
    if len(plan.row_update) != rows:
        raise SampleError(
            "update plan",
            got=f"a plan for {len(plan.row_update)} rows",
            expected=f"one for the {rows} rows of the result",
            reason="the plan says which update each row is in",
            remedy="call plan_updates with this result",
        )


def _scopes(result: NormalizedRewards, config: LossConfig, plan: UpdatePlan | None) -> tuple[Tensor, int]:
    """A number per row for what is stepped together: its update and its adapter."""
    scope, scopes = torch.zeros_like(result.index.row_rollout), 1
    if plan is not None and config.scope == "update":
        # Rows in no update have no tokens, so any number does for them.
        scope, scopes = plan.row_update.clamp(min=0), max(plan.num_updates, 1)
    if result.columns.adapter is not None:
        names, adapter = torch.unique(result.columns.adapter.codes, return_inverse=True)
        scope, scopes = scope * len(names) + adapter, scopes * len(names)
    return scope, scopes


def _parts(scope: Tensor, scopes: int, number: Tensor, numbers: int) -> tuple[Tensor, int]:
    """Number the pairs (scope, number): a rollout or group that is in two scopes counts in each."""
    if scopes == 1:
        return number, numbers
    pairs, part = torch.unique(scope * numbers + number, return_inverse=True)
    return part, len(pairs)


def _scope_of(scope: Tensor, part: Tensor, parts: int) -> Tensor:
    """The scope that each part is in."""
    return scope.new_zeros(parts).scatter_(0, part, scope)


def _sum(values: Tensor, where: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add_(0, where, values)
