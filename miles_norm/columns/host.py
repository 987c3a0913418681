"""Numbers that the host reads from a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["host_numbers"]


def host_numbers(*values: Tensor) -> list[Any]:
    """Scalars of one dtype as Python numbers; for those on another device the host waits once."""
    if values[0].device.type == "cpu":
        return [value.item() for value in values]
    numbers: list[Any] = torch.stack(values).tolist()
    return numbers
