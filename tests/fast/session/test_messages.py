"""When a message that comes back is the one that was given out."""

from typing import Any

import pytest

from miles_norm.errors import ConfigError
from miles_norm.session.messages import message_matcher


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]} | fields


TEXT = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("held", "sent", "strict", "loose"),
    [
        (TEXT, dict(TEXT), True, True),
        (TEXT, {**TEXT, "refusal": None, "tool_calls": None}, True, True),
        (TEXT, {**TEXT, "content": "4 "}, False, False),
        (TEXT, {**TEXT, "role": "user"}, False, False),
        (TEXT, {**TEXT, "name": "x"}, False, False),
        (call("{}", content=None), call("{}"), True, True),
        (call("{}", content=None), call("{}", content=""), False, True),
        (call("{}", content=None), call("{}", content="x"), False, False),
        (call('{"a": 1, "b": [2]}'), call('{"b":[2],"a":1}'), False, True),
        (call('{"a": 1}'), call({"a": 1}), False, True),
        (call('{"a": 1}'), call('{"a": 1.0}'), False, False),
        (call('{"a": 1}'), call('{"a": true}'), False, False),
        (call('{"a": 1'), call('{"a": 1 '), False, False),
        (call('{"a": 1'), call('{"a": 1'), True, True),
        (call("{}"), call("{}") | {"tool_calls": []}, False, False),
        ({**TEXT, "tool_calls": ["odd"]}, {**TEXT, "tool_calls": ["odd"], "x": None}, True, True),
        ({**TEXT, "tool_calls": [{"function": 1}]}, {**TEXT, "tool_calls": [{"function": 2}]}, False, False),
    ],
)
def test_rules(held: dict[str, Any], sent: dict[str, Any], strict: bool, loose: bool) -> None:
    assert message_matcher("strict")(held, sent) == message_matcher("strict")(sent, held) == strict
    assert message_matcher("loose")(held, sent) == message_matcher("loose")(sent, held) == loose


def test_a_rule_of_ones_own_gets_the_held_message_first() -> None:
    seen: list[Any] = []
    message_matcher(lambda held, sent: not seen.append((held, sent)))({"a": 1}, {"b": 2})
    assert seen == [({"a": 1}, {"b": 2})]


def test_unknown_rules() -> None:
    with pytest.raises(ConfigError, match=r"got: +'fuzzy'\n +expected: 'strict', 'loose'"):
        message_matcher("fuzzy")  # type: ignore[arg-type]
