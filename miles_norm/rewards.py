"""Which reward speaks for a rollout, and which rollouts count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_norm.columns.host import host_numbers
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.errors import DisagreeingRewardsError, MissingRewardError, RewardError, format_rows
from miles_norm.grouping import RolloutIndex
from miles_norm.statistics import counts_of, segment_statistics

__all__ = ["FLOAT32_MAX", "RolloutRewards", "any_row", "choose_rollout_rewards", "read_components", "scored_rows"]

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class RolloutRewards:
    """One reward per rollout and what it came from."""

    values: Tensor
    """float64 ``[R]``; NaN where no row can speak."""
    mainstream: Tensor
    """int64 ``[R]``: the mainstream row of each rollout, the sibling with the most trainable tokens that may speak."""
    speaker: Tensor | None
    """int64 ``[R]``: the row whose reward was taken; None where several rows were put together (max, mean, sum)."""
    row_values: Tensor
    """float64 ``[N]``: each row's own reward, unscored ones as the policy reads them (NaN, or 0 under ``zero``)."""
    row_tokens: Tensor
    """int64 ``[N]``: trainable tokens, 0 for removed, padding and untrained rows."""
    speaking_tokens: Tensor
    """int64 ``[N]``: the tokens that decided who speaks, before truncated rollouts were untrained."""
    scored: Tensor | None
    """bool ``[N]``; None if every row is."""
    real: Tensor | None
    """bool ``[R]``: the rollout has a row that is no padding; None if all have."""
    warnings: tuple[str, ...]


def choose_rollout_rewards(columns: RolloutColumns, index: RolloutIndex, config: NormalizationConfig) -> RolloutRewards:
    """Let one reward speak per rollout.

    ========== ====================================================================================================
    mainstream reward of the sibling with the most trainable tokens, the first one on a tie
    shared     the reward all siblings have; an error where they differ by more than ``shared_reward_tolerance``
    first/last reward of the first or last sibling
    max        largest reward
    mean/sum   of all siblings' rewards; the mean of equal siblings is that value
    ========== ====================================================================================================

    Unscored rows (None, NaN, infinite): an error under ``missing_reward="error"``; 0 under ``zero``; under ``exclude``
    they cannot speak, mean and sum need all siblings, and a rollout where nobody can speak is unscored. Padding rows
    never speak. The mainstream row is chosen before ``truncated_rollouts="untrain"`` removes tokens.

    Raises:
        MissingRewardError: unscored rows under ``error``; all are named.
        DisagreeingRewardsError: siblings that differ under ``shared``; all rollouts and rows are named.
        RewardError: a reward too large for the float32 output.
    """
    values, scored = _scored_values(columns, config)
    padding, removed = columns.padding, columns.removed
    silent = removed if padding is None else padding if removed is None else removed | padding
    tokens = columns.trainable_tokens if silent is None else columns.trainable_tokens.masked_fill(silent, 0)
    may_speak = scored if padding is None else ~padding if scored is None else scored & ~padding
    rows, has_speaker = _mainstream_rows(index, tokens, may_speak)
    components = [column.nan_to_num(nan=torch.inf) for column in read_components(columns, config).values()]
    siblings = _Siblings(values, tokens, rows, may_speak, has_speaker, columns, index, components)
    chosen, speaker, warnings = _apply_policy(siblings, config)
    trained = tokens
    if config.truncated_rollouts == "untrain" and columns.truncated is not None:
        truncated = columns.truncated if padding is None else columns.truncated & ~padding
        trained = tokens.masked_fill(any_row(truncated, index)[index.row_rollout], 0)
    real = None if padding is None else any_row(~padding, index)
    return RolloutRewards(chosen, rows, speaker, values, trained, tokens, scored, real, warnings)


def any_row(flag: Tensor, index: RolloutIndex) -> Tensor:
    """bool ``[R]``: any row of the rollout has the flag."""
    result = flag.new_zeros(index.num_rollouts)
    result[index.row_rollout[flag]] = True
    return result


def _scored_values(columns: RolloutColumns, config: NormalizationConfig) -> tuple[Tensor, Tensor | None]:
    """Each row's own reward, NaN where unscored, and which rows are scored (None: all)."""
    reward = columns.reward
    low, high = host_numbers(*torch.aminmax(reward))  # NaN if any is NaN
    if low >= -FLOAT32_MAX and high <= FLOAT32_MAX and columns.scored is None:
        return reward, None
    scored = scored_rows(columns)
    _check_magnitude(reward, scored if columns.padding is None else scored & ~columns.padding)
    if config.missing_reward == "zero":
        return torch.where(scored, reward, 0.0), None
    unscored = ~scored if columns.padding is None else ~(scored | columns.padding)
    if config.missing_reward == "error" and bool(unscored.any()):
        raise _missing(columns, torch.nonzero(unscored)[:, 0].tolist())
    if bool(scored.all()):
        return reward, None
    return reward.masked_fill(~scored, torch.nan), scored


