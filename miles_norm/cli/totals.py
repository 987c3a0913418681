"""What stands below the table: counts of groups, rollouts, rows and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich.console import Console

from miles_norm.audit.summary import exclusion_name, number, unscored_rows
from miles_norm.cli.terminal import show_lines
from miles_norm.counting import Exclusion

if TYPE_CHECKING:
    from miles_norm.result import NormalizedRewards

__all__ = ["print_totals", "row_states"]


def print_totals(console: Console, result: NormalizedRewards, *, empty: int) -> None:
    """Print the sums over all groups, ``empty`` of which have no rollout."""
    values = {name.partition("/")[2]: value for name, value in result.metrics().items()}

    def count(name: str) -> int:
        return int(values[name])

    reasons = [reason for reason in Exclusion if reason not in (Exclusion.COUNTED, Exclusion.PADDING)]
    excluded = {exclusion_name(reason): count(f"excluded_{reason.name.lower()}") for reason in reasons}
    means = [number(values.get(name)) for name in ("reward_mean", "row_reward_mean")]
    fan_out = f"mean {values['fan_out_mean']:.2f}, max {count('fan_out_max')}" if "fan_out_max" in values else "-"
    lines = {
        "reward mean": f"{means[0]} per rollout, {means[1]} per row",
        "fan-out": fan_out,
        "groups": f"{count('zero_variance_groups')} all equal, {count('singleton_groups')} with one rollout"
        + (f", {count('incomplete_groups')} incomplete" if result.config.n_samples_per_prompt else "")
        + (f", {empty} without a rollout" if empty else ""),
        "rollouts": f"{count('counted_rollouts')} counted, {sum(excluded.values())} excluded{_parts(excluded)}",
        "rows": _rows(result),
        "tokens": f"{count('trainable_tokens')} trainable",
    }
    if unscored := int(unscored_rows(result).sum()):
        lines["unscored"] = (
            f"{unscored} of {result.index.num_rows} rows (missing_reward is {result.config.missing_reward})"
        )
    width = max(map(len, lines))
    show_lines(console, "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))


def _parts(counts: dict[str, int]) -> str:
    parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f" ({parts})" if parts else ""


def _rows(result: NormalizedRewards) -> str:
    states = row_states(result)
    trained, excluded, padding = (states.pop(name) for name in ("trained", "excluded", "padding"))
    text = f"{trained} trained, {sum(states.values())} untrained{_parts(states)}, {excluded} excluded"
    return text if result.columns.padding is None else f"{text}, {padding} padding"


def row_states(result: NormalizedRewards) -> dict[str, int]:
    """How many rows are in which state; every row is in one, the first that applies.

    Padding; excluded with its rollout; trained; and, of those that train nothing, removed or masked as a whole,
    truncated under ``truncated_rollouts="untrain"``, or without the reward that it would keep.
    """
    columns = result.columns
    left = torch.ones(result.index.num_rows, dtype=torch.bool, device=columns.reward.device)
    none = torch.zeros_like(left)
    silent = columns.trainable_tokens == 0
    flags = {
        "padding": none if columns.padding is None else columns.padding,
        "excluded": ~result.counted_rollouts[result.index.row_rollout],
        "trained": result.trained_rows,
        "removed or masked": silent if columns.removed is None else silent | columns.removed,
        "truncated": result.rewards.row_tokens == 0,
        "unscored": ~none,
    }
    states = {}
    for name, flag in flags.items():
        states[name] = int((flag & left).sum())
        left = left & ~flag
    return states
