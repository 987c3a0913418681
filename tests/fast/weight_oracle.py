"""Loss weights the slow way: sets of rows, one row at a time, straight from the definitions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from miles_norm import LossConfig, RolloutColumns, UpdateConfig, normalize_columns
from miles_norm.result import NormalizedRewards


@dataclass
class Rows:
    """A batch with every state a row can be in."""

    group: list[int]
    rollout: list[int]
    reward: list[float]
    tokens: list[int]
    removed: list[bool]
    padding: list[bool]
    adapter: list[str] | None

    def result(self) -> NormalizedRewards:
        return normalize_columns(
            RolloutColumns(
                group=self.group,
                rollout=self.rollout,
                reward=self.reward,
                trainable_tokens=self.tokens,
                removed=self.removed,
                padding=self.padding,
                adapter=self.adapter,
            )
        )


@st.composite
def row_batches(draw: Any) -> Rows:
    n = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    rollout = column(st.integers(0, 4))
    with_adapters = draw(st.booleans())
    return Rows(
        # A rollout is in one group, and its rows have one adapter.
        group=[r // 2 for r in rollout],
        rollout=rollout,
        reward=[float(r % 3) for r in rollout],
        tokens=column(st.sampled_from([1, 2, 3, 5, 0])),
        removed=column(st.sampled_from([False, False, False, True])),
        padding=column(st.sampled_from([False, False, False, True])),
        adapter=[("a", "b")[r // 2 % 2] for r in rollout] if with_adapters else None,
    )


def loss_configs() -> st.SearchStrategy[LossConfig]:
    counts = {
        "count_empty_rollouts": st.booleans(),
        "count_empty_rows": st.booleans(),
        "scope": st.sampled_from(["update", "batch"]),
    }
    means = ["token_mean", "sample_mean", "rollout_mean", "rollout_row_mean", "prompt_mean"]
    return st.one_of(
        st.builds(LossConfig, aggregation=st.sampled_from(means), **counts),
        st.builds(LossConfig, divisor=st.just("trained_rows"), **counts),
        st.builds(LossConfig, divisor=st.just("nominal_rollouts"), nominal_rollouts=st.integers(1, 9), **counts),
        st.builds(LossConfig, aggregation=st.just("constant"), max_tokens=st.integers(1, 9), **counts),
    )


def update_configs() -> st.SearchStrategy[UpdateConfig]:
    size = st.integers(1, 4)
    return st.one_of(
        st.builds(UpdateConfig),
        st.builds(
            UpdateConfig, rollouts_per_update=size, leftover=st.sampled_from(["smaller_update", "drop", "carry"])
        ),
        st.builds(
            UpdateConfig,
            unit=st.just("rows"),
            rows_per_update=size,
            max_updates=st.one_of(st.none(), size),
            seed=st.integers(0, 3),
        ),
    )


def weight_oracle(rows: Rows, config: LossConfig, update: list[int]) -> list[float]:
    """``update`` is the update of each row, -1 for none."""
    n = range(len(rows.rollout))
    kept = [i for i in n if update[i] >= 0 and not rows.padding[i]]
    tokens = [rows.tokens[i] if i in kept and not rows.removed[i] else 0 for i in n]
    adapter = rows.adapter or ["" for _ in n]

    def total(members: Iterable[int]) -> int:
        return sum(tokens[i] for i in members)

    def count(members: Iterable[int], key: Callable[[int], object]) -> int:
        return len({key(i) for i in members})

    weights = []
    for i in n:
        if not tokens[i]:
            weights.append(0.0)
            continue
        together = [j for j in kept if adapter[j] == adapter[i] and (config.scope == "batch" or update[j] == update[i])]
        siblings = [j for j in together if rows.rollout[j] == rows.rollout[i]]
        counted_rows = together if config.count_empty_rows else [j for j in together if tokens[j]]
        alive = {rows.rollout[j] for j in together if tokens[j]}
        rollouts = count(
            (j for j in together if config.count_empty_rollouts or rows.rollout[j] in alive), lambda j: rows.rollout[j]
        )
        group = [j for j in together if rows.group[j] == rows.group[i]]
        denominator = {
            "token_mean": total(together),
            "sample_mean": len(counted_rows) * tokens[i],
            "rollout_mean": {
                "rollouts": rollouts,
                "trained_rows": len(counted_rows),
                "nominal_rollouts": config.nominal_rollouts or 0,
            }[config.divisor]
            * total(siblings),
            "rollout_row_mean": rollouts * len([j for j in siblings if j in counted_rows]) * tokens[i],
            "prompt_mean": count((j for j in together if tokens[j]), lambda j: rows.group[j]) * total(group),
            "constant": rollouts * (config.max_tokens or 0),
        }[config.aggregation]
        weights.append(1.0 / denominator)
    return weights
