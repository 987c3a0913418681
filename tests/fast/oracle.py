"""A slow second opinion: the semantics of ``normalize_rewards`` in plain Python, one rollout and one group at a time.

The rarer estimators stand in ``estimator_oracle``. Rows are dicts with Miles' field names. It shares no code with the
library, and of its errors only the names.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import estimator_oracle as slow

Row = dict[str, Any]
Number = float | None


class OracleError(Exception):
    """The name of the error class that the library has to raise."""


@dataclass
class Rollout:
    rows: list[int]
    group: int
    reward: Number = None
    mainstream: int = -1
    speaker: int = -1
    real: bool = True
    excluded: str | None = None
    advantage: float = 0.0


@dataclass
class Answer:
    source: str
    rollouts: list[Rollout]
    num_groups: int
    tokens: list[int]
    advantages: list[float] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)
    disagree: bool = False
    tie: bool = False

    def rows_of_groups(self) -> list[list[int]]:
        groups: list[list[int]] = [[] for _ in range(self.num_groups)]
        for rollout in self.rollouts:
            groups[rollout.group] += rollout.rows
        return [sorted(rows) for rows in groups]


def normalize(
    rows: list[Row],
    config: Any,
    sizes: list[int] | None = None,
    nesting: list[tuple[int, int | None]] | None = None,
    nested_groups: int = 0,
) -> Answer:
    """``nesting`` holds for each row its inner list and, where rollouts are lists too, the number of that list."""
    if config.advantage_estimator == "gdpo":
        refuse_lacking_components(rows, config)
    source, keys, num_groups = group_keys(rows, config, sizes, nesting, nested_groups)
    lists = [None] * len(rows) if nesting is None else [number for _, number in nesting]
    if source not in ("prompt_group_sizes", "nesting"):
        keys = padding_to_its_rollout(rows, keys, source)
    rollouts, num_groups = find_rollouts(rows, keys, lists, num_groups)
    answer = Answer(source, rollouts, num_groups, [tokens_of(row) for row in rows])
    own = own_rewards(rows, config)
    for rollout in rollouts:
        rollout.real = any(not rows[row]["is_padding"] for row in rollout.rows)
        choose_reward(answer, rollout, rows, own, config)
    if any(rollout.excluded == "disagree" for rollout in rollouts):
        raise OracleError("DisagreeingRewardsError")
    untrain_truncated(answer, rows, config)
    count(answer, config)
    advantages(answer, rows, config)
    broadcast(answer, rows, own, config)
    if config.n_samples_per_prompt is not None:
        found = Counter(rollout.group for rollout in rollouts if rollout.real)
        given = source in ("prompt_group_sizes", "nesting")  # only these know of groups without a rollout
        incomplete = (g for g in range(num_groups) if found[g] < config.n_samples_per_prompt)
        answer.incomplete = [g for g in incomplete if given or found[g]]
    return answer


def known(value: Any) -> Any:
    """NaN, as tables bring it, is no id."""
    return None if isinstance(value, float) and math.isnan(value) else value


def group_keys(
    rows: list[Row], config: Any, sizes: list[int] | None, nesting: Any, nested_groups: int
) -> tuple[str, list[Any], int | None]:
    if sizes is not None:
        return "prompt_group_sizes", [g for g, size in enumerate(sizes) for _ in range(size)], len(sizes)
    if nesting is not None:
        return "nesting", [group for group, _ in nesting], nested_groups
    ids = [known(row["group_index"]) for row in rows]
    real = [not row["is_padding"] for row in rows]
    if any(i is not None for i in ids) and all(i is not None for i, is_real in zip(ids, real, strict=True) if is_real):
        # Without adapters all are None, which changes nothing.
        return "group_index", [(row["adapter"], i) for row, i in zip(rows, ids, strict=True)], None
    if config.group_fallback == "error":
        raise OracleError("GroupingError")
    n, batch = config.n_samples_per_prompt, config.rollout_batch_size
    if n is None or batch is None or sum(real) != n * batch:
        return "single_group", [0] * len(rows), None
    keys, seen = [], 0
    for is_real in real:
        seen += is_real
        keys.append(max(seen - 1, 0) // n)
    return "fixed_fan_out", keys, None


def padding_to_its_rollout(rows: list[Row], keys: list[Any], source: str) -> list[Any]:
    """A padding row whose group was not given joins the rollout of its id, if one group alone has it."""

    def identity(row: Row) -> Any:
        explicit = known(row["rollout_id"])
        return explicit if explicit is not None else known(row["index"])

    keys = list(keys)
    for n, row in enumerate(rows):
        given = source == "group_index" and known(row["group_index"]) is not None
        if row["is_padding"] and not given and identity(row) is not None:
            real = [(key, other) for key, other in zip(keys, rows, strict=True) if not other["is_padding"]]
            groups = {key for key, other in real if identity(other) == identity(row)}
            if len(groups) == 1:
                keys[n] = groups.pop()
    return keys


def find_rollouts(
    rows: list[Row], keys: list[Any], lists: list[int | None], num_groups: int | None
) -> tuple[list[Rollout], int]:
    numbers: dict[Any, int] = {}
    found: dict[Any, Rollout] = {}
    for n, row in enumerate(rows):
        group = keys[n] if num_groups is not None else numbers.setdefault(keys[n], len(numbers))
        explicit, index = known(row["rollout_id"]), known(row["index"])
        if lists[n] is not None:
            rollout: Any = ("list", lists[n])
        elif explicit is not None or index is not None:
            rollout = ("id", explicit if explicit is not None else index)
        else:
            rollout = ("row", n)
        found.setdefault((group, rollout), Rollout([], group)).rows.append(n)
    return list(found.values()), len(numbers) if num_groups is None else num_groups


def tokens_of(row: Row) -> int:
    if row["remove_sample"] or row["is_padding"]:
        return 0
    return row["response_length"] if row["loss_mask"] is None else sum(row["loss_mask"])


def own_rewards(rows: list[Row], config: Any) -> list[Number]:
    """Each row's reward, None if it has none; padding rows have none that matters."""
    own: list[Number] = []
    for row in rows:
        reward = weighted_sum(row, config) if config.advantage_estimator == "gdpo" else row["reward"]
        scored = reward is not None and math.isfinite(reward)
        if not scored and config.missing_reward == "error" and not row["is_padding"]:
            raise OracleError("MissingRewardError")
        own.append(float(reward) if scored else 0.0 if config.missing_reward == "zero" else None)
    return own


