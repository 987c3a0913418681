"""How fast is a batch cut into shards, and how even are they? Ratios against Karmarkar-Karp, measured in this run.

    python benchmarks/shard.py            100,000 rows, growth up to a million, about a minute
    python benchmarks/shard.py --short    10,000 rows, some seconds
    python benchmarks/shard.py --json F   the figures to a file as well

A schedule gives each row of each update to a rank and a micro-batch: 64 ranks, 512 rollouts an update, whole rollouts,
at most 16,384 tokens in a micro-batch, rows of 1,100 tokens on the median. The baseline does the same with the
differencing method of Karmarkar and Karp, a heap of lists of part weights, and first-fit micro-batches, as trainers
have it. Floors are one stable sort of the lengths, for the schedule, and one copy of the bytes of tokens, masks and
log-probs, for shards of train data (of rows a tenth as long). Evenness is also held against an exact search on small
cases. Times are the best of several runs; memory is the growth of the peak of a process of its own.
"""

import argparse
import heapq
import json
import platform
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import in_new_process, peak_growth
from normalize import FAN_OUT, best

from miles_norm import (
    RolloutColumns,
    TrainData,
    UpdateConfig,
    normalize_columns,
    plan_shards,
    plan_updates,
    split_by_data_parallel,
)
from miles_norm.loss import UpdatePlan
from miles_norm.sharding import ShardPlan
from miles_norm.sharding.partition import balanced_parts, part_loads
from miles_norm.train_data import Ragged

RANKS, PER_UPDATE, BUDGET = 64, 512, 16_384


def make_batch(rows: int, seed: int = 0) -> tuple[UpdatePlan, torch.Tensor]:
    """An update plan for about this many rows, and their lengths: log-normal, capped by the budget."""
    rng = np.random.default_rng(seed)
    rollouts = max(PER_UPDATE, int(rows / 2.41))
    rollout = np.repeat(np.arange(rollouts), rng.choice(list(FAN_OUT), p=list(FAN_OUT.values()), size=rollouts))
    lengths = np.clip(rng.lognormal(7, 0.8, len(rollout)), 1, BUDGET).astype(np.int64)
    columns = RolloutColumns(
        group=rollout // 8, rollout=rollout, reward=rng.random(rollouts)[rollout], trainable_tokens=lengths // 2
    )
    config = UpdateConfig(rollouts_per_update=PER_UPDATE, max_tokens_per_gpu=BUDGET)
    return plan_updates(normalize_columns(columns), config), torch.from_numpy(lengths)


def ours(plan: UpdatePlan, lengths: torch.Tensor, **settings: Any) -> ShardPlan:
    return plan_shards(lengths, RANKS, plan, rollout=plan.result.index.row_rollout, **settings)


def karmarkar_karp(weights: list[int], parts: int) -> list[list[int]]:
    """Members of each part: the two states that are furthest from even are put together, heavy parts to light ones."""
    number = count()
    heap = []
    for n, weight in enumerate(weights):
        state = [(0, ())] * (parts - 1) + [(weight, (n,))]
        heapq.heappush(heap, (-weight, next(number), state))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        state = sorted((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True))
        least = state[0][0]
        state = [(weight - least, members) for weight, members in state]
        heapq.heappush(heap, (-state[-1][0], next(number), state))
    return [list(members) for _, members in heap[0][2]]


def baseline(plan: UpdatePlan, lengths: torch.Tensor) -> np.ndarray[Any, Any]:
    """Tokens ``[updates, ranks]`` of a schedule by Karmarkar-Karp, with first-fit micro-batches."""
    sizes, of_row = lengths.tolist(), plan.result.index.row_rollout.tolist()
    tokens = np.zeros((plan.num_updates, RANKS), np.int64)
    for update, rows in enumerate(plan.updates):
        rows_of: dict[int, list[int]] = {}
        for row in rows:
            rows_of.setdefault(of_row[row], []).append(row)
        rollouts = list(rows_of.values())
        parts = karmarkar_karp([sum(sizes[row] for row in members) for members in rollouts], RANKS)
        for rank, members in enumerate(parts):
            on_rank = [row for rollout in members for row in rollouts[rollout]]
            batches: list[int] = []
            for row in sorted(on_rank, key=lambda row: -sizes[row]):
                fitting = next((n for n, room in enumerate(batches) if room >= sizes[row]), None)
                if fitting is None:
                    batches.append(BUDGET - sizes[row])
                else:
                    batches[fitting] -= sizes[row]
            tokens[update, rank] = sum(sizes[row] for row in on_rank)
    return tokens


def imbalance(tokens: np.ndarray[Any, Any]) -> float:
    return float(tokens.max(axis=1).sum() / tokens.mean(axis=1).sum() - 1)


