"""Packages that only live sessions need: the extra ``session``."""

from __future__ import annotations

from typing import Any

from miles_norm.extras import import_package

__all__ = ["import_extra"]


def import_extra(module: str, subject: str) -> Any:
    """A module of the extra ``session``.

    Args:
        module: Dotted name.
        subject: What needs it.

    Raises:
        MissingDependencyError: its package is not installed.

    >>> import_extra("no_such_package", "the example")
    Traceback (most recent call last):
    miles_norm.errors.MissingDependencyError: the example
      got:      no package no_such_package
      expected: the package no_such_package
      reason:   live sessions need packages that the core does not
      remedy:   pip install 'miles-norm[session]'
    """
    return import_package(
        module,
        subject,
        reason="live sessions need packages that the core does not",
        remedy="pip install 'miles-norm[session]'",
    )
