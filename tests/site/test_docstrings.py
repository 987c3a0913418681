"""reStructuredText of docstrings as Markdown."""

import sys
from pathlib import Path

import griffe
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/site"))

from docstrings import DocstringsAsMarkdown, as_markdown

TABLE = r"""Two of them:

== =========== =======
a  b           c
== =========== =======
k1 :math:`d`   a value
k2 ``x | y``   goes
               on
== =========== =======

The end."""

CASES = {
    "nothing to do": ("One ``[N]``.\n\nArgs:\n    a: A number.", "One ``[N]``.\n\nArgs:\n    a: A number."),
    "role": (r"With :math:`L_n` and :math:`\mu`.", r"With $L_n$ and $\mu$."),
    "directive": ("A.\n\n.. math:: A_i = r_i\n\nB.", "A.\n\n$$A_i = r_i$$\n\nB."),
    "directive over lines": (".. math:: a, \\qquad\n          b\n\nB.", "$$a, \\qquad b$$\n\nB."),
    "directive with its text below": (".. math::\n    a,\n    b\n\nwith b", "$$a, b$$\n\nwith b"),
    "directive before indented text": (".. math:: a\n\n    b = 1", "$$a$$\n\n    b = 1"),
    "indented directive": ("Returns:\n    .. math:: a\n        b\n\n    c", "Returns:\n    $$a b$$\n\n    c"),
    "doctest": ("A.\n\n>>> 1\n1\n\nB.", "A.\n\n```pycon\n>>> 1\n1\n```\n\nB."),
    "indented doctest": (
        "Raises:\n    >>> f(\n    ... )\n    1",
        "Raises:\n    ```pycon\n    >>> f(\n    ... )\n    1\n    ```",
    ),
    "table": (
        TABLE,
        (
            "Two of them:\n\n| a | b | c |\n| --- | --- | --- |\n"
            "| k1 | $d$ | a value |\n| k2 | ``x \\| y`` | goes on |\n\nThe end."
        ),
    ),
    "table without a head": ("== ==\na  b\n== ==", "|  |  |\n| --- | --- |\n| a | b |"),
}


@pytest.mark.parametrize("case", CASES)
def test_markdown(case: str) -> None:
    given, expected = CASES[case]
    assert as_markdown(given) == expected


def test_every_kind_of_object_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '":math:`a`"\nx = 1\n":math:`b`"\nclass C:\n    ":math:`c`"\n    def f(self):\n        ":math:`d`"\n'
    )
    extensions = griffe.load_extensions(DocstringsAsMarkdown)
    module = griffe.load("module", search_paths=[tmp_path], extensions=extensions)
    found = [module, module["x"], module["C"], module["C.f"]]
    assert [each.docstring.value for each in found] == ["$a$", "$b$", "$c$", "$d$"]
