"""The embedded engine: log-probs, seeds, batching, cancellation and new weights."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from miles_norm.errors import EngineRejectedError, EngineUnavailableError
from miles_norm.session.completion import Completion
from miles_norm.session.engines.embedded import EmbeddedEngine
from miles_norm.session.engines.embedded_batch import Batch
from miles_norm.session.engines.embedded_policy import EmbeddedPolicy
from miles_norm.session.engines.protocol import Engine, GenerationRequest

T = TypeVar("T")
MESSAGES = [{"role": "user", "content": "what is 3+4?"}]


def run(engine: EmbeddedEngine, use: Callable[[EmbeddedEngine], Awaitable[T]]) -> T:
    async def started() -> T:
        await engine.start()
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(started())


def prompt_of(messages: list[dict[str, Any]]) -> np.ndarray:
    renderer = EmbeddedEngine().renderer
    return np.array(renderer.encode(renderer.render(messages, add_generation_prompt=True)), dtype=np.int32)


PROMPT = prompt_of(MESSAGES)


def ask(token_ids: Any = PROMPT, **settings: Any) -> GenerationRequest:
    return GenerationRequest(token_ids=np.asarray(token_ids), messages=MESSAGES, **settings)


def sample(engine: EmbeddedEngine, *requests: GenerationRequest) -> list[Completion]:
    """All of them at once."""

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return run(engine, use)


def same(first: Completion, second: Completion) -> bool:
    return (
        first.token_ids.tolist() == second.token_ids.tolist() and first.log_probs.tolist() == second.log_probs.tolist()
    )


def recomputed(policy: EmbeddedPolicy, prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """Log-probs of the reply by one forward over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
    with torch.no_grad():
        log_probs = policy(ids[None])[0].log_softmax(dim=-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def sharp_policy(seed: int = 0, scale: float = 4.0) -> EmbeddedPolicy:
    """Larger weights, so that what was read before matters to every token."""
    policy = EmbeddedPolicy(32, 16, seed=seed)
    with torch.no_grad():
        policy.gru.weight_hh_l0.mul_(scale)
        policy.gru.weight_ih_l0.mul_(scale)
        policy.head.weight.mul_(scale)
    return policy


def fixed_policy(probabilities: dict[int, float]) -> EmbeddedPolicy:
    """The same distribution whatever was read."""
    policy = EmbeddedPolicy(8, 4)
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.bias.fill_(-1e4)
        for token, probability in probabilities.items():
            policy.head.bias[token] = np.log(probability)
    return policy


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


def test_late_requests_join_the_batch() -> None:
    async def use(engine: EmbeddedEngine) -> None:
        long = asyncio.create_task(engine.generate(ask(max_tokens=15_000, seed=0)))
        await asyncio.sleep(0)
        for seed in range(3):
            assert len((await engine.generate(ask(max_tokens=20, seed=seed))).token_ids) == 20
        assert not long.done()
        long.cancel()

    run(EmbeddedEngine(fixed_policy({65: 1.0})), use)


def test_a_cancelled_task_ends_its_own_generation_only() -> None:
    async def use(engine: EmbeddedEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(ask(max_tokens=10_000, seed=k))) for k in range(4)]
        waiting = asyncio.create_task(engine.generate(ask(max_tokens=10_000)))
        short = asyncio.create_task(engine.generate(ask(max_tokens=30, seed=9)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        tasks[1].cancel()
        # There are four slots: this one gets the one that was given up.
        assert len((await short).token_ids) == 30
        assert [task.done() for task in tasks] == [False, True, False, False]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len((await engine.generate(ask(max_tokens=5))).token_ids) == 5

    run(EmbeddedEngine(fixed_policy({65: 1.0}), slots=4), use)


def test_torch_works_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[tuple[str, int]] = set()
    advance = Batch.advance

    def noted(self: Batch) -> Any:
        threads.add((threading.current_thread().name, torch.get_num_threads()))
        return advance(self)

    monkeypatch.setattr(Batch, "advance", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sample(EmbeddedEngine(), ask(max_tokens=3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    [(name, number)] = threads
    assert name.startswith("embedded-engine")
    assert number == 1


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


def test_a_generation_is_of_one_version() -> None:
    """An update waits for what runs, and what comes later waits for the update."""
    old, new = sharp_policy(0), sharp_policy(1)

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        running = asyncio.create_task(engine.generate(ask(max_tokens=300, seed=1)))
        await asyncio.sleep(0.01)
        update = asyncio.create_task(engine.load_weights(new.state_dict(), "1"))
        await asyncio.sleep(0.01)
        late = await engine.generate(ask(max_tokens=300, seed=2))
        assert update.done()
        return [await running, late]

    first, late = run(EmbeddedEngine(old, weight_version="0"), use)
    assert (first.weight_version, late.weight_version) == ("0", "1")
    assert np.abs(recomputed(old, PROMPT, first) - first.log_probs).max() < 1e-5
    assert np.abs(recomputed(new, PROMPT, late) - late.log_probs).max() < 1e-5


def test_training_the_policy_does_not_reach_the_engine() -> None:
    policy = sharp_policy()
    engine = EmbeddedEngine(policy)
    [before] = sample(engine, ask(max_tokens=30, seed=1))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    [after] = sample(engine, ask(max_tokens=30, seed=1))
    assert same(before, after)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    weights = EmbeddedPolicy().state_dict()
    weights["head.weight"] = weights["head.weight"][:5]
    weights["embedding.weight"] = weights["embedding.weight"].clone().fill_(torch.nan)
    weights["other"] = weights.pop("head.bias")
    (tmp_path / "text").write_text("no weights")

    async def use(engine: EmbeddedEngine) -> None:
        match = (
            r"head\.bias is missing; embedding\.weight has values that are no finite numbers; .*"
            r"head\.weight has shape \[5, 128\] instead of \[261, 128\]; other is unknown"
        )
        with pytest.raises(EngineRejectedError, match=match):
            await engine.load_weights(weights, "1")
        with pytest.raises(EngineRejectedError, match=r"weights .*text: .*header"):
            await engine.update_weights(tmp_path / "text", "1")
        with pytest.raises(EngineRejectedError, match=r"model\.safetensors: No such file or directory"):
            await engine.update_weights(tmp_path, "1")
        assert (await engine.generate(ask(max_tokens=3))).weight_version == "0"

    run(EmbeddedEngine(), use)


@pytest.mark.parametrize(
    ("token_ids", "settings", "match"),
    [
        ([1, 261], {}, r"token ids from 1 to 261 in a vocabulary of 261"),
        ([-1, 2], {}, r"token ids from -1 to 2"),
        ([1.5], {}, r"token_ids of type float64 and shape \(1,\)"),
        ([[1]], {}, r"token_ids of type int64 and shape \(1, 1\)"),
        ([1] * 100, {}, r"a prompt of 100 tokens in a context of 100"),
        ([1], {"extra": {"top_k": 5, "logit_bias": {}, "min_p": 0}}, r"top_k = 5; logit_bias = \{\}"),
    ],
)
def test_requests_that_are_refused(token_ids: Any, settings: dict[str, Any], match: str) -> None:
    async def use(engine: EmbeddedEngine) -> None:
        with pytest.raises(EngineRejectedError, match=match) as raised:
            await engine.generate(ask(token_ids, **settings))
        assert raised.value.status == 400
        assert len((await engine.generate(ask([1] * 99))).token_ids) == 1

    run(EmbeddedEngine(context_length=100), use)


def test_an_engine_that_is_not_running() -> None:
    engine = EmbeddedEngine(fixed_policy({65: 1.0}))

    async def use() -> None:
        assert not await engine.health()
        for used in (engine.generate(ask()), engine.load_weights({}, "1"), engine.update_weights("x", "1")):
            with pytest.raises(EngineUnavailableError, match="not started"):
                await used
        await engine.close()
        await engine.start()
        assert await engine.health()
        running = asyncio.create_task(engine.generate(ask()))
        update = asyncio.create_task(engine.load_weights(engine_weights(), "1"))
        await asyncio.sleep(0.01)
        await engine.close()
        for task in (running, update):
            with pytest.raises(EngineUnavailableError, match="it was closed"):
                await task
        assert not await engine.health()
        await engine.start()
        assert len((await engine.generate(ask(max_tokens=3))).token_ids) == 3
        await engine.close()

    asyncio.run(use())


def engine_weights() -> dict[str, torch.Tensor]:
    return EmbeddedPolicy(8, 4).state_dict()


def test_when_sampling_breaks_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Batch) -> None:
        raise MemoryError("no room")

    async def use(engine: EmbeddedEngine) -> None:
        monkeypatch.setattr(Batch, "advance", broken)
        with pytest.raises(EngineUnavailableError, match="sampling failed: MemoryError: no room"):
            await engine.generate(ask())
        assert not await engine.health()

    run(EmbeddedEngine(), use)


def test_making_a_policy_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    EmbeddedPolicy()
    assert torch.equal(torch.get_rng_state(), before)
