"""What the server tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from miles_norm.session.node import Node

__all__ = ["ServerMetrics"]

_PREFIX = "miles_norm_session"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counters and histograms of one server, in a registry of their own.

    Args:
        sessions: Number of sessions now.
    """

    def __init__(self, sessions: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        Gauge(f"{_PREFIX}_sessions", "Sessions now", registry=self._registry).set_function(sessions)
        self._turns = self._counter("turns", "Turns that were recorded", "finish_reason")
        self._tokens = self._counter("tokens", "Tokens of recorded turns", "kind")
        self._mismatches = self._counter("mismatches", "Turns that start a row although they continue another turn")
        self._errors = self._counter("errors", "Requests that were answered with an error", "error")
        self.rows = self._counter("rows", "Training rows that were handed out")
        self.engine_seconds = self._seconds("engine", "Time that a turn waits for the engine")
        self.journal_seconds = self._seconds("journal", "Time that a turn waits for the journal")
        self.turn_seconds = self._seconds("turn", "Time of a whole turn")

    def recorded(self, node: Node) -> None:
        """Count a turn that was recorded."""
        self._turns.labels(node.completion.finish_reason).inc()
        self._tokens.labels("prompt").inc(node.prompt_length)
        self._tokens.labels("completion").inc(len(node.completion.token_ids))
        if node.starts_row and node.parent is not None:
            self._mismatches.inc()

    def failed(self, error: Exception) -> None:
        """Count a request that was answered with an error."""
        self._errors.labels(type(error).__name__).inc()

    def page(self) -> bytes:
        """All of them as Prometheus reads them."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self._registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}_seconds", text, registry=self._registry, buckets=_SECONDS)
