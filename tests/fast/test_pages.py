"""Pages: whatever the data holds stays data, and nothing is loaded from anywhere."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.pages import build_page, script_json, shared_asset, strict_json

PACKAGE = Path(__file__).parents[2] / "miles_norm"
ASSETS = sorted([*PACKAGE.rglob("*.js"), *PACKAGE.rglob("*.css")])
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "-->",
    "]]>",
    "<img src=x onerror=alert(1)>",
    "\u2028\u2029",
    "&lt;",
]


def embedded(page: str) -> object:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def test_hostile_text_stays_in_the_data() -> None:
    page = build_page(HOSTILE[0], {"texts": HOSTILE}, styles=["body {}"], scripts=["console.log(1);"])
    assert embedded(page) == {"texts": HOSTILE}
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    assert "<title>&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;</title>" in page
    # Nothing opens or closes a script but the two that belong to the page.
    assert len(re.findall(r"<\s*script", page, flags=re.IGNORECASE)) == 2
    assert len(re.findall(r"<\s*/\s*script", page, flags=re.IGNORECASE)) == 2


@given(
    st.recursive(
        st.text() | st.floats() | st.booleans() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_data_can_be_embedded(value: object) -> None:
    text = script_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == json.loads(strict_json(value))


def test_the_policy_allows_this_script_and_no_connection() -> None:
    page = build_page("title", {}, styles=[], scripts=["one();", "two();"])
    [script] = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert script.index("one();") < script.index("two();")


def test_a_live_page_may_ask_its_own_server_only() -> None:
    page = build_page("title", {}, styles=[], scripts=["one();"], connects=True)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'")
    assert re.findall(r"connect-src ([^;]*)", policy) == ["'self'"]


@pytest.mark.parametrize("path", ASSETS, ids=lambda path: path.name)
def test_assets_load_nothing_and_parse_no_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for forbidden in (
        "</",
        "<!--",
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "@import",
        "url(",
    ):
        assert forbidden not in text, f"{forbidden} in {path.name}"
    # The page of a running server is the one that asks for something.
    assert ("fetch(" in text) == (path.name == "ui.js")
    assert re.findall(r"https?://[^\s\"']+", text) in ([], ["http://www.w3.org/2000/svg"])


def test_assets_are_found_in_the_package() -> None:
    assert "trajectoryTree" in shared_asset("tree.js")
    assert len(ASSETS) >= 7
