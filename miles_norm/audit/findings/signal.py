"""Checks of rewards, and of what is trained on them."""

from __future__ import annotations

from miles_norm.audit.findings.evidence import Evidence, Finding, group_labels, real_rows, rollout_labels, where
from miles_norm.audit.summary import counted, disagreeing_rows, unscored_rows
from miles_norm.errors import format_rows
from miles_norm.normalize import NEARLY_EQUAL
from miles_norm.rewards import any_row

__all__ = [
    "disagreeing_siblings",
    "mask_length",
    "nearly_equal_rewards",
    "nothing_trains",
    "single_rollout_groups",
    "unscored_rewards",
    "untrained_rollouts",
    "zero_variance",
]

ZERO_VARIANCE = 0.25
"""Share of groups without a signal from which on it is worth a word."""

SINGLE = 0.5
"""Share of groups with one counted rollout from which on the group key is in doubt."""


def unscored_rewards(e: Evidence) -> Finding | None:
    """Rewards that are None, NaN or infinite."""
    rows = where(unscored_rows(e.result))
    if not rows:
        return None
    given = e.result.config.missing_reward
    treated = "count as 0" if given == "zero" else "cannot speak for their rollouts"
    if any("missing_reward is 'error'" in error.expected for error in e.refused):
        treated = "stop a run under missing_reward: error, and are left out here"
    return e.finding(
        "unscored_rewards",
        f"The rewards of {format_rows(rows)} are None, NaN or infinite: they {treated}.",
        "score the rows; or set missing_reward to exclude, which leaves them out, or to zero",
        rows=rows,
        groups=dict.fromkeys(e.result.index.row_group[rows].tolist()),
    )


def disagreeing_siblings(e: Evidence) -> Finding | None:
    """Rows of one rollout with different rewards."""
    index = e.result.index
    flags = any_row(disagreeing_rows(e.result), index)
    rollouts = where(flags)
    if not rollouts:
        return None
    tied = any(text.startswith("tie between siblings") for text in e.result.warnings)
    return e.finding(
        "disagreeing_siblings",
        f"Siblings of {format_rows(rollout_labels(e.result, rollouts), 'rollout', 8)} have different rewards, and "
        f"rollout_reward: {e.result.config.rollout_reward} decides"
        + (", by the order of rows where it is a tie." if tied else "."),
        "give every row the reward of its rollout; or choose rollout_reward: mainstream, first, last, max, mean or "
        "sum, or shared, which refuses them",
        rows=where(flags[index.row_rollout] & real_rows(e.result)),
        groups=dict.fromkeys(index.rollout_group[rollouts].tolist()),
    )


def nearly_equal_rewards(e: Evidence) -> Finding | None:
    """Groups whose rewards differ by what rounding may leave."""
    if not e.result.config.normalizes_groups:
        return None
    statistics = e.result.statistics
    groups = where((statistics.range <= statistics.largest * NEARLY_EQUAL) & ~statistics.equal)
    if not groups:
        return None
    return e.finding(
        "nearly_equal_rewards",
        f"Rewards of {format_rows(group_labels(e.result, groups), 'prompt group', 8)} differ by at most "
        f"{NEARLY_EQUAL:g} of the largest: a difference that may be rounding becomes a full advantage.",
        "zero_std_tolerance: 1e-6 counts them as equal",
        groups=groups,
    )


def zero_variance(e: Evidence) -> Finding | None:
    """Many groups whose rewards are all equal."""
    statistics = e.result.statistics
    several = statistics.count > 1
    flags = several & statistics.equal
    groups, of = where(flags), int(several.sum())
    if not groups or len(groups) < ZERO_VARIANCE * of:
        return None
    index = e.result.index
    rows = where(flags[index.row_group] & e.result.trained_rows)
    return e.finding(
        "zero_variance",
        f"{len(groups)} of {counted(of, 'prompt group')} ({len(groups) / of:.0%}) have equal rewards on all rollouts: "
        f"{counted(len(rows), 'row')} of {format_rows(group_labels(e.result, groups), 'group', 8)} carry an advantage "
        "of 0.",
        "zero_variance_groups: drop_from_loss keeps them out of the denominators; sample prompts that are neither "
        "always solved nor never, or draw others in their place",
        rows=rows,
        groups=groups,
    )


def single_rollout_groups(e: Evidence) -> Finding | None:
    """Groups of one, which have no baseline."""
    statistics, config = e.result.statistics, e.result.config
    groups = where(statistics.count == 1)
    if not config.normalizes_groups or not groups or len(groups) < SINGLE * int((statistics.count > 0).sum()):
        return None
    return e.finding(
        "single_rollout_groups",
        f"{len(groups)} of {counted(e.result.index.num_groups, 'prompt group')} have one counted rollout, which has no "
        "other to be compared with.",
        f"check that group_key ({config.group_key}) names the prompt; singleton says what such a group gets",
        groups=groups,
    )


def untrained_rollouts(e: Evidence) -> Finding | None:
    """Rollouts that move the mean of their group and train nothing."""
    result, index = e.result, e.result.index
    flags = result.counted_rollouts & ~any_row(result.trained_rows, index)
    rollouts = where(flags)
    if not rollouts or len(rollouts) == int(result.counted_rollouts.sum()):
        return None
    return e.finding(
        "untrained_rollouts",
        f"{format_rows(rollout_labels(result, rollouts), 'Rollout', 8)} {'has' if len(rollouts) == 1 else 'have'} no "
        "trainable token and still a place in the statistics of their groups.",
        "untrained_rollouts: exclude leaves them out; include, the default, is what Miles does",
        rows=where(flags[index.row_rollout] & real_rows(result)),
        groups=dict.fromkeys(index.rollout_group[rollouts].tolist()),
    )


def nothing_trains(e: Evidence) -> Finding | None:
    """A batch without a gradient."""
    result = e.result
    if bool((result.trained_rows & (result.advantages != 0)).any()):
        return None
    why = "no row has a trainable token" if not bool(result.trained_rows.any()) else "all advantages are 0"
    return e.finding(
        "nothing_trains",
        f"Nothing will be trained: {why}.",
        "check loss_mask and remove_sample, and that rewards differ within prompt groups",
        rows=range(result.index.num_rows),
    )


def mask_length(e: Evidence) -> Finding | None:
    """Masks that do not fit their responses."""
    for text in e.result.columns.notes:
        if text.startswith("loss_mask of "):
            return e.finding(
                "mask_length",
                f"The {text}.",
                "write one entry of loss_mask for each token of the response, and response_length as their number",
            )
    return None
