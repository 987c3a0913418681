"""Policy losses: pure functions of log-probs that give one loss per token, to be reduced by the weights of rows.

Tokens are padded ``[N, T]`` or packed ``[T]``. Every function returns the token losses and its metrics, tensors on the
device that nobody waited for: means over the trainable tokens, whose number is ``tokens``; extremes are inf and -inf
where there are none.

Entries whose mask is 0 may hold anything, NaN too: their loss and gradient are 0. On a trainable token every value has
to be finite: a log-prob of minus infinity, which no sampled token has, would be cut off into a plausible number. On the
CPU that is an error that names the rows. On another device, where a check would make the host wait, and under
``torch.compile`` the loss and the gradient of that token are NaN, and so are means and extremes of ratios and
log-ratios; the same call with tensors on the CPU says where.
"""

from miles_norm.loss.policy.cispo import cispo_loss
from miles_norm.loss.policy.clip import clipped_loss
from miles_norm.loss.policy.gspo import gspo_loss, sequence_log_ratio
from miles_norm.loss.policy.importance import truncated_importance_sampling
from miles_norm.loss.policy.kl import kl_loss
from miles_norm.loss.policy.sequences import Sequences, rollout_sequences, row_sequences

__all__ = [
    "Sequences",
    "cispo_loss",
    "clipped_loss",
    "gspo_loss",
    "kl_loss",
    "rollout_sequences",
    "row_sequences",
    "sequence_log_ratio",
    "truncated_importance_sampling",
]
