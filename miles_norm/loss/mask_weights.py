"""Loss weights of rows that never were samples: masks or token counts, and which rows belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.masks import count_mask
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import LossConfig
from miles_norm.errors import SampleError, format_rows
from miles_norm.loss.weights import loss_weights
from miles_norm.normalize import normalize_columns

__all__ = ["mask_loss_weights"]


def mask_loss_weights(
    masks: Tensor | Sequence[Any], rollout: Any, config: LossConfig | None = None, *, group: Any = None
) -> Tensor:
    """``loss_weights`` from masks alone, for a batch whose rewards are somebody else's matter.

    Args:
        masks: One padded tensor ``[N, T]``; N ragged lists, arrays or tensors; or N numbers of trainable tokens.
        rollout: Rollout ids ``[N]``, as ``RolloutColumns`` takes them; unique within their group.
        config: Defaults to ``LossConfig()``.
        group: Prompt group ids ``[N]``; None for one group.

    Returns:
        float64 ``[N]``, on the device of the masks.

    Raises:
        SampleError: masks with entries other than 0 and 1, all rows named; another number of ids than rows.

    >>> mask_loss_weights(torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]]), [0, 0, 1]).tolist()
    [0.125, 0.125, 0.16666666666666666]
    >>> mask_loss_weights([4, 4, 2], [0, 0, 1]).tolist()
    [0.0625, 0.0625, 0.25]
    """
    tokens = _tokens(masks)
    rows, device = len(tokens), tokens.device
    columns = RolloutColumns(
        group=torch.zeros(rows, dtype=torch.int64, device=device) if group is None else group,
        rollout=rollout,
        reward=torch.zeros(rows, dtype=torch.float64, device=device),
        trainable_tokens=tokens,
    )
    return loss_weights(normalize_columns(columns), config)


def _tokens(masks: Tensor | Sequence[Any]) -> Tensor:
    if isinstance(masks, Tensor | np.ndarray):
        tensor = torch.as_tensor(masks)
        if tensor.ndim < 2:
            return tensor
        bad = torch.nonzero(((tensor != 0) & (tensor != 1)).any(dim=1))[:, 0].tolist()
        if tensor.ndim > 2 or bad:
            got = f"shape {list(tensor.shape)}" if tensor.ndim > 2 else "entries other than 0 and 1"
            raise _bad_masks(got, bad)
        return (tensor != 0).sum(dim=1)
    if all(isinstance(count, int) for count in masks):
        return torch.tensor(masks, dtype=torch.int64)
    counts, bad, said = [], [], ""
    for row, mask in enumerate(masks):
        try:
            counts.append(count_mask(mask))
        except (TypeError, ValueError) as error:
            bad.append(row)
            said = said or f"a mask {error}"
    if bad:
        raise _bad_masks(said, bad)
    device = masks[0].device if isinstance(masks[0], Tensor) else None
    return torch.tensor(counts, dtype=torch.int64, device=device)


def _bad_masks(got: str, rows: list[int]) -> SampleError:
    return SampleError(
        f"loss mask of {format_rows(rows)}" if rows else "loss masks",
        got=got,
        expected="a padded tensor [N, T], N one-dimensional masks of 0 and 1, or N token counts",
        reason="a weight is one over a number of trainable tokens",
        remedy="pass the rows' loss masks; for a row without one, ones of its response length",
        rows=rows,
    )
