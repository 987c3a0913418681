"""TRL's fixed number of rows: what a rollout function returns, and how rollouts of several rows fit into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from miles_norm.columns.ids import encode_ids, entries_of
from miles_norm.columns.masks import count_each_mask
from miles_norm.columns.row_values import read_flags, row_length
from miles_norm.errors import ConfigError, SampleError, format_rows, shown
from miles_norm.integrations.token_fields import are_tokens
from miles_norm.loss.checks import is_whole

__all__ = ["PADDING", "ROLLOUT", "check_output", "fill_rows", "number_rollouts", "padding_rows"]

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
        SampleError: a prompt with more rows than ``num_generations``, rows with different keys, and what
            ``check_output`` raises; all are named.
        ConfigError: ``num_generations`` or ``pad_token_id`` that is no whole number.

    >>> row = {"prompt_ids": [5], "completion_ids": [6, 7], "logprobs": [-1.0, -2.0]}
    >>> rows = fill_rows([[[row, row], [row]]], num_generations=4, pad_token_id=0)
    >>> rows["completion_ids"], rows["env_mask"]
    ([[6, 7], [6, 7], [6, 7], [0]], [[1, 1], [1, 1], [1, 1], [0]])
    >>> rows["rollout_id"], rows["is_padding"]
    ([0, 0, 1, 2], [False, False, False, True])
    """
    _check_numbers(num_generations, pad_token_id)
    prompts = _nested(prompts)
    _refuse_too_many_rows(prompts, num_generations)
    flat = [row for rollouts in prompts for rows in rollouts for row in rows]
    names = _common_keys(flat)
    padding: dict[str, Any] = {**dict.fromkeys(names), "completion_ids": [pad_token_id], "logprobs": [0.0]}
    output: dict[str, list[Any]] = {name: [] for name in (*names, "env_mask", ROLLOUT, PADDING)}
    for rollouts in prompts:
        rows = [(dict(row), number) for number, rollout in enumerate(rollouts) for row in rollout]
        for row, number in rows:
            mask = row.pop("env_mask", None)
            mask = [1] * (row_length(row["completion_ids"]) or 0) if mask is None else mask
            _append(output, row | {"env_mask": mask, ROLLOUT: number, PADDING: False})
        prompt_ids = rows[0][0]["prompt_ids"] if rows else [pad_token_id]
        for number in range(len(rollouts), len(rollouts) + num_generations - len(rows)):
            _append(output, padding | {"prompt_ids": prompt_ids, "env_mask": [0], ROLLOUT: number, PADDING: True})
    check_output(output, len(prompts) * num_generations)
    return output


def check_output(output: Any, rows: int) -> None:
    """Refuse what a rollout function returned for other rows than the prompts that it was given.

    Values of log-probs are left to TRL, which knows what an engine gives in the place of NaN.

    Raises:
        SampleError: no mapping, keys that have not one entry per row, token ids that are none, completions without a
            token, masks with entries other than 0 and 1, masks or log-probs of another length than the completion; all
            are named.
    """
    if not isinstance(output, Mapping):
        raise _bad_output("what rollout_func returned", f"a value of type {type(output).__name__}", "a dict of lists")
    names = [name for name in (*_TOKENS, "env_mask", ROLLOUT, PADDING) if output.get(name) is not None]
    columns = {name: entries_of(output[name]) for name in names}
    wrong = [
        f"{name} of type {type(output[name]).__name__}" if values is None else f"{len(values)} {name}"
        for name, values in columns.items()
        if values is None or len(values) != rows
    ]
    if wrong:
        raise SampleError(
            "what rollout_func returned",
            got=", ".join(wrong),
            expected=f"{rows} of each, one per prompt that it was given",
            reason="TRL trains a fixed number of rows, and matches them with prompts and dataset columns by position",
            remedy="lay rollouts of several rows out with fill_rows(rollouts, trainer.num_generations, pad_token_id), "
            "and set num_generations to the most rows that the rollouts of one prompt may have",
        )
    _check_tokens({name: values for name, values in columns.items() if values is not None})


