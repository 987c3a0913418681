"""Statistics of segments: values by hand, and bits that nothing but a segment's own values can change."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.statistics import SQUARE_UNDERFLOW, SegmentStatistics, segment_statistics


def statistics_of(*segments: list[float], ddof: int = 1, tolerance: float = 0.0) -> SegmentStatistics:
    values = torch.tensor([value for segment in segments for value in segment], dtype=torch.float64)
    return segment_statistics(values, torch.tensor([len(s) for s in segments]), ddof=ddof, tolerance=tolerance)


def bits(column: torch.Tensor) -> list[int]:
    return column.contiguous().view(torch.int64).tolist()


def test_golden() -> None:
    # 1, 2, 4, 5: sum 12, mean 3, squared deviations 4 + 1 + 1 + 4 = 10.  -1, 7: sum 6, mean 3, 16 + 16 = 32.
    found = statistics_of([4.0, 1.0, 5.0, 2.0], [7.0, -1.0])
    assert found.count.tolist() == [4, 2]
    assert found.total.tolist() == [12.0, 6.0]
    assert found.mean.tolist() == [3.0, 3.0]
    assert found.std.tolist() == [math.sqrt(10 / 3), math.sqrt(32)]
    assert found.minimum.tolist() == [1.0, -1.0]
    assert found.maximum.tolist() == [5.0, 7.0]
    assert found.range.tolist() == [4.0, 8.0]
    assert found.equal.tolist() == [False, False]
    assert statistics_of([4.0, 1.0, 5.0, 2.0], [7.0, -1.0], ddof=0).std.tolist() == [math.sqrt(10 / 4), 4.0]


@pytest.mark.parametrize("others", [[], [[1.0, 2.0]], [[3.0]], [[float(k) for k in range(5000)]]])
def test_segments_of_one_and_none(others: list[list[float]]) -> None:
    """In blocks of their own and beside longer ones."""
    found = statistics_of([], [5.0], [], [-2.0], [0.0], *others)
    assert found.total[:5].tolist() == [0.0, 5.0, 0.0, -2.0, 0.0]
    assert found.mean[:5].tolist() == [0.0, 5.0, 0.0, -2.0, 0.0]
    assert found.std[:5].tolist() == [0.0] * 5
    assert found.equal[:5].tolist() == [True] * 5
    assert found.minimum[:5].tolist() == found.maximum[:5].tolist() == [0.0, 5.0, 0.0, -2.0, 0.0]


def test_nothing_at_all() -> None:
    assert statistics_of([], []).mean.tolist() == [0.0, 0.0]
    assert (
        segment_statistics(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)).mean.tolist() == []
    )


@pytest.mark.parametrize("n", [2, 3, 5, 7, 64, 100])
@pytest.mark.parametrize("value", [0.7, 0.1, -1e15 / 3, 1e-300])
def test_mean_of_equal_values_is_that_value(n: int, value: float) -> None:
    """Added up and divided, seven times 0.7 is not 0.7."""
    found = statistics_of([value] * n)
    assert found.mean.tolist() == [value]
    assert found.std.tolist() == [0.0]
    assert found.equal.tolist() == [True]


def test_large_offset() -> None:
    """E[v^2] - E[v]^2 would give noise: the squares of 1e15 have no room for a deviation of 1."""
    found = statistics_of([1e15, 1e15 + 1, 1e15 + 2])
    assert found.mean.tolist() == [1e15 + 1]
    assert found.std.tolist() == [1.0]
    assert found.equal.tolist() == [False]


def test_denormals() -> None:
    # Differences below 2**-500 cannot be squared: their deviation would be 0, and without an epsilon a divisor of 0.
    found = statistics_of([5e-324, 1e-323], [0.0, 2 * SQUARE_UNDERFLOW], [0.0, SQUARE_UNDERFLOW])
    assert found.equal.tolist() == [True, False, True]
    assert found.std[0] == 0.0
    # Two values at distance d: std = d / sqrt(2).
    assert found.std[1].item() == pytest.approx(2 * SQUARE_UNDERFLOW / math.sqrt(2), rel=1e-12)


def test_large_magnitudes() -> None:
    largest = torch.finfo(torch.float32).max
    found = statistics_of([-largest, largest])
    assert found.std.item() == pytest.approx(largest * math.sqrt(2), rel=1e-15)


@pytest.mark.parametrize(
    ("tolerance", "equal"),
    # The ranges are 0.25 of the largest absolute value, 4, and 0.5 of it, 2.
    [(0.0, [False, False]), (0.125, [False, False]), (0.25, [True, False]), (0.5, [True, True])],
)
def test_tolerance(tolerance: float, equal: list[bool]) -> None:
    found = statistics_of([-4.0, -3.0], [1.0, 2.0], tolerance=tolerance)
    assert found.equal.tolist() == equal
    assert [std == 0.0 for std in found.std.tolist()] == equal
    assert found.mean.tolist() == [-3.5, 1.5]


SEGMENTS = st.lists(st.lists(st.floats(-1e30, 1e30), max_size=9), min_size=1, max_size=6)


@given(SEGMENTS, st.randoms(use_true_random=False))
def test_order_and_neighbours_change_no_bit(segments: list[list[float]], random: object) -> None:
    together = statistics_of(*segments)
    # -0.0 and 0.0 are equal and may stand in either order.
    shuffled = statistics_of(*[random.sample(segment, len(segment)) for segment in segments])  # type: ignore[attr-defined]
    for name in ("mean", "std", "total"):
        assert torch.equal(getattr(shuffled, name), getattr(together, name)), name
        alone = torch.cat([getattr(statistics_of(segment), name) for segment in segments])
        assert torch.equal(alone, getattr(together, name)), name
    assert torch.equal(shuffled.equal, together.equal)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_against_exact_sums(values: list[float]) -> None:
    found = statistics_of(values)
    mean = math.fsum(values) / len(values)
    scale = max(map(abs, values))
    assert found.mean.item() == pytest.approx(mean, abs=1e-14 * scale, rel=0)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    if max(values) - min(values) <= 2.0**-500:  # too small to be squared: counts as equal
        std = 0.0
    assert found.std.item() == pytest.approx(std, rel=1e-12, abs=1e-14 * scale)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 9, 1023, 1024, 1025])
def test_bucket_widths(width: int) -> None:
    """A segment beside shorter, equal and longer ones, in one block or in several."""
    generator = torch.Generator().manual_seed(width)
    segment = torch.randn(width, generator=generator, dtype=torch.float64).tolist()
    alone = statistics_of(segment)
    for neighbours in ([[1.0]], [[1.0, 2.0]] * 3, [[0.5] * width], [[float(k) for k in range(3000)], []]):
        beside = statistics_of(*neighbours, segment, *neighbours)
        k = len(neighbours)
        for name in ("mean", "std", "total", "minimum", "maximum"):
            assert bits(getattr(beside, name)[k : k + 1]) == bits(getattr(alone, name)), name


def test_one_huge_segment_beside_many_small_ones() -> None:
    """100,000 values beside a thousand segments of three: the bits of each alone, in a few megabytes."""
    generator = torch.Generator().manual_seed(0)
    huge = torch.randn(100_000, generator=generator, dtype=torch.float64)
    small = torch.randn(3_000, generator=generator, dtype=torch.float64)
    count = torch.tensor([3] * 500 + [100_000] + [3] * 500)
    together = segment_statistics(torch.cat([small[:1500], huge, small[1500:]]), count)
    huge_alone = segment_statistics(huge, torch.tensor([100_000]))
    small_alone = segment_statistics(small, torch.tensor([3] * 1000))
    one_by_one = [segment_statistics(part, torch.tensor([3])) for part in small[:300].split(3)]
    for name in ("mean", "std", "total"):
        found = bits(getattr(together, name))
        assert found[500:501] == bits(getattr(huge_alone, name)), name
        assert found[:500] + found[501:] == bits(getattr(small_alone, name)), name
        assert found[:100] == [bits(getattr(one, name))[0] for one in one_by_one], name


def test_values_are_left_alone() -> None:
    values, count = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64), torch.tensor([2, 1])
    segment_statistics(values, count)
    assert values.tolist() == [3.0, 1.0, 2.0]
    assert count.tolist() == [2, 1]
