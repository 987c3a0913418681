"""The package ray, which is an extra, and functions as tasks of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from miles_norm.extras import import_package

__all__ = ["ray_package", "remote"]


@cache
def ray_package() -> Any:
    """The module ray.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    return import_package(
        "ray",
        "rewards on a cluster",
        reason="it runs tasks where the samples are",
        remedy="pip install 'miles-norm[ray]'",
    )


@cache
def remote(task: Callable[..., Any]) -> Any:
    """A function as a Ray task."""
    return ray_package().remote(task)
