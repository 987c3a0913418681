"""Run an agent on prompts, several times on each, and bring back the training rows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import aiohttp

from miles_norm.errors import ConfigError, SessionError, shown
from miles_norm.samples import Sample
from miles_norm.session.wire import decode_rows

__all__ = ["Agent", "RolloutOptions", "run_rollouts"]

logger = logging.getLogger("miles_norm")


class Agent(Protocol):
    """One execution on one prompt, as Miles calls it.

    It talks to ``{base_url}/v1`` as to any OpenAI server. What it returns is put into the metadata of every row; its
    ``reward`` becomes their reward, and ``rewards`` (response id -> reward) those of single leaves. None: no reward.
    """

    def __call__(  # noqa: D102  # Described above.
        self, *, base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kwargs: Any
    ) -> Awaitable[Mapping[str, Any] | None]: ...


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How rollouts are run."""

    n_samples_per_prompt: int = 1
    """Rollouts of each prompt."""
    concurrency: int = 64
    """Rollouts at a time."""
    timeout_seconds: float | None = None
    """A rollout that takes longer is ended and counts as aborted; None: as long as it takes."""
    retries: int = 3
    """How often a request of the driver's own (create a session, take its rows) is repeated when the server does not
    answer. The agent is never run twice for one rollout."""
    picker: Literal["keep_all", "drop_retries"] = "drop_retries"
    """Which leaves become rows."""
    max_seq_len: int | None = None
    """Tokens that a row may have."""
    api_key: str | None = None
    """Of the session server. Agents find it in ``metadata["api_key"]``."""
    request_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the agent for its requests, such as temperature and max_tokens."""

    def __post_init__(self) -> None:
        for name in ("n_samples_per_prompt", "concurrency"):
            if getattr(self, name) < 1:
                raise _wrong_option(name, getattr(self, name), "a whole number from 1")
        if self.retries < 0:
            raise _wrong_option("retries", self.retries, "a whole number from 0")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise _wrong_option("timeout_seconds", self.timeout_seconds, "a number above 0, or None")


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

    An agent that raises or takes too long costs its rollout, not the batch: the rows of the turns it made have status
    ``aborted``, no reward, and the error in ``metadata["error"]``. A rollout without any turn is one such row without
    tokens, so that its group still shows how many rollouts it had. Normalize with ``missing_reward="exclude"``.

    Args:
        agent: Run side by side with itself; see ``Agent``.
        prompts: Texts, lists of messages, or dicts with ``prompt`` and, if wanted, ``label`` and ``metadata``.
        server: Address of a session server, such as ``running_server`` gives.
        options: Defaults to ``RolloutOptions()``.
        on_rollout: Called with the rows of each rollout as soon as it has ended, for a progress bar or a pipeline.

    Returns:
        The rows of all rollouts, ordered by prompt and rollout.

    Raises:
        SessionError: the server cannot be reached, or refuses the driver's requests.
    """
    options = options or RolloutOptions()
    rollouts = _rollouts(prompts, options)
    gate = asyncio.Semaphore(options.concurrency)
    async with _client(server, options) as client:

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


async def _run(agent: Agent, rollout: _Rollout, client: _Client, options: RolloutOptions) -> list[Sample]:
    session = (await client.json("POST", "/sessions", {"metadata": {"index": rollout.index}}))["session_id"]
    try:
        outcome, error = await _play(agent, rollout, f"{client.server}/sessions/{session}", options)
        asked = {
            "group_index": rollout.group_index,
            "index": rollout.index,
            "rollout_id": rollout.index,
            "picker": options.picker,
            "max_seq_len": options.max_seq_len,
            "prompt": rollout.prompt,
            "label": rollout.label,
        }
        if outcome is not None:
            asked["agent"] = {name: outcome[name] for name in ("reward", "rewards") if name in outcome}
        rows, _ = decode_rows(await client.bytes("POST", f"/sessions/{session}/samples", asked))
    finally:
        await client.forget(session)
    rows = rows or [_without_turns(rollout)]
    for row in rows:
        row.metadata = {**rollout.metadata, **dict(outcome or {}), **row.metadata}
        if error is not None:
            row.status, row.reward = "aborted", None
            row.metadata["error"] = error
    return rows


