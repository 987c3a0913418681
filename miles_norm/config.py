"""Settings of the normalizer: frozen models that reject what does not fit and never rewrite it.

This module imports neither torch nor any optional package, so that a launcher can check a config on a login node.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from miles_norm.errors import ConfigError, MissingDependencyError

__all__ = ["PASS_THROUGH_ESTIMATORS", "AdvantageEstimator", "LossConfig", "NormalizationConfig", "parse_yaml"]

AdvantageEstimator = Literal[
    "grpo", "gspo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "ppo", "reinforce_plus_plus"
]
PASS_THROUGH_ESTIMATORS: Final = frozenset({"ppo", "reinforce_plus_plus"})
"""Estimators that leave rewards to the trainer: rows keep their own."""

RolloutRewardPolicy = Literal["mainstream", "shared", "first", "last", "max", "mean", "sum"]


class _Config(BaseModel):
    """What all config models share: frozen, strict types, no unknown field, errors of our own tree,
    YAML in and out."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self), error) from None

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """Read a YAML file (a path) with one mapping of field names to values.

        Raises:
            ConfigError: no such file, no valid YAML, no mapping, a key twice, an unknown field, a wrong value.
            MissingDependencyError: PyYAML is not installed.
        """
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"config file {source}",
                got=str(error),
                expected="a readable YAML file in UTF-8",
                reason="settings come from nowhere else",
                remedy="check the path",
            ) from None
        data = parse_yaml(text, str(source))
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"config file {source}",
                got=type(data).__name__ if data is not None else "an empty file",
                expected="one mapping of field names to values",
                reason="every setting has a name",
                remedy=f"write lines such as 'advantage_estimator: grpo'; fields: {', '.join(cls.model_fields)}",
            )
        return cls(**{str(key): value for key, value in data.items()})

    def to_yaml(self, *, comments: bool = False) -> str:
        """All fields with their values, defaults included; ``from_yaml`` reads it back to an equal model.

        With ``comments`` each field's documentation stands above it.
        """
        yaml = _yaml()

        class Dumper(yaml.SafeDumper):  # type: ignore[name-defined,misc]
            """Quotes the strings that our loader would read as numbers."""

        Dumper.add_implicit_resolver(*_EXPONENT_FLOAT)
        lines = []
        for name, field in type(self).model_fields.items():
            if comments and field.description:
                lines += [f"# {line}".rstrip() for line in field.description.splitlines()]
            entry = yaml.dump({name: getattr(self, name)}, Dumper=Dumper, width=10**6)
            lines.append(entry.rstrip("\n"))
        return "\n".join(lines) + "\n"


class NormalizationConfig(_Config):
    """How rewards become advantages. The defaults are those of Miles, except where ``docs/semantics.md`` says so.

    >>> NormalizationConfig(advantage_estimator="rloo").rollout_reward
    'mainstream'
    >>> NormalizationConfig(advantage_estimater="rloo")
    Traceback (most recent call last):
    miles_norm.errors.ConfigError: NormalizationConfig
      got:      advantage_estimater='rloo'
      expected: advantage_estimater: no such field (did you mean 'advantage_estimator'?)
      reason:   a setting that is not understood would change the training signal in silence
      remedy:   mend it; `miles-norm config` prints every field with its meaning
    """

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
    """`untrain`: a rollout with a truncated row keeps its place in the statistics, but none of its
    tokens is trained."""

    zero_variance_groups: Literal["keep", "drop_from_loss"] = "keep"
    """`drop_from_loss`: rollouts of a group whose rewards are all equal are not trained and enter no
    denominator."""

    min_group_size: int = Field(default=1, ge=1)
    """Groups with fewer counted rollouts are excluded."""

    group_key: str = Field(default="group_index", min_length=1)
    """The sample field, or the key in its metadata, that names the prompt group."""

    group_fallback: Literal["single_group", "error"] = "single_group"
    """Without sizes, nesting and `group_key`: guess (fixed fan-out, else one group) with a warning, or
    refuse."""

    coerce_numeric_strings: bool = False
    """Read a reward such as "0.5" as a number instead of refusing it."""

    n_samples_per_prompt: int | None = Field(default=None, ge=1)
    """Rollouts per prompt group; used for the fixed fan-out and to report incomplete groups (Miles
    flag)."""

    rollout_batch_size: int | None = Field(default=None, ge=1)
    """Prompt groups per batch; used for the fixed fan-out (Miles flag)."""

    device: str | None = None
    """Where to compute, such as `cpu` or `cuda:0`; unset: where the columns are."""

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
        ]
        _refuse_contradictions("NormalizationConfig", checks)
        return self


class LossConfig(_Config):
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
        _refuse_contradictions("LossConfig", checks)
        return self


def _refuse_contradictions(model: str, checks: list[tuple[bool, str, str, str]]) -> None:
    for contradicts, got, reason, remedy in checks:
        if contradicts:
            raise ConfigError(model, got=got, expected="settings that agree", reason=reason, remedy=remedy)


# YAML 1.1, which PyYAML follows, reads 1e-6 as a string; YAML 1.2 and everybody's eyes read a number.
_EXPONENT_FLOAT: Final = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)

ESTIMATORS: Final[tuple[str, ...]] = get_args(AdvantageEstimator)


def _config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    problems = error.errors(include_url=False)
    for problem in problems:
        inner = problem.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            return inner
    got, expected = [], []
    for problem in problems:
        name = ".".join(str(part) for part in problem["loc"])
        got.append(f"{name}={problem['input']!r}")
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, model.model_fields, n=1)
            message = "no such field" + (f" (did you mean {close[0]!r}?)" if close else "")
        expected.append(f"{name}: {message}")
    return ConfigError(
        model.__name__,
        got=", ".join(got),
        expected="; ".join(expected),
        reason="a setting that is not understood would change the training signal in silence",
        remedy="mend it; `miles-norm config` prints every field with its meaning",
    )


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML without constructing objects; ``1e-6`` is a number, and a key given twice is an error.

    Raises:
        ConfigError: ``text`` is no valid YAML; the message names ``name`` and the line.

    >>> parse_yaml("std_epsilon: 1e-6", "example")
    {'std_epsilon': 1e-06}
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined,misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            twice = sorted({str(key) for key in keys if keys.count(key) > 1})
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"keys given twice: {', '.join(twice)}", node.start_mark
                )
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    Loader.add_implicit_resolver(*_EXPONENT_FLOAT)
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"YAML in {name}",
            got=" ".join(str(error).split()) or type(error).__name__,
            expected="valid YAML",
            reason="settings are not guessed from broken text",
            remedy="mend the named line",
        ) from None


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependencyError(
            "YAML configs",
            got="no package 'yaml'",
            expected="PyYAML",
            reason="the core has no YAML parser of its own",
            remedy="pip install 'miles-norm[yaml]'",
        ) from None
    return yaml
