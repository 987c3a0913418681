"""The loss side: which rows an optimizer step holds, one weight per row, and the losses that the weights reduce."""

from miles_norm.loss.mask_weights import mask_loss_weights
from miles_norm.loss.masses import update_masses
from miles_norm.loss.plan import CarriedRollout, UpdatePlan
from miles_norm.loss.policy import (
    Sequences,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    rollout_sequences,
    row_sequences,
    sequence_log_ratio,
    truncated_importance_sampling,
)
from miles_norm.loss.reduce import loss_factor, reduce_token_losses
from miles_norm.loss.scaled_advantages import scale_advantages
from miles_norm.loss.tokens import row_of_tokens
from miles_norm.loss.updates import plan_updates
from miles_norm.loss.weights import loss_weights

__all__ = [
    "CarriedRollout",
    "Sequences",
    "UpdatePlan",
    "cispo_loss",
    "clipped_loss",
    "gspo_loss",
    "kl_loss",
    "loss_factor",
    "loss_weights",
    "mask_loss_weights",
    "plan_updates",
    "reduce_token_losses",
    "rollout_sequences",
    "row_of_tokens",
    "row_sequences",
    "scale_advantages",
    "sequence_log_ratio",
    "truncated_importance_sampling",
    "update_masses",
]
