"""Settings of the loss side."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from miles_norm.config.base import Config, refuse_contradictions

__all__ = ["LossConfig"]


class LossConfig(Config):
    """How token losses become one number: the weight that each row's tokens get.

    >>> LossConfig(aggregation="constant")
    Traceback (most recent call last):
    miles_norm.errors.ConfigError: LossConfig
      got:      aggregation='constant' without max_tokens
      expected: settings that agree
      reason:   the constant must not depend on the batch, so it cannot be read off the longest row
      remedy:   set max_tokens to the longest rollout that may be sampled
    """

    aggregation: Literal["token_mean", "sample_mean", "rollout_mean", "rollout_row_mean", "prompt_mean", "constant"] = (
        "rollout_mean"
    )
    """What the loss is a mean over: all tokens, rows, rollouts, the rows of each rollout and then
    rollouts, prompt groups, or nothing but a constant."""

    divisor: Literal["rollouts", "trained_rows", "nominal_rollouts"] = "rollouts"
    """What `rollout_mean` divides by: counted rollouts, rows with a trainable token (what Agent
    Lightning computes), or the fixed number `nominal_rollouts`."""

    count_empty_rollouts: bool = True
    """Whether a counted rollout without a trainable token is in the number of rollouts."""

    count_empty_rows: bool = False
    """Whether a counted row without a trainable token is in the number of rows."""

    nominal_rollouts: int | None = Field(default=None, ge=1)
    """The divisor of `divisor: nominal_rollouts`, whatever an update holds."""

    max_tokens: int | None = Field(default=None, ge=1)
    """The divisor of `aggregation: constant`: the longest rollout that may be sampled."""

    scope: Literal["update", "batch"] = "update"
    """With an update plan: whether denominators count one update or all that the plan keeps."""

    @model_validator(mode="after")
    def _reject_contradictions(self) -> Self:
        nominal = self.divisor == "nominal_rollouts"
        checks = [
            (
                self.aggregation == "constant" and self.max_tokens is None,
                "aggregation='constant' without max_tokens",
                "the constant must not depend on the batch, so it cannot be read off the longest row",
                "set max_tokens to the longest rollout that may be sampled",
            ),
            (
                self.aggregation != "constant" and self.max_tokens is not None,
                f"max_tokens={self.max_tokens} with aggregation={self.aggregation!r}",
                "it is read by aggregation='constant' only",
                "leave max_tokens unset",
            ),
            (
                nominal and self.nominal_rollouts is None,
                "divisor='nominal_rollouts' without nominal_rollouts",
                "the number is not derived from the batch",
                "set nominal_rollouts to the rollouts of a full update",
            ),
            (
                not nominal and self.nominal_rollouts is not None,
                f"nominal_rollouts={self.nominal_rollouts} with divisor={self.divisor!r}",
                "it is read by divisor='nominal_rollouts' only",
                "leave nominal_rollouts unset",
            ),
            (
                self.divisor != "rollouts" and self.aggregation != "rollout_mean",
                f"divisor={self.divisor!r} with aggregation={self.aggregation!r}",
                "the divisor is read by aggregation='rollout_mean' only",
                "leave divisor at 'rollouts'",
            ),
        ]
        refuse_contradictions("LossConfig", checks)
        return self
