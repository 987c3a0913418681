"""Settings of a stream of rollouts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from miles_norm.config.base import Config, refuse_contradictions

__all__ = ["StreamConfig"]


class StreamConfig(Config):
    """What happens to prompt groups that do not come in one piece.

    >>> StreamConfig(incomplete_groups="drop").late_rollouts
    'error'
    """

    incomplete_groups: Literal["carry", "normalize", "drop"] = "carry"
    """Groups with fewer than `n_samples_per_prompt` rollouts at the end of a step: they wait for the
    rest, are normalized over the rollouts they have, or are dropped and listed."""

    late_rollouts: Literal["error", "drop"] = "error"
    """Rollouts of a group that was handed out or dropped before: an error, or they are dropped and
    listed. They never change what their siblings were trained on."""

    remembered_steps: int = Field(default=1, ge=0, lt=2**31)
    """For how many further steps late rollouts of a group are recognized; after that, its id names a
    new group."""

    batch_stage: Literal["refuse", "buffer"] = "refuse"
    """Settings that need the whole batch, whitening and `gdpo`: refused, or all groups are held back
    until the end of the step and normalized together."""

    max_open_groups: int | None = Field(default=None, ge=1, lt=2**31)
    """When more groups than this wait for rollouts, `incomplete_groups` is applied to the oldest;
    unset: any number may wait."""

    @model_validator(mode="after")
    def _reject_contradictions(self) -> Self:
        refuse_contradictions("StreamConfig", [
            (
                self.max_open_groups is not None and self.incomplete_groups == "carry",
                f"max_open_groups={self.max_open_groups} with incomplete_groups='carry'",
                "a group that is carried stays open, so that nothing would bound their number",
                "set incomplete_groups to 'normalize' or 'drop', or leave max_open_groups unset",
            ),
            (
                self.max_open_groups is not None and self.batch_stage == "buffer",
                f"max_open_groups={self.max_open_groups} with batch_stage='buffer'",
                "all groups are held back until the end of the step",
                "leave max_open_groups unset",
            ),
        ])  # fmt: skip
        return self
