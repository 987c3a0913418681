"""What a forest takes: requests, completions and records of turns, or an error that says what is wrong with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, get_args

import numpy as np

from miles_norm.errors import ConfigError, PathEndedError, SessionError, format_rows, shown
from miles_norm.session.completion import Completion, FinishReason
from miles_norm.session.node import Attachment, Node
from miles_norm.session.token_ids import as_log_probs, as_token_ids

__all__ = [
    "check_attachment",
    "check_committed_at",
    "check_count",
    "check_extensible",
    "check_messages",
    "check_place",
    "check_record",
    "check_turn",
    "checked_completion",
    "copied_messages",
    "incomparable",
]

_FINISH_REASONS = get_args(FinishReason)
_RECORD_FIELDS = frozenset(entry.name for entry in fields(Node)) - {"prompt_length", "context_length"}
_COMPLETION_FIELDS = frozenset(entry.name for entry in fields(Completion))
_NEEDED = frozenset(entry.name for entry in fields(Completion) if entry.default is MISSING)


def check_messages(messages: Any, subject: str = "messages of the request") -> None:
    """Messages, or the tools of a request, are mappings in a list.

    Raises:
        SessionError: anything else; all bad entries are named.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes | bytearray):
        # The type first: a conversation is checked with every request, and asking an abstract class takes longer.
        bad = [n for n, entry in enumerate(messages) if type(entry) is not dict and not isinstance(entry, Mapping)]
        got = f"{shown(messages[bad[0]])} and the like at {format_rows(bad, 'position')}" if bad else ""
    else:
        got = shown(messages)
    if got:
        raise SessionError(
            subject,
            got=got,
            expected="a list of mappings, as the chat API has them",
            reason="a request is found again by its messages, and rendered from them",
            remedy="pass the decoded JSON of the request",
        )


def check_attachment(attachment: Any) -> None:
    """An attachment as ``attach`` makes it.

    Raises:
        SessionError: anything else.
    """
    if not isinstance(attachment, Attachment):
        raise SessionError(
            "attachment",
            got=shown(attachment),
            expected="what attach of this forest returned",
            reason="it says which turn the request continues, and with what",
            remedy="attach the request, and hand that on",
        )
    check_messages(attachment.suffix, "suffix of the attachment")
    if attachment.tools is not None:
        check_messages(attachment.tools, "tools of the attachment")


def check_committed_at(seconds: Any) -> None:
    """A time as ``time.time`` has it.

    Raises:
        SessionError: anything else.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) < math.inf:
        raise SessionError(
            "committed_at",
            got=shown(seconds),
            expected="seconds since the epoch, or None for now",
            reason="it is shown to people, and written to files",
            remedy="pass time.time(), or leave it out",
        )


def check_count(value: Any, name: str, reason: str, least: int = 1) -> None:
    """A setting that counts something.

    Raises:
        ConfigError: no whole number, or one below the least.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            name,
            got=shown(value),
            expected=f"a whole number from {least}",
            reason=reason,
            remedy="leave it out for the default",
        )


def check_extensible(node: Node | None) -> None:
    """A turn that a request may continue.

    Raises:
        PathEndedError: it ended by length.
    """
    if node is not None and node.truncated:
        raise PathEndedError(
            f"turn {node.seq}",
            got="a request that continues it, and it ended by length",
            expected="a request that continues a turn which the model ended",
            reason="the model never wrote what would come before the new messages",
            remedy="repeat the turn with more room, or end the conversation",
        )


def check_turn(turn: Any) -> None:
    """A turn of ``prepare``.

    Raises:
        SessionError: anything else.
    """
    if not isinstance(turn, Node):
        raise _foreign(shown(turn))


def check_place(turn: Node, parent: Node | None) -> None:
    """A turn whose lengths are those that it has behind its parent.

    Raises:
        SessionError: it was prepared with other turns.
    """
    held = 0 if parent is None or turn.starts_row else parent.context_length
    prompt = held + len(turn.new_prompt_token_ids)
    expected = (prompt, prompt + len(turn.completion.token_ids))
    if (turn.prompt_length, turn.context_length) != expected or (parent is None and not turn.starts_row):
        raise _foreign(f"one that does not continue turn {turn.parent}")


def incomparable(error: Exception) -> SessionError:
    """The error for messages that could not be compared with those of the session."""
    return SessionError(
        "messages of the request",
        got=f"{type(error).__name__} while they were compared with those of the session: {error}"[:300],
        expected="messages that are equal to the ones held or not",
        reason="that decides which turn the request continues",
        remedy="pass the decoded JSON of the request, not nested beyond reason",
    )