def _check_magnitude(reward: Tensor, scored: Tensor) -> None:
    rows = torch.nonzero(scored & (reward.abs() > FLOAT32_MAX))[:, 0].tolist()
    if rows:
        raise RewardError(
            f"reward of {format_rows(rows)}",
            got=", ".join(repr(float(reward[row])) for row in rows[:10]),
            expected=f"a magnitude of at most {FLOAT32_MAX:.6g}",
            reason="advantages are float32 and would become infinite",
            remedy="rescale the rewards",
            rows=rows,
        )


def _missing(columns: RolloutColumns, rows: list[int]) -> MissingRewardError:
    described = []
    for row in rows[:20]:
        none = columns.scored is not None and not bool(columns.scored[row])
        status = columns.status[row] if columns.status is not None else None
        value = "None" if none else repr(float(columns.reward[row]))
        described.append(f"row {row}: {value}" + (f", status {status}" if status else ""))
    return MissingRewardError(
        f"reward of {format_rows(rows)}",
        got="; ".join(described) + ("; ..." if len(rows) > 20 else ""),
        expected="a finite number on every row (missing_reward is 'error')",
        reason="a rollout that was not scored is not one that scored 0",
        remedy="score the rows, or set missing_reward to 'exclude' (leave them out) or 'zero' (count them as 0)",
        rows=rows,
    )


@dataclass(frozen=True, eq=False)
class _Siblings:
    """What the policies choose from."""

    values: Tensor
    tokens: Tensor
    mainstream: Tensor
    may_speak: Tensor | None
    has_speaker: Tensor | None
    columns: RolloutColumns
    index: RolloutIndex
    components: list[Tensor]
    """Reward components, infinite where a row lacks one: that is told apart from any number."""


