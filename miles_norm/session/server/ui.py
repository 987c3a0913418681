"""The page of a running server, and the routes that its script asks."""

from __future__ import annotations

import ipaddress
from functools import cache
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import miles_norm
from miles_norm.pages import build_page, shared_asset, strict_json
from miles_norm.session.server.config import ServerConfig
from miles_norm.session.server.viewing import Viewer

__all__ = ["live_page", "names_this_machine", "ui_routes"]

_HEADERS = {"Cache-Control": "no-store", "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff"}


def ui_routes(viewer: Viewer, config: ServerConfig) -> list[Route]:
    """``/ui`` and what is below it; whoever serves them checks the key of all but the page."""

    def checked(request: Request) -> None:
        if config.api_key is None and not names_this_machine(request.headers.get("host", "")):
            # A site could have its name point to this machine, and its scripts read the answer.
            raise HTTPException(403, "without a key sessions are shown under localhost or an address, not under a name")

    async def page(request: Request) -> Response:
        return Response(live_page(needs_key=config.api_key is not None), media_type="text/html", headers=_HEADERS)

    async def overview(request: Request) -> Response:
        checked(request)
        return Response(strict_json(viewer.overview()), media_type="application/json", headers=_HEADERS)

    async def session(request: Request) -> Response:
        checked(request)
        found = viewer.session(request.path_params["number"])
        if found is None:
            raise HTTPException(404, "no session of this number is shown")
        return Response(strict_json(found), media_type="application/json", headers=_HEADERS)

    return [Route("/ui", page), Route("/ui/data", overview), Route("/ui/data/{number:int}", session)]


@cache
def live_page(*, needs_key: bool) -> str:
    """The page, which holds no data: its script asks for it."""
    assets = files(__package__) / "page"
    style, script = (assets.joinpath(name).read_text(encoding="utf-8") for name in ("ui.css", "ui.js"))
    return build_page(
        "Sessions of miles_norm",
        {"version": miles_norm.__version__, "needs_key": needs_key},
        styles=[shared_asset("theme.css"), style],
        scripts=[shared_asset("elements.js"), shared_asset("tree.js"), script],
        connects=True,
    )


def names_this_machine(host: str) -> bool:
    """Whether a Host header is an address or localhost: any other name may be that of a site which points it here.

    >>> [names_this_machine(host) for host in ("127.0.0.1:8811", "[::1]:8811", "localhost", "site.example:80")]
    [True, True, True, False]
    """
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True
