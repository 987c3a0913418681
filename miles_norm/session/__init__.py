"""Session v2: conversation trees, and the training rows they become.

``miles_norm.session.wire``, which makes bytes of them, is imported by its own name, since it needs torch.
"""

from miles_norm.session.assembly import assemble, session_metadata
from miles_norm.session.completion import Completion
from miles_norm.session.hooks import assign_reward, drop_retries, keep_all, leaf_rewards, mask_ownership
from miles_norm.session.node import Attachment, Node
from miles_norm.session.prompt import PromptTokens, next_prompt
from miles_norm.session.rendering import Renderer
from miles_norm.session.trace import read_completed_rollouts, trace_rows
from miles_norm.session.tree import TrajectoryForest

__all__ = [
    "Attachment",
    "Completion",
    "Node",
    "PromptTokens",
    "Renderer",
    "TrajectoryForest",
    "assemble",
    "assign_reward",
    "drop_retries",
    "keep_all",
    "leaf_rewards",
    "mask_ownership",
    "next_prompt",
    "read_completed_rollouts",
    "session_metadata",
    "trace_rows",
]
