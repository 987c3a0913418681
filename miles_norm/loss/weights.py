r"""One loss weight per row, so that ``loss = sum_n w_n * sum_t mask_nt * l_nt`` is any of the usual means.

Because a weight belongs to a row, sums over micro-batches, ranks or accumulation steps add up to the same loss in any
packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from miles_norm.config import LossConfig
from miles_norm.errors import SampleError, format_rows
from miles_norm.loss.checks import check_type
from miles_norm.loss.plan import UpdatePlan
from miles_norm.loss.updates import counted_rows
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
    constant           :math:`1 / (R \cdot \text{max tokens})`; Dr. GRPO (arXiv:2503.20783)
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
        SampleError: no result, no plan, or a plan for other rows: for another batch, or for this one before a filter or
            ``drop_first`` took rows out.
        ConfigError: no ``LossConfig``.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0, 0, 0], rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 4, 2])
    >>> loss_weights(normalize_columns(columns)).tolist()
    [0.0625, 0.0625, 0.25]
    """
    check_type("result", result, NormalizedRewards, "pass what normalize_rewards returned, or plan.result")
    config = LossConfig.checked(config)
    if plan is not None:
        check_type("plan", plan, UpdatePlan, "pass what plan_updates returned")
        _check_plan(plan, result)
    counts = _Counts(result, config, plan)
    match config.aggregation:
        case "token_mean":
            denominator = counts.tokens_in_scope
        case "sample_mean":
            denominator = counts.rows.to(torch.float64) * counts.tokens
        case "rollout_mean":
            denominator = counts.divisor.to(torch.float64) * counts.tokens_of_rollout
        case "rollout_row_mean":
            denominator = counts.rollouts.to(torch.float64) * counts.rows_of_rollout * counts.tokens
        case "prompt_mean":
            denominator = counts.groups.to(torch.float64) * counts.tokens_of_group
        case "constant":
            denominator = counts.rollouts.to(torch.float64) * (config.max_tokens or 1)
    # Products of counts are taken in float64: in int64 those of a long batch could overflow.
    return torch.where(counts.tokens > 0, 1.0 / denominator.to(torch.float64), 0.0)


class _Counts:
    """Numbers of tokens, rows, rollouts and groups in each row's scope: what is stepped together.

    Each is int64 ``[N]``, or ``[1]`` where there is one scope, and computed when it is asked for.
    """

    def __init__(self, result: NormalizedRewards, config: LossConfig, plan: UpdatePlan | None) -> None:
        self._index, self._config = result.index, config
        self._kept = _kept_rows(result, plan)
        tokens = result.trainable_tokens
        self.tokens = tokens if self._kept is None else tokens.masked_fill(~self._kept, 0)
        self._scope, self._scopes = _scopes(result, config, plan)

    @cached_property
    def tokens_in_scope(self) -> Tensor:
        return self._in_scope(self.tokens)

    @cached_property
    def rows(self) -> Tensor:
        return self._in_scope(self._counted_rows)

    @cached_property
    def rollouts(self) -> Tensor:
        rollout, parts = self._rollout
        if not self._config.count_empty_rollouts:
            present = self._rollout_tokens > 0
        elif self._kept is None and self._scope is None:
            return self.tokens.new_full((1,), parts)
        else:
            kept = torch.ones_like(self.tokens) if self._kept is None else self._kept.to(torch.int64)
            present = _sum(kept, rollout, parts) > 0
        return self._parts_in_scope(present, rollout)

    @cached_property
    def groups(self) -> Tensor:
        return self._parts_in_scope(self._group_tokens > 0, self._group[0])

    @property
    def divisor(self) -> Tensor:
        if self._config.divisor == "trained_rows":
            return self.rows
        if self._config.divisor == "nominal_rollouts":
            return self.tokens.new_full((1,), self._config.nominal_rollouts or 0)
        return self.rollouts

    @property
    def tokens_of_rollout(self) -> Tensor:
        return self._rollout_tokens.index_select(0, self._rollout[0])

    @property
    def rows_of_rollout(self) -> Tensor:
        rollout, parts = self._rollout
        return _sum(self._counted_rows, rollout, parts).index_select(0, rollout)

    @property
    def tokens_of_group(self) -> Tensor:
        return self._group_tokens.index_select(0, self._group[0])

    @cached_property
    def _counted_rows(self) -> Tensor:
        if not self._config.count_empty_rows:
            return (self.tokens > 0).to(torch.int64)
        return torch.ones_like(self.tokens) if self._kept is None else self._kept.to(torch.int64)

    @cached_property
    def _rollout(self) -> tuple[Tensor, int]:
        """The part of its rollout that is in the row's scope, and how many parts there are."""
        return self._parts(self._index.row_rollout, self._index.num_rollouts)

    @cached_property
    def _group(self) -> tuple[Tensor, int]:
        return self._parts(self._index.row_group, self._index.num_groups)

    @cached_property
    def _rollout_tokens(self) -> Tensor:
        return _sum(self.tokens, *self._rollout)

    @cached_property
    def _group_tokens(self) -> Tensor:
        return _sum(self.tokens, *self._group)

    def _parts(self, number: Tensor, numbers: int) -> tuple[Tensor, int]:
        """Number the pairs of scope and rollout or group: what is in two scopes counts in each."""
        if self._scope is None:
            return number, numbers
        pairs, part = torch.unique(self._scope * numbers + number, return_inverse=True)
        return part, len(pairs)

    def _parts_in_scope(self, present: Tensor, part: Tensor) -> Tensor:
        """Number of parts that are present, in each row's scope."""
        if self._scope is None:
            return present.sum(dim=0, keepdim=True)
        scope_of_part = self._scope.new_zeros(len(present)).scatter_(0, part, self._scope)
        return _sum(present.to(torch.int64), scope_of_part, self._scopes).index_select(0, self._scope)

    def _in_scope(self, values: Tensor) -> Tensor:
        """Sum over each row's scope."""
        if self._scope is None:
            return values.sum(dim=0, keepdim=True)
        return _sum(values, self._scope, self._scopes).index_select(0, self._scope)


