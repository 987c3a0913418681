"""The default engine: a tiny policy sampled in this process, with nothing to download or to start."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.errors import DumpError, EngineUnavailableError, shown
from miles_norm.session.completion import Completion
from miles_norm.session.engines.chatml import END_OF_TEXT, END_OF_TURN, VOCABULARY_SIZE, ChatMLRenderer
from miles_norm.session.engines.embedded_batch import Batch, Generation
from miles_norm.session.engines.embedded_policy import Decoder, EmbeddedPolicy, load_weights
from miles_norm.session.engines.protocol import GenerationRequest, refuse

__all__ = ["EmbeddedEngine"]

# Fields of OpenAI's and SGLang's requests, and the values of them that ask for nothing beyond what this engine does.
_UNDERSTOOD: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_k": (-1,),
}


class EmbeddedEngine:
    """Samples an ``EmbeddedPolicy`` on the CPU, all requests that are there in one batch.

    A request that arrives while others run joins them at the next step. The log-probability of a token is that of the
    policy at temperature 1 over the whole vocabulary, whatever temperature and ``top_p`` it was sampled with: a forward
    of the policy over the whole sequence gives the same to float32 rounding. A seeded request gives the same bits
    however many others run beside it, on one machine and version of PyTorch. A generation is sampled under one version
    of the weights: an update lets the running ones finish, and later ones wait for it.

    Torch works in a thread of its own and takes one core.

    Args:
        policy: Copied; what happens to it later does not reach the engine. By default a new one, untrained.
        weight_version: Of the policy's weights.
        slots: Requests sampled at once; more of them wait.
        context_length: Most tokens of prompt and reply together.

    >>> async def sample():
    ...     engine = EmbeddedEngine()
    ...     await engine.start()
    ...     messages = [{"role": "user", "content": "hi"}]
    ...     ids = engine.renderer.encode(engine.renderer.render(messages, add_generation_prompt=True))
    ...     request = GenerationRequest(token_ids=np.array(ids, np.int32), messages=messages, max_tokens=5, seed=1)
    ...     completion = await engine.generate(request)
    ...     await engine.close()
    ...     return completion
    >>> completion = asyncio.run(sample())
    >>> completion.token_ids.shape, completion.log_probs.dtype, completion.finish_reason, completion.weight_version
    ((5,), dtype('float32'), 'length', '0')
    """

    def __init__(
        self,
        policy: EmbeddedPolicy | None = None,
        *,
        weight_version: str = "0",
        slots: int = 32,
        context_length: int = 16_384,
    ) -> None:
        self.renderer = ChatMLRenderer()
        self._policy = policy or EmbeddedPolicy()
        self._version, self._context_length = weight_version, context_length
        self._batch = Batch(Decoder(self._policy), slots)
        self._waiting: deque[Generation] = deque()
        self._futures: dict[Generation, asyncio.Future[Completion]] = {}
        self._updates: deque[tuple[EmbeddedPolicy, str, asyncio.Future[None]]] = deque()
        self._seeds = np.random.SeedSequence()
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the thread that samples."""
        self._wake = asyncio.Event()
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "embedded-engine")
        await self._in_thread(_take_one_core)
        torch.set_num_threads(threads)
        self._runner = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop sampling; what runs or waits raises ``EngineUnavailableError``."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        runner.cancel()
        await asyncio.wait([runner])
        self._thread.shutdown()
        self._fail("it was closed")

    async def health(self) -> bool:
        """Whether it has been started and not closed."""
        return self._runner is not None and not self._runner.done()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineRejectedError: a prompt that fills the context or has ids that are no tokens, or a field in ``extra``
                that this engine does not know.
            EngineUnavailableError: the engine is not running.
        """
        if not await self.health():
            raise _unavailable("it is not started, or closed")
        generation = self._generation(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[generation] = future
        self._waiting.append(generation)
        self._wake.set()
        # When this task is cancelled so is the future, which is how the runner knows.
        return await future

    async def update_weights(self, path: str | os.PathLike[str], weight_version: str) -> None:
        """Load the weights of a safetensors file, or of ``model.safetensors`` in a folder.

        Raises:
            EngineRejectedError: it cannot be read, or its weights are not of this policy; the old weights stay.
            EngineUnavailableError: the engine is not running.
        """
        if not await self.health():
            raise _unavailable("it is not started, or closed")
        try:
            weights = await self._in_thread(load_weights, path)
        except DumpError as error:
            raise refuse(f"{error.subject}: {error.got}", error.expected) from error
        await self.load_weights(weights, weight_version)

    async def load_weights(self, weights: Mapping[str, Tensor], weight_version: str) -> None:
        """Take over weights named as in the policy's ``state_dict``; they are copied.

        Raises:
            EngineRejectedError, EngineUnavailableError: as ``update_weights``.
        """
        if not await self.health():
            raise _unavailable("it is not started, or closed")
        policy = await self._in_thread(self._policy.with_weights, weights)
        if not await self.health():
            raise _unavailable("it was closed")  # nobody would take the update from the line any more
        done = asyncio.get_running_loop().create_future()
        self._updates.append((policy, weight_version, done))
        self._wake.set()
        await done

    async def _run(self) -> None:
        try:
            await self._sample()
        except Exception as error:  # noqa: BLE001  # Whatever it is, nobody may wait for a thread that has stopped.
            self._fail(f"sampling failed: {type(error).__name__}: {error}")

    async def _sample(self) -> None:
        while True:
            self._drop_cancelled()
            running = any(self._batch.generations)
            if self._updates and not running:
                policy, version, done = self._updates[0]
                self._batch.set_decoder(await self._in_thread(Decoder, policy))
                self._policy, self._version = policy, version
                self._updates.popleft()
                if not done.done():
                    done.set_result(None)
                continue
            if not self._updates:
                for slot in self._batch.free[: len(self._waiting)]:
                    self._batch.add(self._waiting.popleft(), slot)
                    running = True
            if not running:
                await self._wake.wait()
                self._wake.clear()
                continue
            for generation in await self._in_thread(self._batch.advance):
                self._settle(generation)

    def _drop_cancelled(self) -> None:
        gone = {generation for generation, future in self._futures.items() if future.cancelled()}
        for generation in gone:
            del self._futures[generation]
        if gone:
            self._waiting = deque(generation for generation in self._waiting if generation not in gone)
            self._batch.remove(gone)

    def _settle(self, generation: Generation) -> None:
        future = self._futures[generation]
        if not future.done():
            future.set_result(self._completion(generation))
            del self._futures[generation]

    def _fail(self, reason: str) -> None:
        waited_for: list[asyncio.Future[Any]] = [*self._futures.values(), *(done for *_, done in self._updates)]
        for future in waited_for:
            if not future.done():
                # An error of its own for each: they are raised in different tasks.
                future.set_exception(_unavailable(reason))
        self._batch.clear()
        self._futures.clear()
        self._updates.clear()
        self._waiting.clear()

    def _generation(self, request: GenerationRequest) -> Generation:
        prompt = np.asarray(request.token_ids)
        room = self._context_length - len(prompt)
        faults = []
        if room < 1:
            faults.append(f"a prompt of {len(prompt)} tokens in a context of {self._context_length}")
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
            faults.append(f"token_ids of type {prompt.dtype} and shape {prompt.shape}")
        elif prompt.min() < 0 or prompt.max() >= VOCABULARY_SIZE:
            faults.append(f"token ids from {prompt.min()} to {prompt.max()} in a vocabulary of {VOCABULARY_SIZE}")
        refused = {
            name: value
            for name, value in request.extra.items()
            if value is not None and value not in _UNDERSTOOD.get(name, ())
        }
        faults += [_refusal(name, value) for name, value in refused.items()]
        if faults:
            expected = "a prompt that leaves room for a reply, and what the embedded engine can do"
            raise refuse("; ".join(faults), expected, next(iter(refused)) if len(faults) == len(refused) == 1 else None)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        seed = self._seeds.spawn(1)[0] if request.seed is None else request.seed % 2**64
        stops = tuple(self.renderer.encode(text) for text in request.stop)
        one_call = bool(request.tools) and request.extra.get("parallel_tool_calls") is False
        return Generation(request, limit, np.random.default_rng(seed), stops, one_call)

    def _completion(self, generation: Generation) -> Completion:
        request, ids, reason = generation.request, generation.token_ids, generation.finish_reason
        stop_at = generation.stop_at()
        if stop_at is None and ids[-1] in (END_OF_TURN, END_OF_TEXT):
            stop_at = len(ids) - 1
        tools = bool(request.tools) and request.extra.get("tool_choice") != "none"
        message = self.renderer.parse_reply(self.renderer.decode(ids[:stop_at]), tools=tools)
        return Completion(
            message=message,
            token_ids=np.array(ids, dtype=np.int32),
            log_probs=np.array(generation.log_probs, dtype=np.float32),
            finish_reason="tool_calls" if reason == "stop" and "tool_calls" in message else reason or "abort",
            weight_version=self._version,
            response_id=f"chatcmpl-{uuid.uuid4().hex}",
        )

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _take_one_core() -> None:
    """Have this thread share no operation with other cores: those of a step are too small for that.

    PyTorch keeps the number per thread, and a thread takes the number that was set last when it first asks. So it asks
    here, and whoever calls sets his own number again, for threads made later.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()


def _refusal(name: str, value: object) -> str:
    taken = _UNDERSTOOD.get(name)
    only = f"only {' or '.join(map(repr, taken))}" if taken else "no such field"
    return f"{name} = {shown(value)}, where it takes {only}"


def _unavailable(got: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        "the embedded engine",
        got=got,
        expected="an engine between start and close",
        reason="it samples in a thread that start makes and close ends",
        remedy="call start first, and close last",
    )
