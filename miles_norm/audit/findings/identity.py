"""Checks of what belongs together: prompt groups, rollouts, copies."""

from __future__ import annotations

import torch

from miles_norm.audit.findings.evidence import Evidence, Finding, group_labels, real_rows, rollout_labels, where
from miles_norm.audit.summary import counted
from miles_norm.errors import GroupingError, format_rows
from miles_norm.grouping import mixed_groups
from miles_norm.rewards import any_row

__all__ = ["collided_ids", "duplicate_padding", "guessed_groups", "incomplete_groups", "missing_ids", "stale_sizes"]

_MOST = 0.5
"""A number of rollouts that this share of the groups has is taken for the intended one."""


def guessed_groups(e: Evidence) -> Finding | None:
    """Nothing in the dump says which rows are of one prompt."""
    index, columns, config = e.result.index, e.result.columns, e.result.config
    if index.group_source not in ("fixed_fan_out", "single_group"):
        return None
    column, key = columns.group, config.group_key
    lacking = where(real_rows(e.result) if column is None or column.missing is None else column.missing)
    whom = "no row has" if len(lacking) == index.num_rows else f"{format_rows(lacking)} {_lack(lacking)}"
    size = config.n_samples_per_prompt
    guess = (
        f"all {counted(index.num_rows, 'row')} share one baseline"
        if index.group_source == "single_group"
        else f"{counted(index.num_groups, 'group')} of {size} contiguous rows were formed by counting"
    )
    broken = any(text.startswith("the guessed groups contradict") for text in e.result.warnings)
    return e.finding(
        "guessed_groups",
        f"Prompt groups were guessed: {whom} {key}, so {guess}"
        + (", and the rollout ids contradict that." if broken else "."),
        f"set {key} on every row when it is sampled, name another field with group_key, or pass prompt_group_sizes; "
        "group_fallback: error refuses to guess",
        rows=lacking,
        groups=range(index.num_groups),
    )


def _lack(rows: list[int]) -> str:
    return "lacks" if len(rows) == 1 else "lack"


def stale_sizes(e: Evidence) -> Finding | None:
    """Recorded sizes of prompt groups that do not fit the rows."""
    remedy = (
        "record prompt_group_sizes after the last row is added or dropped, or ignore what the dump recorded with "
        "--prompt-group-sizes none"
    )
    for error in e.refused:
        if isinstance(error, GroupingError) and error.subject == "prompt_group_sizes":
            problem = f"prompt_group_sizes are stale: {error.got}, expected {error.expected}; they are ignored here."
            return e.finding("stale_sizes", problem, remedy, rows=range(e.result.index.num_rows))
    mixed = mixed_groups(e.result.index, e.result.columns)
    if not mixed or e.result.index.group_source != "prompt_group_sizes":
        return None
    named = format_rows(group_labels(e.result, mixed), "group", 8)
    problem = f"prompt_group_sizes look stale: rows with different {e.result.config.group_key} are in {named}."
    rows = torch.isin(e.result.index.row_group, torch.tensor(mixed, device=e.result.index.row_group.device))
    return e.finding("stale_sizes", problem, remedy, rows=where(rows), groups=mixed)


