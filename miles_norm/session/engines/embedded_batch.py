"""Continuous batching for the embedded policy: a fixed number of slots that all take one token at a time.

A slot that still reads its prompt takes the next token of it, any other one the token it sampled last, so prompts of
any length and generations of any age share every step. All steps have the shape of all slots, used or not: a generation
gets the same bits alone, among others and in any slot, and whether its prompt was read as a whole or from where an
earlier reply had ended.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_norm.session.completion import FinishReason
from miles_norm.session.engines.chatml import END_OF_CALL, END_OF_TEXT, END_OF_TURN, START_OF_CALL, VOCABULARY_SIZE
from miles_norm.session.engines.embedded_policy import Decoder
from miles_norm.session.engines.protocol import GenerationRequest

__all__ = ["Batch", "Generation"]


@dataclass(eq=False)
class Generation:
    """One request in the batch and what has been sampled for it."""

    request: GenerationRequest
    limit: int
    """Most tokens to sample."""
    random: np.random.Generator
    """Gives one number per sampled token, the k-th one to the k-th token."""
    stops: tuple[list[int], ...] = ()
    """Stop texts as token ids."""
    one_call: bool = False
    """End the reply with its first tool call."""
    prompt: NDArray[np.int64] = field(init=False)
    read: int = 0
    """Tokens of the prompt that the state holds."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.request.token_ids, dtype=np.int64)

    def take(self, tokens: list[int], log_probs: list[float]) -> None:
        """Add sampled tokens until one of them ends the reply."""
        for token, log_prob in zip(tokens, log_probs, strict=True):
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            called = self.one_call and token == END_OF_CALL and START_OF_CALL in self.token_ids
            if token in (END_OF_TURN, END_OF_TEXT) or called or self.stop_at() is not None:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason:
                return

    def stop_at(self) -> int | None:
        """Where in the reply a stop text begins that has just been completed."""
        length = len(self.token_ids)
        return min((length - len(stop) for stop in self.stops if self.token_ids[-len(stop) :] == stop), default=None)


class Batch:
    """Slots, their states, and the sampling of their next tokens.

    Args:
        decoder: Of the policy.
        slots: Sequences at once; also the number of rows of every matrix product.
        steps: Tokens that each slot takes per call of ``advance``.
    """

    def __init__(self, decoder: Decoder, slots: int = 32, steps: int = 8) -> None:
        self.generations: list[Generation | None] = [None] * slots
        self._steps = steps
        self._stored = _StoredStates()
        self.set_decoder(decoder)

    def set_decoder(self, decoder: Decoder) -> None:
        """Change the weights; there must be no generation, since its state would be of both."""
        self._decoder = decoder
        self._states = torch.zeros(len(self.generations), decoder.hidden_size)
        self._tokens = torch.zeros(len(self.generations), dtype=torch.int64)
        self._stored.clear()

    @property
    def free(self) -> list[int]:
        """Slots without a generation."""
        return [slot for slot, generation in enumerate(self.generations) if generation is None]

    def add(self, generation: Generation, slot: int) -> None:
        """Put a generation into a free slot; a prompt that continues an earlier reply starts at its end."""
        read, state = self._stored.longest_prefix(generation.prompt)
        generation.read = read
        with torch.inference_mode():
            self._states[slot] = 0.0 if state is None else state
        self.generations[slot] = generation

    def remove(self, generations: Collection[Generation]) -> None:
        """Free the slots of some of them."""
        self.generations = [None if one in generations else one for one in self.generations]

    def clear(self) -> None:
        """Free all slots."""
        self.generations = [None] * len(self.generations)

    @torch.inference_mode()
    def advance(self) -> list[Generation]:
        """Take ``steps`` tokens in every slot; generations that finished leave it and are returned."""
        plan = _Plan(self._steps, self.generations)
        sampling = _Sampling(self.generations)
        sampled, log_probs, states = [], [], []
        for forced, given, uniform in zip(plan.forced, plan.given, plan.uniforms, strict=True):
            tokens = torch.where(forced, given, self._tokens)
            logits, self._states = self._decoder.step(tokens, self._states)
            self._tokens, chosen = sampling.sample(logits, uniform)
            states.append(self._states)
            sampled.append(self._tokens)
            log_probs.append(chosen)
        tokens_of = torch.stack(sampled, 1).tolist()
        log_probs_of = torch.stack(log_probs, 1).tolist()
        finished = []
        for slot, generation in enumerate(self.generations):
            if generation is None:
                continue
            steps = plan.sampled[slot]
            before = len(generation.token_ids)
            generation.take(tokens_of[slot][steps], log_probs_of[slot][steps])
            if generation.finish_reason:
                if generation.token_ids[-1] == END_OF_TURN:
                    last = steps.start + len(generation.token_ids) - before - 1
                    self._stored.put(generation, states[last][slot].clone())
                finished.append(generation)
                self.generations[slot] = None
        return finished


