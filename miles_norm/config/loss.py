"""Settings of the loss side: weights and updates."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from miles_norm.config.base import Config, refuse_contradictions

__all__ = ["LossConfig", "UpdateConfig"]


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

    nominal_rollouts: int | None = Field(default=None, ge=1, lt=2**31)
    """The divisor of `divisor: nominal_rollouts`, whatever an update holds."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
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


class UpdateConfig(Config):
    """How a batch is cut into optimizer steps.

    >>> UpdateConfig(rollouts_per_update=8).leftover
    'smaller_update'
    """

    unit: Literal["rollouts", "rows"] = "rollouts"
    """What an update is filled with: whole rollouts, or rows as verl and Agent Lightning do."""

    rollouts_per_update: int | None = Field(default=None, ge=1, lt=2**31)
    """`unit: rollouts`: rollouts in an update; unset: all of them in one."""

    leftover: Literal["smaller_update", "drop", "carry"] = "smaller_update"
    """`unit: rollouts`: what does not fill an update is a smaller last one, is dropped, or is handed
    over to the next batch with its advantages."""

    rows_per_update: int | None = Field(default=None, ge=1, lt=2**31)
    """`unit: rows`: rows in an update; the batch is cut down to a multiple of it."""

    max_updates: int | None = Field(default=None, ge=1, lt=2**31)
    """`unit: rows`: at most this many updates (Agent Lightning's max_ppo_update_times)."""

    order: Literal["normalize_first", "drop_first"] = "normalize_first"
    """`unit: rows`: advantages of everything collected, or of the rows that are left."""

    seed: int = 0
    """`unit: rows`: of the draw of the rows that are dropped."""

    max_tokens_per_gpu: int | None = Field(default=None, ge=1, lt=2**31)
    """Tokens in a micro-batch; unset: an update is one micro-batch."""

    @model_validator(mode="after")
    def _reject_contradictions(self) -> Self:
        rows = self.unit == "rows"
        only_rows = "is read by unit='rows' only"
        checks = [
            (
                rows and self.rows_per_update is None,
                "unit='rows' without rows_per_update",
                "the batch is cut down to a multiple of it",
                "set rows_per_update",
            ),
            (
                rows and (self.rollouts_per_update is not None or self.leftover != "smaller_update"),
                "unit='rows' with rollouts_per_update or leftover",
                "these are read by unit='rollouts' only",
                "leave them unset",
            ),
            *(
                (not rows and set_, f"{name} with unit='rollouts'", f"{name} {only_rows}", f"leave {name} unset")
                for name, set_ in (
                    ("rows_per_update", self.rows_per_update is not None),
                    ("max_updates", self.max_updates is not None),
                    ("order", self.order != "normalize_first"),
                    ("seed", self.seed != 0),
                )
            ),
            (
                self.leftover != "smaller_update" and self.rollouts_per_update is None,
                f"leftover={self.leftover!r} without rollouts_per_update",
                "one update of all rollouts leaves nothing over",
                "set rollouts_per_update",
            ),
        ]
        refuse_contradictions("UpdateConfig", checks)
        return self
