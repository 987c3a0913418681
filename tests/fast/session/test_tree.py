"""Where requests attach, what a turn holds, and what is refused."""

import math
import threading
from typing import Any

import numpy as np
import pytest
from conversations import STOP, Chat, Session, StripsThinking, assistant, nested, reply, user

from miles_norm.errors import ConfigError, HookError, MilesNormError, NodeLimitError, PathEndedError, SessionError
from miles_norm.session.completion import Completion
from miles_norm.session.node import Attachment
from miles_norm.session.rendering import Renderer
from miles_norm.session.tree import TrajectoryForest

QUESTION = [user("2 + 2?")]


def test_the_chats_of_these_tests_are_renderers() -> None:
    assert isinstance(Chat(), Renderer)
    assert Chat().decode(Chat().encode("é<|im_end|>\n")) == "é<|im_end|>\n"


def test_a_first_request_starts_a_tree() -> None:
    attachment = TrajectoryForest().attach(QUESTION)
    assert (attachment.parent, attachment.suffix) == (None, tuple(QUESTION))


def test_a_request_attaches_at_the_deepest_turn() -> None:
    session = Session()
    first = session.turn(QUESTION, "4")
    second = session.turn(session.then(first, "Sure?"), "Yes")
    request = session.then(second, "Why?")
    assert session.forest.attach(request).parent == second.seq
    assert session.forest.attach(request).suffix == (user("Why?"),)
    # A part of the second turn is not the second turn.
    assert session.forest.attach(request[:3]).parent == first.seq
    assert session.forest.attach(request[:3]).suffix == (user("Sure?"),)
    # The question of the first turn alone is a retry of it, and so a tree of its own.
    assert session.forest.attach(request[:1]).parent is None
    # Another reply than the one that was given out.
    assert session.forest.attach([*QUESTION, assistant("5"), user("Sure?")]).parent is None
    # A whole conversation without a new message.
    assert session.forest.attach(request[:-1]).suffix == ()


def test_suffixes_may_hold_replies_of_others() -> None:
    session = Session()
    session.turn([*QUESTION, assistant("5"), user("Really?")], "4")
    second = session.turn([*QUESTION, assistant("5"), user("Really?"), assistant("4"), user("Thanks")], "Bye")
    assert (second.parent, second.suffix) == (0, (user("Thanks"),))


def test_twins_go_to_the_latest() -> None:
    session = Session()
    for _ in range(3):
        last = session.turn(QUESTION, "4")
    first_child = session.turn(session.then(last, "a"), "b")
    assert first_child.parent == 2
    session.turn(QUESTION, "4")
    assert session.forest.attach([*QUESTION, assistant("4"), user("x")]).parent == 4
    # Deeper wins over later.
    assert session.forest.attach(session.then(first_child, "c")).parent == first_child.seq


def test_the_rule_of_matching_decides() -> None:
    arguments = ['{"a": 1}', '{"a":1}']
    calls = [{**assistant(""), "tool_calls": [{"function": {"name": "f", "arguments": text}}]} for text in arguments]
    for rule, parent in (("strict", None), ("loose", 0), (lambda held, sent: held["role"] == sent["role"], 0)):
        forest = TrajectoryForest(rule)
        forest.commit(forest.attach(QUESTION), [1], reply(Chat(), "", message=calls[0]))
        assert forest.attach([*QUESTION, calls[1], user("x")]).parent == parent


def test_a_turn_that_ended_by_length_cannot_be_continued() -> None:
    session = Session()
    first = session.turn(QUESTION, "4 is", stop=False, finish_reason="length")
    assert first.truncated
    with pytest.raises(PathEndedError, match=r"turn 0\n +got: +a request that continues it, and it ended by length"):
        session.turn(session.then(first, "go on"), "...")
    with pytest.raises(PathEndedError):
        session.forest.commit(Attachment(0, ()), [1], reply(session.chat, "x"))
    assert session.turn(QUESTION, "4").parent is None
    assert len(session.forest.nodes) == 2


def test_an_aborted_turn_can_be_continued() -> None:
    session = Session()
    first = session.turn(QUESTION, "4 is", stop=False, finish_reason="abort")
    assert session.turn(session.then(first, "go on"), "so").parent == 0


