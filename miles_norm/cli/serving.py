"""What ``serve`` does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rich.console import Console

from miles_norm.cli.terminal import show_lines
from miles_norm.session.server import ServerConfig, serve

if TYPE_CHECKING:
    from miles_norm.cli.engines import EngineChoice

__all__ = ["run_server"]


class _Shown(logging.Handler):
    """Shows what the server logs."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        serious = record.levelno >= logging.WARNING
        show_lines(
            self._console, self.format(record), head="warning: " if serious else "", style="yellow" if serious else ""
        )


def run_server(console: Console, choice: EngineChoice, config: ServerConfig) -> None:
    """Serve until interrupted."""

    def started(address: str) -> None:
        look = f"; {address}/ui shows them" if config.ui else ""
        show_lines(console, f"{address}/sessions on the engine {choice.name}{look}; Ctrl-C ends it", head="serving ")

    logger = logging.getLogger("miles_norm")
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [_Shown(console)], False
    logger.setLevel(logging.INFO)
    try:
        serve(choice.make(), config, on_start=started)
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
