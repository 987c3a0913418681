"""Laying rollouts of several rows out in TRL's fixed number of rows; TRL itself is not needed."""

from typing import Any

import pytest
import torch

from miles_norm.errors import ConfigError, SampleError
from miles_norm.integrations.trl_config import check_loss_type, divided_by
from miles_norm.integrations.trl_rows import check_output, fill_rows, number_rollouts, padding_rows


def row(token: int, **given: Any) -> dict[str, Any]:
    return {"prompt_ids": [7], "completion_ids": [token, token], "logprobs": [-1.0, -2.0]} | given


def test_rows_of_a_prompt_are_adjacent_and_filled_up() -> None:
    rows = fill_rows([[[row(1)], [row(2), row(3)]], [[row(4)]], []], num_generations=3, pad_token_id=0)
    assert [ids[0] for ids in rows["completion_ids"]] == [1, 2, 3, 4, 0, 0, 0, 0, 0]
    assert rows["rollout_id"] == [0, 1, 1, 0, 1, 2, 0, 1, 2]
    assert rows["is_padding"] == [False] * 4 + [True] * 5
    assert rows["prompt_ids"] == [[7]] * 6 + [[0]] * 3  # a prompt without rows
    assert rows["env_mask"] == [[1, 1]] * 4 + [[0]] * 5
    assert [len(values) for values in rows["logprobs"]] == [2] * 4 + [1] * 5


def test_masks_and_other_columns_are_carried() -> None:
    given = row(1, env_mask=[0, 1], outcome=0.5)
    rows = fill_rows([[[given]]], num_generations=2, pad_token_id=0)
    assert (rows["env_mask"], rows["outcome"]) == ([[0, 1], [0]], [0.5, None])
    assert given == row(1, env_mask=[0, 1], outcome=0.5)


def test_prompts_with_too_many_rows_are_named() -> None:
    prompts = [[[row(1)] * 3], [[row(1)]], [[row(1)], [row(1)] * 2]]
    with pytest.raises(SampleError, match=r"(?s)prompts 0, 2.*3 rows of 1 rollouts, 3 rows of 2.*num_generations=2"):
        fill_rows(prompts, num_generations=2, pad_token_id=0)


def test_rows_have_the_same_keys() -> None:
    with pytest.raises(SampleError, match=r"(?s)rows 0, 2.*no outcome") as caught:
        fill_rows([[[row(1)], [row(1, outcome=1.0), row(1)]]], num_generations=3, pad_token_id=0)
    assert caught.value.rows == (0, 2)
    with pytest.raises(SampleError, match="no logprobs"):
        fill_rows([[[{"prompt_ids": [1], "completion_ids": [2]}]]], num_generations=1, pad_token_id=0)


def test_lists_of_another_length_are_named() -> None:
    output = fill_rows([[[row(1)]]], num_generations=2, pad_token_id=0)
    check_output(output, 2)
    check_output({"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": None}, 1)
    with pytest.raises(SampleError, match=r"(?s)got: +1 rollout_id\n.*expected: 2 of each"):
        check_output(output | {"rollout_id": [0]}, 2)


def test_ids_are_unique_within_a_prompt() -> None:
    assert number_rollouts([0, 0, 1, 0, 0, 0], groups=[0, 0, 0, 1, 1, 2]) == [0, 0, 2, 3, 3, 5]
    assert number_rollouts(None, groups=[0, 0, 1]) == [0, 1, 2]
    assert number_rollouts(torch.tensor([4, 4, 4]), groups=[0, 0, 1]) == [0, 0, 2]
    with pytest.raises(SampleError, match="row 1"):
        number_rollouts([0, [0]], groups=[0, 0])


@pytest.mark.parametrize("name", ["bnpo", "no such loss"])
def test_losses_that_divide_by_what_is_not_known_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"got: +'{name}'"):
        check_loss_type(name)


