"""How fast is normalization? Ratios against a per-group Python loop and one stable sort, all measured in this run.

    python benchmarks/normalize.py            about a minute
    python benchmarks/normalize.py --short    a few seconds
    python benchmarks/normalize.py --json F   the figures to a file as well

Two loops are measured. The tensor loop does what the library does in the way public trainers write it: scores are
collected per group in dicts, as elements of a tensor, sorted and added in the same order, and each row is normalized on
its own; it must give the same bits. The list loop works on Python floats and torch's mean and std, one call a group; it
is the fastest loop we could write, and agrees within rounding. The script fails otherwise. Times are the best of
several runs; memory is the growth of the peak of a process of its own.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from memory import in_new_process, peak_growth

from miles_norm import RolloutColumns, normalize_columns

FAN_OUT = {1: 0.36, 2: 0.22, 3: 0.18, 4: 0.13, 5: 0.11}  # 36% of rollouts have a single row, the mean is 2.41
ROLLOUTS_PER_GROUP = 8
Columns = dict[str, torch.Tensor]


def make_columns(rows: int, shuffled: bool, seed: int = 0) -> Columns:
    """About ``rows`` rows with the fan-out above, random rewards shared by siblings, in order or shuffled."""
    rng = np.random.default_rng(seed)
    rollouts = max(ROLLOUTS_PER_GROUP, int(rows / 2.41))
    fan_out = rng.choice(list(FAN_OUT), p=list(FAN_OUT.values()), size=rollouts)
    rollout = np.repeat(np.arange(rollouts), fan_out)
    reward = rng.random(rollouts)[rollout]
    tokens = rng.integers(1, 500, len(rollout))
    order = rng.permutation(len(rollout)) if shuffled else slice(None)
    names = ("group", "rollout", "reward", "trainable_tokens")
    values = (rollout // ROLLOUTS_PER_GROUP, rollout, reward, tokens)
    return {
        name: torch.from_numpy(np.ascontiguousarray(value[order])) for name, value in zip(names, values, strict=True)
    }


def normalize(columns: Columns) -> torch.Tensor:
    return normalize_columns(RolloutColumns(**columns)).advantages


def rows_of_groups(columns: Columns) -> list[list[list[int]]]:
    """Rows of each rollout of each group."""
    groups: dict[int, dict[int, list[int]]] = {}
    for row, (group, rollout) in enumerate(zip(columns["group"].tolist(), columns["rollout"].tolist(), strict=True)):
        groups.setdefault(group, {}).setdefault(rollout, []).append(row)
    return [list(rollouts.values()) for rollouts in groups.values()]


def pairwise_sum(values: torch.Tensor) -> torch.Tensor:
    """The library's order of additions: adjacent pairs of the sorted values, 0 where one is lacking."""
    while len(values) > 1:
        if len(values) % 2:
            values = torch.cat([values, values.new_zeros(1)])
        values = values[0::2] + values[1::2]
    return values[0]


def tensor_loop(columns: Columns) -> torch.Tensor:
    reward, tokens = columns["reward"], columns["trainable_tokens"]
    out = torch.zeros(len(reward))
    for rollouts in rows_of_groups(columns):
        rows_of = [torch.tensor(rows) for rows in rollouts]
        rewards = torch.stack([reward[rows[tokens[rows].argmax()]] for rows in rows_of])
        if len(rewards) == 1 or bool((rewards == rewards[0]).all()):
            continue
        values = rewards.sort().values
        mean = pairwise_sum(values) / len(values)
        std = (pairwise_sum((values - mean).square()) / (len(values) - 1)).sqrt()
        for rows, value in zip(rows_of, rewards, strict=True):
            for row in rows:
                out[row] = (value - mean) / (std + 1e-6)
    return out


def list_loop(columns: Columns) -> torch.Tensor:
    reward, tokens = columns["reward"].tolist(), columns["trainable_tokens"].tolist()
    out = torch.zeros(len(reward))
    values = out.numpy()
    for rollouts in rows_of_groups(columns):
        speakers = [max(rows, key=lambda row: (tokens[row], -row)) for rows in rollouts]
        rewards = torch.tensor([reward[row] for row in speakers], dtype=torch.float64)
        if len(rewards) == 1 or bool((rewards == rewards[0]).all()):
            continue
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        for rows, advantage in zip(rollouts, advantages, strict=True):
            values[rows] = advantage
    return out


