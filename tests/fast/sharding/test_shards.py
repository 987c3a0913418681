"""Shards of train data: the ranks' losses add up to the whole, whoever has which row."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm import (
    LossConfig,
    TrainData,
    UpdateConfig,
    convert_samples_to_train_data,
    normalize_rewards,
    plan_updates,
    split_by_data_parallel,
)
from miles_norm.conversion import train_data_from_result
from miles_norm.errors import ConfigError, SampleError
from miles_norm.loss import reduce_token_losses


@st.composite
def batches(draw: Any) -> list[dict[str, Any]]:
    rows = []
    for rollout in range(draw(st.integers(1, 8))):
        reward = draw(st.integers(0, 4)) / 4
        for _ in range(draw(st.integers(1, 3))):
            mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
            prompt = draw(st.integers(0, 5))
            rows.append({
                "group_index": rollout // 3, "rollout_id": rollout, "reward": reward, "loss_mask": mask,
                "response_length": len(mask), "tokens": list(range(prompt + len(mask))),
            })  # fmt: skip
    return draw(st.permutations(rows))


AGGREGATIONS = ["rollout_mean", "rollout_row_mean", "token_mean", "sample_mean", "prompt_mean"]


@given(
    rows=batches(),
    ranks=st.integers(1, 4),
    per_update=st.sampled_from([None, 1, 3]),
    budget=st.sampled_from([None, 11, 30]),
    aggregation=st.sampled_from(AGGREGATIONS),
    keep=st.sampled_from(["rollouts", "rows"]),
    balance=st.sampled_from(["tokens", "strided"]),
)
def test_losses_of_the_ranks_add_up(
    rows: Any, ranks: int, per_update: Any, budget: Any, aggregation: Any, keep: Any, balance: Any
) -> None:
    result = normalize_rewards(rows)
    plan = plan_updates(result, UpdateConfig(rollouts_per_update=per_update, max_tokens_per_gpu=budget))
    data = train_data_from_result(rows, result, loss_config=LossConfig(aggregation=aggregation), plan=plan)
    shards = split_by_data_parallel(data, ranks, plan, keep_together=keep, balance=balance)
    assert sorted(row for shard in shards for row in shard.rows.tolist()) == list(range(len(rows)))
    for shard in shards:
        expected = result.advantages[shard.rows].view(torch.int32)
        assert torch.equal(shard.data["rewards"].view(torch.int32), expected)
    for update, members in enumerate(plan.updates):
        parts = [part for shard in shards for part in shard.micro_batches(update)]
        assert sum(part.num_rows for part in parts) == len(members)
        if budget is not None:
            assert max(part.num_tokens for part in parts) <= budget
        # The loss of a token is its id, so that sums are exact up to the weights: added as fractions they are equal.
        assert sum(map(exact_loss, parts), Fraction(0)) == exact_loss(data.select(members))
        assert sum(map(loss, parts)) == pytest.approx(loss(data.select(members)), rel=1e-12)


def exact_loss(part: TrainData) -> Fraction:
    total = Fraction(0)
    for tokens, mask, weight in zip(
        part["tokens"].tolists(), part["loss_masks"].tolists(), part["weights"].tolist(), strict=True
    ):
        response = tokens[len(tokens) - len(mask) :]
        total += Fraction(weight) * sum(token for token, one in zip(response, mask, strict=True) if one)
    return total


def loss(part: TrainData) -> float:
    batch = part.padded_batch() if part.num_rows else None
    if batch is None:
        return 0.0
    losses = batch["input_ids"].double()
    return float(reduce_token_losses(losses, batch["weights"], batch["loss_mask"].long()))


def test_rows_keep_what_they_had_and_come_in_the_order_of_the_schedule() -> None:
    rows = [
        {"group_index": 0, "rollout_id": r, "reward": r, "tokens": [n] * (n + 2), "response_length": 1, "index": n}
        for n, r in enumerate([0, 1, 2, 0, 1])
    ]
    data = convert_samples_to_train_data(rows)
    shards = split_by_data_parallel(data, 2)
    # Tokens: rollout 0 has 2 + 5, rollout 1 has 3 + 6, rollout 2 has 4: 9 against 11.
    assert [(shard.rank, shard.rows.tolist()) for shard in shards] == [(0, [1, 4]), (1, [0, 2, 3])]
    for shard in shards:
        assert shard.data["sample_indices"].tolist() == shard.rows.tolist()
        assert torch.equal(shard.data["rewards"], data["rewards"][shard.rows])
        assert shard.data["tokens"].tolists() == [data["tokens"].tolists()[row] for row in shard.rows.tolist()]
        assert [part.num_rows for part in shard.micro_batches(0)] == [len(shard.rows)]


def test_micro_batches_are_views() -> None:
    tokens = torch.arange(30)
    rows = [
        {"group_index": 0, "rollout_id": n, "reward": n, "tokens": tokens[10 * n : 10 * n + 10], "response_length": 10}
        for n in range(3)
    ]
    result = normalize_rewards(rows)
    plan = plan_updates(result, UpdateConfig(max_tokens_per_gpu=10))
    [shard] = split_by_data_parallel(train_data_from_result(rows, result, plan=plan), 1, plan)
    flat = shard.data["tokens"].values
    parts = list(shard.micro_batches(0))
    assert [part.num_rows for part in parts] == [1, 1, 1]
    assert all(part["tokens"].values.data_ptr() - flat.data_ptr() == 80 * n for n, part in enumerate(parts))


def test_ids_of_any_kind_keep_rollouts_together() -> None:
    data = convert_samples_to_train_data(
        [{"group_index": 0, "index": n, "reward": n, "tokens": [1, 2], "response_length": 1} for n in range(4)]
    )
    data = TrainData(data.columns | {"rollout_ids": ["a", "b", "a", "b"]})
    assert [shard.rows.tolist() for shard in split_by_data_parallel(data, 2)] == [[0, 2], [1, 3]]


def test_what_is_lacking_is_named() -> None:
    data = convert_samples_to_train_data([{"group_index": 0, "reward": 1, "tokens": [1, 2], "response_length": 1}])
    with pytest.raises(ConfigError, match="keep_together\n  got:      'groups'"):
        split_by_data_parallel(data, 2, keep_together="groups")  # type: ignore[arg-type]
    with pytest.raises(SampleError, match=r"train data\n.*type dict\n.*TrainData"):
        split_by_data_parallel({"tokens": [[1]]}, 2)  # type: ignore[arg-type]
    with pytest.raises(SampleError, match=r"plan\n.*type int\n.*UpdatePlan"):
        split_by_data_parallel(data, 2, 5)  # type: ignore[arg-type]
    without = TrainData({name: column for name, column in data.columns.items() if name != "rollout_ids"})
    with pytest.raises(SampleError, match="no column rollout_ids; there are tokens"):
        split_by_data_parallel(without, 2)
    assert len(split_by_data_parallel(without, 2, keep_together="rows")) == 2


def test_a_weight_of_a_plan_counts_its_update() -> None:
    rows = [{"group_index": 0, "rollout_id": n, "reward": n, "tokens": [1, 2], "response_length": 2} for n in range(3)]
    result = normalize_rewards(rows)
    plan = plan_updates(result, UpdateConfig(rollouts_per_update=2))
    # Two rollouts of two tokens in the first update, one in the second: 1 / (2 * 2) and 1 / (1 * 2).
    assert train_data_from_result(rows, result, plan=plan)["weights"].tolist() == [0.25, 0.25, 0.5]
    assert train_data_from_result(rows, result)["weights"].tolist() == pytest.approx([1 / 6] * 3)
