"""What a client asks when it creates a session and when it takes its rows."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from miles_norm.errors import RequestError
from miles_norm.samples import Sample
from miles_norm.session.assembly import assemble
from miles_norm.session.hooks import assign_reward, drop_retries, keep_all, leaf_rewards
from miles_norm.session.server.sessions import LiveSession

__all__ = ["NewSession", "SamplesRequest", "read_body", "session_rows"]

_PICKERS = {"keep_all": keep_all, "drop_retries": drop_retries}
_Id = int | str | None
_Body = TypeVar("_Body", bound=BaseModel)


class NewSession(BaseModel):
    """Body of ``POST /sessions``; it may be empty."""

    model_config = ConfigDict(extra="forbid")

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Kept with the session, and shown by ``GET``."""


class SamplesRequest(BaseModel):
    """Body of ``POST /sessions/{id}/samples``; it may be empty."""

    model_config = ConfigDict(extra="forbid", strict=True)

    group_index: _Id = None
    """Prompt group of the rollout."""
    index: _Id = None
    """Number of the rollout in the batch."""
    rollout_id: _Id = None
    """Id of the rollout; ``index`` by default, and the session's id where there is none either."""
    picker: Literal["keep_all", "drop_retries"] = "drop_retries"
    """Which leaves become rows."""
    agent: dict[str, Any] | None = None
    """What the agent returned: its ``reward`` becomes the reward of every row, its ``rewards`` those of leaves."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Tokens that a row may have."""
    prompt: str | list[dict[str, Any]] = ""
    label: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Put on every row."""


def session_rows(session: LiveSession, request: SamplesRequest) -> list[Sample]:
    """The training rows of a session, as ``assemble`` makes them.

    Raises:
        SessionError, HookError: as ``assemble``.
    """
    anonymous = request.rollout_id is None and request.index is None
    base = Sample(
        group_index=request.group_index,
        index=request.index,
        rollout_id=session.session_id if anonymous else request.rollout_id,
        prompt=request.prompt,
        label=request.label,
        metadata=dict(request.metadata),
    )
    return assemble(
        session.forest,
        base,
        _PICKERS[request.picker],
        (assign_reward, leaf_rewards),
        agent=request.agent,
        max_seq_len=request.max_seq_len,
    )


def read_body(model: type[_Body], body: bytes) -> _Body:
    """The body of a request; an empty one is that of all defaults.

    Raises:
        RequestError: no JSON, or fields that do not fit; all are named.
    """
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()]
        raise RequestError(
            "body of the request",
            got="; ".join(problems[:10]),
            expected=f"a JSON object with the fields {', '.join(model.model_fields)}, or nothing",
            reason="what is not understood would be left out in silence",
            remedy="mend the fields that are named",
        ) from None
