"""When does a message that an agent sends back count as the one that the session holds?"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from miles_norm.errors import ConfigError, shown
from miles_norm.session.rendering import Message

__all__ = ["MatchRule", "Matcher", "message_matcher"]

Matcher = Callable[[Message, Message], bool]
MatchRule = Literal["strict", "loose"] | Matcher


def message_matcher(rule: MatchRule = "strict") -> Matcher:
    """The test whether two messages, the held one first, are the same.

    ``strict``: equal, where a field that is None counts as absent, since clients write out the fields they know.
    ``loose``: as strict, but the arguments of tool calls are compared as parsed JSON, since agents parse and write them
    again, and empty content counts as absent, since clients differ there beside tool calls.

    Args:
        rule: One of these names, or the test itself.

    Raises:
        ConfigError: anything else.

    >>> def call(arguments):
    ...     function = {"name": "add", "arguments": arguments}
    ...     return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    >>> held, sent = call('{"a": 1, "b": 2}'), call('{"b":2,"a":1}')
    >>> message_matcher("strict")(held, sent), message_matcher("loose")(held, sent)
    (False, True)
    """
    if callable(rule):
        return rule
    if isinstance(rule, str) and rule in _RULES:
        return _RULES[rule]
    raise ConfigError(
        "message matching",
        got=shown(rule),
        expected="'strict', 'loose', or a function of two messages",
        reason="it decides which turn a request continues",
        remedy="choose one of these",
    )


def _strict(held: Message, sent: Message) -> bool:
    return held == sent or _present(held) == _present(sent)


def _loose(held: Message, sent: Message) -> bool:
    return _strict(held, sent) or _parsed(held) == _parsed(sent)


def _present(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _parsed(message: Message) -> dict[str, Any]:
    """The message without empty content and with the arguments of its tool calls in one canonical form."""
    fields = _present(message)
    if "content" in fields and not fields["content"]:
        del fields["content"]
    calls = fields.get("tool_calls")
    if isinstance(calls, list | tuple):
        fields["tool_calls"] = [_parsed_call(call) for call in calls]
    return fields


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**_present(call), "function": {**function, "arguments": _canonical(function.get("arguments"))}}


def _canonical(arguments: Any) -> Any:
    """Arguments as JSON in one form: sorted keys, and 1, 1.0 and true apart; text that is no JSON as it is."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(parsed, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return arguments


_RULES: dict[str, Matcher] = {"strict": _strict, "loose": _loose}
