"""Rows and turns as bytes, and what cut or foreign bytes give."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from conversations import Session, StripsThinking, user

from miles_norm import RolloutDump, Sample, normalize_rewards, read_dump, write_dump
from miles_norm.errors import DumpError
from miles_norm.session.assembly import assemble, session_metadata
from miles_norm.session.hooks import assign_reward
from miles_norm.session.tree import TrajectoryForest
from miles_norm.session.wire import decode_node, decode_rows, encode_node, encode_rows


def session() -> Session:
    made = Session(StripsThinking())
    first = made.turn([user("a")], "hm</think>b", tools=[{"name": "é"}], weight_version="v1")
    made.turn(made.then(first, "c"), "d", finish_reason="length", stop=False)
    made.turn(made.then(first, "e"), "")
    return made


def some_rows(**fields: Any) -> list[Sample]:
    base = Sample(group_index="g", index=4, label="é", metadata={"n": 1}, **fields)
    return assemble(session().forest, base, post_processors=[assign_reward], agent={"reward": 0.5})


def test_rows_come_back_with_their_arrays() -> None:
    rows = some_rows()
    back, metadata = decode_rows(encode_rows(rows, session_metadata(session().forest)))
    assert metadata == session_metadata(session().forest)
    assert len(back) == len(rows) == 3
    for ours, theirs in zip(back, rows, strict=True):
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            assert isinstance(getattr(ours, name), np.ndarray)
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
        assert ours.to_dict().keys() == theirs.to_dict().keys()
        for name in ("group_index", "index", "rollout_id", "label", "status", "reward", "weight_versions", "metadata"):
            assert getattr(ours, name) == getattr(theirs, name)
            assert type(getattr(ours, name)) is type(getattr(theirs, name))


@pytest.mark.parametrize("ids", [(0, 1), ("a", "b"), (0, "a"), (None, 2), (2**70, 3)])
def test_ids_keep_their_types(ids: tuple[Any, Any]) -> None:
    rows = [Sample(group_index=one, index=one, rollout_id=one) for one in ids]
    back, _ = decode_rows(encode_rows(rows))
    for name in ("group_index", "index", "rollout_id"):
        assert [getattr(row, name) for row in back] == list(ids)


def test_routed_experts_and_missing_ones() -> None:
    experts = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    rows = [Sample(rollout_routed_experts=experts), Sample(), Sample(rollout_routed_experts=experts[:0])]
    back, _ = decode_rows(encode_rows(rows))
    assert np.array_equal(back[0].rollout_routed_experts, experts)
    assert back[0].rollout_routed_experts.dtype == np.int32
    assert back[1].rollout_routed_experts is None
    assert back[2].rollout_routed_experts.shape == (0, 3, 2)


def test_no_rows() -> None:
    assert decode_rows(encode_rows([], {"empty": True})) == ([], {"empty": True})


def test_rows_are_one_tensor_a_column() -> None:
    """A container that any reader of safetensors opens; the number of tensors does not grow with the rows."""
    one, three = (safetensors.numpy.load(encode_rows(rows)) for rows in (some_rows()[:1], some_rows()))
    assert one.keys() == three.keys()
    lengths = [len(row.tokens) for row in some_rows()]
    assert three["tokens.offsets"].tolist() == [0, *np.cumsum(lengths)]
    assert three["tokens.values"].dtype == np.int32
    assert three["loss_mask.values"].dtype == np.uint8


def test_bytes_are_a_dump(tmp_path: Path) -> None:
    """What a server answered, written to a file, is a dump; and a dump, read as bytes, is an answer."""
    rows, path = some_rows(), tmp_path / "rows.safetensors"
    path.write_bytes(encode_rows(rows, {"turns": 3}))
    dump = read_dump(path)
    assert dump.metadata == {"turns": 3}
    assert torch.equal(normalize_rewards(dump.samples).advantages, normalize_rewards(rows).advantages)
    write_dump(RolloutDump([row.to_dict() for row in rows], 5, {"turns": 3}), path)
    back, metadata = decode_rows(path.read_bytes())
    assert metadata == {"turns": 3}
    assert str(back) == str(rows)


def test_values_without_a_form() -> None:
    rows = some_rows()
    rows[1].metadata["odd"] = object()
    with pytest.raises(DumpError, match=r"rows of a session\n +got: +'metadata.odd': a value of type object"):
        encode_rows(rows)
    with pytest.raises(DumpError, match="type object"):
        encode_rows(some_rows(), {"a": object()})


def test_damaged_rows() -> None:
    """Every cut and many flipped bytes: rows or one error, and never another exception."""
    data, generator = encode_rows(some_rows()), random.Random(0)
    with pytest.raises(DumpError, match="rows of a session"):
        decode_rows(b"")
    for end in (1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(DumpError):
            decode_rows(data[:end])
    refused = 0
    for _ in range(100):
        flipped = bytearray(data)
        flipped[generator.randrange(4000)] ^= 1 << generator.randrange(8)
        try:
            decode_rows(bytes(flipped))
        except DumpError:
            refused += 1
    assert refused > 50


def test_bytes_of_others() -> None:
    foreign = safetensors.numpy.save({"tokens": np.zeros(3)})
    with pytest.raises(DumpError, match="a safetensors file that this library did not write"):
        decode_rows(foreign)


def test_a_turn_is_one_line_of_what_it_added() -> None:
    made = Session()
    first = made.turn([user("a" * 1000)], "b", tools=[{"name": "é"}], weight_version="v1")
    second = made.turn(made.then(first, "c"), "d", tools=[{"name": "é"}])
    lines = [encode_node(node) for node in (first, second)]
    assert all(line.isascii() and b"\n" not in line for line in lines)
    assert len(lines[1]) < 1000 < len(lines[0])
    record = json.loads(lines[1])
    assert (record["seq"], record["parent"], record["starts_row"]) == (1, 0, False)
    assert record["suffix"] == [user("c")]
    assert record["completion"]["message"] == {"role": "assistant", "content": "d"}


def test_turns_come_back() -> None:
    made, again = session(), TrajectoryForest()
    for node in made.forest.nodes:
        back = decode_node(again, encode_node(node))
        assert (back.seq, back.parent, back.suffix, back.tools) == (node.seq, node.parent, node.suffix, node.tools)
        assert (back.starts_row, back.prompt_length) == (node.starts_row, node.prompt_length)
        assert back.committed_at == node.committed_at
        assert np.array_equal(again.token_ids(back.seq), made.forest.token_ids(node.seq))
        assert str(back.completion) == str(node.completion)
    assert encode_node(again.nodes[2]) == encode_node(made.forest.nodes[2])


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"3", b'{"seq": 0}', b'{"$":"os.system","args":["x"]}', "é".encode(), b"null"]
)
def test_damaged_turns(data: bytes) -> None:
    with pytest.raises(DumpError, match="record of a turn"):
        decode_node(TrajectoryForest(), data)


def test_turns_that_are_cut_or_out_of_order() -> None:
    made, again = session(), TrajectoryForest()
    lines = [encode_node(node) for node in made.forest.nodes]
    with pytest.raises(DumpError, match="SessionError"):
        decode_node(again, lines[1])
    for end in range(0, len(lines[0]), 7):
        with pytest.raises(DumpError):
            decode_node(again, lines[0][:end])
    assert again.nodes == []
    decode_node(again, lines[0])
    with pytest.raises(DumpError, match="record of turn 0: a session of 1 turns"):
        decode_node(again, lines[0])
    lines[1] = lines[1].replace(b'"finish_reason":"length"', b'"finish_reason":"x"')
    with pytest.raises(DumpError, match="finish_reason 'x'"):
        decode_node(again, lines[1])
    assert len(again.nodes) == 1
