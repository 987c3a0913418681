"""Estimators where they once went wrong: rounding as a scale, settings that were not read, small groups."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from batches import new_row

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.config import EstimatorOptions
from miles_norm.errors import GroupingError
from miles_norm.result import NormalizedRewards


def normalized(groups: list[list[Any]], estimator: str, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """One row per rollout, numbered through."""
    rewards = [(group, reward) for group, rewards in enumerate(groups) for reward in rewards]
    rows = [new_row(group_index=group, index=n, reward=reward) for n, (group, reward) in enumerate(rewards)]
    settings.setdefault("std_epsilon", 0.0)
    chosen = settings | {"advantage_estimator": estimator, "options": EstimatorOptions(**options or {})}
    config = NormalizationConfig(**chosen)
    result: NormalizedRewards = normalize_rewards(rows, config)
    return result


def approx(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-6, abs=1e-12)


@contextmanager
def seconds(limit: float) -> Iterator[None]:
    """Fail instead of running on."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class TestWhitening:
    @pytest.mark.parametrize("shift", [False, True])
    def test_rounding_is_no_scale(self, shift: bool) -> None:
        """The two rollouts with tokens are their groups' baselines, up to the last bit: (0.1 * 3) / 3 is not 0.1."""
        states = [(0, 0.1, 3), (0, 0.2, 0), (1, 0.2, 1), (1, 0.1, 0)]
        rows = [
            new_row(group_index=group, index=n, reward=reward, response_length=tokens)
            for n, (group, reward, tokens) in enumerate(states)
        ]
        plain = normalize_rewards(rows, NormalizationConfig(advantage_estimator="opo"))
        options = EstimatorOptions(whitening="token", whitening_shift=shift)
        result = normalize_rewards(rows, NormalizationConfig(advantage_estimator="opo", options=options))
        assert plain.advantages.tolist() == pytest.approx([0.0, 0.1, 0.0, -0.1], rel=1e-6, abs=1e-15)
        assert torch.equal(result.advantages, plain.advantages)
        assert result.whitening is None

    def test_small_advantages_of_a_small_batch_are_a_scale(self) -> None:
        # The deviation of +-5e-13 is 1e-12 / sqrt(2).
        result = normalized([[1e-12, 0.0]], "dr_grpo", {"whitening": "rollout"})
        assert result.advantages.tolist() == approx(2**-0.5, -(2**-0.5))


GDPO = {"gdpo_components": ("right", "short")}


def parts(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"right": right, "short": short} for right, short in pairs]


class TestGdpo:
    def test_the_tolerance_holds_for_each_component(self) -> None:
        """Short ranges over half a percent, and would outvote right."""
        options = GDPO | {"gdpo_weights": (1.0, 2.0)}
        rewards = [parts((1.0, 1.0), (0.0, 1.005))]
        # Right alone gives +-1 / sqrt(2), whose deviation is 1; twice short has the other sign and turns it around.
        tolerant = normalized(rewards, "gdpo", options, zero_std_tolerance=0.01)
        assert tolerant.advantages.tolist() == approx(2**-0.5, -(2**-0.5))
        assert tolerant.without_signal.tolist() == [False]
        exact = normalized(rewards, "gdpo", options, zero_std_tolerance=0.001)
        assert exact.advantages.tolist() == approx(-(2**-0.5), 2**-0.5)

    def test_a_group_whose_components_are_all_tolerated_has_no_signal(self) -> None:
        rewards = [parts((1.0, 1.0), (1.0, 1.005)), parts((1.0, 1.0), (0.0, 1.0))]
        assert normalized(rewards, "gdpo", GDPO, zero_std_tolerance=0.01).without_signal.tolist() == [True, False]

    @pytest.mark.parametrize(
        ("ddof", "expected"),
        # Population: right gives +-1, whose deviation is 1. Sample: +-1 / sqrt(2), whose deviation is 1.
        [(0, 1.0), (1, 2**-0.5)],
    )
    def test_the_deviation_over_the_batch_takes_the_same_ddof(self, ddof: int, expected: float) -> None:
        result = normalized([parts((1.0, 0.5), (0.0, 0.5))], "gdpo", GDPO, std_ddof=ddof)
        assert result.advantages.tolist() == approx(expected, -expected)


