"""The prompt of a turn: what was sampled, untouched, and then the text of the template."""

from typing import Any

import numpy as np
import pytest
from conversations import STOP, Chat, Session, StripsThinking, Trims, assistant, reply, user
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.session.node import Attachment
from miles_norm.session.prompt import next_prompt

QUESTION = [user("2 + 2?")]
NEXT = "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def text_after(session: Session, **fields: Any) -> str:
    """What a second prompt puts behind the tokens of the first turn."""
    first = session.turn(QUESTION, fields.pop("text", "4"), **fields)
    prompt = next_prompt(session.forest, session.forest.attach(session.then(first, "Sure?")), session.chat)
    assert prompt.extends
    assert np.array_equal(prompt.token_ids[: first.context_length], session.forest.token_ids(first.seq))
    return session.chat.decode(prompt.token_ids[first.context_length :].tolist())


def test_a_first_prompt_is_the_rendered_request() -> None:
    session = Session()
    prompt = next_prompt(session.forest, session.forest.attach(QUESTION), session.chat)
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids.tolist() == session.chat.encode(text)
    assert prompt.token_ids.dtype == np.int32
    assert not prompt.extends


def test_the_line_feed_behind_a_reply_is_rendered() -> None:
    assert text_after(Session()) == "\n" + NEXT


def test_a_reply_without_its_stop_token_is_closed() -> None:
    """As after a stop string, which the engine takes away."""
    assert text_after(Session(), stop=False) == "<|im_end|>\n" + NEXT


def test_an_aborted_reply_is_closed() -> None:
    assert text_after(Session(), stop=False, finish_reason="abort") == "<|im_end|>\n" + NEXT


@pytest.mark.parametrize("text", ["", " 4 ", "4\n", "<|im_end|", "é\n\n", "<|im_start|>"])
def test_odd_replies(text: str) -> None:
    assert text_after(Session(), text=text) == "\n" + NEXT
    assert text_after(Session(), text=text, stop=False) == "<|im_end|>\n" + NEXT


def test_sampled_tokens_are_not_merged_by_the_tokenizer() -> None:
    chat = Chat(merges=["44", "\n\n", "4\n"])
    session = Session(chat)
    assert text_after(session, text="4444") == "\n" + NEXT
    first = session.forest.nodes[0]
    assert first.completion.token_ids.tolist() != chat.encode("4444<|im_end|>")
    assert first.completion.token_ids.tolist() == [*Chat().encode("4444"), STOP]


def test_a_parsed_tool_call_is_not_written_again() -> None:
    """The message holds the parsed call and renders otherwise than it was sampled: the tokens stay, and the row."""
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    for stop, closed in ((True, "\n"), (False, "<|im_end|>\n")):
        after = text_after(Session(), text='<call>add( {"a":1} )</call>', message=message, stop=stop)
        assert after == closed + NEXT


def test_trimmed_content_keeps_the_row() -> None:
    assert text_after(Session(Trims()), text="  4 \n") == "\n" + NEXT
    assert text_after(Session(Trims()), text="  4 \n", stop=False) == "<|im_end|>\n" + NEXT


def test_a_template_that_removes_reasoning_starts_a_row() -> None:
    session = Session(StripsThinking())
    first = session.turn(QUESTION, "hm</think>4")
    second = session.turn(session.then(first, "Sure?"), "yes</think>Yes")
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n" + NEXT
    assert second.starts_row
    assert session.forest.prompt_token_ids(second.seq).tolist() == session.chat.encode(text)
    # A tool's answer is no question: the reasoning stays, and so does the row.
    tool = {"role": "tool", "content": "4"}
    third = session.turn([*session.forest.messages(second.seq), tool], "ok</think>Yes")
    assert not third.starts_row


def test_other_tools_start_a_row() -> None:
    session = Session()
    first = session.turn(QUESTION, "4", tools=[{"name": "f"}])
    assert not session.turn(session.then(first, "Sure?"), "yes", tools=[{"name": "f"}]).starts_row
    assert session.turn(session.then(first, "Sure?"), "yes", tools=[{"name": "g"}]).starts_row
    assert session.turn(session.then(first, "Sure?"), "yes").starts_row


def test_messages_that_matched_loosely_are_rendered_as_they_are_held() -> None:
    session = Session(match="loose")
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    first = session.turn(QUESTION, str(call["function"]), message=message)
    sent = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a":1}'}}]}
    assert not session.turn([*QUESTION, sent, user("Sure?")], "yes").starts_row
    assert session.forest.messages(1)[1] == first.completion.message


class Hides(Chat):
    """A template that writes replies twice, so that their end cannot be found by a probe."""

    def body(self, message: Any, latest: bool) -> str:
        text = super().body(message, latest)
        return f"{text}|{text}" if message["role"] == "assistant" else text


