"""What is no message, turn, record, renderer or row is named where it comes in, and changes nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conversations import Chat, Session, nested, reply, user

from miles_norm import Sample
from miles_norm.errors import ConfigError, DumpError, HookError, PathEndedError, RenderingError, SessionError
from miles_norm.session.assembly import assemble, session_metadata
from miles_norm.session.node import Attachment
from miles_norm.session.prompt import next_prompt
from miles_norm.session.tree import TrajectoryForest
from miles_norm.session.wire import decode_node, decode_rows, encode_node, encode_rows

QUESTION = [user("2 + 2?")]
BASE = Sample(index=0)


def session() -> Session:
    made = Session()
    made.turn(made.then(made.turn(QUESTION, "4"), "Sure?"), "Yes")
    return made


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (None, r"messages of the request\n +got: +None"),
        ("ab", "got: +'ab'"),
        ({"role": "user"}, "got: +{'role': 'user'}"),
        ([user("a"), None, 5], "got: +None and the like at positions 1, 2"),
    ],
)
def test_requests_without_messages(messages: Any, text: str) -> None:
    with pytest.raises(SessionError, match=text):
        TrajectoryForest().attach(messages)
    if messages is not None:  # No tools is what most requests have.
        with pytest.raises(SessionError, match=text.replace("messages", "tools")):
            TrajectoryForest().attach(QUESTION, messages)


def test_messages_that_cannot_be_compared() -> None:
    forest = TrajectoryForest()
    forest.commit(forest.attach([user(np.zeros(2))]), [1], reply(Chat(), "x"))
    with pytest.raises(SessionError, match="ValueError while they were compared with those of the session"):
        forest.attach([user(np.ones(2)), user("more")])


def test_messages_that_cannot_be_copied() -> None:
    forest = TrajectoryForest()
    attachment = forest.attach([user(nested())])
    with pytest.raises(SessionError, match=r"messages of the request\n +got: +what cannot be copied: RecursionError"):
        forest.commit(attachment, [1], reply(Chat(), "x"))
    attachment = forest.attach(QUESTION, [{"name": nested()}])
    with pytest.raises(SessionError, match="tools of the request"):
        forest.commit(attachment, [1], reply(Chat(), "x"))
    assert forest.nodes == []


@pytest.mark.parametrize(
    ("attachment", "text"),
    [
        (None, r"attachment\n +got: +None"),
        (Attachment(-1, ()), "the turn -1"),
        (Attachment(True, ()), "the turn True"),
        (Attachment("0", ()), "the turn '0'"),
        (Attachment(None, (user("a"), 5)), r"suffix of the attachment\n +got: +5 and the like at position 1"),
        (Attachment(None, None), "suffix of the attachment"),
        (Attachment(None, (), [5]), "tools of the attachment"),
    ],
)
def test_attachments_of_another_kind(attachment: Any, text: str) -> None:
    made = session()
    with pytest.raises(SessionError, match=text):
        made.forest.commit(attachment, [1], reply(made.chat, "x"))
    with pytest.raises(SessionError, match=text):
        next_prompt(made.forest, attachment, made.chat)
    assert len(made.forest.nodes) == 2


@pytest.mark.parametrize("at", ["now", True, float("nan"), [1]])
def test_times_that_are_none(at: Any) -> None:
    forest = TrajectoryForest()
    with pytest.raises(SessionError, match="committed_at"):
        forest.commit(forest.attach(QUESTION), [1], reply(Chat(), "x"), committed_at=at)


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        (None, "an array of dtype object"),
        ([[1], [2, 3]], "list that makes no array"),
        ("abc", "an array of dtype <U3"),
        ([1, -2, 2**31], "-2, 2147483648 at positions 1, 2"),
        ([None], "an array of dtype object"),
        ([1.0], "an array of dtype float64"),
        (10**400, "an array of dtype object"),
    ],
)
def test_prompts_that_are_no_ids(prompt: Any, got: str) -> None:
    forest = TrajectoryForest()
    with pytest.raises(SessionError, match=rf"prompt_token_ids\n +got: +{got}"):
        forest.commit(forest.attach(QUESTION), prompt, reply(Chat(), "x"))


def test_completions_of_another_kind() -> None:
    forest = TrajectoryForest()
    with pytest.raises(SessionError, match=r"completion\n +got: +{'token_ids'"):
        forest.commit(forest.attach(QUESTION), [1], {"token_ids": [1]})


@pytest.mark.parametrize("seq", [-1, 2, 10**400, True, "0", None, 0.0, [0]])
@pytest.mark.parametrize("method", ["node", "path", "messages", "token_ids", "prompt_token_ids"])
def test_turns_that_a_session_does_not_have(method: str, seq: Any) -> None:
    with pytest.raises(SessionError, match=r"turn of a session\n +got: .*\n +expected: one of the 2 turns"):
        getattr(session().forest, method)(seq)


def test_turns_of_other_sessions() -> None:
    made, other = session(), TrajectoryForest()
    with pytest.raises(SessionError, match=r"turn\n +got: +None"):
        other.add(None)
    with pytest.raises(SessionError, match="the turn 0"):
        other.add(made.forest.nodes[1])
    other.commit(other.attach([user("longer")]), range(50), reply(Chat(), "x"))
    with pytest.raises(SessionError, match=r"turn\n +got: +one that does not continue turn 0"):
        other.add(made.forest.nodes[1])
    with pytest.raises(SessionError, match="one that does not continue turn None"):
        other.add(replace(made.forest.nodes[0], starts_row=False))
    assert len(other.nodes) == 1


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"parent": "0"}, "the turn '0'"),
        ({"suffix": None}, "suffix of the record"),
        ({"tools": [5]}, "tools of the record"),
        ({"starts_row": 1}, "starts_row 1 and seq 0"),
        ({"seq": [0]}, r"starts_row True and seq \[0\]"),
        ({"committed_at": None}, "committed_at"),
        ({"completion": None}, "completion None"),
        ({"completion": {"message": {}, "color": 1}}, "completion with no finish_reason, .*; unknown color"),
        ({"new_prompt_token_ids": [[1], [1, 2]]}, "new_prompt_token_ids"),
        ({"more": 1}, "unknown more"),
    ],
)
def test_records_of_another_kind(change: dict[str, Any], got: str) -> None:
    forest = TrajectoryForest()
    with pytest.raises(SessionError, match=got):
        forest.replay(session().forest.nodes[0].record() | change)
    with pytest.raises(SessionError, match=r"record of a turn\n +got: +None"):
        forest.replay(None)
    assert forest.nodes == []


def test_a_record_behind_a_turn_that_ended_by_length() -> None:
    made, forest = session(), TrajectoryForest()
    records = [node.record() for node in made.forest.nodes]
    forest.replay(records[0] | {"completion": records[0]["completion"] | {"finish_reason": "length"}})
    with pytest.raises(PathEndedError):
        forest.replay(records[1])


@pytest.mark.parametrize(
    ("method", "returned", "got"),
    [
        ("render", None, "None from render"),
        ("decode", [1], r"\[1\] from decode"),
        ("encode", "text", "an array of dtype <U4 and shape .* from encode"),
        ("encode", [-1], "-1 at position 0 from encode"),
    ],
)
def test_renderers_that_return_something_else(method: str, returned: Any, got: str) -> None:
    made = session()
    attachment = made.forest.attach(made.then(made.forest.nodes[1], "Why?"))
    setattr(made.chat, method, lambda *args, **kwargs: returned)
    with pytest.raises(RenderingError, match=rf"renderer\n +got: +{got}"):
        next_prompt(made.forest, attachment, made.chat)


def test_what_is_no_renderer_or_forest() -> None:
    made = session()
    attachment = made.forest.attach(QUESTION)
    with pytest.raises(RenderingError, match="5 without render, encode, decode"):
        next_prompt(made.forest, attachment, 5)
    with pytest.raises(RenderingError, match="without render, encode, decode"):
        assemble(made.forest, BASE, renderer=5)
    for call in (lambda: next_prompt(5, attachment, made.chat), lambda: assemble(5, BASE), lambda: session_metadata(5)):
        with pytest.raises(SessionError, match=r"forest\n +got: +5"):
            call()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"max_seq_len": "200"}, ConfigError, r"max_seq_len\n +got: +'200'"),
        ({"max_seq_len": 2.5}, ConfigError, "got: +2.5"),
        ({"max_seq_len": True}, ConfigError, "got: +True"),
        ({"agent": [1]}, SessionError, r"agent\n +got: +\[1\]"),
        ({"picker": None}, HookError, r"hook None\n +got: +a value of type NoneType"),
        ({"post_processors": None}, SessionError, r"post_processors\n +got: +None"),
        ({"post_processors": max}, SessionError, "post_processors"),
        ({"post_processors": ["max"]}, HookError, "hook 'max'"),
        ({"base": None}, SessionError, r"base sample\n +got: +None"),
        ({"base": Sample(index=0, metadata=None)}, SessionError, r"base sample\n +got: +metadata None"),
        ({"base": Sample(index=0, metadata=[], extra=5)}, SessionError, r"metadata \[\]; extra 5"),
        ({"base": Sample(index=True)}, SessionError, "the id True"),
        ({"base": Sample(rollout_id=["a"])}, SessionError, r"the id \['a'\]"),
        ({"base": Sample(index=float("nan"))}, SessionError, "the id nan"),
    ],
)
def test_assemblies_that_are_none(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        assemble(**{"forest": session().forest, "base": BASE} | settings)


def test_bytes_of_what_is_no_row_or_turn() -> None:
    rows = assemble(session().forest, BASE)
    for given in (None, 5, "rows", {"rows": 1}):
        with pytest.raises(DumpError, match="rows of a session"):
            encode_rows(given)
    with pytest.raises(DumpError, match="rows 1, 2, no Sample") as raised:
        encode_rows([rows[0], None, 5])
    assert raised.value.rows == (1, 2)
    with pytest.raises(DumpError, match=r"got: +\[1\]"):
        encode_rows(rows, [1])
    with pytest.raises(DumpError, match="nested too deeply"):
        encode_rows(rows, {"a": nested()})
    with pytest.raises(DumpError, match=r"record of a turn\n +got: +None"):
        encode_node(None)
    for given in (None, 5, "text"):
        with pytest.raises(DumpError):
            decode_rows(given)
        with pytest.raises(DumpError):
            decode_node(TrajectoryForest(), given)


def test_turns_that_no_file_can_hold() -> None:
    forest = TrajectoryForest()
    node = forest.commit(forest.attach([user({1, 2}), user(range(3))]), [1], reply(Chat(), "x"))
    with pytest.raises(DumpError, match=r"record of a turn\n +got: +TypeError: a value of type range"):
        encode_node(node)
