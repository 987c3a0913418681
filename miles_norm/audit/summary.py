"""One line per prompt group, gathered from a result without a loop over rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from miles_norm.counting import Exclusion

if TYPE_CHECKING:
    from miles_norm.result import NormalizedRewards

__all__ = [
    "GroupSummary",
    "counted",
    "disagreeing_rows",
    "exclusion_name",
    "json_id",
    "label",
    "number",
    "select_notable",
    "summarize_groups",
    "unscored_rows",
]


@dataclass(frozen=True)
class GroupSummary:
    """What a table or a JSON object says of a prompt group; None where there is nothing to compute it from."""

    group: int
    id: Hashable
    adapter: str | None
    """The adapter of its rows, where the id does not name it."""
    rows: int
    rollouts: int
    """Those that are not padding as a whole."""
    counted: int
    """Rollouts in the statistics."""
    fan_out: tuple[int, int] | None
    """Fewest and most rows of a rollout, padding aside."""
    mean: float | None
    std: float | None
    advantages: tuple[float, float] | None
    """Smallest and largest, over the rows of counted rollouts."""
    notes: tuple[str, ...]
    unusual: bool
    """A note asks for a look: anything but rewards that are all equal."""

    @property
    def label(self) -> str:
        """The id as a table shows it."""
        return label(self.id)


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "row"), counted(2, "row")
    ('1 row', '2 rows')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def label(value: Hashable) -> str:
    """An id as it is typed on the command line: ``7``, ``prompt-a``, ``math-lora/3``.

    >>> label(("math-lora", 3)), label((None, 3)), label(None)
    ('math-lora/3', '3', '-')
    """
    if isinstance(value, tuple):
        return "/".join(label(part) for part in value if part is not None)
    return "-" if value is None else str(value)


def json_id(value: Hashable) -> str | int | None:
    """An id for JSON: as it was given where that is an integer or a string."""
    return value if value is None or isinstance(value, str | int) else label(value)


def number(value: float | None) -> str:
    """A number in at most 12 characters; ``0`` is exactly 0, whatever is smaller than 0.001 has an exponent.

    >>> number(0.4375), number(0.0), number(2e-7), number(-1234567.0), number(None)
    ('0.4375', '0', '2.00e-07', '-1.2346e+06', '-')
    """
    if value is None or value != value:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return f"{value:.5g}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.2e}"


def exclusion_name(reason: Exclusion) -> str:
    """The reason in words: ``small group``, ``unscored``."""
    return reason.name.lower().replace("_", " ")


def summarize_groups(result: NormalizedRewards) -> list[GroupSummary]:
    """Summaries of all prompt groups, empty ones included, in their order."""
    index, columns, statistics = result.index, result.columns, result.statistics
    groups, row_group, row_rollout = index.num_groups, index.row_group, index.row_rollout
    real = torch.ones_like(row_group, dtype=torch.bool) if columns.padding is None else ~columns.padding
    fan_out = torch.bincount(row_rollout[real], minlength=index.num_rollouts)
    rollout_group = index.rollout_group[fan_out > 0]
    shown = real & result.counted_rollouts[row_rollout]
    numbers = zip(
        torch.bincount(row_group, minlength=groups).tolist(),
        torch.bincount(rollout_group, minlength=groups).tolist(),
        _extremes(fan_out[fan_out > 0], rollout_group, groups),
        _extremes(result.advantages[shown], row_group[shown], groups),
        statistics.count.tolist(),
        statistics.mean.tolist(),
        statistics.std.tolist(),
        _adapters(result),
        _notes(result, real, fan_out),
        strict=True,
    )
    ids = index.group_ids
    return [
        GroupSummary(
            group=group,
            id=ids[group],
            adapter=adapter,
            rows=rows,
            rollouts=rollouts,
            counted=counted,
            fan_out=fan,
            mean=mean if counted else None,
            std=std if counted else None,
            advantages=advantages,
            notes=tuple(notes),
            unusual=any(not (note.startswith("all equal") or note.endswith("zero variance")) for note in notes),
        )
        for group, (rows, rollouts, fan, advantages, counted, mean, std, adapter, notes) in enumerate(numbers)
    ]


def _extremes(values: Tensor, group: Tensor, groups: int) -> list[Any]:
    """Smallest and largest value of each group, None where it has none."""
    count = torch.bincount(group, minlength=groups).tolist()
    low, high = (
        values.new_zeros(groups).scatter_reduce_(0, group, values, reduce, include_self=False).tolist()
        for reduce in ("amin", "amax")
    )
    return [pair if n else None for n, pair in zip(count, zip(low, high, strict=True), strict=True)]


def _notes(result: NormalizedRewards, real: Tensor, fan_out: Tensor) -> list[list[str]]:
    index, statistics, groups = result.index, result.statistics, result.index.num_groups
    notes: list[list[str]] = [[] for _ in range(groups)]

    def note(flags: Tensor, text: str) -> None:
        for group in torch.nonzero(flags)[:, 0].tolist():
            notes[group].append(text)

    def note_counts(group: Tensor, one: str, several: str) -> None:
        for number, count in enumerate(torch.bincount(group, minlength=groups).tolist()):
            if count:
                notes[number].append(one if count == 1 else several.format(count))

    rollouts = torch.bincount(index.rollout_group[fan_out > 0], minlength=groups)
    note(rollouts == 0, "no rollout")
    note((statistics.count > 1) & (statistics.range == 0), "all equal")
    note((statistics.count > 1) & statistics.equal & (statistics.range > 0), "all equal within tolerance")
    note(statistics.count == 1, "one rollout")
    for group in result.incomplete_groups:
        notes[group].append(f"incomplete {int(rollouts[group])}/{result.config.n_samples_per_prompt}")
    if result.exclusion is not None:
        for reason in Exclusion:
            if reason not in (Exclusion.COUNTED, Exclusion.PADDING):
                text = f"excluded: {exclusion_name(reason)}"
                note_counts(index.rollout_group[result.exclusion == reason], f"1 {text}", f"{{}} {text}")
    disagree = torch.unique(index.row_group[disagreeing_rows(result)])
    for group in disagree.tolist():
        notes[group].append("siblings disagree")
    silent = real & ~result.trained_rows & result.counted_rollouts[index.row_rollout]
    note_counts(index.row_group[silent], "1 row untrained", "{} rows untrained")
    note_counts(index.row_group[~real], "1 padding row", "{} padding rows")
    return notes


def _adapters(result: NormalizedRewards) -> list[str | None]:
    index, adapter = result.index, result.columns.adapter
    if adapter is None or index.group_column is not None:
        return [None] * index.num_groups
    return [None if row == index.num_rows else label(adapter.label(row)) for row in index.group_first_row.tolist()]


def disagreeing_rows(result: NormalizedRewards) -> Tensor:
    """bool ``[N]``: the row is scored and has another reward than its rollout's mainstream row.

    Under ``shared`` siblings agree: beyond the tolerance they are an error.
    """
    own = result.rewards.row_values
    if result.config.rollout_reward == "shared":
        return torch.zeros_like(own, dtype=torch.bool)
    differs = ~torch.isnan(own) & (own != own[result.mainstream_rows][result.index.row_rollout])
    return differs if result.columns.padding is None else differs & ~result.columns.padding


def unscored_rows(result: NormalizedRewards) -> Tensor:
    """bool ``[N]``: the row has no finite reward and is no padding."""
    unscored, padding = ~torch.isfinite(result.raw_rewards), result.columns.padding
    return unscored if padding is None else unscored & ~padding


def select_notable(summaries: Sequence[GroupSummary], limit: int) -> list[GroupSummary]:
    """The ``limit`` groups that most deserve a look, in their order.

    Those with unusual notes come before the others, and large advantages before small ones.
    """

    def rank(summary: GroupSummary) -> tuple[bool, float]:
        low, high = summary.advantages or (0.0, 0.0)
        return (not summary.unusual, -max(abs(low), abs(high)))

    return sorted(sorted(summaries, key=rank)[:limit], key=lambda summary: summary.group)