def _check_tokens(columns: Mapping[str, Sequence[Any]]) -> None:
    """Tokens, masks and log-probs of each row."""
    for name in ("prompt_ids", "completion_ids"):
        bad = [row for row, ids in enumerate(columns.get(name, ())) if not are_tokens(ids)]
        if bad:
            got = "; ".join(shown(columns[name][row]) for row in bad[:3])
            raise _bad_output(f"{name} of {format_rows(bad)}", got, "token ids, whole numbers from 0 on", bad)
    lengths = [row_length(ids) for ids in columns.get("completion_ids", ())]
    if empty := [row for row, length in enumerate(lengths) if not length]:
        raise SampleError(
            f"completion_ids of {format_rows(empty)}",
            got="no token",
            expected="at least one token",
            reason="TRL looks at the last token of each completion to see whether it ended",
            remedy="where nothing was sampled, return a pad token with logprobs [0.0] and env_mask [0]: the rollout "
            "still counts in the statistics of its prompt",
            rows=empty,
        )
    problems = count_each_mask(columns.get("env_mask", ()))[1]
    if problems:
        got = "; ".join(f"row {row}: a mask {problem}" for row, problem in list(problems.items())[:5])
        raise _bad_output(f"env_mask of {format_rows(list(problems))}", got, "0 and 1", list(problems))
    for name in ("env_mask", "logprobs") if lengths else ():
        found = [row_length(values) for values in columns.get(name, ())]
        bad = [row for row, pair in enumerate(zip(found, lengths, strict=False)) if pair[0] != pair[1]]
        if bad:
            got = "; ".join(f"row {row}: {found[row]} for a completion of {lengths[row]}" for row in bad[:5])
            raise _bad_output(f"{name} of {format_rows(bad)}", got, "one entry per token of the completion", bad)


def padding_rows(flags: Any, rows: int) -> list[bool]:
    """Which rows only fill up the batch; none without flags.

    Raises:
        SampleError: flags that are no bools; all rows are named.

    >>> padding_rows(None, 2), padding_rows([0, True], 2)
    ([False, False], [False, True])
    """
    return [False] * rows if flags is None else read_flags(PADDING, list(flags))


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


def _check_numbers(num_generations: Any, pad_token_id: Any) -> None:
    given = {"num_generations": (num_generations, 1), "pad_token_id": (pad_token_id, 0)}
    wrong = [f"{name}={shown(value)}" for name, (value, low) in given.items() if not is_whole(value, low)]
    if wrong:
        raise ConfigError(
            "fill_rows",
            got=", ".join(wrong),
            expected="num_generations from 1 on, and the id of a token",
            reason="TRL trains exactly num_generations rows of each prompt, filled up with this token",
            remedy="pass trainer.num_generations and the pad_token_id of the tokenizer, or its eos_token_id",
        )


def _nested(prompts: Any) -> list[list[list[Mapping[str, Any]]]]:
    """Prompts, their rollouts and the rows of these as lists."""
    listed, bad = [], []
    for number, rollouts in enumerate(_listed(prompts) or ()):
        inner = [_listed(rows) for rows in _listed(rollouts) or ()]
        if _listed(rollouts) is None or not all(
            rows is not None and all(isinstance(row, Mapping) for row in rows) for rows in inner
        ):
            bad.append(number)
        listed.append([rows or [] for rows in inner])
    if bad or _listed(prompts) is None:
        raise _bad_output(
            f"rollouts of {format_rows(bad, 'prompt')}" if bad else "prompts of fill_rows",
            "no list of rollouts, each a list of rows" if bad else f"a value of type {type(prompts).__name__}",
            "for each prompt a list of rollouts, for each rollout a list of rows, each a mapping",
        )
    return listed


def _listed(values: Any) -> list[Any] | None:
    return list(values) if isinstance(values, list | tuple) else None


def _bad_output(subject: str, got: str, expected: str, rows: Sequence[int] = ()) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected=expected,
        reason="TRL pads them to one tensor, where another length or value trains other tokens",
        remedy="return for each row the token ids that were used, and masks and log-probs of the same length",
        rows=rows,
    )


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
