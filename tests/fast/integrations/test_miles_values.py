"""Values in samples, flags and masks that a trainer would misread: each is right, or an error that names its rows."""

from argparse import Namespace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from trainer_samples import prompt_group as samples

from miles_norm.errors import ConfigError, MilesNormError, SampleError
from miles_norm.integrations.miles import convert_samples_to_train_data, pg_loss_reducer, post_process_rewards

ARGS = Namespace(advantage_estimator="grpo")
HOOKS = pytest.mark.parametrize("hook", [post_process_rewards, convert_samples_to_train_data])
NAN = float("nan")


def with_field(name: str, value: Any, good: Any) -> list[Any]:
    """Three rows, of which the first and the last have the value."""
    rows = samples(0, 1, 0)
    for row, each in zip(rows, (value, good, value), strict=True):
        setattr(row, name, each)
    return rows


class TestSamples:
    @pytest.mark.parametrize(
        ("tokens", "said"),
        [
            ([7, 8.0, 9], "row 0: 8.0 at 1"),
            ([7, -8, 9], "row 0: -8 at 1"),
            ([7, None, 9], "row 0: None at 1"),
            ([7, "8", 9], "row 0: '8' at 1"),
            ([7, 8, 2**31], "row 0: 2147483648 at 2"),
            ([7, 8, 2**70], "row 0: 1180591620717411303424 at 2"),
            ([[7], [8], [9]], "row 0: .7. at 0"),
            ("789", "row 0: a value of type str"),
            (b"789", "row 0: a value of type bytes"),
            (np.array([7.0, 8.0, 9.0]), "row 0: 7.0 at 0"),
            (np.array([7, -8, 9]), "row 0: -8 at 1"),
            (np.ones((3, 1), dtype=int), "row 0: a value of type ndarray and dtype int64"),
            (torch.tensor([7, 8, -9]), "row 0: -9 at 2"),
            (torch.tensor([7, 8, 9.5]), "row 0: 7.0 at 0"),
            (torch.ones(3, dtype=torch.int64, device="meta"), "row 0: a value of type Tensor"),
            (torch.ones(3, dtype=torch.int64).to_sparse(), "row 0: a value of type Tensor"),
        ],
    )
    def test_tokens_that_are_none(self, tokens: Any, said: str) -> None:
        with pytest.raises(SampleError, match=f"tokens of rows 0, 2\n  got:      {said}") as error:
            convert_samples_to_train_data(ARGS, with_field("tokens", tokens, [7, 8, 9]))
        assert error.value.rows == (0, 2)

    @pytest.mark.parametrize(
        "tokens",
        [(7, 8, 9), np.array([7, 8, 9], dtype=np.uint16), torch.tensor([7, 8, 9]), [np.int64(7), 8, 2**31 - 1]],
    )
    def test_tokens_of_any_kind(self, tokens: Any) -> None:
        data = convert_samples_to_train_data(ARGS, with_field("tokens", tokens, [7, 8, 9]))
        given = [int(token) for token in tokens]
        assert [[int(token) for token in row] for row in data["tokens"]] == [given, [7, 8, 9], given]

    @pytest.mark.parametrize("name", ["rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"])
    @pytest.mark.parametrize(
        "values",
        [
            ["-1", -2.0],
            [NAN, -2.0],
            [-1.0, None],
            [float("-inf"), -2.0],
            [[-1.0], [-2.0]],
            [1j, 2j],
            np.array([-1.0, NAN]),
            np.array(["-1", "-2"]),
            torch.tensor([-1.0, NAN]),
            torch.ones(2, 1),
        ],
    )
    def test_log_probs_that_are_none(self, name: str, values: Any) -> None:
        with pytest.raises(SampleError, match=f"{name} of rows 0, 2\n(.*\n)  expected: .* finite numbers") as error:
            convert_samples_to_train_data(ARGS, with_field(name, values, [-1.0, -2.0]))
        assert error.value.rows == (0, 2)

    @pytest.mark.parametrize("values", [[-1, -2.0], [1e308, 1e-300], [np.float32(-1), -2.0], np.array([-1, -2])])
    def test_log_probs_of_any_kind(self, values: Any) -> None:
        data = convert_samples_to_train_data(ARGS, samples(0, 1, rollout_log_probs=values))
        assert [float(value) for value in data["rollout_log_probs"][1]] == [float(value) for value in values]

    @pytest.mark.parametrize("index", [1.0, torch.tensor(1), np.int64(1), np.array([1])])
    def test_an_index_out_of_a_table_or_tensor_is_a_number(self, index: Any) -> None:
        rows = samples(0, 1)
        rows[1].index = index
        data = convert_samples_to_train_data(ARGS, rows)
        assert data["sample_indices"] == [0, 1]
        assert {type(each) for each in data["sample_indices"]} == {int}

    @pytest.mark.parametrize("index", [2**70, -(2**63) - 1, True, torch.ones(2), NAN])
    def test_an_index_that_int64_cannot_hold(self, index: Any) -> None:
        with pytest.raises(SampleError, match=r"index of rows 0, 2\n(.*\n)  expected: an integer of int64") as error:
            convert_samples_to_train_data(ARGS, with_field("index", index, 1))
        assert error.value.rows == (0, 2)

    @pytest.mark.parametrize("length", [2.5, "2", -1, NAN, True, [2]])
    def test_response_lengths_that_are_none(self, length: Any) -> None:
        rows = with_field("response_length", length, 2)
        for row in rows:
            row.loss_mask = [1, 1]
        with pytest.raises(SampleError, match="response_length of rows 0, 2"):
            convert_samples_to_train_data(ARGS, rows)

    @pytest.mark.parametrize(
        "fields", [{"tokens": 7}, {"loss_mask": 7, "is_padding": True}, {"rollout_log_probs": 0.5}]
    )
    def test_what_has_no_length(self, fields: dict[str, Any]) -> None:
        rows = samples(0, 1)
        for name, value in fields.items():
            setattr(rows[1], name, value)
        with pytest.raises(SampleError, match=r"(tokens|loss_mask|rollout_log_probs) of row"):
            convert_samples_to_train_data(ARGS, rows)

    @HOOKS
    def test_rows_may_be_mappings_of_any_kind(self, hook: Any) -> None:
        rows = [vars(row) for row in samples(0, 1)]
        assert hook(ARGS, [MappingProxyType(row) for row in rows]) == hook(ARGS, rows)

    @HOOKS
    @pytest.mark.parametrize("given", [[1, 2], [None], torch.ones(2), np.array(1), "ab", 7])
    def test_what_are_no_rows(self, hook: Any, given: Any) -> None:
        with pytest.raises(SampleError, match="samples"):
            hook(ARGS, given)

    @HOOKS
    def test_more_arguments_than_the_contract_has(self, hook: Any) -> None:
        """The harness of slime asks for two parameters; a trainer that passes more is told so by Python."""
        with pytest.raises(TypeError, match=r"takes 2 positional arguments but 4 were given"):
            hook(ARGS, samples(0, 1), [0.0, 1.0], [0.0, 1.0])


