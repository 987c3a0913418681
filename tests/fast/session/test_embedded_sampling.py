"""The embedded engine: log-probs, sampling, seeds, stop texts, tool calls, and requests that it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_engines import MESSAGES, PROMPT, ask, fixed_policy, recomputed, run, same, sample, sharp_policy

from miles_norm.errors import EngineRejectedError
from miles_norm.session.completion import Completion
from miles_norm.session.engines.embedded import EmbeddedEngine
from miles_norm.session.engines.embedded_batch import Batch
from miles_norm.session.engines.embedded_policy import EmbeddedPolicy
from miles_norm.session.engines.protocol import Engine
from miles_norm.session.prompt import next_prompt
from miles_norm.session.tree import TrajectoryForest


def test_it_is_an_engine() -> None:
    assert isinstance(EmbeddedEngine(), Engine)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"temperature": 1.7, "top_p": 0.8}, {"temperature": 0}])
def test_log_probs_are_those_of_the_policy(settings: dict[str, float]) -> None:
    policy = sharp_policy()
    prompts = [PROMPT[:1], PROMPT, np.tile(PROMPT, 40)]
    found = sample(EmbeddedEngine(policy), *(ask(p, max_tokens=60, seed=k, **settings) for k, p in enumerate(prompts)))
    for prompt, completion in zip(prompts, found, strict=True):
        assert len(completion.token_ids) > 1
        assert np.abs(recomputed(policy, prompt, completion) - completion.log_probs).max() < 1e-5
        assert completion.log_probs.dtype == np.float32
        assert completion.token_ids.dtype == np.int32


def test_sampling_by_hand() -> None:
    # In order of ids, A is sampled below 3/4 and B above. Log-probs are ln 3/4 and ln 1/4 at every temperature.
    engine = EmbeddedEngine(fixed_policy({65: 0.75, 66: 0.25}))
    drawn = np.random.default_rng(7).random(50)
    # At temperature 2 the odds 3:1 become sqrt 3 : 1.
    for temperature, bound in ((1.0, 0.75), (2.0, np.sqrt(3) / (np.sqrt(3) + 1))):
        [completion] = sample(engine, ask(max_tokens=50, seed=7, temperature=temperature))
        assert completion.token_ids.tolist() == [65 if value < bound else 66 for value in drawn]
        assert np.unique(completion.token_ids).tolist() == [65, 66]
        expected = np.log(np.where(completion.token_ids == 65, 0.75, 0.25))
        np.testing.assert_allclose(completion.log_probs, expected, rtol=1e-6)
        assert completion.finish_reason == "length"
        assert completion.message["content"] == "".join("A" if value < bound else "B" for value in drawn)


def test_nucleus_by_hand() -> None:
    # The mass before C, D, A, B (likeliest first, A before B at equal odds) is 0, 0.5, 0.8, 0.9.
    policy = fixed_policy({65: 0.1, 66: 0.1, 67: 0.5, 68: 0.3})
    kept = {0.4: {67}, 0.55: {67, 68}, 0.85: {65, 67, 68}, 0.95: {65, 66, 67, 68}, 1.0: {65, 66, 67, 68}}
    found = sample(EmbeddedEngine(policy), *(ask(max_tokens=200, seed=1, top_p=top_p) for top_p in kept))
    assert [set(completion.token_ids.tolist()) for completion in found] == list(kept.values())
    [greedy] = sample(EmbeddedEngine(policy), ask(max_tokens=5, temperature=0))
    assert greedy.token_ids.tolist() == [67] * 5


@pytest.mark.parametrize("temperature", [1e-37, 1e-40, 1e-44, 1e-300])
def test_the_lower_the_temperature_the_likelier_the_likeliest(temperature: float) -> None:
    # ln 0.6 and ln 0.4 over 1e-40 are beyond float32, as the temperature itself is below its normal range.
    engine = EmbeddedEngine(fixed_policy({65: 0.4, 66: 0.6}))
    [completion] = sample(engine, ask(max_tokens=20, seed=3, temperature=temperature))
    assert completion.token_ids.tolist() == [66] * 20
    np.testing.assert_allclose(completion.log_probs, np.log(0.6), rtol=1e-6)


def test_a_seeded_request_gives_the_same_bits_alone_and_among_others() -> None:
    """In another slot, after a wait, beside other temperatures, and with longer prompts read at the same time."""
    policy = sharp_policy()
    wanted = ask(max_tokens=80, seed=11)
    [alone] = sample(EmbeddedEngine(policy), wanted)
    others = [
        ask(np.tile(PROMPT, 1 + k % 4), max_tokens=1 + 3 * k, seed=k, temperature=k % 3, top_p=1 - k % 2 / 2)
        for k in range(50)
    ]
    crowd = sample(EmbeddedEngine(policy), *others[:20], wanted, *others[20:], wanted)
    assert same(crowd[20], alone)
    assert same(crowd[-1], alone)
    [other_seed] = sample(EmbeddedEngine(policy), ask(max_tokens=80, seed=12))
    assert other_seed.token_ids.tolist() != alone.token_ids.tolist()


def test_without_a_seed_replies_differ() -> None:
    first, second = sample(EmbeddedEngine(), ask(max_tokens=40), ask(max_tokens=40))
    assert first.token_ids.tolist() != second.token_ids.tolist()
    [negative] = sample(EmbeddedEngine(), ask(max_tokens=4, seed=-1))
    assert len(negative.token_ids) == 4


def ended_turn(engine: EmbeddedEngine) -> Completion:
    for seed in range(20):
        [completion] = sample(engine, ask(max_tokens=300, seed=seed))
        if completion.finish_reason == "stop":
            return completion
    raise AssertionError("no reply of 20 ended by itself")


def test_a_continued_conversation_gives_the_bits_of_a_new_one() -> None:
    engine = EmbeddedEngine()
    first = ended_turn(engine)
    following = engine.renderer.encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    prompt = np.concatenate([PROMPT, first.token_ids, following])
    [continued] = sample(engine, ask(prompt, max_tokens=50, seed=5))
    [anew] = sample(EmbeddedEngine(), ask(prompt, max_tokens=50, seed=5))
    assert same(continued, anew)


def test_a_continued_conversation_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    add = Batch.add
    monkeypatch.setattr(Batch, "add", lambda self, one, slot: (add(self, one, slot), read.append(one.read)))
    engine = EmbeddedEngine()
    first = ended_turn(engine)
    prompt = np.concatenate([PROMPT, first.token_ids, PROMPT])
    sample(engine, ask(prompt, max_tokens=1), ask(prompt[1:], max_tokens=1))
    # All but the token that ended the reply; nothing of another beginning.
    assert sorted(read[-2:]) == [0, len(PROMPT) + len(first.token_ids) - 1]
    # A state belongs to its weights.
    run(engine, lambda engine: engine.load_weights(EmbeddedPolicy(seed=1).state_dict(), "1"))
    sample(engine, ask(prompt, max_tokens=1))
    assert read[-1] == 0


@pytest.mark.parametrize(
    ("stop", "content", "tokens"),
    [
        (("C",), "ABABAB", 7),
        (("zzz", "BABC"), "ABA", 7),
        (("AB",), "", 2),
        (("BC", "ABC"), "ABAB", 7),
        (("D",), "ABABABCX", 8),
    ],
)
def test_stop_texts_are_sampled_but_not_said(stop: tuple[str, ...], content: str, tokens: int) -> None:
    policy = taught_policy("ABABABCX<|im_start|>")
    [completion] = sample(EmbeddedEngine(policy), ask(stop=stop, temperature=0, max_tokens=8))
    assert completion.message == {"role": "assistant", "content": content}
    assert len(completion.token_ids) == tokens
    assert completion.finish_reason == ("length" if stop == ("D",) else "stop")


def taught_policy(reply: str) -> EmbeddedPolicy:
    """A policy trained on one reply to the prompt."""
    ids = torch.tensor([*PROMPT.tolist(), *EmbeddedEngine().renderer.encode(reply)])
    policy = EmbeddedPolicy(64, 32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    for _ in range(400):
        log_probs = policy(ids[None, :-1])[0].log_softmax(dim=-1)[len(PROMPT) - 1 :]
        of_reply = log_probs.gather(1, ids[len(PROMPT) :, None])
        if of_reply.min() > np.log(0.7):
            return policy
        optimizer.zero_grad()
        (-of_reply.mean()).backward()
        optimizer.step()
    raise AssertionError("the policy did not learn one reply")


TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_a_policy_learns_to_call_a_tool(tmp_path: Path) -> None:
    """Training from the forward, weights through a file, and the reply as OpenAI has it."""
    reply = 'So<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call><|im_end|>'
    taught_policy(reply).save(tmp_path / "model.safetensors")
    engine = EmbeddedEngine(EmbeddedPolicy(64, 32), weight_version="before")

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        untrained = await engine.generate(ask(temperature=0, max_tokens=60))
        await engine.update_weights(tmp_path, "after")
        given = await engine.generate(ask(temperature=0, tools=TOOLS))
        declined = await engine.generate(ask(temperature=0, tools=TOOLS, extra={"tool_choice": "none"}))
        return [untrained, given, declined, await engine.generate(ask(temperature=0))]

    untrained, given, *texts = run(engine, use)
    assert (untrained.weight_version, given.weight_version) == ("before", "after")
    assert engine.renderer.decode(given.token_ids.tolist()) == reply
    assert given.finish_reason == "tool_calls"
    [call] = given.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 3}'}
    assert given.message["content"] == "So"
    for text in texts:
        assert text.message == {"role": "assistant", "content": reply.removesuffix("<|im_end|>")}
        assert text.finish_reason == "stop"


CALL = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'


def test_a_reply_may_be_asked_to_have_one_call() -> None:
    """It ends with the first one, so that its tokens say no more than its message."""
    engine = EmbeddedEngine(taught_policy(f"{CALL}or<|im_end|>"))
    several, single, text = sample(
        engine,
        ask(temperature=0, tools=TOOLS, extra={"parallel_tool_calls": True, "response_format": {"type": "text"}}),
        ask(temperature=0, tools=TOOLS, extra={"parallel_tool_calls": False}),
        ask(temperature=0, extra={"parallel_tool_calls": False}),
    )
    assert engine.renderer.decode(several.token_ids.tolist()) == f"{CALL}or<|im_end|>"
    assert engine.renderer.decode(single.token_ids.tolist()) == CALL
    assert [call["function"]["name"] for call in single.message["tool_calls"]] == ["a"]
    assert (several.message["content"], single.message["content"]) == ("or", "")
    assert (several.finish_reason, single.finish_reason, text.finish_reason) == ("tool_calls", "tool_calls", "stop")
    assert same(several, text)
    # The conversation goes on from these tokens, with the end of the turn behind them.
    forest = TrajectoryForest("loose")
    node = forest.commit(forest.attach(MESSAGES, TOOLS), PROMPT, single)
    answer = {"role": "tool", "tool_call_id": "0", "content": "7"}
    attached = forest.attach([*MESSAGES, single.message, answer], TOOLS)
    assert attached.parent == node.seq
    following = next_prompt(forest, attached, engine.renderer)
    tokens = following.token_ids[len(PROMPT) + len(single.token_ids) :].tolist()
    assert engine.renderer.decode(tokens).startswith("<|im_end|>\n<|im_start|>tool\n7")


@pytest.mark.parametrize(
    ("token_ids", "settings", "match"),
    [
        ([1, 261], {}, r"token ids from 1 to 261 in a vocabulary of 261"),
        ([-1, 2], {}, r"token ids from -1 to 2"),
        ([1.5], {}, r"token_ids of type float64 and shape \(1,\)"),
        ([[1]], {}, r"token_ids of type int64 and shape \(1, 1\)"),
        ([1] * 100, {}, r"a prompt of 100 tokens in a context of 100"),
        (
            [1],
            {"extra": {"top_k": 5, "logit_bias": {"3": 1}, "min_p": 0}},
            r"top_k = 5, .* only -1; logit_bias = \{",
        ),
        (
            [1],
            {"extra": {"tool_choice": "required"}},
            r"'required', where it takes only 'auto' or 'none'",
        ),
        ([1], {"extra": {"response_format": {"type": "json_object"}}}, r"response_format = .* only \{'type': 'text'\}"),
        ([1], {"extra": {"best_of": 2}}, r"best_of = 2, where it takes no such field"),
    ],
)
def test_requests_that_are_refused(token_ids: Any, settings: dict[str, Any], match: str) -> None:
    async def use(engine: EmbeddedEngine) -> None:
        with pytest.raises(EngineRejectedError, match=match) as raised:
            await engine.generate(ask(token_ids, **settings))
        assert raised.value.status == 400
        error = json.loads(raised.value.body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "EngineRejectedError")
        fields = settings.get("extra", {})
        assert error["param"] == (next(iter(fields)) if len(fields) == 1 else None)
        assert len((await engine.generate(ask([1] * 99))).token_ids) == 1

    run(EmbeddedEngine(context_length=100), use)


def test_making_a_policy_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    EmbeddedPolicy()
    assert torch.equal(torch.get_rng_state(), before)
