"""What verl's config says to the estimators, and the combinations that would train on wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omegaconf import Container, OmegaConf

from miles_norm.config import PASS_THROUGH_ESTIMATORS, LossConfig, NormalizationConfig
from miles_norm.errors import ConfigError, shown
from miles_norm.loss.checks import is_whole

__all__ = ["ADVANTAGES", "SUMMED_LOSSES", "WEIGHTED", "VerlSettings", "policy_loss_settings"]

ADVANTAGES: Final = "miles_norm"
"""The estimator of plain advantages; verl's loss stays as it is."""

WEIGHTED: Final = "miles_norm_weighted"
"""The estimator of advantages that carry the loss weights, and the policy loss that sums them."""

SUMMED_LOSSES: Final = ("vanilla", "cispo", "dppo_kl", "dppo_tv", "gpg", "gspo")
"""verl's policy losses that scale with the advantage and obey ``loss_agg_mode``: ``token-sum`` sums them."""

_ACTOR: Final = "actor_rollout_ref.actor"
_FLAGS: Final = {
    "grpo_std_normalization": "algorithm.norm_adv_by_std_in_grpo",
    "n_samples_per_prompt": "actor_rollout_ref.rollout.n",
}
"""Settings that verl has too, and where."""


class VerlSettings:
    """The settings of one call of an estimator.

    Ours stand in verl's own config under ``algorithm.miles_norm``: ``normalization`` has the fields of
    ``NormalizationConfig``, ``loss`` those of ``LossConfig``. Two come from verl: ``norm_adv_by_std_in_grpo`` and
    ``rollout.n``.

    Args:
        algorithm: What verl hands to an estimator: ``config.algorithm``. As a part of the trainer's whole config it
            leads to the actor's settings too; without these the checks of the actor do not run, and a batch is one
            update.
        weighted: Whether the advantages carry the loss weights.

    Raises:
        ConfigError: a setting that does not exist or contradicts verl's; ``use_kl_in_reward``; a policy loss that does
            not fit the estimator.
    """

    def __init__(self, algorithm: Any, *, weighted: bool) -> None:
        if algorithm is not None and not hasattr(algorithm, "get"):
            raise ConfigError(
                "config of an estimator",
                got=f"a value of type {type(algorithm).__name__}",
                expected="verl's config.algorithm, or None",
                reason="the settings of advantages stand there, and others would be taken in silence",
                remedy="pass config=config.algorithm to compute_advantage",
            )
        self._root = algorithm._get_root() if isinstance(algorithm, Container) else None
        given = _given(algorithm)
        flags = {"grpo_std_normalization": None if algorithm is None else algorithm.get("norm_adv_by_std_in_grpo")}
        flags["n_samples_per_prompt"] = self._trainer("actor_rollout_ref.rollout.n")
        self.normalization = NormalizationConfig(**_agreeing(flags, given.get("normalization", {})))
        self.loss = LossConfig(**given.get("loss", {}))
        _refuse_what_verl_lacks(self.normalization)
        kl_in_reward = None if algorithm is None else algorithm.get("use_kl_in_reward")
        if kl_in_reward is not None and kl_in_reward is not False:
            raise ConfigError(
                "algorithm.use_kl_in_reward",
                got=shown(kl_in_reward),
                expected="False",
                reason="the KL penalty of each row's tokens is then in its reward, so that siblings differ and the "
                "advantage is no longer one of outcomes",
                remedy="set actor_rollout_ref.actor.use_kl_loss=True instead, which adds the KL after normalization",
            )
        self._check_policy_loss(weighted)

    def updates(self, rows: int) -> float:
        """How many optimizer steps verl makes of a batch of so many rows; 1 where its config is not at hand."""
        prompts, n = self._trainer(f"{_ACTOR}.ppo_mini_batch_size"), self._trainer("actor_rollout_ref.rollout.n")
        return 1.0 if prompts is None or n is None else max(rows / (prompts * n), 1.0)

    def _trainer(self, key: str) -> Any:
        return None if self._root is None else OmegaConf.select(self._root, key)

    def _check_policy_loss(self, weighted: bool) -> None:
        mode, aggregation = self._trainer(f"{_ACTOR}.policy_loss.loss_mode"), self._trainer(f"{_ACTOR}.loss_agg_mode")
        if mode is None:
            return
        summed = mode == WEIGHTED or (mode in SUMMED_LOSSES and aggregation == "token-sum")
        if weighted and not summed:
            raise ConfigError(
                f"{_ACTOR}.policy_loss.loss_mode with algorithm.adv_estimator={WEIGHTED}",
                got=f"{mode} with loss_agg_mode={aggregation}",
                expected=f"{WEIGHTED}; or {', '.join(SUMMED_LOSSES)} with loss_agg_mode=token-sum",
                reason="each advantage carries the weight of its row, so that the token losses have to be added up",
                remedy=f"set loss_mode={WEIGHTED}, or adv_estimator={ADVANTAGES} to keep verl's own mean",
            )
        if not weighted and mode == WEIGHTED:
            raise ConfigError(
                f"algorithm.adv_estimator with loss_mode={WEIGHTED}",
                got=ADVANTAGES,
                expected=WEIGHTED,
                reason="the loss adds up token losses, and without weights the sum grows with the batch",
                remedy=f"set adv_estimator={WEIGHTED}, or one of verl's own losses",
            )
        added = [name for name in ("use_kl_loss", "entropy_coeff") if self._trainer(f"{_ACTOR}.{name}")]
        if weighted and aggregation == "token-sum" and added:
            raise ConfigError(
                f"{_ACTOR}.loss_agg_mode",
                got=f"token-sum with {' and '.join(added)}",
                expected="a mean",
                reason="KL and entropy carry no weights, and their sum grows with the tokens of the batch",
                remedy=f"set loss_mode={WEIGHTED} and loss_agg_mode=token-mean, which these two then follow alone",
            )


