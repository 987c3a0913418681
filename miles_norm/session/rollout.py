"""Run an agent on prompts, several times on each, and bring back the training rows."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_norm.errors import RequestError, SessionError, format_rows, shown
from miles_norm.samples import Sample
from miles_norm.session.batch import Agent, Prompt, RolloutOptions, checked_prompts, own_containers
from miles_norm.session.client import SessionClient, connect
from miles_norm.storage.plain_values import NotPlainError, plain_mapping

__all__ = ["Agent", "Prompt", "RolloutOptions", "aborted_rollouts", "check_complete", "run_rollouts"]

logger = logging.getLogger("miles_norm")

_GRACE_SECONDS = 5
"""What an agent gets to end once it has been cancelled; then it is abandoned."""


@dataclass(frozen=True, slots=True)
class _Rollout:
    """One rollout to run."""

    group_index: int
    index: int
    prompt: Prompt


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
    ``missing_reward="exclude"``. What went wrong is a warning at the end, one for all rollouts with the same error.

    An agent that goes on after it has been cancelled is abandoned after 5 seconds. It runs on beside the batch:
    ``asyncio.run`` would wait for it at its end, which ``miles-norm rollout`` does not.

    Args:
        agent: Run side by side with itself; see ``Agent``.
        prompts: Texts, lists of messages, or dicts with ``prompt`` and, if wanted, ``label`` and ``metadata``.
        server: Address of a session server, such as ``running_server`` gives.
        options: Defaults to ``RolloutOptions()``.
        on_rollout: Called with the rows of each rollout as soon as it has ended, for a progress bar or a pipeline.
            Whoever keeps them loses nothing that was finished when this function is cancelled or raises.

    Returns:
        The rows of all rollouts, ordered by prompt and rollout.

    Raises:
        ConfigError: prompts that are neither of these; all are named. Or an address that is none.
        SessionError: the server cannot be reached, fails, or refuses to make sessions, and the batch ends with it; or
            an agent cancelled tasks that are not its own, and with them rollouts, which are named.
    """
    options = options or RolloutOptions()
    given = checked_prompts(prompts)
    waiting, total = _rollouts(given, options.n_samples_per_prompt), len(given) * options.n_samples_per_prompt
    finished: dict[int, list[Sample]] = {}

    async def work(client: SessionClient) -> None:
        for rollout in waiting:
            finished[rollout.index] = rows = await _run(agent, rollout, client, options)
            if on_rollout is not None:
                on_rollout(rows)

    connected = connect(server, api_key=options.api_key, connections=options.concurrency, retries=options.retries)
    async with connected as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(options.concurrency, total)):
                    group.create_task(work(client))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            _warn(finished.values())
    check_complete(finished, total)
    return [row for index in sorted(finished) for row in finished[index]]


def check_complete(finished: Collection[int], total: int) -> None:
    """All of ``total`` rollouts have finished.

    Raises:
        SessionError: some have not; they are named.
    """
    lacking = sorted(set(range(total)).difference(finished))
    if lacking:
        # A task group takes a cancelled task for one that has done its work.
        raise SessionError(
            format_rows(lacking, "rollout"),
            got="cancelled before the end, and not by whoever runs the batch",
            expected="rows of every rollout",
            reason="a batch that lacks some would be trained on as if nobody had asked for them",
            remedy="have agents cancel tasks of their own only, not asyncio.all_tasks()",
        )


def aborted_rollouts(rows: Iterable[Sample]) -> dict[str, list[Any]]:
    """Ids of the rollouts whose agent did not come to an end, by what went wrong."""
    found: defaultdict[str, dict[Any, None]] = defaultdict(dict)
    for row in rows:
        error = row.metadata.get("error")
        # An engine aborts rows too, and an agent that came to an end may call something of its own an error.
        if row.status == "aborted" and row.reward is None and isinstance(error, str):
            found[error][row.rollout_id] = None
    return {error: list(ids) for error, ids in found.items()}


def _warn(finished: Iterable[Sequence[Sample]]) -> None:
    for error, ids in aborted_rollouts(row for rows in finished for row in rows).items():
        named = format_rows(sorted(ids), "rollout")
        who = f"{named} was" if len(ids) == 1 else f"{len(ids)} rollouts were"
        logger.warning("%s aborted: %s%s", who, error, "" if len(ids) == 1 else f" ({named})")


def _rollouts(prompts: Sequence[Prompt], each: int) -> Iterator[_Rollout]:
    for number, prompt in enumerate(prompts):
        for sample in range(each):
            yield _Rollout(number, number * each + sample, prompt)


async def _run(agent: Agent, rollout: _Rollout, client: SessionClient, options: RolloutOptions) -> list[Sample]:
    session = await client.create({"index": rollout.index, "group_index": rollout.group_index})
    asked = {
        "group_index": rollout.group_index,
        "index": rollout.index,
        "picker": options.picker,
        "max_seq_len": options.max_seq_len,
    }
    try:
        outcome, error = await _play(agent, rollout, client.base_url(session), options)
        if options.api_key is not None and outcome.get("api_key") == options.api_key:
            del outcome["api_key"]  # An agent may return the metadata that it was given, and rows are kept and shared.
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
        row.prompt, row.label = rollout.prompt.content, rollout.prompt.label
        row.metadata = {**rollout.prompt.metadata, **outcome, **row.metadata}
        if error is not None:
            row.status, row.reward = "aborted", None
            row.metadata["error"] = error
    if error is not None:
        logger.info("rollout %d of prompt %d was aborted: %s", rollout.index, rollout.group_index, error)
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
    # The rollouts of a prompt begin alike, whatever an agent appends to its messages or writes into its settings.
    prompt, request_kwargs = rollout.prompt.copy(), own_containers(dict(options.request_kwargs))
    if options.api_key is not None:
        prompt.metadata["api_key"] = options.api_key
    if options.seed is not None:
        (seed,) = np.random.SeedSequence((options.seed, rollout.index)).generate_state(1)
        request_kwargs["seed"] = int(seed)
    task = asyncio.create_task(_outcome(agent, base_url, prompt, request_kwargs))
    try:
        await asyncio.wait({task}, timeout=options.timeout_seconds)
        if task.done():
            return ({}, "the agent cancelled itself") if task.cancelled() else task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE_SECONDS)
    abandoned = "" if task.done() else "; it went on after it was cancelled, and was abandoned"
    return {}, f"no end after {options.timeout_seconds:g} s{abandoned}"


async def _outcome(
    agent: Agent, base_url: str, prompt: Prompt, request_kwargs: dict[str, Any]
) -> tuple[dict[str, Any], str | None]:
    try:
        returned: Any = await agent(
            base_url=base_url,
            prompt=prompt.content,
            request_kwargs=request_kwargs,
            metadata=prompt.metadata,
            label=prompt.label,
        )
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # Whatever an agent raises, it costs its own rollout only.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, which happened to meet this agent.
        return {}, _said(error)
    if returned is None:
        return {}, None
    if not isinstance(returned, Mapping):
        return {}, f"the agent returned {shown(returned)}, neither a mapping nor None"
    try:
        return plain_mapping({"outcome": returned}, keep_arrays=False)["outcome"], None
    except NotPlainError as error:
        return {}, f"the agent returned what no file can hold: {error}"
    except Exception as error:  # noqa: BLE001  # A mapping of its own, whose methods are code of the agent.
        return {}, f"the agent returned what cannot be read: {_said(error)}"


def _said(error: BaseException) -> str:
    try:
        text = str(error)[:2000]
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    except Exception:  # noqa: BLE001  # Its own text is code of the agent too.
        return type(error).__name__
