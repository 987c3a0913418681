"""What must not change the result, bit for bit, for explicit ids and siblings that agree."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from miles_norm import NormalizationConfig, RolloutColumns, Sample, normalize_columns, normalize_rewards
from miles_norm.result import NormalizedRewards

BASELINED = ["grpo", "gspo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]
SCALED = {"grpo", "gspo"}
every_estimator = pytest.mark.parametrize("estimator", BASELINED)


@dataclass(frozen=True)
class Rows:
    """Rows by column; a rollout is named by its group and its id."""

    group: tuple[Any, ...]
    rollout: tuple[Any, ...]
    reward: tuple[float, ...]
    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.reward)

    def take(self, rows: list[int]) -> "Rows":
        columns = (self.group, self.rollout, self.reward, self.tokens)
        return Rows(*(tuple(column[row] for row in rows) for column in columns))

    def columns(self) -> RolloutColumns:
        return RolloutColumns(
            group=list(self.group),
            rollout=list(self.rollout),
            reward=list(self.reward),
            trainable_tokens=list(self.tokens),
        )


ANY = st.floats(-1e6, 1e6, width=32)
THOUSANDTHS = st.integers(-5000, 5000).map(lambda k: k / 1000)
# Sums of these, and of their squares, are exact in float64.
DYADIC = st.integers(-512, 512).map(lambda k: k / 8)


@st.composite
def batches(draw: Any, rewards: st.SearchStrategy[float] = ANY, sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 7)) -> Rows:
    """Groups of rollouts, each cut into one to three rows."""
    group, rollout, reward, tokens = [], [], [], []
    for g in range(draw(st.integers(1, 3))):
        for r in range(draw(st.sampled_from(sizes))):
            value, lengths = draw(rewards), draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
            group += [g] * len(lengths)
            rollout += [r] * len(lengths)
            reward += [value] * len(lengths)
            tokens += lengths
    return Rows(tuple(group), tuple(rollout), tuple(reward), tuple(tokens))


def normalized(rows: Rows, estimator: str, **settings: Any) -> NormalizedRewards:
    return normalize_columns(rows.columns(), NormalizationConfig(advantage_estimator=estimator, **settings))


def bits(advantages: Tensor) -> list[int]:
    assert advantages.dtype == torch.float32
    return advantages.view(torch.int32).tolist()


@every_estimator
@settings(max_examples=25)
@given(rows=batches(THOUSANDTHS))
def test_advantages_of_a_group_sum_to_zero_over_rollouts(estimator: str, rows: Rows) -> None:
    result = normalized(rows, estimator)
    for group in range(result.index.num_groups):
        advantages = result.rollout_advantages[result.index.rollout_group == group].double()
        # Each advantage is rounded to float32 once, by at most 2**-24 of itself.
        assert abs(advantages.sum().item()) <= 2.0**-24 * advantages.abs().sum().item() + 1e-9


@every_estimator
@settings(max_examples=25)
@given(rows=batches(DYADIC, sizes=(1, 2, 4, 8)), shift=st.integers(-(2**20), 2**20).map(lambda k: k / 8))
def test_shift(estimator: str, rows: Rows, shift: float) -> None:
    """With a power of two of rollouts the mean is exact too, so not a bit changes."""
    shifted = replace(rows, reward=tuple(reward + shift for reward in rows.reward))
    assert bits(normalized(shifted, estimator).advantages) == bits(normalized(rows, estimator).advantages)


@every_estimator
@settings(max_examples=25)
@given(rows=batches(DYADIC), shift=st.integers(-(2**20), 2**20).map(lambda k: k / 8))
def test_shift_with_a_rounded_mean(estimator: str, rows: Rows, shift: float) -> None:
    shifted = replace(rows, reward=tuple(reward + shift for reward in rows.reward))
    expected = normalized(rows, estimator).advantages
    assert torch.allclose(normalized(shifted, estimator).advantages, expected, rtol=1e-6, atol=1e-8)


@every_estimator
@settings(max_examples=25)
@given(rows=batches(), exponent=st.integers(-20, 20))
def test_scale_by_a_power_of_two(estimator: str, rows: Rows, exponent: int) -> None:
    """With the epsilon scaled along, what is divided by the deviation keeps its bits and the rest is scaled exactly."""
    assume(all(reward == 0 or abs(reward) > 1e-6 for reward in rows.reward))  # no float32 underflow of the result
    scale = 2.0**exponent
    scaled = replace(rows, reward=tuple(reward * scale for reward in rows.reward))
    expected = normalized(rows, estimator).advantages * (1.0 if estimator in SCALED else scale)
    assert bits(normalized(scaled, estimator, std_epsilon=1e-6 * scale).advantages) == bits(expected)


@every_estimator
@settings(max_examples=25)
@given(rows=batches(), data=st.data())
def test_permuted_rows_permute_the_result(estimator: str, rows: Rows, data: st.DataObject) -> None:
    """Also when the rows of a rollout, or of a group, are no longer adjacent."""
    order = data.draw(st.permutations(range(len(rows))))
    expected, found = normalized(rows, estimator), normalized(rows.take(order), estimator)
    assert bits(found.advantages) == bits(expected.advantages[order])
    expected_rewards = expected.rollout_rewards[expected.index.row_rollout][order]
    assert torch.equal(found.rollout_rewards[found.index.row_rollout], expected_rewards)
    assert torch.equal(found.trainable_tokens, expected.trainable_tokens[order])


@every_estimator
@settings(max_examples=25)
@given(rows=batches(), data=st.data())
def test_cutting_rollouts_changes_no_bit(estimator: str, rows: Rows, data: st.DataObject) -> None:
    copies = data.draw(st.lists(st.integers(1, 4), min_size=len(rows), max_size=len(rows)))
    cut = rows.take([row for row, times in enumerate(copies) for _ in range(times)])
    expected, found = normalized(rows, estimator), normalized(cut, estimator)
    assert bits(found.rollout_advantages) == bits(expected.rollout_advantages)
    assert bits(found.advantages) == bits(expected.rollout_advantages[found.index.row_rollout])


# Longer than int64, negative, words: whatever names a thing.
IDS = st.one_of(st.integers(-5, 5), st.integers(2**63, 2**70), st.text(max_size=3), st.tuples(st.integers(0, 3)))


@every_estimator
@settings(max_examples=25)
@given(rows=batches(), data=st.data())
def test_renaming_ids_changes_no_bit(estimator: str, rows: Rows, data: st.DataObject) -> None:
    groups, rollouts = sorted(set(rows.group)), sorted(set(rows.rollout))
    new_groups = data.draw(st.lists(IDS, min_size=len(groups), max_size=len(groups), unique=True))
    new_rollouts = data.draw(st.lists(IDS, min_size=len(rollouts), max_size=len(rollouts), unique=True))
    renamed = replace(
        rows,
        group=tuple(new_groups[groups.index(group)] for group in rows.group),
        rollout=tuple(new_rollouts[rollouts.index(rollout)] for rollout in rows.rollout),
    )
    expected, found = normalized(rows, estimator), normalized(renamed, estimator)
    assert bits(found.advantages) == bits(expected.advantages)
    assert found.groups == expected.groups
    assert found.index.group_ids == [new_groups[groups.index(group)] for group in expected.index.group_ids]


@every_estimator
@settings(max_examples=25)
@given(rows=batches())
def test_a_group_alone_or_in_a_batch(estimator: str, rows: Rows) -> None:
    together = normalized(rows, estimator)
    for members in together.groups:
        assert bits(normalized(rows.take(members), estimator).advantages) == bits(together.advantages[members])


@settings(max_examples=25)
@given(rows=batches())
def test_samples_and_columns_of_any_kind_agree(rows: Rows) -> None:
    columns = {"group": rows.group, "rollout": rows.rollout, "reward": rows.reward, "trainable_tokens": rows.tokens}
    expected = bits(normalize_columns(rows.columns()).advantages)
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    tensors["reward"] = tensors["reward"].double()
    assert bits(normalize_columns(RolloutColumns(**tensors)).advantages) == expected
    arrays = {name: np.array(column) for name, column in columns.items()}
    assert bits(normalize_columns(RolloutColumns(**arrays)).advantages) == expected
    dicts = [
        {"group_index": group, "rollout_id": rollout, "reward": reward, "loss_mask": [1] * tokens}
        for group, rollout, reward, tokens in zip(*columns.values(), strict=True)
    ]
    assert bits(normalize_rewards(dicts).advantages) == expected
    assert bits(normalize_rewards([Sample.from_dict(row) for row in dicts]).advantages) == expected
    nested = [[row for row in dicts if row["group_index"] == group] for group in sorted(set(rows.group))]
    assert bits(normalize_rewards(nested).advantages) == expected
    sizes = [len(group) for group in nested]
    assert bits(normalize_rewards(dicts, prompt_group_sizes=sizes).advantages) == expected


@settings(max_examples=25)
@given(rows=batches(st.integers(-8, 8).map(lambda k: k / 4)), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_narrow_rewards_are_computed_in_float64(rows: Rows, dtype: torch.dtype) -> None:
    columns = RolloutColumns(
        group=list(rows.group),
        rollout=list(rows.rollout),
        reward=torch.tensor(rows.reward, dtype=dtype),
        trainable_tokens=list(rows.tokens),
    )
    assert bits(normalize_columns(columns).advantages) == bits(normalize_columns(rows.columns()).advantages)