def copied_messages(value: Any, subject: str) -> Any:
    """A copy that shares nothing with the original.

    Raises:
        SessionError: messages that hold what cannot be copied, or are nested too deeply.
    """
    try:
        return copy.deepcopy(value)
    except Exception as error:  # Copying runs code of whatever the messages hold.
        raise SessionError(
            subject,
            got=f"what cannot be copied: {type(error).__name__}: {error}"[:300],
            expected="strings, numbers, booleans, None, and lists and dicts of them, not nested beyond reason",
            reason="a turn stays what it was, whatever becomes of the objects that it came in",
            remedy="pass the decoded JSON of the request",
        ) from error


def checked_completion(completion: Completion, prompt: int) -> Completion:
    """A copy of a completion, with arrays of its dtypes.

    Args:
        completion: What an engine returned.
        prompt: Tokens before it that its routed experts are of as well; the last sampled token is not routed.

    Raises:
        SessionError: values of another kind, lengths that do not fit, log-probs that are none, or an unknown finish
            reason.
    """
    if not isinstance(completion, Completion):
        raise _unfit(shown(completion))
    ids = as_token_ids(completion.token_ids, "completion.token_ids").copy()
    log_probs = as_log_probs(completion.log_probs, len(ids), "completion.log_probs")
    # Engines are code of others: what they return has the types that it has.
    experts: Any = completion.routed_experts
    message: Any = completion.message
    got = []
    routed = max(prompt + len(ids) - 1, 0)
    if experts is not None:
        if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu":
            got.append(f"routed_experts {shown(experts)}")
        elif experts.ndim != 3 or len(experts) != routed:
            got.append(f"routed_experts of shape {list(experts.shape)}, where {routed} tokens have been routed")
        else:
            experts = experts.astype(np.int32, copy=False)
    if not isinstance(message, Mapping):
        got.append(f"message {shown(message)}")
    if not isinstance(completion.finish_reason, str) or completion.finish_reason not in _FINISH_REASONS:
        got.append(f"finish_reason {shown(completion.finish_reason)}")
    ids_given = {"weight_version": completion.weight_version, "response_id": completion.response_id}
    got += [f"{name} {shown(value)}" for name, value in ids_given.items() if not isinstance(value, str | None)]
    if got:
        raise _unfit("; ".join(got))
    return replace(
        completion,
        message=copied_messages(message, "completion.message"),
        token_ids=ids,
        log_probs=log_probs,
        routed_experts=experts,
    )


def check_record(record: Any) -> None:
    """A record of a turn has the fields of ``Node.record``; their values are checked where they are used.

    Raises:
        SessionError: anything else.
    """
    got = "" if isinstance(record, Mapping) else shown(record)
    if not got and record.keys() != _RECORD_FIELDS:
        got = _difference(record, _RECORD_FIELDS, _RECORD_FIELDS)
    elif not got and not isinstance(record["completion"], Mapping):
        got = f"completion {shown(record['completion'])}"
    elif not got and not _NEEDED <= record["completion"].keys() <= _COMPLETION_FIELDS:
        got = "completion with " + _difference(record["completion"], _NEEDED, _COMPLETION_FIELDS)
    elif not got and (not isinstance(record["starts_row"], bool) or not isinstance(record["seq"], int)):
        got = f"starts_row {shown(record['starts_row'])} and seq {shown(record['seq'])}"
    elif not got:
        check_messages(record["suffix"], "suffix of the record")
        if record["tools"] is not None:
            check_messages(record["tools"], "tools of the record")
        check_committed_at(record["committed_at"])
    if got:
        raise SessionError(
            "record of a turn",
            got=got,
            expected=f"a mapping with {', '.join(sorted(_RECORD_FIELDS))}",
            reason="the turn is made again from nothing else",
            remedy="pass what Node.record returned",
        )


def _difference(found: Mapping[Any, Any], needed: frozenset[str], known: frozenset[str]) -> str:
    lacking, unknown = sorted(needed - found.keys()), sorted(map(str, found.keys() - known))
    return "; ".join([f"no {', '.join(lacking)}"] * bool(lacking) + [f"unknown {', '.join(unknown)}"] * bool(unknown))


def _unfit(got: str) -> SessionError:
    return SessionError(
        "completion",
        got=got,
        expected="a Completion: the reply as a mapping, routed experts int32 [context - 1, layers, top-k] or none, one "
        f"of the finish reasons {', '.join(_FINISH_REASONS)}, and ids that are strings or None",
        reason="the row is trained on exactly what was sampled",
        remedy="return what belongs to one request from the engine",
    )


def _foreign(got: str) -> SessionError:
    return SessionError(
        "turn",
        got=got,
        expected="what prepare of this forest returned",
        reason="a turn holds only what it adds to the one before",
        remedy="prepare the turn with the forest that it is added to",
    )
