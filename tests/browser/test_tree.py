"""``tree.js`` alone, on a tree as a session's metadata has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_norm.pages import build_page, shared_asset

pytestmark = pytest.mark.browser

# Two roots; turn 2 branches into 4 and 5; turn 4 is a leaf that was also extended, by 6.
NODES = [(0, None), (2, 0), (4, 2), (5, 2), (6, 4), (7, None)]
LEAVES = [4, 6, 5, 7, None]


def test_branches_leaves_and_runs(open_page: Callable[..., Any], tmp_path: Path) -> None:
    tree = {
        "nodes": [{"id": node, "parent": parent, "seq": node} for node, parent in NODES],
        "leaves": [{"node_id": node, "name": f"leaf of {node}"} for node in LEAVES],
    }
    path = tmp_path / "tree.html"
    script = 'document.getElementById("page").append(trajectoryTree(pageData, (leaf) => el("span", {}, leaf.name)));'
    scripts = [shared_asset("elements.js"), shared_asset("tree.js"), script]
    path.write_text(build_page("tree", tree, styles=[shared_asset("theme.css")], scripts=scripts), encoding="utf-8")
    page = open_page(path)
    lines = page.locator("main").inner_text().split("\n")
    assert [line for line in lines if line] == [
        "turns 0 → 2",
        "turn 4",
        "leaf of 4",
        "turn 6",
        "leaf of 6",
        "turn 5",
        "leaf of 5",
        "turn 7",
        "leaf of 7",
        "leaf of None",
    ]
    depth = "each => { let n = 0; for (let up = each; up; up = up.parentElement) n += up.tagName === 'UL'; return n; }"
    assert [page.get_by_text(f"leaf of {node}", exact=True).evaluate(depth) for node in (4, 6, 5, 7)] == [3, 4, 3, 2]
