"""The loss of GSPO: the ratio of a sequence, which is a row or a whole rollout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows
from miles_norm.loss.policy.clip import check_clip, pessimistic
from miles_norm.loss.tokens import extreme_metrics, log_ratio_of, mean_metrics, trained_values, wrong_shape
from miles_norm.result import NormalizedRewards

__all__ = ["Sequences", "gspo_loss", "rollout_sequences", "row_sequences", "sequence_log_ratio"]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which tokens share a ratio."""

    index: Tensor
    """int64: the sequence of each row ``[N]`` of padded tokens, or of each packed token ``[T]``."""
    tokens: Tensor
    """int64 ``[S]``: trainable tokens of each sequence, those in other micro-batches too."""
    log_ratio: Tensor | None = None
    """``[S]``: mean log-ratio of each sequence, where it was computed beforehand; never carries a gradient."""
    complete: bool = False
    """All tokens of every sequence are in this micro-batch, so that nothing has to be checked."""


def row_sequences(mask: Tensor, rows: Tensor | None = None, num_rows: int | None = None) -> Sequences:
    """Each row is a sequence.

    Args:
        mask: 1 on trainable tokens, padded ``[N, T]``, or packed ``[T]`` with the two others.
        rows: The row of each packed token ``[T]`` (``row_of_tokens``).
        num_rows: Rows of the packed tokens.

    Raises:
        SampleError: packed tokens without ``rows`` or ``num_rows``, or an index of another shape.

    >>> row_sequences(torch.tensor([[1, 1, 0], [1, 0, 0]])).tokens.tolist()
    [2, 1]
    """
    keep = (mask != 0).to(torch.int64)
    if rows is None and mask.ndim != 2:
        raise wrong_shape("mask", mask, "[N, T], or packed [T] together with rows and num_rows")
    if rows is not None and (mask.ndim != 1 or rows.shape != mask.shape or num_rows is None):
        raise wrong_shape("row index", rows, f"the row of each packed token of {list(mask.shape)}, and num_rows")
    if rows is None:
        return Sequences(torch.arange(len(mask), device=mask.device), keep.sum(dim=-1), complete=True)
    return Sequences(rows, keep.new_zeros(num_rows or 0).index_add_(0, rows, keep), complete=True)


