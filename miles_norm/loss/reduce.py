"""From token losses to the loss of an update: over a micro-batch, over ranks, over what a trainer divides by."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from miles_norm.errors import ConfigError, shown
from miles_norm.loss.checks import is_whole
from miles_norm.loss.tokens import check_tokens, spread_rows, trained_values

__all__ = ["Trainer", "loss_factor", "reduce_token_losses"]

Trainer = Literal["ddp", "fsdp", "accelerate", "megatron", "megatron_per_token"]


def reduce_token_losses(token_losses: Tensor, weights: Tensor, mask: Tensor, *, rows: Tensor | None = None) -> Tensor:
    r"""Weighted sum of the token losses of a micro-batch.

    .. math:: \sum_n w_n \sum_t m_{n,t} \, l_{n,t}

    The sums of all micro-batches, ranks and accumulation steps of an update add up to its loss: nothing is divided by
    what the micro-batch holds. What the trainer divides by is undone by ``loss_factor``.

    Args:
        token_losses: Padded ``[N, T]`` or packed ``[T]``; a micro-batch may be empty.
        weights: Of the rows of the micro-batch ``[N]``, of ``loss_weights``.
        mask: 1 on trainable tokens; masked losses, and weights of rows that are masked as a whole, may hold anything.
        rows: The row of each packed token ``[T]`` (``row_of_tokens``).

    Returns:
        A scalar, float32 at least. On another device than the CPU, where a check would make the host wait, NaN where a
        trainable token has a loss or a weight that is NaN, infinite, or a weight below 0.

    Raises:
        SampleError: tensors that do not fit; on the CPU also such values and rows out of range, all named.

    >>> import torch
    >>> losses, mask = torch.tensor([[1.0, 2.0], [4.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> float(reduce_token_losses(losses, torch.tensor([0.25, 0.5]), mask))  # (1 + 2) / 4 + 4 / 2
    2.75
    """
    check_tokens("token_losses", token_losses)
    weight_of_tokens = spread_rows(weights, token_losses, rows)
    losses, weight = trained_values(mask, token_losses=token_losses, weights=weight_of_tokens)
    return (weight * losses).sum()


def loss_factor(
    trainer: Trainer,
    *,
    data_parallel: int = 1,
    context_parallel: int = 1,
    micro_batches: int = 1,
    reported_tokens: int | None = None,
) -> int:
    """What to multiply each micro-batch's sum by, so that the trainer's gradient is that of the loss of the update.

    With d data-parallel ranks, c context-parallel ranks and m micro-batches:

    ================== ============================================================================= ===============
    trainer            what it does to the gradients of the micro-batches                            factor
    ================== ============================================================================= ===============
    ddp, fsdp          sums them on a rank, and takes the mean over the averaging group              d c
    accelerate         divides each by the accumulation steps m, then as ddp                         d c m
    megatron           divides each by m and by the token count that came with it, then as ddp       d c m
    megatron_per_token sums them over the group, divides by the sum of all token counts that came    reported_tokens
    ================== ============================================================================= ===============

    The averaging group is what gradients are reduced over: all data-parallel ranks and, where each context-parallel
    rank sums its own part of the tokens, those too.

    megatron: the loss function returns three values, the second of them 1. With the two values of the older form
    Megatron multiplies by the context-parallel size itself: leave ``context_parallel`` at 1.

    Every rank of the group has to run the same number of forwards and backwards per update, since gradients are reduced
    in them. A rank that has fewer micro-batches, or none, fills up with empty ones: no row at all where the model takes
    that, or any row with a mask of 0. Their loss is 0, and so is its gradient.

    Args:
        trainer: Who reduces the gradients.
        data_parallel: Data-parallel ranks.
        context_parallel: Context-parallel ranks, each with its own part of the tokens.
        micro_batches: Micro-batches of an update on one rank, the empty ones too.
        reported_tokens: megatron_per_token: sum of the token counts that all ranks return for all micro-batches.

    Raises:
        ConfigError: another trainer; a size that is no whole number from 1 on; ``reported_tokens`` missing, or given to
            another trainer.

    >>> loss_factor("ddp", data_parallel=8)
    8
    >>> loss_factor("megatron", data_parallel=4, context_parallel=2, micro_batches=3)
    24
    """
    if not isinstance(trainer, str) or trainer not in get_args(Trainer):
        known = ", ".join(get_args(Trainer))
        raise _wrong_setting("trainer", shown(trainer), known, "name the one that reduces the gradients")
    _check_sizes(data_parallel=data_parallel, context_parallel=context_parallel, micro_batches=micro_batches)
    if (reported_tokens is not None) != (trainer == "megatron_per_token"):
        raise _wrong_setting(
            "reported_tokens",
            f"{shown(reported_tokens)} with trainer={shown(trainer)}",
            "a number with megatron_per_token, and with it only",
            "set calculate_per_token_loss as the trainer has it",
        )
    if reported_tokens is not None:
        _check_sizes(reported_tokens=reported_tokens)
        return int(reported_tokens)
    group = int(data_parallel) * int(context_parallel)
    return group if trainer in ("ddp", "fsdp") else group * int(micro_batches)


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if not is_whole(size, low=1):
            remedy = "count this rank and this micro-batch too; of a tensor pass int(tensor)"
            raise _wrong_setting(name, shown(size), "a whole number, at least 1", remedy)


def _wrong_setting(name: str, got: str, expected: str, remedy: str) -> ConfigError:
    reason = "a wrong factor is a wrong learning rate, and nothing fails"
    return ConfigError(f"{name} of loss_factor", got=got, expected=expected, reason=reason, remedy=remedy)
