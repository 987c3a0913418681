"""A real Chromium, driven by Playwright: ``CHROMIUM`` names it, else the one on the path is taken."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 400, "height": 800}


@pytest.fixture(scope="session", name="browser")
def fixture_browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs a Chromium: apt-get install chromium, or name one with CHROMIUM=...")
    with playwright.sync_playwright() as driver:
        # Containers have no user namespaces for the sandbox; the pages are ours.
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(name="open_page")
def fixture_open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file, or a page of a server: when the test ends, nothing may have been logged or thrown, and nothing asked
    for or loaded from elsewhere."""
    contexts, problems = [], []

    def open_page(place: Path | str, *, phone: bool = False, dark: bool = False, logged: str = "\n") -> Any:
        """``logged``: what messages of the console may say."""
        address = place if isinstance(place, str) else place.resolve().as_uri()
        own = ("file:", "data:") if isinstance(place, Path) else ("data:", place.partition("/ui")[0] + "/")
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport=PHONE if phone else DESKTOP, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: logged in said.text or problems.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(own) or problems.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
