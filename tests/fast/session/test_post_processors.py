"""What post-processors may do to masks, and what hooks must not hide."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conversations import Session, user

from miles_norm import Sample
from miles_norm.errors import HookError, SessionError
from miles_norm.session.assembly import assemble
from miles_norm.session.hooks import assign_reward, mask_ownership


def branched() -> Session:
    """Turn 0 and its two continuations 1 and 2: two rows, and turn 0 is trainable in that of leaf 1."""
    session = Session()
    first = session.turn([user("a")], "b")
    for question in "cd":
        session.turn(session.then(first, question), "e")
    return session


def processed(session: Session, *hooks: Any) -> list[Sample]:
    return assemble(session.forest, Sample(index=0), post_processors=hooks)


def all_ones(rows: list[Sample], _: Any) -> list[Sample]:
    for row in rows:
        row.loss_mask = np.ones(row.response_length, np.uint8)
    return rows


def no_mask(rows: list[Sample], _: Any) -> list[Sample]:
    rows[1].loss_mask = None
    return rows


def prompt_too(rows: list[Sample], _: Any) -> list[Sample]:
    rows[0].response_length = len(rows[0].tokens)
    rows[0].loss_mask = np.ones(len(rows[0].tokens), np.uint8)
    return rows


def shared_twice(rows: list[Sample], _: Any) -> list[Sample]:
    rows[0].loss_mask[:2] = 1
    return rows


def copied_row(rows: list[Sample], _: Any) -> list[Sample]:
    return [*rows, replace(rows[0])]


def other_tokens(rows: list[Sample], _: Any) -> list[Sample]:
    rows[1].tokens = rows[1].tokens + 1
    return rows


def made_up(rows: list[Sample], _: Any) -> list[Sample]:
    return [*rows, Sample(tokens=[1, 2], response_length=1, loss_mask=[1])]


def weighted(rows: list[Sample], _: Any) -> list[Sample]:
    rows[0].loss_mask = rows[0].loss_mask * 0.5
    return rows


def short(rows: list[Sample], _: Any) -> list[Sample]:
    rows[0].loss_mask = rows[0].loss_mask[1:]
    return rows


def no_length(rows: list[Sample], _: Any) -> list[Sample]:
    rows[0].response_length = "5"
    return rows


def later_spans(rows: list[Sample], metadata: dict[str, Any]) -> list[Sample]:
    """Also not by telling of other spans."""
    for node in metadata["tree"]["nodes"]:
        node["completion_span"] = [0, 10**6]
    return all_ones(rows, metadata)


# A row is the question, then b and a stop token, the text between and the next question, and e and a stop token. The
# text between is a stop token's line feed and two messages' frames: as many tokens as `between` counts.
@pytest.mark.parametrize(
    ("hook", "got"),
    [
        (all_ones, "row 0: {between} tokens trainable that were not sampled in its turns; row 1: {between} tokens"),
        (later_spans, "row 0: {between} tokens trainable that were not sampled in its turns; row 1: {between} tokens"),
        (no_mask, "row 1: {between} tokens trainable that were not sampled in its turns"),
        (prompt_too, "row 0: {prompt} tokens trainable that were not sampled in its turns"),
        (shared_twice, "turn 0 trainable in several rows"),
        (copied_row, "turn 2 trainable in several rows"),
        (other_tokens, "row 1: 4 tokens trainable that were not sampled in its turns"),
        (made_up, "row 2: trainable tokens, and it is none of the rows that the session has"),
        (weighted, "row 0: a loss_mask that is not 0 or 1 for each of its {length} response tokens"),
        (short, "row 0: a loss_mask that is not 0 or 1 for each of its {length} response tokens"),
        (no_length, "row 0: response_length '5'"),
    ],
)
def test_a_post_processor_trains_nothing_that_was_not_sampled_once(hook: Any, got: str) -> None:
    session = branched()
    row = processed(session)[0]
    length, tokens = row.response_length, len(row.tokens)
    text = got.format(between=length - 4, prompt=tokens - 4, length=length)
    with pytest.raises(HookError, match=rf"post-processor {hook.__name__}\n +got: +{text}"):
        processed(session, hook)
    # Nor after one that keeps to it.
    with pytest.raises(HookError, match=rf"post-processor {hook.__name__}\n +got: +{text}"):
        processed(session, assign_reward, mask_ownership, hook)


def test_a_post_processor_may_take_away() -> None:
    def shrink(rows: list[Sample], _: Any) -> list[Sample]:
        rows[0].loss_mask[-1] = 0
        rows[1].loss_mask = [0] * rows[1].response_length
        return rows

    def restore(rows: list[Sample], _: Any) -> list[Sample]:
        rows[0].loss_mask[-1] = 1
        return rows

    assert [int(np.sum(row.loss_mask)) for row in processed(branched(), shrink)] == [1, 0]
    assert [int(np.sum(row.loss_mask)) for row in processed(branched(), shrink, restore)] == [2, 0]
    assert processed(branched(), lambda rows, _: []) == []


def test_a_post_processor_may_move_a_shared_turn() -> None:
    """Turn 0, the first two response tokens, from leaf 1 to leaf 2."""

    def move(rows: list[Sample], _: Any) -> list[Sample]:
        rows[0].loss_mask[:2], rows[1].loss_mask[:2] = 1, 0
        return rows

    def drop_the_owner(rows: list[Sample], _: Any) -> list[Sample]:
        rows[0].loss_mask[:2] = 1
        return rows[:1]

    def remove_the_owner(rows: list[Sample], _: Any) -> list[Sample]:
        rows[0].loss_mask[:2] = 1
        rows[1].remove_sample = True
        return rows

    def bring_it_back(rows: list[Sample], _: Any) -> list[Sample]:
        rows[1].remove_sample = False
        return rows

    assert [int(row.loss_mask.sum()) for row in processed(branched())] == [2, 4]
    assert [int(row.loss_mask.sum()) for row in processed(branched(), move)] == [4, 2]
    assert [int(row.loss_mask.sum()) for row in processed(branched(), drop_the_owner)] == [4]
    assert len(processed(branched(), remove_the_owner)) == 2
    with pytest.raises(HookError, match=r"post-processor bring_it_back\n +got: +turn 0 trainable in several rows"):
        processed(branched(), remove_the_owner, bring_it_back)


def test_a_post_processor_may_divide_a_row() -> None:
    """One row of turn 0 and one of turn 1, copies of what the session had."""

    def divide(rows: list[Sample], _: Any) -> list[Sample]:
        masks = [rows[1].loss_mask.copy() for _ in range(2)]
        masks[0][2:], masks[1][:2] = 0, 0
        return [rows[0], *(replace(rows[1], loss_mask=mask) for mask in masks)]

    assert [int(row.loss_mask.sum()) for row in processed(branched(), divide)] == [2, 2, 2]
    # A row without trainable tokens may be anything.
    assert len(processed(branched(), lambda rows, _: [*rows, Sample(tokens=[1])])) == 3


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_values_that_a_picker_could_edit_unseen() -> None:
    session = branched()
    with pytest.raises(SessionError, match=r"metadata of the samples\n +got: +what cannot be pickled: TypeError"):
        assemble(session.forest, Sample(index=0, metadata={"lock": Locked()}))
    with pytest.raises(SessionError, match=r"session_metadata\n +got: +what cannot be pickled"):
        assemble(session.forest, Sample(index=0), agent={"f": lambda: None})

    def lock(leaves: list[Sample], _: Any) -> list[Sample]:
        leaves[0].metadata["lock"] = Locked()
        return leaves

    with pytest.raises(HookError, match=r"picker lock\n +got: +it edited what is now what cannot be pickled"):
        assemble(session.forest, Sample(index=0), lock)
