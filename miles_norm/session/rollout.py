"""Run an agent on prompts, several times on each, and bring back the training rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from miles_norm.config.base import Config
from miles_norm.errors import ConfigError, RequestError, shown
from miles_norm.samples import Sample
from miles_norm.session.client import SessionClient, connect
from miles_norm.storage.plain_values import NotPlainError, plain_mapping

__all__ = ["Agent", "RolloutOptions", "run_rollouts"]

logger = logging.getLogger("miles_norm")

_GRACE_SECONDS = 5
"""What an agent gets to end once it has been cancelled; then it is left to itself."""


class Agent(Protocol):
    """One execution on one prompt, as Miles calls it.

    It talks to ``{base_url}/v1`` as to any OpenAI server. What it returns is put into the metadata of every row; its
    ``reward`` becomes their reward, and ``rewards`` (response id -> reward) those of single leaves. None: no reward.
    """

    def __call__(  # noqa: D102  # Described above.
        self, *, base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kwargs: Any
    ) -> Awaitable[Mapping[str, Any] | None]: ...


class RolloutOptions(Config):
    """How rollouts are run.

    >>> RolloutOptions(n_samples_per_prompt=8, request_kwargs={"max_tokens": 512}).concurrency
    64
    """

    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Rollouts of each prompt."""

    concurrency: int = Field(default=64, ge=1)
    """Rollouts at a time."""

    timeout_seconds: float | None = Field(default=None, gt=0)
    """A rollout that takes longer is ended and counts as aborted; null: as long as it takes."""

    retries: int = Field(default=5, ge=0)
    """How often a request of the driver's own (create a session, take its rows) is repeated when the server does not
    answer or fails, with pauses that double from 0.2 s. The agent is never run twice for one rollout."""

    picker: Literal["keep_all", "drop_retries"] = "drop_retries"
    """Which leaves become rows."""

    max_seq_len: int | None = Field(default=None, ge=1)
    """Tokens that a row may have."""

    api_key: str | None = Field(default=None, min_length=1)
    """Of the session server. Agents find it in `metadata["api_key"]`."""

    request_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Handed to the agent for its requests, such as temperature and max_tokens."""

    seed: int | None = Field(default=None, ge=0)
    """Each rollout finds a `seed` of its own in its `request_kwargs`, made of this number and its `index`. An agent has
    to change it from request to request: the same prompt with the same seed brings the same reply. null: no seed."""


@dataclass(frozen=True)
class _Rollout:
    """One rollout to run."""

    group_index: int
    index: int
    prompt: Any
    label: str | None
    metadata: dict[str, Any]


async def run_rollouts(
    agent: Agent,
    prompts: Iterable[Any],
    server: str,
    options: RolloutOptions | None = None,
    *,
    on_rollout: Callable[[Sequence[Sample]], object] | None = None,
) -> list[Sample]:
    """Run the agent ``n_samples_per_prompt`` times on every prompt, each time in a session of its own.

    Row identities: ``group_index`` is the number of the prompt, ``index`` and ``rollout_id`` that of the rollout.

    An agent that raises, takes too long or returns what is no outcome costs its rollout, not the batch: the rows of the
    turns it made have status ``aborted``, no reward, and what went wrong in ``metadata["error"]``. A rollout without
    rows is one such row without tokens, so that its group still shows how many rollouts it had. Normalize with
    ``missing_reward="exclude"``.

    Args:
        agent: Run side by side with itself; see ``Agent``.
        prompts: Texts, lists of messages, or dicts with ``prompt`` and, if wanted, ``label`` and ``metadata``.
        server: Address of a session server, such as ``running_server`` gives.
        options: Defaults to ``RolloutOptions()``.
        on_rollout: Called with the rows of each rollout as soon as it has ended, for a progress bar or a pipeline.

    Returns:
        The rows of all rollouts, ordered by prompt and rollout.

    Raises:
        ConfigError: prompts that are neither of these; all are named.
        SessionError: the server cannot be reached, fails, or refuses to make sessions.
    """
    options = options or RolloutOptions()
    rollouts = _rollouts(prompts, options.n_samples_per_prompt)
    gate = asyncio.Semaphore(options.concurrency)
    connected = connect(server, api_key=options.api_key, connections=options.concurrency, retries=options.retries)
    async with connected as client:

        async def run(rollout: _Rollout) -> list[Sample]:
            async with gate:
                rows = await _run(agent, rollout, client, options)
            if on_rollout is not None:
                on_rollout(rows)
            return rows

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(rollout)) for rollout in rollouts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return [row for task in tasks for row in task.result()]


async def _run(agent: Agent, rollout: _Rollout, client: SessionClient, options: RolloutOptions) -> list[Sample]:
    session = await client.create({"index": rollout.index})
    asked = {
        "group_index": rollout.group_index,
        "index": rollout.index,
        "picker": options.picker,
        "max_seq_len": options.max_seq_len,
    }
    try:
        outcome, error = await _play(agent, rollout, client.base_url(session), options)
        rewards = {name: outcome[name] for name in ("reward", "rewards") if name in outcome}
        rows = []
        try:
            rows = await client.rows(session, {**asked, "agent": rewards})
        except RequestError as refusal:
            outcome, error = {}, error or f"rows were refused for {shown(rewards)}: {refusal.got}"
            # Rewards that do not fit cost the rollout its score; a session that is gone costs its rows.
            with suppress(RequestError):
                rows = await client.rows(session, asked)
    finally:
        await client.forget(session)
    if not rows:
        rows = [_without_turns(rollout)]
        error = error or "no rows: the agent made no turn, or none that fits into max_seq_len"
    for row in rows:
        row.prompt, row.label = rollout.prompt, rollout.label
        row.metadata = {**rollout.metadata, **outcome, **row.metadata}
        if error is not None:
            row.status, row.reward = "aborted", None
            row.metadata["error"] = error
    if error is not None:
        logger.warning("rollout %d of prompt %d was aborted: %s", rollout.index, rollout.group_index, error)
    return rows


def _without_turns(rollout: _Rollout) -> Sample:
    """A row that says that the rollout was there; it has every field of the others, and no tokens."""
    return Sample(
        group_index=rollout.group_index,
        index=rollout.index,
        rollout_id=rollout.index,
        loss_mask=[],
        rollout_log_probs=[],
    )


async def _play(
    agent: Agent, rollout: _Rollout, base_url: str, options: RolloutOptions
) -> tuple[dict[str, Any], str | None]:
    """What the agent returned, and what went wrong.

    It runs in a task of its own: what it does about being cancelled, or to cancel itself, stays there.
    """
    metadata = dict(rollout.metadata)
    if options.api_key is not None:
        metadata["api_key"] = options.api_key
    request_kwargs = dict(options.request_kwargs)
    if options.seed is not None:
        (seed,) = np.random.SeedSequence((options.seed, rollout.index)).generate_state(1)
        request_kwargs["seed"] = int(seed)
    task = asyncio.create_task(_outcome(agent, base_url, rollout, request_kwargs, metadata))
    try:
        await asyncio.wait({task}, timeout=options.timeout_seconds)
        if not task.done():
            return {}, f"no end after {options.timeout_seconds} s"
        return ({}, "the agent cancelled itself") if task.cancelled() else task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE_SECONDS)


async def _outcome(
    agent: Agent, base_url: str, rollout: _Rollout, request_kwargs: dict[str, Any], metadata: dict[str, Any]
) -> tuple[dict[str, Any], str | None]:
    try:
        returned: Any = await agent(
            base_url=base_url,
            prompt=rollout.prompt,
            request_kwargs=request_kwargs,
            metadata=metadata,
            label=rollout.label,
        )
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  # Whatever an agent raises, it costs its own rollout only.
        return {}, _said(error)
    if returned is None:
        return {}, None
    if not isinstance(returned, Mapping):
        return {}, f"the agent returned {shown(returned)}, neither a mapping nor None"
    try:
        return plain_mapping({"outcome": returned}, keep_arrays=False)["outcome"], None
    except NotPlainError as error:
        return {}, f"the agent returned what no file can hold: {error}"


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # noqa: BLE001  # Its own text is code of the agent too.
        return type(error).__name__


def _rollouts(prompts: Iterable[Any], n_samples_per_prompt: int) -> list[_Rollout]:
    rollouts: list[_Rollout] = []
    bad: list[str] = []
    if isinstance(prompts, str | bytes | Mapping):
        # Its characters or keys would be prompts.
        prompts, bad = [], [f"{shown(prompts)}, which is one prompt and no list of them"]
    for number, given in enumerate(prompts):
        entry = given if isinstance(given, Mapping) else {"prompt": given}
        prompt, label, metadata = entry.get("prompt"), entry.get("label"), entry.get("metadata")
        unknown = sorted(map(str, entry.keys() - {"prompt", "label", "metadata"}))
        fits = isinstance(prompt, str | list) and prompt and isinstance(metadata, Mapping | None)
        if unknown or not fits:
            bad.append(f"prompt {number}: " + (f"unknown {', '.join(unknown)}" if unknown else shown(given)))
            continue
        for _ in range(n_samples_per_prompt):
            rollouts.append(_Rollout(number, len(rollouts), prompt, label, dict(metadata or {})))
    if bad or not rollouts:
        raise ConfigError(
            "prompts",
            got="; ".join(bad[:10]) + (f"; and {len(bad) - 10} more" if len(bad) > 10 else "") if bad else "none",
            expected="texts, lists of messages, or mappings with prompt and, if wanted, label and metadata",
            reason="the agent is given each of them",
            remedy="mend the prompts that are named; what an agent needs beside the prompt belongs into its metadata",
        )
    return rollouts
