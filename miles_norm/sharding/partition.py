"""Put weights into parts that are as heavy as each other."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Any

import numpy as np

__all__ = ["balanced_parts", "longest_first", "part_loads"]

_SLACK = 1e-3
"""A heaviest part that is above the bound by no more than this share is good enough."""

_TOLERANCE = 1.01
"""A search to the end may miss the best heaviest part by this factor, which spares most of it."""

_SEARCHED, _STEPS = 12, 20_000
"""Up to this many weights are searched to the end, in no more than this many steps."""

Array = np.ndarray[Any, Any]


def balanced_parts(weights: Sequence[int], parts: int) -> list[int]:
    """Give each weight a part, so that the heaviest part is as light as can be found.

    Longest first to the lightest part, then exchanges between the heaviest and the lightest part while these help. Few
    weights are left uneven by that, and for few there is time: they are searched to the end, within 1% of the best.

    Why not the differencing method of Karmarkar and Karp: its lists of part weights take several times as long, and
    with few weights a part, the usual case, it leaves parts less even (``benchmarks/shard.py``).

    Args:
        weights: Non-negative.
        parts: At least 1.

    Returns:
        The part of each weight, from 0. The same weights give the same parts.

    >>> balanced_parts([8, 7, 6, 5, 4], 2)
    [1, 1, 0, 0, 0]
    """
    chosen = longest_first(weights, parts)
    if parts == 1 or len(weights) < 2:
        return chosen
    bound = max(-(-sum(weights) // parts), max(weights))
    _exchange(weights, chosen, parts, bound)
    heaviest = max(part_loads(weights, chosen, parts))
    if len(weights) <= _SEARCHED and heaviest > bound * _TOLERANCE:
        return _Search(weights, parts, heaviest).run() or chosen
    return chosen


def longest_first(weights: Sequence[int], parts: int) -> list[int]:
    """Give each weight, the largest first, to the part that is the lightest so far.

    >>> longest_first([3, 2, 2, 1], 2)
    [0, 1, 1, 0]
    """
    chosen = [0] * len(weights)
    loads = [(0, part) for part in range(parts)]
    heapify(loads)
    for number in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        load, part = loads[0]
        chosen[number] = part
        heapreplace(loads, (load + weights[number], part))
    return chosen


def part_loads(weights: Sequence[int], chosen: Sequence[int], parts: int) -> list[int]:
    """The weight of each part."""
    loads = [0] * parts
    for weight, part in zip(weights, chosen, strict=True):
        loads[part] += weight
    return loads


def _exchange(weights: Sequence[int], chosen: list[int], parts: int, bound: int) -> None:
    """Move a weight out of the heaviest part, or swap it for a smaller one, as long as both parts end up lighter."""
    # One entry of weight 0 per part stands for nothing that comes back.
    given = np.asarray([*weights, *[0] * parts], dtype=np.int64)
    place = np.asarray([*chosen, *range(parts)])
    loads = np.asarray(part_loads(weights, chosen, parts))
    for _ in range(4 * parts):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        if loads[heavy] <= bound * (1 + _SLACK):
            break
        out = np.flatnonzero(place[: len(weights)] == heavy)
        # The lightest part can take most, and all are looked at where it cannot help.
        swap = _best_swap(given, place, loads, out, np.flatnonzero(place == light))
        swap = swap or _best_swap(given, place, loads, out, np.flatnonzero(place != heavy))
        if swap is None:
            break
        leaving, coming = swap
        other = place[coming]
        shift = given[leaving] - given[coming]
        loads[heavy] -= shift
        loads[other] += shift
        place[leaving] = other
        if coming < len(weights):
            place[coming] = heavy
    chosen[:] = place[: len(weights)].tolist()


def _best_swap(given: Array, place: Array, loads: Array, out: Array, back: Array) -> tuple[int, int] | None:
    """Entries of ``out`` and ``back`` that leave the heavier of both parts as light as can be; None if none helps."""
    heaviest = loads[place[out[0]]]
    moved = given[out, None] - given[back]
    heavier = np.maximum(heaviest - moved, loads[place[back]] + moved)
    best = int(heavier.argmin())
    if heavier.flat[best] >= heaviest:
        return None
    row, column = divmod(best, len(back))
    return int(out[row]), int(back[column])


class _Search:
    """Depth first over all ways to give out the weights, without those that cannot be better by the tolerance."""

    def __init__(self, weights: Sequence[int], parts: int, heaviest: int) -> None:
        self.order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
        self.weights = [weights[number] for number in self.order]
        self.left = [sum(self.weights[depth:]) for depth in range(len(weights) + 1)]
        self.loads = [0] * parts
        self.parts = [0] * len(weights)
        self.steps = _STEPS
        self.best: list[int] | None = None
        self._below(heaviest)

    def run(self) -> list[int] | None:
        """The parts, None if the ones that were there before are as good."""
        self._place(0)
        if self.best is None:
            return None
        chosen = [0] * len(self.order)
        for number, part in zip(self.order, self.best, strict=True):
            chosen[number] = part
        return chosen

    def _below(self, heaviest: int) -> None:
        self.most = min(int(heaviest / _TOLERANCE), heaviest - 1)

    def _place(self, depth: int) -> None:
        if depth == len(self.weights):
            self.best = list(self.parts)
            self._below(max(self.loads))
            return
        self.steps -= 1
        room = sum(self.most - load for load in self.loads)
        if self.steps < 0 or room < self.left[depth]:
            return
        tried: set[int] = set()
        for part in sorted(range(len(self.loads)), key=self.loads.__getitem__):
            load = self.loads[part]
            if load in tried or load + self.weights[depth] > self.most:
                continue  # parts of one weight are alike
            tried.add(load)
            self.loads[part] += self.weights[depth]
            self.parts[depth] = part
            self._place(depth + 1)
            self.loads[part] = load