def schedules(rows: int) -> dict[str, Any]:
    plan, lengths = make_batch(rows)
    shards = ours(plan, lengths)
    own, strided = (best(lambda s=s: ours(plan, lengths, **s), 1.0) for s in ({}, {"balance": "strided"}))
    plain = best(lambda: baseline(plan, lengths), 0.0)
    sort = best(lambda: torch.sort(lengths, stable=True), 0.2)
    return {
        "rows": len(lengths),
        "updates": plan.num_updates,
        "seconds": own,
        "us_per_row": own / len(lengths) * 1e6,
        "seconds_strided": strided,
        "times_faster_than_karmarkar_karp": plain / own,
        "times_one_stable_sort": own / sort,
        "imbalance": shards.imbalance,
        "imbalance_karmarkar_karp": imbalance(baseline(plan, lengths)),
        "imbalance_strided": ours(plan, lengths, balance="strided").imbalance,
    }


def growth(largest: int) -> tuple[float, list[list[float]]]:
    """Slope of log time over log rows; 1 is linear."""
    sizes = [10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6]
    points = []
    for size in [size for size in sizes if size <= largest]:
        plan, lengths = make_batch(size)
        points.append([len(lengths), best(lambda p=plan, n=lengths: ours(p, n), 0.2)])
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0]), points


def small_cases(cases: int) -> float:
    """The worst ratio of our fullest part to that of the best of all ways."""
    rng = np.random.default_rng(0)
    worst = 1.0
    for _ in range(cases):
        weights = rng.lognormal(8, 1, rng.integers(2, 10)).astype(np.int64).tolist()
        parts = int(rng.integers(2, 5))
        reached = {(0,) * parts}
        for weight in weights:
            reached = {
                tuple(sorted((*loads[:n], loads[n] + weight, *loads[n + 1 :])))
                for loads in reached
                for n in range(parts)
            }
        least = min(map(max, reached))
        worst = max(worst, max(part_loads(weights, balanced_parts(weights, parts), parts)) / least)
    return worst


def shards_of_data(rows: int) -> dict[str, float]:
    """Cutting train data into shards against one copy of its bytes."""
    plan, lengths = make_batch(rows)
    short = (lengths // 10).clamp(min=1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), short.cumsum(0)])
    total = int(offsets[-1])
    data = TrainData({
        "tokens": Ragged(torch.arange(total), offsets),
        "response_lengths": short,
        "loss_masks": Ragged(torch.ones(total, dtype=torch.uint8), offsets),
        "rollout_log_probs": Ragged(torch.rand(total), offsets),
        "rollout_ids": plan.result.index.row_rollout,
        "weights": torch.rand(len(short), dtype=torch.float64),
    })  # fmt: skip
    names = ("tokens", "loss_masks", "rollout_log_probs")
    cut = best(lambda: split_by_data_parallel(data, RANKS, plan), 1.0)
    planned = best(lambda: ours(plan, short), 0.5)
    copy = best(lambda: [data[name].values.clone() for name in names], 0.5)
    return {
        "ms": cut * 1e3,
        "of_it_the_schedule_ms": planned * 1e3,
        "times_one_copy": cut / copy,
        "mb": total * 13 / 1e6,
    }


def peak_bytes_per_row(rows: int) -> float:
    ours(*make_batch(1000))  # load everything that is loaded on first use
    plan, lengths = make_batch(rows)
    shards, growth = peak_growth(lambda: ours(plan, lengths))
    assert len(shards.row_rank) == len(lengths)
    return growth / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="smaller sizes, some seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, largest = (10_000, 10**5) if options.short else (100_000, 10**6)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}")
    s = schedules(rows)
    print(f"schedule of {s['rows']} rows in {s['updates']} updates on {RANKS} ranks: {s['seconds'] * 1e3:.0f} ms,")
    print(f"  {s['us_per_row']:.2f} us a row, {s['times_faster_than_karmarkar_karp']:.1f}x faster than Karmarkar-Karp,")
    print(f"  {s['times_one_stable_sort']:.0f}x one stable sort of the lengths")
    print(f"fullest rank above the mean: {s['imbalance']:.3%}; by Karmarkar-Karp {s['imbalance_karmarkar_karp']:.3%},")
    print(f"  strided {s['imbalance_strided']:.1%}")
    worst = small_cases(100 if options.short else 1000)
    print(f"small cases: at most {worst - 1:.2%} above the best of an exact search")
    exponent, points = growth(largest)
    print(f"growth exponent from 1e4 to {largest:.0e} rows: {exponent:.2f}")
    data = shards_of_data(rows)
    print(
        f"shards of train data, {data['mb']:.0f} MB: {data['ms']:.0f} ms, {data['of_it_the_schedule_ms']:.0f} of it the"
    )
    print(f"  schedule; the rest is {data['times_one_copy']:.1f}x one copy of the bytes")
    memory = in_new_process(peak_bytes_per_row, largest) if sys.platform == "linux" else None
    if memory is not None:
        print(f"peak extra memory of a schedule: {memory:.0f} bytes a row")
    if options.json:
        figures = {"schedule": s, "small_cases": worst, "growth_exponent": exponent, "growth": points, "data": data}
        options.json.write_text(json.dumps(figures | {"peak_bytes_per_row": memory}, indent=2))


if __name__ == "__main__":
    main()
