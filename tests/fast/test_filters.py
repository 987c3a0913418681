"""Filters drop whole rollouts after normalization, change no other number, and say what they did."""

from typing import Any

import pytest
import torch

from miles_norm import FilterConfig, NormalizationConfig, filter_rollouts, loss_weights, normalize_rewards
from miles_norm.counting import Exclusion
from miles_norm.errors import ConfigError
from miles_norm.result import NormalizedRewards


def row(group: int, rollout: int, reward: float | None, status: str = "completed") -> dict[str, Any]:
    return {"group_index": group, "rollout_id": rollout, "reward": reward, "response_length": 2, "status": status}


# Group 0: rewards 1 and 0, rollout 0 has two rows, of which one was truncated. Group 1: all equal. Group 2: one
# unscored rollout beside 1 and 0. Group 3: a single rollout.
ROWS = [
    row(0, 0, 1.0),
    row(0, 0, 1.0, "truncated"),
    row(0, 1, 0.0),
    row(1, 2, 0.5),
    row(1, 3, 0.5),
    row(2, 4, 1.0),
    row(2, 5, 0.0),
    row(2, 6, None, "aborted"),
    row(3, 7, 1.0),
]


def result(**settings: Any) -> NormalizedRewards:
    return normalize_rewards(ROWS, NormalizationConfig(missing_reward="exclude", **settings))


@pytest.mark.parametrize(
    ("name", "dropped", "reason"),
    [
        ("zero_variance_groups", [2, 3, 7], Exclusion.ZERO_VARIANCE),
        ("truncated_rollouts", [0], Exclusion.TRUNCATED),
        ("unscored_groups", [4, 5], Exclusion.UNSCORED_GROUP),
        ("incomplete_groups", [7], Exclusion.INCOMPLETE_GROUP),
    ],
)
def test_each_filter(name: str, dropped: list[int], reason: Exclusion) -> None:
    before = result(n_samples_per_prompt=2)
    after, report = filter_rollouts(before, FilterConfig(**{name: True}))
    assert [(entry.rollout, entry.rollout_id, entry.reason) for entry in report.dropped] == [
        (rollout, rollout, reason) for rollout in dropped
    ]
    assert report.counts == {reason.name.lower(): len(dropped)}
    # Rollout 6 is unscored and did not count before either.
    counted = [rollout not in {*dropped, 6} for rollout in range(8)]
    assert after.counted_rollouts.tolist() == counted
    assert report.kept_rollouts == sum(counted)
    gone = torch.isin(after.index.row_rollout, torch.tensor(dropped))
    assert after.advantages[gone].eq(0).all()
    assert torch.equal(after.advantages[~gone].view(torch.int32), before.advantages[~gone].view(torch.int32))
    assert not after.trained_rows[gone].any()
    assert torch.equal(after.trained_rows[~gone], before.trained_rows[~gone])
    assert torch.equal(after.statistics.mean, before.statistics.mean)


def test_weights_follow() -> None:
    before = result()
    after, _ = filter_rollouts(before, FilterConfig(zero_variance_groups=True))
    # Left: rollout 0 with 4 tokens, rollouts 1, 4, 5 with 2 each: 1 / (4 rollouts * tokens).
    assert loss_weights(after).tolist() == [1 / 16, 1 / 16, 1 / 8, 0, 0, 1 / 8, 1 / 8, 0, 0]
    assert float((loss_weights(after) * after.trainable_tokens).sum()) == pytest.approx(1)


def test_the_given_result_is_not_changed() -> None:
    before = result()

    def parts() -> list[list[Any]]:
        return [part.tolist() for part in (before.advantages, before.counted_rollouts, before.trainable_tokens)]

    kept = parts()
    filter_rollouts(before, FilterConfig(zero_variance_groups=True, truncated_rollouts=True))
    assert parts() == kept


def test_the_first_filter_that_applies_is_the_reason() -> None:
    _, report = filter_rollouts(
        result(n_samples_per_prompt=2), FilterConfig(zero_variance_groups=True, incomplete_groups=True)
    )
    assert report.counts == {"zero_variance": 3}
    assert str(report) == "3 rollouts dropped (3 zero variance), 4 kept"


def test_nothing_to_drop_gives_the_same_result() -> None:
    before = result()
    after, report = filter_rollouts(before, FilterConfig())
    assert after is before
    assert str(report) == "0 rollouts dropped (none), 7 kept"


def test_dropped_groups_are_explained_with_their_statistics() -> None:
    after, _ = filter_rollouts(result(n_samples_per_prompt=2), FilterConfig(truncated_rollouts=True))
    text = after.explain(0)
    assert "arithmetic  0: the rollout does not count, since a row of it was truncated, and a filter dropped it" in text
    assert "n 2, mean 0.5" in text
    assert "of the rollout rewards 0, 1" in text


def test_a_single_rollout_that_keeps_its_reward_has_a_signal() -> None:
    _, report = filter_rollouts(result(singleton="raw"), FilterConfig(zero_variance_groups=True))
    assert [entry.rollout for entry in report.dropped] == [2, 3]


def test_truncated_padding_drops_nothing() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(0, 1, 0.0, "truncated") | {"is_padding": True}]
    _, report = filter_rollouts(normalize_rewards(rows), FilterConfig(truncated_rollouts=True))
    assert not report.dropped


def test_components_that_differ_are_a_signal_although_their_sum_does_not() -> None:
    options = {"gdpo_components": ["a", "b"]}
    rewards = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}]
    rows = [row(0, i, None) | {"reward": reward} for i, reward in enumerate(rewards)]
    config = NormalizationConfig(advantage_estimator="gdpo", options=options)  # type: ignore[arg-type]
    _, report = filter_rollouts(normalize_rewards(rows, config), FilterConfig(zero_variance_groups=True))
    assert not report.dropped


def test_incomplete_groups_need_a_size() -> None:
    with pytest.raises(ConfigError, match="incomplete_groups=True without n_samples_per_prompt"):
        filter_rollouts(result(), FilterConfig(incomplete_groups=True))


def test_another_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)a value of type NormalizationConfig\n.*a FilterConfig"):
        filter_rollouts(normalize_rewards(ROWS[:3]), NormalizationConfig())  # type: ignore[arg-type]
