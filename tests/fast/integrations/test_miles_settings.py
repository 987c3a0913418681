"""Settings of the Miles and slime hooks: flags, the file beside them, what conflicts; the reducer of the loss."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_norm.errors import ConfigError, SampleError
from miles_norm.integrations.miles import convert_samples_to_train_data, pg_loss_reducer, post_process_rewards
from miles_norm.integrations.miles_flags import normalization_settings


class TestSettings:
    def test_flags_are_read(self) -> None:
        args = Namespace(
            advantage_estimator="reinforce_plus_plus_baseline",
            rewards_normalization=True,
            grpo_std_normalization=False,
            reward_key="score",
            n_samples_per_prompt=8,
            rollout_batch_size=32,
            lr=1e-6,
        )
        config = normalization_settings(args)
        read = {name: value for name, value in vars(args).items() if name != "lr"}
        assert {name: getattr(config, name) for name in read} == read

    def test_the_file_sets_what_is_no_flag(self, settings: Any) -> None:
        settings("rollout_reward: max\nn_samples_per_prompt: 4")
        config = normalization_settings(Namespace(advantage_estimator="gspo", n_samples_per_prompt=4))
        assert (config.advantage_estimator, config.rollout_reward, config.n_samples_per_prompt) == ("gspo", "max", 4)

    def test_an_empty_variable_names_no_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MILES_NORM_CONFIG", "")
        assert normalization_settings(Namespace(reward_key="a")).reward_key == "a"

    def test_conflicts_are_errors_that_name_both(self, settings: Any) -> None:
        settings("rewards_normalization: false\nn_samples_per_prompt: 8\nrollout_batch_size: 2\nreward_key: style")
        args = Namespace(rewards_normalization=True, n_samples_per_prompt=4, rollout_batch_size=2, reward_key="score")
        with pytest.raises(ConfigError) as error:
            normalization_settings(args)
        assert error.value.got == (
            "rewards_normalization is False in the file and True by --disable-rewards-normalization; "
            "reward_key is 'style' in the file and 'score' by --reward-key; "
            "n_samples_per_prompt is 8 in the file and 4 by --n-samples-per-prompt"
        )
        assert "MILES_NORM_CONFIG=" in error.value.subject

    @pytest.mark.parametrize("flag", ["grpo", "gspo", "cispo"])
    @pytest.mark.parametrize("estimator", ["rloo", "opo", "dr_grpo", "maxrl", "pass_at_k"])
    def test_an_estimator_without_a_flag_goes_with_flags_that_take_rewards(
        self, settings: Any, flag: str, estimator: str
    ) -> None:
        settings(f"advantage_estimator: {estimator}")
        assert normalization_settings(Namespace(advantage_estimator=flag)).advantage_estimator == estimator

    @pytest.mark.parametrize(
        ("flag", "estimator"),
        [
            ("ppo", "rloo"),
            ("reinforce_plus_plus_baseline", "dr_grpo"),
            ("grpo", "gspo"),
            ("grpo", "ppo"),
            ("gspo", "grpo"),
            ("cispo", "gspo"),
        ],
    )
    def test_an_estimator_that_the_trainer_reads_otherwise_is_a_conflict(
        self, settings: Any, flag: str, estimator: str
    ) -> None:
        settings(f"advantage_estimator: {estimator}")
        text = f"advantage_estimator is '{estimator}' in the file and '{flag}' by --advantage-estimator"
        with pytest.raises(ConfigError, match=text):
            normalization_settings(Namespace(advantage_estimator=flag))

    def test_the_advantages_of_cispo_are_those_of_grpo(self, settings: Any) -> None:
        settings("advantage_estimator: grpo")
        assert normalization_settings(Namespace(advantage_estimator="cispo")).advantage_estimator == "grpo"

    @pytest.mark.parametrize(("flag", "ours"), [("cispo", "grpo"), ("rloo", "rloo"), ("ppo", "ppo")])
    def test_flags_alone(self, flag: str, ours: str) -> None:
        assert normalization_settings(Namespace(advantage_estimator=flag)).advantage_estimator == ours

    def test_an_estimator_that_nobody_knows(self) -> None:
        with pytest.raises(ConfigError, match=r"got:      advantage_estimator='gae'\n  expected: .*'grpo', 'gspo'"):
            normalization_settings(Namespace(advantage_estimator="gae"))

    def test_a_file_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("MILES_NORM_CONFIG", str(tmp_path / "none.yaml"))
        with pytest.raises(ConfigError, match=r"none.yaml\n  got:      no such file"):
            normalization_settings(Namespace(advantage_estimator="grpo"))

    def test_whitening_is_the_trainers(self, settings: Any) -> None:
        settings("options:\n  whitening: token")
        with pytest.raises(ConfigError, match=r"got:      'token'\n(.*\n)*.*--normalize-advantages"):
            normalization_settings(Namespace(advantage_estimator="grpo"))


class TestReducer:
    MASKS = (torch.tensor([1, 1, 0]), torch.tensor([1, 0]))

    def test_a_constant_divides_the_sum_over_tokens(self, settings: Any) -> None:
        settings("aggregation: constant\nmax_tokens: 16", "MILES_NORM_LOSS_CONFIG")
        losses = torch.tensor([1.0, 2.0, torch.nan, 5.0, 50.0], requires_grad=True)
        reduced = pg_loss_reducer([9, 9], [3, 2], self.MASKS, False)(losses)
        reduced.backward()
        assert reduced.item() == (1 + 2 + 5) / 16
        assert losses.grad is not None
        assert losses.grad.tolist() == [1 / 16, 1 / 16, 0, 1 / 16, 0]

    @pytest.mark.parametrize("aggregation", ["rollout_mean", "sample_mean", "token_mean", "prompt_mean"])
    def test_what_a_reducer_cannot_express(self, settings: Any, aggregation: str) -> None:
        settings(f"aggregation: {aggregation}", "MILES_NORM_LOSS_CONFIG")
        with pytest.raises(ConfigError, match=f"got:      '{aggregation}'\n  expected: 'constant'"):
            pg_loss_reducer([9, 9], [3, 2], self.MASKS, False)

    def test_losses_per_token_and_context_parallel_parts_are_refused(self, settings: Any) -> None:
        settings("aggregation: constant\nmax_tokens: 16", "MILES_NORM_LOSS_CONFIG")
        with pytest.raises(ConfigError, match="'constant' with --calculate-per-token-loss"):
            pg_loss_reducer([9, 9], [3, 2], self.MASKS, True)
        with pytest.raises(SampleError, match=r"shape \[3\]\n  expected: \[5\], one per response token"):
            pg_loss_reducer([9, 9], [3, 2], self.MASKS, False)(torch.ones(3))

    def test_without_a_file(self) -> None:
        with pytest.raises(ConfigError, match=r"MILES_NORM_LOSS_CONFIG\n  got:      no such environment variable"):
            pg_loss_reducer([9, 9], [3, 2], self.MASKS, False)


def test_a_reward_that_counts_as_0_is_logged_as_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("missing_reward: zero\n")
    monkeypatch.setenv("MILES_NORM_CONFIG", str(settings))
    rows = [
        {"group_index": 0, "index": k, "reward": r, "tokens": [5, 6], "response_length": 1}
        for k, r in enumerate((None, 1.0))
    ]
    args = Namespace(advantage_estimator="grpo")
    assert post_process_rewards(args, rows)[0] == [0.0, 1.0]
    assert convert_samples_to_train_data(args, rows)["raw_reward"] == [0.0, 1.0]