def component(row: Row, name: str) -> Number:
    value = None if row["reward"] is None else row["reward"].get(name)
    return value if value is not None and math.isfinite(value) else None


def weighted_sum(row: Row, config: Any) -> Number:
    weights = config.options.component_weights
    present = {name: component(row, name) for name in weights if component(row, name) is not None}
    return sum(weights[name] * value for name, value in present.items()) if present else None


def refuse_lacking_components(rows: list[Row], config: Any) -> None:
    given = [row for row in rows if row["reward"] is not None and not row["is_padding"]]
    lacking = any(component(row, name) is None for row in given for name in config.options.gdpo_components)
    if lacking and not config.options.gdpo_partial:
        raise OracleError("RewardError")


def parts(row: Row, config: Any) -> tuple[Number, ...]:
    """The reward components of a row, None where it lacks one, 0 where an unscored row counts as 0."""
    names = config.options.gdpo_components
    if weighted_sum(row, config) is None and config.missing_reward == "zero":  # None, or a dict with none of them
        return (0.0,) * len(names)
    return tuple(component(row, name) for name in names)


def choose_reward(answer: Answer, rollout: Rollout, rows: list[Row], own: list[Number], config: Any) -> None:
    siblings = [row for row in rollout.rows if not rows[row]["is_padding"]]
    speakers = [row for row in siblings if own[row] is not None]
    rollout.mainstream = max(speakers, key=lambda row: (answer.tokens[row], -row), default=rollout.rows[0])
    if not speakers:
        return
    values = [own[row] for row in speakers]
    low, high, policy = min(values), max(values), config.rollout_reward
    rollout.reward = own[rollout.mainstream]
    rollout.speaker = {"first": speakers[0], "last": speakers[-1]}.get(policy, rollout.mainstream)
    if policy == "mainstream":
        # Where components are normalized one by one, siblings that agree in the sum alone disagree.
        whole = {row: (own[row], *parts(rows[row], config)) for row in speakers}
        others = [row for row in speakers if whole[row] != whole[rollout.mainstream]]
        answer.disagree |= bool(others)
        answer.tie |= any(answer.tokens[row] == answer.tokens[rollout.mainstream] for row in others)
    elif policy == "shared":
        if high - low > max(abs(high), abs(low)) * config.shared_reward_tolerance:
            rollout.excluded = "disagree"
        for values_of in zip(*(parts(rows[row], config) for row in speakers), strict=True):
            known = [value for value in values_of if value is not None]
            spread = max(known) - min(known) if known else 0
            if (
                0 < len(known) < len(values_of)
                or spread > max(map(abs, known), default=0) * config.shared_reward_tolerance
            ):
                rollout.excluded = "disagree"
        rollout.reward = high
    elif policy in ("first", "last"):
        rollout.reward = values[0 if policy == "first" else -1]
    elif policy == "max":
        rollout.reward = high
    elif len(speakers) < len(siblings):
        rollout.reward = None
    elif policy == "sum":
        rollout.reward = math.fsum(values)
    else:
        rollout.reward = low if low == high else math.fsum(values) / len(values)


