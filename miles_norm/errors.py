"""Every error that miles_norm raises, in one tree.

    MilesNormError
    ├── ConfigError (ValueError)              a setting that does not exist, does not fit, or contradicts another
    ├── SampleError (ValueError)              a row whose fields cannot be read
    │   ├── NoSuchRowError (IndexError)       a row number beyond the batch
    │   └── RewardError (ValueError)          a reward that is no number
    │       ├── MissingRewardError            an unscored row under ``missing_reward="error"``
    │       └── DisagreeingRewardsError       siblings with different rewards under ``rollout_reward="shared"``
    ├── GroupingError (ValueError)            prompt groups that cannot be recovered, or sizes that do not fit
    ├── DumpError (ValueError)                a file that cannot be read or written
    │   └── UnsafeDumpError                   a file that asks for code to be run
    ├── SessionError (ValueError)             a turn or a conversation that cannot be taken or become rows as asked
    │   ├── PathEndedError                    a request that extends a turn which ended by length (HTTP 409)
    │   ├── NodeLimitError                    more turns than the session may have
    │   ├── SessionLimitError                 more sessions than the server may have
    │   ├── UnknownSessionError (LookupError) an id that no session has
    │   ├── RequestError                      a request that cannot be read
    │   │   ├── TooLargeError                 one with a body beyond the limit
    │   │   └── UnauthorizedError (PermissionError)  one without the key of the server
    │   └── HookError                         a picker or post-processor that broke its contract
    ├── RenderingError (ValueError)           messages that a chat template cannot render
    ├── JournalError (OSError)                a journal that cannot be opened, read or written
    ├── EngineError                           an inference engine did not do what was asked
    │   ├── EngineUnavailableError (ConnectionError)  it is down, failed, or did not answer in time
    │   ├── EngineRejectedError (ValueError)  it refused the request; carries an HTTP status and a body
    │   └── EngineContractError (ValueError)  its answer lacks what training needs
    ├── LostRowsError (RuntimeError)          rows on another machine that are gone
    └── MissingDependencyError (ImportError)  an extra that is not installed

Every message has the same five parts: the subject, what was got, what was expected, why it matters, and how to mend it.
Errors about rows name all of them at once and carry them in ``rows``.
"""

import reprlib
from collections.abc import Iterable, Sequence
from typing import Self

__all__ = [
    "ConfigError",
    "DisagreeingRewardsError",
    "DumpError",
    "EngineContractError",
    "EngineError",
    "EngineRejectedError",
    "EngineUnavailableError",
    "GroupingError",
    "HookError",
    "JournalError",
    "LostRowsError",
    "MilesNormError",
    "MissingDependencyError",
    "MissingRewardError",
    "NoSuchRowError",
    "NodeLimitError",
    "PathEndedError",
    "RenderingError",
    "RequestError",
    "RewardError",
    "SampleError",
    "SessionError",
    "SessionLimitError",
    "TooLargeError",
    "UnauthorizedError",
    "UnknownSessionError",
    "UnsafeDumpError",
    "format_rows",
    "shown",
]


class MilesNormError(Exception):
    """Root of all errors of this library.

    Args:
        subject: What the error is about, in a few words.
        got: What was found.
        expected: What would have been right.
        reason: Why the difference matters.
        remedy: What to do about it.
        rows: Every row concerned, in flattened order.

    >>> print(GroupingError("prompt_group_sizes", got="a sum of 5", expected="the number of rows, 6",
    ...                     reason="each row belongs to exactly one prompt group", remedy="pass one size per group"))
    prompt_group_sizes
      got:      a sum of 5
      expected: the number of rows, 6
      reason:   each row belongs to exactly one prompt group
      remedy:   pass one size per group
    """

    def __init__(
        self, subject: str, *, got: str, expected: str, reason: str, remedy: str, rows: Iterable[int] = ()
    ) -> None:
        self.subject, self.got, self.expected = subject, got, expected
        self.reason, self.remedy, self.rows = reason, remedy, tuple(rows)
        super().__init__(subject)

    def within(self, place: object) -> Self:
        """The same error, its subject preceded by the file or the side that it is of: each of two has a row 0."""
        state = {name: getattr(self, name) for name in ("got", "expected", "reason", "remedy", "rows")}
        return type(self)(f"{place}: {self.subject}", **state)

    def __str__(self) -> str:
        parts = {"got": self.got, "expected": self.expected, "reason": self.reason, "remedy": self.remedy}
        return "\n".join([self.subject, *(f"  {name + ':':<9} {text}" for name, text in parts.items())])

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default protocol, and errors must cross process borders.
        state = {name: getattr(self, name) for name in ("got", "expected", "reason", "remedy", "rows")}
        return (_rebuild, (type(self), self.subject, state), self.__dict__)


