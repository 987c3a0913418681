"""The update plan: golden plans by hand, every policy for what is left over, the rule by rows, micro-batches."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from update_batches import REWARDS, ROLLOUTS, batch, plan
from weight_oracle import Rows, row_batches, update_configs

from miles_norm import NormalizationConfig, UpdateConfig, plan_updates
from miles_norm.errors import ConfigError, SampleError
from miles_norm.loss import UpdatePlan


def ids(plan: UpdatePlan, rollouts: list[int]) -> list[object]:
    return [plan.result.index.rollout_ids[rollout] for rollout in rollouts]


@pytest.mark.parametrize(
    ("leftover", "updates", "dropped", "carried"),
    [
        ("smaller_update", [[0, 1, 2, 3], [4, 5], [6, 7]], [], []),
        ("drop", [[0, 1, 2, 3], [4, 5]], [4], []),
        ("carry", [[0, 1, 2, 3], [4, 5]], [], [4]),
    ],
)
def test_what_does_not_fill_an_update(
    leftover: str, updates: list[list[int]], dropped: list[int], carried: list[int]
) -> None:
    made = plan(rollouts_per_update=2, leftover=leftover)
    assert made.updates == updates
    assert made.num_updates == len(updates)
    assert ids(made, made.dropped_rollouts) == dropped
    assert ids(made, made.carried_rollouts) == carried
    assert made.partly_dropped_rollouts == []


def test_all_rollouts_are_one_update_unless_told_otherwise() -> None:
    assert plan().updates == [list(range(8))]


@pytest.mark.parametrize("leftover", ["smaller_update", "drop", "carry"])
def test_nothing_is_left_over_where_updates_fill_up(leftover: str) -> None:
    made = plan(rollouts_per_update=5, leftover=leftover)
    assert made.updates == [list(range(8))]
    assert (made.dropped_rollouts, made.carried_rollouts) == ([], [])


def test_fewer_rollouts_than_an_update_holds() -> None:
    assert plan(rollouts_per_update=9).updates == [list(range(8))]
    dropped = plan(rollouts_per_update=9, leftover="drop")
    assert (dropped.updates, dropped.num_updates) == ([], 0)
    assert ids(dropped, dropped.dropped_rollouts) == [0, 1, 2, 3, 4]
    assert dropped.micro_batches([1] * 8) == []


def test_a_carried_rollout_keeps_its_advantage_and_meets_no_other_group() -> None:
    result = batch()
    made = plan_updates(result, UpdateConfig(rollouts_per_update=2, leftover="carry"), step=7)
    (carried,) = made.carried
    assert carried.rows == (6, 7)
    assert carried.rollout_id == 4
    assert carried.advantage == float(result.advantages[6])
    # Group 1: rewards 0, 3, 0 with mean 1, deviation sqrt(3): the advantage is -1 / (sqrt(3) + 1e-6).
    assert carried.advantage == pytest.approx(-1 / (3**0.5 + 1e-6))
    assert carried.group_key == ("carried", 7, 1)
    later = plan_updates(result, UpdateConfig(rollouts_per_update=2, leftover="carry"), step=8)
    assert later.carried[0].group_key != carried.group_key


def test_advantages_stay_what_they_were() -> None:
    result = batch()
    for leftover in ("drop", "carry"):
        assert plan(result, rollouts_per_update=2, leftover=leftover).result is result


def test_padding_and_excluded_rollouts_are_in_no_update() -> None:
    # Row 3 is padding; rollout 3 has no reward and is excluded: its place is taken by the next one.
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, float("nan"), 0.0, 0.0]
    padding = [False] * 3 + [True] + [False] * 4
    result = batch(NormalizationConfig(missing_reward="exclude"), reward=rewards, padding=padding)
    made = plan(result, rollouts_per_update=2)
    assert made.updates == [[0, 1, 2], [4, 6, 7]]
    assert made.row_update.tolist() == [0, 0, 0, -1, 1, -1, 1, 1]
    by_rows = plan(result, unit="rows", rows_per_update=2)
    assert sorted(row for rows in by_rows.updates for row in rows) == [0, 1, 2, 4, 6, 7]
    assert by_rows.dropped_rollouts == by_rows.partly_dropped_rollouts == []


def test_a_batch_of_padding_has_no_update() -> None:
    made = plan(batch(padding=[True] * 8), rollouts_per_update=2)
    assert (made.updates, made.num_updates) == ([], 0)


@pytest.mark.parametrize(
    ("rows_per_update", "max_updates", "updates"),
    [(3, None, 2), (4, None, 2), (8, None, 1), (9, None, 0), (1, None, 8), (3, 1, 1), (3, 9, 2), (2, 3, 3)],
)
def test_rows_are_cut_down_to_whole_mini_batches(rows_per_update: int, max_updates: int | None, updates: int) -> None:
    made = plan(unit="rows", rows_per_update=rows_per_update, max_updates=max_updates)
    assert [len(rows) for rows in made.updates] == [rows_per_update] * updates


def test_rows_of_groups_without_a_signal_go_first() -> None:
    # Group 0 is all 1.0: its rows 0 to 3 are the three that a cap of one update of five drops, and never others.
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 3.0, 0.0, 0.0]
    for seed in range(10):
        made = plan(batch(reward=rewards), unit="rows", rows_per_update=5, seed=seed)
        (rows,) = made.updates
        assert set(rows) >= {4, 5, 6, 7}
    # Where more have to go, all of these do, and then any others.
    made = plan(batch(reward=rewards), unit="rows", rows_per_update=2, max_updates=1)
    assert set(made.updates[0]) <= {4, 5, 6, 7}


def test_the_seed_decides_which_rows_go() -> None:
    drawn = {tuple(plan(unit="rows", rows_per_update=5, seed=seed).updates[0]) for seed in range(20)}
    assert len(drawn) > 1
    assert plan(unit="rows", rows_per_update=5, seed=3).updates == plan(unit="rows", rows_per_update=5, seed=3).updates


def test_rollouts_that_lost_all_or_some_rows_are_named() -> None:
    made = plan(unit="rows", rows_per_update=5, seed=1)
    kept = set(made.updates[0])
    rows_of = {rollout: {n for n, r in enumerate(ROLLOUTS) if r == rollout} for rollout in range(5)}
    assert ids(made, made.dropped_rollouts) == [r for r, rows in rows_of.items() if not rows & kept]
    assert ids(made, made.partly_dropped_rollouts) == [r for r, rows in rows_of.items() if rows & kept and rows - kept]
    assert made.dropped_rollouts or made.partly_dropped_rollouts


def test_micro_batches_take_the_longest_rows_first() -> None:
    # Update 0: rows 0 to 3 with 6, 5, 4, 3 tokens, ten to a micro-batch: 6 + 4, 5 + 3. Update 1: 7 stands alone, 2.
    made = plan(rollouts_per_update=2, leftover="drop", max_tokens_per_gpu=10)
    assert made.micro_batches([6, 5, 4, 3, 7, 10, 1, 1]) == [[[0, 2], [1, 3]], [[5], [4]]]
    assert made.micro_batches(torch.tensor([6, 5, 4, 3, 7, 10, 1, 1])) == [[[0, 2], [1, 3]], [[5], [4]]]
    # A row in no update may be as long as it likes.
    assert made.micro_batches([5] * 6 + [99, 99]) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_without_a_budget_an_update_is_one_micro_batch() -> None:
    assert plan(rollouts_per_update=2).micro_batches([10**9] * 8) == [[[0, 1, 2, 3]], [[4, 5]], [[6, 7]]]


@given(row_batches(), update_configs(), st.integers(5, 12), st.data())
def test_plans(rows: Rows, config: UpdateConfig, budget: int, data: st.DataObject) -> None:
    """Each counted row is in one update or named; rollouts are whole; every micro-batch is within the budget."""
    result = rows.result()
    made = plan_updates(result, config.model_copy(update={"max_tokens_per_gpu": budget}))
    planned = [row for update in made.updates for row in update]
    real = [row for row in range(len(rows.rollout)) if not rows.padding[row]]
    assert len(planned) == len(set(planned))
    assert set(planned) <= set(real)
    of_row = result.index.row_rollout.tolist()
    gone = {of_row[row] for row in set(real) - set(planned)}
    named = {*made.dropped_rollouts, *made.carried_rollouts, *made.partly_dropped_rollouts}
    assert gone == named
    if config.unit == "rollouts":
        assert made.partly_dropped_rollouts == []
        for rollout in set(of_row) - gone:
            assert len({int(made.row_update[row]) for row in real if of_row[row] == rollout}) <= 1
        sizes = [len({of_row[row] for row in update}) for update in made.updates]
        full = config.rollouts_per_update or len(set(of_row))
        assert all(size == full for size in sizes[:-1])
    else:
        size = config.rows_per_update or 0
        expected = min(len(real) // size, config.max_updates or len(real))
        assert [len(update) for update in made.updates] == [size] * expected
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=len(rows.rollout), max_size=len(rows.rollout)))
    batches = made.micro_batches(lengths)
    assert [sorted(row for part in update for row in part) for update in batches] == made.updates
    assert all(sum(lengths[row] for row in part) <= budget for update in batches for part in update)


def test_errors_name_all_rows_at_once() -> None:
    made = plan(rollouts_per_update=2, max_tokens_per_gpu=4)
    with pytest.raises(SampleError, match=r"length of rows 1, 6\n.*row 1: 5 tokens, row 6: 9 tokens.*=4") as raised:
        made.micro_batches([1, 5, 1, 1, 1, 1, 9, 1])
    assert raised.value.rows == (1, 6)
    with pytest.raises(SampleError, match="3 lengths for 8 rows"):
        made.micro_batches([1, 2, 3])


def test_the_report_names_updates_and_what_is_in_none() -> None:
    assert plan(rollouts_per_update=2, leftover="drop").report() == (
        "update 0: 2 rollouts, 4 rows, 40 trainable tokens\n"
        "update 1: 2 rollouts, 2 rows, 20 trainable tokens\n"
        "dropped: rollout 4"
    )
    assert plan(rollouts_per_update=3, leftover="carry").report().splitlines()[-1] == "carried: rollouts 3, 4"
    # Group 0 is all equal, so one of its rows goes, and both of its rollouts have two.
    silent = plan(batch(reward=[1.0] * 4 + REWARDS[4:]), unit="rows", rows_per_update=7)
    assert silent.report().splitlines()[-1] in ("partly dropped: rollout 0", "partly dropped: rollout 1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "rows"}, "unit='rows' without rows_per_update"),
        ({"unit": "rows", "rows_per_update": 2, "rollouts_per_update": 2}, "with rollouts_per_update or leftover"),
        ({"unit": "rows", "rows_per_update": 2, "leftover": "drop"}, "with rollouts_per_update or leftover"),
        ({"rows_per_update": 2}, "rows_per_update with unit='rollouts'"),
        ({"max_updates": 2}, "max_updates with unit='rollouts'"),
        ({"order": "drop_first"}, "order with unit='rollouts'"),
        ({"seed": 1}, "seed with unit='rollouts'"),
        ({"leftover": "carry"}, "leftover='carry' without rollouts_per_update"),
        ({"rollouts_per_update": 0}, "greater than or equal to 1"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpdateConfig(**settings)


@pytest.mark.parametrize("length", [5.9, -1, "3", float("nan"), float("inf"), None])
@pytest.mark.parametrize("budget", [None, 5])
def test_micro_batches_refuse_lengths_that_are_none(length: Any, budget: int | None) -> None:
    made = plan(rollouts_per_update=2, max_tokens_per_gpu=budget)
    with pytest.raises(SampleError, match=r"length of rows 1, 6\n"):
        made.micro_batches([1, length, 1, 1, 1, 1, length, 1])
