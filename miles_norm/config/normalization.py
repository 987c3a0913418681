"""Settings of the reward side."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from miles_norm.config.base import Config, refuse_contradictions

__all__ = ["PASS_THROUGH_ESTIMATORS", "AdvantageEstimator", "EstimatorOptions", "NormalizationConfig"]

AdvantageEstimator = Literal[
    "grpo",
    "gspo",
    "dr_grpo",
    "rloo",
    "opo",
    "maxrl",
    "pass_at_k",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "ppo",
    "reinforce_plus_plus",
]
PASS_THROUGH_ESTIMATORS: Final = frozenset({"ppo", "reinforce_plus_plus"})
"""Estimators that leave rewards to the trainer: rows keep their own."""

RolloutRewardPolicy = Literal["mainstream", "shared", "first", "last", "max", "mean", "sum"]

_PRINTED = "`miles-norm config` prints every field with its values"


class EstimatorOptions(Config):
    """Settings that one estimator alone reads, and the batch stage that may follow any of them."""

    _reference: ClassVar[str] = _PRINTED

    pass_at_k: Literal["topk_gap", "analytic"] = "topk_gap"
    """`pass_at_k`: the best rollout gets its lead over the second, or the average over all draws of k."""

    k: int | None = Field(default=None, ge=1, lt=2**31)
    """`pass_at_k: analytic`: how many rollouts are drawn."""

    gdpo_components: tuple[str, ...] = Field(default=(), strict=False)
    """`gdpo`: the entries of each reward dict that are normalized on their own."""

    gdpo_weights: tuple[float, ...] = Field(default=(), strict=False)
    """`gdpo`: the weight of each component; empty: 1 each."""

    gdpo_partial: bool = False
    """`gdpo`: rewards may lack components; a component that is lacking adds nothing."""

    whitening: Literal["none", "rollout", "token"] = "none"
    """Divide all advantages by their standard deviation over the batch, each rollout weighing 1 or as
    much as it has trainable tokens."""

    whitening_shift: bool = False
    """Subtract the batch mean before that division."""

    @property
    def component_weights(self) -> dict[str, float]:
        """Each component of `gdpo` with its weight."""
        return dict(zip(self.gdpo_components, self.gdpo_weights or (1.0,) * len(self.gdpo_components), strict=True))

    @model_validator(mode="after")
    def _reject_contradictions(self) -> Self:
        components, weights = self.gdpo_components, self.gdpo_weights
        checks = [
            (
                (self.pass_at_k == "analytic") != (self.k is not None),
                f"pass_at_k={self.pass_at_k!r} with k={self.k}",
                "k is the number of draws of the analytic kind, and of no other",
                "set both pass_at_k='analytic' and k, or neither",
            ),
            (
                len(set(components)) < len(components),
                f"gdpo_components={components}",
                "a component that is named twice would count twice",
                "name each once and give it a larger weight",
            ),
            (
                bool(weights) and len(weights) != len(components),
                f"{len(weights)} gdpo_weights for {len(components)} gdpo_components",
                "each component has one weight",
                "give one weight per component, or none for 1 each",
            ),
            (
                self.whitening_shift and self.whitening == "none",
                "whitening_shift=True with whitening='none'",
                "the mean is subtracted before the division",
                "set whitening to 'rollout' or 'token', or leave the shift off",
            ),
        ]
        refuse_contradictions("EstimatorOptions", checks)
        return self


class NormalizationConfig(Config):
    """How rewards become advantages. The defaults are those of Miles, except where ``docs/semantics.md`` says so.

    >>> NormalizationConfig(advantage_estimator="rloo").rollout_reward
    'mainstream'
    >>> NormalizationConfig(advantage_estimater="rloo")
    Traceback (most recent call last):
    miles_norm.errors.ConfigError: NormalizationConfig
      got:      advantage_estimater='rloo'
      expected: advantage_estimater: no such field (did you mean 'advantage_estimator'?)
      reason:   a setting that is not understood would change the training signal in silence
      remedy:   correct or remove what is named above; `miles-norm config` prints every field with its values
    """

    _reference: ClassVar[str] = _PRINTED

    advantage_estimator: AdvantageEstimator = "grpo"
    """Which formula turns the rewards of a prompt group into advantages; `ppo` and
    `reinforce_plus_plus` pass rewards through."""

    rewards_normalization: bool = True
    """False: every row keeps its own reward, whatever the estimator (Miles flag)."""

    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation; read by `grpo` and `gspo` only (Miles flag)."""

    std_ddof: Literal[0, 1] = 1
    """1: sample standard deviation (divides by n - 1); 0: population."""

    std_epsilon: float = Field(default=1e-6, ge=0.0)
    """Added to the standard deviation, after the root."""

    zero_std_tolerance: float = Field(default=0.0, ge=0.0, lt=1.0)
    """A group whose rewards range over no more than this share of its largest absolute reward counts
    as all equal: advantages are exactly 0."""

    singleton: Literal["zero", "raw", "error"] = "zero"
    """A group with one counted rollout: advantage 0, its raw reward, or an error."""

    rollout_reward: RolloutRewardPolicy = "mainstream"
    """Which reward speaks for a rollout: that of the sibling with the most trainable tokens, one that
    all siblings share, the first, the last, or the max, mean or sum."""

    shared_reward_tolerance: float = Field(default=0.0, ge=0.0, lt=1.0)
    """How far siblings may differ under `rollout_reward: shared`, relative to the largest absolute
    reward among them."""

    reward_key: str | None = None
    """The entry to take when rewards are dicts (Miles flag)."""

    missing_reward: Literal["error", "exclude", "zero"] = "error"
    """A reward that is None, NaN or infinite: an error; the row cannot speak for its rollout; or it
    counts as 0."""

    untrained_rollouts: Literal["include", "exclude"] = "include"
    """Whether a rollout without a trainable token (removed or fully masked) enters the statistics and
    denominators (Miles: include)."""

    truncated_rollouts: Literal["include", "untrain"] = "include"
    """`untrain`: none of the tokens of a rollout with a truncated row is trained. It keeps its place in
    the statistics unless `untrained_rollouts` is `exclude`."""

    zero_variance_groups: Literal["keep", "drop_from_loss"] = "keep"
    """`drop_from_loss`: rollouts of a group whose rewards are all equal are not trained and enter no
    denominator."""

    min_group_size: int = Field(default=1, ge=1, lt=2**31)
    """Groups with fewer counted rollouts are excluded."""

    group_key: str = Field(default="group_index", min_length=1)
    """The sample field, or the key in its metadata, that names the prompt group."""

    group_fallback: Literal["single_group", "error"] = "single_group"
    """Without sizes, nesting and `group_key`: guess (fixed fan-out, else one group) with a warning, or
    refuse."""

    coerce_numeric_strings: bool = False
    """Read a reward such as "0.5" as a number instead of refusing it."""

    n_samples_per_prompt: int | None = Field(default=None, ge=1, lt=2**31)
    """Rollouts per prompt group; used for the fixed fan-out and to report incomplete groups (Miles
    flag)."""

    rollout_batch_size: int | None = Field(default=None, ge=1, lt=2**31)
    """Prompt groups per batch; used for the fixed fan-out (Miles flag)."""

    device: str | None = None
    """Where to compute, such as `cpu` or `cuda:0`; unset: where the columns are."""

    options: EstimatorOptions = EstimatorOptions()
    """What single estimators read: kinds of pass@k, components of GDPO; and whitening over the batch."""

    @property
    def normalizes_groups(self) -> bool:
        """Whether advantages are computed per prompt group at all."""
        return self.rewards_normalization and self.advantage_estimator not in PASS_THROUGH_ESTIMATORS

    @model_validator(mode="after")
    def _reject_contradictions(self) -> Self:
        passes = "rewards_normalization=False" if not self.rewards_normalization else f"{self.advantage_estimator!r}"
        n, least = self.n_samples_per_prompt, self.min_group_size
        checks = [
            (
                self.shared_reward_tolerance > 0 and self.rollout_reward != "shared",
                f"shared_reward_tolerance={self.shared_reward_tolerance} with rollout_reward={self.rollout_reward!r}",
                "the tolerance is read under rollout_reward='shared' only",
                "set rollout_reward='shared' or leave the tolerance at 0",
            ),
            (
                self.singleton != "zero" and not self.normalizes_groups,
                f"singleton={self.singleton!r} with {passes}",
                "rows keep their own rewards, so no group of one is ever normalized",
                "leave singleton at 'zero' or choose an estimator with a baseline",
            ),
            (
                self.singleton != "zero" and least > 1,
                f"singleton={self.singleton!r} with min_group_size={least}",
                "groups of one are excluded before the singleton rule is reached",
                "set min_group_size=1 or leave singleton at 'zero'",
            ),
            (
                n is not None and least > n,
                f"min_group_size={least} with n_samples_per_prompt={n}",
                "no prompt group can have that many rollouts, so every group would be excluded",
                "lower min_group_size to at most n_samples_per_prompt",
            ),
            *self._contradictions_of_options(),
        ]
        refuse_contradictions("NormalizationConfig", checks)
        return self

    def _contradictions_of_options(self) -> list[tuple[bool, str, str, str]]:
        options, estimator = self.options, self.advantage_estimator
        gdpo, choosing = estimator == "gdpo", ("mainstream", "shared", "first", "last")
        return [
            (
                options.pass_at_k == "analytic" and estimator != "pass_at_k",
                f"options.pass_at_k='analytic' with advantage_estimator={estimator!r}",
                "the kind and k are read by 'pass_at_k' only",
                "set advantage_estimator='pass_at_k' or leave the options unset",
            ),
            (
                bool(options.gdpo_components) != gdpo,
                f"options.gdpo_components={options.gdpo_components} with advantage_estimator={estimator!r}",
                "'gdpo' normalizes each component, and no other estimator reads them",
                "name the components together with advantage_estimator='gdpo'",
            ),
            (
                gdpo and self.reward_key is not None,
                f"reward_key={self.reward_key!r} with advantage_estimator='gdpo'",
                "the components take the place of a single entry",
                "leave reward_key unset",
            ),
            (
                gdpo and self.shared_reward_tolerance > 0,
                f"shared_reward_tolerance={self.shared_reward_tolerance} with advantage_estimator='gdpo'",
                "all components of a rollout are those of one row, and siblings that differ are not one",
                "leave the tolerance at 0, or choose rollout_reward='mainstream'",
            ),
            (
                gdpo and self.rollout_reward not in choosing,
                f"rollout_reward={self.rollout_reward!r} with advantage_estimator='gdpo'",
                "all components of a rollout are those of one row",
                f"choose one of {', '.join(choosing)}",
            ),
            (
                options.whitening != "none" and not self.normalizes_groups,
                f"options.whitening={options.whitening!r} where rows keep their own rewards",
                "there are no advantages to bring to one scale",
                "leave whitening at 'none' or choose an estimator with a baseline",
            ),
        ]