def collided_ids(e: Evidence) -> Finding | None:
    """One id for what are different rollouts."""
    index, columns = e.result.index, e.result.columns
    pairs = [pair for pair in columns.id_collisions if index.row_rollout[pair[0]] == index.row_rollout[pair[1]]]
    if pairs:
        merged = index.row_rollout[sorted({row for pair in pairs for row in pair})]
        rows = where(torch.isin(index.row_rollout, merged))
        return e.finding(
            "collided_ids",
            f"A rollout_id equals the index of a row that has none: {format_rows(rows)} count as siblings although "
            "their own indices differ.",
            "set rollout_id on every row, or on none",
            rows=rows,
            groups=dict.fromkeys(index.row_group[rows].tolist()),
        )
    column = index.rollout_column
    real = where(any_row(real_rows(e.result), index))
    if column is None or not real:
        return None
    codes = column.codes[index.first_row[real]]
    _, same, count = torch.unique(codes, return_inverse=True, return_counts=True)
    taken = torch.tensor(real, device=codes.device)[count[same] > 1]
    if not len(taken):
        return None
    ids = list(dict.fromkeys(rollout_labels(e.result, taken.tolist())))
    return e.finding(
        "collided_ids",
        f"{format_rows(ids, 'rollout id', 8)} {'is' if len(ids) == 1 else 'are'} used in several prompt groups: "
        f"{counted(len(taken), 'rollout')} here, and one per id for code that keys by the id alone.",
        "number rollouts over the whole batch: set rollout_id, or index, to an id that no other prompt or adapter uses",
        rows=where(torch.isin(index.row_rollout, taken)),
        groups=dict.fromkeys(index.rollout_group[taken].tolist()),
    )


def missing_ids(e: Evidence) -> Finding | None:
    """Rows that name no rollout."""
    column = e.result.columns.rollout
    if column is None or column.missing is None or e.result.columns.nested_sizes is not None:
        return None
    rows = where(column.missing & real_rows(e.result))
    if not rows:
        return None
    return e.finding(
        "missing_ids",
        f"{format_rows(rows)} {'has' if len(rows) == 1 else 'have'} neither rollout_id nor index: each counts as a "
        "rollout of its own, siblings too.",
        "set rollout_id, or index, on every row when it is sampled",
        rows=rows,
    )


def duplicate_padding(e: Evidence) -> Finding | None:
    """Copies that fill a batch and are not marked as such."""
    index, digests = e.result.index, e.notes.digests
    if not digests:
        return None
    first: dict[tuple[int, int], int] = {}
    copies = []
    training = (real_rows(e.result) & (e.result.columns.trainable_tokens > 0)).tolist()
    rows = zip(index.row_rollout.tolist(), digests, training, strict=True)
    for row, (rollout, digest, trains) in enumerate(rows):
        if digest is not None and trains and first.setdefault((rollout, digest), row) != row:
            copies.append(row)
    if not copies:
        return None
    return e.finding(
        "duplicate_padding",
        f"{format_rows(copies)} {'repeats' if len(copies) == 1 else 'repeat'} another row of the same rollout, token "
        "for token and without is_padding: copies count as rows, and their tokens are trained again.",
        "set is_padding on copies that fill a batch; they then enter nothing",
        rows=copies,
        groups=dict.fromkeys(index.row_group[copies].tolist()),
    )


def incomplete_groups(e: Evidence) -> Finding | None:
    """Groups that lost rollouts on the way."""
    result, index = e.result, e.result.index
    wanted, few = result.config.n_samples_per_prompt, result.incomplete_groups
    said = f"n_samples_per_prompt={wanted}"
    if wanted is None and index.group_source not in ("fixed_fan_out", "single_group"):
        per_group = torch.bincount(index.rollout_group[any_row(real_rows(result), index)], minlength=index.num_groups)
        sizes = torch.bincount(per_group[per_group > 0])
        if not len(sizes) or index.num_groups < 2:
            return None
        wanted = int(sizes.argmax())
        few = where((per_group > 0) & (per_group < wanted)) if int(sizes.max()) > _MOST * index.num_groups else []
        said = f"{wanted}, which most groups have"
    if not few:
        return None
    return e.finding(
        "incomplete_groups",
        f"{format_rows(group_labels(result, few), 'prompt group', 8)} {'has' if len(few) == 1 else 'have'} fewer "
        f"rollouts than {said}: the baseline is taken from those that came back.",
        "a filter with incomplete_groups, or min_group_size, drops them; n_samples_per_prompt says how many are wanted",
        rows=where(torch.isin(index.row_group, torch.tensor(few, device=index.row_group.device))),
        groups=few,
    )
