"""Requests to an engine, and its errors."""

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from miles_norm.errors import EngineRejectedError, EngineUnavailableError, JournalError
from miles_norm.session.engines.protocol import GenerationRequest

TOKENS = np.array([1, 2], dtype=np.int32)
MESSAGES = [{"role": "user", "content": "hi"}]


def test_every_fault_of_a_request_is_named() -> None:
    match = (
        r"token_ids: empty, expected at least 1 token; messages: empty, expected at least 1 message; temperature: -1, "
        r"expected at least 0; top_p: 1.5, expected at least 0 and at most 1; max_tokens: 0, expected at least 1; "
        r"stop: an empty text"
    )
    with pytest.raises(EngineRejectedError, match=match) as raised:
        GenerationRequest(token_ids=TOKENS[:0], messages=[], temperature=-1, top_p=1.5, max_tokens=0, stop=("a", ""))
    assert raised.value.status == 400
    assert json.loads(raised.value.body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "faulty",
    [{"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": math.nan}, {"top_p": -0.1}],
)
def test_numbers_out_of_range(faulty: dict[str, Any]) -> None:
    with pytest.raises(EngineRejectedError, match=next(iter(faulty))):
        GenerationRequest(token_ids=TOKENS, messages=MESSAGES, **faulty)


def test_the_ends_of_the_ranges() -> None:
    request = GenerationRequest(token_ids=TOKENS, messages=MESSAGES, temperature=0, top_p=1, max_tokens=1)
    assert request.seed is None
    assert request.extra == {}


def test_a_refusal_carries_status_and_body_over_process_borders() -> None:
    error = EngineRejectedError.of_answer(422, '{"message": "no"}')
    found = pickle.loads(pickle.dumps(error))
    assert (found.status, found.body, str(found)) == (422, '{"message": "no"}', str(error))
    assert 'HTTP status 422: \'{"message": "no"}\'' in str(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(EngineUnavailableError, ConnectionError), (JournalError, OSError), (EngineRejectedError, ValueError)],
)
def test_errors_are_also_what_python_calls_them(kind: Any, builtin: type[Exception]) -> None:
    error = kind("subject", got="a", expected="b", reason="c", remedy="d")
    assert isinstance(error, builtin)
    assert (
        str(pickle.loads(pickle.dumps(error)))
        == str(error)
        == str(kind("subject", got="a", expected="b", reason="c", remedy="d"))
    )
    assert str(error).startswith("subject\n  got:      a\n")
