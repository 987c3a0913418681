"""The result: what it holds, in which type and shape; what is accepted as a row; that nothing given is changed."""

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import new_row

from miles_norm import NormalizationConfig, RolloutColumns, Sample, normalize_columns, normalize_rewards
from miles_norm.columns.sample_columns import columns_from_rows
from miles_norm.errors import ConfigError, GroupingError, RewardError, SampleError
from miles_norm.result import NormalizedRewards

# Group 0: rollouts 1 (two rows) and 0; group 1: one rollout, unscored.
ROWS = [
    new_row(index=0, reward=1.0, response_length=3),
    new_row(index=0, reward=1.0, loss_mask=[1, 0], response_length=2),
    new_row(index=1, reward=0.0, response_length=2),
    new_row(group_index=1, index=2, reward=None),
]
CENTRED = NormalizationConfig(advantage_estimator="dr_grpo", missing_reward="exclude", n_samples_per_prompt=2)


@pytest.fixture
def result() -> NormalizedRewards:
    return normalize_rewards(ROWS, CENTRED)


def test_surface(result: NormalizedRewards) -> None:
    """Every name, type and shape that other code relies on."""
    tensors: dict[str, tuple[torch.dtype, list[Any]]] = {
        "advantages": (torch.float32, [0.5, 0.5, -0.5, 0.0]),
        "rollout_advantages": (torch.float32, [0.5, -0.5, 0.0]),
        "raw_rewards": (torch.float64, [1.0, 1.0, 0.0, math.nan]),
        "rollout_rewards": (torch.float64, [1.0, 0.0, math.nan]),
        "mainstream_rows": (torch.int64, [0, 2, 3]),
        "trainable_tokens": (torch.int64, [3, 1, 2, 0]),
        "counted_rollouts": (torch.bool, [True, True, False]),
        "trained_rows": (torch.bool, [True, True, True, False]),
    }
    for name, (dtype, values) in tensors.items():
        found = getattr(result, name)
        assert found.dtype == dtype, name
        assert found.tolist() == pytest.approx(values, nan_ok=True), name
    assert result.index.row_rollout.dtype == result.index.rollout_group.dtype == torch.int64
    assert result.index.row_rollout.tolist() == [0, 0, 1, 2]
    assert result.index.rollout_group.tolist() == [0, 0, 1]
    assert (result.index.rollout_ids, result.index.group_ids) == ([0, 1, 2], [0, 1])
    assert result.groups == [[0, 1, 2], [3]]
    assert result.incomplete_groups == [1]
    assert result.warnings == ()
    assert result.config is CENTRED
    assert repr(result) == "NormalizedRewards(4 rows, 3 rollouts, 2 groups by group_index, 0 warnings)"


def test_metrics(result: NormalizedRewards) -> None:
    # Counted rewards 1 and 0: mean 1/2, population std 1/2. Scored rows 1, 1, 0.
    expected = {
        "rows": 4, "rollouts": 3, "groups": 2, "counted_rollouts": 2, "trained_rows": 3, "trainable_tokens": 6,
        "singleton_groups": 0, "zero_variance_groups": 0, "incomplete_groups": 1, "warnings": 0,
        "excluded_unscored": 1, "excluded_untrained": 0, "excluded_small_group": 0, "excluded_zero_variance": 0,
        "excluded_truncated": 0, "excluded_unscored_group": 0, "excluded_incomplete_group": 0,
        "fan_out_mean": 4 / 3, "fan_out_max": 2, "row_reward_mean": 2 / 3, "reward_mean": 0.5, "reward_std": 0.5,
        "advantage_min": -0.5, "advantage_max": 0.5,
    }  # fmt: skip
    metrics = result.metrics()
    assert metrics == pytest.approx({f"miles_norm/{name}": value for name, value in expected.items()})
    assert {type(value) for value in metrics.values()} == {float}


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="miles_norm"):
        found = normalize_rewards([new_row(group_index=None)])
    assert [record.message for record in caplog.records] == list(found.warnings)
    assert found.warnings


