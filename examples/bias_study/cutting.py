"""Fan-out: into how many rows a rollout is cut, by its outcome, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from race import MAX_TOKENS, Rollouts
from torch import Tensor

SINGLE_ROW, ROWS = 0.36, 2.41
"""Share of single-row rollouts and mean rows per rollout that arXiv:2608.17528 reports."""
MOST_ROWS = 8
"""No more than the shortest rollout has tokens."""

OFTEN_SINGLE, EXTRA_ROWS = 0.65, 0.3
"""The outcome that is cut less: its share of single rows, and the rows beyond two that the others have on average."""


def fan_outs(single: float, extra: float) -> Tensor:
    """Probabilities of 1 to 8 rows: one with probability ``single``, else two and a binomial of mean ``extra``."""
    trials = MOST_ROWS - 2
    binomial = torch.distributions.Binomial(trials, torch.tensor(extra / trials, dtype=torch.float64))
    more = binomial.log_prob(torch.arange(trials + 1, dtype=torch.float64)).exp()
    return torch.cat([torch.tensor([single], dtype=torch.float64), (1 - single) * more])


def reported(share: float) -> tuple[Tensor, Tensor]:
    """Fan-outs of the outcome that is cut less, which has this share, and of the other one; in all as reported."""
    single = (SINGLE_ROW - share * OFTEN_SINGLE) / (1 - share)
    # Mean rows are single + (1 - single) * (2 + extra), in the mean over both outcomes.
    first = OFTEN_SINGLE + (1 - OFTEN_SINGLE) * (2 + EXTRA_ROWS)
    extra = ((ROWS - share * first) / (1 - share) - single) / (1 - single) - 2
    return fan_outs(OFTEN_SINGLE, EXTRA_ROWS), fan_outs(single, extra)


def failures_retry(success: float) -> Tensor:
    """The reported shape, failures having more rows than successes."""
    successes, failures = reported(success)
    return torch.stack([failures, successes])


def successes_explore(success: float) -> Tensor:
    """The reported shape, successes having more rows than failures."""
    failures, successes = reported(1 - success)
    return torch.stack([failures, successes])


def unrelated(success: float) -> Tensor:
    """The reported shape, in all as in ``failures_retry``, whatever the outcome."""
    failures, successes = failures_retry(success)
    both = (1 - success) * failures + success * successes
    return torch.stack([both, both])


def heavy_tail(success: float) -> Tensor:
    """Fan-outs by a power law up to the shortest length of the outcome; a failure may have 36 rows, a success 8."""
    rows = torch.arange(1, 37, dtype=torch.float64)
    failures, successes = rows**-1.5, rows**-2.5 * (rows <= MOST_ROWS)
    return torch.stack([failures / failures.sum(), successes / successes.sum()])


def no_cut(success: float) -> Tensor:
    """Every rollout is one row."""
    return torch.ones(2, 1, dtype=torch.float64)


SHAPES: MappingProxyType[str, Callable[[float], Tensor]] = MappingProxyType(
    {
        "no cut": no_cut,
        "failures retry": failures_retry,
        "successes explore": successes_explore,
        "unrelated to outcome": unrelated,
        "heavy tail": heavy_tail,
    }
)
"""Probabilities of each fan-out ``[2, F]``, after a failure and after a success, given the share of successes."""


@dataclass(frozen=True)
class Rows:
    """N rows; siblings are adjacent, in the order of their tokens."""

    rollout: Tensor
    """int64 ``[N]``."""
    tokens: Tensor
    """int64 ``[N]``, 1 or more."""
    scores: Tensor
    """float64 ``[N, 6]``: sum of the scores of the row's tokens."""


def cut(rollouts: Rollouts, shape: Tensor, generator: torch.Generator) -> Rows:
    """Cut rollouts at random places between their tokens, each into a number of rows that the shape gives."""
    r = len(rollouts.reward)
    below = shape.cumsum(dim=1)[rollouts.reward.to(torch.int64), :-1]
    rows = 1 + (torch.rand(r, 1, generator=generator, dtype=torch.float64) > below).sum(dim=1)
    # Of the places between tokens, those with the smallest random numbers are cut.
    places = torch.arange(MAX_TOKENS - 1)
    order = torch.rand(r, MAX_TOKENS - 1, generator=generator, dtype=torch.float64)
    order.masked_fill_(places >= rollouts.tokens[:, None] - 1, 2.0)
    is_cut = order.argsort(dim=1).argsort(dim=1) < rows[:, None] - 1
    first_row = rows.cumsum(0) - rows
    row = first_row[:, None] + torch.nn.functional.pad(is_cut.cumsum(dim=1), (1, 0))
    written = torch.arange(MAX_TOKENS) < rollouts.tokens[:, None]
    scores = rollouts.scores.new_zeros(int(rows.sum()), rollouts.scores.shape[-1])
    scores.index_add_(0, row.gather(1, rollouts.starts).flatten(), rollouts.scores.flatten(0, 1))
    return Rows(torch.arange(r).repeat_interleave(rows), torch.bincount(row[written]), scores)
