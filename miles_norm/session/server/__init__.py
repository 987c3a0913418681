"""Sessions over HTTP."""

from miles_norm.session.server.app import session_app
from miles_norm.session.server.config import ServerConfig
from miles_norm.session.server.live_session import LiveSession
from miles_norm.session.server.run import running_server, serve
from miles_norm.session.server.sessions import Sessions

__all__ = ["LiveSession", "ServerConfig", "Sessions", "running_server", "serve", "session_app"]
