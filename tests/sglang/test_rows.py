"""Rows of whole rollouts on a real SGLang server: every log-prob is that of the model on exactly these tokens."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from conversations import user
from scripted import Api, served
from sglang_servers import ROOT, Models, Server, Transformers, sampled

from miles_norm.samples import Sample
from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
from miles_norm.session.engines.sglang import SGLangEngine
from miles_norm.session.rollout import RolloutOptions, run_rollouts

sys.path.insert(0, str(ROOT / "examples" / "session_v2_agentic"))

from agent import TOOLS, open_boxes

pytestmark = pytest.mark.anyio

PROMPTS = ["open box 5", "open boxes 1 and 7", "open boxes 0, 3 and 8", "open boxes 2, 4 and 6"]


async def branched_session(api: Api) -> list[Sample]:
    """A turn with two branches below it, one of which branches again, and a retry of the first turn.

    Turns are asked for again until they can be continued; a reply that was cut off cannot.
    """
    session = await api.create()

    async def turn(messages: list[dict]) -> list[dict]:
        while True:
            choice = (await api.turn(session, messages, tools=TOOLS, max_tokens=120))["choices"][0]
            if choice["finish_reason"] != "length":
                return [*messages, choice["message"]]

    def answered(messages: list[dict], text: str) -> list[dict]:
        calls = messages[-1].get("tool_calls")
        if not calls:
            return [*messages, user(text)]
        return [*messages, *({"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls)]

    first = await turn([user("0 so far, box 9")])
    left = await turn(answered(first, "open"))
    await turn(answered(left, "1 so far, box 2"))
    await turn(answered(left, "1 so far, box 3"))
    await turn(answered(first, "shut"))
    await turn([user("0 so far, box 9")])
    return await api.rows(session, index=0, picker="keep_all")


async def test_transformers_gives_the_log_probs_of_every_row(
    sglang: Server, models: Models, transformers: Transformers
) -> None:
    engine = SGLangEngine(sglang.url, HuggingFaceRenderer(models.first))
    async with served(engine) as api:
        options = RolloutOptions(n_samples_per_prompt=6, picker="keep_all", concurrency=8)
        rows = await run_rollouts(open_boxes, PROMPTS, api.address, options)
        branches = await branched_session(api)
    assert {row.metadata.get("error") for row in rows} == {None}
    fan_outs = np.unique([row.rollout_id for row in rows], return_counts=True)[1]
    assert len(fan_outs) == len(PROMPTS) * 6
    assert fan_outs.max() >= 3
    assert max(len(row.metadata["leaf"]["path_node_ids"]) for row in rows) >= 2
    # Turns that another row owns are there with their log-probs, under a mask of 0.
    shared = [int((sampled(row) & ~np.asarray(row.loss_mask, bool)).sum()) for row in branches]
    assert sum(length > 0 for length in shared) >= 2

    altered = replace(branches[0], tokens=branches[0].tokens.copy())
    altered.tokens[3] ^= 1
    *expected, of_altered = transformers.log_probs([*rows, *branches, altered], models.first)
    tokens = 0
    for row, values in zip([*rows, *branches], expected, strict=True):
        known = sampled(row)
        assert known[np.asarray(row.loss_mask, bool)].all()
        np.testing.assert_allclose(np.asarray(row.rollout_log_probs)[known], values[known], rtol=0, atol=1e-4)
        tokens += int(np.sum(row.loss_mask))
    assert tokens > 500
    # One bit of one prompt token is enough to be noticed.
    known = sampled(altered)
    assert np.abs(np.asarray(altered.rollout_log_probs)[known] - of_altered[known]).max() > 1e-3


async def test_the_prompt_of_a_turn_is_what_was_sampled_and_sent_before(sglang: Server, models: Models) -> None:
    async with served(SGLangEngine(sglang.url, HuggingFaceRenderer(models.first))) as api:
        rows = await branched_session(api)
    paths = {tuple(row.metadata["leaf"]["path_node_ids"]): row for row in rows}
    longest = [path for path in paths if len(path) == 3]
    assert len(longest) == 2
    one, other = (paths[path].tokens.tolist() for path in longest)
    same = next(position for position, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    # They part where their second tool answers or questions differ, behind two replies.
    renderer = HuggingFaceRenderer(models.first)
    assert renderer.decode(one[:same]).count("<|im_start|>assistant\n") == 2
