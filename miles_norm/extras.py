"""Packages that the core does without: each is imported where it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from miles_norm.errors import MissingDependencyError

__all__ = ["import_package"]


def import_package(module: str, subject: str, *, reason: str, remedy: str) -> Any:
    """An optional module; it need not be there when types are checked.

    Args:
        module: Dotted name.
        subject: What needs it.
        reason: Why it does.
        remedy: How to do with or without it.

    Raises:
        MissingDependencyError: its package is not installed.

    >>> import_package("no_such_package", "the example", reason="it is one", remedy="go on without")
    Traceback (most recent call last):
    miles_norm.errors.MissingDependencyError: the example
      got:      no package no_such_package
      expected: the package no_such_package
      reason:   it is one
      remedy:   go on without
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            subject, got=f"no package {package}", expected=f"the package {package}", reason=reason, remedy=remedy
        ) from error