class TestMaxrl:
    @pytest.mark.parametrize("scale", [1e-12, 1e-30, 1.0])
    def test_any_positive_mean_divides(self, scale: float) -> None:
        # Mean 2: (1 - 2) / 2 and (3 - 2) / 2.
        assert normalized([[scale, 3 * scale]], "maxrl").advantages.tolist() == approx(-0.5, 0.5)


class TestPassAtK:
    def test_no_counted_rollout_is_drawn_from(self) -> None:
        options = {"pass_at_k": "analytic", "k": 2**31 - 1}
        with seconds(2.0):
            result = normalized([[None, None], [None]], "pass_at_k", options, missing_reward="exclude")
        assert result.advantages.tolist() == [0.0] * 3

    def test_groups_that_are_all_too_small_to_count(self) -> None:
        options = {"pass_at_k": "analytic", "k": 2**31 - 1}
        with seconds(2.0):
            result = normalized([[1, 0], [1]], "pass_at_k", options, min_group_size=2**31 - 1)
        assert result.advantages.tolist() == [0.0] * 3

    def test_a_group_smaller_than_k_is_named_by_its_rows(self) -> None:
        options = {"pass_at_k": "analytic", "k": 3}
        with pytest.raises(GroupingError, match="prompt groups 0, 2") as caught:
            normalized([[1, 0], [1, 0, 1], [0]], "pass_at_k", options)
        assert caught.value.rows == (0, 1, 5)


def test_a_singleton_that_is_an_error_is_named_by_its_rows() -> None:
    rows = [new_row(group_index=group, rollout_id=n) for group, n in (("p", 0), ("q", 1), ("q", 2), ("p", 0), ("r", 3))]
    with pytest.raises(GroupingError, match="prompt groups p, r") as caught:
        normalize_rewards(rows, NormalizationConfig(singleton="error"))
    assert caught.value.rows == (0, 3, 4)


def reported(groups: list[list[Any]], estimator: str = "grpo", **settings: Any) -> bool:
    """Whether groups are said to be nearly equal."""
    options = GDPO if estimator == "gdpo" else None
    warnings = normalized(groups, estimator, options, **settings).warnings
    return any("prompt group 0 " in warning and "1e-06" in warning for warning in warnings)


class TestNearlyEqual:
    @pytest.mark.parametrize(
        ("rewards", "expected"),
        [
            ([1e6, 999999.0], True),  # a range of 1 is 1e-6 of the largest, to the bit
            ([1e6, 999998.999], False),
            ([-1e6, -999999.0], True),
            ([-1e6, -999998.999], False),
            ([-1.0, -1.0 - 5e-7], True),
            ([-1.0, -2.0], False),
            ([-1.0, 1e-9], False),
            ([5e-7, -5e-7], False),
            ([0.0, 1e-9], False),
            ([-0.5, -0.5], False),
        ],
    )
    def test_range_over_the_largest_absolute_reward(self, rewards: list[float], expected: bool) -> None:
        assert reported([rewards]) is expected

    def test_components_are_looked_at_one_by_one(self) -> None:
        # The sums 0 and 1 are far apart, short is not; then the other way round.
        assert reported([parts((0.0, 1.0), (1.0, 1.0 + 5e-7))], "gdpo")
        assert reported([parts((0.0, -1.0), (1.0, -1.0 - 5e-7))], "gdpo")
        assert not reported([parts((0.0, 1.0), (1.0, 5e-7))], "gdpo")
        assert not reported([parts((0.0, 1.0), (1.0, 1.0))], "gdpo")

    @pytest.mark.parametrize("settings", [{"estimator": "ppo"}, {"rewards_normalization": False}])
    def test_not_where_rewards_pass_through(self, settings: dict[str, Any]) -> None:
        assert not reported([[1.0, 1.0 + 5e-7]], **settings)

    def test_not_where_they_count_as_equal(self) -> None:
        assert not reported([[1.0, 1.0 + 5e-7]], zero_std_tolerance=1e-5)