def rollout_sequences(
    result: NormalizedRewards, batch_rows: Tensor, *, rows: Tensor | None = None, kept: Tensor | None = None
) -> Sequences:
    """Each rollout is a sequence, over all of its rows.

    Args:
        result: Knows the rollouts and all of their trainable tokens.
        batch_rows: Which rows of the result the micro-batch holds, in its order: int64 ``[N]``.
        rows: The row of each packed token, counted within the micro-batch ``[T]``; None for padded tokens.
        kept: bool, rows of the result that are trained at all; None for all. Siblings that a plan drops are not waited
            for.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0, 0, 0], rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 3, 2])
    >>> sequences = rollout_sequences(normalize_columns(columns), torch.tensor([1, 2]))
    >>> sequences.index.tolist(), sequences.tokens.tolist()
    ([0, 1], [7, 2])
    """
    tokens = result.trainable_tokens if kept is None else result.trainable_tokens.masked_fill(~kept, 0)
    total = tokens.new_zeros(result.index.num_rollouts).index_add_(0, result.index.row_rollout, tokens)
    index = result.index.row_rollout[batch_rows]
    return Sequences(index if rows is None else index[rows], total)


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    r"""This micro-batch's part of each sequence's mean log-ratio ``[S]``, without a gradient.

    .. math:: \frac{1}{L_s} \sum_{t \in \text{batch}} \ln \pi(a_t) - \ln \pi_\mathrm{old}(a_t)

    The parts of all micro-batches, and of all ranks, add up to what ``Sequences.log_ratio`` takes.

    >>> sequences = Sequences(torch.tensor([0, 0]), torch.tensor([4]))
    >>> sequence_log_ratio(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1), torch.ones(2, 1), sequences).tolist()
    [1.0]
    """
    policy, old = trained_values(log_probs.detach(), mask, old_log_probs=old_log_probs)
    return _sums(policy - old, sequences) / sequences.tokens.to(policy.device).clamp(min=1)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    clip: tuple[float, float] = (3e-4, 4e-4),
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Loss of each token, with the ratio of its sequence.

    .. math::
        l_t = -\min(s_t A, \mathrm{clip}(s_t, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high}) A), \qquad
        s_t = \mathrm{sg}[s] \, \pi(a_t) / \mathrm{sg}[\pi(a_t)], \qquad
        \ln s = \frac{1}{L_s} \sum_t \ln \frac{\pi(a_t)}{\pi_\mathrm{old}(a_t)}

    Source: GSPO (arXiv:2507.18071), in its token form, with the bounds of its experiments. Reduced with weights that
    are the same on all tokens of a sequence it is the sequence loss, in value and gradient: ``sample_mean`` fits rows,
    ``rollout_mean`` fits rollouts. Why rollouts: the ratio belongs to what was rewarded, and cutting a rollout into
    more rows does not change it.

    A ratio per rollout couples its rows. Siblings in other micro-batches have to be waited for: add up their parts
    (``sequence_log_ratio``), and pass the sum as ``Sequences.log_ratio``.

    Args:
        log_probs: Of the policy that is trained, ``[N, T]`` or ``[T]``; carries the gradient.
        old_log_probs: Of the policy at the beginning of the batch.
        advantages: One per token, or ``[N, 1]``; the same within a sequence.
        mask: 1 on trainable tokens.
        sequences: Of ``row_sequences`` or ``rollout_sequences``. For rollouts without a ``log_ratio`` the device is
            asked once whether all of their tokens are here.
        clip: How far the ratio may go below and above 1.

    Returns:
        Token losses, and ``clip_fraction``, ``kl`` (mean of minus the token's log-ratio), ``ratio_min``, ``ratio_max``
        (of sequences), ``tokens``.

    Raises:
        ConfigError: a bound below 0.
        SampleError: shapes that differ; a sequence with tokens elsewhere and no ``log_ratio``; all are named.

    >>> log_probs, mask = torch.tensor([[1.5, 2.0], [0.5, 0.5]]).log(), torch.ones(2, 2)  # ratios sqrt(3) and 0.5
    >>> rows, advantages = row_sequences(mask), torch.ones(2, 1)
    >>> losses, _ = gspo_loss(log_probs, torch.zeros(2, 2), advantages, mask, rows, clip=(0.2, 0.2))
    >>> [[round(loss, 3) for loss in row] for row in losses.tolist()]
    [[-1.2, -1.2], [-0.5, -0.5]]
    """
    check_clip(clip)
    policy, old, advantage = trained_values(log_probs, mask, old_log_probs=old_log_probs, advantages=advantages)
    log_ratio = sequences.log_ratio
    if log_ratio is None:
        if not sequences.complete:
            _check_complete(mask, sequences)
        log_ratio = sequence_log_ratio(log_probs, old_log_probs, mask, sequences)
    _check_index(sequences.index, policy)
    if log_ratio.shape != sequences.tokens.shape:
        raise wrong_shape("log_ratio", log_ratio, f"one for each of the {len(sequences.tokens)} sequences")
    mean = log_ratio.detach().to(policy)[sequences.index.to(policy.device)]
    mean = log_ratio_of(mean[:, None] if policy.ndim == 2 else mean, torch.zeros_like(policy))
    ratio = (mean + policy - policy.detach()).exp()
    losses, was_clipped = pessimistic(ratio, advantage, clip)
    means = {"clip_fraction": was_clipped, "kl": old - policy}
    return losses, mean_metrics(mask, **means) | extreme_metrics(mask, "ratio", ratio)


def _sums(values: Tensor, sequences: Sequences) -> Tensor:
    """Sums over the tokens of each sequence."""
    per_index = values.sum(dim=-1) if values.ndim == 2 else values
    index = sequences.index.to(values.device)
    _check_index(index, values)
    return per_index.new_zeros(len(sequences.tokens)).index_add_(0, index, per_index)


def _check_index(index: Tensor, tokens: Tensor) -> None:
    if index.shape != tokens.shape[:1]:
        raise wrong_shape("sequence index", index, f"the sequence of each row or packed token of {list(tokens.shape)}")


def _check_complete(mask: Tensor, sequences: Sequences) -> None:
    here = _sums((mask != 0).to(torch.int64), sequences)
    everywhere = sequences.tokens.to(here.device)
    parted = torch.nonzero((here > 0) & (here != everywhere))[:, 0].tolist()
    if parted:
        counts = ", ".join(f"{int(here[s])} of {int(everywhere[s])}" for s in parted[:10])
        raise SampleError(
            f"ratio of {format_rows(parted, 'sequence')}",
            got=f"{counts} trainable tokens in this micro-batch, and no log_ratio",
            expected="all rows of a sequence in one micro-batch, or its log-ratio computed beforehand",
            reason="the ratio is a mean over all tokens of the sequence, and a part of them has another mean",
            remedy="add up sequence_log_ratio over the micro-batches, and pass the sum as Sequences.log_ratio",
            rows=parted,
        )
