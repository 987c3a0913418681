"""Schedules of shards: every row once, rollouts whole, budgets kept, as many micro-batches on every rank."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm import RolloutColumns, UpdateConfig, UpdatePlan, normalize_columns, plan_shards, plan_updates
from miles_norm.errors import ConfigError, SampleError


def update_plan(fan_outs: list[int], **settings: Any) -> UpdatePlan:
    """A plan for rollouts with these numbers of rows, whose rows are not adjacent: first rows first."""
    rows = [rollout for row in range(max(fan_outs)) for rollout, count in enumerate(fan_outs) if row < count]
    columns = RolloutColumns(
        group=[0] * len(rows), rollout=rows, reward=[float(r % 2) for r in rows], trainable_tokens=[1] * len(rows)
    )
    return plan_updates(normalize_columns(columns), UpdateConfig(**settings))


def test_by_hand() -> None:
    # Rollouts 0 to 3 on rows 0 3 | 1 4 | 2 | none, so that rollout 3 has the row after them.
    plan = update_plan([2, 2, 1, 1], rollouts_per_update=3, max_tokens_per_gpu=60)
    assert plan.result.index.row_rollout.tolist() == [0, 1, 2, 3, 0, 1]
    lengths = [50, 10, 30, 20, 40, 20]
    shards = plan_shards(lengths, 2, plan, rollout=plan.result.index.row_rollout)
    # Update 0 holds rollouts 0 (90 tokens), 1 (30) and 2 (30): 90 against 60. Rows 0 and 4 do not fit one micro-batch
    # of 60, so both ranks have two. Update 1 holds rollout 3 alone: the other rank runs an empty micro-batch.
    assert shards.tokens.tolist() == [[90, 60], [20, 0]]
    assert shards.micro_batches == (2, 1)
    assert shards.schedule(0) == [[[0], [4]], [[3]]]
    assert shards.schedule(1) == [[[2], [1, 5]], [[]]]
    assert shards.left_out == []
    # 90 + 20 tokens while the mean ranks have 75 + 10.
    assert shards.imbalance == pytest.approx(110 / 85 - 1)
    assert shards.report().splitlines() == [
        "update 0: 5 rows, 2 micro-batches a rank, 90 tokens at most, 20.00% above the mean",
        "update 1: 1 rows, 1 micro-batch a rank, 20 tokens at most, 100.00% above the mean",
    ]


def test_strided_takes_turns() -> None:
    rollout = torch.tensor([7, 7, 3, 9, 3, 1, 0])
    shards = plan_shards([1] * 7, 2, rollout=rollout, balance="strided")
    # In the order of their first rows: 7, 3, 9, 1, 0.
    assert shards.schedule(0) == [[[0, 1, 3, 6]]]
    assert shards.schedule(1) == [[[2, 4, 5]]]
    assert plan_shards([1] * 5, 2, balance="strided").row_rank.tolist() == [0, 1, 0, 1, 0]


def test_rows_in_no_update_are_in_no_shard() -> None:
    plan = update_plan([1, 1, 1], rollouts_per_update=2, leftover="drop")
    shards = plan_shards([5, 6, 10**9], 2, plan)
    assert shards.left_out == [2]
    assert sorted(row for rank in range(2) for row in shards.rows_of_rank(rank).tolist()) == [0, 1]
    assert shards.report().endswith("in no update: row 2")


PROBLEMS = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([None, 100, 160, 10_000]),
    st.sampled_from(["smaller_update", "drop", "carry"]),
)


@given(problem=PROBLEMS, data=st.data(), balance=st.sampled_from(["tokens", "strided"]))
def test_laws(problem: Any, data: st.DataObject, balance: Any) -> None:
    fan_outs, ranks, size, budget, leftover = problem
    leftover = leftover if size else "smaller_update"
    plan = update_plan(fan_outs, rollouts_per_update=size, max_tokens_per_gpu=budget, leftover=leftover)
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=sum(fan_outs), max_size=sum(fan_outs)))
    rollout = plan.result.index.row_rollout
    shards = plan_shards(lengths, ranks, plan, rollout=rollout, balance=balance)
    schedules = [shards.schedule(rank) for rank in range(ranks)]
    placed = [row for schedule in schedules for update in schedule for batch in update for row in batch]
    # Every row of an update is in exactly one shard, and the others are named.
    assert sorted(placed) == [row for update in sorted(plan.updates) for row in update] or sorted(placed) == sorted(
        row for update in plan.updates for row in update
    )
    assert sorted([*placed, *shards.left_out]) == list(range(sum(fan_outs)))
    for number, rows in enumerate(plan.updates):
        at = [{row for batch in schedule[number] for row in batch} for schedule in schedules]
        assert set().union(*at) == set(rows)
        # A rollout is on one rank.
        ranks_of = {}
        for rank, members in enumerate(at):
            for row in members:
                ranks_of.setdefault(int(rollout[row]), set()).add(rank)
        assert all(len(found) == 1 for found in ranks_of.values())
        # As many micro-batches on every rank, within the budget, and no more than one more than the rows of a rank.
        counts = {len(schedule[number]) for schedule in schedules}
        assert counts == {shards.micro_batches[number]}
        assert shards.micro_batches[number] <= max(1, *map(len, at))
        for rank, schedule in enumerate(schedules):
            assert int(shards.tokens[number, rank]) == sum(lengths[row] for row in at[rank])
            assert budget is None or all(sum(lengths[row] for row in batch) <= budget for batch in schedule[number])


def test_rollouts_that_stay_together_cost_balance() -> None:
    rollout = torch.tensor([0, 0, 0, 1])
    together, apart = plan_shards([10, 10, 10, 10], 2, rollout=rollout), plan_shards([10, 10, 10, 10], 2)
    assert together.tokens.tolist() == [[30, 10]]
    assert apart.tokens.tolist() == [[20, 20]]


def test_ids_of_any_kind_say_what_stays_together() -> None:
    expected = plan_shards([3, 2, 2, 1], 2, rollout=torch.tensor([0, 1, 1, 2])).row_rank.tolist()
    for ids in ([0, 1, 1, 2], ["a", "b", "b", "c"], [-1, 2**70, 2**70, 0], [None, "b", "b", None]):
        assert plan_shards([3, 2, 2, 1], 2, rollout=ids).row_rank.tolist() == expected


def test_what_does_not_fit_is_refused() -> None:
    plan = update_plan([1, 1, 2], max_tokens_per_gpu=10)
    with pytest.raises(SampleError, match=r"length of rows 1, 3\n.*row 1: 11 tokens, row 3: 99 tokens"):
        plan_shards([1, 11, 2, 99], 2, plan)
    with pytest.raises(SampleError, match="3 lengths for 4 rows"):
        plan_shards([1, 2, 3], 2, plan)
    with pytest.raises(SampleError, match=r"rollout column\n.*shape \[2\]\n.*\[3\]"):
        plan_shards([1, 2, 3], 2, rollout=torch.tensor([0, 1]))
    with pytest.raises(SampleError, match=r"length of row 1\n.*row 1: -2"):
        plan_shards([1, -2], 2)
    # Sums of tokens are exact: three of these would not even fit int64.
    for long in (2**31, 2**62, np.array([2**63], dtype=np.uint64)[0]):
        with pytest.raises(SampleError, match=rf"length of rows 0, 1, 2\n.*row 0: {long}, .*\n.*from 0 to 2\*\*31 - 1"):
            plan_shards(np.array([long] * 3), 2)
    with pytest.raises(SampleError, match=r"plan\n.*type list\n.*UpdatePlan"):
        plan_shards([1], 1, [[0]])  # type: ignore[arg-type]
    with pytest.raises(SampleError, match="dtype float64"):
        plan_shards([1.5, 2.0], 2)
    for size in (0, True, 2.0):
        with pytest.raises(ConfigError, match=f"data_parallel_size\n  got:      {size!r}"):
            plan_shards([1], size)
    with pytest.raises(ConfigError, match="'even'"):
        plan_shards([1], 1, balance="even")  # type: ignore[arg-type]


def test_an_empty_batch_of_updates_has_no_schedule() -> None:
    plan = update_plan([1, 1], rollouts_per_update=5, leftover="drop")
    shards = plan_shards([3, 4], 2, plan)
    assert shards.micro_batches == ()
    assert shards.schedule(1) == []
    assert shards.left_out == [0, 1]
    assert shards.imbalance == 0
