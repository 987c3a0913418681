"""Settings: frozen models that reject what does not fit and never rewrite it.

Nothing here imports torch or an optional package, so that a launcher can check a config on a login node.
"""

from miles_norm.config.base import parse_yaml
from miles_norm.config.filters import FilterConfig
from miles_norm.config.loss import LossConfig, UpdateConfig
from miles_norm.config.normalization import (
    PASS_THROUGH_ESTIMATORS,
    AdvantageEstimator,
    EstimatorOptions,
    NormalizationConfig,
)
from miles_norm.config.streaming import StreamConfig

__all__ = [
    "PASS_THROUGH_ESTIMATORS",
    "AdvantageEstimator",
    "EstimatorOptions",
    "FilterConfig",
    "LossConfig",
    "NormalizationConfig",
    "StreamConfig",
    "UpdateConfig",
    "parse_yaml",
]
