"""Say in words how a row got its advantage."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from miles_norm.advantages import ESTIMATORS
from miles_norm.counting import Exclusion
from miles_norm.errors import NoSuchRowError

if TYPE_CHECKING:
    from miles_norm.result import NormalizedRewards

__all__ = ["explain_row", "explain_siblings"]

GROUP_RULES = {
    "prompt_group_sizes": "the sizes that were passed in",
    "nesting": "the nesting of the input",
    "fixed_fan_out": "a guess: contiguous groups of n_samples_per_prompt rows",
    "single_group": "a guess: all rows in one group",
}

EXCLUSIONS = {
    Exclusion.PADDING: "all its rows are padding",
    Exclusion.UNSCORED: "no row that may speak has a reward (missing_reward is 'exclude')",
    Exclusion.UNTRAINED: "it has no trainable token (untrained_rollouts is 'exclude')",
    Exclusion.SMALL_GROUP: "its group has fewer counted rollouts than min_group_size",
    Exclusion.ZERO_VARIANCE: "all rewards of its group are equal, and such groups are dropped from the loss",
    Exclusion.TRUNCATED: "a row of it was truncated, and a filter dropped it",
    Exclusion.UNSCORED_GROUP: "a rollout of its group is unscored, and a filter dropped the group",
    Exclusion.INCOMPLETE_GROUP: "its group is incomplete, and a filter dropped it",
}

IN_STATISTICS = {Exclusion.COUNTED, Exclusion.ZERO_VARIANCE} | {
    Exclusion.TRUNCATED,
    Exclusion.UNSCORED_GROUP,
    Exclusion.INCOMPLETE_GROUP,
}
"""Rollouts that were dropped after their group was normalized are a part of its statistics."""

_LISTED, _SIBLINGS = 12, 6


def explain_row(result: NormalizedRewards, row: int) -> str:
    """The chain from a row to its advantage: group, rollout, speaker, statistics, arithmetic.

    Raises:
        NoSuchRowError: no such row.
    """
    index = result.index
    if isinstance(row, bool) or not hasattr(row, "__index__") or not 0 <= operator.index(row) < index.num_rows:
        raise NoSuchRowError(
            f"row {row!r}",
            got=f"a batch of {index.num_rows} rows",
            expected=f"a row number from 0 to {index.num_rows - 1}",
            reason="rows are numbered in flattened order",
            remedy="name a row of this batch",
        )
    row = operator.index(row)
    rollout = int(index.row_rollout[row])
    group = int(index.rollout_group[rollout])
    lines = [
        ("group", _group(result, group)),
        ("rollout", _rollout(result, rollout)),
        ("reward", _speaker(result, rollout)),
        ("statistics", _statistics(result, group)),
        ("arithmetic", _arithmetic(result, row, rollout, group)),
        ("training", _training(result, row)),
    ]
    width = max(len(name) for name, _ in lines)
    head = f"row {row}: advantage {_number(float(result.advantages[row]))}"
    return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in lines)])


def explain_siblings(result: NormalizedRewards, rows: list[int]) -> tuple[list[str], list[list[str]]]:
    """What the explanations of the rows of a rollout say alike, and the lines of each that are its own, head first."""
    texts = [explain_row(result, row).splitlines() for row in rows]
    shared = [line for line in texts[0][1:] if all(line in text for text in texts)]
    return shared, [[text[0], *(line for line in text[1:] if line not in shared)] for text in texts]


def _number(value: float) -> str:
    return "none" if value != value else f"{value:.7g}"


def _listed(items: list[str]) -> str:
    rest = f", and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + rest


def _group(result: NormalizedRewards, group: int) -> str:
    index = result.index
    rollouts = index.rollouts_of_group(group)
    rule = GROUP_RULES.get(index.group_source)
    if rule is None:
        label = index.group_ids[group]
        key = index.group_source if result.columns.adapter is None else f"(adapter, {index.group_source})"
        rule = f"{key} = {label!r}"
    counted = int(result.statistics.count[group])
    noun = "rollout" if len(rollouts) == 1 else "rollouts"
    return f"{group} (from {rule}): {len(rollouts)} {noun}, {counted} of them in the statistics"


def _rollout(result: NormalizedRewards, rollout: int) -> str:
    index = result.index
    rows = index.rows_of_rollout(rollout)
    label = index.rollout_ids[rollout]
    name = "without an id" if label is None else f"{label!r}"
    listed = _listed([str(row) for row in rows])
    return f"{name}: {'row' if len(rows) == 1 else 'rows'} {listed} (fan-out {len(rows)})"


def _speaker(result: NormalizedRewards, rollout: int) -> str:
    config, rewards = result.config, result.rewards
    rows = result.index.rows_of_rollout(rollout)
    speaker = int(result.mainstream_rows[rollout])
    value = _number(float(result.rollout_rewards[rollout]))
    policy = config.rollout_reward
    if policy == "mainstream":
        spoken = rewards.speaking_tokens[rows].tolist()
        tied = spoken.count(max(spoken)) > 1
        why = f"row {speaker} speaks, {'the first of those ' if tied else ''}with the most trainable tokens"
    elif policy == "shared":
        why = "all siblings share it"
    elif policy in ("first", "last"):
        why = f"the {policy} sibling that may speak has it"
    else:
        why = f"{policy} of the siblings"
    if len(rows) == 1:
        return f"{value}: the only row has it"
    described = []
    for row in rows[:_SIBLINGS]:
        padding = result.columns.padding is not None and bool(result.columns.padding[row])
        own, tokens = float(rewards.row_values[row]), int(rewards.speaking_tokens[row])
        amount = "1 token" if tokens == 1 else f"{tokens} tokens"
        described.append(f"row {row}: {_number(own)}, {amount}{', padding' if padding else ''}")
    rest = f"; and {len(rows) - _SIBLINGS} more" if len(rows) > _SIBLINGS else ""
    return f"{value}: {why} ({'; '.join(described)}{rest})"


def _statistics(result: NormalizedRewards, group: int) -> str:
    statistics, index = result.statistics, result.index
    n = int(statistics.count[group])
    if n == 0:
        return "none: no rollout of the group counts"
    inside = index.rollouts_of_group(group)
    if result.exclusion is not None:
        reasons = result.exclusion[inside].tolist()
        inside = [rollout for rollout, reason in zip(inside, reasons, strict=True) if reason in IN_STATISTICS]
    rewards = _listed([_number(value) for value in sorted(result.rollout_rewards[inside].tolist())])
    ddof = result.config.std_ddof
    return (
        f"n {n}, mean {_number(float(statistics.mean[group]))}, std {_number(float(statistics.std[group]))} "
        f"(ddof {ddof}) of the rollout rewards {rewards}"
    )


def _arithmetic(result: NormalizedRewards, row: int, rollout: int, group: int) -> str:
    config, statistics = result.config, result.statistics
    advantage = _number(float(result.advantages[row]))
    if result.exclusion is not None and (reason := Exclusion(int(result.exclusion[rollout]))):
        return f"{advantage}: the rollout does not count, since {EXCLUSIONS[reason]}"
    reward = _number(float(result.rollout_rewards[rollout]))
    if not config.normalizes_groups:
        why = "rewards_normalization is false" if not config.rewards_normalization else f"{config.advantage_estimator}"
        return f"{advantage}: rows keep their own rewards ({why})"
    n = int(statistics.count[group])
    if n == 1:
        kept = reward if config.singleton == "raw" else "0"
        rule = f"a group of one has no baseline (singleton is {config.singleton!r})"
        return f"{kept}: {rule}" + ("" if result.whitening is None else f"; {_whitened(kept, result)} = {advantage}")
    estimator = ESTIMATORS[config.advantage_estimator]
    if bool(statistics.equal[group]) and estimator.zero_where_equal:
        shifted = f"; {_whitened('0', result)} = {advantage}" if result.config.options.whitening_shift else ""
        tolerance = f", within zero_std_tolerance {config.zero_std_tolerance:g}" if config.zero_std_tolerance else ""
        return f"{'0' if shifted else advantage}: all rewards of the group are equal{tolerance}{shifted}"
    formula = estimator.formula(config)
    mean, std = _number(float(statistics.mean[group])), _number(float(statistics.std[group]))
    filled = formula.format(
        reward=reward,
        mean=mean,
        std=std,
        epsilon=f"{config.std_epsilon:g}",
        n=n,
        maximum=_number(float(statistics.maximum[group])),
        baseline=_number(float(result.rollout_rewards[rollout]) - _before_whitening(result, rollout)),
    )
    return f"{config.advantage_estimator}: {_whitened(filled, result)} = {advantage}"


def _before_whitening(result: NormalizedRewards, rollout: int) -> float:
    """The advantage of the group stage."""
    advantage = float(result.rollout_advantages[rollout])
    if result.whitening is None:
        return advantage
    mean, std = result.whitening
    shift = mean if result.config.options.whitening_shift else 0.0
    return advantage * (std + result.config.std_epsilon) + shift


def _whitened(formula: str, result: NormalizedRewards) -> str:
    options = result.config.options
    if result.whitening is None:
        return formula
    mean, std = (_number(value) for value in result.whitening)
    shift = f" - {mean}" if options.whitening_shift else ""
    divisor = f"{std} + {result.config.std_epsilon:g}"
    return f"({formula}{shift}) / ({divisor}), the deviation over the batch by {options.whitening},"


def _training(result: NormalizedRewards, row: int) -> str:
    columns = result.columns
    tokens = int(result.trainable_tokens[row])
    if tokens:
        amount = "1 trainable token" if tokens == 1 else f"{tokens} trainable tokens"
        if float(result.advantages[row]) == 0:
            return f"{amount}, which an advantage of 0 does not move"
        return f"{amount} {'carries' if tokens == 1 else 'carry'} it"
    if columns.padding is not None and bool(columns.padding[row]):
        return "none of its tokens is trained: it is padding"
    if columns.removed is not None and bool(columns.removed[row]):
        return "none of its tokens is trained: remove_sample is set"
    if int(columns.trainable_tokens[row]) == 0:
        return "none of its tokens is trained: it has no trainable token"
    if int(result.rewards.row_tokens[row]) == 0:
        return "none of its tokens is trained: the rollout was truncated (truncated_rollouts is 'untrain')"
    return "none of its tokens is trained: it is excluded"
