"""The guide of the session server says what the code says."""

import json
import re
from pathlib import Path

from scripted import ScriptedEngine
from starlette.routing import Route

from miles_norm.config.base import Config, parse_yaml
from miles_norm.session.engines import embedded
from miles_norm.session.rollout import RolloutOptions
from miles_norm.session.server import ServerConfig, Sessions, session_app
from miles_norm.session.server.answers import KINDS, ending_answer
from miles_norm.session.server.requests import IGNORED, SamplesRequest

DOCS = Path(__file__).parents[3] / "docs"
GUIDE, ENGINES = ((DOCS / name).read_text(encoding="utf-8") for name in ("session_server.md", "engines.md"))


def table(model: type[Config]) -> dict[str, object]:
    """Names and defaults in the table of a model."""
    part = GUIDE.split(f"| `{model.__name__}` | default | |\n")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", part, flags=re.MULTILINE)
    return {name: parse_yaml(value, "the table") for name, value in rows}


def test_every_setting_is_listed_with_its_default() -> None:
    for model in (ServerConfig, RolloutOptions):
        assert table(model) == model().model_dump()


def test_every_route_is_listed() -> None:
    routes = {
        (method, route.path.replace(":int", ""))
        for route in session_app(Sessions(ScriptedEngine(), ServerConfig())).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert set(re.findall(r"^\| `([A-Z]+)` \| `(/\S*)` \|", GUIDE, flags=re.MULTILINE)) == routes


def test_every_status_is_listed_with_whether_it_is_sent_again() -> None:
    rows = re.findall(r"^\| (\d{3}) \| .* \| (yes|no) \|$", GUIDE, flags=re.MULTILINE)
    listed = {(int(status), again == "yes") for status, again in rows}
    assert listed == {(status, again) for _, status, again, _ in KINDS} | {(ending_answer().status_code, True)}


def test_what_the_embedded_engine_takes_is_listed() -> None:
    """Every field with every value, and no other."""
    part = ENGINES.split("| field | taken | |\n")[1].split("\n\n")[0]
    listed = {
        name: tuple(json.loads(value) for value in re.findall("`([^`]+)`", values))
        for names, values in re.findall(r"^\| ((?:`\w+`,? ?)+) \| (.*?) \|", part, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == embedded._UNDERSTOOD


def test_fields_are_listed() -> None:
    assert all(f"`{name}`" in GUIDE for name in [*IGNORED, *SamplesRequest.model_fields])
