"""What an SGLang server answers to a chat request, checked and read."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import EngineContractError, shown
from miles_norm.session.completion import Completion, FinishReason
from miles_norm.session.engines.protocol import GenerationRequest

__all__ = ["broken", "read_completion"]

_ROUTERS = "use a router that passes every field on (smg does, sglang-router drops some), or ask the server itself"


def read_completion(
    answer: Any, request: GenerationRequest, routed_experts: tuple[int, int] | None = None
) -> Completion:
    """The completion in the JSON of ``/v1/chat/completions``.

    ``choices[0].meta_info.output_token_logprobs`` holds ``[log-prob, token id, text]`` per sampled token. That the
    server read the prompt which was sent is seen from ``prompt_token_ids`` where it gives them back, else from their
    number.

    Args:
        answer: The parsed body.
        request: What was asked for.
        routed_experts: Layers and top-k, where the routed experts were asked for.

    Raises:
        EngineContractError: tokens, log-probs or finish reason are missing or malformed, or are about another prompt.
    """
    choice = _mapping(_first(answer, "choices"), "choices[0]")
    meta = choice.get("meta_info")
    if not isinstance(meta, Mapping):
        raise broken("no meta_info in choices[0]", "meta_info, since return_meta_info was true", _ROUTERS)
    _check_prompt(answer, choice, meta, request)
    token_ids, log_probs = _tokens(meta)
    reason = choice.get("finish_reason")
    if reason not in get_args(FinishReason):
        raise broken(f"finish_reason {shown(reason)}", " or ".join(get_args(FinishReason)))
    message = _mapping(choice.get("message"), "choices[0].message")
    version, response_id = meta.get("weight_version"), answer.get("id")
    context = len(request.token_ids) + len(token_ids)
    return Completion(
        message={"role": "assistant", **{name: value for name, value in message.items() if value is not None}},
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=cast(FinishReason, reason),
        weight_version=None if version is None else str(version),
        routed_experts=None if routed_experts is None else _experts(meta, context - 1, routed_experts),
        response_id=None if response_id is None else str(response_id),
    )


def broken(got: str, expected: str, remedy: str = "run a version of SGLang that has this") -> EngineContractError:
    """The error for an answer that is not what was asked for."""
    return EngineContractError(
        "answer of the engine",
        got=got,
        expected=expected,
        reason="rows are made of the tokens that were sampled, never of text that is tokenized again",
        remedy=remedy,
    )


def _check_prompt(answer: Any, choice: Mapping[str, Any], meta: Mapping[str, Any], request: GenerationRequest) -> None:
    sent = request.token_ids
    returned = choice.get("prompt_token_ids")
    if returned is not None and not np.array_equal(np.asarray(returned), sent):
        raise broken("an answer to another prompt", "an answer to the input_ids that were sent", _ROUTERS)
    number = meta.get("prompt_tokens")
    if number != len(sent):
        raise broken(
            f"an answer to a prompt of {shown(number)} tokens",
            f"an answer to the input_ids that were sent, {len(sent)} tokens",
            _ROUTERS,
        )


def _tokens(meta: Mapping[str, Any]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list):
        raise broken(
            "no output_token_logprobs in meta_info", "one entry per sampled token, since logprobs was true", _ROUTERS
        )
    try:
        log_probs = np.array([entry[0] for entry in entries], dtype=np.float64)
        token_ids = np.array([entry[1] for entry in entries], dtype=np.int64)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise broken(
            f"output_token_logprobs such as {shown(entries[:1])}", "[log-prob, token id, text] per token"
        ) from error
    bad = [number for number, value in enumerate(log_probs.tolist()) if not math.isfinite(value)]
    if bad:
        raise broken(f"log-probs that are no finite numbers, at tokens {bad[:10]}", "a finite log-prob per token")
    number = meta.get("completion_tokens")
    if number is not None and number != len(entries):
        raise broken(f"{len(entries)} log-probs for {shown(number)} sampled tokens", "one log-prob per sampled token")
    return token_ids.astype(np.int32), log_probs.astype(np.float32)


def _experts(meta: Mapping[str, Any], rows: int, shape: tuple[int, int]) -> NDArray[np.int32]:
    encoded = meta.get("routed_experts")
    layers, top_k = shape
    try:
        values = np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32)  # type: ignore[arg-type]
        return values.reshape(rows, layers, top_k)
    except (TypeError, ValueError, binascii.Error) as error:
        raise broken(
            f"routed_experts {shown(encoded)}",
            f"base64 of int32 [{rows}, {layers}, {top_k}]",
            "start the server with --enable-return-routed-experts, and check the number of layers and top-k",
        ) from error


def _first(answer: Any, name: str) -> Any:
    choices = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1:
        raise broken(shown(answer, 200), "an object with one entry in choices", "see what answers at this address")
    return choices[0]


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise broken(f"{name} {shown(value)}", f"an object as {name}")
    return value