def untrain_truncated(answer: Answer, rows: list[Row], config: Any) -> None:
    if config.truncated_rollouts == "untrain":
        for rollout in answer.rollouts:
            # Padding enters nothing, so its status does not either.
            if any(rows[row]["status"] == "truncated" and not rows[row]["is_padding"] for row in rollout.rows):
                for row in rollout.rows:
                    answer.tokens[row] = 0


def members(answer: Answer, group: int) -> list[Rollout]:
    return [rollout for rollout in answer.rollouts if rollout.group == group and rollout.excluded is None]


def passes_through(config: Any) -> bool:
    return not config.rewards_normalization or config.advantage_estimator in ("ppo", "reinforce_plus_plus")


def count(answer: Answer, config: Any) -> None:
    for rollout in answer.rollouts:
        if not rollout.real:
            rollout.excluded = "PADDING"
        elif rollout.reward is None:
            rollout.excluded = "UNSCORED"
        elif config.untrained_rollouts == "exclude" and not any(answer.tokens[row] for row in rollout.rows):
            rollout.excluded = "UNTRAINED"
    for group in range(answer.num_groups):
        counted = members(answer, group)
        if len(counted) < config.min_group_size:
            for rollout in counted:
                rollout.excluded = "SMALL_GROUP"


def advantages(answer: Answer, rows: list[Row], config: Any) -> None:
    groups = [members(answer, group) for group in range(answer.num_groups)]
    if config.singleton == "error" and any(len(counted) == 1 for counted in groups):
        raise OracleError("GroupingError")
    keeps_reward = passes_through(config) or config.singleton == "raw"
    columns = [components(counted, rows, config) for counted in groups]
    silent = [
        all(slow.equal([v for v in column if v is not None], config.zero_std_tolerance) for _, column in of_group)
        for of_group in columns
    ]
    for counted, equal in zip(groups, silent, strict=True):
        if config.zero_variance_groups == "drop_from_loss" and equal and not (len(counted) == 1 and keeps_reward):
            for rollout in counted:
                rollout.excluded = "ZERO_VARIANCE"
    if not passes_through(config):
        refuse_rewards(groups, config)
    for counted, of_group, equal in zip(groups, columns, silent, strict=True):
        if not equal:
            for rollout, value in zip(counted, formula(answer, counted, of_group, config), strict=True):
                rollout.advantage = value
    batch = [rollout for rollout in answer.rollouts if rollout.excluded is None]
    if config.advantage_estimator == "gdpo":
        whiten(batch, [1] * len(batch), False, config)
    for counted in groups:
        if passes_through(config) or (len(counted) == 1 and config.singleton == "raw"):
            for rollout in counted:
                rollout.advantage = rollout.reward if rollout.excluded is None else 0.0
    if config.options.whitening != "none":
        tokens = [sum(answer.tokens[row] for row in rollout.rows) for rollout in batch]
        weights = tokens if config.options.whitening == "token" else [1] * len(batch)
        whiten(batch, weights, config.options.whitening_shift, config)


