"""Batches for hypothesis: every optional part is drawn, the rewards themselves too, so that failures shrink."""

import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from miles_norm import NormalizationConfig
from miles_norm.config import EstimatorOptions

Row = dict[str, Any]


@dataclass
class Batch:
    rows: list[Row]
    samples: list[Any]
    """What is handed to the library: ``rows``, flat or nested."""
    sizes: list[int] | None = None
    nesting: list[tuple[int, int | None]] | None = None
    nested_groups: int = 0


# Decimals that float64 does not hold exactly, and far enough apart that a difference keeps six digits.
REWARDS = st.one_of(st.sampled_from([0.0, 1.0, 0.7, -0.25]), st.integers(-5000, 5000).map(lambda k: k / 1000))
UNSCORED = st.sampled_from([None, math.nan, math.inf, -math.inf])


def rarely(draw: Any, times: int = 6) -> bool:
    """False unless drawn otherwise; shrinks to False."""
    return draw(st.integers(0, times - 1)) == times - 1


@st.composite
def batches(draw: Any) -> Batch:
    """Prompt groups of rollouts of rows, with every kind of state and every way to say what belongs together."""
    form = draw(st.sampled_from(["group_index", "sizes", "nested", "nested_lists", "no_groups", "some_groups"]))
    states = {name: draw(st.booleans()) for name in ("unscored", "removed", "truncated", "padding", "disagree")}
    adapters = draw(st.sampled_from([(None,), ("a", "b"), (None, "a")])) if form == "group_index" else (None,)
    local_ids, strings = draw(st.booleans()), draw(st.booleans())
    groups: list[list[list[Row]]] = []
    number = 0
    for group in range(draw(st.integers(1, 4))):
        rollouts = []
        for local in range(draw(st.integers(0 if form in ("sizes", "nested", "nested_lists") else 1, 4))):
            i: Any = local if local_ids else number
            ids = {"group_index": group // 2 if len(adapters) > 1 else group, "index": f"r{i}" if strings else i}
            ids["adapter"] = adapters[group % len(adapters)]
            rollouts.append(draw(rollouts_of(ids, states)))
            number += 1
        groups.append(rollouts)
    return arrange(draw, form, groups)


@st.composite
def rollouts_of(draw: Any, ids: Row, states: dict[str, bool]) -> list[Row]:
    shared = draw(REWARDS)
    fan_out = draw(st.integers(1, 3))
    # A single row often has no rollout_id; rows of several share it. Sometimes a row has no id at all.
    kind = (
        draw(st.sampled_from(["index", "rollout_id", "both"]))
        if fan_out > 1
        else draw(st.sampled_from(["index", "none"]))
    )
    rows = []
    for _ in range(fan_out):
        row = dict(ids, rollout_id=ids["index"] if kind in ("rollout_id", "both") else None)
        if kind in ("rollout_id", "none"):
            row["index"] = draw(st.sampled_from([None, math.nan]))
        row["reward"] = draw(REWARDS) if states["disagree"] else shared
        if states["unscored"] and rarely(draw, 4):
            row["reward"] = draw(UNSCORED)
        mask = draw(st.lists(st.integers(0, 1), max_size=4))
        row["response_length"], row["loss_mask"] = len(mask), draw(st.sampled_from([mask, None]))
        row["remove_sample"] = states["removed"] and rarely(draw, 3)
        row["status"] = "truncated" if states["truncated"] and rarely(draw, 4) else "completed"
        row["is_padding"] = states["padding"] and rarely(draw, 4)
        rows.append(row)
    return rows


def arrange(draw: Any, form: str, groups: list[list[list[Row]]]) -> Batch:
    rows = [row for group in groups for rollout in group for row in rollout]
    if not rows:
        groups = [[[new_row()]]]
        rows = groups[0][0]
    if form == "nested":
        nesting: list[tuple[int, int | None]] = [(g, None) for g, group in enumerate(groups) for r in group for _ in r]
        return Batch(rows, [[row for r in group for row in r] for group in groups], None, nesting, len(groups))
    if form == "nested_lists":
        numbers = iter(range(len(rows)))
        nesting = [(g, k) for g, group in enumerate(groups) for r in group for k in [next(numbers)] for _ in r]
        return Batch(rows, groups, None, nesting, len(groups))
    if form == "sizes":
        return Batch(rows, rows, [sum(map(len, group)) for group in groups])
    if form != "group_index":
        for row in rows:
            if form == "no_groups" or draw(st.booleans()):
                row["group_index"] = None
    if draw(st.booleans()):
        rows = draw(st.permutations(rows))
    return Batch(rows, rows)


def new_row(**fields: Any) -> Row:
    """A row of a rollout of its own, with reward 1 and one trainable token."""
    row = {"group_index": 0, "index": None, "rollout_id": None, "adapter": None, "reward": 1.0, "response_length": 1}
    return row | {"loss_mask": None, "remove_sample": False, "status": "completed", "is_padding": False} | fields


ESTIMATORS = ["grpo", "gspo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "ppo", "reinforce_plus_plus"]
POLICIES = ["mainstream", "first", "last", "max", "mean", "sum", "shared"]


@st.composite
def configs(draw: Any) -> NormalizationConfig:
    """Every setting that changes a number, without the combinations that are rejected."""
    chosen: dict[str, Any] = {
        "advantage_estimator": draw(st.sampled_from(ESTIMATORS)),
        "rewards_normalization": not rarely(draw),
        "grpo_std_normalization": draw(st.booleans()),
        "std_ddof": draw(st.sampled_from([1, 0])),
        "std_epsilon": draw(st.sampled_from([1e-6, 0.0, 0.5])),
        "zero_std_tolerance": draw(st.sampled_from([0.0, 1e-3, 0.5])),
        "rollout_reward": draw(st.sampled_from(POLICIES)),
        "missing_reward": draw(st.sampled_from(["exclude", "zero", "error"])),
        "untrained_rollouts": draw(st.sampled_from(["include", "exclude"])),
        "truncated_rollouts": draw(st.sampled_from(["include", "untrain"])),
        "zero_variance_groups": draw(st.sampled_from(["keep", "drop_from_loss"])),
        "min_group_size": draw(st.sampled_from([1, 1, 2, 3])),
        "group_fallback": "error" if rarely(draw) else "single_group",
        "n_samples_per_prompt": draw(st.sampled_from([None, 1, 2, 3, 4])),
        "rollout_batch_size": draw(st.sampled_from([None, 1, 2, 3])),
    }
    if chosen["rollout_reward"] == "shared":
        chosen["shared_reward_tolerance"] = draw(st.sampled_from([0.0, 0.5]))
    passes = not chosen["rewards_normalization"] or chosen["advantage_estimator"] in ("ppo", "reinforce_plus_plus")
    if not passes and chosen["min_group_size"] == 1:
        chosen["singleton"] = draw(st.sampled_from(["zero", "raw", "raw", "error"]))
    chosen["min_group_size"] = min(chosen["min_group_size"], chosen["n_samples_per_prompt"] or 9)
    return NormalizationConfig(**chosen)


@st.composite
def problems(draw: Any) -> tuple[Batch, NormalizationConfig]:
    """A batch and a config; often one whose fixed fan-out fits the number of rows."""
    batch, config = draw(batches()), draw(configs())
    rows = sum(not row["is_padding"] for row in batch.rows)
    if rows and draw(st.booleans()):
        n = draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
        fitting = {"n_samples_per_prompt": n, "rollout_batch_size": rows // n}
        config = NormalizationConfig(
            **config.model_dump() | fitting | {"min_group_size": min(config.min_group_size, n)}
        )
    return batch, config


# Kinds of one number or a few; gdpo's own division by the batch needs an epsilon where components cancel.
COMPONENTS = st.fixed_dictionaries({"right": st.sampled_from([0.0, 1.0]), "short": REWARDS})
PARTIAL = st.fixed_dictionaries({}, optional={"right": st.sampled_from([0.0, 1.0, None]), "short": REWARDS})


@st.composite
def estimator_problems(draw: Any) -> tuple[Batch, NormalizationConfig]:
    """A batch and a config of one of the rarer estimators, or of any with whitening over the batch."""
    batch, config = draw(problems())
    settings = config.model_dump() | {"rewards_normalization": True}
    kind = draw(st.sampled_from(["opo", "maxrl", "topk_gap", "analytic", "gdpo", "gdpo_partial", "whitening"]))
    options: dict[str, Any] = {}
    if kind == "whitening" or draw(st.booleans()):
        options |= {"whitening": draw(st.sampled_from(["rollout", "token"])), "whitening_shift": draw(st.booleans())}
    if kind == "whitening":
        passing = settings["advantage_estimator"] in ("ppo", "reinforce_plus_plus")
        settings["advantage_estimator"] = "grpo" if passing else settings["advantage_estimator"]
    elif kind in ("topk_gap", "analytic"):
        settings["advantage_estimator"] = "pass_at_k"
    else:
        settings["advantage_estimator"] = kind.removesuffix("_partial")
    if kind == "analytic":
        options |= {"pass_at_k": "analytic", "k": draw(st.integers(1, 3))}
        if not rarely(draw):
            settings["min_group_size"] = max(settings["min_group_size"], options["k"])
            settings["n_samples_per_prompt"] = None
            settings["singleton"] = "zero" if settings["min_group_size"] > 1 else settings["singleton"]
    if kind.startswith("gdpo"):
        options |= {"gdpo_components": ("right", "short"), "gdpo_partial": kind == "gdpo_partial"}
        options["gdpo_weights"] = draw(st.sampled_from([(), (2.0, 0.5)]))
        settings["std_epsilon"] = settings["std_epsilon"] or 1e-6
        settings["shared_reward_tolerance"] = 0.0
        if settings["rollout_reward"] in ("max", "mean", "sum"):
            settings["rollout_reward"] = "mainstream"
    replace_rewards(draw, batch, kind)
    return batch, NormalizationConfig(**settings | {"options": EstimatorOptions(**options)})


def replace_rewards(draw: Any, batch: Batch, kind: str) -> None:
    """The rewards that the kind can read, equal where they were equal; rarely, and gently, others are left in."""
    table: dict[Any, Any] = {}
    keep = kind in ("maxrl", "analytic") and rarely(draw)
    for row in batch.rows:
        reward = row["reward"]
        if kind.startswith("gdpo"):
            if reward is None or (not math.isfinite(reward) and not rarely(draw)):
                row["reward"] = None
            elif reward not in table:
                table[reward] = draw(PARTIAL if kind == "gdpo_partial" or rarely(draw, 20) else COMPONENTS)
            row["reward"] = None if row["reward"] is None else table.get(reward, {"right": reward, "short": 0.5})
        elif kind in ("maxrl", "analytic") and reward is not None and math.isfinite(reward) and not keep:
            row["reward"] = abs(reward) if kind == "maxrl" else float(reward > 0.5)