def policy_loss_settings(config: Any) -> tuple[tuple[Any, Any], Any, int]:
    """What verl's ``ActorConfig`` says to the clipped loss: the two clip ratios, the second clip, and the data-parallel
    ranks. The ratios are checked by the loss.

    Raises:
        ConfigError: another config, or a number of ranks that is none.
    """
    info = getattr(config, "global_batch_info", None)
    ranks: Any = info.get("dp_size", 1) if isinstance(info, Mapping) else None
    if not hasattr(config, "get") or not is_whole(ranks, low=1):
        raise ConfigError(
            f"config of the policy loss {WEIGHTED}",
            got=f"a value of type {type(config).__name__} with dp_size {shown(ranks)}",
            expected="verl's ActorConfig, with clip ratios and global_batch_info",
            reason="the loss is clipped by it, and gradients are averaged over its ranks",
            remedy="pass config=config.actor_rollout_ref.actor as the dataclass that verl makes of it",
        )
    ratio = config.get("clip_ratio")
    low, high = (config.get(f"clip_ratio_{end}") for end in ("low", "high"))
    clip = (ratio if low is None else low, ratio if high is None else high)
    return clip, config.get("clip_ratio_c", 3.0), int(ranks)


def _given(algorithm: Any) -> dict[str, Any]:
    given = None if algorithm is None else algorithm.get("miles_norm")
    if isinstance(given, Container):
        given = OmegaConf.to_container(given, resolve=True)
    if given is None:
        return {}
    wrong = [] if isinstance(given, dict) else [shown(given)]
    if isinstance(given, dict):
        known = {name: settings for name, settings in given.items() if name in ("normalization", "loss")}
        wrong = sorted(map(str, given.keys() - known.keys()))
        wrong += [f"{name}={shown(each)}" for name, each in known.items() if not isinstance(each, dict | None)]
    if wrong:
        raise ConfigError(
            "algorithm.miles_norm",
            got=", ".join(wrong),
            expected="the mappings normalization and loss, or one of them",
            reason="a setting that is not understood would change the training signal in silence",
            remedy="write for example +algorithm.miles_norm.normalization.rollout_reward=shared",
        )
    return {name: settings or {} for name, settings in known.items()}


def _agreeing(flags: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    flags = {name: value for name, value in flags.items() if value is not None}
    conflicts = [
        name
        for name, value in flags.items()
        if name in given and (type(given[name]) is not type(value) or given[name] != value)
    ]
    if conflicts:
        raise ConfigError(
            "algorithm.miles_norm.normalization",
            got=", ".join(f"{name}={given[name]} with {_FLAGS[name]}={flags[name]}" for name in conflicts),
            expected="one value for each",
            reason="verl goes by its own setting elsewhere",
            remedy="leave ours unset",
        )
    return flags | given


def _refuse_what_verl_lacks(config: NormalizationConfig) -> None:
    estimator = config.advantage_estimator
    refused = {
        f"advantage_estimator={estimator}": (
            estimator in PASS_THROUGH_ESTIMATORS,
            "the rewards would be the advantages, since verl computes nothing after a custom estimator",
            "set algorithm.adv_estimator to verl's own gae or reinforce_plus_plus",
        ),
        "advantage_estimator=gdpo": (
            estimator == "gdpo",
            "a custom estimator gets the sum of the rewards and no components",
            "set algorithm.adv_estimator to verl's own gdpo for rollouts of one row each",
        ),
        "truncated_rollouts=untrain": (
            config.truncated_rollouts != "include",
            "an estimator is not told which rows ended by length",
            "mask these rows in the agent loop",
        ),
    }
    for got, (wrong, reason, remedy) in refused.items():
        if wrong:
            subject = "algorithm.miles_norm.normalization"
            raise ConfigError(subject, got=got, expected="another value", reason=reason, remedy=remedy)