def _mainstream_rows(index: RolloutIndex, tokens: Tensor, may_speak: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The first row with the most trainable tokens among those that may speak; which rollouts have one (None: all)."""
    rows = index.num_rows
    if index.num_rollouts == rows:
        return index.first_row, None if may_speak is None else may_speak[index.first_row]
    # Tokens in the high bits and the distance from the end in the low ones: the largest key is the first longest row.
    bits = rows.bit_length()
    key = torch.arange(rows - 1, -1, -1, device=tokens.device).add_(tokens << bits)
    if may_speak is not None:
        key.masked_fill_(~may_speak, -1)
    best = torch.full((index.num_rollouts,), -1, device=key.device).scatter_reduce_(0, index.row_rollout, key, "amax")
    longest = (rows - 1) - (best & ((1 << bits) - 1))
    if may_speak is None:
        return longest, None
    return torch.where(best < 0, index.first_row, longest), best >= 0


def _apply_policy(siblings: _Siblings, config: NormalizationConfig) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """The reward of each rollout, the row it was taken from, and warnings."""
    index, values, may_speak = siblings.index, siblings.values, siblings.may_speak
    warnings: tuple[str, ...] = ()
    has_speaker = siblings.has_speaker
    speaker: Tensor | None = None
    match config.rollout_reward:
        case "mainstream":
            speaker, chosen = siblings.mainstream, values.index_select(0, siblings.mainstream)
            warnings = _disagreements(siblings, chosen)
        case "shared":
            # Within the tolerance siblings may differ: the largest does not depend on their order.
            speaker, chosen = siblings.mainstream, _extreme(siblings, values, "amax")
            _check_shared(siblings, config.shared_reward_tolerance)
        case "first" | "last" as end:
            row = torch.arange(index.num_rows, device=values.device)
            if may_speak is not None:
                row.masked_fill_(~may_speak, index.num_rows if end == "first" else -1)
            reduce = "amin" if end == "first" else "amax"
            rows = row.new_zeros(index.num_rollouts).scatter_reduce_(
                0, index.row_rollout, row, reduce, include_self=False
            )
            speaker = rows.clamp_(0, index.num_rows - 1)
            chosen = values[speaker]
        case "max":
            chosen = _extreme(siblings, values, "amax")
        case "mean" | "sum" as fold:
            chosen, complete = _fold(siblings, fold)
            has_speaker = complete if has_speaker is None else has_speaker & complete
    if has_speaker is not None:
        chosen = torch.where(has_speaker, chosen, torch.nan)
    return chosen, speaker, warnings


def _extreme(siblings: _Siblings, values: Tensor, reduce: str) -> Tensor:
    if siblings.may_speak is not None:
        values = values.masked_fill(~siblings.may_speak, -torch.inf if reduce == "amax" else torch.inf)
    out = values.new_zeros(siblings.index.num_rollouts)
    return out.scatter_reduce_(0, siblings.index.row_rollout, values, reduce, include_self=False)


def _fold(siblings: _Siblings, fold: str) -> tuple[Tensor, Tensor]:
    """Mean or sum of the siblings' rewards, and which rollouts have all of them."""
    index, values, padding = siblings.index, siblings.values, siblings.columns.padding
    rows = torch.sort(index.row_rollout, stable=True).indices
    if padding is not None:
        rows = rows[~padding[rows]]
    count = counts_of(index.row_rollout[rows], index.num_rollouts)
    absent = torch.isnan(values)
    complete = ~any_row(absent if padding is None else absent & ~padding, index)
    statistics = segment_statistics(values.masked_fill(absent, 0.0)[rows], count)
    return statistics.mean if fold == "mean" else statistics.total, complete


def scored_rows(columns: RolloutColumns) -> Tensor:
    """bool ``[N]``: the row has a finite reward and is not marked as unscored."""
    finite = torch.isfinite(columns.reward)
    return finite if columns.scored is None else finite & columns.scored


def read_components(columns: RolloutColumns, config: NormalizationConfig) -> dict[str, Tensor]:
    """Float64 ``[N]`` per component that is normalized alone; 0 on unscored rows under ``missing_reward="zero"``."""
    if columns.components is None or config.missing_reward != "zero":
        return columns.components or {}
    scored = scored_rows(columns)
    return {name: torch.where(scored, column, 0.0) for name, column in columns.components.items()}


def _disagreements(siblings: _Siblings, chosen: Tensor) -> tuple[str, ...]:
    """Warnings about siblings that have other rewards than the one that speaks, and about ties among them."""
    index, values, may_speak, tokens = siblings.index, siblings.values, siblings.may_speak, siblings.tokens
    if index.num_rollouts == index.num_rows:
        return ()
    differs = values != chosen.index_select(0, index.row_rollout)
    for component in siblings.components:
        differs |= component != component[siblings.mainstream][index.row_rollout]
    if may_speak is not None:
        differs &= may_speak
    if not bool(differs.any()):
        return ()
    rollouts = torch.unique(index.row_rollout[differs]).tolist()
    warnings = [
        f"siblings of {_name(index, rollouts)} have different rewards; the one with the most trainable tokens speaks"
    ]
    tied = differs & (tokens == tokens[siblings.mainstream][index.row_rollout])
    if bool(tied.any()):
        rollouts = torch.unique(index.row_rollout[tied]).tolist()
        warnings.append(
            f"tie between siblings with different rewards in {_name(index, rollouts)}: the first row speaks, so the "
            "result depends on the order of rows"
        )
    return tuple(warnings)


def _check_shared(siblings: _Siblings, tolerance: float) -> None:
    index = siblings.index
    apart = torch.zeros(index.num_rollouts, dtype=torch.bool, device=siblings.values.device)
    for values in (siblings.values, *siblings.components):
        high, low = _extreme(siblings, values, "amax"), _extreme(siblings, values, "amin")
        apart |= high - low > torch.maximum(high.abs(), low.abs()) * tolerance
    if siblings.has_speaker is not None:
        apart &= siblings.has_speaker
    if not bool(apart.any()):
        return
    rollouts = torch.nonzero(apart)[:, 0].tolist()
    named = apart[index.row_rollout]
    if siblings.columns.padding is not None:
        named &= ~siblings.columns.padding
    rows = torch.nonzero(named)[:, 0].tolist()
    described = []
    for rollout in rollouts[:10]:
        of_rollout = torch.nonzero(named & (index.row_rollout == rollout))[:, 0].tolist()
        rewards = ", ".join(f"{value:g}" for value in siblings.values[of_rollout].tolist())
        described.append(f"{_name(index, [rollout])}: {format_rows(of_rollout)} have rewards {rewards}")
    raise DisagreeingRewardsError(
        f"siblings of {_name(index, rollouts)}",
        got="; ".join(described) + ("; ..." if len(rollouts) > 10 else ""),
        expected="one reward on all rows of a rollout"
        + (f", within {tolerance:g} of the largest" if tolerance else "")
        + " (rollout_reward is 'shared')",
        reason="a rollout has one reward, and which sibling is right cannot be guessed",
        remedy="assign the rollout's reward to all its rows, or choose another rollout_reward such as 'mainstream'",
        rows=rows,
    )


def _name(index: RolloutIndex, rollouts: list[int]) -> str:
    """Rollouts by the ids that users gave, and by a row where they gave none."""
    shown = []
    for rollout in rollouts[:20]:
        row = int(index.first_row[rollout])
        label = None if index.rollout_column is None else index.rollout_column.label(row)
        shown.append(f"of row {row}" if label is None else f"{label}")
    rest = f" and {len(rollouts) - 20} more" if len(rollouts) > 20 else ""
    return f"rollout{'' if len(rollouts) == 1 else 's'} {', '.join(shown)}{rest}"
