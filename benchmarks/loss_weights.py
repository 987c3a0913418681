"""How fast are loss weights? Ratios against a per-row Python loop that gives the same numbers, measured in this run.

    python benchmarks/loss_weights.py            some seconds
    python benchmarks/loss_weights.py --short    less
    python benchmarks/loss_weights.py --json F   the figures to a file as well

Two loops are measured, both one weight at a time: on elements of tensors, as trainers write it, and on Python numbers.
Both must give the same numbers; the script fails otherwise. Waits of the host for the device are counted by a dispatch
mode that sees every operation whose result the host reads; without a plan there must be none.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from normalize import FAN_OUT, best
from torch.utils._python_dispatch import TorchDispatchMode

from miles_norm import LossConfig, RolloutColumns, UpdateConfig, loss_weights, normalize_columns, plan_updates
from miles_norm.result import NormalizedRewards

CONFIGS = {
    "token_mean": LossConfig(aggregation="token_mean"),
    "sample_mean": LossConfig(aggregation="sample_mean"),
    "rollout_mean": LossConfig(),
    "rollout_mean / trained_rows": LossConfig(divisor="trained_rows"),
    "rollout_row_mean": LossConfig(aggregation="rollout_row_mean"),
    "prompt_mean": LossConfig(aggregation="prompt_mean"),
    "constant": LossConfig(aggregation="constant", max_tokens=4096),
}
# Operations with which the host waits for the device: a number read, or a shape that depends on values.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "_unique",
    "_unique2",
    "unique_dim",
    "masked_select",
    "item",
    "is_nonzero",
    "equal",
}


class CountWaits(TorchDispatchMode):
    """Names of the operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # A boolean mask as an index has as many results as it has ones.
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITS or masked:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def make_result(rows: int, seed: int = 0) -> NormalizedRewards:
    """About ``rows`` rows with the fan-out above, eight rollouts a group, some rows without a trainable token."""
    rng = np.random.default_rng(seed)
    rollouts = max(8, int(rows / 2.41))
    rollout = np.repeat(np.arange(rollouts), rng.choice(list(FAN_OUT), p=list(FAN_OUT.values()), size=rollouts))
    columns = RolloutColumns(
        group=torch.from_numpy(rollout // 8),
        rollout=torch.from_numpy(rollout),
        reward=torch.from_numpy(rng.random(rollouts)[rollout]),
        trainable_tokens=torch.from_numpy(rng.integers(0, 500, len(rollout))),
    )
    return normalize_columns(columns)


def fresh(result: NormalizedRewards) -> NormalizedRewards:
    """Without what an earlier call left behind."""
    for name in ("trainable_tokens", "counted_rollouts", "trained_rows"):
        result.__dict__.pop(name, None)
    return result


def loop(result: NormalizedRewards, config: LossConfig) -> list[float]:
    """One row at a time, on Python numbers."""
    tokens, rollout = result.trainable_tokens.tolist(), result.index.row_rollout.tolist()
    group = result.index.row_group.tolist()
    rollout_tokens: dict[int, int] = {}
    rollout_rows: dict[int, int] = {}
    group_tokens: dict[int, int] = {}
    total = rows = 0
    for t, r, g in zip(tokens, rollout, group, strict=True):
        rollout_tokens[r] = rollout_tokens.get(r, 0) + t
        group_tokens[g] = group_tokens.get(g, 0) + t
        rollout_rows[r] = rollout_rows.get(r, 0) + (t > 0)
        total += t
        rows += t > 0
    groups = sum(t > 0 for t in group_tokens.values())
    weights = []
    for t, r, g in zip(tokens, rollout, group, strict=True):
        if t == 0:
            weights.append(0.0)
            continue
        match config.aggregation:
            case "token_mean":
                denominator = total
            case "sample_mean":
                denominator = rows * t
            case "rollout_mean":
                divisor = len(rollout_tokens) if config.divisor == "rollouts" else rows
                denominator = divisor * rollout_tokens[r]
            case "rollout_row_mean":
                denominator = len(rollout_tokens) * rollout_rows[r] * t
            case "prompt_mean":
                denominator = groups * group_tokens[g]
            case "constant":
                denominator = len(rollout_tokens) * (config.max_tokens or 0)
        weights.append(1.0 / denominator)
    return weights


def tensor_loop(result: NormalizedRewards, config: LossConfig) -> torch.Tensor:
    """One row at a time, on elements of tensors: the mask sum of its rollout is added up where it is needed."""
    tokens, rollout = result.trainable_tokens, result.index.row_rollout
    rows_of: dict[int, list[int]] = {}
    for row, r in enumerate(rollout.tolist()):
        rows_of.setdefault(r, []).append(row)
    rows = int((tokens > 0).sum())
    divisor = len(rows_of) if config.divisor == "rollouts" else rows
    weights = torch.zeros(len(tokens), dtype=torch.float64)
    for members in rows_of.values():
        total = tokens[members].sum()
        for row in members:
            if tokens[row] > 0:
                weights[row] = 1.0 / (divisor * total).double()
    return weights


def compare(result: NormalizedRewards, name: str, config: LossConfig) -> dict[str, Any]:
    ours = loss_weights(fresh(result), config)
    torch.testing.assert_close(ours, torch.tensor(loop(result, config), dtype=torch.float64), rtol=1e-14, atol=0)
    with CountWaits() as waits:
        loss_weights(fresh(result), config)
    took = best(lambda: loss_weights(fresh(result), config), 0.5)
    figures = {
        "weights": name,
        "rows": len(ours),
        "ms": took * 1e3,
        "ns_per_row": took / len(ours) * 1e9,
        "times_faster_than_list_loop": best(lambda: loop(result, config), 0.2) / took,
        "waits": len(waits.seen),
    }
    if config.aggregation == "rollout_mean":
        # Its time is linear in the rows: a tenth of them stands for all.
        part = make_result(len(ours) // 10)
        torch.testing.assert_close(loss_weights(part, config), tensor_loop(part, config), rtol=1e-14, atol=0)
        once = best(lambda: tensor_loop(part, config), 0.1) / part.index.num_rows * len(ours)
        figures["times_faster_than_tensor_loop"] = once / took
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tenth of the rows")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # half a millisecond of work is too little to hand around
    rows = 10_000 if options.short else 100_000
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}")
    result = make_result(rows)
    figures = [compare(result, name, config) for name, config in CONFIGS.items()]
    print(f"{'':38} {'':>7} {'x faster than':^21}  {'waits of':>8}")
    print(f"{'rows':>9} {'weights':<28} {'ms':>7} {'ns/row':>7} {'tensor loop':>11} {'list loop':>9}  {'the host':>8}")
    for f in figures:
        tensor = f.get("times_faster_than_tensor_loop")
        print(
            f"{f['rows']:>9} {f['weights']:<28} {f['ms']:>7.3f} {f['ns_per_row']:>7.1f} "
            f"{'' if tensor is None else f'{tensor:.0f}x':>11} {f['times_faster_than_list_loop']:>8.0f}x  "
            f"{f['waits']:>8}"
        )
    plan = plan_updates(result, UpdateConfig(rollouts_per_update=512))
    took = best(lambda: loss_weights(fresh(result), None, plan), 0.5)
    print(f"rollout_mean with a plan of {plan.num_updates} updates: {took * 1e3:.3f} ms")
    if options.json:
        options.json.write_text(json.dumps({"weights": figures, "with_a_plan_ms": took * 1e3}, indent=2))
    if any(f["waits"] for f in figures):
        raise SystemExit("the host waited for the device")


if __name__ == "__main__":
    main()
