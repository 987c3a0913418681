"""Run the session server, in the foreground or beside other tasks."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn

from miles_norm.errors import ConfigError
from miles_norm.session.engines.protocol import Engine
from miles_norm.session.server.app import session_app
from miles_norm.session.server.config import ServerConfig
from miles_norm.session.server.sessions import Sessions
from miles_norm.session.store import Journal

__all__ = ["running_server", "serve"]

logger = logging.getLogger("miles_norm")

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@asynccontextmanager
async def running_server(engine: Engine, config: ServerConfig | None = None) -> AsyncIterator[str]:
    """Serve on the running loop while the block runs; gives the address, such as ``http://127.0.0.1:8811``.

    The engine is started first and closed last.

    Raises:
        ConfigError: the address cannot be listened on.
        JournalError: the journal cannot be opened or read.
    """
    config = config or ServerConfig()
    if config.host not in _LOOPBACK and config.api_key is None:
        logger.warning("listening on %s without an api_key: anybody who reaches it can use the engine", config.host)
    listener = _listener(config)
    try:
        journal = None if config.journal is None else Journal(config.journal, sync=config.journal_sync)
    except BaseException:
        listener.close()
        raise
    try:
        sessions = Sessions(engine, config, journal)
        await engine.start()
        try:
            async with _uvicorn(sessions, listener):
                port = listener.getsockname()[1]
                yield f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
        finally:
            await engine.close()
    finally:
        listener.close()
        if journal is not None:
            await journal.close()


def serve(engine: Engine, config: ServerConfig | None = None) -> None:
    """Serve until interrupted."""

    async def forever() -> None:
        async with running_server(engine, config) as address:
            logger.info("serving sessions on %s", address)
            await asyncio.Event().wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(forever())


@asynccontextmanager
async def _uvicorn(sessions: Sessions, listener: socket.socket) -> AsyncIterator[None]:
    settings = uvicorn.Config(
        session_app(sessions), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(settings)
    # Signals belong to whoever runs the loop.
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server.serve(sockets=[listener]))
    expiry = asyncio.create_task(_expire(sessions))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.001)
        yield
    finally:
        expiry.cancel()
        server.should_exit = True
        await running


async def _expire(sessions: Sessions) -> None:
    idle = sessions.config.idle_seconds
    while idle is not None:
        await asyncio.sleep(min(idle / 4, 30))
        await sessions.expire()


def _listener(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"address {config.host}:{config.port}",
            got=error.strerror or str(error),
            expected="an address of this machine and a free port",
            reason="the server listens on it",
            remedy="name another port, or 0 for any free one",
        ) from None
    # asyncio sets this for sockets that it makes itself. Without it every answer waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
