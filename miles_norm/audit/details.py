"""Rollouts with all that there is to say of them: rows, tree, weights, explanations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from miles_norm.audit.metrics import Comparison
from miles_norm.audit.row_notes import Path, RowNotes
from miles_norm.audit.summary import disagreeing_rows, exclusion_name, json_id, label
from miles_norm.counting import Exclusion
from miles_norm.explain import explain_siblings
from miles_norm.result import NormalizedRewards

__all__ = ["MOST_SIBLINGS", "RolloutDetails", "rollout_json", "short"]

MOST_SIBLINGS = 48
"""Rows of a rollout that are described one by one."""


def rollout_json(result: NormalizedRewards, rollouts: list[int]) -> list[dict[str, Any]]:
    """One object per rollout; its rows have one advantage unless they keep their own rewards."""
    index, padding, disagree = result.index, result.columns.padding, disagreeing_rows(result)
    found = []
    for rollout in rollouts:
        rows = index.rows_of_rollout(rollout)
        reason = Exclusion.COUNTED if result.exclusion is None else Exclusion(int(result.exclusion[rollout]))
        advantages = result.advantages[rows].tolist()
        notes = [f"excluded: {exclusion_name(reason)}"] if reason else []
        if bool(disagree[rows].any()):
            notes.append("siblings disagree")
        if not reason and not bool(result.trained_rows[rows].any()):
            notes.append("untrained")
        found.append(
            {
                "rollout": json_id(index.rollout_ids[rollout]),
                "group": json_id(index.group_ids[int(index.rollout_group[rollout])]),
                "rows": rows,
                "fan_out": len(rows) if padding is None else int((~padding[rows]).sum()),
                "reward": float(result.rollout_rewards[rollout]),
                "advantage_min": min(advantages),
                "advantage_max": max(advantages),
                "notes": notes,
            }
        )
    return found


def _named(lines: list[str]) -> list[list[str]]:
    """Lines of an explanation as pairs of what they are about and what they say."""
    return [line.strip().split(maxsplit=1) for line in lines]


def short(value: float) -> float | None:
    """Seven digits, as an explanation has them; None for what is no number.

    >>> short(0.123456789), short(float("nan"))
    (0.1234568, None)
    """
    return float(f"{value:.7g}") if value - value == 0 else None


class RolloutDetails:
    """Describes rollouts of one result for a page.

    Args:
        result: The result.
        notes: What was noted of its rows; may be empty.
        comparison: Advantages against a baseline; None if there is none.
        weights: float64 ``[N]``: of a token of each row in the loss.
    """

    def __init__(
        self, result: NormalizedRewards, notes: RowNotes, comparison: Comparison | None, weights: Tensor
    ) -> None:
        self._result, self._notes, self._comparison = result, notes, comparison
        self._weights = weights

    def describe(self, rollouts: list[int]) -> list[dict[str, Any]]:
        """One object per rollout, with its tree, its rows, and what explains them."""
        return [self._rollout(entry) for entry in rollout_json(self._result, rollouts)]

    def _rollout(self, entry: dict[str, Any]) -> dict[str, Any]:
        rows = entry["rows"][:MOST_SIBLINGS]
        shared, own = explain_siblings(self._result, rows)
        return {
            "id": label(entry["rollout"]),
            "fan_out": entry["fan_out"],
            "reward": short(entry["reward"]),
            "advantages": [short(entry["advantage_min"]), short(entry["advantage_max"])],
            "notes": entry["notes"],
            "more_rows": len(entry["rows"]) - len(rows),
            "explanation": _named(shared),
            "rows": self._rows(rows, own),
            "tree": self._tree(rows),
        }

    def _rows(self, rows: list[int], own: list[list[str]]) -> list[dict[str, Any]]:
        result, notes, other = self._result, self._notes, self._comparison
        rollout = result.index.row_rollout[rows]
        speaks = result.mainstream_rows[rollout].tolist()
        columns = zip(
            rows,
            result.raw_rewards[rows].tolist(),
            result.advantages[rows].tolist(),
            [None] * len(rows) if other is None else other.theirs[rows].tolist(),
            [False] * len(rows) if other is None else other.flips[rows].tolist(),
            self._weights[rows].tolist(),
            result.trainable_tokens[rows].tolist(),
            strict=True,
        )
        described = []
        for (row, reward, ours, theirs, flips, weight, trainable), speaker, lines in zip(
            columns, speaks, own, strict=True
        ):
            described.append(
                {
                    "row": row,
                    "tokens": notes.tokens[row] if notes.tokens else None,
                    "response": notes.lengths[row] if notes.lengths else None,
                    "trainable": trainable,
                    "strip": notes.strips[row] if notes.strips else "",
                    "reward": short(reward),
                    "advantage": short(ours),
                    "baseline": None if theirs is None else short(theirs),
                    "flips": flips,
                    "weight": short(weight),
                    "speaks": speaker == row,
                    "state": self._state(row),
                    "explanation": _named(lines[1:]),
                }
            )
        return described

    def _state(self, row: int) -> list[str]:
        columns = self._result.columns
        flags = {"padding": columns.padding, "removed": columns.removed, "truncated": columns.truncated}
        state = [name for name, flag in flags.items() if flag is not None and bool(flag[row])]
        status = None if columns.status is None else columns.status[row]
        return state if status in (None, "completed", "truncated", "pending") else [*state, str(status)]

    def _tree(self, rows: list[int]) -> dict[str, Any]:
        """Nodes and leaves as a session's metadata has them; a leaf names its place among the described rows."""
        paths: list[Path] = [self._notes.paths[row] if self._notes.paths else () for row in rows]
        parents: dict[str, str | None] = {}
        for path in paths:
            for node, parent in zip(path, (None, *path), strict=False):
                parents.setdefault(str(node), None if parent is None else str(parent))
        leaves = [{"node_id": str(path[-1]) if path else None, "row": place} for place, path in enumerate(paths)]
        return {"nodes": [{"id": node, "parent": parent} for node, parent in parents.items()], "leaves": leaves}
