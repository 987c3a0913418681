"""Run the session server, in the foreground or beside other tasks."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from miles_norm.errors import ConfigError, JournalError
from miles_norm.session.engines.protocol import Engine
from miles_norm.session.server.app import session_app
from miles_norm.session.server.config import ServerConfig
from miles_norm.session.server.sessions import Sessions
from miles_norm.session.server.under_way import UnderWay
from miles_norm.session.store import Journal

__all__ = ["running_server", "serve"]

logger = logging.getLogger("miles_norm")

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_SECONDS = 5
"""What requests get to end when the server stops."""
_KEEP_ALIVE_SECONDS = 120
"""An idle connection is closed after so long: later than clients give up theirs, who would meet one that is closing."""


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
    with _listener(config) as listener:
        async with _journal(config) as journal:
            sessions = Sessions(engine, config, journal)
            await engine.start()
            try:
                async with _uvicorn(sessions, listener):
                    host = f"[{config.host}]" if ":" in config.host else config.host
                    yield f"http://{host}:{listener.getsockname()[1]}"
            finally:
                await engine.close()
                await sessions.close()


def serve(
    engine: Engine, config: ServerConfig | None = None, *, on_start: Callable[[str], object] | None = None
) -> None:
    """Serve until interrupted (SIGINT) or told to end (SIGTERM); requests get some seconds to end then.

    Args:
        engine: Not started yet.
        config: Defaults to ``ServerConfig()``.
        on_start: Called with the address once the server answers.

    Raises:
        ConfigError, JournalError: as ``running_server``.
    """

    async def until_told() -> None:
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        async with running_server(engine, config) as address:
            if on_start is not None:
                on_start(address)
            else:
                logger.info("serving sessions on %s", address)
            await told.wait()

    asyncio.run(until_told())


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _uvicorn(sessions: Sessions, listener: socket.socket) -> AsyncIterator[None]:
    requests = UnderWay(session_app(sessions))
    settings = uvicorn.Config(
        requests,
        access_log=False,
        lifespan="off",
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=2 * _GRACE_SECONDS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
    server = _Server(settings)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    expiry = asyncio.create_task(_expire(sessions))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.001)
        yield
    finally:
        expiry.cancel()
        server.should_exit = True
        await requests.end(_GRACE_SECONDS)
        await running


async def _expire(sessions: Sessions) -> None:
    idle = sessions.config.idle_seconds
    while idle is not None:
        await asyncio.sleep(min(idle / 4, 30))
        try:
            await sessions.expire()
        except JournalError as error:
            logger.error("idle sessions stay for now: %s", error)


@asynccontextmanager
async def _journal(config: ServerConfig) -> AsyncIterator[Journal | None]:
    if config.journal is None:
        yield None
        return
    journal = Journal(config.journal, sync=config.journal_sync)
    try:
        yield journal
    finally:
        await journal.close()


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
