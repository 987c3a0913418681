"""Rows are dropped before advantages are computed: what counts in what is left, and what is named."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from update_batches import GROUPS, REWARDS, ROLLOUTS, batch, plan
from weight_oracle import Rows, loss_configs, row_batches, weight_oracle

from miles_norm import (
    FilterConfig,
    LossConfig,
    NormalizationConfig,
    RolloutColumns,
    filter_rollouts,
    loss_weights,
    normalize_columns,
)
from miles_norm.errors import SampleError
from miles_norm.loss import update_masses
from miles_norm.result import NormalizedRewards


def test_drop_first_gives_the_advantages_of_the_rows_that_are_left() -> None:
    for seed in range(10):
        made = plan(unit="rows", rows_per_update=5, order="drop_first", seed=seed)
        (kept,) = made.updates
        left = [[column[row] for row in kept] for column in (GROUPS, ROLLOUTS, REWARDS)]
        alone = normalize_columns(
            RolloutColumns(group=left[0], rollout=left[1], reward=left[2], trainable_tokens=[10] * 5)
        )
        assert made.result.advantages[kept].tolist() == alone.advantages.tolist()
        assert made.result.trainable_tokens.tolist() == [10 if row in kept else 0 for row in range(8)]
    first = plan(unit="rows", rows_per_update=5, order="normalize_first")
    assert first.result.advantages.tolist() == batch().advantages.tolist()


def test_drop_first_leaves_padding_out() -> None:
    # Row 5, the only one of rollout 3 with reward 3, is padding: without it group 1 is all 0.
    padding = [row == 5 for row in range(8)]
    made = plan(batch(padding=padding), unit="rows", rows_per_update=6, order="drop_first")
    assert made.row_update[5] == -1
    assert made.result.trainable_tokens[5] == 0
    assert made.result.advantages[4:].tolist() == [0.0] * 4


def test_drop_first_keeps_what_a_filter_took_out() -> None:
    # Group 0 has two rollouts with equal rewards, group 1 three; its filtered rollouts stay out whichever row goes.
    columns = RolloutColumns(
        group=[0, 0, 1, 1, 1],
        rollout=[0, 1, 2, 3, 4],
        reward=[1, 1, 1, 0, 1],
        trainable_tokens=[10] * 5,
        truncated=[False, False, False, False, True],
    )
    wanted = FilterConfig(truncated_rollouts=True, zero_variance_groups=True)
    result, _ = filter_rollouts(normalize_columns(columns), wanted)
    made = plan(result, unit="rows", rows_per_update=1, max_updates=1, order="drop_first")
    assert result.exclusion is not None
    assert made.result.exclusion is not None
    assert result.counted_rollouts.tolist() == [False, False, True, True, False]
    assert made.result.counted_rollouts.tolist() == [made.updates == [[rollout]] for rollout in range(5)]
    assert made.result.advantages[[0, 1, 4]].tolist() == [0.0] * 3
    assert made.result.exclusion[[0, 1, 4]].tolist() == result.exclusion[[0, 1, 4]].tolist()


def test_drop_first_keeps_a_filtered_rollout_out_where_only_a_part_of_another_one_goes() -> None:
    # Rollout 0 has two rows and loses one of them at most; rollout 2 ended by length and was taken out.
    columns = RolloutColumns(
        group=[0] * 4,
        rollout=[0, 0, 1, 2],
        reward=[1, 1, 0, 1],
        trainable_tokens=[10] * 4,
        truncated=[False] * 3 + [True],
    )
    result, _ = filter_rollouts(normalize_columns(columns), FilterConfig(truncated_rollouts=True))
    found = set()
    for seed in range(10):
        made = plan(result, unit="rows", rows_per_update=2, order="drop_first", seed=seed)
        assert not made.result.counted_rollouts[2]
        assert made.row_update[3] == -1
        found.add((tuple(made.dropped_rollouts), tuple(made.partly_dropped_rollouts)))
    assert found == {((), (0,)), ((1,), ())}


def test_drop_first_keeps_the_groups_that_sizes_made() -> None:
    columns = RolloutColumns(group=None, rollout=ROLLOUTS, reward=REWARDS, trainable_tokens=[10] * 8)
    result = normalize_columns(columns, NormalizationConfig(), [4, 4])
    made = plan(result, unit="rows", rows_per_update=7, order="drop_first")
    assert made.result.index.row_group.tolist() == GROUPS


def five(**settings: Any) -> NormalizedRewards:
    """Rollouts "a" and "b" of group 0 and "c", "d", "e" of group 1, on one row of four tokens each."""
    columns = RolloutColumns(
        group=[0, 0, 1, 1, 1], rollout=list("abcde"), reward=[1.0, 0.0, 1.0, 0.0, 0.5], trainable_tokens=[4] * 5
    )
    return normalize_columns(columns, NormalizationConfig(**settings))


def test_a_rollout_whose_group_became_too_small_is_dropped_and_named() -> None:
    """One of five rows goes. If it is "a" or "b", the other one is alone in its group, which is to have two."""
    seen = set()
    for seed in range(20):
        made = plan(five(min_group_size=2), unit="rows", rows_per_update=2, order="drop_first", seed=seed)
        dropped = tuple(made.dropped_rollouts)
        seen.add(dropped)
        if dropped == (0, 1):
            # "c", "d" and "e" fill one update and begin the next.
            assert made.row_update.tolist() == [-1, -1, 0, 0, 1]
            assert made.report().splitlines()[1:] == [
                "update 1: 1 rollout, 1 row, 4 trainable tokens",
                "dropped: rollouts a, b",
            ]
            assert update_masses(made).tolist() == pytest.approx([1.0, 1.0])
            assert made.result.advantages[:2].tolist() == [0.0, 0.0]
        else:
            assert sorted(row for update in made.updates for row in update) == [r for r in range(5) if r not in dropped]
            assert [len(update) for update in made.updates] == [2, 2]
        assert made.partly_dropped_rollouts == []
    assert seen == {(0, 1), (2,), (3,), (4,)}


def test_groups_without_a_signal_that_the_dropping_made_are_named() -> None:
    # Without "a" or "b" group 0 has one reward, so that its rollout has no signal and is dropped from the loss.
    for seed in range(10):
        result = five(zero_variance_groups="drop_from_loss")
        made = plan(result, unit="rows", rows_per_update=4, order="drop_first", seed=seed)
        planned = [row for update in made.updates for row in update]
        assert made.dropped_rollouts == sorted(set(range(5)) - set(planned))
        assert (0 in planned) == (1 in planned)


def test_a_rollout_whose_only_scored_row_was_dropped_is_named() -> None:
    # The scored row of rollout 0 is row 0 or row 1; where it goes, the other one has no reward.
    for seed in range(20):
        result = batch(
            NormalizationConfig(missing_reward="exclude"),
            group=[0] * 4,
            rollout=[0, 0, 1, 2],
            reward=[1.0, float("nan"), 0.0, 0.5],
            trainable_tokens=[4] * 4,
        )
        made = plan(result, unit="rows", rows_per_update=3, order="drop_first", seed=seed)
        planned = {row for update in made.updates for row in update}
        if 0 not in planned:
            assert planned == {2, 3}
            assert (made.dropped_rollouts, made.partly_dropped_rollouts) == ([0], [])
            return
    pytest.fail("no seed drops row 0")


def test_nothing_counts_any_more() -> None:
    columns = RolloutColumns(group=[0] * 3, rollout=[0, 1, 2], reward=[0.0, 1.0, 2.0], trainable_tokens=[1] * 3)
    result = normalize_columns(columns, NormalizationConfig(min_group_size=3))
    made = plan(result, unit="rows", rows_per_update=2, order="drop_first")
    assert (made.updates, made.dropped_rollouts) == ([], [0, 1, 2])
    assert loss_weights(made.result, None, made).tolist() == [0.0] * 3


def test_weights_of_the_result_before_the_dropping_are_refused() -> None:
    result = five()
    made = plan(result, unit="rows", rows_per_update=4, order="drop_first")
    (gone,) = made.dropped_rollouts
    with pytest.raises(
        SampleError, match=rf"^update plan\n.*counts or trains, on row {gone}\n.*plan\.result\n"
    ) as raised:
        loss_weights(result, None, made)
    assert raised.value.rows == (gone,)
    weights = loss_weights(made.result, None, made)
    assert weights[gone] == 0
    assert weights.sum() == pytest.approx(4 * 1 / 16)
    # Where nothing is dropped there is one result.
    whole = plan(result, unit="rows", rows_per_update=5, order="drop_first")
    assert whole.result is result
    assert loss_weights(five(), None, whole).tolist() == pytest.approx([1 / 20] * 5)


def test_a_plan_made_before_a_filter_is_refused() -> None:
    # Group 1 is all equal, and the filter takes its three rollouts out.
    result = batch(group=[0, 0, 1, 1, 1], rollout=list("abcde"), reward=[1.0, 0, 1, 1, 1], trainable_tokens=[4] * 5)
    made = plan(result, rollouts_per_update=2)
    kept, _ = filter_rollouts(result, FilterConfig(zero_variance_groups=True))
    with pytest.raises(SampleError, match=r"trains, on rows 2, 3, 4\n(.*\n)+.*after every filter"):
        loss_weights(kept, None, made)
    assert loss_weights(kept, None, plan(kept, rollouts_per_update=2)).tolist() == pytest.approx(
        [1 / 8, 1 / 8, 0, 0, 0]
    )


def test_groups_that_were_guessed_stay_as_they_were() -> None:
    """Four groups of two rows: without one of eight rows the guess would be another, one group of all."""
    config = NormalizationConfig(n_samples_per_prompt=2, rollout_batch_size=4, grpo_std_normalization=False)
    result = batch(config, group=None, rollout=list(range(8)), reward=[0.0, 2.0] * 4)
    assert result.index.group_source == "fixed_fan_out"
    made = plan(result, unit="rows", rows_per_update=7, order="drop_first", seed=1)
    (gone,) = made.dropped_rollouts
    # Each group has the mean 1; the sibling of the row that went is alone and gets 0.
    expected = [0.0 if row in (gone, gone ^ 1) else [-1.0, 1.0][row % 2] for row in range(8)]
    assert made.result.advantages.tolist() == expected
    assert made.result.index.groups == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_padding_without_siblings_makes_no_new_rollout() -> None:
    """A padding row without a group id is of the rollout of its id, also when all other rows of that are dropped."""
    for seed in range(12):
        result = batch(
            group=[0, 0, 0, None], rollout=["a", "b", "c", "a"], reward=[1.0, 0.0, 2.0, 1.0],
            trainable_tokens=[4] * 4, padding=[False] * 3 + [True],
        )  # fmt: skip
        made = plan(result, unit="rows", rows_per_update=2, order="drop_first", seed=seed)
        (gone,) = made.dropped_rollouts
        assert made.result.index.row_rollout.tolist() == [0, 1, 2, 0]
        assert made.report().splitlines()[-1] == f"dropped: rollout {'abc'[gone]}"


@given(row_batches(), loss_configs(), st.sampled_from([1, 2, 3]), st.integers(1, 4), st.integers(0, 3))
def test_every_row_of_an_update_counts_and_the_others_are_named(
    rows: Rows, config: LossConfig, smallest: int, size: int, seed: int
) -> None:
    result = normalize_columns(rows.result().columns, NormalizationConfig(min_group_size=smallest))
    made = plan(result, unit="rows", rows_per_update=size, order="drop_first", seed=seed)
    of_row = result.index.row_rollout.tolist()
    before = [row for row, r in enumerate(of_row) if result.counted_rollouts[r] and not rows.padding[row]]
    planned = [row for update in made.updates for row in update]
    assert all(made.result.counted_rollouts[of_row[row]] for row in planned)
    assert all(len(update) == size for update in made.updates[:-1])
    lost = {of_row[row] for row in set(before) - set(planned)}
    left = {of_row[row] for row in planned}
    assert made.dropped_rollouts == sorted(lost - left)
    assert made.partly_dropped_rollouts == sorted(lost & left)
    counted = [row for row in range(len(of_row)) if made.result.counted_rollouts[of_row[row]]]
    assert {of_row[row] for row in counted} == left
    weights = loss_weights(made.result, config, made).tolist()
    assert weights == pytest.approx(weight_oracle(rows, config, made.row_update.tolist()), rel=1e-14, abs=0)
