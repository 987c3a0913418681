"""Answers that the client of an SGLang server must not read, from one that is scripted."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_sglang import FakeSGLang, generate

from miles_norm.errors import EngineContractError


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Have every answer changed."""
    answer = FakeSGLang.answer

    def other(self: FakeSGLang, body: dict[str, Any]) -> dict[str, Any]:
        made = answer(self, body)
        change(made)
        return made

    monkeypatch.setattr(FakeSGLang, "answer", other)


@pytest.mark.parametrize(
    ("field", "match"),
    [
        ("output_token_logprobs", "no output_token_logprobs in meta_info"),
        ("prompt_tokens", "a prompt of None tokens"),
        ("finish_reason", r"got: +finish_reason None\n +expected: stop or tool_calls or length or abort"),
        ("message", r"got: +choices\[0\]\.message None"),
        ("no json", r"got: +'<html>'\n +expected: JSON"),
    ],
)
def test_answers_that_lack_something(field: str, match: str) -> None:
    with pytest.raises(EngineContractError, match=match):
        generate(FakeSGLang(broken=field))


@pytest.mark.parametrize(
    ("meta", "match"),
    [
        ({"output_token_logprobs": [[None, 1, "x"]] * 3}, r"no finite numbers, at tokens \[0, 1, 2\](.*\n)*.*weights"),
        ({"output_token_logprobs": [[float("nan"), 1, "x"]] * 3}, r"no finite numbers, at tokens \[0, 1, 2\]"),
        ({"output_token_logprobs": [[-1.0, 1, "x"], [-1e300, 1, "x"]]}, r"no finite numbers, at tokens \[1\]"),
        ({"output_token_logprobs": [[-1.0, 1, "x"], [0.5, 1, "x"]]}, r"above 0, such as 0\.5, at tokens \[1\]"),
        (
            {"output_token_logprobs": [[-1.0]] * 3},
            r"output_token_logprobs such as \[\[-1\.0\]\], at tokens \[0, 1, 2\]",
        ),
        ({"output_token_logprobs": ["12", [-1.0, 1, "x"], 5]}, r"such as \['12'\], at tokens \[0, 2\]"),
        ({"output_token_logprobs": {"0": [-1.0, 1, "x"]}}, "no output_token_logprobs"),
        ({"output_token_logprobs": [], "completion_tokens": 0}, "no tokens, and finish_reason 'stop'"),
        ({"completion_tokens": 4}, "3 log-probs for 4 sampled tokens"),
    ],
)
def test_tokens_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, meta: dict[str, Any], match: str) -> None:
    changed(monkeypatch, lambda made: made["choices"][0]["meta_info"].update(meta))
    with pytest.raises(EngineContractError, match=match):
        generate(FakeSGLang())


NO_IDS = ["5", 5.0, 5.7, True, None, [5], -1, 2**31, 2**33]
NO_LOG_PROBS = ["-1.0", True, [-1.0], {}, -(10**400)]


@pytest.mark.parametrize(
    "entry", [[-1.0, token, "x"] for token in NO_IDS] + [[value, 5, "x"] for value in NO_LOG_PROBS]
)
def test_nothing_is_made_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch, entry: list[Any]) -> None:
    """A text, a fraction or an id that wraps around would be trained as some other token."""
    entries = [[-1.0, 5, "x"], entry]
    changed(monkeypatch, lambda made: made["choices"][0]["meta_info"].update(output_token_logprobs=entries))
    with pytest.raises(EngineContractError, match=r"output_token_logprobs such as .*, at tokens \[1\]"):
        generate(FakeSGLang(token_ids=[5, 5]))


def test_rounding_and_whole_numbers_are_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [[0, 5, "x"], [-2, 6, "x"], [1e-6, 0, None]]
    changed(monkeypatch, lambda made: made["choices"][0]["meta_info"].update(output_token_logprobs=entries))
    completion = generate(FakeSGLang())
    assert completion.log_probs.tolist() == pytest.approx([0.0, -2.0, 1e-6])
    assert completion.token_ids.tolist() == [5, 6, 0]


@pytest.mark.parametrize("returned", [[[1], [2, 3]], {"a": 1}, "abc", [None], 5])
def test_a_prompt_that_is_given_back_as_something_else(monkeypatch: pytest.MonkeyPatch, returned: Any) -> None:
    changed(monkeypatch, lambda made: made["choices"][0].update(prompt_token_ids=returned))
    with pytest.raises(EngineContractError, match="an answer to another prompt"):
        generate(FakeSGLang())


MESSAGES_THAT_CANNOT_COME_BACK = [
    {"role": "user"},
    {"role": 5},
    {"content": 5},
    {"content": ["a"]},
    {"tool_calls": "x"},
    {"tool_calls": [None]},
    {"tool_calls": [{"id": "a"}]},
    {"tool_calls": [{"function": {"name": "open"}}]},
    {"tool_calls": [{"function": {"name": None, "arguments": "{}"}}]},
]


@pytest.mark.parametrize("part", MESSAGES_THAT_CANNOT_COME_BACK)
def test_a_reply_that_no_agent_can_send_back(monkeypatch: pytest.MonkeyPatch, part: dict[str, Any]) -> None:
    changed(monkeypatch, lambda made: made["choices"][0]["message"].update(part))
    (name,) = part
    with pytest.raises(EngineContractError, match=rf"got: +{name} .* in choices\[0\]\.message"):
        generate(FakeSGLang())


@pytest.mark.parametrize("answer", [{}, [], {"choices": []}, {"choices": [1, 2]}, {"choices": [1]}, None])
def test_answers_of_another_kind(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(FakeSGLang, "answer", lambda self, body: answer)
    with pytest.raises(EngineContractError, match=r"choices"):
        generate(FakeSGLang())
