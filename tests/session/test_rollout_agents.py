"""Agents that write into what they are given, have errors of their own, and cancel what is not theirs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conversations import user
from scripted import Api, ScriptedEngine, ask, said, served

from miles_norm.errors import SessionError
from miles_norm.session.rollout import RolloutOptions, aborted_rollouts, run_rollouts

pytestmark = pytest.mark.anyio


@pytest.fixture(name="api")
async def fixture_api() -> AsyncIterator[Api]:
    async with served() as api:
        yield api
        # Whatever happened to a rollout, its session was deleted.
        assert (await api.metrics())["sessions"] == 0


async def test_what_an_agent_does_to_what_it_was_given_stays_with_its_rollout(api: Api) -> None:
    lock = asyncio.Lock()

    async def agent(base_url: str, prompt: Any, **given: Any) -> dict[str, Any]:
        prompt.append(user("more"))
        given["metadata"]["seen"]["files"].append("a.py")
        given["request_kwargs"]["stop"].append("\n")
        await ask(base_url, *prompt)
        counts = len(prompt), len(given["metadata"]["seen"]["files"]), len(given["request_kwargs"]["stop"])
        return {"reward": 1.0, "counts": counts, "same": given["metadata"]["lock"] is lock}

    prompt = {"prompt": [user("a")], "metadata": {"seen": {"files": []}, "lock": lock}}
    options = RolloutOptions(n_samples_per_prompt=3, concurrency=1, request_kwargs={"stop": ["x"]})
    rows = await run_rollouts(agent, [prompt], api.address, options)
    assert [row.metadata["counts"] for row in rows] == [[2, 1, 2]] * 3
    assert all(row.metadata["same"] for row in rows)
    assert [row.prompt for row in rows] == [[user("a")]] * 3
    assert [row.metadata["seen"] for row in rows] == [{"files": []}] * 3
    assert len({len(row.tokens) for row in rows}) == 1


async def test_what_an_agent_calls_an_error_does_not_abort_its_rollout(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(base_url: str, prompt: str, **given: Any) -> dict[str, Any]:
        await ask(base_url, user(prompt))
        return {"reward": 0.5, "error": {"lint": 3} if prompt == "a" else "lint"}

    # Rows that the engine aborted: with a score they are rows like others.
    async with served(ScriptedEngine(lambda request: said("cut", finish_reason="abort"))) as api:
        rows = await run_rollouts(agent, ["a", "b"], api.address, RolloutOptions(n_samples_per_prompt=2))
    assert [(row.status, row.reward) for row in rows] == [("aborted", 0.5)] * 4
    assert [row.metadata["error"] for row in rows] == [{"lint": 3}] * 2 + ["lint"] * 2
    assert aborted_rollouts(rows) == {}
    assert not caplog.records


async def test_rollouts_that_an_agent_cancelled_are_named(api: Api) -> None:
    workers: set[asyncio.Task[Any]] = set()
    before = asyncio.all_tasks()
    finished: list[int] = []

    async def agent(base_url: str, prompt: str, **_: Any) -> dict[str, Any]:
        if prompt == "bad":
            workers.update(asyncio.all_tasks() - before - {asyncio.current_task()})  # type: ignore[arg-type]
            for task in workers:
                task.cancel()
            await asyncio.sleep(1)
        return {"reward": 1.0}

    with pytest.raises(SessionError, match=r"rollouts 1, 2\n.*cancelled before the end"):
        await run_rollouts(
            agent, ["a", "bad", "c"], api.address, RolloutOptions(concurrency=1),
            on_rollout=lambda rows: finished.append(rows[0].index),
        )  # fmt: skip
    assert finished == [0]
