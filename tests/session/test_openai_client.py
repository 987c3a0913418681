"""OpenAI's own client, unmodified: sync and async, streamed and whole, with tools, and what it makes of errors."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import openai
import pytest
from conversations import user
from openai import AsyncOpenAI, OpenAI
from scripted import CHAT, Api, ScriptedEngine, said, served

from miles_norm.errors import EngineRejectedError, EngineUnavailableError
from miles_norm.session.completion import Completion
from miles_norm.session.engines.protocol import GenerationRequest

pytestmark = pytest.mark.anyio

T = TypeVar("T")
QUESTION = [user("What is 2 + 2?")]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
LONG = "A reply of more than one piece, with letters such as \N{GREEK SMALL LETTER PI} and \N{ROCKET}. " * 3


def calls_then_says(request: GenerationRequest) -> Completion:
    """A tool call, and once its result is there, the answer."""
    if request.messages[-1]["role"] == "tool":
        return said(f"It is {request.messages[-1]['content']}.")
    return said("<call>", message=CALLING, finish_reason="tool_calls")


def client(api: Api, session: str, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{api.address}/sessions/{session}/v1", api_key="key", **options)


def async_client(api: Api, session: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{api.address}/sessions/{session}/v1", api_key="key", **options)


async def sync(api: Api, session: str, use: Callable[[OpenAI], T], **options: Any) -> T:
    """What a function does with the blocking client, in a thread."""

    def used() -> T:
        with client(api, session, **options) as openai_client:
            return use(openai_client)

    return await asyncio.to_thread(used)


async def test_a_whole_reply() -> None:
    async with served(ScriptedEngine(lambda request: said("4", response_id="chatcmpl-7"))) as api:
        session = await api.create()

        def ask(openai_client: OpenAI) -> Any:
            return openai_client.chat.completions.create(
                model="m", messages=QUESTION, temperature=0.5, max_tokens=9, seed=3, logprobs=True, user="me",
                extra_body={"top_k": 5},
            )  # fmt: skip

        answer = await sync(api, session, ask)
        prompt = CHAT.encode(CHAT.render(QUESTION, add_generation_prompt=True))
    choice = answer.choices[0]
    assert (answer.id, answer.model, answer.object) == ("chatcmpl-7", "m", "chat.completion")
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "4", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 2)
    assert answer.usage.total_tokens == len(prompt) + 2
    assert [(entry.token, entry.logprob) for entry in choice.logprobs.content] == [
        ("4", -1.0), ("<|im_end|>", -1 - 1 / 1024),
    ]  # fmt: skip
    assert bytes(choice.logprobs.content[0].bytes) == b"4"


async def test_what_the_engine_is_asked() -> None:
    engine = ScriptedEngine()
    async with served(engine) as api:
        session = await api.create()
        async with async_client(api, session) as openai_client:
            await openai_client.chat.completions.create(model="m", messages=QUESTION)
            await openai_client.chat.completions.create(
                model="m", messages=QUESTION, tools=TOOLS, tool_choice="required", temperature=0, top_p=0.9,
                max_completion_tokens=7, max_tokens=5, stop=["a", "b"], seed=1, n=1, presence_penalty=0.5,
                extra_body={"top_k": 5}, metadata={"ignored": "yes"},
            )  # fmt: skip
            await openai_client.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS, tool_choice="none")
    plain, full, without_tools = engine.requests
    assert (plain.temperature, plain.top_p, plain.max_tokens, plain.stop, plain.seed) == (1.0, 1.0, None, (), None)
    assert (plain.tools, plain.extra, plain.routing_key) == (None, {}, session)
    assert (full.temperature, full.top_p, full.max_tokens, full.stop, full.seed) == (0.0, 0.9, 7, ("a", "b"), 1)
    assert full.tools == TOOLS
    assert full.extra == {"tool_choice": "required", "presence_penalty": 0.5, "top_k": 5}
    assert full.messages == QUESTION
    assert CHAT.decode(full.token_ids.tolist()) == CHAT.render(QUESTION, TOOLS, add_generation_prompt=True)
    assert (without_tools.tools, without_tools.extra) == (None, {})


async def test_an_agent_with_tools_is_one_row() -> None:
    """The client's own message objects, sent back as they are, continue the conversation."""
    async with served(ScriptedEngine(calls_then_says)) as api:
        session = await api.create()

        def solve(openai_client: OpenAI) -> str | None:
            messages: list[Any] = [*QUESTION]
            while True:
                answer = openai_client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
                message = answer.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                for call in message.tool_calls:
                    assert call.type == "function"
                    result = sum(json.loads(call.function.arguments).values())
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

        assert await sync(api, session, solve) == "It is 4."
        assert await api.parents(session) == [None, 0]
        rows = await api.rows(session, index=0, agent={"reward": 1.0})
    assert [row.reward for row in rows] == [1.0]
    trained = rows[0].tokens[-rows[0].response_length :][rows[0].loss_mask == 1]
    assert CHAT.decode(trained.tolist()) == "<call><|im_end|>It is 4.<|im_end|>"


