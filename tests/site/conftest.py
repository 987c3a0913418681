"""The built site, which ``make docs`` writes before it runs these tests."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

try:
    import griffe  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]  # without the extra there is no site

SITE = Path(__file__).parents[2] / "build" / "site"


class Page(HTMLParser):
    """Links, what is loaded, ids, formulas, and the words outside code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.words = ""
        self.formulas = ""
        self._inside: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a":
            self.links.append(given.get("href", ""))
        elif tag in ("script", "img", "link", "iframe", "source"):
            self.loads.append(given.get("src") or given.get("href") or "")
        if tag in ("pre", "code", "math", "script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.words += data
        elif self._inside[-1] == "math":
            self.formulas += data


@pytest.fixture(scope="session", name="pages")
def fixture_pages() -> dict[str, Page]:
    assert (SITE / "index.html").exists(), "make docs builds the site"
    return {path.relative_to(SITE).as_posix(): Page(path) for path in SITE.glob("**/*.html")}
