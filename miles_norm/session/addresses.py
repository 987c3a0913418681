"""Addresses of servers, refused at once where no request could ever reach them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from miles_norm.errors import ConfigError, shown

__all__ = ["http_address"]


def http_address(address: Any, subject: str) -> str:
    """The address without a slash at its end.

    Raises:
        ConfigError: it is none.

    >>> http_address("http://127.0.0.1:8811/", "session server")
    'http://127.0.0.1:8811'
    """
    if not (isinstance(address, str) and _is_address(address)):
        raise ConfigError(
            f"address of the {subject}",
            got=shown(address),
            expected="http://HOST:PORT or https://HOST, with a path if need be, without /v1",
            reason="requests are sent there",
            remedy="take the address that the server prints when it starts; a key does not belong into it",
        )
    return address.rstrip("/")


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        reachable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, brackets that do not close
        return False
    # Other routes than those of OpenAI's API are beside /v1.
    beyond = parts.username is not None or parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1")
    return reachable and not beyond and address.isprintable() and " " not in address
