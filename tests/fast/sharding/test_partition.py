"""Parts that are as heavy as each other, against all ways to give out the weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.sharding.partition import balanced_parts, longest_first, part_loads


def least_heaviest(weights: list[int], parts: int) -> int:
    """The heaviest part of the best of all ways: every multiset of part weights that can be reached."""
    reached = {(0,) * parts}
    for weight in weights:
        reached = {
            tuple(sorted((*loads[:part], loads[part] + weight, *loads[part + 1 :])))
            for loads in reached
            for part in range(parts)
        }
    return min(map(max, reached))


# Lengths of all kinds: nearly equal, far apart, many alike.
WEIGHTS = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.lists(st.integers(1000, 1100), min_size=1, max_size=8),
    st.lists(st.integers(1, 40_000), min_size=1, max_size=8),
)


@given(weights=WEIGHTS, parts=st.integers(1, 4))
def test_within_a_percent_of_the_best_of_all_ways(weights: list[int], parts: int) -> None:
    found = balanced_parts(weights, parts)
    assert len(found) == len(weights)
    assert set(found) <= set(range(parts))
    assert max(part_loads(weights, found, parts)) <= 1.01 * least_heaviest(weights, parts)


@pytest.mark.parametrize(
    ("weights", "parts", "heaviest"),
    [
        ([8, 7, 6, 5, 4], 2, 15),  # 8 + 7 | 6 + 5 + 4, where longest first gives 8 + 5 + 4 | 7 + 6
        ([3, 3, 2, 2, 2], 2, 6),  # 3 + 3 | 2 + 2 + 2
        ([10, 1, 1, 1], 3, 10),  # nothing is lighter than the largest weight
        ([5], 4, 5),
        ([0, 0, 0], 2, 0),
    ],
)
def test_by_hand(weights: list[int], parts: int, heaviest: int) -> None:
    assert max(part_loads(weights, balanced_parts(weights, parts), parts)) == heaviest


@given(weights=st.lists(st.integers(0, 10_000), max_size=60), parts=st.integers(1, 9))
def test_exchanges_never_make_it_worse(weights: list[int], parts: int) -> None:
    plain, found = (each(weights, parts) for each in (longest_first, balanced_parts))
    heaviest = [max(part_loads(weights, chosen, parts)) for chosen in (plain, found)]
    assert heaviest[1] <= heaviest[0]


def test_many_weights_on_many_parts_are_even() -> None:
    weights = [1000 + 7919 * n % 5000 for n in range(192)]
    found, plain = (part_loads(weights, each(weights, 64), 64) for each in (balanced_parts, longest_first))
    assert max(found) <= 1.015 * sum(weights) / 64
    assert max(plain) > 1.03 * sum(weights) / 64