def test_racing_requests_become_siblings() -> None:
    session = Session()
    first = session.turn(QUESTION, "4")
    chat, forest = session.chat, session.forest
    attachments = [forest.attach(session.then(first, text)) for text in ("a", "b")]
    ends = [np.concatenate([forest.token_ids(0), chat.encode(text)]) for text in ("a", "b")]
    later = forest.commit(attachments[1], ends[1], reply(chat, "B"))
    earlier = forest.commit(attachments[0], ends[0], reply(chat, "A"))
    assert [later.seq, earlier.seq] == [1, 2]
    assert later.parent == earlier.parent == 0
    assert not later.starts_row
    assert not earlier.starts_row
    assert forest.token_ids(1).tolist() == [*ends[1], *chat.encode("B"), STOP]
    assert forest.token_ids(2).tolist() == [*ends[0], *chat.encode("A"), STOP]
    assert [leaf.seq for leaf in forest.leaves()] == [1, 2]


def test_the_number_of_turns_is_limited() -> None:
    session = Session(max_nodes=2)
    session.turn([user("a")], "A")
    attachment = session.forest.attach([user("c")])
    session.turn([user("b")], "B")
    text = r"got: +2 turns and one more, 2 of which start a tree\n +expected: at most max_nodes = 2"
    with pytest.raises(NodeLimitError, match=text):
        session.forest.attach([user("c")])
    with pytest.raises(NodeLimitError):
        session.forest.commit(attachment, [1], reply(session.chat, "C"))


def test_requests_under_way_count() -> None:
    session = Session(max_nodes=3)
    session.turn([user("a")], "A")
    attachments = [session.forest.attach([user("b")], under_way=n) for n in range(2)]
    text = r"got: +1 turns and one more beside 2 under way, 1 of which start a tree"
    with pytest.raises(NodeLimitError, match=text):
        session.forest.attach([user("b")], under_way=2)
    for attachment in attachments:
        session.forest.commit(attachment, [1], reply(session.chat, "B"))
    assert len(session.forest.nodes) == 3
    with pytest.raises(ConfigError, match=r"under_way\n +got: +-1"):
        session.forest.attach([user("b")], under_way=-1)


def test_a_session_is_read_back_under_a_lower_limit() -> None:
    session, again = Session(), TrajectoryForest(max_nodes=1)
    for text in "ab":
        session.turn([user(text)], "A")
    for record in records_of(session.forest):
        again.replay(record)
    assert len(again.nodes) == 2
    with pytest.raises(NodeLimitError):
        again.attach([user("c")])


@pytest.mark.parametrize("limit", [0, -1, True, "5", 2.5, None])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_nodes\n +got: "):
        TrajectoryForest(max_nodes=limit)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"log_probs": np.zeros(3)}, r"2 token ids and log_probs of shape \[3\]"),
        ({"log_probs": np.zeros((2, 1))}, r"an array of dtype float64 and shape \[2, 1\]"),
        ({"finish_reason": "content_filter"}, "finish_reason 'content_filter'"),
        ({"routed_experts": np.zeros((5, 2, 1), np.int32)}, r"\[5, 2, 1\], where 4 tokens have been routed"),
        ({"routed_experts": np.zeros((4, 2), np.int32)}, r"routed_experts of shape \[4, 2\]"),
        ({"token_ids": np.array([0.5, 1.0])}, r"completion.token_ids\n +got: +an array of dtype float64"),
        ({"token_ids": np.array([-1, 2])}, "completion.token_ids"),
        ({"token_ids": np.array([[1, 2]])}, r"shape \[1, 2\]"),
        ({"token_ids": np.array([1, 2**31])}, r"2147483648 at position 1\n +expected: token ids: whole numbers from 0"),
        ({"token_ids": [[1], [2, 3]]}, r"completion.token_ids\n +got: +list that makes no array"),
        ({"token_ids": None}, r"completion.token_ids\n +got: +an array of dtype object and shape \[\]"),
        ({"log_probs": None}, r"completion.log_probs\n +got: +an array of dtype object"),
        ({"log_probs": np.array([math.nan, -1])}, "nan at position 0"),
        ({"log_probs": np.array([-1, -math.inf])}, "-inf at position 1"),
        ({"log_probs": [0.002, 1.0]}, "0.002, 1.0 at positions 0, 1"),
        ({"log_probs": ["-1", "-2"]}, r"log_probs\n +got: +an array of dtype <U2"),
        ({"log_probs": [-1e39, -1.0]}, r"-1e\+39 at position 0"),
        ({"message": None}, "message None"),
        ({"message": None, "finish_reason": ["stop"]}, r"message None; finish_reason \['stop'\]"),
        ({"message": {"content": nested()}}, r"completion.message\n +got: +what cannot be copied: RecursionError"),
        ({"message": {"content": threading.Lock()}}, "what cannot be copied: TypeError"),
        ({"routed_experts": [[1]]}, r"routed_experts \[\[1\]\]"),
        ({"routed_experts": np.zeros((4, 2, 1))}, "routed_experts array"),
        ({"weight_version": 5}, "weight_version 5"),
        ({"response_id": 5}, "response_id 5"),
    ],
)
def test_completions_that_do_not_fit(fields: dict[str, Any], text: str) -> None:
    forest = TrajectoryForest()
    with pytest.raises(SessionError, match=text):
        forest.commit(forest.attach(QUESTION), [1, 2, 3], reply(Chat(), "4", **fields))
    assert forest.nodes == []


