"""A stream of prompt groups between many producers and many consumers."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from miles_norm.cluster.package import ray_package
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import NormalizationConfig, StreamConfig
from miles_norm.streaming import NormalizedGroup, StepReport, StreamingNormalizer

__all__ = ["StreamActor", "rollout_normalizer"]


class StreamActor:
    """``StreamingNormalizer`` for a Ray actor: ``miles_norm.cluster.RolloutNormalizer.remote(config, stream)``.

    Producers send index columns, and beside them the object ref of the samples in a list (a bare ref would be
    fetched); consumers take groups with their advantages. Tokens never come here. What waits for the rest of its group
    is in the memory of this actor: if it dies, callers get Ray's ``ActorDiedError`` and the rollouts of open groups
    have to be added again.
    """

    def __init__(self, config: NormalizationConfig, stream: StreamConfig | None = None) -> None:
        self._normalizer = StreamingNormalizer(config, stream)
        self._ready: list[NormalizedGroup] = []
        self._arrived = asyncio.Condition()

    async def add(self, columns: RolloutColumns, payload: Any = None) -> int:
        """Take in whole rollouts; see ``StreamingNormalizer.add``."""
        try:
            self._normalizer.add(columns, payload)
        finally:
            await self._hand_out()
        return len(self._ready)

    async def take(self, wait_s: float = 0.0, most: int | None = None) -> list[NormalizedGroup]:
        """Groups that are ready, each handed out once; waits up to ``wait_s`` seconds for the first one."""
        async with self._arrived:
            if not self._ready and wait_s > 0:
                try:
                    await asyncio.wait_for(self._arrived.wait_for(lambda: bool(self._ready)), wait_s)
                except TimeoutError:
                    return []
            taken, self._ready = self._ready[:most], self._ready[len(self._ready[:most]) :]
            return taken

    async def end_step(self) -> StepReport:
        """End a step; see ``StreamingNormalizer.end_step``."""
        try:
            return self._normalizer.end_step()
        finally:
            await self._hand_out()

    async def _hand_out(self) -> None:
        async with self._arrived:
            self._ready += self._normalizer.take()
            self._arrived.notify_all()


@cache
def rollout_normalizer() -> Any:
    """``StreamActor`` as a class of actors, which are not started again: what they held would be gone."""
    return ray_package().remote(max_restarts=0)(StreamActor)
