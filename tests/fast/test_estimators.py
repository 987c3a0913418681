"""The rarer estimators: values worked out by hand, degenerate groups, and every error.

Epsilon is 0 where it would only blur the value.
"""

import math
from typing import Any

import pytest
import torch

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.advantages.whitening import whitened
from miles_norm.config import EstimatorOptions
from miles_norm.counting import Exclusion
from miles_norm.errors import GroupingError, RewardError
from miles_norm.result import NormalizedRewards

Row = dict[str, Any]


def rows_of(*groups: list[Any], tokens: list[int] | None = None) -> list[Row]:
    """One row per rollout, numbered through; one trainable token each unless said."""
    rewards = [(group, reward) for group, rewards in enumerate(groups) for reward in rewards]
    lengths = tokens or [1] * len(rewards)
    return [
        {"group_index": group, "rollout_id": n, "reward": reward, "loss_mask": [1] * length}
        for n, ((group, reward), length) in enumerate(zip(rewards, lengths, strict=True))
    ]


def normalized(rows: list[Row], estimator: str, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    settings.setdefault("std_epsilon", 0.0)
    config = NormalizationConfig(advantage_estimator=estimator, options=EstimatorOptions(**options or {}), **settings)
    result: NormalizedRewards = normalize_rewards(rows, config)
    return result


def advantages(rows: list[Row], estimator: str, options: dict[str, Any] | None = None, **settings: Any) -> list[float]:
    values: list[float] = normalized(rows, estimator, options, **settings).advantages.tolist()
    return values


def approx(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-6, abs=1e-12)


class TestOpo:
    def test_baseline_is_the_reward_of_the_average_token(self) -> None:
        # (30 * 1 + 10 * 0 + 20 * 0.5) / 60 = 2/3
        assert advantages(rows_of([1.0, 0.0, 0.5], tokens=[30, 10, 20]), "opo") == approx(1 / 3, -2 / 3, -1 / 6)

    def test_length_is_that_of_the_whole_rollout(self) -> None:
        # Rollout 0 has 1 + 2 trainable tokens in two rows, rollout 1 has 1 of its 2: baseline 3/4.
        rows = rows_of([1.0, 1.0, 0.0], tokens=[1, 2, 2])
        rows[1]["rollout_id"] = 0
        rows[2]["loss_mask"] = [0, 1]
        assert advantages(rows, "opo") == [0.25, 0.25, -0.75]

    def test_rollout_without_tokens_has_no_say_in_the_baseline(self) -> None:
        rows = rows_of([1.0, 0.0, 9.0], tokens=[1, 1, 5])
        rows[2]["remove_sample"] = True
        assert advantages(rows, "opo") == [0.5, -0.5, 8.5]

    def test_group_without_tokens_has_the_plain_mean(self) -> None:
        assert advantages(rows_of([1.0, 0.0], [3.0, 0.0], tokens=[0, 0, 2, 1]), "opo") == [0.5, -0.5, 1.0, -2.0]

    def test_equal_rewards_and_groups_of_one_are_zero(self) -> None:
        assert advantages(rows_of([0.7] * 7, [5.0], tokens=[3, 1, 4, 1, 5, 9, 2, 6]), "opo") == [0.0] * 8

    def test_excluded_rollouts_are_out_of_the_baseline(self) -> None:
        rows = rows_of([1.0, 0.0, None], tokens=[1, 3, 50])
        assert advantages(rows, "opo", missing_reward="exclude") == [0.75, -0.25, 0.0]


class TestMaxRL:
    def test_distance_in_units_of_the_mean(self) -> None:
        # Means 1/4 and 3/8.
        rows = rows_of([1.0, 0.0, 0.0, 0.0], [0.5, 0.25])
        assert advantages(rows, "maxrl") == approx(3.0, -1.0, -1.0, -1.0, 1 / 3, -1 / 3)

    @pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.7] * 3, [2.0]])
    def test_zero_mean_equal_rewards_and_groups_of_one_are_zero(self, rewards: list[float]) -> None:
        assert advantages(rows_of(rewards), "maxrl") == [0.0] * len(rewards)

    def test_negative_rewards_are_an_error_that_names_all(self) -> None:
        rows = rows_of([1.0, -0.5, -0.5], [0.0, -2.0])
        rows[2]["rollout_id"] = 1
        with pytest.raises(RewardError, match=r"(?s)rows 1, 2, 4 \(rollouts 1, 4\).*-0.5, -2\n.*at least 0") as raised:
            normalized(rows, "maxrl")
        assert raised.value.rows == (1, 2, 4)

    @pytest.mark.parametrize(
        ("rows", "settings", "expected"),
        [
            (rows_of([1.0, 0.0], [-1.0]), {"min_group_size": 2}, [1.0, -1.0, 0.0]),
            (rows_of([1.0, 0.0, -1.0], tokens=[1, 1, 0]), {"untrained_rollouts": "exclude"}, [1.0, -1.0, 0.0]),
        ],
    )
    def test_negative_reward_of_an_excluded_rollout_is_none(
        self, rows: list[Row], settings: dict[str, Any], expected: list[float]
    ) -> None:
        assert advantages(rows, "maxrl", **settings) == expected


