"""What a message of a conversation must have, wherever it comes from."""

from __future__ import annotations

from typing import Any

from miles_norm.errors import shown

__all__ = ["ROLES", "checked_message"]

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message itself; fields beyond role, content and tool_calls are for the chat template.

    Raises:
        ValueError: what does not fit, as a clause.

    >>> checked_message({"role": "robot", "content": "hi"})
    Traceback (most recent call last):
    ...
    ValueError: the role is 'robot', and none of system, developer, user, assistant, tool
    """
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"the role is {shown(role)}, and none of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"tool_calls are {shown(calls)}, and no list of objects")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not parts and not isinstance(content, str | None):
        raise ValueError(f"the content is {shown(content)}, and neither a text nor a list of parts")
    return message
