"""What the server tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["ServerMetrics"]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counters and histograms of one server, in a registry of their own.

    Args:
        sessions: Number of sessions now.
    """

    def __init__(self, sessions: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()

        def named(kind: type[Counter] | type[Histogram], name: str, text: str, labels: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
            options = {"buckets": _SECONDS} if kind is Histogram else {}
            return kind(f"miles_norm_session_{name}", text, labels, registry=self._registry, **options)

        Gauge("miles_norm_session_sessions", "Sessions now", registry=self._registry).set_function(sessions)
        self.turns = named(Counter, "turns", "Turns that were recorded", ("finish_reason",))
        self.tokens = named(Counter, "tokens", "Tokens of recorded turns", ("kind",))
        self.mismatches = named(Counter, "mismatches", "Turns that start a row although they continue another turn")
        self.errors = named(Counter, "errors", "Requests that were answered with an error", ("error",))
        self.rows = named(Counter, "rows", "Training rows that were handed out")
        self.engine_seconds = named(Histogram, "engine_seconds", "Time that a turn waits for the engine")
        self.journal_seconds = named(Histogram, "journal_seconds", "Time that a turn waits for the journal")
        self.turn_seconds = named(Histogram, "turn_seconds", "Time of a whole turn")

    def page(self) -> bytes:
        """All of them as Prometheus reads them."""
        return generate_latest(self._registry)
