"""What counts as a change of advantages, for whom, and by how much."""

import math

import pytest
import torch

from miles_norm import RolloutColumns, normalize_columns
from miles_norm.audit.difference import Advantages, Difference, compare_advantages
from miles_norm.grouping import RolloutIndex

NAN, INF = math.nan, math.inf


def index_of(rollouts: list[int]) -> RolloutIndex:
    n = len(rollouts)
    return normalize_columns(
        RolloutColumns(group=[0] * n, rollout=rollouts, reward=[0.0] * n, trainable_tokens=[1] * n)
    ).index


def difference(
    before: list[float], after: list[float], rollouts: list[int] | None = None, **settings: float
) -> Difference:
    sides = [Advantages(torch.tensor(values)) for values in (before, after)]
    return compare_advantages(index_of(rollouts or list(range(len(before)))), *sides, **settings)


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (1.0, 1.0, False),
        (0.0, -0.0, False),
        (1.0, 1.0 + 5e-7, False),
        (1.0, 1.0 + 3e-6, True),
        # Near 0 the tolerance is absolute, above 1 relative.
        (0.0, 5e-7, False),
        (0.0, 2e-6, True),
        (1000.0, 1000.0005, False),
        (1000.0, 1000.01, True),
        (NAN, NAN, False),
        (NAN, 0.0, True),
        (0.0, INF, True),
        (INF, NAN, False),
    ],
)
def test_what_is_a_change(before: float, after: float, changes: bool) -> None:
    assert bool(difference([before, 5.0], [after, 5.0])) == changes
    assert bool(difference([after, 5.0], [before, 5.0])) == changes


def test_the_tolerance_is_a_choice() -> None:
    assert not difference([1.0], [1.4], tolerance=0.5)
    assert difference([1.0], [1.0 + 1e-6], tolerance=0.0)


def test_rollouts_that_change_most_come_first() -> None:
    # Rollout 0 has rows 0, 3; 1 has rows 1, 2; 2 has row 4, unchanged.
    found = difference([1.0, 0.5, 0.5, 1.0, 2.0], [0.75, -0.5, 0.5, 1.0, 2.0], rollouts=[0, 1, 1, 0, 2])
    changes = found.rollouts()
    assert [(change.rollout, change.rows) for change in changes] == [(1, (1,)), (0, (0,))]
    assert [(change.before, change.after, change.largest) for change in changes] == [
        ((0.5, 0.5), (-0.5, -0.5), 1.0),
        ((1.0, 1.0), (0.75, 0.75), 0.25),
    ]
    assert [change.flips for change in changes] == [1, 0]
    assert found.flips.tolist() == [False, True, False, False, False]


def test_ranges_are_those_of_the_rows_that_change() -> None:
    [change] = difference([1.0, 2.0, 3.0], [4.0, 6.0, 3.0], rollouts=[0, 0, 0]).rollouts()
    assert (change.rows, change.before, change.after, change.largest) == ((0, 1), (1.0, 2.0), (4.0, 6.0), 4.0)


def test_a_number_on_one_side_only_is_the_largest_change() -> None:
    found = difference([NAN, 100.0], [1.0, -100.0])
    assert [change.largest for change in found.rollouts()] == [INF, 200.0]
    assert found.size.tolist() == [INF, 200.0]


def test_rows_that_are_trained_on_one_side_only() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    before = Advantages(values, torch.tensor([True, True, False]))
    after = Advantages(values, torch.tensor([True, False, True]))
    found = compare_advantages(index_of([0, 1, 2]), before, after)
    assert found.retrained.tolist() == [False, True, True]
    assert [(change.rollout, change.largest, change.training) for change in found.rollouts()] == [
        (1, 0.0, 1),
        (2, 0.0, 1),
    ]
    # A rule that does not say what is trained says nothing about that.
    assert not compare_advantages(index_of([0, 1, 2]), before, Advantages(values))
