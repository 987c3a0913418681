"""Real optimizer steps of ``RolloutGRPOTrainer``: gradients against the loss of rollouts, written down."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl_models import Gradients, arguments, model, prompts, tokenizer, trainer
from trl_steps import (
    FIVE_ROLLOUTS,
    check_gradient,
    gradient_of_rollouts,
    rewards_of,
    rollout_function,
    rows_by_completion,
)

from miles_norm import LossConfig, NormalizationConfig

pytestmark = pytest.mark.integration

DR_GRPO = {"normalization_config": NormalizationConfig(advantage_estimator="dr_grpo")}


def step(subject: Any) -> dict[str, Tensor]:
    """Train; the gradients of the last update, after checking that it changed every parameter."""
    before = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
    gradients = Gradients()
    subject.add_callback(gradients)
    subject.train()
    same = [name for name, p in subject.model.named_parameters() if torch.equal(p, before[name])]
    assert same == []
    return gradients.of_steps[-1]


def test_sampled_completions_are_rollouts_of_one_row(tmp_path: Path) -> None:
    seen: list[tuple[list[int], list[int], float]] = []

    def reward(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        values = [float(sum(ids) % 5) for ids in completion_ids]
        seen.extend(zip(tokenizer()(prompts)["input_ids"], completion_ids, values, strict=True))
        return values

    gradient = step(trainer(tmp_path, reward))
    rollouts = [[(prompt, completion, [1] * len(completion))] for prompt, completion, _ in seen]
    advantages = []
    for group in (seen[:4], seen[4:]):
        values = torch.tensor([value for *_, value in group], dtype=torch.float64)
        advantages += ((values - values.mean()) / (values.std() + 1e-6)).tolist()
    assert len(set(advantages)) > 2
    check_gradient(gradient, gradient_of_rollouts(rollouts, advantages))


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "luspo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0},  # of the ratio itself, not of its distance from 1
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_every_loss_is_the_mean_over_rollouts(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Rows of five rollouts, with masks and padding, shuffled into two micro-batches."""
    subject = trainer(tmp_path, rewards_of, settings=settings, rollout_func=rollout_function, **DR_GRPO)
    gradient = step(subject)
    # Distances from the mean of their prompt: 1, 0, 0.5 and 0.25, 0.75.
    rollouts = [rows for group in FIVE_ROLLOUTS.values() for rows, _ in group]
    check_gradient(gradient, gradient_of_rollouts(rollouts, [0.5, -0.5, 0.0, -0.25, 0.25]))
    assert subject.normalized_rewards.index.num_rollouts == 5 + 2  # and two padding rows
    assert subject.normalized_rewards.rollout_advantages[:3].tolist() == [0.5, -0.5, 0.0]


def test_the_deviation_is_that_of_rollouts(tmp_path: Path) -> None:
    gradient = step(trainer(tmp_path, rewards_of, rollout_func=rollout_function))
    rollouts = [rows for group in FIVE_ROLLOUTS.values() for rows, _ in group]
    first, second = 0.5 / (0.5 + 1e-6), 0.25 / (0.125**0.5 + 1e-6)
    check_gradient(gradient, gradient_of_rollouts(rollouts, [first, -first, 0.0, -second, second]))


def test_the_value_of_the_loss(tmp_path: Path) -> None:
    """The ratios are 1, so that it is minus the sum of weight times advantage times tokens.

    Of tokens that weigh alike, 19 in all: 3, 6, 4 and 4, 2 with these distances.
    """
    subject = trainer(
        tmp_path, rewards_of, rollout_func=rollout_function, loss_config=LossConfig(aggregation="token_mean"), **DR_GRPO
    )
    step(subject)
    expected = -(3 * 0.5 - 6 * 0.5 - 4 * 0.25 + 2 * 0.25) / 19
    assert subject.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("loss_config", "shares"),
    [
        (LossConfig(), 2.0),
        (LossConfig(scope="batch"), 1.0),
        (LossConfig(divisor="nominal_rollouts", nominal_rollouts=5), 1.0),
    ],
)
def test_a_batch_of_two_updates(tmp_path: Path, loss_config: LossConfig, shares: float) -> None:
    """K = 2: together they are twice the batch, each one on average; with scope "batch" its shares."""
    settings = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "max_steps": 2, "learning_rate": 0.0}
    subject = trainer(
        tmp_path, rewards_of, settings=settings, rollout_func=rollout_function, loss_config=loss_config, **DR_GRPO
    )
    gradients = Gradients()
    subject.add_callback(gradients)
    subject.train()
    assert len(gradients.of_steps) == 2
    total = {name: sum(of[name] for of in gradients.of_steps) / shares for name in gradients.of_steps[0]}
    rollouts = [rows for group in FIVE_ROLLOUTS.values() for rows, _ in group]
    check_gradient(total, gradient_of_rollouts(rollouts, [0.5, -0.5, 0.0, -0.25, 0.25]))


