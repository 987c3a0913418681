"""``normalize_rewards`` against the plain-Python oracle, on batches with every state, policy and switch."""

from collections import Counter
from typing import Any

import oracle
import pytest
from batches import Batch, estimator_problems, new_row, problems
from hypothesis import event, given, settings

from miles_norm import MilesNormError, NormalizationConfig, normalize_rewards
from miles_norm.counting import Exclusion
from miles_norm.result import NormalizedRewards


def expected(batch: Batch, config: NormalizationConfig) -> oracle.Answer | str:
    """The oracle's answer, or the name of the error that it asks for."""
    try:
        return oracle.normalize(batch.rows, config, batch.sizes, batch.nesting, batch.nested_groups)
    except oracle.OracleError as error:
        return str(error)


@settings(max_examples=200)
@given(problems())
def test_agrees_with_the_oracle(problem: tuple[Batch, NormalizationConfig]) -> None:
    compare(*problem)


@settings(max_examples=150)
@given(estimator_problems())
def test_rarer_estimators_agree_with_the_oracle(problem: tuple[Batch, NormalizationConfig]) -> None:
    event(f"{problem[1].advantage_estimator} {problem[1].options.pass_at_k}, {problem[1].options.whitening}")
    compare(*problem)


def compare(batch: Batch, config: NormalizationConfig) -> None:
    answer = expected(batch, config)
    if isinstance(answer, str):
        event(f"error {answer}")
        with pytest.raises(MilesNormError, match="got:") as raised:
            normalize_rewards(batch.samples, config, batch.sizes)
        assert type(raised.value).__name__ == answer
        return
    result = normalize_rewards(batch.samples, config, batch.sizes)
    event(answer.source)
    check_index(result, answer)
    check_states(result, answer)
    check_numbers(result, answer)
    check_warnings(result, answer)


def check_index(result: NormalizedRewards, answer: oracle.Answer) -> None:
    index = result.index
    assert index.group_source == answer.source
    assert index.num_groups == answer.num_groups
    assert result.groups == answer.rows_of_groups()
    assert index.rollout_group.tolist() == [rollout.group for rollout in answer.rollouts]
    of_row = {row: number for number, rollout in enumerate(answer.rollouts) for row in rollout.rows}
    assert index.row_rollout.tolist() == [of_row[row] for row in range(index.num_rows)]
    assert result.incomplete_groups == answer.incomplete


def check_states(result: NormalizedRewards, answer: oracle.Answer) -> None:
    reasons = [rollout.excluded or "COUNTED" for rollout in answer.rollouts]
    found = [0] * len(reasons) if result.exclusion is None else result.exclusion.tolist()
    assert [Exclusion(reason).name for reason in found] == reasons
    assert result.counted_rollouts.tolist() == [reason == "COUNTED" for reason in reasons]
    assert result.mainstream_rows.tolist() == [rollout.mainstream for rollout in answer.rollouts]
    assert result.trainable_tokens.tolist() == answer.tokens
    assert result.trained_rows.tolist() == [tokens > 0 for tokens in answer.tokens]
    metrics = result.metrics()
    for reason, number in Counter(reasons).items():
        if reason not in ("COUNTED", "PADDING"):
            assert metrics[f"miles_norm/excluded_{reason.lower()}"] == number


def check_numbers(result: NormalizedRewards, answer: oracle.Answer) -> None:
    rewards = [float("nan") if rollout.reward is None else rollout.reward for rollout in answer.rollouts]
    assert result.rollout_rewards.tolist() == pytest.approx(rewards, rel=1e-12, abs=1e-12, nan_ok=True)
    # What remains of a cancelled difference is absolute.
    assert result.advantages.tolist() == pytest.approx(answer.advantages, rel=1e-6, abs=1e-8)
    advantages = [rollout.advantage for rollout in answer.rollouts]
    assert result.rollout_advantages.tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-8)


def check_warnings(result: NormalizedRewards, answer: oracle.Answer) -> None:
    def warns(text: str) -> bool:
        return any(text in warning for warning in result.warnings)

    assert warns("prompt groups were guessed") == (answer.source in ("fixed_fan_out", "single_group"))
    assert warns("have different rewards; the one with the most trainable tokens speaks") == answer.disagree
    assert warns("tie between siblings") == answer.tie


def test_oracle_by_hand() -> None:
    """The oracle itself on a batch small enough to work out: rewards 4, 0 and a second group of one."""
    rows: list[Any] = [new_row(index=0, reward=4.0), new_row(index=0, reward=4.0), new_row(index=1, reward=0.0)]
    rows.append(new_row(group_index=1, reward=7.0))
    answer = oracle.normalize(rows, NormalizationConfig(advantage_estimator="dr_grpo"))
    assert answer.advantages == [2.0, 2.0, -2.0, 0.0]
    assert answer.rows_of_groups() == [[0, 1, 2], [3]]
    # Others' means: 0 and 4.
    assert oracle.normalize(rows, NormalizationConfig(advantage_estimator="rloo")).advantages == [4.0, 4.0, -4.0, 0.0]
