"""Pages that need no network: one HTML file with its own scripts, styles and data, safe for any text in the data.

Shared by all that shows rollouts in a browser: the theme, and ``tree.js``, which draws the tree of a rollout from what
the metadata of a session has (``{"nodes": [{"id", "parent"}], "leaves": [{"node_id", ...}]}``).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

__all__ = ["build_page", "script_json", "shared_asset", "strict_json"]


def strict_json(value: Any) -> str:
    """JSON on one line, with null for what JSON has no number for.

    >>> strict_json({"a": [1.5, float("nan")]})
    '{"a": [1.5, null]}'
    """
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: no text in it can end the element or begin a comment.

    >>> script_json(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    text = strict_json(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shared_asset(name: str) -> str:
    """A script or style of this package: ``elements.js``, ``tree.js`` or ``theme.css``."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def build_page(title: str, data: Any, *, styles: Sequence[str], scripts: Sequence[str], connects: bool = False) -> str:
    """One HTML document that loads nothing and runs nothing but ``scripts``.

    The scripts share one scope, in their order, and find the data in ``pageData``. A content security policy allows
    these scripts by their hash and no connection, so that even text that got past an escape would not run.

    Args:
        title: Of the document; any text.
        data: What JSON can hold.
        styles: CSS texts.
        scripts: JavaScript texts.
        connects: Let them ask the server that the page came from, and no other.
    """
    opening = 'const pageData = JSON.parse(document.getElementById("data").textContent);\n'
    script = '"use strict";\n(() => {\n' + opening + "\n".join(scripts) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    if connects:
        policy += "; connect-src 'self'"
    style = "\n".join(styles)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{style}
</style>
</head>
<body>
<main id="page"><noscript>This page needs JavaScript.</noscript></main>
<script type="application/json" id="data">{script_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""
