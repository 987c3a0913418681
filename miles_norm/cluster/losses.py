"""What Ray says of tasks that failed, in this library's words: which rows are wrong, and which are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_norm.cluster.package import ray_package
from miles_norm.errors import LostRowsError, MilesNormError, format_rows

__all__ = ["fetched"]

_LOST = (
    "ObjectLostError",
    "WorkerCrashedError",
    "NodeDiedError",
    "RayActorError",
    "OutOfMemoryError",
    "TaskUnschedulableError",
)


def fetched(refs: Sequence[Any], noun: str) -> list[Any]:
    """The values of the refs, which are named by ``noun`` and their number: ``part 3``.

    Raises:
        LostRowsError: values that are gone, and that Ray could not make again; all of them are named.
        MilesNormError: what a task of this library raised; the first one, with the number of its part.
    """
    ray = ray_package()
    gone = tuple(getattr(ray.exceptions, name) for name in _LOST)
    values: list[Any] = []
    lost: dict[int, Exception] = {}
    wrong: dict[int, MilesNormError] = {}
    for number, ref in enumerate(refs):
        try:
            values.append(ray.get(ref))
        except gone as error:
            lost[number] = error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, gone):
                lost[number] = cause
            elif isinstance(cause, MilesNormError):
                wrong[number] = cause
            else:
                raise
    if lost:
        raise _lost(noun, lost)
    if wrong:
        raise _wrong(noun, wrong)
    return values


def _lost(noun: str, lost: dict[int, Exception]) -> LostRowsError:
    first = next(iter(lost.values()))
    said = str(first).strip().partition("\n")[0]
    return LostRowsError(
        f"rows of {format_rows(list(lost), noun)}",
        got=f"{type(first).__name__}: {said:.300}",
        expected="samples that are there, or that Ray can make again",
        reason="their node or their process is gone; Ray makes again what a task returned, as long as that task may be "
        "retried and its node's kind is left, but not what a worker or an actor put there itself",
        remedy="return samples from tasks instead of ray.put, or sample these rollouts again",
    )


def _wrong(noun: str, wrong: dict[int, MilesNormError]) -> MilesNormError:
    number, error = next(iter(wrong.items()))
    others = [other for other in wrong if other != number]
    also = f"; also in {format_rows(others, noun)}" if others else ""
    return type(error)(
        f"{noun} {number}: {error.subject}",
        got=error.got + also,
        expected=error.expected,
        reason=error.reason,
        remedy=error.remedy,
        rows=error.rows,
    )