class _Plan:
    """What the slots take in the next steps: tokens of prompts, and a random number per token to sample, ``[S, B]``."""

    def __init__(self, steps: int, generations: list[Generation | None]) -> None:
        forced = np.zeros((steps, len(generations)), dtype=bool)
        given = np.zeros((steps, len(generations)), dtype=np.int64)
        uniforms = np.zeros((steps, len(generations)))
        self.sampled: list[slice] = []
        """Steps of each slot whose sample is a token of its reply."""
        for slot, generation in enumerate(generations):
            start = stop = 0
            if generation is not None:
                prompt = generation.prompt[generation.read : generation.read + steps]
                forced[: len(prompt), slot] = True
                given[: len(prompt), slot] = prompt
                generation.read += len(prompt)
                if generation.read == len(generation.prompt):
                    # The token that follows the prompt is sampled when its last token is read.
                    start = max(len(prompt) - 1, 0)
                    stop = min(steps, start + generation.limit - len(generation.token_ids))
                    uniforms[start:stop, slot] = generation.random.random(stop - start)
            self.sampled.append(slice(start, stop))
        self.forced, self.given = torch.from_numpy(forced), torch.from_numpy(given)
        self.uniforms = torch.from_numpy(uniforms)


class _Sampling:
    """Temperature and nucleus of every slot."""

    def __init__(self, generations: list[Generation | None]) -> None:
        requests = [None if generation is None else generation.request for generation in generations]
        temperature = torch.tensor([1.0 if request is None else request.temperature for request in requests])
        top_p = torch.tensor([1.0 if request is None else request.top_p for request in requests], dtype=torch.float64)
        self._greedy = temperature == 0
        self._temperature = temperature.masked_fill(self._greedy, 1.0)[:, None]
        self._top_p = top_p[:, None]
        self._any_greedy = bool(self._greedy.any())
        self._any_tempered = bool((self._temperature != 1).any())
        self._any_nucleus = bool((top_p < 1).any())

    def sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """A token ``[B]`` per slot, and its log-probability at temperature 1 over the whole vocabulary."""
        log_probs = torch.log_softmax(logits, dim=-1)
        probs = (self._tempered(log_probs) if self._any_tempered else log_probs).double().exp()
        if self._any_nucleus:
            probs = torch.where(self._top_p < 1, _nucleus(probs, self._top_p), probs)
        ends = probs.cumsum(dim=-1)
        tokens = torch.searchsorted(ends, uniform[:, None] * ends[:, -1:], right=True).clamp_(max=VOCABULARY_SIZE - 1)
        if self._any_greedy:
            tokens = torch.where(self._greedy[:, None], log_probs.argmax(dim=-1, keepdim=True), tokens)
        return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]

    def _tempered(self, log_probs: Tensor) -> Tensor:
        """Log-probs at the temperatures, those at 1 as they are."""
        # Divided by a tiny temperature, all but the largest may be -inf; that one has to stay a number.
        below = log_probs - log_probs.amax(dim=-1, keepdim=True)
        return torch.where(self._temperature == 1, log_probs, torch.log_softmax(below / self._temperature, dim=-1))


def _nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities without the least likely tokens that the first ``top_p`` of the mass can do without."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    # A token stays while the mass before it is short of top_p, so that the likeliest always stays.
    kept = ordered.cumsum(dim=-1) - ordered < top_p
    return torch.zeros_like(probs).scatter_(-1, order, ordered * kept)


class _StoredStates:
    """States at the ends of finished replies, so that the next turn of a conversation reads only what is new.

    The key is a digest of all tokens before the end of the turn. The oldest are forgotten.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._states: OrderedDict[bytes, Tensor] = OrderedDict()
        self._capacity = capacity

    def clear(self) -> None:
        self._states.clear()

    def put(self, generation: Generation, state: Tensor) -> None:
        tokens = np.concatenate([generation.prompt, np.asarray(generation.token_ids[:-1], dtype=np.int64)])
        key = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
        self._states[key] = state
        self._states.move_to_end(key)
        if len(self._states) > self._capacity:
            self._states.popitem(last=False)

    def longest_prefix(self, prompt: NDArray[np.int64]) -> tuple[int, Tensor | None]:
        """How many tokens of a prompt a stored state holds, and that state; at least one token is left to read."""
        digest = hashlib.blake2b(digest_size=16)
        found: tuple[int, Tensor | None] = 0, None
        start = 0
        for end in np.flatnonzero(prompt == END_OF_TURN).tolist():
            digest.update(prompt[start:end].tobytes())
            state = self._states.get(digest.digest())
            found = found if state is None else (end, state)
            start = end
        return found