class TestFlags:
    @HOOKS
    @pytest.mark.parametrize("name", ["advantage_estimator", "reward_key", "n_samples_per_prompt"])
    @pytest.mark.parametrize("value", [["grpo"], {"grpo": 1}, torch.ones(2), np.array([1, 2]), object()])
    def test_flags_that_no_command_line_gives(self, hook: Any, name: str, value: Any) -> None:
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigError, match=rf"args\.{name}, args\.rollout_batch_size\n  got: .* for {flag}, "):
            hook(Namespace(**{name: value, "rollout_batch_size": []}), samples(0, 1))

    @pytest.mark.parametrize("name", ["multi_lora_n_adapters", "use_dynamic_global_batch_size"])
    def test_flags_of_the_step(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"args\.{name}\n"):
            convert_samples_to_train_data(Namespace(advantage_estimator="grpo", **{name: torch.ones(2)}), samples(0, 1))

    @pytest.mark.parametrize("size", ["8", 2.5, None, [2]])
    def test_a_batch_size_that_is_none_is_not_spoken_of(
        self, settings: Any, size: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings("missing_reward: exclude")
        args = Namespace(advantage_estimator="grpo", global_batch_size=size)
        convert_samples_to_train_data(args, samples(1.0, None, 0.0))
        assert "--global-batch-size" not in caplog.text


class TestReducer:
    MASKS = (torch.tensor([1, 1, 0]), torch.tensor([1, 0]))

    @pytest.fixture(autouse=True)
    def fixture_file(self, settings: Any) -> None:
        settings("aggregation: constant\nmax_tokens: 16", "MILES_NORM_LOSS_CONFIG")

    @pytest.mark.parametrize("entry", [2.0, -1.0, NAN, 0.5])
    def test_masks_with_other_entries(self, entry: float) -> None:
        with pytest.raises(SampleError, match="loss_masks of row 1\n  got:      row 1: with entries other") as error:
            pg_loss_reducer([9, 9], [3, 2], [self.MASKS[0], torch.tensor([1.0, entry])], False)
        assert error.value.rows == (1,)

    @pytest.mark.parametrize(
        "mask",
        [[1, 0], None, torch.ones(3), torch.ones(1, 2), torch.tensor(1), torch.ones(2).to_sparse(), torch.ones(2) + 0j],
    )
    def test_masks_of_another_form(self, mask: Any) -> None:
        with pytest.raises(SampleError, match="loss_masks of row 1\n"):
            pg_loss_reducer([9, 9], [3, 2], [self.MASKS[0], mask], False)

    @pytest.mark.parametrize(
        ("lengths", "masks"), [([], []), ([3], MASKS), (None, MASKS), ([3, 2], None), ([3, 2], "ab"), (7, MASKS)]
    )
    def test_what_are_no_masks(self, lengths: Any, masks: Any) -> None:
        with pytest.raises(SampleError, match=r"loss_masks\n  got:      loss_masks: .*, response_lengths: "):
            pg_loss_reducer([9, 9], lengths, masks, False)

    @pytest.mark.parametrize("flag", [None, 1, torch.ones(2), "false"])
    def test_a_flag_that_is_no_switch(self, flag: Any) -> None:
        with pytest.raises(ConfigError, match="'constant' with --calculate-per-token-loss "):
            pg_loss_reducer([9, 9], [3, 2], self.MASKS, flag)

    @pytest.mark.parametrize("losses", [[1.0] * 5, None, torch.ones(5, dtype=torch.int64), torch.tensor([NAN] * 5)])
    def test_losses_that_are_none(self, losses: Any) -> None:
        with pytest.raises(MilesNormError, match=r"(?s)token.losses.*got: "):
            pg_loss_reducer([9, 9], [3, 2], self.MASKS, False)(losses)