class TestTopkGap:
    def test_the_best_gets_its_lead(self) -> None:
        rows = rows_of([1.0, 4.0, 3.0], [-5.0, -3.0], [0.25, 0.25, 0.0])
        assert advantages(rows, "pass_at_k") == [0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]

    def test_rows_of_the_best_rollout_share_the_lead(self) -> None:
        rows = rows_of([4.0, 4.0, 3.0])
        rows[1]["rollout_id"] = 0
        assert advantages(rows, "pass_at_k") == [1.0, 1.0, 0.0]

    def test_equal_rewards_and_groups_of_one_are_zero(self) -> None:
        assert advantages(rows_of([0.7] * 3, [2.0]), "pass_at_k") == [0.0] * 4
        assert advantages(rows_of([2.0]), "pass_at_k", singleton="raw") == [2.0]

    def test_excluded_rollouts_are_neither_best_nor_second(self) -> None:
        rows = rows_of([9.0, 4.0, 3.0, 1.0], tokens=[0, 1, 0, 1])
        assert advantages(rows, "pass_at_k", untrained_rollouts="exclude") == [0.0, 3.0, 0.0, 0.0]


class TestAnalyticPassAtK:
    @staticmethod
    def options(k: int) -> dict[str, Any]:
        return {"pass_at_k": "analytic", "k": k}

    def test_one_right_of_three(self) -> None:
        # Draws of 2: {r,w}, {r,w'}, {w,w'} with rewards 1, 1, 0: mean 2/3, deviation sqrt(2)/3. A draw with a right one
        # has advantage (1/3)/s = 1/sqrt(2), the other -2/3/s = -sqrt(2); each wrong one is in one of either kind.
        root = math.sqrt(2)
        found = advantages(rows_of([1.0, 0.0, 0.0]), "pass_at_k", self.options(2))
        assert found == approx(1 / root, (1 / root - root) / 2, (1 / root - root) / 2)

    def test_two_right_of_four(self) -> None:
        # One of 6 draws of 2 is all wrong: mean 5/6, deviation sqrt(5)/6. Right: (1/6)/s = 1/sqrt(5). Wrong: two of its
        # three draws have the advantage 1/sqrt(5), one -5/sqrt(5).
        a = 1 / math.sqrt(5)
        assert advantages(rows_of([1.0, 0.0, 1.0, 0.0]), "pass_at_k", self.options(2)) == approx(a, -a, a, -a)

    def test_k_of_one_is_grpo_over_the_population(self) -> None:
        rows = rows_of([1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0])
        grpo = advantages(rows, "grpo", std_ddof=0)
        assert advantages(rows, "pass_at_k", self.options(1)) == pytest.approx(grpo, rel=1e-6)

    @pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0, 0.0], [0.0] * 3, [1.0] * 2, [1.0, 0.0]])
    def test_zero_where_no_draw_or_every_draw_is_right(self, rewards: list[float]) -> None:
        """With fewer than k wrong ones every draw holds a right one."""
        assert advantages(rows_of(rewards), "pass_at_k", self.options(2)) == [0.0] * len(rewards)

    def test_large_groups_do_not_overflow(self) -> None:
        # 1 right of 4096, k = 2048: half of the draws hold it, so right is (1/2)/(1/2) = 1, wrong -1/4095 on average.
        found = advantages(rows_of([1.0] + [0.0] * 4095), "pass_at_k", self.options(2048))
        assert found == approx(1.0, *[-1 / 4095] * 4095)

    def test_reward_that_is_not_binary_is_an_error(self) -> None:
        rows = rows_of([1.0, 0.5, 0.0], [2.0, 0.0])
        with pytest.raises(RewardError, match=r"(?s)rows 1, 3 \(rollouts 1, 3\).*0.5, 2\n.*0 or 1") as raised:
            normalized(rows, "pass_at_k", self.options(2))
        assert raised.value.rows == (1, 3)

    def test_group_smaller_than_k_is_an_error_unless_excluded(self) -> None:
        rows = rows_of([1.0, 0.0, 0.0], [1.0], [1.0, 0.0])
        with pytest.raises(
            GroupingError, match=r"(?s)prompt groups 1, 2\n.*than k: 1, 2\n.*at least 3.*min_group_size"
        ):
            normalized(rows, "pass_at_k", self.options(3))
        kept = normalized(rows, "pass_at_k", self.options(3), min_group_size=3)
        assert kept.exclusion.tolist() == [0, 0, 0, *[Exclusion.SMALL_GROUP] * 3]

    def test_excluded_rewards_need_not_be_binary(self) -> None:
        rows = rows_of([1.0, 0.0, 0.5], tokens=[1, 1, 0])
        assert advantages(rows, "pass_at_k", self.options(1), untrained_rollouts="exclude") == [1.0, -1.0, 0.0]


