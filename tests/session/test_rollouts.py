"""The rollout driver against a real server: identities, what agents do wrong, and a server that is not always there."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from conversations import assistant, user
from openai import AsyncOpenAI
from scripted import Api, ask, served, until

from miles_norm import NormalizationConfig, Sample, normalize_rewards
from miles_norm.session import rollout
from miles_norm.session.engines.embedded import EmbeddedEngine
from miles_norm.session.rollout import RolloutOptions, run_rollouts
from miles_norm.session.server import ServerConfig, running_server

pytestmark = pytest.mark.anyio

ONE_EACH = RolloutOptions()


@pytest.fixture(name="api")
async def fixture_api() -> AsyncIterator[Api]:
    async with served() as api:
        yield api
        # Whatever happened to a rollout, its session was deleted.
        assert (await api.metrics())["sessions"] == 0


async def test_identities_order_and_what_an_agent_is_given(api: Api) -> None:
    calls: list[dict[str, Any]] = []

    async def agent(base_url: str, prompt: Any, **given: Any) -> dict[str, Any]:
        calls.append({"base_url": base_url, "prompt": prompt, **given})
        given["metadata"]["scratch"] = len(calls)  # A copy of its own.
        # The later it began, the earlier it ends.
        await asyncio.sleep(0.1 - len(calls) / 100)
        await ask(base_url, user(str(prompt)), **given["request_kwargs"])
        return {
            "reward": float(len(calls)),
            "note": "seen",
            **{k: v for k, v in given["metadata"].items() if k != "scratch"},
        }

    messages = [user("sum?")]
    prompts = ["one", {"prompt": messages, "label": "3", "metadata": {"task": "sum"}}, {"prompt": "three"}]
    options = RolloutOptions(n_samples_per_prompt=2, request_kwargs={"max_tokens": 9}, api_key="ignored")
    finished: list[Sequence[Sample]] = []
    rows = await run_rollouts(agent, prompts, api.address, options, on_rollout=finished.append)
    assert [(row.group_index, row.index, row.rollout_id) for row in rows] == [
        (0, 0, 0), (0, 1, 1), (1, 2, 2), (1, 3, 3), (2, 4, 4), (2, 5, 5),
    ]  # fmt: skip
    assert [row.prompt for row in rows] == ["one"] * 2 + [messages] * 2 + ["three"] * 2
    assert [row.label for row in rows] == [None] * 2 + ["3"] * 2 + [None] * 2
    assert [row.metadata["note"] for row in rows] == ["seen"] * 6
    assert [row.metadata.get("task") for row in rows] == [None] * 2 + ["sum"] * 2 + [None] * 2
    assert all("scratch" not in row.metadata and "api_key" not in row.metadata for row in rows)
    assert {row.status for row in rows} == {"completed"}
    assert sorted(row.index for rows in finished for row in rows) == list(range(6))
    assert [call["request_kwargs"] for call in calls] == [{"max_tokens": 9}] * 6
    assert {call["metadata"]["api_key"] for call in calls} == {"ignored"}
    assert len({call["base_url"] for call in calls}) == 6
    assert all(call["base_url"].startswith(f"{api.address}/sessions/") for call in calls)


async def test_an_agent_with_openai_s_client_and_a_compaction(api: Api) -> None:
    """Two rows of each rollout, and one reward for both."""

    async def agent(base_url: str, prompt: Any, **given: Any) -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
            messages: list[Any] = [user(prompt)]
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, user("Go on.")]
            await client.chat.completions.create(model="m", messages=[user("A summary.")])
        return {"reward": float(prompt)}

    rows = await run_rollouts(agent, ["0", "1"], api.address, RolloutOptions(n_samples_per_prompt=2))
    assert [row.rollout_id for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [row.reward for row in rows] == [0.0] * 4 + [1.0] * 4
    assert [len(row.metadata["leaf"]["path_node_ids"]) for row in rows] == [2, 1] * 4


async def test_no_more_rollouts_at_a_time_than_asked_for(api: Api) -> None:
    running, most = 0, 0

    async def agent(**given: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    await run_rollouts(agent, ["a"] * 12, api.address, RolloutOptions(concurrency=3))
    assert most == 3


class Junk:
    """What no file can hold."""


class Unreadable(dict[str, Any]):
    """A mapping that fails to be one."""

    def items(self) -> Any:
        raise KeyError("items")


RETURNED: list[tuple[Any, str]] = [
    (7, "the agent returned 7, neither a mapping nor None"),
    ("done", "the agent returned 'done', neither a mapping nor None"),
    ({"reward": "good"}, "rows were refused for {'reward': 'good'}: status 400"),
    ({"reward": [1.0]}, "rows were refused for {'reward': [1.0]}: status 400"),
    ({"rewards": 3}, "rows were refused for {'rewards': 3}: status 400"),
    ({"reward": 1.0, "rewards": {"nobody": 1.0}}, "response id nobody, which no turn of the session has"),
    ({"reward": Junk()}, "the agent returned what no file can hold: 'outcome.reward': a value of type Junk"),
    ({"reward": 1.0, "tool": Junk()}, "the agent returned what no file can hold: 'outcome.tool': a value of type Junk"),
    (Unreadable(), "the agent returned what cannot be read: KeyError: 'items'"),
    ({3: 1.0}, "the agent returned what no file can hold: 'outcome': a key of type int"),
]


@pytest.mark.parametrize(("returned", "error"), RETURNED, ids=[repr(returned)[:30] for returned, _ in RETURNED])
async def test_what_is_no_outcome_costs_its_rollout_only(api: Api, returned: Any, error: str) -> None:
    async def agent(base_url: str, prompt: Any, **given: Any) -> Any:
        await ask(base_url, user("hi"))
        return returned if prompt == "bad" else {"reward": 1.0}

    bad, good = await run_rollouts(agent, ["bad", "good"], api.address)
    assert error in bad.metadata["error"]
    assert (bad.status, bad.reward, bool(bad.loss_mask.any())) == ("aborted", None, True)
    assert (good.status, good.reward) == ("completed", 1.0)
    assert "error" not in good.metadata


@pytest.mark.parametrize(
    ("given", "reward"),
    [(np.float32(0.5), 0.5), (np.int64(2), 2), (True, True), (None, None), ({"a": 1.0}, {"a": 1.0})],
)
async def test_rewards_of_any_kind(api: Api, given: Any, reward: Any) -> None:
    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        await ask(base_url, user("hi"))
        return {"reward": given}

    (row,) = await run_rollouts(agent, ["a"], api.address)
    assert row.reward == reward
    assert type(row.reward) is type(reward)
    assert row.status == "completed"


async def test_a_reward_that_is_no_number_is_unscored(api: Api) -> None:
    async def agent(base_url: str, prompt: Any, **_: Any) -> dict[str, Any]:
        await ask(base_url, user("hi"))
        return {"reward": float(prompt)}

    rows = await run_rollouts(agent, [{"prompt": text} for text in ("nan", "1")], api.address)
    assert np.isnan(rows[0].reward)
    assert rows[1].reward == 1.0


async def test_rewards_of_single_leaves(api: Api) -> None:
    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        ids = [(await ask(base_url, user(str(number))))["id"] for number in range(2)]
        return {"reward": 0.0, "rewards": {ids[0]: 1.0}}

    rows = await run_rollouts(agent, ["a"], api.address, RolloutOptions(picker="keep_all"))
    # The row of the later tree comes first.
    assert [row.reward for row in rows] == [0.0, 1.0]


async def raises(base_url: str) -> None:
    raise ValueError("no such tool")


async def exits(base_url: str) -> None:
    sys.exit("usage: agent")


async def interrupts(base_url: str) -> None:
    raise KeyboardInterrupt


async def cancels_itself(base_url: str) -> None:
    raise asyncio.CancelledError


async def hangs(base_url: str) -> None:
    await asyncio.Event().wait()


async def hangs_on(base_url: str) -> None:
    """Takes no notice of being cancelled for a while."""
    for _ in range(4):
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (raises, "ValueError: no such tool"),
        (exits, "SystemExit: usage: agent"),
        (cancels_itself, "the agent cancelled itself"),
        (hangs, "no end after 0.5 s"),
        (hangs_on, "no end after 0.5 s; it went on after it was cancelled, and was abandoned"),
    ],
)
async def test_an_agent_that_fails_costs_its_rollout_and_not_the_batch(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Any, error: str
) -> None:
    """It fails after a turn, before any, or not; the batch is normalized without its failures."""
    monkeypatch.setattr(rollout, "_GRACE_SECONDS", 0.05)
    calls = 0

    async def agent(base_url: str, prompt: Any, **_: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if prompt != "before any turn":
            await ask(base_url, user("hi"))
        if prompt != "not":
            await fault(base_url)
        return {"reward": float(calls)}

    prompts = ["not", "after a turn", "before any turn"]
    options = RolloutOptions(n_samples_per_prompt=2, timeout_seconds=0.5, concurrency=1)
    rows = await run_rollouts(agent, prompts, api.address, options)
    assert [row.group_index for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [row.status for row in rows] == ["completed"] * 2 + ["aborted"] * 4
    assert [row.reward for row in rows] == [1.0, 2.0, *[None] * 4]
    assert [row.metadata.get("error") for row in rows] == [None] * 2 + [error] * 4
    assert [len(row.tokens) > 0 for row in rows] == [True] * 4 + [False] * 2
    # All that failed alike are named in one warning.
    assert caplog.messages == [f"4 rollouts were aborted: {error} (rollouts 2, 3, 4, 5)"]
    assert calls == 6  # An agent is never run again.
    result = normalize_rewards(
        rows, NormalizationConfig(advantage_estimator="dr_grpo", missing_reward="exclude", n_samples_per_prompt=2)
    )
    assert result.advantages.tolist() == [-0.5, 0.5, 0, 0, 0, 0]
    assert result.counted_rollouts.tolist() == [True] * 2 + [False] * 4
    await asyncio.sleep(0.3 if fault is hangs_on else 0)


async def test_a_rollout_without_a_turn_is_a_row_without_tokens(api: Api) -> None:
    async def agent(**_: Any) -> dict[str, Any]:
        return {"reward": 1.0}

    (row,) = await run_rollouts(agent, ["a"], api.address)
    assert (row.status, row.reward, len(row.tokens), row.rollout_id) == ("aborted", None, 0, 0)
    assert row.metadata["error"] == "no rows: the agent made no turn, or none that fits into max_seq_len"


async def test_rows_that_are_too_long(api: Api) -> None:
    async def agent(base_url: str, **_: Any) -> None:
        first = await ask(base_url, user("hi"))
        await ask(base_url, user("hi"), assistant(first["choices"][0]["message"]["content"]), user("go on"))

    (whole,) = await run_rollouts(agent, ["a"], api.address)
    (cut,) = await run_rollouts(agent, ["a"], api.address, RolloutOptions(max_seq_len=len(whole.tokens) - 1))
    (none,) = await run_rollouts(agent, ["a"], api.address, RolloutOptions(max_seq_len=3))
    assert len(whole.metadata["leaf"]["path_node_ids"]) == 2
    assert (cut.status, len(cut.tokens) < len(whole.tokens) - 1) == ("truncated", True)
    assert "no rows" in none.metadata["error"]


async def test_a_session_that_is_gone_costs_its_rollout_only(api: Api) -> None:
    """Expired under an agent that takes its time, or lost by a server without a journal."""

    async def agent(base_url: str, prompt: Any, **_: Any) -> dict[str, Any]:
        await ask(base_url, user("hi"))
        if prompt == "lost":
            await api.call("DELETE", base_url.removeprefix(api.address))
        return {"reward": 1.0}

    kept, lost = await run_rollouts(agent, ["kept", "lost"], api.address)
    assert (kept.status, kept.reward) == ("completed", 1.0)
    assert (lost.status, lost.reward, len(lost.tokens)) == ("aborted", None, 0)
    assert "status 404: session" in lost.metadata["error"]


async def test_a_batch_that_is_cancelled_ends_its_agents_and_sessions(api: Api) -> None:
    asked, ended = 0, 0

    async def agent(base_url: str, **_: Any) -> None:
        nonlocal asked, ended
        await ask(base_url, user("hi"))
        asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1

    rolling = asyncio.create_task(run_rollouts(agent, ["a"] * 5, api.address))
    await until(lambda: asked == 5)
    rolling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    assert ended == 5


async def test_an_agent_that_raises_a_keyboard_interrupt(api: Api) -> None:
    """In a thread of its own it costs its rollout; in the main one it is the user's Ctrl-C, and ends the batch."""

    async def agent(base_url: str, prompt: str, **_: Any) -> dict[str, Any]:
        if prompt == "bad":
            await interrupts(base_url)
        return {}

    def main() -> list[Sample]:
        return asyncio.run(run_rollouts(agent, ["bad", "good"], api.address))

    bad, _ = await asyncio.to_thread(main)
    assert bad.metadata["error"] == "KeyboardInterrupt"
    with pytest.raises(KeyboardInterrupt):
        await rollout._outcome(agent, "", rollout.Prompt("bad"), {})


