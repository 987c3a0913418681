"""A slow second opinion: the semantics of ``normalize_rewards`` in plain Python, one rollout and one group at a time.

Rows are dicts with Miles' field names. It shares no code with the library, and of its errors only the names.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
    source, keys, num_groups = group_keys(rows, config, sizes, nesting, nested_groups)
    lists = [None] * len(rows) if nesting is None else [number for _, number in nesting]
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
    advantages(answer, config)
    broadcast(answer, rows, own, config)
    if config.n_samples_per_prompt is not None:
        found = Counter(rollout.group for rollout in rollouts if rollout.real)
        answer.incomplete = [g for g in range(num_groups) if found[g] < config.n_samples_per_prompt]
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
        scored = row["reward"] is not None and math.isfinite(row["reward"])
        if not scored and config.missing_reward == "error" and not row["is_padding"]:
            raise OracleError("MissingRewardError")
        own.append(float(row["reward"]) if scored else 0.0 if config.missing_reward == "zero" else None)
    return own


def choose_reward(answer: Answer, rollout: Rollout, rows: list[Row], own: list[Number], config: Any) -> None:
    siblings = [row for row in rollout.rows if not rows[row]["is_padding"]]
    speakers = [row for row in siblings if own[row] is not None]
    rollout.mainstream = max(speakers, key=lambda row: (answer.tokens[row], -row), default=rollout.rows[0])
    if not speakers:
        return
    values = [own[row] for row in speakers]
    low, high, policy = min(values), max(values), config.rollout_reward
    rollout.reward = own[rollout.mainstream]
    if policy == "mainstream":
        others = [row for row in speakers if own[row] != rollout.reward]
        answer.disagree |= bool(others)
        answer.tie |= any(answer.tokens[row] == answer.tokens[rollout.mainstream] for row in others)
    elif policy == "shared":
        if high - low > max(abs(high), abs(low)) * config.shared_reward_tolerance:
            rollout.excluded = "disagree"
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


def advantages(answer: Answer, config: Any) -> None:
    groups = [members(answer, group) for group in range(answer.num_groups)]
    if config.singleton == "error" and any(len(counted) == 1 for counted in groups):
        raise OracleError("GroupingError")
    for counted in groups:
        rewards = [rollout.reward for rollout in counted]
        if not rewards:
            continue
        equal = max(rewards) - min(rewards) <= max(map(abs, rewards)) * config.zero_std_tolerance
        keeps_reward = passes_through(config) or (len(rewards) == 1 and config.singleton == "raw")
        for rollout in counted:
            if keeps_reward:
                rollout.advantage = rollout.reward
            elif not equal:
                rollout.advantage = formula(rollout.reward, rewards, config)
        lone_with_reward = len(rewards) == 1 and keeps_reward
        if config.zero_variance_groups == "drop_from_loss" and equal and not lone_with_reward:
            for rollout in counted:
                rollout.excluded, rollout.advantage = "ZERO_VARIANCE", 0.0


def formula(reward: float, rewards: list[float], config: Any) -> float:
    n = len(rewards)
    mean = math.fsum(rewards) / n
    if config.advantage_estimator == "rloo":
        return reward - (math.fsum(rewards) - reward) / (n - 1)
    if config.advantage_estimator not in ("grpo", "gspo") or not config.grpo_std_normalization:
        return reward - mean
    variance = math.fsum((value - mean) ** 2 for value in rewards) / (n - config.std_ddof)
    return (reward - mean) / (math.sqrt(variance) + config.std_epsilon)


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
