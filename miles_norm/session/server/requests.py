"""What the bodies of requests may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from miles_norm.errors import RequestError
from miles_norm.session.conversation import checked_message

__all__ = ["AgentOutcome", "ChatRequest", "NewSession", "SamplesRequest", "read_body"]

IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""Fields of a chat completion request that only concern the bookkeeping of a provider."""

_Body = TypeVar("_Body", bound=BaseModel)
_Id = int | str | None
_Reward = bool | int | float | dict[str, Any] | None


def read_body(model: type[_Body], body: bytes) -> _Body:
    """The body of a request; an empty one is that of all defaults.

    Raises:
        RequestError: no JSON, or fields that are missing or do not fit; all are named.
    """
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        ]
        wanted = (model.__doc__ or "").partition("\n")[0].removesuffix(".")
        raise RequestError(
            "body of the request",
            got="; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else ""),
            expected=wanted[:1].lower() + wanted[1:],
            reason="it is taken as it is: what is not understood would be left out in silence",
            remedy="mend the fields that are named",
        ) from None


def _one(n: int | None) -> int | None:
    if n not in (None, 1):
        raise ValueError(f"{n} replies to one turn; send one request for each, and they become siblings")
    return n


def _none(top_logprobs: int | None) -> int | None:
    if top_logprobs:
        raise ValueError("only the log-probs of sampled tokens are kept")
    return top_logprobs


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """An OpenAI chat completion request for one reply.

    >>> read_body(ChatRequest, b'{"messages": [{"role": "user", "content": "hi"}], "n": 2}')
    Traceback (most recent call last):
    ...
    miles_norm.errors.RequestError: body of the request
      got:      n: 2 replies to one turn; send one request for each, and they become siblings
      expected: an OpenAI chat completion request for one reply
      reason:   it is taken as it is: what is not understood would be left out in silence
      remedy:   mend the fields that are named
    """

    model_config = ConfigDict(extra="allow", strict=True)

    messages: list[Annotated[dict[str, Any], AfterValidator(checked_message)]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Annotated[int | None, AfterValidator(_one)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, AfterValidator(_none)] = None

    @property
    def limit(self) -> int | None:
        """Most tokens of the reply, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts at which the reply ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of."""
        return None if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def engine_fields(self) -> dict[str, Any]:
        """Fields that this server does not read, for the engine."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if self.tool_choice not in (None, "auto", "none"):
            fields["tool_choice"] = self.tool_choice
        return {name: value for name, value in fields.items() if name not in IGNORED}


class NewSession(BaseModel):
    """A JSON object with metadata for the new session, or nothing."""

    model_config = ConfigDict(extra="forbid")

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Kept with the session, and shown by ``GET``."""


class AgentOutcome(BaseModel):
    """What an agent returned, as far as rows show it."""

    model_config = ConfigDict(extra="allow", strict=True)

    reward: _Reward = None
    """Of every row."""
    rewards: dict[str, _Reward] | None = None
    """Of single leaves: id of the response that ended the leaf -> reward."""


class SamplesRequest(BaseModel):
    """A JSON object with identities and rules for the rows, or nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    group_index: _Id = None
    """Prompt group of the rollout."""
    index: _Id = None
    """Number of the rollout in the batch."""
    rollout_id: _Id = None
    """Id of the rollout; ``index`` by default, and the session's id where there is none either."""
    picker: Literal["keep_all", "drop_retries"] = "drop_retries"
    """Which leaves become rows."""
    agent: AgentOutcome | None = None
    max_seq_len: int | None = Field(default=None, ge=1)
    """Tokens that a row may have."""
    prompt: str | list[dict[str, Any]] = ""
    label: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Put on every row."""
