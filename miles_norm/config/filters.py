"""Settings of the filters between normalization and loss."""

from __future__ import annotations

from miles_norm.config.base import Config

__all__ = ["FilterConfig"]


class FilterConfig(Config):
    """Which rollouts are kept from the loss after their advantages are known. All are off by default.

    >>> FilterConfig(zero_variance_groups=True).truncated_rollouts
    False
    """

    zero_variance_groups: bool = False
    """Drop groups whose counted rewards are all equal, or that have a single counted rollout: their
    advantages are 0, and they only dilute the denominators."""

    truncated_rollouts: bool = False
    """Drop rollouts with a row that ended by length."""

    unscored_groups: bool = False
    """Drop every rollout of a group in which a rollout is unscored."""

    incomplete_groups: bool = False
    """Drop every rollout of a group with fewer rollouts than `n_samples_per_prompt`."""