def test_a_batch_without_a_token_divides_by_no_zero() -> None:
    assert divided_by("dapo", torch.zeros(3, dtype=torch.int64), 8).tolist() == [1.0]


OUTPUT: dict[str, Any] = {
    "prompt_ids": [[7], [7], [8]],
    "completion_ids": [[1, 2], [3], [4, 5]],
    "logprobs": [[-1.0, None], [-2.0], [-1.0, -2.0]],
    "env_mask": [[1, 0], [1], torch.tensor([0, 1])],
    "rollout_id": [0, 0, 0],
    "is_padding": [False, False, 1],
}


@pytest.mark.parametrize(
    ("columns", "match", "rows"),
    [
        ({"env_mask": [[2, 0], [1], [1, -1]]}, "env_mask of rows 0, 2\n", (0, 2)),
        ({"env_mask": [None, [1], [float("nan"), 1]]}, "env_mask of rows 0, 2\n", (0, 2)),
        ({"env_mask": [[1], [1], []]}, r"env_mask of rows 0, 2\n.* row 0: 1 for a completion of 2", (0, 2)),
        ({"logprobs": [[-1.0], [-1.0], 5]}, "logprobs of rows 0, 2\n", (0, 2)),
        ({"completion_ids": [[1, 2.0], [3], [4, -5]]}, "completion_ids of rows 0, 2\n", (0, 2)),
        ({"completion_ids": ["12", [3], None]}, "completion_ids of rows 0, 2\n", (0, 2)),
        (
            {"completion_ids": [[], [3], []], "logprobs": [[], [-2.0], []]},
            "completion_ids of rows 0, 2\n.*no token",
            (0, 2),
        ),
        ({"prompt_ids": [[7], 7, [8]]}, "prompt_ids of row 1\n", (1,)),
        ({"rollout_id": 5, "env_mask": "abc"}, "got:      env_mask of type str, rollout_id of type int\n", ()),
    ],
)
def test_values_that_do_not_fit_are_named(columns: dict[str, Any], match: str, rows: tuple[int, ...]) -> None:
    check_output(OUTPUT, 3)
    with pytest.raises(SampleError, match=match) as error:
        check_output(OUTPUT | columns, 3)
    assert error.value.rows == rows


@pytest.mark.parametrize("output", [None, [1], "ids"])
def test_what_is_no_output(output: Any) -> None:
    with pytest.raises(SampleError, match=r"what rollout_func returned\n(.*\n)  expected: a dict of lists"):
        check_output(output, 1)


def test_padding_flags_are_bools() -> None:
    assert padding_rows(OUTPUT["is_padding"], 3) == [False, False, True]
    assert padding_rows(torch.tensor([0, 1]), 2) == [False, True]
    with pytest.raises(SampleError, match="is_padding of rows 0, 1, 3") as error:
        padding_rows(["False", 2, None, 0.5], 4)
    assert error.value.rows == (0, 1, 3)


def test_masks_may_be_arrays() -> None:
    rows = fill_rows([[[row(1, env_mask=torch.tensor([0, 1]))]]], num_generations=1, pad_token_id=0)
    assert rows["env_mask"][0].tolist() == [0, 1]
    with pytest.raises(SampleError, match="env_mask of row 0"):
        fill_rows([[[row(1, env_mask=[])]]], num_generations=1, pad_token_id=0)


@pytest.mark.parametrize("prompts", [None, "ab", [[5]], [[[5]]], [5], [[row(1)]]])
def test_what_is_not_nested(prompts: Any) -> None:
    with pytest.raises(SampleError, match="for each prompt a list of rollouts"):
        fill_rows(prompts, num_generations=2, pad_token_id=0)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((2.0, 0), "num_generations=2.0"),
        ((0, None), "num_generations=0, pad_token_id=None"),
        ((True, -1), "num_generations=True, pad_token_id=-1"),
    ],
)
def test_numbers_that_are_none(numbers: tuple[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"got:      {said}\n"):
        fill_rows([[[row(1)]]], *numbers)
