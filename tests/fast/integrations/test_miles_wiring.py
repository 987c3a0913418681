"""Wiring of the Miles and slime hooks: the contract, what is refused, what is warned of."""

import importlib
import inspect
import logging
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from trainer_samples import SlimeSample
from trainer_samples import prompt_group as samples

from miles_norm.errors import ConfigError, SampleError
from miles_norm.integrations.miles import convert_samples_to_train_data, post_process_rewards

HOOKS = pytest.mark.parametrize("hook", [post_process_rewards, convert_samples_to_train_data])


class TestContract:
    @HOOKS
    def test_parameters_have_the_names_that_slimes_harness_asks_for(self, hook: Any) -> None:
        assert tuple(inspect.signature(hook).parameters) == ("args", "samples")

    @HOOKS
    def test_an_empty_args_object_takes_the_defaults_and_says_so(
        self, hook: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "miles_norm"):
            result = hook(type("Args", (), {})(), samples(0.5, 1.5, kind=SlimeSample))
        rewards = result["rewards"] if isinstance(result, dict) else result[1]
        # (0.5 - 1) / (sqrt(1/2) + 1e-6)
        assert rewards == pytest.approx([-0.5 / (0.5**0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)])
        assert "args has none of the flags --advantage-estimator, --disable-rewards-normalization" in caplog.text
        assert "pass the trainer's own args" in caplog.text

    def test_keys_that_slimes_harness_asks_for(self) -> None:
        keys = {"tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "loss_masks"}
        data = convert_samples_to_train_data(Namespace(advantage_estimator="grpo"), samples(0.5, 1.5))
        assert keys <= data.keys()
        assert {"rollout_ids", "rollout_mask_sums"} <= data.keys()
        assert not {"weights", "trained"} & data.keys()

    def test_reward_key_picks_an_entry(self) -> None:
        rows = samples({"accuracy": 1.0, "style": 0.0}, {"accuracy": 0.0, "style": 1.0})
        args = Namespace(advantage_estimator="grpo", grpo_std_normalization=False, reward_key="accuracy")
        assert post_process_rewards(args, rows) == ([1.0, 0.0], [0.5, -0.5])
        args.reward_key = ""  # argparse's way to say none
        assert post_process_rewards(args, samples(1.0, 0.0)) == ([1.0, 0.0], [0.5, -0.5])

    def test_masks_need_not_be_filled_nor_removed_rows_zeroed(self) -> None:
        """Rollout 0 on two rows: without a mask both tokens are trained, and the removed row does not speak."""
        rows = samples(1.0, 0.0, 0.0)
        rows[1].index, rows[1].loss_mask, rows[1].remove_sample = 0, [1, 1], True
        args = Namespace(advantage_estimator="grpo", grpo_std_normalization=False)
        assert post_process_rewards(args, rows)[1] == [0.5, 0.5, -0.5]
        assert (rows[0].loss_mask, rows[1].loss_mask) == (None, [1, 1])
        data = convert_samples_to_train_data(args, rows)
        assert (data["loss_masks"], data["rollout_mask_sums"]) == ([[1, 1], [0, 0], [1, 1]], [2, 2, 2])

    def test_columns_of_slimes_nucleus_sampling_are_handed_on(self) -> None:
        fields = {"rollout_top_p_token_ids": [3, 4, 5], "rollout_top_p_token_offsets": [0, 1, 3]}
        args = Namespace(advantage_estimator="grpo")
        data = convert_samples_to_train_data(args, samples(0, 1, kind=SlimeSample, **fields))
        assert {name: data[name] for name in fields} == {name: [value] * 2 for name, value in fields.items()}
        data = convert_samples_to_train_data(args, samples(0, 1, kind=SlimeSample))
        assert not fields.keys() & data.keys()


class TestRefusals:
    @HOOKS
    def test_nested_and_empty_samples(self, hook: Any) -> None:
        args = Namespace(advantage_estimator="grpo")
        with pytest.raises(SampleError, match=r"got:      2 lists with 4 samples in them\n(.*\n)*.*group_index"):
            hook(args, [samples(0, 1), samples(1, 0)])
        with pytest.raises(SampleError, match=r"got:      no samples\n(.*\n)*.*filters left something"):
            hook(args, [])

    @HOOKS
    def test_arguments_in_the_wrong_order(self, hook: Any) -> None:
        with pytest.raises(SampleError, match=r"samples\n  got:      Namespace"):
            hook(samples(0, 1), Namespace(advantage_estimator="grpo"))

    @pytest.mark.parametrize(
        "text",
        [
            "missing_reward: exclude",
            "untrained_rollouts: exclude",
            "truncated_rollouts: untrain",
            "zero_variance_groups: drop_from_loss",
            "min_group_size: 2",
        ],
    )
    def test_the_reward_hook_cannot_take_rows_out_of_the_loss(self, settings: Any, text: str) -> None:
        settings(text)
        args = Namespace(advantage_estimator="grpo")
        name, value = text.split(": ")
        with pytest.raises(ConfigError, match=f"got:      {name}='?{value}'?\n(.*\n)*.*convert_samples_to_train_data"):
            post_process_rewards(args, samples(0, 1))
        convert_samples_to_train_data(args, samples(0, 1))

    def test_dynamic_batch_sizes(self) -> None:
        args = Namespace(advantage_estimator="grpo", use_dynamic_global_batch_size=True)
        with pytest.raises(ConfigError, match=r"got:      --use-dynamic-global-batch-size\n(.*\n)*.*metadata=\.\.\."):
            convert_samples_to_train_data(args, samples(0, 1))
        assert post_process_rewards(args, samples(0, 1))[0] == [0.0, 1.0]

    @pytest.mark.parametrize(
        ("flags", "fields", "said"),
        [
            ({"multi_lora_n_adapters": 2}, {}, "a multi-LoRA step, --multi-lora-n-adapters\n"),
            ({}, {"adapter": {"name": "a", "slot": 0}}, r"--multi-lora-n-adapters \(rows 0, 1 with an adapter\)\n"),
        ],
    )
    def test_multi_lora_steps(self, flags: dict[str, Any], fields: dict[str, Any], said: str) -> None:
        args = Namespace(advantage_estimator="grpo", **flags)
        with pytest.raises(ConfigError, match=said):
            convert_samples_to_train_data(args, samples(0, 1, **fields))
        assert post_process_rewards(args, samples(0, 1, **fields))[0] == [0.0, 1.0]

    @pytest.mark.parametrize("index", [None, "seven", 0.5])
    def test_missing_indices(self, index: Any) -> None:
        rows = samples(0, 1, 1)
        rows[1].index = rows[2].index = index
        with pytest.raises(SampleError, match=f"index of rows 1, 2\n  got:      {index!r}, {index!r}\n") as error:
            convert_samples_to_train_data(Namespace(advantage_estimator="grpo"), rows)
        assert error.value.rows == (1, 2)


class TestWarnings:
    @HOOKS
    def test_missing_group_ids(self, hook: Any, caplog: pytest.LogCaptureFixture) -> None:
        rows = samples(0, 1)
        rows[1].group_index = None
        with caplog.at_level(logging.WARNING, "miles_norm"):
            hook(Namespace(advantage_estimator="grpo"), rows)
        assert "prompt groups were guessed: 'group_index' is missing on row 1" in caplog.text
        assert "set group_index on every row when it is sampled" in caplog.text

    def test_missing_rollout_ids(self, caplog: pytest.LogCaptureFixture) -> None:
        rows = samples(0, 1)
        rows[0].index = None
        with caplog.at_level(logging.WARNING, "miles_norm"):
            post_process_rewards(Namespace(advantage_estimator="grpo"), rows)
        assert "row 0 has neither rollout_id nor index and is a rollout of its own" in caplog.text

    def test_excluded_rollouts_leave_the_train_data(self, settings: Any, caplog: pytest.LogCaptureFixture) -> None:
        """Rollout 1 of the rewards 1, None, 0 is unscored: two rollouts are left, and the trainer counts two."""
        settings("missing_reward: exclude")
        rows = samples(1.0, None, 0.0, 0.0)
        rows[3].index = 2
        args = Namespace(advantage_estimator="grpo", grpo_std_normalization=False, global_batch_size=3)
        with caplog.at_level(logging.WARNING, "miles_norm"):
            data = convert_samples_to_train_data(args, rows)
        assert data["rewards"] == [0.5, -0.5, -0.5]
        assert data["rollout_ids"] == data["sample_indices"] == [0, 2, 2]
        assert data["rollout_mask_sums"] == [2, 4, 4]
        assert {len(column) for column in data.values()} == {3}
        assert caplog.messages[-1] == (
            "1 of 4 rows are left out of the train data, those of rollout 1; 2 rollouts are left, no multiple of "
            "--global-batch-size 3: the trainer drops what does not fill a step"
        )

    def test_nothing_is_said_of_steps_that_are_full(self, settings: Any, caplog: pytest.LogCaptureFixture) -> None:
        settings("missing_reward: exclude")
        args = Namespace(advantage_estimator="grpo", global_batch_size=2)
        with caplog.at_level(logging.WARNING, "miles_norm"):
            convert_samples_to_train_data(args, samples(1.0, None, 0.0))
        assert caplog.messages == [
            "1 of 3 rows are left out of the train data, those of rollout 1; 2 rollouts are left"
        ]

    @pytest.mark.parametrize("index", [1, 7])
    def test_padding_leaves_the_train_data(self, index: int, caplog: pytest.LogCaptureFixture) -> None:
        """A copy of a row of rollout 1, or one with an id of its own, which the trainer would count as a rollout."""
        rows = samples(1.0, 0.0, 0.0)
        rows[2].index, rows[2].is_padding = index, True
        args = Namespace(advantage_estimator="grpo", grpo_std_normalization=False, global_batch_size=2)
        with caplog.at_level(logging.WARNING, "miles_norm"):
            assert convert_samples_to_train_data(args, rows)["rollout_ids"] == [0, 1]
        assert caplog.messages[-1].startswith("1 of 3 rows are left out of the train data")

    def test_a_batch_of_which_nothing_counts_is_an_error(self, settings: Any) -> None:
        settings("zero_variance_groups: drop_from_loss")
        with pytest.raises(SampleError, match=r"2 rollouts, none of which counts\n(.*\n)*.*--dynamic-sampling"):
            convert_samples_to_train_data(Namespace(advantage_estimator="grpo"), samples(1.0, 1.0))

    @HOOKS
    @pytest.mark.parametrize(
        ("module", "sharded", "warns"),
        [
            ("slime.ray.rollout", ["tokens", "rewards"], True),
            ("slime.ray.rollout", ["tokens", "rewards", "rollout_mask_sums"], False),
            ("miles.ray.rollout.train_data_conversion", ["tokens", "rewards"], True),
            ("miles.ray.rollout.train_data_conversion", ["tokens", "rewards", "rollout_mask_sums"], False),
        ],
    )
    def test_a_trainer_that_drops_rollout_mask_sums_is_noticed(
        self,
        hook: Any,
        module: str,
        sharded: list[str],
        warns: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Trainers keep a fixed list of columns when they shard; the hook reads the file of the one that is loaded."""
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text(f"KEYS = {sharded!r}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        rows = samples(1.0, 1.0, 0.0)
        rows[1].index = 0
        try:
            importlib.import_module(module)
            with caplog.at_level(logging.WARNING, "miles_norm"):
                hook(Namespace(advantage_estimator="grpo"), rows)
                assert ("knows no rollout_mask_sums" in caplog.text) is warns
                caplog.clear()
                hook(Namespace(advantage_estimator="grpo"), samples(1.0, 0.0))  # with one row each nothing is lost
                assert caplog.messages == []
        finally:
            for name in [name for name in sys.modules if name.split(".")[0] == module.split(".")[0]]:
                del sys.modules[name]

    @pytest.mark.parametrize(
        ("content", "warns"),
        [(b"\xff\x00rollout_mask_sums\x00", False), (b"\xff\x00rollout_ids\x00", True), (None, False)],
        ids=["compiled", "compiled, without it", "in an archive"],
    )
    def test_a_trainer_that_is_no_source_text(
        self,
        content: bytes | None,
        warns: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        module = types.ModuleType("slime.ray.rollout")
        module.__file__ = str(tmp_path / "rollout.so")
        if content is not None:
            Path(module.__file__).write_bytes(content)
        monkeypatch.setitem(sys.modules, "slime.ray.rollout", module)
        rows = samples(1.0, 1.0, 0.0)
        rows[1].index = 0
        post_process_rewards(Namespace(advantage_estimator="grpo"), rows)
        assert ("knows no rollout_mask_sums" in caplog.text) is warns
