"""The batch of the tests of update plans."""

from typing import Any

from miles_norm import NormalizationConfig, RolloutColumns, UpdateConfig, normalize_columns, plan_updates
from miles_norm.loss import UpdatePlan
from miles_norm.result import NormalizedRewards

# Five rollouts on eight rows; rows of rollout 0 are not adjacent. Group 0 has rollouts 0 and 1, group 1 the others.
ROLLOUTS = [0, 1, 1, 0, 2, 3, 4, 4]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 0.0]


def batch(config: NormalizationConfig | None = None, **columns: Any) -> NormalizedRewards:
    given = {"group": GROUPS, "rollout": ROLLOUTS, "reward": REWARDS, "trainable_tokens": [10] * 8}
    return normalize_columns(RolloutColumns(**(given | columns)), config or NormalizationConfig())


def plan(result: NormalizedRewards | None = None, **settings: Any) -> UpdatePlan:
    return plan_updates(result or batch(), UpdateConfig(**settings))
