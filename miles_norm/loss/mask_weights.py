"""Loss weights of rows that never were samples: masks or token counts, and which rows belong together."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.ids import entries_of, shared_tensor
from miles_norm.columns.masks import count_each_mask
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import LossConfig
from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.loss.checks import described, is_dense, is_whole
from miles_norm.loss.weights import loss_weights
from miles_norm.normalize import normalize_columns

__all__ = ["mask_loss_weights"]


def mask_loss_weights(
    masks: Tensor | Sequence[Any], rollout: Any, config: LossConfig | None = None, *, group: Any = None
) -> Tensor:
    """``loss_weights`` from masks alone, for a batch whose rewards are somebody else's matter.

    Args:
        masks: One padded tensor ``[N, T]``; N ragged lists, arrays or tensors; or N numbers of trainable tokens, as a
            list of ints or a tensor of them.
        rollout: Rollout ids ``[N]``, as ``RolloutColumns`` takes them; unique within their group.
        config: Defaults to ``LossConfig()``.
        group: Prompt group ids ``[N]``; None for one group.

    Returns:
        float64 ``[N]``, on the device of the masks.

    Raises:
        SampleError: no rows, something that is no list of masks, masks with entries other than 0 and 1 and counts that
            are none, all rows named; another number of ids than rows.
        ConfigError: no ``LossConfig``.

    >>> mask_loss_weights(torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]]), [0, 0, 1]).tolist()
    [0.125, 0.125, 0.16666666666666666]
    >>> mask_loss_weights([4, 4, 2], [0, 0, 1]).tolist()
    [0.0625, 0.0625, 0.25]
    """
    config = LossConfig.checked(config)
    tokens = _tokens(masks)
    rows, device = len(tokens), tokens.device
    columns = RolloutColumns(
        group=torch.zeros(rows, dtype=torch.int64, device=device) if group is None else group,
        rollout=rollout,
        reward=torch.zeros(rows, dtype=torch.float64, device=device),
        trainable_tokens=tokens,
    )
    return loss_weights(normalize_columns(columns), config)


def _tokens(masks: Any) -> Tensor:
    if isinstance(masks, np.ndarray) and masks.dtype.kind in "biuf":
        masks = shared_tensor(masks)
    if isinstance(masks, Tensor) and (masks.is_nested or masks.is_meta):
        raise _bad_masks(described(masks), [])
    if isinstance(masks, Tensor) and masks.ndim and len(masks):
        return _tokens_of_tensor(masks)
    entries = entries_of(masks)
    if not entries:
        raise _bad_masks("no rows" if entries == [] else described(masks), [])
    if all(isinstance(count, Integral) and not isinstance(count, bool) for count in entries):
        bad = [row for row, count in enumerate(entries) if not (is_whole(count) and count < 2**31)]
        if bad:
            raise _bad_masks(", ".join(shown(entries[row]) for row in bad[:10]), bad)
        return torch.tensor(entries, dtype=torch.int64)
    counts, problems = count_each_mask(entries)
    if problems:
        raise _bad_masks(f"a mask {next(iter(problems.values()))}", list(problems))
    device = entries[0].device if isinstance(entries[0], Tensor) else None
    return torch.tensor(counts, dtype=torch.int64, device=device)


def _tokens_of_tensor(masks: Tensor) -> Tensor:
    """Counts ``[N]`` as they are, for the columns to check; sums of padded masks ``[N, T]``."""
    if masks.ndim > 2 or not is_dense(masks):
        raise _bad_masks(described(masks), [])
    if masks.ndim == 1:
        return masks
    bad = torch.nonzero(((masks != 0) & (masks != 1)).any(dim=1))[:, 0].tolist()
    if bad:
        raise _bad_masks("entries other than 0 and 1", bad)
    return (masks != 0).sum(dim=1)


def _bad_masks(got: str, rows: list[int]) -> SampleError:
    return SampleError(
        f"loss mask of {format_rows(rows)}" if rows else "loss masks",
        got=got,
        expected="a padded tensor [N, T], N one-dimensional masks of 0 and 1, or N token counts from 0 to 2**31 - 1",
        reason="a weight is one over a number of trainable tokens",
        remedy="pass the rows' loss masks; for a row without one, ones of its response length",
        rows=rows,
    )
