"""Docstrings as Markdown, for the API reference: in the code, formulas, tables and doctests are reStructuredText."""

import re
from typing import Any

import griffe

__all__ = ["DocstringsAsMarkdown", "as_markdown"]

ROLE = re.compile(r":math:`([^`]+)`")
# The text beside the directive, and the lines below it that are indented more.
DIRECTIVE = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*)", flags=re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", flags=re.MULTILINE)
TABLE = re.compile(r"^( *)(=+(?: +=+)+)\n((?:.*\n)*?)\1\2(?!\n\1\S)", flags=re.MULTILINE)


def as_markdown(text: str) -> str:
    r"""The docstring with its reStructuredText as Markdown; all else stays.

    >>> print(as_markdown("A mean of :math:`x`\n\n.. math:: m =\n    x / n\n\n>>> 1 + 1\n2"))
    A mean of $x$
    <BLANKLINE>
    $$m = x / n$$
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    text = TABLE.sub(_table, text)
    text = DIRECTIVE.sub(_formula, text)
    text = ROLE.sub(r"$\1$", text)
    return DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


def _formula(found: re.Match[str]) -> str:
    return f"{found[1]}$${' '.join(found[2].split())}$$"


def _table(found: re.Match[str]) -> str:
    """Cells begin where the border does; a line without a first cell goes on with the one above, a rule ends a head."""
    indent, border, body = found.groups()
    starts = [column.start() for column in re.finditer("=+", border)]
    slices = [slice(begin, end) for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    rows: list[list[str]] = [[""] * len(starts)]
    for line in body.splitlines():
        cells = [line.removeprefix(indent)[part].strip().replace("|", r"\|") for part in slices]
        if line.strip() == border:
            rows = rows[1:]
        elif cells[0] or not any(rows[-1]):
            rows.append(cells)
        else:
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ["---"] * len(starts))
    return "\n".join(f"{indent}| {' | '.join(cells)} |" for cells in rows)


class DocstringsAsMarkdown(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each module, class, function and attribute below the package."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called once for the package itself."""
        self.on_object(obj=pkg)
