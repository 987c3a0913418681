"""A slow NumPy second opinion on the rarer estimators: written from what they mean, not from their closed forms.

Each function takes the counted rollouts of one group (or of the batch) and shares no code with the library.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Component = Sequence[float | None]


def opo(rewards: Sequence[float], tokens: Sequence[int]) -> Values:
    """The reward of the average token is the baseline, of the average rollout where there is no token."""
    every_token = np.repeat(rewards, tokens)
    return np.asarray(rewards) - np.mean(every_token if len(every_token) else rewards)


def maxrl(rewards: Sequence[float]) -> Values:
    values = np.asarray(rewards)
    return np.zeros(len(values)) if not values.any() else (values - values.mean()) / values.mean()


def topk_gap(rewards: Sequence[float]) -> Values:
    """What the maximum of the group loses when a rollout is left out."""
    left_out = [max([*rewards[:i], *rewards[i + 1 :]], default=rewards[i]) for i in range(len(rewards))]
    return np.max(rewards) - np.array(left_out)


def analytic_pass_at_k(rewards: Sequence[float], k: int) -> Values:
    """Every draw of k rollouts is a group whose reward is its best; a rollout averages over the draws that hold it."""
    draws = list(itertools.combinations(range(len(rewards)), k))
    best = np.array([max(rewards[i] for i in draw) for draw in draws])
    if best.min() == best.max():
        return np.zeros(len(rewards))
    of_draw = (best - best.mean()) / best.std()
    return np.array(
        [np.mean([a for a, draw in zip(of_draw, draws, strict=True) if i in draw]) for i in range(len(rewards))]
    )


def equal(values: Sequence[float], tolerance: float) -> bool:
    return not len(values) or np.ptp(values) <= np.max(np.abs(values)) * tolerance


def gdpo_sums(components: Sequence[tuple[float, Component]], ddof: int, epsilon: float, tolerance: float) -> Values:
    """Sum over (weight, values) of the z-scores among the rollouts that have the component, before the batch stage."""
    total = np.zeros(len(components[0][1]))
    for weight, values in components:
        present = [value for value in values if value is not None]
        if not equal(present, tolerance):
            z = [0.0 if v is None else (v - np.mean(present)) / (np.std(present, ddof=ddof) + epsilon) for v in values]
            total += weight * np.array(z)
    return total


def whiten(values: Values, weights: Sequence[int], shift: bool, ddof: int, epsilon: float) -> Values:
    """Over as many copies of each value as it weighs; unchanged where all are equal up to rounding."""
    weighing = values[np.asarray(weights) > 0]
    if len(weighing) < 2 or equal(weighing, 1e-12):
        return values
    copies = np.repeat(values, weights)
    return (values - copies.mean() if shift else values) / (np.std(copies, ddof=ddof) + epsilon)
