"""What an update weighs."""

from __future__ import annotations

from torch import Tensor

from miles_norm.config import LossConfig
from miles_norm.loss.checks import check_type
from miles_norm.loss.plan import UpdatePlan
from miles_norm.loss.weights import loss_weights

__all__ = ["update_masses"]


def update_masses(plan: UpdatePlan, config: LossConfig | None = None) -> Tensor:
    r"""Loss of every update when each token loss is 1: its mass.

    .. math:: M_u = \sum_{n \in u} w_n L_n

    The sum over the updates is the mass of the epoch. Each adapter is stepped on its own, so with several of them an
    update has the mass of all.

    Args:
        plan: Of ``plan_updates``.
        config: Defaults to ``LossConfig()``.

    Returns:
        float64 ``[U]``, one per update.

    Raises:
        SampleError: no plan.
        ConfigError: no ``LossConfig``.

    >>> from miles_norm import RolloutColumns, UpdateConfig, normalize_columns, plan_updates
    >>> columns = RolloutColumns(group=[0] * 3, rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 4, 2])
    >>> plan = plan_updates(normalize_columns(columns), UpdateConfig(rollouts_per_update=1))
    >>> update_masses(plan).tolist(), update_masses(plan, LossConfig(divisor="trained_rows")).tolist()
    ([1.0, 1.0], [0.5, 1.0])
    """
    check_type("plan", plan, UpdatePlan, "pass what plan_updates returned")
    result = plan.result
    mass = loss_weights(result, config, plan) * result.trainable_tokens
    # Rows in no update weigh 0, so any update does for them.
    return (
        mass.new_zeros(plan.num_updates).index_add_(0, plan.row_update.clamp(min=0), mass)
        if plan.num_updates
        else mass[:0]
    )
