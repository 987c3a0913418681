"""The loss of GSPO: the ratio of a sequence, which is a row or a whole rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.grouping import RolloutIndex
from miles_norm.loss.checks import on_cpu
from miles_norm.loss.policy.clip import checked_clip, pessimistic
from miles_norm.loss.policy.sequences import Sequences, checked_sequences
from miles_norm.loss.tokens import check_tokens, extreme_metrics, log_ratio_of, mean_metrics, trained_values

__all__ = ["gspo_loss", "sequence_log_ratio"]


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    r"""This micro-batch's part of each sequence's mean log-ratio ``[S]``, without a gradient.

    .. math:: \frac{1}{L_s} \sum_{t \in \text{batch}} \ln \pi(a_t) - \ln \pi_\mathrm{old}(a_t)

    The parts of all micro-batches, and of all ranks, add up to what ``Sequences.log_ratio`` takes.

    Raises:
        SampleError: tensors that differ in shape, an index that does not fit them; on the CPU also an index out of
            range, values that no trainable token can have, and sequences with more tokens here than in all.

    >>> sequences = Sequences(torch.tensor([0, 0]), torch.tensor([4]))
    >>> sequence_log_ratio(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1), torch.ones(2, 1), sequences).tolist()
    [1.0]
    """
    policy, old = trained_values(mask, log_probs=log_probs, old_log_probs=old_log_probs)
    checked = checked_sequences(sequences, log_probs)
    sums = _sums((policy - old).detach(), checked)
    if on_cpu(log_probs):
        _check_tokens(_sums((mask != 0).to(torch.int64), checked), sequences)
    return sums / sequences.tokens.to(sums.device).clamp(min=1)


def _check_tokens(here: Tensor, sequences: Sequences) -> None:
    bad = torch.nonzero(here > sequences.tokens.to(here.device))[:, 0].tolist()
    if bad:
        raise SampleError(
            f"tokens of {format_rows(bad, 'sequence')}",
            got=", ".join(f"{int(sequences.tokens[n])} in all, {int(here[n])} of them here" for n in bad[:10]),
            expected="the trainable tokens of each sequence, those in other micro-batches too",
            reason="the mean log-ratio divides by them",
            remedy="make the sequences with row_sequences or rollout_sequences, of these masks",
        )


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
            asked once whether all of their tokens are here; with one use ``dataclasses.replace(sequences,
            log_ratio=log_ratio)``.
        clip: How far the ratio may go below and above 1.

    Returns:
        Token losses, and ``clip_fraction``, ``kl`` (mean of minus the token's log-ratio), ``ratio_min``, ``ratio_max``
        (of sequences), ``tokens``.

    Raises:
        ConfigError: no two finite bounds from 0 on.
        SampleError: tensors that differ in shape; on the CPU also values that no trainable token can have; a sequence
            with tokens elsewhere and no ``log_ratio``; all are named.

    >>> from miles_norm.loss import row_sequences
    >>> log_probs, mask = torch.tensor([[1.5, 2.0], [0.5, 0.5]]).log(), torch.ones(2, 2)  # ratios sqrt(3) and 0.5
    >>> rows, advantages = row_sequences(mask), torch.ones(2, 1)
    >>> losses, _ = gspo_loss(log_probs, torch.zeros(2, 2), advantages, mask, rows, clip=(0.2, 0.2))
    >>> [[round(loss, 3) for loss in row] for row in losses.tolist()]
    [[-1.2, -1.2], [-0.5, -0.5]]
    """
    clip = checked_clip(clip)
    check_tokens("log_probs", log_probs)
    sequences = checked_sequences(sequences, log_probs)
    if sequences.log_ratio is None:
        log_ratio = sequence_log_ratio(log_probs, old_log_probs, mask, sequences)
        if not sequences.complete or on_cpu(mask):
            _check_complete(mask, sequences)
    else:
        log_ratio = sequences.log_ratio.detach().to(log_probs.device)
    of_tokens = log_ratio.index_select(0, sequences.index)
    policy, old, advantage, mean = trained_values(
        mask,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        log_ratio=of_tokens[:, None] if log_probs.ndim == 2 else of_tokens,
    )
    ratio = (log_ratio_of(mean, torch.zeros_like(mean)) + policy - policy.detach()).exp()
    losses, was_clipped = pessimistic(ratio, advantage, clip)
    means = {"clip_fraction": was_clipped, "kl": old - policy}
    return losses, mean_metrics(mask, **means) | extreme_metrics(mask, "ratio", ratio)


def _sums(values: Tensor, sequences: Sequences) -> Tensor:
    """Sums over the tokens of each sequence."""
    per_index = values.sum(dim=-1) if values.ndim == 2 else values
    return per_index.new_zeros(len(sequences.tokens)).index_add_(0, sequences.index, per_index)


def _check_complete(mask: Tensor, sequences: Sequences) -> None:
    rollouts = sequences.rollouts
    here = _sums((mask != 0).to(torch.int64), sequences)
    everywhere = sequences.tokens.to(here.device)
    parted = torch.nonzero((here > 0) & (here != everywhere))[:, 0].tolist()
    if parted:
        counts = ", ".join(f"{int(here[s])} of {int(everywhere[s])}" for s in parted[:10])
        raise SampleError(
            f"ratio of {_named(parted, rollouts)}",
            got=f"{counts} trainable tokens in this micro-batch, and no log_ratio",
            expected="all tokens of a sequence in one micro-batch, or its log-ratio computed beforehand",
            reason="the ratio is a mean over all tokens of the sequence, and a part of them has another mean",
            remedy="add up sequence_log_ratio over the micro-batches, and pass the sum as Sequences.log_ratio",
            rows=[row for s in parted for row in rollouts.rows_of_rollout(s)] if rollouts else (),
        )


def _named(numbers: list[int], rollouts: RolloutIndex | None) -> str:
    """Sequences by number; rollouts of a result by their ids too, which the samples bear."""
    if rollouts is None:
        return format_rows(numbers, "sequence")
    ids = rollouts.rollout_ids
    return format_rows([f"{n} (id {shown(ids[n])})" if ids[n] is not None else n for n in numbers], "rollout")