def _rebuild(kind: type[MilesNormError], subject: str, state: dict[str, object]) -> MilesNormError:
    return kind(subject, **state)  # type: ignore[arg-type]


class ConfigError(MilesNormError, ValueError):
    """A setting that does not exist, does not fit, or contradicts another one."""


class SampleError(MilesNormError, ValueError):
    """A row whose fields cannot be read: wrong type, wrong length, or missing."""


class NoSuchRowError(SampleError, IndexError):
    """A row number beyond the batch, or no row number at all."""


class RewardError(SampleError):
    """A reward that is no number."""


class MissingRewardError(RewardError):
    """A row without a finite reward while ``missing_reward`` is ``"error"``."""


class DisagreeingRewardsError(RewardError):
    """Sibling rows with different rewards while ``rollout_reward`` is ``"shared"``."""


class GroupingError(MilesNormError, ValueError):
    """Prompt groups that cannot be recovered, or sizes that do not fit the rows."""


class DumpError(MilesNormError, ValueError):
    """A file that is not a rollout dump, is damaged, or cannot be written."""


class UnsafeDumpError(DumpError):
    """A pickled file that names a class or function outside the allow-list; nothing of it was run."""


class SessionError(MilesNormError, ValueError):
    """A turn or a conversation that cannot be taken, or cannot become rows as asked."""


class PathEndedError(SessionError):
    """A request that extends a turn which ended by length; a server answers it with HTTP 409."""


class NodeLimitError(SessionError):
    """More turns than the session may have."""


class SessionLimitError(SessionError):
    """More sessions than the server may have."""


class UnknownSessionError(SessionError, LookupError):
    """An id that no session has: never given, deleted, or expired."""


class RequestError(SessionError):
    """A request to the session server that cannot be read as what it should be."""


class TooLargeError(RequestError):
    """A request with a body beyond the limit."""


class UnauthorizedError(RequestError, PermissionError):
    """A request without the key of the server."""


class HookError(SessionError):
    """A picker or post-processor that broke its contract."""


class RenderingError(MilesNormError, ValueError):
    """Messages or tools that a chat template cannot render."""


class JournalError(MilesNormError, OSError):
    """A journal that cannot be opened, read or written; what was to be written is not acknowledged."""


class EngineError(MilesNormError):
    """An inference engine did not do what was asked of it."""


class EngineUnavailableError(EngineError, ConnectionError):
    """An engine that is down, failed, or did not answer in time; the same request may succeed later."""


class EngineRejectedError(EngineError, ValueError):
    """A request that an engine refused; the same request fails again.

    Attributes:
        status: HTTP status of the refusal, 400 to 499.
        body: What the engine answered, as text.
    """

    status: int = 400
    body: str = ""

    @classmethod
    def of_answer(cls, status: int, body: str) -> "EngineRejectedError":
        """The refusal that an engine sent over HTTP."""
        error = cls(
            "request to the engine",
            got=f"HTTP status {status}: {shown(body, 300)}",
            expected="status 200",
            reason="the engine refused the request and would refuse it again",
            remedy="mend the request as the answer says",
        )
        error.status, error.body = status, body
        return error


class EngineContractError(EngineError, ValueError):
    """An answer that lacks what training needs, such as the ids of the sampled tokens."""


class LostRowsError(MilesNormError, RuntimeError):
    """Rows on another machine that are gone and cannot be made again."""


class MissingDependencyError(MilesNormError, ImportError):
    """An optional package that is not installed."""


def shown(value: object, limit: int = 60) -> str:
    """``repr`` for a message: short, and also for what has none.

    >>> shown("x" * 100, limit=12), shown(10**5000)
    ("'xxxxxxxx...", 'an int of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    try:
        text = reprlib.repr(value) if isinstance(value, dict | list | tuple | set) else repr(value)
    except Exception as error:  # noqa: BLE001  # A message must come out, whatever the value does.
        return f"a value of type {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def format_rows(rows: Sequence[object], noun: str = "row", limit: int = 20) -> str:
    """Name rows in a sentence: all of them up to ``limit``, then a count of the rest.

    >>> format_rows([3])
    'row 3'
    >>> format_rows([1, 2, 5])
    'rows 1, 2, 5'
    >>> format_rows(range(100), limit=3)
    'rows 0, 1, 2 and 97 more'
    """
    shown = ", ".join(str(row) for row in rows[:limit])
    rest = f" and {len(rows) - limit} more" if len(rows) > limit else ""
    return f"{noun}{'' if len(rows) == 1 else 's'} {shown}{rest}"
