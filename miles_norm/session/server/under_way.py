"""Requests that are under way, so that a server can end without waiting for one that never does."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from miles_norm.session.server.answers import ending_answer

__all__ = ["UnderWay"]

logger = logging.getLogger("miles_norm")


class UnderWay:
    """The application, and the tasks in which it answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answered = False

        async def sending(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            # Only ``end`` cancels a request; its task has no more to do than to say so.
            if not answered:
                await ending_answer()(scope, receive, send)
        finally:
            self._tasks.discard(task)

    async def end(self, grace_seconds: float) -> None:
        """Let the requests end, and cancel those that have not after so long: half-sent ones, say."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=grace_seconds)
        if late:
            logger.warning("not waited for after %g s: requests under way, %d", grace_seconds, len(late))
            for task in late:
                task.cancel()
            await asyncio.wait(late)