class TestGdpo:
    @staticmethod
    def options(*weights: float, **more: Any) -> dict[str, Any]:
        return {"gdpo_components": ("right", "short"), "gdpo_weights": weights, **more}

    @staticmethod
    def rewards(right: list[float | None], short: list[float | None]) -> list[Row]:
        pairs = zip(right, short, strict=True)
        return [{k: v for k, v in (("right", r), ("short", s)) if v is not None} for r, s in pairs]

    def test_components_are_normalized_apart_and_then_over_the_batch(self) -> None:
        # z is +-1/sqrt(2) in groups of two. Sums: 2z + z = +-3/sqrt(2), then 2z - z = +-1/sqrt(2); their deviation is
        # sqrt((9/2 + 9/2 + 1/2 + 1/2) / 3) = sqrt(10/3).
        rows = rows_of(self.rewards([1.0, 0.0], [0.5, 0.2]), self.rewards([1.0, 0.0], [-3.0, 8.0]))
        a, b = 3 / math.sqrt(20 / 3), 1 / math.sqrt(20 / 3)
        result = normalized(rows, "gdpo", self.options(2.0, 1.0))
        assert result.advantages.tolist() == approx(a, -a, b, -b)
        assert result.raw_rewards.tolist() == approx(2.5, 0.2, -1.0, 8.0)

    def test_scale_of_a_component_does_not_matter(self) -> None:
        small = rows_of(self.rewards([1.0, 0.0, 0.0], [0.5, 0.25, 1.0]))
        large = rows_of(self.rewards([1.0, 0.0, 0.0], [512.0, 256.0, 1024.0]))
        assert advantages(small, "gdpo", self.options()) == advantages(large, "gdpo", self.options())

    def test_unlike_grpo_it_tells_combinations_with_one_sum_apart(self) -> None:
        # Rollouts 0 and 1 both sum to 1, but only the first is all right.
        rows = rows_of(self.rewards([1.0, 0.5, 0.0], [0.0, 0.5, 0.0]))
        first, second, _ = advantages(rows, "gdpo", self.options())
        # right: (1, 0, -1)/1; short: mean 1/6, deviation sqrt(1/12): (-1, 2, -1)/sqrt(3). Over the batch: squares
        # (1 - s)^2 + (2s)^2 + (-1 - s)^2 = 2 + 6 s^2 = 4 with s = 1/sqrt(3), so the deviation is sqrt(2).
        s = 1 / math.sqrt(3)
        assert [first, second] == approx((1 - s) / math.sqrt(2), 2 * s / math.sqrt(2))

    def test_component_that_is_equal_in_the_group_adds_exactly_zero(self) -> None:
        rows = rows_of(self.rewards([1.0, 0.0], [0.7, 0.7]), self.rewards([1.0, 1.0], [0.7, 0.7]))
        # Sums +-1/sqrt(2), 0, 0: deviation 1/sqrt(3).
        a = math.sqrt(3 / 2)
        assert advantages(rows, "gdpo", self.options()) == approx(a, -a, 0.0, 0.0)

    def test_components_that_cancel_leave_nothing(self) -> None:
        rows = rows_of(self.rewards([1.0, 0.0], [0.0, 1.0]))
        assert advantages(rows, "gdpo", self.options()) == [0.0, 0.0]

    def test_group_of_one(self) -> None:
        rows = rows_of(self.rewards([1.0, 0.0], [0.0, 0.0]), self.rewards([1.0], [0.5]))
        # Sums +-1/sqrt(2) and 0, whose deviation is 1/sqrt(2).
        assert advantages(rows, "gdpo", self.options()) == approx(1.0, -1.0, 0.0)
        assert advantages(rows, "gdpo", self.options(2.0, 1.0), singleton="raw")[2] == 2.5

    def test_lacking_component_adds_nothing_under_partial(self) -> None:
        # right is normalized over two: +-1/sqrt(2), 0. short over three, with mean 1 and deviation sqrt(3):
        # (-1, -1, 2)/sqrt(3). The squares of the sums add up to 3, so the deviation over the batch is sqrt(3/2).
        rows = rows_of(self.rewards([1.0, 0.0, None], [0.0, 0.0, 3.0]))
        a, b, deviation = 1 / math.sqrt(2), 1 / math.sqrt(3), math.sqrt(1.5)
        result = normalized(rows, "gdpo", self.options(gdpo_partial=True))
        assert result.advantages.tolist() == approx((a - b) / deviation, (-a - b) / deviation, 2 * b / deviation)
        assert result.raw_rewards.tolist() == [1.0, 0.0, 3.0]

    def test_component_that_one_rollout_alone_has_adds_nothing(self) -> None:
        rows = rows_of(self.rewards([1.0, 0.0], [None, 3.0]))
        root = 1 / math.sqrt(2)
        assert advantages(rows, "gdpo", self.options(gdpo_partial=True)) == approx(root, -root)

    def test_row_without_any_component_is_unscored(self) -> None:
        rows = rows_of([*self.rewards([1.0, 0.0], [0.5, 0.5]), {}, None])
        result = normalized(rows, "gdpo", self.options(gdpo_partial=True), missing_reward="exclude")
        assert result.counted_rollouts.tolist() == [True, True, False, False]
        assert result.advantages.tolist() == approx(1 / math.sqrt(2), -1 / math.sqrt(2), 0.0, 0.0)

    def test_row_that_counts_as_zero_has_zero_in_every_component(self) -> None:
        given = rows_of([*self.rewards([1.0, 0.5], [0.5, 0.25]), None])
        spelled = rows_of(self.rewards([1.0, 0.5, 0.0], [0.5, 0.25, 0.0]))
        assert advantages(given, "gdpo", self.options(), missing_reward="zero") == advantages(
            spelled, "gdpo", self.options()
        )

    def test_components_are_those_of_the_row_that_speaks(self) -> None:
        rows = rows_of(self.rewards([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]), tokens=[5, 2, 3])
        rows[2]["rollout_id"] = 1  # its last row has the most tokens
        root = 1 / math.sqrt(2)
        assert advantages(rows, "gdpo", self.options(2.0, 1.0)) == approx(root, -root, -root)
        assert advantages(rows, "gdpo", self.options(), rollout_reward="first") == approx(root, -root, -root)

    def test_group_is_silent_only_if_every_component_is(self) -> None:
        """Weighted sums of 1 everywhere: grpo would see nothing."""
        rows = rows_of(self.rewards([1.0, 0.0, 0.5], [0.0, 1.0, 0.5]), self.rewards([1.0, 1.0], [0.5, 0.5]))
        result = normalized(rows, "gdpo", self.options(2.0, 1.0), zero_variance_groups="drop_from_loss")
        assert result.counted_rollouts.tolist() == [True, True, True, False, False]

    @pytest.mark.parametrize(
        ("rewards", "text"),
        [
            ([1.0, {"right": 1.0, "short": 0.0}], r"row 0\n  got: +row 0: float 1.0, not a dict with the components"),
            ([{"right": 1.0}, {"short": 1.0}, None], r"rows 0, 1\n  got: +row 0: no short; row 1: no right"),
            ([{"right": 1.0, "short": math.nan}], r"row 0\n  got: +row 0: no short"),
            ([{"right": "yes", "short": 0.0}], r"row 0\n  got: +row 0: the str 'yes'"),
            ([{"right": [1.0], "short": 0.0}], r"row 0\n  got: +row 0: list"),
        ],
    )
    def test_rewards_without_all_components_are_errors(self, rewards: list[Any], text: str) -> None:
        with pytest.raises(RewardError, match=text):
            normalized(rows_of(rewards), "gdpo", self.options(), missing_reward="exclude")

    def test_partial_does_not_excuse_what_is_no_number(self) -> None:
        with pytest.raises(RewardError, match="row 1: the str 'yes'"):
            normalized(rows_of([{"right": 1.0}, {"right": "yes"}]), "gdpo", self.options(gdpo_partial=True))


