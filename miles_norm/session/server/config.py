"""Settings of the session server."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from miles_norm.config.base import Config

__all__ = ["ServerConfig"]


class ServerConfig(Config):
    """How sessions are served and kept.

    >>> ServerConfig(max_sessions=8).host
    '127.0.0.1'
    """

    _harm: ClassVar[str] = "would be left out in silence"

    host: str = "127.0.0.1"
    """Address to listen on. Anybody who reaches it can use the engine: beyond this machine set `api_key`."""

    port: int = Field(default=8811, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    api_key: str | None = Field(default=None, min_length=1)
    """Key that every request but those to /health must bear (`Authorization: Bearer KEY`)."""

    ui: bool = True
    """Serve a page at /ui that shows the latest sessions, with what was said in them. Its data need the key too."""

    max_sessions: int = Field(default=100_000, ge=1)
    """Sessions at a time; one more is refused until some are deleted or expire."""

    max_nodes: int = Field(default=16_384, ge=1)
    """Turns of a session."""

    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """Largest body of a request."""

    idle_seconds: float | None = Field(default=None, gt=0)
    """A session that nobody has used for so long is deleted; null keeps it until it is deleted by name."""

    message_match: Literal["strict", "loose"] = "loose"
    """When a message that an agent sends back counts as the one that is held. `loose` compares the arguments of
    tool calls as parsed JSON, since agents parse and write them again; `strict` wants them unchanged."""

    journal: str | None = None
    """File that every turn is written to before it is answered, so that a killed server restarts with all of
    them; null keeps sessions in memory alone."""

    journal_sync: Literal["full", "normal", "off"] = "normal"
    """What a written turn survives. `full`: also loss of power. `normal`: the server being killed, and a crash of
    the machine but for the last moments. `off`: the server being killed."""