async def _play(
    agent: Agent, rollout: _Rollout, base_url: str, options: RolloutOptions
) -> tuple[Mapping[str, Any] | None, str | None]:
    """What the agent returned, and what went wrong if it did not."""
    metadata = dict(rollout.metadata)
    if options.api_key is not None:
        metadata["api_key"] = options.api_key
    try:
        async with asyncio.timeout(options.timeout_seconds):
            outcome: Any = await agent(
                base_url=base_url,
                prompt=rollout.prompt,
                request_kwargs=dict(options.request_kwargs),
                metadata=metadata,
                label=rollout.label,
            )
    except Exception as error:  # noqa: BLE001  # Whatever an agent raises, it costs its own rollout only.
        timed_out = isinstance(error, TimeoutError) and not str(error)
        text = f"no end after {options.timeout_seconds} s" if timed_out else f"{type(error).__name__}: {error}"
        logger.warning("rollout %d of prompt %d was aborted: %s", rollout.index, rollout.group_index, text)
        return None, text
    if outcome is not None and not isinstance(outcome, Mapping):
        text = f"the agent returned {shown(outcome)}, neither a mapping nor None"
        logger.warning("rollout %d of prompt %d was aborted: %s", rollout.index, rollout.group_index, text)
        return None, text
    return outcome, None


def _without_turns(rollout: _Rollout) -> Sample:
    return Sample(
        group_index=rollout.group_index,
        index=rollout.index,
        rollout_id=rollout.index,
        prompt=rollout.prompt,
        label=rollout.label,
        loss_mask=[],
        status="aborted",
    )


def _rollouts(prompts: Iterable[Any], options: RolloutOptions) -> list[_Rollout]:
    rollouts: list[_Rollout] = []
    bad: list[str] = []
    for number, given in enumerate(prompts):
        entry = given if isinstance(given, Mapping) else {"prompt": given}
        prompt, label, metadata = entry.get("prompt"), entry.get("label"), entry.get("metadata")
        unknown = sorted(map(str, entry.keys() - {"prompt", "label", "metadata"}))
        fits = isinstance(prompt, str | list) and prompt and isinstance(metadata, Mapping | None)
        if unknown or not fits:
            bad.append(f"prompt {number}: " + (f"unknown {', '.join(unknown)}" if unknown else shown(given)))
            continue
        for _ in range(options.n_samples_per_prompt):
            rollouts.append(_Rollout(number, len(rollouts), prompt, label, dict(metadata or {})))
    if bad or not rollouts:
        raise ConfigError(
            "prompts",
            got="; ".join(bad[:10]) if bad else "none",
            expected="texts, lists of messages, or mappings with prompt and, if wanted, label and metadata",
            reason="the agent is given each of them",
            remedy="mend the prompts that are named; what an agent needs beside the prompt belongs into its metadata",
        )
    return rollouts


def _wrong_option(name: str, got: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} of RolloutOptions",
        got=shown(got),
        expected=expected,
        reason="it decides what is run",
        remedy="choose another value",
    )


class _Client:
    """The driver's own requests to the session server."""

    def __init__(self, http: aiohttp.ClientSession, server: str, retries: int) -> None:
        self.server = server.rstrip("/")
        self._http, self._retries = http, retries

    async def bytes(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The body of the answer.

        Raises:
            SessionError: no answer after all retries, or a refusal.
        """
        said = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(0.1 * 2**attempt, 5))
            try:
                async with self._http.request(method, self.server + path, json=body) as answer:
                    data = await answer.read()
                    if answer.status < 400:
                        return data
                    said = f"{answer.status} {data[:2000].decode(errors='replace')}"
                    if answer.status < 500 and answer.status != 429:
                        break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
        raise SessionError(
            f"{method} {self.server}{path}",
            got=said,
            expected="an answer of the session server",
            reason="rollouts are recorded there",
            remedy="look at the server; its address is that of 'miles-norm serve' or of running_server",
        )

    async def json(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        """The body of the answer, parsed."""
        return json.loads(await self.bytes(method, path, body))

    async def forget(self, session_id: str) -> None:
        """Delete a session; one that cannot be deleted is left to expire."""
        with suppress(SessionError):
            await self.bytes("DELETE", f"/sessions/{session_id}")


@asynccontextmanager
async def _client(server: str, options: RolloutOptions) -> AsyncIterator[_Client]:
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    connector = aiohttp.TCPConnector(limit=options.concurrency)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        yield _Client(http, server, options.retries)