async def test_an_observer_that_raises_ends_the_batch(api: Api) -> None:
    async def agent(**_: Any) -> None: ...

    def observer(rows: Sequence[Sample]) -> None:
        raise KeyError("observer")

    with pytest.raises(KeyError, match="observer"):
        await run_rollouts(agent, ["a"] * 5, api.address, ONE_EACH, on_rollout=observer)


async def test_the_embedded_engine_gives_rows_that_train() -> None:
    async def agent(base_url: str, prompt: Any, request_kwargs: dict[str, Any], **_: Any) -> dict[str, Any]:
        answer = await ask(base_url, user(prompt), **request_kwargs)
        return {"reward": float(answer["usage"]["completion_tokens"])}

    options = RolloutOptions(n_samples_per_prompt=3, request_kwargs={"max_tokens": 20})
    async with running_server(EmbeddedEngine(), ServerConfig(port=0)) as address:
        rows = await run_rollouts(agent, ["a", "b"], address, options)
    for row in rows:
        assert row.loss_mask.sum() == row.response_length == row.reward <= 20
        assert (row.rollout_log_probs < 0).all()
        assert row.weight_versions == ["0"]
    assert normalize_rewards(rows, NormalizationConfig()).groups == [[0, 1, 2], [3, 4, 5]]