def test_ids_stay_with_their_rows(tmp_path: Path) -> None:
    subject = trainer(tmp_path, rewards_of, rollout_func=rollout_function, **DR_GRPO)
    subject.train()
    buffered = subject._buffered_inputs
    assert [len(part["rollout_ids"]) for part in buffered] == [4, 4]
    where = rows_by_completion()
    found: dict[int, set[Any]] = {}
    for part in buffered:
        for row in range(4):
            ids = part["completion_ids"][row][part["completion_mask"][row] == 1].tolist()
            if ids == [0]:
                assert part["loss_weights"][row] == 0
                continue
            found.setdefault(int(part["rollout_ids"][row]), set()).add(where[tuple(ids)])
            assert part["loss_weights"][row] > 0
    # Each number stands for one rollout, and all five are there.
    assert sorted(map(len, found.values())) == [1] * 5
    assert set().union(*found.values()) == {("w0 w1", 0), ("w0 w1", 1), ("w0 w1", 2), ("w2 w3 w4", 0), ("w2 w3 w4", 1)}
    order = torch.cat([part["rollout_ids"] for part in buffered]).tolist()
    assert order != sorted(order)


def test_one_row_rollouts_are_those_of_trl(tmp_path: Path) -> None:
    """With its epsilon and its mean over tokens nothing is left but rounding."""
    from trl import GRPOTrainer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 5) for ids in completion_ids]

    configs = {
        "normalization_config": NormalizationConfig(std_epsilon=1e-4),
        "loss_config": LossConfig(aggregation="token_mean"),
    }
    ours = step(trainer(tmp_path, reward, **configs))  # before the other one seeds its sampling
    theirs = GRPOTrainer(
        model(),
        reward_funcs=reward,
        args=arguments(tmp_path),
        train_dataset=prompts("w0 w1", "w2 w3 w4"),
        processing_class=tokenizer(),
    )
    check_gradient(ours, step(theirs))


def test_rows_are_observations_in_trl(tmp_path: Path) -> None:
    """The same rows in TRL's own trainer: each row has the advantage of one of four, and padding is one of them."""
    from trl import GRPOTrainer

    theirs = GRPOTrainer(
        model(),
        reward_funcs=rewards_of,
        args=arguments(tmp_path, scale_rewards="none"),
        train_dataset=prompts("w0 w1", "w2 w3 w4"),
        processing_class=tokenizer(),
        rollout_func=rollout_function,
    )
    theirs.train()
    # Rows of the first prompt: 1, 0, 0, 0.5 with mean 0.375 instead of 0.5; of the second: 0.25, 0.75, 0, 0.
    assert sorted(theirs._logs["advantages"]) == sorted([0.625, -0.375, -0.375, 0.125, 0.0, 0.5, -0.25, -0.25])


def test_our_advantages_and_metrics_are_logged(tmp_path: Path) -> None:
    subject = trainer(tmp_path, rewards_of, rollout_func=rollout_function, **DR_GRPO)
    subject.train()
    assert list(subject._logs["advantages"]) == [0.5, -0.5, -0.5, 0.0, -0.25, 0.25, 0.0, 0.0]
    logged = subject.state.log_history[0]
    assert (logged["miles_norm/counted_rollouts"], logged["miles_norm/fan_out_max"]) == (5, 2)
    assert logged["miles_norm/reward_mean"] == pytest.approx(0.5)


def test_two_processes_share_a_prompt(tmp_path: Path) -> None:
    """Four rows of one prompt on each, three rollouts that both number from 0."""
    script = Path(__file__).parent / "trl_two_processes.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, tmp_path]
    run = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    gradient, rollouts = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert rollouts == 6
    # Rewards 1, 0, 0.5 and -1, -2, -1.5 with mean -0.5.
    advantages = [1.5, 0.5, 1.0, -0.5, -1.5, -1.0]
    check_gradient(gradient, gradient_of_rollouts([rows for rows, _ in FIVE_ROLLOUTS["w0 w1"]] * 2, advantages))
