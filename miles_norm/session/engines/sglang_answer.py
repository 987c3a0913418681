"""What an SGLang server answers to a chat request, checked and read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import EngineContractError, shown
from miles_norm.session.completion import Completion, FinishReason
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.token_ids import LOG_PROB_ROUNDING

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
    if not len(token_ids) and reason != "abort":
        raise broken(f"no tokens, and finish_reason {shown(reason)}", "tokens, that which ended the reply too")
    version, response_id = meta.get("weight_version"), answer.get("id")
    context = len(request.token_ids) + len(token_ids)
    if reason == "abort" and "routed_experts" not in meta:
        routed_experts = None
    return Completion(
        message=_message(choice.get("message")),
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
    if returned is not None and returned != sent.tolist():
        raise broken("an answer to another prompt", "an answer to the input_ids that were sent", _ROUTERS)
    number = meta.get("prompt_tokens")
    if number is None and choice.get("finish_reason") == "abort":
        return  # A request that is aborted while it waits for its turn is answered without.
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
    bad = [number for number, entry in enumerate(entries) if not _is_sampled(entry)]
    if bad:
        raise broken(
            f"output_token_logprobs such as {shown(entries[bad[0] : bad[0] + 1])}, at tokens {bad[:10]}",
            "[log-prob, token id, text] per token, a number and a whole one from 0 to 2147483647",
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite then
        log_probs = np.array([entry[0] for entry in entries], dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(log_probs)).tolist()
    if bad:
        raise broken(
            f"log-probs that are no finite numbers, at tokens {bad[:10]}",
            "a finite log-prob per token",
            "see whether the weights that were loaded last hold numbers that are not finite",
        )
    bad = np.flatnonzero(log_probs > LOG_PROB_ROUNDING).tolist()
    if bad:
        raise broken(f"log-probs above 0, such as {log_probs[bad[0]]:g}, at tokens {bad[:10]}", "log-probs up to 0")
    number = meta.get("completion_tokens")
    if number is not None and number != len(entries):
        raise broken(f"{len(entries)} log-probs for {shown(number)} sampled tokens", "one log-prob per sampled token")
    return np.array([entry[1] for entry in entries], dtype=np.int32), log_probs


def _is_sampled(entry: object) -> bool:
    """Whether it has a log-prob and an id: arrays would make some number of a text, a fraction or an id too large."""
    if not isinstance(entry, list) or len(entry) < 2:
        return False
    log_prob, token = entry[:2]
    if type(token) is not int or not 0 <= token <= np.iinfo(np.int32).max:
        return False
    # JSON has no NaN: null stands for it, and numpy reads it so.
    return log_prob is None or type(log_prob) is float or (type(log_prob) is int and abs(log_prob) < 2**63)


def _message(value: object) -> dict[str, Any]:
    """The reply, if an agent can send it back with its next request."""
    message = {"role": "assistant"} | {
        name: part for name, part in _mapping(value, "choices[0].message").items() if part is not None
    }
    calls = message.get("tool_calls", [])
    faults = {
        "role": message["role"] == "assistant",
        "content": isinstance(message.get("content", ""), str),
        "tool_calls": isinstance(calls, list) and all(_is_call(call) for call in calls),
    }
    for name, fits in faults.items():
        if not fits:
            raise broken(
                f"{name} {shown(message[name])} in choices[0].message",
                "the role assistant, content that is a text or null, tool calls whose function has name and arguments",
            )
    return message


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and all(isinstance(function.get(name), str) for name in ("name", "arguments"))


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
