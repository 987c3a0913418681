"""The settings of Miles' and slime's hooks: the trainer's flags, and a file beside them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.errors import ConfigError, shown

__all__ = [
    "CONFIG_VARIABLE",
    "FLAGS",
    "LOSS_CONFIG_VARIABLE",
    "loss_settings",
    "normalization_settings",
    "trainer_flags",
]

CONFIG_VARIABLE: Final = "MILES_NORM_CONFIG"
"""Environment variable that names a YAML file of ``NormalizationConfig``."""

LOSS_CONFIG_VARIABLE: Final = "MILES_NORM_LOSS_CONFIG"
"""Environment variable that names a YAML file of ``LossConfig``, for ``pg_loss_reducer``."""

FLAGS: Final = {
    "advantage_estimator": "--advantage-estimator",
    "rewards_normalization": "--disable-rewards-normalization",
    "grpo_std_normalization": "--disable-grpo-std-normalization",
    "reward_key": "--reward-key",
    "n_samples_per_prompt": "--n-samples-per-prompt",
    "rollout_batch_size": "--rollout-batch-size",
}
"""The settings that the trainer has too, under the same names in ``args``, and the flag of each."""

_AS_GRPO: Final = {"cispo": "grpo"}
"""Losses that slime's --advantage-estimator names, and the estimator of their advantages. Miles' flag has none."""

_TAKES_REWARDS: Final = ("grpo", "gspo", "cispo")
"""Values of --advantage-estimator under which the trainer gives each row's reward to its tokens, unchanged."""

_OF_THE_TRAINER: Final = ("grpo", "gspo", "reinforce_plus_plus_baseline", "ppo", "reinforce_plus_plus")
"""Estimators that the trainer goes by as well: for the loss, for token-level KL, for a critic."""

logger = logging.getLogger("miles_norm")


def normalization_settings(args: Any) -> NormalizationConfig:
    """The settings that ``args`` and the file of ``MILES_NORM_CONFIG`` give together.

    Flags that ``args`` lacks take the defaults of ``NormalizationConfig``; without any of them there is a warning. The
    file may set whatever is no flag. An estimator that the trainer has no flag for (``rloo``, ``opo``, ...) goes with
    ``--advantage-estimator`` grpo or gspo, and with slime's cispo, under which the trainer takes the rewards as they
    come.

    Raises:
        ConfigError: a flag that is neither text nor a number nor a switch; the file and the flags give different
            values, all of them named; whitening; a setting that ``NormalizationConfig`` refuses; a file that cannot be
            read.
    """
    flags = _flags(args)
    path = os.environ.get(CONFIG_VARIABLE)
    file = NormalizationConfig.read_yaml(path) if path else {}
    _refuse_conflicts(flags, file, path)
    if (named := flags.get("advantage_estimator")) in _AS_GRPO:
        flags["advantage_estimator"] = _AS_GRPO[named]
    config = NormalizationConfig(**{**flags, **file})
    if config.options.whitening != "none":
        raise ConfigError(
            f"options.whitening in {path}",
            got=repr(config.options.whitening),
            expected="'none'",
            reason="the trainer whitens over the batch itself, over all ranks and with the masks it trains with",
            remedy="leave whitening at none, and give the trainer --normalize-advantages",
        )
    return config


def loss_settings() -> LossConfig:
    """The settings in the file of ``MILES_NORM_LOSS_CONFIG``.

    Raises:
        ConfigError: the variable is not set, or a setting or the file is wrong.
    """
    path = os.environ.get(LOSS_CONFIG_VARIABLE)
    if not path:
        raise ConfigError(
            LOSS_CONFIG_VARIABLE,
            got="no such environment variable",
            expected="the path of a YAML file of LossConfig",
            reason="the trainer hands no settings to a reducer",
            remedy="write 'aggregation: constant' and 'max_tokens: ...' into a file, and name it in the environment of "
            "every worker",
        )
    return LossConfig.from_yaml(path)


def trainer_flags(args: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Those of the flags that ``args`` has; None and an empty text are no value.

    Args:
        args: The trainer's.
        names: The flag of each attribute, for the message.

    Raises:
        ConfigError: values that no command line gives, such as lists; all of them are named.
    """
    flags = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    odd = [name for name, value in flags.items() if not isinstance(value, str | bool | int | float)]
    if odd:
        raise ConfigError(
            f"args.{', args.'.join(odd)}",
            got=", ".join(f"{shown(flags[name])} for {names[name]}" for name in odd),
            expected="what the trainer's own command line gives: a text, a number or a switch",
            reason="the advantages have to follow the flags that the trainer follows",
            remedy="pass the trainer's own args",
        )
    return {name: value for name, value in flags.items() if value != ""}


def _flags(args: Any) -> dict[str, Any]:
    present = trainer_flags(args, FLAGS)
    if not present:
        logger.warning(
            "args has none of the flags %s, so every setting has its default (%r); pass the trainer's own args",
            ", ".join(FLAGS.values()),
            NormalizationConfig().advantage_estimator,
        )
    return present


def _refuse_conflicts(flags: dict[str, Any], file: dict[str, Any], path: str | None) -> None:
    conflicts = [
        f"{name} is {file[name]!r} in the file and {flag!r} by {FLAGS[name]}"
        for name, flag in flags.items()
        if name in file and not _agree(name, file[name], flag)
    ]
    if conflicts:
        raise ConfigError(
            f"{CONFIG_VARIABLE}={path} and the trainer's flags",
            got="; ".join(conflicts),
            expected="one value for each; an estimator that the trainer does not know, with --advantage-estimator "
            "grpo or gspo, of slime also cispo",
            reason="the trainer goes by the flag and the advantages by the file",
            remedy="remove the setting from the file, or change the flag",
        )


def _agree(name: str, file: Any, flag: Any) -> bool:
    if name != "advantage_estimator":
        return bool(file == flag)
    return file == _AS_GRPO.get(flag, flag) or (file not in _OF_THE_TRAINER and flag in _TAKES_REWARDS)
