"""The loss side: one weight per row."""

from miles_norm.loss.weights import loss_weights

__all__ = ["loss_weights"]