def best(call: Callable[[], object], seconds: float = 1.0) -> float:
    call()
    times: list[float] = []
    while (sum(times) < seconds and len(times) < 300) or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(rows: int, shuffled: bool) -> dict[str, float | int | str]:
    columns = make_columns(rows, shuffled)
    rows = len(columns["group"])
    # A loop's time is linear in the rows: at large sizes a tenth of them stands for all.
    part = columns if rows <= 100_000 else make_columns(rows // 10, shuffled)
    loops = {}
    assert torch.equal(normalize(part), tensor_loop(part)), "the tensor loop gives the same bits"
    torch.testing.assert_close(normalize(part), list_loop(part), rtol=1e-5, atol=1e-6)
    for name, loop in (("tensor_loop", tensor_loop), ("list_loop", list_loop)):
        loops[name] = best(lambda loop=loop: loop(part), 0.1) / len(part["group"]) * rows
    ours = best(lambda: normalize(columns))
    keys = columns["group"] * (int(columns["rollout"].max()) + 1) + columns["rollout"]
    sort = best(lambda: torch.sort(keys, stable=True))
    return {
        "rows": rows,
        "order": "shuffled" if shuffled else "grouped",
        "ms": ours * 1e3,
        "ns_per_row": ours / rows * 1e9,
        "tensor_loop_us_per_row": loops["tensor_loop"] / rows * 1e6,
        "times_faster_than_tensor_loop": loops["tensor_loop"] / ours,
        "times_faster_than_list_loop": loops["list_loop"] / ours,
        "times_one_stable_sort": ours / sort,
    }


def growth(largest: int) -> dict[str, list[tuple[int, float]]]:
    """Seconds over rows from 1e4 to ``largest``: of normalization, and of a copy of the columns beside it."""
    found: dict[str, list[tuple[int, float]]] = {"ours": [], "copy": []}
    for size in [10**k for k in range(4, int(math.log10(largest)) + 1)]:
        columns = make_columns(size, shuffled=False)
        rows = len(columns["group"])
        found["ours"].append((rows, best(lambda columns=columns: normalize(columns), 3.0)))
        found["copy"].append((rows, best(lambda columns=columns: [c.clone() for c in columns.values()], 1.0)))
    return found


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of log time over log rows; 1 is linear."""
    x, y = np.log([n for n, _ in points]), np.log([t for _, t in points])
    return float(np.polyfit(x, y, 1)[0])


def peak_bytes_per_row(rows: int, shuffled: bool) -> float:
    normalize(make_columns(1000, shuffled))  # load everything that is loaded on first use
    columns = make_columns(rows, shuffled)
    result, growth = peak_growth(lambda: normalize_columns(RolloutColumns(**columns)))
    assert len(result.advantages) == len(columns["group"])
    return growth / len(columns["group"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="smaller sizes, a few seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    large, largest = (60_000, 10**5) if options.short else (600_000, 10**7)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}")
    comparisons = [compare(rows, shuffled) for rows in (2_500, large) for shuffled in (False, True)]
    print(f"{'':28} {'':>7} {'x faster than':^21}  {'x the time of':>13}")
    print(
        f"{'rows':>9} {'order':<8} {'ms':>9} {'ns/row':>7}  {'tensor loop':>11} {'list loop':>9}  {'a stable sort':>13}"
    )
    for c in comparisons:
        print(
            f"{c['rows']:>9} {c['order']:<8} {c['ms']:>9.3f} {c['ns_per_row']:>7.1f}  "
            f"{c['times_faster_than_tensor_loop']:>10.0f}x {c['times_faster_than_list_loop']:>8.0f}x  "
            f"{c['times_one_stable_sort']:>12.2f}x"
        )
    print(f"the tensor loop takes {comparisons[0]['tensor_loop_us_per_row']:.1f} us a row")
    times = growth(largest)
    exponents = {name: exponent(points) for name, points in times.items()}
    print(f"growth exponent from 1e4 to {largest:.0e} rows: {exponents['ours']:.3f}; ", end="")
    print(f"of a copy of the columns: {exponents['copy']:.3f}")
    print("  " + ", ".join(f"{n:.0e}: {t * 1e9 / n:.1f} ns/row" for n, t in times["ours"]))
    memory = {}
    if sys.platform == "linux":
        for shuffled in (False, True):
            order = "shuffled" if shuffled else "grouped"
            size = largest // 10 if not options.short else largest
            memory[order] = in_new_process(peak_bytes_per_row, size, shuffled)
            print(f"peak extra memory, {order}: {memory[order]:.0f} bytes a row")
    if options.json:
        figures = {"comparisons": comparisons, "growth_exponents": exponents, "growth": times}
        figures["peak_bytes_per_row"] = memory
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