def test_log_probs_may_be_above_zero_by_rounding() -> None:
    forest = TrajectoryForest()
    node = forest.commit(forest.attach(QUESTION), [1], reply(Chat(), "4", log_probs=[2.0**-20, -1.0]))
    assert node.completion.log_probs.tolist() == [2.0**-20, -1.0]


def test_an_attachment_to_another_session() -> None:
    with pytest.raises(SessionError, match=r"the turn 3\n +expected: one of the 0 turns"):
        TrajectoryForest().commit(Attachment(3, ()), [1], reply(Chat(), "x"))


def test_errors_are_of_one_tree() -> None:
    for kind in (PathEndedError, NodeLimitError, HookError):
        assert issubclass(kind, SessionError)
    assert SessionError.__mro__[1:3] == (MilesNormError, ValueError)


def test_what_is_committed_is_not_the_callers() -> None:
    forest, messages = TrajectoryForest(), [user("a")]
    completion = reply(Chat(), "b")
    prompt = np.array([1, 2], np.int32)
    node = forest.commit(forest.attach(messages), prompt, completion, committed_at=3.5)
    messages[0]["content"] = "changed"
    completion.message["content"] = "changed"
    prompt[:] = completion.token_ids[:] = 0
    completion.log_probs[:] = 0
    assert forest.messages(0) == [user("a"), assistant("b")]
    sampled = [*Chat().encode("b"), STOP]
    assert forest.token_ids(0).tolist() == [1, 2, *sampled]
    assert node.completion.token_ids.tolist() == sampled
    assert node.completion.log_probs.all()
    assert node.committed_at == 3.5
    with pytest.raises(ValueError, match="read-only"):
        forest.token_ids(0)[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        forest.prompt_token_ids(0)[0] = 9


def test_experts_are_held_once() -> None:
    """Of each turn only what lies beyond the context before: 3 + 2 - 1 rows, then 8 + 1 - 5 more."""
    forest, experts = TrajectoryForest(), np.arange(8 * 2 * 3, dtype=np.int32).reshape(8, 2, 3)
    first = forest.commit(forest.attach(QUESTION), [1, 2, 3], reply(Chat(), "4", routed_experts=experts[:4]))
    prompt = [*forest.token_ids(0), 7, 8, 9]
    second = forest.commit(Attachment(0, (user("x"),)), prompt, reply(Chat(), "", routed_experts=experts + 100))
    assert np.array_equal(first.completion.routed_experts, experts[:4])
    assert np.array_equal(second.completion.routed_experts, experts[4:] + 100)
    afresh = forest.commit(Attachment(0, (user("y"),)), prompt[1:], reply(Chat(), "", routed_experts=experts[1:]))
    assert afresh.starts_row
    assert np.array_equal(afresh.completion.routed_experts, experts[1:])


def test_what_earlier_turns_hold_is_not_held_again() -> None:
    """Also on branches: every token of the forest once."""
    forest = TrajectoryForest()
    forest.commit(forest.attach(QUESTION), [1] * 10, reply(Chat(), "a"))
    for number in range(50):
        prompt = np.concatenate([forest.token_ids(number - number % 2), [number]])
        forest.commit(Attachment(number - number % 2, ()), prompt, reply(Chat(), "a"))
    held = [node.new_prompt_token_ids.base is None and len(node.new_prompt_token_ids) for node in forest.nodes]
    assert held == [10] + [1] * 50
    assert forest.mismatches == 0
    # Turn 49 continues 48, which continues 46, and so on: 25 turns after the first one, each of 1 + 2 tokens.
    assert len(forest.token_ids(49)) == 10 + 2 + 25 * 3


def test_mismatches_are_counted() -> None:
    session = Session(StripsThinking())
    first = session.turn(QUESTION, "think</think>4")
    session.turn(session.then(first, "Sure?"), "yes</think>4")
    assert session.forest.mismatches == 1
    assert [node.starts_row for node in session.forest.nodes] == [True, True]


def records_of(forest: TrajectoryForest) -> list[Any]:
    return [node.record() for node in forest.nodes]


def test_replayed_records_give_the_same_forest() -> None:
    session = Session(StripsThinking())
    first = session.turn(QUESTION, "think</think>4", tools=[{"name": "f"}])
    second = session.turn(session.then(first, "Sure?"), "yes")
    session.turn(session.then(second, "Why?"), "so", finish_reason="length")
    session.turn(session.then(first, "No?"), "no")
    again = TrajectoryForest()
    for record in records_of(session.forest):
        again.replay(record)
    assert str(records_of(again)) == str(records_of(session.forest))
    for ours, theirs in zip(again.nodes, session.forest.nodes, strict=True):
        assert again.token_ids(ours.seq).tolist() == session.forest.token_ids(ours.seq).tolist()
        assert (ours.parent, ours.starts_row, ours.tools) == (theirs.parent, theirs.starts_row, theirs.tools)
        assert again.messages(ours.seq) == session.forest.messages(ours.seq)
    # What one turn added, not the whole context.
    shortened = [
        len(record["new_prompt_token_ids"]) < node.prompt_length
        for record, node in zip(records_of(again), again.nodes, strict=True)
    ]
    assert shortened == [False, False, True, False]


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2]])
def test_records_out_of_order(order: list[int]) -> None:
    session = Session()
    first = session.turn(QUESTION, "4")
    second = session.turn(session.then(first, "Sure?"), "yes")
    session.turn(session.then(second, "Why?"), "so")
    records, again = records_of(session.forest), TrajectoryForest()
    for number in order[:-1]:
        again.replay(records[number])
    with pytest.raises(SessionError, match="turn"):
        again.replay(records[order[-1]])