class TestWhitening:
    # dr_grpo: 1, -1 and 2, -2.
    ROWS = rows_of([2.0, 0.0], [4.0, 0.0], tokens=[1, 1, 2, 4])

    def test_by_rollout(self) -> None:
        s = math.sqrt(10 / 3)
        found = advantages(self.ROWS, "dr_grpo", {"whitening": "rollout"})
        assert found == approx(1 / s, -1 / s, 2 / s, -2 / s)
        assert advantages(self.ROWS, "dr_grpo", {"whitening": "rollout", "whitening_shift": True}) == found

    def test_by_token(self) -> None:
        # Mean (1 - 1 + 4 - 8) / 8 = -1/2; squares 1.5^2 + 0.5^2 + 2 * 2.5^2 + 4 * 1.5^2 = 24, over 8 - 1.
        s = math.sqrt(24 / 7)
        assert advantages(self.ROWS, "dr_grpo", {"whitening": "token"}) == approx(1 / s, -1 / s, 2 / s, -2 / s)

    def test_by_token_with_shift_over_the_population(self) -> None:
        s = math.sqrt(24 / 8)
        options = {"whitening": "token", "whitening_shift": True}
        found = advantages(self.ROWS, "dr_grpo", options, std_ddof=0)
        assert found == approx(1.5 / s, -0.5 / s, 2.5 / s, -1.5 / s)

    def test_tokens_are_those_of_all_rows_of_a_rollout(self) -> None:
        cut = [dict(row, loss_mask=[1]) for row in self.ROWS for _ in row["loss_mask"]]
        expected = advantages(self.ROWS, "dr_grpo", {"whitening": "token"})
        found = normalized(cut, "dr_grpo", {"whitening": "token"}).rollout_advantages.tolist()
        assert found == expected

    def test_epsilon_is_added_to_the_deviation(self) -> None:
        # Advantages +-1: deviation sqrt(2).
        found = advantages(rows_of([2.0, 0.0]), "dr_grpo", {"whitening": "rollout"}, std_epsilon=0.5)
        assert found == approx(1 / (math.sqrt(2) + 0.5), -1 / (math.sqrt(2) + 0.5))

    def test_excluded_rollouts_and_those_without_tokens_have_no_weight(self) -> None:
        rows = rows_of([2.0, 0.0], [4.0, 0.0], [100.0], tokens=[1, 1, 0, 0, 1])
        s = math.sqrt(2)
        found = advantages(rows, "dr_grpo", {"whitening": "token"}, min_group_size=2)
        assert found == approx(1 / s, -1 / s, 2 / s, -2 / s, 0.0)
        by_rollout = advantages(rows, "dr_grpo", {"whitening": "rollout"}, untrained_rollouts="exclude")
        # Now group 1 is excluded, and the group of one is a rollout with advantage 0.
        assert by_rollout == approx(1.0, -1.0, 0.0, 0.0, 0.0)

    def test_group_of_one_enters_with_its_raw_reward(self) -> None:
        rows = rows_of([2.0, 0.0], [3.0])
        # 1, -1, 3: mean 1, deviation 2.
        options = {"whitening": "rollout", "whitening_shift": True}
        assert advantages(rows, "dr_grpo", options, singleton="raw") == approx(0.0, -1.0, 1.0)

    @pytest.mark.parametrize("whitening", ["rollout", "token"])
    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            (rows_of([3.0]), [3.0]),
            (rows_of([3.0], [3.0]), [3.0, 3.0]),
            (rows_of([0.1 + 0.2], [0.3]), [0.3, 0.3]),
            (rows_of([0.7, 0.7]), [0.0, 0.0]),
        ],
        ids=["one rollout", "equal", "equal up to rounding", "zero"],
    )
    def test_without_a_scale_nothing_is_changed(self, rows: list[Row], expected: list[float], whitening: str) -> None:
        options = {"whitening": whitening, "whitening_shift": True}
        assert advantages(rows, "dr_grpo", options, singleton="raw") == approx(*expected)

    def test_without_tokens_nothing_is_changed(self) -> None:
        rows = rows_of([2.0, 0.0], tokens=[0, 0])
        assert advantages(rows, "dr_grpo", {"whitening": "token"}) == [1.0, -1.0]

    def test_two_values_that_differ_by_more_than_rounding_are_whitened(self) -> None:
        close = torch.tensor([1.0, 1.0 + 1e-11], dtype=torch.float64)
        found = whitened(close, torch.ones(2, dtype=torch.bool), shift=True, std_epsilon=0.0)
        assert found.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-4)
