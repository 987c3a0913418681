"""What an inference engine returned for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Completion", "FinishReason"]

FinishReason = Literal["stop", "tool_calls", "length", "abort"]


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """The tokens that the engine sampled for one request, exactly as it returned them."""

    message: dict[str, Any]
    """The reply as an OpenAI assistant message, tool calls parsed."""
    token_ids: NDArray[np.int32]
    """Ids of the sampled tokens ``[T]``, the one that ended the turn too."""
    log_probs: NDArray[np.float32]
    """Log-probability of each of them under the policy that sampled it ``[T]``."""
    finish_reason: FinishReason
    """``length``: cut off at a limit. ``abort``: the engine was stopped."""
    weight_version: str | None = None
    """Version of the policy that sampled it; None where the engine does not say."""
    routed_experts: NDArray[np.int32] | None = None
    """Experts chosen for every token of the context but the last ``[context - 1, layers, top-k]``; None if dense."""
    response_id: str | None = None
    """Id of the HTTP response that carried it."""
