"""Groups where they once went wrong: padding without an id, stale sizes, ids of several kinds; explain."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from batches import new_row

from miles_norm import (
    LossConfig,
    NormalizationConfig,
    RolloutColumns,
    loss_weights,
    normalize_columns,
    normalize_rewards,
)
from miles_norm.config import EstimatorOptions
from miles_norm.errors import GroupingError
from miles_norm.result import NormalizedRewards

DR_GRPO = NormalizationConfig(advantage_estimator="dr_grpo", n_samples_per_prompt=2)


def row(group: Any, rollout: Any, reward: float = 0.0, **fields: Any) -> dict[str, Any]:
    return new_row(group_index=group, rollout_id=rollout, reward=reward, **fields)


def padding(rollout: Any, group: Any = None, **fields: Any) -> dict[str, Any]:
    return row(group, rollout, 9.0, is_padding=True, **fields)


class TestPaddingWithoutGroupId:
    ROWS = (row(0, "a", 4.0), row(0, "b", 0.0), row(1, "c", 1.0), row(1, "d", 0.0))

    @pytest.mark.parametrize("none", [None, math.nan])
    @pytest.mark.parametrize("place", [0, 2, 4])
    def test_it_belongs_to_the_rollout_that_has_its_id(self, none: Any, place: int) -> None:
        rows = [*self.ROWS[:place], padding("c", none), *self.ROWS[place:]]
        result = normalize_rewards(rows, DR_GRPO)
        expected = [2.0, -2.0, 0.5, -0.5]
        assert result.advantages.tolist() == [*expected[:place], 0.5, *expected[place:]]
        assert sorted(map(len, result.groups)) == [2, 3]
        assert sorted(map(str, result.index.group_ids)) == ["0", "1"]
        assert (result.index.num_rollouts, result.incomplete_groups, result.warnings) == (4, [], ())
        assert result.trainable_tokens.tolist() == [int(k != place) for k in range(5)]

    def test_with_an_index_for_an_id(self) -> None:
        rows = [new_row(index=k, reward=float(k)) for k in range(2)]
        rows.append(new_row(group_index=None, index=1, is_padding=True))
        assert normalize_rewards(rows, DR_GRPO).advantages.tolist() == [-0.5, 0.5, 0.5]

    def test_with_adapters(self) -> None:
        rows = [row(0, k, float(k), adapter="x") for k in range(2)] + [
            row(0, 2 + k, 3.0 * k, adapter="y") for k in range(2)
        ]
        result = normalize_rewards([*rows, padding(3, adapter="y")], DR_GRPO)
        assert result.advantages.tolist() == [-0.5, 0.5, -1.5, 1.5, 1.5]
        assert result.incomplete_groups == []

    @pytest.mark.parametrize("rollout", ["z", None])
    def test_an_id_of_no_rollout_makes_a_group_of_padding(self, rollout: Any) -> None:
        result = normalize_rewards([*self.ROWS, padding(rollout)], DR_GRPO)
        assert result.groups == [[0, 1], [2, 3], [4]]
        assert result.incomplete_groups == []
        assert result.advantages.tolist() == [2.0, -2.0, 0.5, -0.5, 0.0]

    def test_an_id_of_two_groups_makes_a_group_of_padding(self) -> None:
        rows = [row(group, rollout, reward) for group, reward in ((0, 4.0), (1, 2.0)) for rollout in ("a", "b")]
        result = normalize_rewards([*rows, padding("a"), padding("b")], DR_GRPO)
        assert result.groups == [[0, 1], [2, 3], [4, 5]]
        assert result.incomplete_groups == []
        assert result.advantages.tolist() == [0.0] * 6

    def test_under_fixed_fan_out(self) -> None:
        rows = [row(None, k, reward) for k, reward in enumerate((4.0, 0.0, 1.0, 0.0))]
        config = NormalizationConfig(advantage_estimator="dr_grpo", n_samples_per_prompt=2, rollout_batch_size=2)
        for copied, advantage in ((0, 2.0), (1, -2.0), (3, -0.5)):
            result = normalize_rewards([*rows, padding(copied)], config)
            assert result.index.group_source == "fixed_fan_out"
            assert result.advantages.tolist() == [2.0, -2.0, 0.5, -0.5, advantage]
            assert (result.index.num_rollouts, result.incomplete_groups) == (4, [])


class TestStaleSizes:
    def stale(self, rows: list[Any], sizes: list[int]) -> bool:
        return any("stale" in warning for warning in normalize_rewards(rows, None, sizes).warnings)

    def test_although_a_padding_row_lacks_a_group_id(self) -> None:
        rows = [row(0, 0), row(1, 1), padding(1), row(1, 2)]
        assert self.stale(rows, [2, 2])
        assert not self.stale(rows, [1, 3])

    def test_adapters_are_a_part_of_the_id(self) -> None:
        rows = [row(0, k, adapter=adapter) for k, adapter in enumerate("xxyy")]
        assert self.stale(rows, [4])
        assert self.stale(rows, [1, 3])
        assert not self.stale(rows, [2, 2])
        assert self.stale([row(0, 0, adapter="x"), row(0, 1, adapter=None)], [2])


@pytest.mark.parametrize(
    "sizes", [2, torch.tensor(2), np.array(2), [torch.tensor([1, 2])], [np.array([1, 1])], "2", 2.0]
)
def test_sizes_that_are_no_list_of_counts(sizes: Any) -> None:
    with pytest.raises(GroupingError, match="prompt_group_sizes"):
        normalize_rewards([row(0, 0), row(0, 1)], None, sizes)


class TestIds:
    def test_adapters_and_reused_ids_keep_groups_and_labels(self) -> None:
        ids = [("x", 5, 0), ("y", 5, 0), (None, 5, 1), ("x", 3, 0), ("y", 5, 1), ("x", 5, 1), ("x", 3, 0)]
        index = normalize_rewards([row(group, rollout, adapter=name) for name, group, rollout in ids]).index
        assert index.groups == [[0, 5], [1, 4], [2], [3, 6]]
        assert index.group_ids == [("x", 5), ("y", 5), (None, 5), ("x", 3)]
        assert index.rollout_ids == [0, 0, 1, 0, 1, 1]
        assert index.row_rollout.tolist() == [0, 1, 2, 3, 4, 5, 3]

    def test_reused_ids_are_named_once_each(self) -> None:
        ids = [(0, "p"), (0, "q"), (1, "r"), (1, "p"), (2, "p"), (2, "q"), (0, "p")]
        result = normalize_rewards([row(group, rollout) for group, rollout in ids])
        [warning] = result.warnings
        assert warning == "an id in several prompt groups counts as different rollouts: rollout ids p, q"
        assert result.index.row_rollout.tolist() == [0, 1, 2, 3, 4, 5, 0]
        assert result.index.group_ids == [0, 1, 2]

    @pytest.mark.parametrize("kind", [int, float, np.int64, np.float64, torch.tensor, np.array])
    def test_one_warning_for_all_ids_that_meet_an_index(self, kind: Any) -> None:
        rows = [new_row(index=kind(k), rollout_id=None) for k in (1, 2, 3)]
        rows += [new_row(index=kind(7), rollout_id=kind(1)), new_row(index=kind(8), rollout_id=kind(3))]
        rows += [new_row(index=kind(2), rollout_id=kind(2)), new_row(index=kind(9), rollout_id=kind(9))]
        result = normalize_rewards(rows)
        [warning] = result.warnings
        assert "rollout_id" in warning
        assert "index" in warning
        assert [number for number in "0324" if number not in warning] == []
        assert result.groups == [list(range(7))]
        assert result.index.row_rollout.tolist() == [0, 1, 2, 0, 2, 1, 3]


def mixed(**columns: Any) -> NormalizedRewards:
    rows = {"group": None, "rollout": [0, 1, 2], "reward": [1.0, 0.0, 0.0], "trainable_tokens": [1, 3, 5]}
    return normalize_columns(RolloutColumns(**rows | columns), None, [3])


class TestWeightsPerAdapter:
    @pytest.mark.parametrize("adapter", [["x", "x", "y"], [-1, -1, 0], [-2, -2, -1], [0, 0, 1]])
    def test_a_group_that_mixes_adapters_is_one_group_for_each(self, adapter: list[Any]) -> None:
        # The first adapter has 4 tokens of the group, the second has 5.
        weights = loss_weights(mixed(adapter=adapter), LossConfig(aggregation="prompt_mean"))
        assert weights.tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 5], rel=1e-12)

    def test_negative_adapters_are_stepped_each_on_its_own(self) -> None:
        assert loss_weights(mixed(adapter=[-1, 0, -2])).tolist() == pytest.approx([1, 1 / 3, 1 / 5], rel=1e-12)

    def test_rows_without_a_trained_token_are_no_rows_of_their_rollout(self) -> None:
        columns = RolloutColumns(
            group=[0] * 5, rollout=[0, 0, 0, 0, 1], reward=[1, 1, 1, 1, 0], trainable_tokens=[4, 0, 2, 7, 3],
            removed=[False, False, False, True, False],
        )  # fmt: skip
        weights = loss_weights(normalize_columns(columns), LossConfig(aggregation="rollout_row_mean"))
        # Two rollouts; the first has two trained rows, of 4 and 2 tokens.
        assert weights.tolist() == pytest.approx([1 / 16, 0, 1 / 8, 0, 1 / 6], rel=1e-12)


class TestExplain:
    def test_siblings_are_named_up_to_a_handful(self) -> None:
        n = 2500
        columns = RolloutColumns(
            group=[0] * (n + 1), rollout=[0] * n + [1], reward=[1.0] * n + [0.0], trainable_tokens=[1] * (n + 1)
        )
        result = normalize_columns(columns)
        result.explain(0)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            text = result.explain(1200)
        finally:
            sys.setprofile(None)
        assert calls < 1000
        assert f"fan-out {n}" in text
        [reward] = [line for line in text.splitlines() if line.strip().startswith("reward")]
        assert reward.count("token") - reward.count("trainable token") <= 6
        assert len(text) < 1500

    def test_a_raw_singleton_is_whitened_with_the_others(self) -> None:
        rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(1, 2, 3.0)]
        config = NormalizationConfig(
            advantage_estimator="dr_grpo",
            singleton="raw",
            std_epsilon=0.0,
            options=EstimatorOptions(whitening="rollout"),
        )
        result = normalize_rewards(rows, config)
        # 0.5, -0.5 and 3 have the mean 1 and the deviation sqrt((0.25 + 2.25 + 4) / 2) = 1.802776.
        assert result.advantages[2].item() == pytest.approx(1.6641006, rel=1e-6)
        [arithmetic] = [line for line in result.explain(2).splitlines() if "arithmetic" in line]
        assert arithmetic.rstrip().endswith("= 1.664101")
        assert " / (1.802776" in arithmetic
        assert "(3" in arithmetic.replace(" ", "")
