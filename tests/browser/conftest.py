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
    """Open a file; when the test ends, nothing may have been logged, thrown, asked for or loaded from elsewhere."""
    contexts, problems = [], []

    def open_page(path: Path, *, phone: bool = False, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport=PHONE if phone else DESKTOP, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
        page.goto(path.resolve().as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
