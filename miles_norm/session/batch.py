"""What a batch of rollouts is made of: an agent, prompts, and how they are run. Needs neither torch nor a server."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from miles_norm.config.base import Config
from miles_norm.errors import ConfigError, shown
from miles_norm.session.conversation import checked_message

__all__ = ["Agent", "Prompt", "RolloutOptions", "checked_prompts", "own_containers", "wrong_prompts"]

_FIELDS = ("prompt", "label", "metadata")


class Agent(Protocol):
    """One execution on one prompt, as Miles calls it.

    It talks to ``{base_url}/v1`` as to any OpenAI server. The lists and dicts that it is given are its own: it may
    append to the messages of ``prompt``, and no other rollout sees it. What it returns is put into the metadata of
    every row; its ``reward`` becomes their reward, and ``rewards`` (response id -> reward) those of single leaves.
    None: no reward.
    """

    def __call__(  # noqa: D102  # Described above.
        self, *, base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kwargs: Any
    ) -> Awaitable[Mapping[str, Any] | None]: ...


class RolloutOptions(Config):
    """How rollouts are run.

    >>> RolloutOptions(n_samples_per_prompt=8, request_kwargs={"max_tokens": 512}).concurrency
    64
    """

    _harm: ClassVar[str] = "would be left out in silence"

    n_samples_per_prompt: int = Field(default=1, ge=1, le=65_536)
    """Rollouts of each prompt."""

    concurrency: int = Field(default=64, ge=1, le=65_536)
    """Rollouts at a time."""

    timeout_seconds: float | None = Field(default=None, gt=0)
    """A rollout that takes longer is ended and counts as aborted; null: as long as it takes."""

    retries: int = Field(default=5, ge=0, le=1000)
    """How often a request of the driver's own (create a session, take its rows) is repeated when the server does not
    answer or fails, with pauses that double from 0.2 s. The agent is never run twice for one rollout."""

    picker: Literal["keep_all", "drop_retries"] = "drop_retries"
    """Which leaves become rows."""

    max_seq_len: int | None = Field(default=None, ge=1)
    """Tokens that a row may have."""

    api_key: str | None = Field(default=None, min_length=1)
    """Of the session server. Agents find it in `metadata["api_key"]`; rows do not have it, also where an agent returns
    its metadata."""

    request_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Handed to the agent for its requests, such as temperature and max_tokens."""

    seed: int | None = Field(default=None, ge=0)
    """Each rollout finds a `seed` of its own in its `request_kwargs`, made of this number and its `index`. An agent has
    to change it from request to request: the same prompt with the same seed brings the same reply. null: no seed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an agent is given, and what its rows then say of it."""

    content: str | list[dict[str, Any]]
    """A text, or messages of a conversation to go on with."""
    label: str | None = None
    """The right answer, for agents that compare."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> Prompt:
        """A prompt from a text, a list of messages, or a mapping with ``prompt``, ``label`` and ``metadata``.

        Raises:
            ValueError: what does not fit, all of it.

        >>> Prompt.of({"prompt": "2 + 2?", "label": 4})
        Traceback (most recent call last):
        ...
        ValueError: the label is 4, and no text
        """
        if isinstance(given, Prompt):
            return given
        entry = given if isinstance(given, Mapping) else {"prompt": given}
        content, label, metadata = (entry.get(name) for name in _FIELDS)
        faults = list(_faults(content)) if given is not None and "prompt" in entry else [f"no prompt in {shown(given)}"]
        if label is not None and not isinstance(label, str):
            faults.append(f"the label is {shown(label)}, and no text")
        if not isinstance(metadata, Mapping | None):
            faults.append(f"the metadata are {shown(metadata)}, and no mapping")
        elif not all(isinstance(name, str) for name in metadata or ()):
            faults.append("the metadata have names that are no texts")
        if unknown := [name for name in entry if name not in _FIELDS]:
            faults.append(f"unknown {', '.join(sorted(map(str, unknown)))}")
        if faults:
            raise ValueError(", ".join(faults))
        return cls(content, label, dict(metadata or {}))  # type: ignore[arg-type]  # checked above

    def copy(self) -> Prompt:
        """One that shares no list and no dict with this one, for an agent to do with as it likes."""
        return Prompt(own_containers(self.content), self.label, own_containers(dict(self.metadata)))


def own_containers(value: Any, known: dict[int, Any] | None = None) -> Any:
    """A value whose lists, tuples and dicts are copies; what else is in them, such as a client, is the same object.

    >>> lock, given = object(), {"messages": [{"role": "user"}]}
    >>> copied = own_containers({**given, "lock": lock})
    >>> copied["messages"] == given["messages"], copied["messages"][0] is given["messages"][0], copied["lock"] is lock
    (True, False, True)
    """
    known = {} if known is None else known
    if id(value) in known:  # A container may hold itself.
        return known[id(value)]
    if type(value) is dict:
        fields = known[id(value)] = {}
        fields.update((name, own_containers(entry, known)) for name, entry in value.items())
        return fields
    if type(value) is list:
        entries = known[id(value)] = []
        entries.extend(own_containers(entry, known) for entry in value)
        return entries
    return tuple(own_containers(entry, known) for entry in value) if type(value) is tuple else value


def _faults(content: Any) -> Iterable[str]:
    if isinstance(content, str):
        if not content:
            yield "the text is empty"
    elif isinstance(content, list) and content:
        for number, message in enumerate(content):
            try:
                if not isinstance(message, dict):
                    raise ValueError(f"it is {shown(message)}, and no object")  # as the others
                checked_message(message)
            except ValueError as error:
                yield f"message {number}: {error}"
    else:
        yield f"the prompt is {shown(content)}, and neither a text nor a list of messages"


def checked_prompts(prompts: Iterable[Any]) -> list[Prompt]:
    """Prompts in the order given.

    Raises:
        ConfigError: some are none; they are named. Or there are none.
    """
    checked: list[Prompt] = []
    problems: list[str] = []
    if isinstance(prompts, str | bytes | Mapping):
        # Its characters or keys would be prompts.
        prompts, problems = [], [f"{shown(prompts)}, which is one prompt and no list of them"]
    for number, given in enumerate(prompts):
        try:
            checked.append(Prompt.of(given))
        except ValueError as error:
            problems.append(f"prompt {number}: {error}")
    if problems or not checked:
        raise wrong_prompts("prompts", problems)
    return checked


def wrong_prompts(subject: str, problems: Sequence[str]) -> ConfigError:
    """The error for prompts that cannot be given to an agent; no problems: there are no prompts."""
    more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
    return ConfigError(
        subject,
        got="; ".join(problems[:10]) + more if problems else "no prompts",
        expected='a text, [messages] with role and content, or {"prompt": ..., "label": TEXT, "metadata": {...}} each',
        reason="the agent is given each of them",
        remedy="mend those that are named; what an agent needs beside prompt and label belongs into the metadata",
    )
