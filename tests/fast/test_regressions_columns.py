"""What is read of a row, where it once went wrong: components as columns, flags, adapters, ids, and padding rows."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batches import new_row

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns, normalize_rewards
from miles_norm.columns.sample_columns import columns_from_rows, columns_from_samples
from miles_norm.config import EstimatorOptions
from miles_norm.errors import ConfigError, DisagreeingRewardsError, GroupingError, RewardError, SampleError
from miles_norm.result import NormalizedRewards

NAN = math.nan
FLOAT32_MAX = float(torch.finfo(torch.float32).max)
READERS: list[Callable[..., RolloutColumns]] = [columns_from_samples, columns_from_rows]


def gdpo(partial: bool = False, **settings: Any) -> NormalizationConfig:
    options = EstimatorOptions(gdpo_components=("right", "short"), gdpo_partial=partial)
    return NormalizationConfig(advantage_estimator="gdpo", options=options, **settings)


def component_columns(components: Any, **columns: Any) -> RolloutColumns:
    given = {"group": [0, 0, 0], "rollout": [0, 1, 2], "reward": [1.0, 0.5, 0.0], "trainable_tokens": [1, 1, 1]}
    return RolloutColumns(**given | columns, components=components)


RIGHT, SHORT = [1.0, 0.0, 0.0], [0.0, 0.5, 0.0]


class TestComponentColumns:
    @pytest.mark.parametrize(
        ("components", "names"),
        [(None, ["right", "short"]), ({}, ["right", "short"]), ({"right": RIGHT}, ["short"])],
    )
    def test_a_component_that_is_no_column_is_named(self, components: Any, names: list[str]) -> None:
        with pytest.raises(RewardError) as caught:
            normalize_columns(component_columns(components), gdpo())
        assert [name for name in names if name not in str(caught.value)] == []

    def test_a_component_that_a_scored_row_lacks_is_named_with_the_row(self) -> None:
        components = {"right": [1.0, NAN, 0.0], "short": [NAN, 0.5, 0.0]}
        with pytest.raises(RewardError, match="right") as caught:
            normalize_columns(component_columns(components), gdpo())
        assert "short" in str(caught.value)
        assert caught.value.rows == (0, 1)

    def test_partial_components_may_be_lacking(self) -> None:
        # One of two has short, so only right speaks: 1 - 1/3, then 0 - 1/3 twice.
        components = {"right": RIGHT, "short": [NAN, 0.5, NAN]}
        advantages = normalize_columns(component_columns(components), gdpo(partial=True)).advantages.tolist()
        assert advantages[0] == pytest.approx(-2 * advantages[1], rel=1e-5)
        assert advantages[1] == advantages[2] < 0

    def test_rows_that_are_unscored_or_padding_need_no_component(self) -> None:
        components = {"right": [1.0, 0.0, NAN], "short": [0.0, 0.5, NAN]}
        unscored = component_columns(components, reward=[1.0, 0.5, NAN])
        assert normalize_columns(unscored, gdpo(missing_reward="exclude")).advantages[2] == 0
        normalize_columns(component_columns(components, padding=[False, False, True]), gdpo())

    def test_further_components_are_ignored(self) -> None:
        components = {"right": RIGHT, "short": SHORT}
        plain = normalize_columns(component_columns(components), gdpo())
        more = normalize_columns(component_columns(components | {"style": [9.0, NAN, 3.0]}), gdpo())
        assert torch.equal(more.advantages, plain.advantages)

    @pytest.mark.parametrize("value", [math.inf, -math.inf, 1.5 * FLOAT32_MAX, -1.5 * FLOAT32_MAX, 1e300])
    def test_a_component_beyond_float32_is_named_with_its_row(self, value: float) -> None:
        components = {"right": RIGHT, "short": [0.0, value, 0.0]}
        with pytest.raises(RewardError, match="short") as caught:
            normalize_columns(component_columns(components), gdpo())
        assert caught.value.rows == (1,)

    def test_the_largest_float32_is_a_component(self) -> None:
        components = {"right": RIGHT, "short": [0.0, FLOAT32_MAX, 0.0]}
        assert torch.isfinite(normalize_columns(component_columns(components), gdpo()).advantages).all()


@pytest.mark.parametrize("factor", [1.5, -1.5])
@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_a_reward_beyond_float32_is_refused_where_all_advantages_would_fit(factor: float, estimator: Any) -> None:
    """Equal rewards have advantages of 0."""
    rows = [new_row(index=k, reward=factor * FLOAT32_MAX) for k in range(2)]
    with pytest.raises(RewardError, match=r"^reward of rows 0, 1\n") as caught:
        normalize_rewards(rows, NormalizationConfig(advantage_estimator=estimator))
    assert caught.value.rows == (0, 1)


def shared(rows: list[dict[str, Any]], tolerance: float = 0.1) -> NormalizedRewards:
    config = NormalizationConfig(
        rollout_reward="shared", shared_reward_tolerance=tolerance, advantage_estimator="dr_grpo"
    )
    return normalize_rewards(rows, config)


class TestShared:
    ROWS = (
        *[new_row(index=0, reward=reward, response_length=n) for reward, n in ((1.0, 9), (1.05, 1), (1.02, 4))],
        *[new_row(index=1, reward=reward, response_length=n) for reward, n in ((-2.0, 5), (-1.9, 2))],
        new_row(index=2, reward=0.3),
    )

    def test_the_largest_sibling_speaks_in_any_order_and_cut(self) -> None:
        result = shared(list(self.ROWS))
        assert result.rollout_rewards.tolist() == [1.05, -1.9, 0.3]
        by_rollout = result.rollout_advantages.tolist()
        orders = [[5, 4, 3, 2, 1, 0], [2, 4, 0, 5, 3, 1], [1, 0, 2, 4, 3, 5]]
        for order in orders:
            rows = [self.ROWS[row] for row in order]
            assert shared(rows).advantages.tolist() == [by_rollout[row["index"]] for row in rows]
        # Row 1 is cut in two, and row 0 into nine of one token each.
        cut = [self.ROWS[1], *[self.ROWS[0] | {"response_length": 1}] * 9, *self.ROWS[1:]]
        assert shared(cut).rollout_advantages.tolist() == by_rollout

    def test_padding_rows_neither_speak_nor_are_named(self) -> None:
        padding = new_row(index=0, reward=7.0, is_padding=True)
        assert shared([padding, *self.ROWS]).rollout_rewards.tolist() == [1.05, -1.9, 0.3]
        with pytest.raises(DisagreeingRewardsError, match="rows 1, 3") as caught:
            shared([padding, self.ROWS[0], padding, self.ROWS[1]], tolerance=0.0)
        assert caught.value.rows == (1, 3)
        assert "7" not in caught.value.got


def parts(right: float, short: float, **fields: Any) -> dict[str, Any]:
    return new_row(reward={"right": right, "short": short}, **fields)


class TestSiblingsWithComponents:
    """Both siblings of rollout 0 have the sum 1."""

    OTHER = parts(0.0, 0.0, index=1)

    def test_shared_compares_each_component(self) -> None:
        rows = [parts(1.0, 0.0, index=0), parts(0.0, 1.0, index=0), self.OTHER]
        with pytest.raises(DisagreeingRewardsError) as caught:
            normalize_rewards(rows, gdpo(rollout_reward="shared"))
        assert caught.value.rows == (0, 1)
        assert normalize_rewards([rows[0], rows[0], self.OTHER], gdpo(rollout_reward="shared")).warnings == ()

    def test_a_tolerance_is_refused(self) -> None:
        """Whose components would speak could depend on the order of the rows."""
        with pytest.raises(ConfigError, match=r"shared_reward_tolerance=0\.1 with advantage_estimator='gdpo'"):
            gdpo(rollout_reward="shared", shared_reward_tolerance=0.1)

    def test_mainstream_warns_of_each_component(self) -> None:
        longest = [parts(1.0, 0.0, index=0, response_length=2), parts(0.0, 1.0, index=0), self.OTHER]
        [warning] = normalize_rewards(longest, gdpo()).warnings
        assert warning.startswith("siblings of rollout 0 have different")
        tied = [parts(1.0, 0.0, index=0), parts(0.0, 1.0, index=0), self.OTHER]
        first, second = normalize_rewards(tied, gdpo()).warnings
        assert first == warning
        assert second.startswith("tie between siblings with different rewards in rollout 0")

    def test_equal_components_need_no_warning(self) -> None:
        rows = [parts(1.0, 0.5, index=0), parts(1.0, 0.5, index=0), self.OTHER]
        assert normalize_rewards(rows, gdpo()).warnings == ()


FLAGS = ["is_padding", "remove_sample"]
COLUMN_OF = {"is_padding": "padding", "remove_sample": "removed"}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", FLAGS)
class TestFlags:
    @pytest.mark.parametrize(
        "value", [None, NAN, np.float64(NAN), np.float32(NAN), False, 0, np.bool_(False)], ids=repr
    )
    def test_no_flag(self, read: Any, name: str, value: Any) -> None:
        flags = getattr(read([new_row(index=0, **{name: value}), new_row(index=1)]), COLUMN_OF[name])
        assert flags is None or flags.tolist() == [False, False]

    @pytest.mark.parametrize(
        "value", [True, 1, np.bool_(True), np.int64(1), torch.tensor(True), torch.tensor(1)], ids=repr
    )
    def test_flag(self, read: Any, name: str, value: Any) -> None:
        rows = [new_row(index=0, **{name: value}), new_row(index=1, **{name: NAN}), new_row(index=2, **{name: None})]
        assert getattr(read(rows), COLUMN_OF[name]).tolist() == [True, False, False]

    @pytest.mark.parametrize(
        "value", ["false", "true", "", 2, -1, 0.5, torch.tensor([1, 0]), np.array([True, False]), [], [0], {}], ids=repr
    )
    def test_what_is_no_flag(self, read: Any, name: str, value: Any) -> None:
        rows = [new_row(index=k) for k in range(4)]
        rows[1][name] = rows[3][name] = value
        with pytest.raises(SampleError, match=name) as caught:
            read(rows)
        assert caught.value.rows == (1, 3)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", [torch.tensor, np.int64, np.array])
def test_adapters_that_are_numbers_of_any_kind(read: Any, kind: Any) -> None:
    rows = [new_row(index=k, adapter=kind(adapter)) for k, adapter in enumerate((3, 0, 3))]
    index = normalize_columns(read(rows)).index
    assert index.groups == [[0, 2], [1]]
    assert index.group_ids == [(3, 0), (0, 0)]


@pytest.mark.parametrize("read", READERS)
def test_negative_adapters_are_adapters(read: Any) -> None:
    rows = [new_row(index=k, adapter=adapter) for k, adapter in enumerate((-1, 0, -2, -1))]
    index = normalize_columns(read(rows)).index
    assert index.groups == [[0, 3], [1], [2]]
    assert index.group_ids == [(-1, 0), (0, 0), (-2, 0)]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("nan", [torch.tensor(NAN), np.array(NAN), np.float32(NAN), torch.tensor([NAN])], ids=repr)
def test_a_rollout_id_of_nan_gives_way_to_the_index(read: Any, nan: Any) -> None:
    rows = [new_row(index=index, rollout_id=nan) for index in (4, 5, 4)]
    assert normalize_columns(read(rows)).index.rollout_ids == [4, 5]


@pytest.mark.parametrize("read", READERS)
def test_the_field_of_a_row_goes_before_its_metadata(read: Any) -> None:
    rows = [new_row(index=k, problem=own, metadata={"problem": "m"}) for k, own in enumerate(("a", "b", None))]
    config = NormalizationConfig(group_key="problem")
    assert normalize_columns(read(rows, config), config).index.group_ids == ["a", "b", "m"]


@pytest.mark.parametrize(
    "padding",
    [
        {"reward": "n/a"},
        {"reward": 1e300},
        {"reward": 10**400},
        {"reward": {"right": 1.0}},
        {"reward": None},
        {"loss_mask": None, "response_length": None},
        {"loss_mask": None, "response_length": -1},
    ],
    ids=lambda value: f"{value}"[:60],
)
@pytest.mark.parametrize("read", READERS)
def test_nothing_is_asked_of_a_padding_row(read: Any, padding: dict[str, Any]) -> None:
    rows = [new_row(index=0), new_row(index=1, reward=0.0), new_row(index=1, **padding, is_padding=True)]
    config = NormalizationConfig(advantage_estimator="dr_grpo")
    result = normalize_columns(read(rows, config), config)
    assert result.advantages.tolist() == [0.5, -0.5, -0.5]
    assert result.trainable_tokens.tolist() == [1, 1, 0]


@pytest.mark.parametrize("reward", [{}, {"right": 1.0}, {"right": 1.0, "short": 1e300}, "n/a", 1.0], ids=repr)
def test_no_component_is_asked_of_a_padding_row(reward: Any) -> None:
    rows = [parts(1.0, 0.0, index=0), parts(0.0, 0.5, index=1)]
    expected = normalize_rewards(rows, gdpo()).advantages.tolist()
    padded = normalize_rewards([*rows, new_row(index=2, reward=reward, is_padding=True)], gdpo())
    assert padded.advantages.tolist() == [*expected, 0.0]


@pytest.mark.parametrize("length", [10**30, 2**63, 2**31, 1e300])
def test_a_length_beyond_all_counts_is_named_with_its_row(length: Any) -> None:
    rows = [new_row(index=0), new_row(index=1, response_length=length)]
    with pytest.raises(SampleError, match="row 1") as caught:
        normalize_rewards(rows)
    assert caught.value.rows == (1,)


@pytest.mark.parametrize("text", ["1_0", "1_0.5"])
def test_a_number_with_underscores_is_python_and_no_reward(text: str) -> None:
    rows = [new_row(index=0), new_row(index=1, reward=text)]
    with pytest.raises(RewardError, match="row 1") as caught:
        normalize_rewards(rows, NormalizationConfig(coerce_numeric_strings=True))
    assert caught.value.rows == (1,)


def test_rewards_of_a_column_that_float64_cannot_hold() -> None:
    with pytest.raises(RewardError, match="reward"):
        RolloutColumns(group=[0, 0], rollout=[0, 1], reward=[10**400, 1], trainable_tokens=[1, 1])


def test_rewards_of_a_column_that_carry_a_gradient() -> None:
    reward = [torch.tensor(1.0, requires_grad=True), torch.tensor(0.0)]
    try:
        columns = RolloutColumns(group=[0, 0], rollout=[0, 1], reward=reward, trainable_tokens=[1, 1])
    except RewardError:
        return
    assert columns.reward.tolist() == [1.0, 0.0]
    assert not columns.reward.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "a nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), "a nested tensor"),
        (lambda: torch.ones(3).to_sparse(), "a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8), "a quantized tensor"),
        (lambda: torch.ones(3, device="meta"), "a tensor on meta"),
    ],
    ids=["nested", "jagged", "sparse", "quantized", "meta"],
)
class TestTensorsThatHoldNoColumn:
    COLUMNS = ("group", "rollout", "reward", "trainable_tokens", "scored", "removed", "truncated", "padding", "adapter")

    def test_columns(self, make: Callable[[], torch.Tensor], kind: str) -> None:
        tensor = make()
        given = {"group": [0] * 3, "rollout": [0, 1, 2], "reward": [0.0, 1.0, 0.0], "trainable_tokens": [1] * 3}
        for name in self.COLUMNS:
            with pytest.raises(SampleError, match=rf"^{name} column\n  got:      {kind}"):
                RolloutColumns(**given | {name: tensor})

    def test_sizes_and_masks(self, make: Callable[[], torch.Tensor], kind: str) -> None:
        tensor = make()
        columns = RolloutColumns(group=[0] * 3, rollout=[0, 1, 2], reward=[0, 1, 0], trainable_tokens=[1] * 3)
        with pytest.raises(GroupingError, match=rf"^prompt_group_sizes\n.*{kind}"):
            normalize_columns(columns, None, tensor)
        result = normalize_columns(columns)
        with pytest.raises(SampleError, match=rf"^loss masks\n  got:      {kind}"):
            result.token_advantages(tensor)
        with pytest.raises(SampleError, match=r"^loss mask of row 1\n"):
            result.token_advantages([[1], tensor, [1]])
