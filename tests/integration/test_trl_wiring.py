"""Wrong wiring of ``RolloutGRPOTrainer`` is named; environments, and what stands beside rollout ids."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl_models import Dataset, Gradients, prompts, tokenizer, trainer
from trl_steps import check_gradient, gradient_of_rollouts, rewards_of, rollout_function

from miles_norm import NormalizationConfig
from miles_norm.config import EstimatorOptions
from miles_norm.errors import ConfigError, MissingRewardError, SampleError

pytestmark = pytest.mark.integration

OPTIONS = EstimatorOptions(gdpo_components=("long", "odd"))
GDPO = NormalizationConfig(advantage_estimator="gdpo", options=OPTIONS)


def long(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


@pytest.mark.parametrize(
    ("settings", "given", "match"),
    [
        ({"loss_type": "bnpo"}, {}, r"(?s)loss_type\n.*got: +'bnpo'.*loss_type='dapo'"),
        ({"scale_rewards": "batch"}, {}, r"(?s)scale_rewards\n.*over rows.*whitening='rollout'"),
        (
            {"scale_rewards": "none"},
            {"normalization_config": NormalizationConfig()},
            r"(?s)grpo_std_normalization=True with scale_rewards='none'.*set scale_rewards='group'",
        ),
        (
            {},
            {"normalization_config": NormalizationConfig(grpo_std_normalization=False)},
            r"(?s)grpo_std_normalization=False with scale_rewards='group'",
        ),
        ({}, {"normalization_config": NormalizationConfig(advantage_estimator="ppo")}, "TRL has no critic"),
        ({}, {"normalization_config": GDPO}, "'gdpo' with multi_objective_aggregation='sum_then_normalize'"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            {"normalization_config": NormalizationConfig(advantage_estimator="rloo")},
            "'rloo' with multi_objective_aggregation='normalize_then_sum'",
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
            {"normalization_config": GDPO},
            r"\{'long': 1\.0, 'odd': 1\.0\} with reward functions \{'long': 1\.0, 'odd': 0\.5\}",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    tmp_path: Path, settings: dict[str, Any], given: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        trainer(tmp_path, [long, odd], settings=settings, **given)


def test_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    def one_more(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = rollout_function(prompts, trainer)
        return {name: [*values, values[-1]] for name, values in output.items()}

    subject = trainer(tmp_path, rewards_of, rollout_func=one_more)
    with pytest.raises(SampleError, match=r"(?s)9 prompt_ids, 9 completion_ids.*8 of each.*fill_rows"):
        subject.train()


def test_a_prompt_with_too_many_rows_is_refused(tmp_path: Path) -> None:
    settings = {"num_generations": 2, "per_device_train_batch_size": 2}
    subject = trainer(tmp_path, rewards_of, settings=settings, rollout_func=rollout_function)
    with pytest.raises(SampleError, match=r"(?s)rows of prompt \d.*4 rows of 3 rollouts.*num_generations=2"):
        subject.train()


def test_a_reward_of_none_is_named_or_excluded(tmp_path: Path) -> None:
    """TRL leaves it out of the mean; here that is a setting."""

    def reward(outcome: list[float], rollout_id: list[int], **_: Any) -> list[float | None]:
        return [None if value == 0.5 else value for value in outcome]

    with pytest.raises(MissingRewardError, match="row 3"):
        trainer(tmp_path, reward, rollout_func=rollout_function).train()
    config = NormalizationConfig(advantage_estimator="dr_grpo", missing_reward="exclude")
    subject = trainer(tmp_path, reward, rollout_func=rollout_function, normalization_config=config)
    subject.train()
    assert subject.normalized_rewards.rollout_advantages.tolist() == [0.5, -0.5, 0.0, -0.25, 0.25, 0.0, 0.0]


def test_reward_functions_are_weighed_and_added(tmp_path: Path) -> None:
    subject = trainer(
        tmp_path, [rewards_of, long], settings={"reward_weights": [1.0, 0.25]}, rollout_func=rollout_function
    )
    subject.train()
    # 1 + 3/4; rows of 5 and 2 tokens, of which the first has more that are trained: 0 + 5/4; 0.5 + 4/4.
    assert subject.normalized_rewards.rollout_rewards[:3].tolist() == [1.75, 1.25, 1.5]


def test_gdpo_normalizes_each_reward_function(tmp_path: Path) -> None:
    settings = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    subject = trainer(tmp_path, [long, odd], settings=settings)
    subject.train()
    result = subject.normalized_rewards
    assert result.config.options.component_weights == {"long": 1.0, "odd": 0.5}
    assert sorted(result.columns.components) == ["long", "odd"]
    assert torch.count_nonzero(result.advantages) > 0


def test_a_column_of_the_dataset_is_no_rollout_id(tmp_path: Path) -> None:
    """TRL repeats it on every row of the prompt."""
    data = Dataset.from_dict({"prompt": ["w0 w1", "w2 w3 w4"], "rollout_id": [0, 1], "is_padding": [True, True]})
    subject = trainer(tmp_path, odd, train_dataset=data, settings={"remove_unused_columns": False})
    subject.train()
    assert subject.normalized_rewards.index.num_rollouts == 8
    assert subject.normalized_rewards.columns.padding is None


def test_truncated_rollouts_can_be_left_untrained(tmp_path: Path) -> None:
    """All but the third row, which ends with <eos>, and the padding were cut off by length."""
    config = NormalizationConfig(truncated_rollouts="untrain", untrained_rollouts="include")
    subject = trainer(tmp_path, rewards_of, rollout_func=rollout_function, normalization_config=config)
    subject.train()
    result = subject.normalized_rewards
    assert result.columns.truncated.tolist() == [True, False, True, True, True, True, False, False]
    assert not result.trained_rows.any()  # its sibling was
    subject = trainer(
        tmp_path, rewards_of, rollout_func=rollout_function, settings={"mask_truncated_completions": True}
    )
    subject.train()
    assert subject.normalized_rewards.trained_rows.nonzero()[:, 0].tolist() == [1]


def test_evaluation_has_groups_of_its_own(tmp_path: Path) -> None:
    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1}
    subject = trainer(tmp_path, odd, settings=settings, eval_dataset=prompts("w0 w1", "w2 w3 w4"))
    subject.train()
    assert subject.normalized_rewards.index.rollout_group.tolist() == [0, 0, 1, 1]


class Counter:
    """An environment that rewards looking at it."""

    def reset(self, target: int, **_: Any) -> None:
        self.looks, self.target = 0, target

    def look(self) -> str:
        """
        Look at the counter.

        Returns:
            What it shows.
        """
        self.looks += 1
        return f"w{self.target}"

    def get_reward(self) -> float:
        return float(self.looks)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] or '' }}"
    "{% for c in m.get('tool_calls') or [] %} call {{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}{% endfor %} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


# Where the model says w10 to w19 it calls the tool.
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "tool_calls": {
            "open_pattern": r"w1\d",
            "close_pattern": r"$",
            "content": "text",
            "transform": [{"type": "function", "function": {"name": "look", "arguments": {}}}],
        },
        "content": {"close_pattern": r"$", "content": "text"},
    },
}


def test_environments_make_one_row_of_each_rollout(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template, words.response_template = TEMPLATE, CALLS
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{n}"}], "target": n} for n in range(2)])
    settings = {"max_tool_calling_iterations": 1, "max_completion_length": 40, "scale_rewards": "none"}
    subject = trainer(
        tmp_path, None, train_dataset=data, environment_factory=Counter, processing_class=words, settings=settings
    )
    gradients = Gradients()
    subject.add_callback(gradients)
    subject.train()
    result = subject.normalized_rewards
    assert result.index.num_rollouts == 8
    rewards = result.rollout_rewards
    assert 0 < rewards.sum() < 8
    distances = (rewards - rewards.view(2, 4).mean(dim=1).repeat_interleave(4)).tolist()
    rollouts: list[Any] = [None] * 8
    for part in subject._buffered_inputs:
        for row, rollout in enumerate(part["rollout_ids"].tolist()):
            prompt = part["prompt_ids"][row][part["prompt_mask"][row] == 1].tolist()
            kept = part["completion_mask"][row] == 1
            mask = part["tool_mask"][row][kept].tolist()
            assert 0 not in mask or rewards[rollout] == 1  # what the tool said
            rollouts[rollout] = [(prompt, part["completion_ids"][row][kept].tolist(), mask)]
    assert any(0 in mask for ((_, _, mask),) in rollouts)
    check_gradient(gradients.of_steps[0], gradient_of_rollouts(rollouts, distances))
