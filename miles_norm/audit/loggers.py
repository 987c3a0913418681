"""Where metrics go: a dict, TensorBoard, W&B or Prometheus. Each package is imported where its logger is made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from miles_norm.errors import MissingDependencyError
from miles_norm.metrics import PREFIX

__all__ = ["DictLogger", "MetricsLogger", "PrometheusLogger", "TensorBoardLogger", "WandbLogger"]


class MetricsLogger(Protocol):
    """Takes the metrics of a step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep or send them."""


class DictLogger:
    """Keeps the metrics of every step in ``steps``.

    >>> logger = DictLogger()
    >>> logger.log({"miles_norm/rows": 58.0}, step=3)
    >>> logger.steps
    {3: {'miles_norm/rows': 58.0}}
    """

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add to what the step has already."""
        self.steps.setdefault(step, {}).update(metrics)


class TensorBoardLogger:
    """One scalar per metric in event files below ``folder``.

    Raises:
        MissingDependencyError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.writer: Any = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one point to every curve."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still held."""
        self.writer.close()


class WandbLogger:
    """Logs into a run of W&B: ``run``, or one that is started with the settings of the environment.

    Raises:
        MissingDependencyError: no run is given and wandb is not installed.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = _package("wandb").init() if run is None else run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One entry of the run's history."""
        self.run.log(dict(metrics), step=step)


class PrometheusLogger:
    """One gauge per metric, and ``miles_norm_step``, in ``registry`` or the process's own.

    Names have an underscore for what Prometheus does not allow. Serving them is left to the process, for example with
    ``prometheus_client.start_http_server``.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
    """

    def __init__(self, registry: Any = None) -> None:
        package = _package("prometheus_client")
        self._registry = package.REGISTRY if registry is None else registry
        self._new_gauge = package.Gauge
        self._gauges: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Set every gauge to its latest value."""
        for name, value in {**metrics, PREFIX + "step": step}.items():
            if name not in self._gauges:
                text = name.removeprefix(PREFIX).replace("_", " ").replace("/", ", ")
                allowed = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
                self._gauges[name] = self._new_gauge(allowed, text, registry=self._registry)
            self._gauges[name].set(value)


def _package(module: str, name: str = "") -> Any:
    try:
        return import_module(module)
    except ImportError:
        name = name or module
        raise MissingDependencyError(
            f"logging to {name}",
            got=f"no package {name!r}",
            expected="an installed one",
            reason="a logger hands the metrics to the package that it is named after",
            remedy=f"pip install {name.replace('_', '-')}",
        ) from None
