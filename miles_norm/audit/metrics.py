"""Flat metrics for every step of a run: what is counted, what carries a gradient, what counting rows would change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, get_args

import torch
from torch import Tensor

from miles_norm.audit.baselines import baseline_advantages
from miles_norm.audit.summary import disagreeing_rows, unscored_rows
from miles_norm.config import LossConfig
from miles_norm.loss import loss_weights
from miles_norm.loss.checks import check_type
from miles_norm.metrics import PREFIX
from miles_norm.result import NormalizedRewards
from miles_norm.rewards import any_row

__all__ = [
    "AGGREGATIONS",
    "EXTREME",
    "Comparison",
    "audit_metrics",
    "compare_rows",
    "comparison_metrics",
    "relative_weights",
]

AGGREGATIONS: Final[tuple[str, ...]] = get_args(LossConfig.model_fields["aggregation"].annotation)

EXTREME = 3.0
"""Advantages beyond this are counted as extreme."""

_FAN_OUTS = (1, 2, 4, 8, 16, 32)
_SOURCES = ("prompt_group_sizes", "nesting", "group_key", "fixed_fan_out", "single_group")


def audit_metrics(result: NormalizedRewards, baseline: str | None = "rows") -> dict[str, float]:
    """What ``result.metrics()`` has, and what a look at fan-out, signal and weights adds, under ``miles_norm/``.

    ============================= ================================================================================
    single_row_rollout_share      rollouts with one row
    fan_out_1, _2, _3_4, ...      rollouts with that many rows, up to ``fan_out_33_up``
    group_source_NAME             1 for what formed the groups, else 0
    zero_variance_share           groups of equal rewards, among those of more than one counted rollout
    all_right_share, all_wrong_.. those at the largest and at the smallest reward of the batch (where all rewards of
                                  the batch are equal: right above 0, else wrong)
    effective_rollouts, _groups   those with a trained row whose advantage is not 0
    disagreeing_rollouts          whose rows do not have one reward
    unscored_rows, untrained_..   rows without a finite reward; counted rows, and rollouts, that train nothing
    row_reward_std, ..._gap       over rows instead of rollouts; the gap is row minus rollout
    extreme_share                 counted rollouts with an advantage beyond 3, which a clip there would cut
    weight/AGGREGATION_min, ...   smallest, largest and Gini coefficient of what a rollout weighs in the loss: 1 is an
                                  equal share (``relative_weights``)
    vs_BASELINE/...               trained rows whose advantage has the other sign under the baseline, their share, the
                                  mean and largest absolute change, and rows where it is not finite
    ============================= ================================================================================

    Everything is computed over columns, without a loop over rows. A value without anything to compute it from is left
    out.

    Args:
        result: Of ``normalize_rewards``.
        baseline: A name of ``miles_norm.audit.baselines``; None leaves the comparison out.

    Raises:
        SampleError: no result.
        MilesNormError: of the baseline; ``rows`` raises none.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0] * 4, rollout=[0, 0, 0, 1], reward=[0, 0, 0, 1], trainable_tokens=[2] * 4)
    >>> metrics = audit_metrics(normalize_columns(columns))
    >>> metrics["miles_norm/reward_mean"], metrics["miles_norm/reward_mean_gap"]
    (0.5, -0.25)
    >>> metrics["miles_norm/weight/sample_mean_max"], metrics["miles_norm/weight/rollout_mean_max"]
    (1.5, 1.0)
    """
    check_type("result", result, NormalizedRewards, "pass what normalize_rewards returned")
    values = result.metrics()
    parts = [_fan_out(result), _sources(result), _signal(result), _rewards(result, values), _weights(result)]
    values |= {PREFIX + name: float(value) for part in parts for name, value in part}
    if baseline is None:
        return values
    return values | comparison_metrics(compare_rows(result, baseline_advantages(result, baseline)), baseline)


_Values = Iterator[tuple[str, float]]


def _fan_out(result: NormalizedRewards) -> _Values:
    index, padding = result.index, result.columns.padding
    rollout = index.row_rollout if padding is None else index.row_rollout[~padding]
    fan_out = torch.bincount(rollout, minlength=index.num_rollouts)
    fan_out = fan_out[fan_out > 0]
    bounds = torch.tensor(_FAN_OUTS, device=fan_out.device)
    counts = torch.bincount(torch.bucketize(fan_out, bounds), minlength=len(_FAN_OUTS) + 1).tolist()
    if len(fan_out):
        yield "single_row_rollout_share", counts[0] / len(fan_out)
    low = 1
    for high, count in zip(_FAN_OUTS, counts, strict=False):
        yield f"fan_out_{low}" if low == high else f"fan_out_{low}_{high}", count
        low = high + 1
    yield f"fan_out_{low}_up", counts[-1]


def _sources(result: NormalizedRewards) -> _Values:
    source = result.index.group_source
    for name in _SOURCES:
        yield f"group_source_{name}", (source if source in _SOURCES else "group_key") == name


def _signal(result: NormalizedRewards) -> _Values:
    index, statistics, counted = result.index, result.statistics, result.counted_rollouts
    several = statistics.count > 1
    equal = several & statistics.equal
    if groups := int(several.sum()):
        low, high = float(statistics.minimum[several].min()), float(statistics.maximum[several].max())
        right = equal & (statistics.maximum == high) & (high > low or high > 0)
        wrong = equal & (statistics.minimum == low) & (high > low or high <= 0)
        for name, flag in (("zero_variance", equal), ("all_right", right), ("all_wrong", wrong)):
            yield f"{name}_share", int(flag.sum()) / groups
    moving = result.trained_rows & (result.advantages != 0)
    effective = any_row(moving, index)
    yield "effective_rollouts", int(effective.sum())
    yield "effective_groups", int((torch.bincount(index.rollout_group[effective]) > 0).sum())
    yield "disagreeing_rollouts", int(any_row(disagreeing_rows(result), index).sum())
    yield "unscored_rows", int(unscored_rows(result).sum())
    silent = ~result.trained_rows & counted[index.row_rollout]
    if result.columns.padding is not None:
        silent &= ~result.columns.padding
    yield "untrained_rows", int(silent.sum())
    yield "untrained_rollouts", int((counted & ~any_row(result.trained_rows, index)).sum())
    if bool(counted.any()):
        yield "extreme_share", float((result.rollout_advantages[counted].abs() > EXTREME).double().mean())


def _rewards(result: NormalizedRewards, values: dict[str, float]) -> _Values:
    own = result.rewards.row_values
    own = own[torch.isfinite(own) if result.columns.padding is None else torch.isfinite(own) & ~result.columns.padding]
    if not len(own):
        return
    std = float(own.std(correction=0))
    yield "row_reward_std", std
    if PREFIX + "reward_mean" in values:
        yield "reward_mean_gap", values[PREFIX + "row_reward_mean"] - values[PREFIX + "reward_mean"]
        yield "reward_std_gap", std - values[PREFIX + "reward_std"]


def relative_weights(result: NormalizedRewards, aggregation: str) -> Tensor:
    r"""What each rollout weighs in the loss, relative to an equal share among the rollouts that train something.

    .. math:: m_r = \sum_{n \in r} w_n L_n, \qquad m_r / \bar m

    A scale common to all rollouts, such as the divisor of ``rollout_mean`` or the constant of ``constant``, drops out.

    Returns:
        float64 ``[R]``; 0 for a rollout that trains nothing.
    """
    constant = {"max_tokens": 1} if aggregation == "constant" else {}
    mass = loss_weights(result, LossConfig(aggregation=aggregation, **constant)) * result.trainable_tokens  # type: ignore[arg-type]
    mass = mass.new_zeros(result.index.num_rollouts).index_add_(0, result.index.row_rollout, mass)
    trained = int((mass > 0).sum())
    return mass * (trained / float(mass.sum())) if trained else mass


def _weights(result: NormalizedRewards) -> _Values:
    for aggregation in AGGREGATIONS:
        weights = relative_weights(result, aggregation)
        weights = torch.sort(weights[weights > 0]).values
        n = len(weights)
        if n:
            # Mean absolute difference of all pairs over twice the mean, from the sorted values.
            rank = torch.arange(1, n + 1, dtype=torch.float64, device=weights.device)
            gini = float(((2 * rank - n - 1) * weights).sum() / (n * weights.sum()))
            yield f"weight/{aggregation}_min", float(weights[0])
            yield f"weight/{aggregation}_max", float(weights[-1])
            # What rounding leaves of equal weights is no inequality.
            yield f"weight/{aggregation}_gini", gini if gini > 1e-12 else 0.0


@dataclass(frozen=True, eq=False)
class Comparison:
    """Advantages of the rows against other ones."""

    ours: Tensor
    """float32 ``[N]``."""
    theirs: Tensor
    """float32 ``[N]``; NaN or infinite where the other rule gives that."""
    trained: Tensor
    """bool ``[N]``: rows of ours that train."""

    @cached_property
    def usable(self) -> Tensor:
        """bool ``[N]``: trained rows whose other advantage is finite."""
        return self.trained & torch.isfinite(self.theirs)

    @cached_property
    def change(self) -> Tensor:
        """float64 ``[N]``: ours minus theirs; 0 where that is not usable."""
        change = self.ours.double() - self.theirs.double()
        return torch.where(self.usable, change, 0.0)

    @cached_property
    def flips(self) -> Tensor:
        """bool ``[N]``: trained rows that one rule pushes up and the other down."""
        return self.usable & (self.ours * torch.sign(self.theirs) < 0)


def compare_rows(result: NormalizedRewards, theirs: Tensor) -> Comparison:
    """Compare the advantages of a result with others ``[N]`` of the same rows."""
    return Comparison(result.advantages, theirs, result.trained_rows)


def comparison_metrics(rows: Comparison, baseline: str) -> dict[str, float]:
    """The metrics ``vs_BASELINE/...`` of ``audit_metrics``."""
    lost, usable, flips = int((rows.trained & ~rows.usable).sum()), int(rows.usable.sum()), int(rows.flips.sum())
    values: dict[str, float] = {"nonfinite_rows": lost}
    if usable:
        values |= {
            "sign_flips": flips,
            "sign_flip_share": flips / usable,
            "mean_abs_change": float(rows.change.abs().sum()) / usable,
            "max_abs_change": float(rows.change.abs().max()),
        }
    return {f"{PREFIX}vs_{baseline}/{name}": float(value) for name, value in values.items()}
