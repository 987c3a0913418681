"""What comes back from a real SGLang server, directly and through a session server."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import user
from scripted import Api, served, until
from sglang_servers import Models, Server, Transformers, client, flush_cache, post, running_requests, sampled

from miles_norm.errors import ConfigError, EngineRejectedError
from miles_norm.session.completion import Completion
from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.engines.sglang import SGLangEngine

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("open", "ask")]
QUESTIONS = [f"{number % 3} so far, box {number % 10}" for number in range(16)]
GREEDY = {"temperature": 0.0, "max_tokens": 40}
ENDLESS = {"max_tokens": 15_000, "ignore_eos": True}
"""More than a minute of sampling."""


def engine_of(server: Server, models: Models) -> SGLangEngine:
    return SGLangEngine(server.url, HuggingFaceRenderer(models.first))


def ask(engine: SGLangEngine, question: str, **settings: Any) -> GenerationRequest:
    messages = [user(question)]
    prompt = engine.renderer.encode(engine.renderer.render(messages, TOOLS, add_generation_prompt=True))
    return GenerationRequest(
        token_ids=np.array(prompt, np.int32), messages=messages, tools=TOOLS, **{"max_tokens": 60} | settings
    )


async def natively(server: Server, request: GenerationRequest) -> tuple[list[int], list[float]]:
    """The same request in SGLang's own terms, without any code of ours."""
    parameters = {"temperature": request.temperature, "max_new_tokens": request.max_tokens}
    body = {"input_ids": request.token_ids.tolist(), "sampling_params": parameters, "return_logprob": True}
    answer = await post(server, "/generate", body)
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def through(api: Api, question: str, **settings: Any) -> tuple[list[int], list[float]]:
    """The row that one turn of a session became."""
    session = await api.create()
    await api.turn(session, [user(question)], tools=TOOLS, **settings)
    (row,) = await api.rows(session, index=0)
    assert row.rollout_log_probs is not None
    return row.tokens[-row.response_length :].tolist(), row.rollout_log_probs.tolist()


async def test_one_at_a_time_every_way_gives_the_same_bits(sglang: Server, models: Models) -> None:
    async with client(sglang, models.first) as engine, served(engine_of(sglang, models)) as api:
        for question in QUESTIONS[:6]:
            request = ask(engine, question, **GREEDY)
            found = []
            await flush_cache(sglang)
            found.append(await natively(sglang, request))
            await flush_cache(sglang)
            completion = await engine.generate(request)
            found.append((completion.token_ids.tolist(), completion.log_probs.tolist()))
            await flush_cache(sglang)
            found.append(await through(api, question, **GREEDY))
            assert len(found[0][0]) > 1
            assert found[0][0] == found[1][0] == found[2][0]
            bits = [np.array(log_probs, np.float32).tobytes() for _, log_probs in found]
            assert bits[0] == bits[1] == bits[2]


async def test_many_at_once_give_the_same_tokens_and_nearly_the_same_log_probs(sglang: Server, models: Models) -> None:
    async with client(sglang, models.first) as engine, served(engine_of(sglang, models)) as api:
        alone = []
        for question in QUESTIONS:
            await flush_cache(sglang)
            alone.append(await natively(sglang, ask(engine, question, **GREEDY)))
        together = await asyncio.gather(*(through(api, question, **GREEDY) for question in QUESTIONS))
        for (tokens, log_probs), (expected_tokens, expected) in zip(together, alone, strict=True):
            assert tokens == expected_tokens
            np.testing.assert_allclose(log_probs, expected, rtol=0, atol=1e-5)


async def test_finish_reasons(sglang: Server, models: Models) -> None:
    found: dict[str, Completion] = {}
    async with client(sglang, models.first) as engine:
        for number in range(100):
            completion = await engine.generate(ask(engine, QUESTIONS[number % len(QUESTIONS)]))
            # Of a tool call that is malformed the server keeps the tokens, and no text.
            if completion.message["content"] or completion.finish_reason != "stop":
                found[completion.finish_reason] = completion
            if {"stop", "tool_calls"} <= found.keys():
                break
        cut = await engine.generate(ask(engine, QUESTIONS[0], max_tokens=3))
        decode = engine.renderer.decode
        greedy = await engine.generate(ask(engine, QUESTIONS[0], temperature=0.0))
        end = decode(greedy.token_ids.tolist()[2:3])
        at_a_text = await engine.generate(ask(engine, QUESTIONS[0], temperature=0.0, stop=(end,)))
    assert decode(found["stop"].token_ids.tolist()) == f"{found['stop'].message['content']}<|im_end|>"
    (call,) = found["tool_calls"].message["tool_calls"]
    assert call["function"]["name"] in ("open", "ask")
    assert decode(found["tool_calls"].token_ids.tolist()).endswith("</tool_call><|im_end|>")
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    assert (at_a_text.finish_reason, at_a_text.token_ids.tolist()) == ("stop", greedy.token_ids.tolist()[:3])
    assert end not in at_a_text.message["content"]
    for completion in (*found.values(), cut, at_a_text):
        assert completion.weight_version == "default"
        assert len(completion.log_probs) == len(completion.token_ids)


