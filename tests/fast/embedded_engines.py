"""Embedded engines in use, policies whose replies are known, and requests to them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import torch

from miles_norm.session.completion import Completion
from miles_norm.session.engines.chatml import ChatMLRenderer
from miles_norm.session.engines.embedded import EmbeddedEngine
from miles_norm.session.engines.embedded_policy import EmbeddedPolicy
from miles_norm.session.engines.protocol import GenerationRequest

T = TypeVar("T")
MESSAGES = [{"role": "user", "content": "what is 3+4?"}]
RENDERER = ChatMLRenderer()
PROMPT = np.array(RENDERER.encode(RENDERER.render(MESSAGES, add_generation_prompt=True)), dtype=np.int32)


def run(engine: EmbeddedEngine, use: Callable[[EmbeddedEngine], Awaitable[T]]) -> T:
    async def started() -> T:
        await engine.start()
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(started())


def ask(token_ids: Any = PROMPT, **settings: Any) -> GenerationRequest:
    return GenerationRequest(token_ids=np.asarray(token_ids), messages=MESSAGES, **settings)


def sample(engine: EmbeddedEngine, *requests: GenerationRequest) -> list[Completion]:
    """All of them at once."""

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return run(engine, use)


def recomputed(policy: EmbeddedPolicy, prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """Log-probs of the reply by one forward over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
    with torch.no_grad():
        log_probs = policy(ids[None])[0].log_softmax(dim=-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def sharp_policy(seed: int = 0, scale: float = 4.0) -> EmbeddedPolicy:
    """Larger weights, so that what was read before matters to every token; its replies end by length."""
    policy = EmbeddedPolicy(32, 16, seed=seed)
    with torch.no_grad():
        policy.gru.weight_hh_l0.mul_(scale)
        policy.gru.weight_ih_l0.mul_(scale)
        policy.head.weight.mul_(scale)
        policy.head.bias[256:] = -1e4
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


def same(first: Completion, second: Completion) -> bool:
    """The same bits."""
    return np.array_equal(first.token_ids, second.token_ids) and np.array_equal(first.log_probs, second.log_probs)
