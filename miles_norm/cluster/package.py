"""The package ray, which is an extra, and functions as tasks of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from miles_norm.errors import MissingDependencyError

__all__ = ["ray_package", "remote"]


@cache
def ray_package() -> Any:
    """The module ray.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        # The package need not be there when types are checked, or when this room is read.
        return import_module("ray")
    except ImportError as error:
        raise MissingDependencyError(
            "rewards on a cluster",
            got="no package ray",
            expected="the package ray",
            reason="it runs tasks where the samples are",
            remedy="pip install 'miles-norm[ray]'",
        ) from error


@cache
def remote(task: Callable[..., Any]) -> Any:
    """A function as a Ray task."""
    return ray_package().remote(task)