def test_token_advantages_ragged(result: NormalizedRewards) -> None:
    ragged = result.token_advantages([[1, 1, 1], [1, 0], (0, 1), [1]])
    assert isinstance(ragged, list)
    assert [row.tolist() for row in ragged] == [[0.5, 0.5, 0.5], [0.5, 0.0], [0.0, -0.5], [0.0]]
    assert {row.dtype for row in ragged} == {torch.float32}
    kinds = [np.array([True, False]), torch.tensor([0, 1], dtype=torch.uint8), [0.0, 1.0], []]
    assert [row.tolist() for row in result.token_advantages(kinds)] == [[0.5, 0.0], [0.0, 0.5], [0.0, -0.5], []]


@pytest.mark.parametrize("mask", [b"\x01\x00", bytearray(b"\x01\x00")])
def test_token_advantages_of_bytes(result: NormalizedRewards, mask: bytes) -> None:
    """Masks come as bytes over the wire, and are counted as such."""
    ragged = result.token_advantages([mask] * 4)
    assert [row.tolist() for row in ragged] == [[0.5, 0.0], [0.5, 0.0], [-0.5, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_token_advantages_padded(result: NormalizedRewards, dtype: torch.dtype) -> None:
    masks = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 1]], dtype=dtype)
    padded = result.token_advantages(masks)
    assert isinstance(padded, torch.Tensor)
    assert padded.dtype == torch.float32
    assert padded.tolist() == [[0.5, 0.5, 0.5], [0.5, 0.0, 0.0], [0.0, -0.5, 0.0], [0.0, 0.0, 0.0]]


def test_rows_that_are_not_trained_get_no_token_advantage() -> None:
    rows = [new_row(index=0, remove_sample=True), new_row(index=1, reward=0.0), new_row(index=1, is_padding=True)]
    found = normalize_rewards(rows, NormalizationConfig(advantage_estimator="dr_grpo"))
    assert found.advantages.tolist() == [0.5, -0.5, -0.5]
    assert found.token_advantages(torch.ones(3, 1)).tolist() == [[0.0], [-0.5], [0.0]]


@pytest.mark.parametrize(
    ("masks", "text"),
    [
        ([[1]] * 3, r"loss masks\n +got: +3 masks for 4 rows"),
        (torch.ones(3, 2), r"3 masks for 4 rows"),
        (torch.ones(4), r"loss masks\n +got: +shape \(4,\)"),
        (torch.ones(4, 1, 1), r"shape \(4, 1, 1\)"),
        (torch.tensor([[1], [2], [0], [-1]]), r"loss mask of rows 1, 3\n"),
        ([[1], None, [1], [[1]]], r"loss mask of rows 1, 3\n"),
        ([[1], [0.5], [1], [2]], r"loss mask of rows 1, 3\n"),
        ([[1], "10", [1], [[1], [1, 0]]], r"loss mask of rows 1, 3\n"),
    ],
)
def test_bad_masks(result: NormalizedRewards, masks: Any, text: str) -> None:
    with pytest.raises(SampleError, match=text):
        result.token_advantages(masks)


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclass
class Adapter:
    name: str
    slot: int