def components(counted: list[Rollout], rows: list[Row], config: Any) -> list[tuple[float, slow.Component]]:
    """Weight and column of each reward component, or of the reward; a row that counts as 0 has 0 in all of them."""
    columns: list[tuple[float, slow.Component]] = []
    if not config.options.gdpo_components:
        return [(1.0, [rollout.reward for rollout in counted])]
    for name, weight in config.options.component_weights.items():
        speakers = [rows[rollout.speaker] for rollout in counted]
        columns.append((weight, [0.0 if weighted_sum(s, config) is None else component(s, name) for s in speakers]))
    return columns


def whiten(batch: list[Rollout], weights: list[int], shift: bool, config: Any) -> None:
    values = slow.np.array([rollout.advantage for rollout in batch])
    for rollout, value in zip(
        batch, slow.whiten(values, weights, shift, config.std_ddof, config.std_epsilon), strict=True
    ):
        rollout.advantage = value


def refuse_rewards(groups: list[list[Rollout]], config: Any) -> None:
    rewards = [rollout.reward for counted in groups for rollout in counted if rollout.excluded is None]
    analytic = config.options.pass_at_k == "analytic"
    if config.advantage_estimator == "maxrl" and any(reward < 0 for reward in rewards):
        raise OracleError("RewardError")
    if analytic and any(reward not in (0, 1) for reward in rewards):
        raise OracleError("RewardError")
    if analytic and any(0 < len(counted) < config.options.k for counted in groups):
        raise OracleError("GroupingError")


def formula(answer: Answer, counted: list[Rollout], columns: Any, config: Any) -> list[float]:
    rewards = [rollout.reward for rollout in counted]
    match config.advantage_estimator:
        case "opo":
            return list(slow.opo(rewards, [sum(answer.tokens[row] for row in rollout.rows) for rollout in counted]))
        case "maxrl":
            return list(slow.maxrl(rewards))
        case "pass_at_k" if config.options.pass_at_k == "analytic":
            return list(slow.analytic_pass_at_k(rewards, config.options.k))
        case "pass_at_k":
            return list(slow.topk_gap(rewards))
        case "gdpo":
            return list(slow.gdpo_sums(columns, config.std_ddof, config.std_epsilon, config.zero_std_tolerance))
    return [one_formula(reward, rewards, config) for reward in rewards]


def one_formula(reward: float, rewards: list[float], config: Any) -> float:
    n = len(rewards)
    mean = math.fsum(rewards) / n
    if config.advantage_estimator == "rloo":
        return reward - (math.fsum(rewards) - reward) / max(n - 1, 1)
    if config.advantage_estimator not in ("grpo", "gspo") or not config.grpo_std_normalization:
        return reward - mean
    variance = math.fsum((value - mean) ** 2 for value in rewards) / max(n - config.std_ddof, 1)
    return (reward - mean) / (math.sqrt(variance) + config.std_epsilon or 1.0)


def broadcast(answer: Answer, rows: list[Row], own: list[Number], config: Any) -> None:
    answer.advantages = [0.0] * len(rows)
    for rollout in answer.rollouts:
        for row in rollout.rows:
            if rollout.excluded is not None:
                answer.tokens[row] = 0
            elif passes_through(config) and not rows[row]["is_padding"]:
                answer.advantages[row] = own[row] or 0.0
                answer.tokens[row] *= own[row] is not None
            else:
                answer.advantages[row] = rollout.advantage