class EndsOtherwise(Chat):
    """A template that closes tool calls otherwise than text: with a token more, or with another one."""

    def __init__(self, closing: str) -> None:
        super().__init__()
        self.closing = closing

    def render(self, messages: Any, tools: Any = None, *, add_generation_prompt: bool) -> str:
        text = super().render(messages, tools, add_generation_prompt=add_generation_prompt)
        return text.replace("</call><|im_end|>\n", "</call>" + self.closing)


class OpensOtherwise(Chat):
    """A template whose opening of a reply is not what stands before replies of the past."""

    def render(self, messages: Any, tools: Any = None, *, add_generation_prompt: bool) -> str:
        text = super().render(messages, tools, add_generation_prompt=add_generation_prompt)
        return text + ("<think>\n" if add_generation_prompt else "")


class PlainText(Chat):
    """A template without special tokens."""

    def render(self, messages: Any, tools: Any = None, *, add_generation_prompt: bool) -> str:
        texts = [f"{message['role']}: {self.body(message, latest=True)}\n\n" for message in messages]
        return "".join(texts) + ("assistant: " if add_generation_prompt else "")


def test_a_template_of_plain_text() -> None:
    """What was sampled is a part of the reply, not of its closing, though both are line feeds."""
    session = Session(PlainText())
    after = "\n\nuser: Sure?\n\nassistant: "
    assert text_after(session, text="4\n", stop=False) == after
    assert session.chat.render(session.forest.messages(0), add_generation_prompt=False).endswith("4\n\n\n")


@pytest.mark.parametrize("chat", [Hides(), OpensOtherwise()])
def test_templates_that_do_not_extend(chat: Chat) -> None:
    session = Session(chat)
    first = session.turn(QUESTION, "4")
    second = session.turn(session.then(first, "Sure?"), "yes")
    assert second.starts_row
    rendered = chat.render(session.then(first, "Sure?"), add_generation_prompt=True)
    assert session.forest.prompt_token_ids(second.seq).tolist() == chat.encode(rendered)


@pytest.mark.parametrize("closing", ["<|endoftext|><|im_end|>\n", "<|endoftext|>\n"])
def test_tool_calls_that_are_closed_in_a_way_of_their_own(closing: str) -> None:
    """Where a parsed call does not end as text does, nothing tells where in the rendered text the sampled one ends."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    session = Session(EndsOtherwise(closing))
    if closing.endswith("<|im_end|>\n"):
        assert text_after(session, text="add()<|endoftext|>", message=message) == "\n" + NEXT
    else:
        first = session.turn(QUESTION, "add()<|endoftext|>", message=message, stop=False)
        assert session.turn(session.then(first, "Sure?"), "yes").starts_row
    # A call that renders as it was sampled is found in any case.
    function = {"name": "add", "arguments": "{}"}
    verbatim = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    session = Session(EndsOtherwise(closing))
    end = closing.removesuffix("\n")
    assert text_after(session, text=f"\n<call>{function}</call>{end}", message=verbatim, stop=False) == "\n" + NEXT


def test_no_new_message_asks_for_another_reply() -> None:
    session = Session()
    first = session.turn(QUESTION, "4")
    attachment = session.forest.attach(session.forest.messages(first.seq))
    prompt = next_prompt(session.forest, attachment, session.chat)
    assert prompt.extends
    assert session.chat.decode(prompt.token_ids[first.context_length :].tolist()) == "\n<|im_start|>assistant\n"


TEXTS = st.text(alphabet="ab \n<|>é4", max_size=6)


@given(
    st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=4), st.sampled_from(["", "44", "\n\n", "ab"])
)
def test_prompts_read_as_the_whole_conversation(turns: list[tuple[str, str, bool]], merge: str) -> None:
    """Whatever was sampled, with or without its end: contexts read as the template writes them, of sampled tokens."""
    session = Session(Chat(merges=[merge] if merge else []))
    messages: list[Any] = []
    for question, answer, stop in turns:
        messages.append(user(question))
        node = session.turn(messages, answer, stop=stop)
        assert session.chat.decode(session.forest.prompt_token_ids(node.seq).tolist()) == session.chat.render(
            messages, add_generation_prompt=True
        )
        messages.append(assistant(answer))
    assert [node.starts_row for node in session.forest.nodes] == [True] + [False] * (len(turns) - 1)
    for node in session.forest.nodes:
        sampled = node.completion.token_ids
        assert np.array_equal(
            session.forest.token_ids(len(turns) - 1)[node.prompt_length : node.context_length], sampled
        )


def test_a_hand_made_turn_need_not_come_from_here() -> None:
    """An engine that renders by itself: whether a row goes on is read off its tokens."""
    session = Session()
    session.turn(QUESTION, "4")
    extended = np.concatenate([session.forest.token_ids(0), [5]])
    assert not session.forest.commit(Attachment(0, ()), extended, reply(session.chat, "x")).starts_row
    extended[3] += 1
    assert session.forest.commit(Attachment(0, ()), extended, reply(session.chat, "x")).starts_row
    assert session.forest.commit(Attachment(0, ()), extended[:-2], reply(session.chat, "x")).starts_row