async def test_arguments_that_the_agent_wrote_again_still_continue() -> None:
    async with served(ScriptedEngine(calls_then_says)) as api:
        session = await api.create()
        async with async_client(api, session) as openai_client:
            first = await openai_client.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)
            message = first.choices[0].message.model_dump()
            arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
            message["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
            result = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
            messages: Any = [*QUESTION, message, result]
            await openai_client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert await api.parents(session) == [None, 0]


async def test_a_streamed_reply() -> None:
    async with served(ScriptedEngine(lambda request: said(LONG))) as api:
        session = await api.create()

        def ask(openai_client: OpenAI) -> list[Any]:
            stream = openai_client.chat.completions.create(
                model="m", messages=QUESTION, stream=True, logprobs=True, stream_options={"include_usage": True}
            )
            return list(stream)

        chunks = await sync(api, session, ask)
        recorded = await api.turns(session)
    *pieces, usage = chunks
    assert {chunk.id for chunk in chunks} == set(recorded)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert pieces[0].choices[0].delta.role == "assistant"
    texts = [piece.choices[0].delta.content for piece in pieces if piece.choices[0].delta.content]
    assert "".join(texts) == LONG
    assert len(texts) > 3
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(CHAT.encode(LONG)) + 1
    entries = [entry for piece in pieces if piece.choices[0].logprobs for entry in piece.choices[0].logprobs.content]
    assert np.array_equal(np.float32([entry.logprob for entry in entries]), said(LONG).log_probs)


async def test_a_stream_without_usage_has_none() -> None:
    async with served() as api:
        session = await api.create()
        async with async_client(api, session) as openai_client:
            stream = await openai_client.chat.completions.create(model="m", messages=QUESTION, stream=True)
            chunks = [chunk async for chunk in stream]
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


async def test_streamed_tool_calls_through_the_helper_of_the_client() -> None:
    """``stream`` puts the events together; the message it gives continues the conversation."""
    async with served(ScriptedEngine(calls_then_says)) as api:
        session = await api.create()
        async with async_client(api, session) as openai_client:
            async with openai_client.chat.completions.stream(model="m", messages=QUESTION, tools=TOOLS) as stream:
                final = await stream.get_final_completion()
            message = final.choices[0].message
            assert final.choices[0].finish_reason == "tool_calls"
            assert message.tool_calls is not None
            call = message.tool_calls[0]
            assert (call.id, call.function.name, call.function.arguments) == ("call_1", "add", '{"a": 2, "b": 2}')
            result: Any = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            again: Any = message.model_dump(exclude_none=True)
            for each in again["tool_calls"]:
                # What the helper adds to a message, and OpenAI refuses to take back.
                each["function"].pop("parsed_arguments", None)
                each.pop("index", None)
            answer = await openai_client.chat.completions.create(
                model="m", messages=[*QUESTION, again, result], tools=TOOLS
            )
        assert answer.choices[0].message.content == "It is 4."
        assert await api.parents(session) == [None, 0]


async def test_fields_beyond_openai_come_through_both_ways() -> None:
    """Such as the reasoning of a reply, which the client keeps as an extra attribute."""
    message = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    async with served(ScriptedEngine(lambda request: said("4", message=message))) as api:
        session = await api.create()
        async with async_client(api, session) as openai_client:
            whole: Any = await openai_client.chat.completions.create(model="m", messages=QUESTION)
            stream = await openai_client.chat.completions.create(model="m", messages=QUESTION, stream=True)
            deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
    assert whole.choices[0].message.reasoning_content == "two and two"
    assert "two and two" in [getattr(delta, "reasoning_content", None) for delta in deltas]


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"n": 2}, openai.BadRequestError, "n: 2 replies to one turn; send one request for each"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs: only the log-probs of sampled tokens are kept"),
        ({"temperature": "warm"}, openai.BadRequestError, "temperature: Input should be a valid number"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens: 0, expected at least 1"),
        ({"messages": []}, openai.BadRequestError, "messages: List should have at least 1 item"),
    ],
)
async def test_requests_that_are_refused(fields: dict[str, Any], error: type[Exception], match: str) -> None:
    engine = ScriptedEngine()
    async with served(engine) as api:
        session = await api.create()
        async with async_client(api, session) as openai_client:
            with pytest.raises(error, match=match):
                await openai_client.chat.completions.create(**{"model": "m", "messages": QUESTION} | fields)
        assert await api.turns(session) == []
    assert engine.requests == []


