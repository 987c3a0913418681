"""TRL's fixed number of rows: what a rollout function returns, and how rollouts of several rows fit into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from miles_norm.columns.ids import encode_ids
from miles_norm.errors import SampleError, format_rows

__all__ = ["PADDING", "ROLLOUT", "check_row_counts", "fill_rows", "number_rollouts"]

ROLLOUT: Final = "rollout_id"
"""Key of a rollout function's output: the rollout of each row, any hashable id, unique within its prompt."""

PADDING: Final = "is_padding"
"""Key of a rollout function's output: whether a row only fills up the batch."""

_TOKENS: Final = ("prompt_ids", "completion_ids", "logprobs")


def fill_rows(
    prompts: Sequence[Sequence[Sequence[Mapping[str, Any]]]], num_generations: int, pad_token_id: int
) -> dict[str, list[Any]]:
    """What a rollout function returns for rollouts of several rows: ``num_generations`` rows of each prompt.

    The rows of a prompt's rollouts come one after the other; padding rows fill up what is left, and enter no statistic
    and no loss.

    Args:
        prompts: The rollouts of each distinct prompt in the order of the prompts, each a list of rows: mappings with
            prompt_ids, completion_ids, logprobs, optionally env_mask, and anything else that a reward function reads.
            All rows have the same keys.
        num_generations: TRL's; here the most rows that a prompt may have, not its number of rollouts.
        pad_token_id: The only token of a padding row.

    Returns:
        A list with one entry per row for each key of the rows, for ``env_mask``, ``rollout_id`` and ``is_padding``.

    Raises:
        SampleError: a prompt with more rows than ``num_generations``, or rows with different keys; all are named.

    >>> row = {"prompt_ids": [5], "completion_ids": [6, 7], "logprobs": [-1.0, -2.0]}
    >>> rows = fill_rows([[[row, row], [row]]], num_generations=4, pad_token_id=0)
    >>> rows["completion_ids"], rows["env_mask"]
    ([[6, 7], [6, 7], [6, 7], [0]], [[1, 1], [1, 1], [1, 1], [0]])
    >>> rows["rollout_id"], rows["is_padding"]
    ([0, 0, 1, 2], [False, False, False, True])
    """
    _refuse_too_many_rows(prompts, num_generations)
    flat = [row for rollouts in prompts for rows in rollouts for row in rows]
    names = _common_keys(flat)
    padding: dict[str, Any] = {**dict.fromkeys(names), "completion_ids": [pad_token_id], "logprobs": [0.0]}
    output: dict[str, list[Any]] = {name: [] for name in (*names, "env_mask", ROLLOUT, PADDING)}
    for rollouts in prompts:
        rows = [(dict(row), number) for number, rollout in enumerate(rollouts) for row in rollout]
        for row, number in rows:
            mask = row.pop("env_mask", None) or [1] * len(row["completion_ids"])
            _append(output, row | {"env_mask": mask, ROLLOUT: number, PADDING: False})
        prompt_ids = rows[0][0]["prompt_ids"] if rows else [pad_token_id]
        for number in range(len(rollouts), len(rollouts) + num_generations - len(rows)):
            _append(output, padding | {"prompt_ids": prompt_ids, "env_mask": [0], ROLLOUT: number, PADDING: True})
    return output


def check_row_counts(output: Mapping[str, Any], rows: int) -> None:
    """Refuse what a rollout function returned for another number of rows than the prompts that it was given.

    Raises:
        SampleError: naming every key of another length.
    """
    names = (*_TOKENS, "env_mask", ROLLOUT, PADDING)
    lengths = {name: len(output[name]) for name in names if output.get(name) is not None}
    wrong = {name: length for name, length in lengths.items() if length != rows}
    if wrong:
        raise SampleError(
            "what rollout_func returned",
            got=", ".join(f"{length} {name}" for name, length in wrong.items()),
            expected=f"{rows} of each, one per prompt that it was given",
            reason="TRL trains a fixed number of rows, and matches them with prompts and dataset columns by position",
            remedy="lay rollouts of several rows out with fill_rows(rollouts, trainer.num_generations, pad_token_id), "
            "and set num_generations to the most rows that the rollouts of one prompt may have",
        )


def number_rollouts(ids: Any, groups: Sequence[int]) -> list[int]:
    """Number the rollouts of a process's rows by their first row; a row without an id is a rollout of its own.

    Raises:
        SampleError: ids that are bools or cannot be hashed; all rows are named.

    >>> number_rollouts(["a", None, "a", "a"], groups=[0, 0, 0, 1])
    [0, 1, 0, 3]
    """
    if ids is None:
        return list(range(len(groups)))
    first: dict[tuple[int, int], int] = {}
    codes = encode_ids(ids, ROLLOUT, len(groups)).codes.tolist()
    return [first.setdefault(key, row) for row, key in enumerate(zip(groups, codes, strict=True))]


def _append(output: dict[str, list[Any]], row: Mapping[str, Any]) -> None:
    for name, values in output.items():
        values.append(row[name])


def _refuse_too_many_rows(prompts: Sequence[Sequence[Sequence[Any]]], num_generations: int) -> None:
    counts = [sum(map(len, rollouts)) for rollouts in prompts]
    bad = [prompt for prompt, count in enumerate(counts) if count > num_generations]
    if bad:
        raise SampleError(
            f"rows of {format_rows(bad, 'prompt')}",
            got=", ".join(f"{counts[prompt]} rows of {len(prompts[prompt])} rollouts" for prompt in bad[:10]),
            expected=f"at most num_generations={num_generations} rows of a prompt",
            reason="TRL trains exactly num_generations rows of each prompt, so that some would be lost",
            remedy="set num_generations to the most rows that the rollouts of one prompt may have, or sample fewer",
        )


def _common_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    needed = set(_TOKENS).union(*rows)
    bad = [n for n, row in enumerate(rows) if set(row) != needed]
    if bad:
        lacking = sorted({name for n in bad for name in needed - set(rows[n])})
        raise SampleError(
            f"keys of {format_rows(bad)}",
            got=f"no {', '.join(lacking)}",
            expected=f"the same keys on every row, {', '.join(_TOKENS)} among them",
            reason="TRL takes a column for all rows or for none",
            remedy="give every row each key",
            rows=bad,
        )
    return sorted(needed - {"env_mask"})
