"""The loss side: which rows an optimizer step holds, and one weight per row."""

from miles_norm.loss.updates import UpdatePlan, plan_updates
from miles_norm.loss.weights import loss_weights

__all__ = ["UpdatePlan", "loss_weights", "plan_updates"]
