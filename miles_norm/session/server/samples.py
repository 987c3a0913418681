"""The training rows of a session, as a client asks for them."""

from __future__ import annotations

from miles_norm.samples import Sample
from miles_norm.session.assembly import assemble
from miles_norm.session.hooks import assign_reward, drop_retries, keep_all, leaf_rewards
from miles_norm.session.rendering import Renderer
from miles_norm.session.server.live_session import LiveSession
from miles_norm.session.server.requests import SamplesRequest

__all__ = ["session_rows"]

_PICKERS = {"keep_all": keep_all, "drop_retries": drop_retries}


def session_rows(session: LiveSession, request: SamplesRequest, renderer: Renderer) -> list[Sample]:
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
        agent=None if request.agent is None else request.agent.model_dump(exclude_unset=True),
        max_seq_len=request.max_seq_len,
        renderer=renderer,
    )
