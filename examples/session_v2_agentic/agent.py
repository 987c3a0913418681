"""An agent that opens boxes: it calls tools, repeats what went wrong, asks a sub-agent, and compacts its context.

A task names one to three boxes. For each the model may open it with a tool, let a sub-agent do so, or claim that it is
done. What the model does decides into how many conversations, and so into how many rows, a rollout is cut:

* a reply that is neither "done" nor a proper tool call is asked for again: a sibling of the first one;
* a sub-agent has a conversation of its own;
* after each box the context is compacted: the next conversation begins with the number of boxes so far.

A box counts once its conversation has come to an end. The reward is 1 if every box counts, else 0.
"""

from __future__ import annotations

import functools
import re
import ssl
from typing import Any

import openai

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("open", "ask")]
"""``open`` opens the box that the conversation is about, ``ask`` lets a sub-agent do it."""
ATTEMPTS = 3
"""Replies to one question before the agent gives up."""
TURNS = 4
"""Turns of one conversation."""


async def open_boxes(
    *, base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kwargs: Any
) -> dict[str, Any]:
    """Open the boxes that the prompt names."""
    boxes = re.findall(r"\d+", prompt)
    opened: set[str] = set()
    settings = {"model": "policy", "max_tokens": 80, **request_kwargs}
    http = openai.DefaultAsyncHttpxClient(verify=_certificates())
    key = metadata.get("api_key", "none")
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, http_client=http) as client:
        for number, box in enumerate(boxes):
            if not await _handle(client, settings, f"{number} so far, box {box}", box, opened):
                opened.discard(box)
                break
    return {"reward": float(opened == set(boxes)), "opened": sorted(opened)}


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: each client would take some 30 ms for it, more than for a request."""
    return ssl.create_default_context()


async def _handle(
    client: openai.AsyncOpenAI, settings: dict[str, Any], question: str, box: str, opened: set[str], depth: int = 0
) -> bool:
    """One conversation about one box; False if the model does not come to an end."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        reply = await _usable_reply(client, settings, messages)
        if reply is None:
            return False
        if not reply.tool_calls:
            return True
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            if call.function.name == "ask" and depth == 0:
                await _handle(client, settings, f"help, box {box}", box, opened, depth=1)
            else:
                opened.add(box)
            answer = "open" if box in opened else "shut"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return False


async def _usable_reply(client: openai.AsyncOpenAI, settings: dict[str, Any], messages: list[Any]) -> Any:
    """A reply that is "done" or a tool call; asked for again, with the same messages, while it is neither."""
    for _ in range(ATTEMPTS):
        if "seed" in settings:
            settings["seed"] += 1  # a question asked again with the same seed gets the same answer
        answer = await client.chat.completions.create(messages=messages, tools=TOOLS, **settings)
        choice = answer.choices[0]
        if choice.finish_reason == "tool_calls" or (choice.message.content or "").strip() == "done":
            return choice.message
    return None
