"""Sessions that Miles' server v2 recorded, sent to this one over HTTP side by side: the rows to expect."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import assistant
from recorded_sessions import SESSIONS, completion_of
from scripted import CHAT, Api, ScriptedEngine, served

from miles_norm import NormalizationConfig, Sample, normalize_rewards, read_dump
from miles_norm.session.completion import Completion
from miles_norm.session.engines.protocol import GenerationRequest

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


async def replayed(api: Api, scripts: dict[str | None, deque[Completion]], session: dict[str, Any]) -> list[Sample]:
    name = await api.create()
    scripts[name] = deque(map(completion_of, session["requests"]))
    for request in session["requests"]:
        answer = await api.turn(name, request["messages"])
        assert answer["choices"][0]["message"] == assistant(request["completion_text"])
        assert answer["choices"][0]["finish_reason"] == request["finish_reason"]
        assert answer["usage"]["completion_tokens"] == len(request["completion_token_ids"])
    # The attempts that a retry superseded are not among the requests.
    return await api.rows(
        name, group_index=session["group_index"], index=session["sample_index"], picker="keep_all",
        agent={"reward": session["reward"]},
    )  # fmt: skip


async def test_the_rows_of_every_recorded_conversation() -> None:
    scripts: dict[str | None, deque[Completion]] = {}

    def script(request: GenerationRequest) -> Completion:
        return scripts[request.routing_key].popleft()

    async with served(ScriptedEngine(script)) as api:
        found = await asyncio.gather(*(replayed(api, scripts, session) for session in SESSIONS))
    for session, rows in zip(SESSIONS, found, strict=True):
        requests = {request["request"]: request for request in session["requests"]}
        assert len(rows) == len(session["expected_rows"])
        for row, expected in zip(rows, session["expected_rows"], strict=True):
            assert row.status == expected["status"]
            assert int(row.loss_mask.sum()) == expected["trainable_tokens"]
            assert (row.index, row.group_index, row.reward) == (
                session["sample_index"], session["group_index"], session["reward"],
            )  # fmt: skip
            assert row.rollout_id == session["sample_index"]
            assert row.weight_versions == ["default"] * len(expected["path"])
            # Every completion stands in the row as it was sampled, and is trainable where it is expected to be.
            sampled = [requests[number] for number in expected["path"]]
            generated = row.rollout_log_probs != 0
            ids = row.tokens[len(row.tokens) - row.response_length :]
            assert ids[generated].tolist() == [id_ for one in sampled for id_ in one["completion_token_ids"]]
            log_probs = [value for one in sampled for value in one["completion_log_probs"]]
            assert np.array_equal(row.rollout_log_probs[generated], np.float32(log_probs))
            trained = [
                trainable > 0
                for number, trainable in expected["trainable_tokens_by_request"].items()
                for _ in requests[int(number)]["completion_token_ids"]
            ]
            assert row.loss_mask[generated].tolist() == trained
            # And the row reads as the conversation does.
            messages = [*sampled[-1]["messages"], assistant(sampled[-1]["completion_text"])]
            text = CHAT.render(messages, add_generation_prompt=False)
            assert text.startswith(CHAT.decode(row.tokens.tolist()))


async def test_the_advantages_of_the_batch_are_those_of_the_dump() -> None:
    scripts: dict[str | None, deque[Completion]] = {}
    async with served(ScriptedEngine(lambda request: scripts[request.routing_key].popleft())) as api:
        found = await asyncio.gather(*(replayed(api, scripts, session) for session in SESSIONS))
    rows = [row for rows in found for row in rows]
    recorded = read_dump(ROOT / "examples/data/miles_session_v2.pt").samples
    ours, theirs = (normalize_rewards(batch, NormalizationConfig()) for batch in (rows, recorded))
    assert len(rows) == 58
    assert ours.advantages.tolist() == theirs.advantages.tolist()
