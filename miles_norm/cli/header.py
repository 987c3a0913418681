"""What stands above the table: the dump, the formula, and the settings that are not at their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from miles_norm.advantages import ESTIMATORS
from miles_norm.audit.summary import GroupSummary, counted, number
from miles_norm.cli.terminal import show_lines
from miles_norm.config.base import changed_settings
from miles_norm.explain import GROUP_RULES

if TYPE_CHECKING:
    from miles_norm.cli.inputs import Batch
    from miles_norm.result import NormalizedRewards

__all__ = ["print_header"]


def print_header(console: Console, batch: Batch, summaries: list[GroupSummary]) -> None:
    """Print the lines above the table."""
    result, config = batch.result, batch.result.config
    rollouts = sum(summary.rollouts for summary in summaries)
    step = "" if batch.rollout_id is None else f", rollout step {batch.rollout_id}"
    show_lines(console, f"{batch.path}{step}", style="bold")
    counts = [(result.index.num_rows, "row"), (rollouts, "rollout"), (len(summaries), "prompt group")]
    named = ", ".join(counted(count, noun) for count, noun in counts)
    show_lines(console, f"{named} (groups from {_rule(batch)})")
    for line in _formula(result):
        show_lines(console, line)
    changed = [text for text in changed_settings(config) if not text.startswith("advantage_estimator=")]
    if changed:
        show_lines(console, f"not at their defaults: {', '.join(changed)}")


def _rule(batch: Batch) -> str:
    index = batch.result.index
    if index.group_source == "prompt_group_sizes":
        return "prompt_group_sizes in the dump's metadata" if batch.sizes_from_dump else "--prompt-group-sizes"
    rule = GROUP_RULES.get(index.group_source, index.group_source)
    return rule if batch.result.columns.adapter is None or index.group_column is None else f"adapter and {rule}"


def _formula(result: NormalizedRewards) -> Iterator[str]:
    config, options = result.config, result.config.options
    estimator = config.advantage_estimator
    if not config.normalizes_groups:
        why = "" if config.rewards_normalization else " (rewards_normalization is false)"
        yield f"{estimator}: rows keep their own rewards{why}"
        return
    yield f"{estimator}: advantage = {ESTIMATORS[estimator].definition(config)}"
    if options.whitening == "none":
        return
    if result.whitening is None:
        yield "whitening over the batch: advantages that do not differ have no scale, so nothing is changed"
        return
    mean, std = (number(value) for value in result.whitening)
    shifted = "(advantage - batch mean)" if options.whitening_shift else "advantage"
    found = f"mean {mean}, std {std}" if options.whitening_shift else f"std {std}"
    each = "each rollout weighs 1" if options.whitening == "rollout" else "each rollout weighs its trainable tokens"
    yield f"then whitened: {shifted} / (batch std + {config.std_epsilon:g}); {each}, {found}"