async def test_errors_are_those_of_the_client_and_repeated_only_where_that_helps() -> None:
    """Each error of the server, the client's class for it, and how often the client sent the request."""
    failures = {
        "cut": said("cut off", finish_reason="length"),
        "down": EngineUnavailableError("engine", got="nothing", expected="", reason="", remedy=""),
        "busy": EngineRejectedError.of_answer(429, '{"error": {"message": "too many"}}'),
        "too long": EngineRejectedError.of_answer(400, '{"error": {"message": "too long", "type": "x"}}'),
    }

    def script(request: GenerationRequest) -> Completion:
        failure = failures[str(request.messages[-1]["content"])]
        if isinstance(failure, Exception):
            raise failure
        return failure

    engine = ScriptedEngine(script)
    async with served(engine, api_key="key") as api, async_client(api, "unknown") as elsewhere:
        session = await api.create()
        async with async_client(api, session) as openai_client:
            create = openai_client.chat.completions.create
            await create(model="m", messages=[user("cut")])
            extended: Any = [user("cut"), {"role": "assistant", "content": "cut off"}, user("go on")]
            with pytest.raises(openai.ConflictError, match="ended by length"):
                await create(model="m", messages=extended)
            assert (await api.metrics())['errors_total{error="PathEndedError"}'] == 1

            with pytest.raises(openai.InternalServerError, match="nothing") as down:
                await create(model="m", messages=[user("down")])
            assert down.value.status_code == 502
            with pytest.raises(openai.RateLimitError, match="too many"):
                await create(model="m", messages=[user("busy")])
            with pytest.raises(openai.BadRequestError, match="too long"):
                await create(model="m", messages=[user("too long")])
        with pytest.raises(openai.NotFoundError, match="no session of this id"):
            await elsewhere.chat.completions.create(model="m", messages=QUESTION)
        with pytest.raises(openai.AuthenticationError, match="the header 'Authorization: Bearer KEY'"):
            await elsewhere.with_options(api_key="wrong").chat.completions.create(model="m", messages=QUESTION)
        assert await api.parents(session) == [None]
    asked = [request.messages[-1]["content"] for request in engine.requests]
    assert asked == ["cut", *["down"] * 3, *["busy"] * 3, "too long"]


async def test_an_engine_that_comes_back_is_found_by_the_retries_of_the_client() -> None:
    def script(request: GenerationRequest) -> Completion:
        if len(engine.requests) == 1:
            raise EngineUnavailableError("engine", got="nothing", expected="", reason="", remedy="")
        return said("4")

    engine = ScriptedEngine(script)
    async with served(engine) as api:
        session = await api.create()
        answer: Any = await sync(
            api, session, lambda openai_client: openai_client.chat.completions.create(model="m", messages=QUESTION)
        )
        assert answer.choices[0].message.content == "4"
        assert len(await api.turns(session)) == 1