def _kept_rows(result: NormalizedRewards, plan: UpdatePlan | None) -> Tensor | None:
    """bool ``[N]``: counted rows that are in an update; None for all rows."""
    rows = counted_rows(result)
    if plan is None:
        return rows
    planned = plan.row_update >= 0
    return planned if rows is None else rows & planned


def _check_plan(plan: UpdatePlan, result: NormalizedRewards) -> None:
    theirs = plan.result
    if theirs is result:  # comparing two would wait for the device
        return
    index, rows = theirs.index, result.index.num_rows
    same = index.num_rows == rows and torch.equal(index.row_rollout, result.index.row_rollout)
    if not same or not torch.equal(index.row_group, result.index.row_group) or not _same_adapters(theirs, result):
        raise _wrong_plan(
            f"a plan for {index.num_rows} rows, {index.num_rollouts} rollouts and {index.num_groups} groups, not these",
            f"one for the {rows} rows of the result, which are {result.index.num_rollouts} rollouts in "
            f"{result.index.num_groups} groups",
        )
    other_tokens = theirs.trainable_tokens != result.trainable_tokens
    other = torch.nonzero(other_tokens | (_counted_or_all(theirs) != _counted_or_all(result)))[:, 0].tolist()
    if other:
        raise _wrong_plan(
            f"a plan for a result that differs in what counts or trains, on {format_rows(other)}",
            "the result that the plan was made for, plan.result",
            other,
        )


def _same_adapters(one: NormalizedRewards, other: NormalizedRewards) -> bool:
    a, b = one.columns.adapter, other.columns.adapter
    if a is None or b is None:
        return a is b
    return a.labels == b.labels and torch.equal(a.codes, b.codes)


def _counted_or_all(result: NormalizedRewards) -> Tensor:
    rows = counted_rows(result)
    return torch.ones_like(result.trained_rows) if rows is None else rows


def _wrong_plan(got: str, expected: str, rows: Sequence[int] = ()) -> SampleError:
    return SampleError(
        "update plan",
        got=got,
        expected=expected,
        reason="the plan says which update each row is in, and the weights count what it keeps",
        remedy="call plan_updates with this result after every filter; under drop_first pass plan.result",
        rows=rows,
    )


def _scopes(result: NormalizedRewards, config: LossConfig, plan: UpdatePlan | None) -> tuple[Tensor | None, int]:
    """A number per row for what is stepped together, its update and its adapter; None if everything is."""
    scope, scopes = None, 1
    if plan is not None and config.scope == "update":
        # Rows in no update have no tokens, so any number does for them.
        scope, scopes = plan.row_update.clamp(min=0), max(plan.num_updates, 1)
    if result.columns.adapter is not None:
        names, adapter = torch.unique(result.columns.adapter.codes, return_inverse=True)
        scope = adapter if scope is None else scope * len(names) + adapter
        scopes *= len(names)
    return scope, scopes


def _sum(values: Tensor, where: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add_(0, where, values)