async def test_log_probs_are_at_the_temperature_of_the_request(
    sglang: Server, models: Models, transformers: Transformers
) -> None:
    async with served(engine_of(sglang, models)) as api:
        session = await api.create()
        for question in QUESTIONS[:4]:
            await api.turn(session, [user(question)], tools=TOOLS, temperature=0.5, max_tokens=60)
        rows = await api.rows(session, index=0)
    at_half, at_one = (transformers.log_probs(rows, models.first, temperature) for temperature in (0.5, 1.0))
    for row, expected in zip(rows, at_half, strict=True):
        np.testing.assert_allclose(row.rollout_log_probs, expected, rtol=0, atol=1e-4)
    assert max(float(np.abs(half - one).max()) for half, one in zip(at_half, at_one, strict=True)) > 0.01


async def test_a_generation_that_the_server_aborts(sglang: Server, models: Models) -> None:
    async with served(engine_of(sglang, models)) as api:
        session = await api.create()
        turn = asyncio.create_task(api.turn(session, [user("0 so far, box 1")], **ENDLESS))
        await until(lambda: running_requests(sglang))
        await asyncio.sleep(0.3)
        await post(sglang, "/abort_request", {"abort_all": True})
        assert (await turn)["choices"][0]["finish_reason"] == "abort"
        (row,) = await api.rows(session, index=0)
    assert row.status == "aborted"
    assert 0 < row.response_length < 15_000
    assert sampled(row).all()


async def test_a_generation_that_is_aborted_while_it_waits_for_its_turn(sglang: Server, models: Models) -> None:
    """The server has room for 32,768 tokens, and tells less of requests that it has not begun."""
    async with served(engine_of(sglang, models)) as api:
        sessions = [await api.create() for _ in range(6)]
        long = {"max_tokens": 7_000, "ignore_eos": True}
        turns = [asyncio.create_task(api.turn(each, [user("x" * 9_000 + each)], **long)) for each in sessions]
        await until(lambda: running_requests(sglang))
        await asyncio.sleep(0.3)
        await post(sglang, "/abort_request", {"abort_all": True})
        answers = await asyncio.gather(*turns)
        rows = [row for each in sessions for row in await api.rows(each, index=0)]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"abort"}
    assert 0 in {answer["usage"]["completion_tokens"] for answer in answers}
    assert {row.status for row in rows} == {"aborted"}


async def test_the_folder_of_another_model(sglang: Server, models: Models, tmp_path: Path) -> None:
    """An id beyond the vocabulary would end the server."""
    shutil.copytree(models.first, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    changed = json.loads(file.read_text(encoding="utf-8"))
    changed["model"]["vocab"] = {letter: 1000 + token for letter, token in changed["model"]["vocab"].items()}
    file.write_text(json.dumps(changed), encoding="utf-8")
    async with client(sglang, tmp_path) as engine:
        with pytest.raises(ConfigError, match="as the tokenizer here has them"):
            await engine.generate(ask(engine, QUESTIONS[0]))
        assert await engine.health()


async def test_a_client_that_leaves_stops_the_generation_and_no_other(sglang: Server, models: Models) -> None:
    async with served(engine_of(sglang, models)) as api:
        session = await api.create()
        leaver = asyncio.create_task(api.turn(session, [user("0 so far, box 1")], **ENDLESS))
        await until(lambda: running_requests(sglang))
        await api.turn(session, [user("0 so far, box 2")], max_tokens=5)
        leaver.cancel()
        # The server looks for clients that left every 4 seconds.
        async with asyncio.timeout(20):
            while await running_requests(sglang):
                await asyncio.sleep(0.2)
        await api.turn(session, [user("0 so far, box 3")], max_tokens=5)
        spans = [node["completion_span"] for node in (await api.show(session))["tree"]["nodes"]]
        assert all(stop - start <= 5 for start, stop in spans)
        assert len(spans) == 2


async def test_what_the_server_refuses_is_passed_on_and_not_recorded(sglang: Server, models: Models) -> None:
    async with served(engine_of(sglang, models)) as api:
        session = await api.create()
        for wrong, match in (({"max_tokens": 50_000}, "context length"), ({"top_k": -7}, "top_k")):
            status, body = await api.try_turn(session, [user("0 so far, box 1")], **wrong)
            assert status == 400
            assert match in str(body)
        assert (await api.show(session))["tree"]["nodes"] == []
    async with client(sglang, models.first) as engine:
        with pytest.raises(EngineRejectedError, match="HTTP status 400"):
            await engine.update_weights("/nowhere/at/all", "1")
        assert (await engine.generate(ask(engine, QUESTIONS[0]))).weight_version == "default"


async def test_health(sglang: Server, models: Models) -> None:
    async with served(engine_of(sglang, models)) as api:
        assert await api.call("GET", "/health") == (200, {"status": "ok", "sessions": 0})