def test_a_record_that_continues_nothing() -> None:
    session = Session()
    session.turn(QUESTION, "4")
    record = session.forest.nodes[0].record() | {"starts_row": False}
    with pytest.raises(SessionError, match="record of turn 0"):
        TrajectoryForest().replay(record)


def test_replay_with_routed_experts() -> None:
    forest, experts = TrajectoryForest(), np.arange(8 * 2, dtype=np.int32).reshape(8, 2, 1)
    forest.commit(forest.attach(QUESTION), [1, 2, 3], reply(Chat(), "4", routed_experts=experts[:4]))
    forest.commit(Attachment(0, ()), [*forest.token_ids(0), 7, 8, 9], reply(Chat(), "", routed_experts=experts))
    again = TrajectoryForest()
    for record in records_of(forest):
        again.replay(record)
    for ours, theirs in zip(again.nodes, forest.nodes, strict=True):
        assert np.array_equal(ours.completion.routed_experts, theirs.completion.routed_experts)


def test_a_deep_conversation_attaches() -> None:
    """Deeper than the interpreter's stack."""
    forest, messages = TrajectoryForest(), []
    for number in range(1500):
        messages += [user(str(number)), assistant("")]
        forest.commit(
            Attachment(number - 1 if number else None, (messages[-2],)),
            np.arange(number + 1),
            Completion(assistant(""), np.empty(0, np.int32), np.empty(0, np.float32), "stop"),
        )
    assert forest.attach(messages).parent == 1499
