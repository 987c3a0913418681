"""The client of an SGLang server, over real HTTP against one that is scripted."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from fake_sglang import MESSAGES, PROMPT, RENDERER, FakeSGLang, ask, generate, log_prob, run, serving

from miles_norm.errors import ConfigError, EngineContractError, EngineRejectedError, EngineUnavailableError
from miles_norm.session.completion import Completion
from miles_norm.session.engines import sglang
from miles_norm.session.engines.protocol import Engine, wait_until_ready
from miles_norm.session.engines.sglang import SGLangEngine


def test_it_is_an_engine() -> None:
    assert isinstance(SGLangEngine("http://127.0.0.1:1", RENDERER), Engine)


def test_every_field_of_a_completion() -> None:
    completion = generate(FakeSGLang(weight_version="7"))
    assert completion.message == {"role": "assistant", "content": "hi"}
    assert completion.token_ids.tolist() == [104, 105, 258]
    assert completion.log_probs.tolist() == [log_prob(0), log_prob(1), log_prob(2)]
    assert (completion.token_ids.dtype, completion.log_probs.dtype) == (np.int32, np.float32)
    assert completion.finish_reason == "stop"
    assert completion.weight_version == "7"
    assert completion.response_id == "rid-1"
    assert completion.routed_experts is None


def test_what_is_sent() -> None:
    server = FakeSGLang()
    tools = [{"type": "function", "function": {"name": "add"}}]
    full = ask(
        tools=tools, temperature=0.5, top_p=0.9, max_tokens=7, stop=("a",), seed=0, routing_key="s1",
        extra={"top_k": 5, "input_ids": [1], "stream": True, "temperature": 2.0},
    )  # fmt: skip

    async def use(engine: SGLangEngine) -> None:
        await engine.generate(ask())
        await engine.generate(full)

    run(server, use, api_key="key")
    plain = {
        "model": "tiny", "messages": MESSAGES, "input_ids": PROMPT.tolist(), "logprobs": True, "return_meta_info": True,
        "stream": False, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    # The prompt is asked back until one answer has been right.
    assert server.bodies[0] == plain | {"return_prompt_token_ids": True}
    assert server.bodies[1] == plain | {
        "tools": tools, "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "stop": ["a"], "seed": 0, "top_k": 5,
    }  # fmt: skip
    assert [headers.get("X-SMG-Routing-Key") for headers in server.headers] == [None, "s1"]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer key"}


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "abort"])
def test_finish_reasons(reason: str) -> None:
    assert generate(FakeSGLang(finish_reason=reason)).finish_reason == reason


def test_tool_calls() -> None:
    call = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "add", "arguments": "{}"}}
    completion = generate(FakeSGLang(text="", tool_calls=[call], finish_reason="tool_calls"))
    assert completion.message == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_an_abort_before_the_first_token() -> None:
    server = FakeSGLang(token_ids=[], text="", finish_reason="abort")
    for experts in (None, (2, 3)):
        completion = generate(server, routed_experts=experts)
        assert completion.token_ids.shape == completion.log_probs.shape == (0,)
        assert completion.routed_experts is None


def test_routed_experts() -> None:
    # One row per token of the context but the last: 2 layers, top 3.
    experts = np.arange((len(PROMPT) + 2) * 6, dtype=np.int32).reshape(-1, 2, 3)
    completion = generate(FakeSGLang(experts=experts), routed_experts=(2, 3))
    assert completion.routed_experts is not None
    assert np.array_equal(completion.routed_experts, experts)
    for wrong, shape in ((experts[:-1], (2, 3)), (experts, (2, 4)), (None, (2, 3))):
        with pytest.raises(
            EngineContractError, match=rf"base64 of int32 \[{len(PROMPT) + 2}, {shape[0]}, {shape[1]}\]"
        ):
            generate(FakeSGLang(experts=wrong), routed_experts=shape)


@pytest.mark.parametrize(
    ("router", "match"),
    [
        ("fixed fields", r"(?s)no meta_info in choices\[0\].*remedy: +use a router that passes every field on"),
        ("retokenized", r"(?s)an answer to another prompt\n.*the input_ids that were sent.*use a router"),
    ],
)
def test_a_router_that_drops_fields_is_found_at_the_first_answer(router: str, match: str) -> None:
    server = FakeSGLang(router=router)
    with pytest.raises(EngineContractError, match=match):
        generate(server)
    assert len(server.bodies) == 1


def test_a_prompt_of_another_length_is_found_at_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: SGLangEngine) -> None:
        await engine.generate(ask())
        monkeypatch.setattr(FakeSGLang, "answer", longer)
        with pytest.raises(
            EngineContractError, match=rf"prompt of {len(PROMPT) + 1} tokens\n.*sent, {len(PROMPT)} tokens"
        ):
            await engine.generate(ask())

    answer = FakeSGLang.answer

    def longer(self: FakeSGLang, body: dict[str, Any]) -> dict[str, Any]:
        return answer(self, body | {"input_ids": [*body["input_ids"], 1]})

    run(FakeSGLang(), use)


@pytest.mark.parametrize("status", ["500", "502", "503"])
def test_a_failing_server_is_unavailable_and_the_client_stays_usable(status: str) -> None:
    server = FakeSGLang(broken=status)

    async def use(engine: SGLangEngine) -> None:
        with pytest.raises(EngineUnavailableError, match=rf"HTTP status {status}: .*as scripted"):
            await engine.generate(ask())
        assert not await engine.health()
        server.broken = ""
        assert await engine.health()
        assert (await engine.generate(ask())).finish_reason == "stop"

    run(server, use)


@pytest.mark.parametrize("status", [400, 401, 404, 429])
def test_a_refusal_passes_through(status: int) -> None:
    with pytest.raises(EngineRejectedError, match=f"HTTP status {status}") as raised:
        generate(FakeSGLang(broken=str(status)))
    assert raised.value.status == status
    assert '"message": "as scripted"' in raised.value.body


def test_an_answer_that_is_cut() -> None:
    with pytest.raises(EngineUnavailableError, match="ClientPayloadError"):
        generate(FakeSGLang(broken="cut"))


def test_a_server_that_is_down_and_comes_up() -> None:
    async def use() -> None:
        async with serving(FakeSGLang()) as server:
            port = urlsplit(server.url).port
        engine = SGLangEngine(server.url, RENDERER)
        with pytest.raises(EngineUnavailableError, match="a client that is not started, or closed"):
            await engine.generate(ask())
        await engine.start()
        with pytest.raises(EngineUnavailableError, match="ClientConnectorError"):
            await engine.generate(ask())
        assert not await engine.health()
        assert port is not None
        async with serving(FakeSGLang(), port):
            assert await engine.health()
            await engine.generate(ask())
        with pytest.raises(EngineUnavailableError):
            await engine.generate(ask())
        await engine.close()

    asyncio.run(use())


def test_an_answer_that_takes_too_long() -> None:
    with pytest.raises(EngineUnavailableError, match=r"no answer within 0\.05 s"):
        generate(FakeSGLang(seconds=30), timeout_s=0.05)


def test_a_cancelled_task_stops_its_generation_on_the_server() -> None:
    server = FakeSGLang(seconds=30)

    async def use(engine: SGLangEngine) -> None:
        task = asyncio.create_task(engine.generate(ask()))
        while not server.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not server.stopped:
            await asyncio.sleep(0.001)
        server.seconds = 0
        await engine.generate(ask())

    run(server, use)
    assert (server.running, server.stopped) == (0, 1)


def test_many_requests_share_the_pool() -> None:
    server = FakeSGLang(seconds=0.001)

    async def use(engine: SGLangEngine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(ask()) for _ in range(100)))

    assert len(run(server, use, max_connections=8)) == 100
    assert 1 < server.most_running <= 8


def test_new_weights(tmp_path: Path) -> None:
    server = FakeSGLang()

    async def use(engine: SGLangEngine) -> list[Completion]:
        before = await engine.generate(ask())
        await engine.update_weights(tmp_path, "1")
        return [before, await engine.generate(ask())]

    assert [completion.weight_version for completion in run(server, use)] == ["default", "1"]
    assert server.bodies[1] == {"model_path": str(tmp_path), "weight_version": "1", "flush_cache": True}


@pytest.mark.parametrize("status", ["200", "400"])
def test_weights_that_the_server_cannot_load(status: str) -> None:
    server = FakeSGLang(broken=status)
    with pytest.raises(EngineRejectedError, match="no such folder") as raised:
        run(server, lambda engine: engine.update_weights("nowhere", "1"))
    assert raised.value.status == 400
    assert server.weight_version == "default"


def test_an_update_that_meets_a_request_which_is_just_ending_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeSGLang(unflushed=2)
    run(server, lambda engine: engine.update_weights("folder", "1"))
    assert (server.weight_version, len(server.bodies)) == ("1", 3)
    monkeypatch.setattr(sglang, "_FLUSH_S", 0.1)
    with pytest.raises(EngineRejectedError, match="the cache was not flushed"):
        run(FakeSGLang(unflushed=10**6), lambda engine: engine.update_weights("folder", "1"))


def test_new_weights_go_to_every_worker_behind_a_router() -> None:
    async def use() -> None:
        workers = [FakeSGLang(), FakeSGLang(broken="400"), FakeSGLang()]
        async with serving(FakeSGLang()) as router, AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(serving(worker))).url for worker in workers]
            engine = SGLangEngine(router.url, RENDERER, workers=urls)
            await engine.start()
            with pytest.raises(EngineRejectedError, match="no such folder"):
                await engine.update_weights("folder", "1")
            await engine.close()
        assert [worker.weight_version for worker in workers] == ["1", "default", "1"]
        assert router.bodies == []

    asyncio.run(use())


def test_the_name_of_the_model() -> None:
    base, adapter = {"id": "base", "parent": None}, {"id": "adapter", "parent": "base"}
    for models, given, sent in (([base, adapter], None, "base"), ([base, {"id": "other"}], "other", "other")):
        server = FakeSGLang(models=models)
        generate(server, model=given)
        assert server.bodies[0]["model"] == sent
    with pytest.raises(ConfigError, match=r"got: +none named, and base, other there\n(.*\n)*.*model=\.\.\."):
        generate(FakeSGLang(models=[base, {"id": "other"}]))
    with pytest.raises(EngineUnavailableError, match=r"/v1/models\n +got: +no model"):
        generate(FakeSGLang(models=[]))


@pytest.mark.parametrize(("ready_workers", "healthy"), [(None, True), (2, True), (0, False)])
def test_a_router_is_healthy_if_it_has_workers(ready_workers: int | None, healthy: bool) -> None:
    assert run(FakeSGLang(ready_workers=ready_workers), lambda engine: engine.health()) is healthy


def test_waiting_for_a_server_that_starts() -> None:
    server = FakeSGLang(broken="503")

    async def use(engine: SGLangEngine) -> None:
        with pytest.raises(EngineUnavailableError, match=r"got: +not ready after 0\.02 s"):
            await wait_until_ready(engine, 0.02, interval_s=0.01)
        waiting = asyncio.create_task(wait_until_ready(engine, 60, interval_s=0.01))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        server.broken = ""
        await waiting

    run(server, use)


WRONG_URLS = [
    "127.0.0.1:30000", "ftp://host", "http://", "", "http://:30000", "http://[::1", "http://host:port", "http://host:99999",
    "http://host:0", "http://a b", "\nhttp://host", "http://host?a=b", "http://host#a", "http://host/v1", "http://host/v1/",
]  # fmt: skip


@pytest.mark.parametrize("url", [*WRONG_URLS, None, 5])
def test_urls(url: Any) -> None:
    with pytest.raises(ConfigError, match="address of the engine"):
        SGLangEngine(url, RENDERER)
    with pytest.raises(ConfigError, match="address of the worker"):
        SGLangEngine("http://host", RENDERER, workers=[url])


@pytest.mark.parametrize("url", ["http://host", "https://host:30000/", "http://[::1]:30000", "http://gateway/sglang"])
def test_urls_that_can_be_asked(url: str) -> None:
    SGLangEngine(url, RENDERER)


def test_a_server_of_another_model_is_found_before_it_sees_a_prompt() -> None:
    server = FakeSGLang(tokenize=lambda text: [token + 1 for token in text.encode()])
    match = r"got: +\[.*\] as tokens of '<\|im_start.*\n.*as the tokenizer here.*\n.*\n.*folder of the model"
    with pytest.raises(ConfigError, match=match):
        generate(server)
    assert server.bodies == []


def test_the_tokenizer_is_asked_for_once_and_a_router_need_not_tell() -> None:
    asked: list[str] = []

    def tokenize(text: str) -> list[int]:
        asked.append(text)
        return RENDERER.encode(text)

    async def use(engine: SGLangEngine) -> None:
        long = ask(token_ids=np.array(RENDERER.encode("x" * 10_000), np.int32))
        await engine.generate(long)
        await engine.generate(ask())

    run(FakeSGLang(tokenize=tokenize), use)
    assert asked == ["x" * 2000]
    assert generate(FakeSGLang(tokenize=None)).finish_reason == "stop"


@pytest.mark.parametrize("models", [{"tiny": 1}, ["tiny"], [{"name": "tiny"}], None, 404, 401])
def test_an_address_where_no_models_are_listed(models: Any) -> None:
    """The agent did not ask for them: it is not told 404 as if its session was gone."""
    with pytest.raises(EngineContractError, match=r"/v1/models\n(.*\n)+.*see what answers at this address"):
        generate(FakeSGLang(models=models))


@pytest.mark.parametrize("version", ["", None, 17])
def test_a_version_that_rows_could_not_show(version: Any) -> None:
    server = FakeSGLang()
    with pytest.raises(ConfigError, match=r"weight_version\n +got: +(''|None|17)\n"):
        run(server, lambda engine: engine.update_weights("folder", version))
    assert server.bodies == []


def test_a_folder_is_sent_as_it_is_found_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeSGLang()
    monkeypatch.chdir(tmp_path)
    run(server, lambda engine: engine.update_weights("checkpoints/17", "17"))
    assert server.bodies[0]["model_path"] == str(tmp_path / "checkpoints" / "17")


@pytest.mark.parametrize("status", ["204", "302"])
def test_a_status_that_is_no_refusal_is_not_passed_on(status: str) -> None:
    with pytest.raises(EngineContractError, match=f"HTTP status {status} of http"):
        generate(FakeSGLang(broken=status))