@dataclass
class MilesLike:
    """A trainer's own row class: attributes instead of keys, an Enum as status, methods, and fields of its own."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: Any = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    adapter: Adapter | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def effective_response_length(self) -> int:
        raise AssertionError("not read: it ignores remove_sample")


class Pairs(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def __getitem__(self, key: str) -> Any:
        return self.row[key]

    def __iter__(self) -> Any:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)


def miles_like(row: dict[str, Any]) -> MilesLike:
    kept = {key: value for key, value in row.items() if key not in ("status", "is_padding")}
    return MilesLike(**kept, status=Status(row["status"]))


@pytest.mark.parametrize(
    "kind", [miles_like, Sample.from_dict, lambda row: SimpleNamespace(**row), dict, Pairs, MappingProxyType]
)
def test_kinds_of_rows(kind: Any) -> None:
    rows = [*ROWS, new_row(group_index=1, index=3, reward=3.0, status="truncated")]
    config = NormalizationConfig(
        advantage_estimator="dr_grpo", missing_reward="exclude", truncated_rollouts="untrain", singleton="raw"
    )
    found = normalize_rewards([kind(row) for row in rows], config)
    assert found.advantages.tolist() == [0.5, 0.5, -0.5, 0.0, 3.0]
    assert found.trainable_tokens.tolist() == [3, 1, 2, 0, 0]


def test_objects_with_an_adapter() -> None:
    rows = [MilesLike(0, k, None, [], 1, float(k), adapter=Adapter("ab"[k % 2], 0)) for k in range(4)]
    found = normalize_rewards(rows)
    assert found.groups == [[0, 2], [1, 3]]
    assert found.index.group_ids == [("a", 0), ("b", 0)]


def test_missing_fields_take_their_defaults() -> None:
    found = normalize_rewards([{"reward": 1.0, "response_length": 2}, {"reward": 0.0, "response_length": 1}], CENTRED)
    assert found.advantages.tolist() == [0.5, -0.5]
    with pytest.raises(SampleError, match=r"neither loss_mask nor response_length"):
        normalize_rewards([{"reward": 1.0}])


def test_token_lists_are_not_read() -> None:
    class Unreadable(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("tokens were read")

        __len__ = __getitem__ = __iter__  # type: ignore[assignment]

    row = new_row(tokens=Unreadable(), rollout_log_probs=Unreadable(), reward=2.0)
    assert normalize_rewards([row]).raw_rewards.tolist() == [2.0]


def test_inputs_are_left_alone() -> None:
    rows = [new_row(index=k % 3, reward=float(k), loss_mask=torch.ones(2), status="TRUNCATED") for k in range(6)]
    rows[0] |= {"is_padding": True, "reward": None}
    nested = [[rows[:2], [rows[2]]], rows[3:]]
    masks = [row["loss_mask"] for row in rows]
    before = copy.deepcopy(nested)
    settings = {"truncated_rollouts": "untrain", "zero_variance_groups": "drop_from_loss", "min_group_size": 2}
    normalize_rewards(nested, NormalizationConfig(**settings)).token_advantages(masks)
    assert repr(nested) == repr(before)
    columns = {
        "group": torch.tensor([1, 0, 1, 0]),
        "rollout": torch.tensor([0, 1, 0, 2]),
        "reward": torch.tensor([3.0, math.nan, 2.0, 1.0], dtype=torch.float64),
        "trainable_tokens": torch.tensor([1, 2, 3, 4]),
        "removed": torch.tensor([True, False, False, False]),
        "padding": torch.tensor([False, False, False, True]),
    }
    copies = {name: column.clone() for name, column in columns.items()}
    for policy in ("mainstream", "mean", "first", "max"):
        config = CENTRED.model_copy(update={"rollout_reward": policy, "zero_variance_groups": "drop_from_loss"})
        found = normalize_columns(RolloutColumns(**columns), config)
        _ = found.advantages, found.trained_rows, found.groups, found.metrics(), found.explain(0)
        assert all(torch.equal(copies[name].nan_to_num(7), column.nan_to_num(7)) for name, column in columns.items())


@pytest.mark.parametrize("settings", [{"advantage_estimator": "ppo"}, {"advantage_estimator": "reinforce_plus_plus"},
                                      {"rewards_normalization": False}])  # fmt: skip
def test_rewards_pass_through(settings: dict[str, Any]) -> None:
    """Rows keep their own rewards, also where siblings disagree; a row without one is not trained."""
    rows = [
        new_row(index=0, reward=1.0, response_length=5),
        new_row(index=0, reward=3.0),
        new_row(index=0, reward=None),
        new_row(index=1, reward=None),
        new_row(index=2, reward=0.0),
    ]
    found = normalize_rewards(rows, NormalizationConfig(missing_reward="exclude", **settings))
    assert found.advantages.tolist() == [1.0, 3.0, 0.0, 0.0, 0.0]
    assert found.rollout_advantages.tolist() == [1.0, 0.0, 0.0]
    assert found.trained_rows.tolist() == [True, True, False, False, True]
    assert found.counted_rollouts.tolist() == [True, False, True]


def test_singletons() -> None:
    rows = [new_row(index=0, reward=3.0), *(new_row(group_index="g", index=k, reward=float(k)) for k in (1, 3))]
    for singleton, advantage in (("zero", 0.0), ("raw", 3.0)):
        config = NormalizationConfig(advantage_estimator="dr_grpo", singleton=singleton)
        assert normalize_rewards(rows, config).advantages.tolist() == [advantage, -1.0, 1.0]
    with pytest.raises(GroupingError, match=r"prompt group 0\n +got: +one counted rollout each"):
        normalize_rewards(rows, NormalizationConfig(singleton="error"))


def test_rows_without_an_id_and_masks_of_another_length_are_warnings() -> None:
    rows = [new_row(index=None), new_row(index=None), new_row(index=2, loss_mask=[1, 0]), new_row(index=3)]
    assert normalize_rewards(rows).warnings == (
        "rows 0, 1 have neither rollout_id nor index and are each a rollout of their own",
        "loss_mask of row 2 has another length than response_length",
    )
    assert normalize_rewards([rows[:2], rows[3:]]).warnings == ()  # nested: a row of a group is a rollout by itself
    padded = normalize_rewards([new_row(index=2), new_row(index=3), new_row(index=None, is_padding=True)])
    assert padded.warnings == ()


def test_nothing_to_train_is_a_warning() -> None:
    rows = [new_row(index=k, reward=k, response_length=0) for k in (0, 1)]
    assert normalize_rewards(rows).warnings == ("no row has a trainable token, so nothing will be trained",)


def test_a_config_of_another_kind() -> None:
    with pytest.raises(ConfigError, match=r"got: +a value of type dict\n +expected: a NormalizationConfig"):
        normalize_rewards(ROWS, {"advantage_estimator": "rloo"})  # type: ignore[arg-type]


def test_no_row_has_a_reward() -> None:
    rows = [{"score": 1.0, "group_index": 0, "index": k, "response_length": 1} for k in (0, 1)]
    text = r"no field 'reward' on any row; the first row has score, group_index, index, response_length"
    with pytest.raises(RewardError, match=text):
        normalize_rewards(rows)
    with pytest.raises(RewardError, match=text):
        columns_from_rows(iter(rows))


def test_nearly_equal_rewards_are_a_warning() -> None:
    steps = (("a", 1e-7), ("b", 1e-5))
    rows = [
        new_row(group_index=group, index=f"{group}{k}", reward=1.0 + k * step) for group, step in steps for k in (0, 1)
    ]
    found = normalize_rewards(rows)
    [warning] = found.warnings
    assert warning == (
        "rewards of prompt group a differ by at most 1e-06 of the largest, which may be rounding; zero_std_tolerance "
        "counts them as equal"
    )
    assert found.advantages.count_nonzero() == 4
    equal = normalize_rewards(rows, NormalizationConfig(zero_std_tolerance=1e-6))
    assert equal.warnings == ()
    assert equal.advantages[:2].tolist() == [0.0, 0.0]


def test_device() -> None:
    assert normalize_rewards(ROWS, NormalizationConfig(device="cpu", missing_reward="zero")).advantages.is_cpu
    with pytest.raises(ConfigError, match=r"device 'nowhere'\n +got: +no such type of device\n"):
        normalize_rewards(ROWS, NormalizationConfig(device="nowhere", missing_reward="zero"))


def test_columns_move_between_devices() -> None:
    columns = RolloutColumns(group=["a"], rollout=[0], reward=[1.0], trainable_tokens=[2])
    assert columns.to("cpu") is columns
    moved = columns.to("meta")
    assert (moved.reward.device.type, moved.group.codes.device.type) == ("meta", "meta")
    assert moved.group.labels == ("a",)


def test_defaults_without_a_config() -> None:
    # mean 1/2, sample std sqrt(1/2): 0.5 / (0.70710678 + 1e-6)
    assert normalize_rewards(ROWS[:3]).advantages.tolist() == pytest.approx([0.7071058, 0.7071058, -0.7071058])
