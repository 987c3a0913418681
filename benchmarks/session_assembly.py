"""How fast do sessions become rows? Ratios against plain assemblies in Python lists, measured in this run.

    python benchmarks/session_assembly.py            conversations of up to 10,000 turns, about half a minute
    python benchmarks/session_assembly.py --short    up to 1,000 turns, a few seconds
    python benchmarks/session_assembly.py --json F   the figures to a file as well

Two plain assemblies give the same row of a linear conversation: one appends the tokens, mask and log-probs of turn
after turn to lists; the other folds two turns at a time into a new sample, as session servers do that merge samples.
Both then make the arrays that go to the trainer. Results are compared first.
"""

import argparse
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from normalize import best

from miles_norm import Sample
from miles_norm.session.assembly import assemble
from miles_norm.session.completion import Completion
from miles_norm.session.hooks import drop_retries
from miles_norm.session.node import Attachment
from miles_norm.session.tree import TrajectoryForest

ASKED, ANSWERED = 30, 20
"""Tokens that a turn adds to the prompt, and tokens that are sampled."""
FOLDED_UP_TO = 1_000
"""Turns; folding 10,000 takes minutes."""
DTYPES = {"tokens": np.int32, "loss_mask": np.uint8, "rollout_log_probs": np.float32}
BASE = Sample(index=0)


@dataclass
class Turn:
    """A turn as a server holds it that works with lists: tokens that its prompt adds, sampled tokens, log-probs."""

    asked: list[int]
    sampled: list[int]
    log_probs: list[float]


def conversation(turns: int, retries_every: int = 0) -> TrajectoryForest:
    """A conversation in which every so many turns are tried twice; the second attempt goes on."""
    rng = np.random.default_rng(0)
    forest = TrajectoryForest(max_nodes=10**6)
    parent: int | None = None
    for turn in range(turns):
        before = np.empty(0, np.int32) if parent is None else forest.token_ids(parent)
        prompt = np.concatenate([before, rng.integers(0, 150_000, ASKED, np.int32)])
        for _ in range(2 if retries_every and (turn + 1) % retries_every == 0 else 1):
            completion = Completion(
                {"role": "assistant", "content": ""},
                rng.integers(0, 150_000, ANSWERED, np.int32),
                rng.random(ANSWERED, np.float32) - 2,
                "stop",
            )
            node = forest.commit(Attachment(parent, ()), prompt, completion)
        parent = node.seq
    return forest


def as_lists(forest: TrajectoryForest) -> list[Turn]:
    """The turns of a linear conversation."""
    return [
        Turn(node.new_prompt_token_ids.tolist(), node.completion.token_ids.tolist(), node.completion.log_probs.tolist())
        for node in forest.nodes
    ]


def as_arrays(row: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: np.array(row[name], dtype) for name, dtype in DTYPES.items()}


def appended(turns: list[Turn]) -> dict[str, Any]:
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    for number, turn in enumerate(turns):
        if number:
            mask += [0] * len(turn.asked)
            log_probs += [0.0] * len(turn.asked)
        tokens += turn.asked
        tokens += turn.sampled
        mask += [1] * len(turn.sampled)
        log_probs += turn.log_probs
    return as_arrays({"tokens": tokens, "loss_mask": mask, "rollout_log_probs": log_probs})


def folded(turns: list[Turn]) -> dict[str, Any]:
    whole: dict[str, list[Any]] = {
        "tokens": turns[0].asked + turns[0].sampled,
        "loss_mask": [1] * len(turns[0].sampled),
        "rollout_log_probs": turns[0].log_probs,
    }
    for turn in turns[1:]:
        whole = {
            "tokens": whole["tokens"] + turn.asked + turn.sampled,
            "loss_mask": whole["loss_mask"] + [0] * len(turn.asked) + [1] * len(turn.sampled),
            "rollout_log_probs": whole["rollout_log_probs"] + [0.0] * len(turn.asked) + turn.log_probs,
        }
    return as_arrays(whole)


def ours(forest: TrajectoryForest) -> list[Sample]:
    return assemble(forest, BASE, drop_retries)


def check_same() -> None:
    forest = conversation(50)
    turns = as_lists(forest)
    [row] = ours(forest)
    for plain in (appended(turns), folded(turns)):
        for name, dtype in DTYPES.items():
            assert getattr(row, name).dtype == dtype
            assert np.array_equal(getattr(row, name), plain[name])
    [row] = ours(conversation(50, retries_every=5))
    assert len(row.tokens) == 50 * (ASKED + ANSWERED)


def growth_exponent(lines: list[dict[str, float]], name: str) -> float:
    """Slope of log time over log tokens; 1 is linear."""
    measured = [line for line in lines if name in line]
    tokens, seconds = ([line[key] for line in measured] for key in ("tokens", name))
    return float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0])


def measure(turns: int) -> dict[str, float]:
    forest = conversation(turns)
    held = as_lists(forest)
    line = {"turns": turns, "tokens": forest.nodes[-1].context_length, "ours": best(lambda: ours(forest), 2.0)}
    line["appended"] = best(lambda: appended(held), 2.0)
    if turns <= FOLDED_UP_TO:
        line["folded"] = best(lambda: folded(held), 0.5)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="smaller sizes, a few seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    print(f"numpy {np.__version__}, Python {platform.python_version()}")
    check_same()
    sizes = [100, 300, 1_000] if options.short else [100, 300, 1_000, 3_000, 10_000]
    print(f"one conversation, {ASKED} tokens asked and {ANSWERED} sampled a turn: one row")
    print(f"{'turns':>7} {'tokens':>8} {'ms':>8} {'us/turn':>8} {'ns/token':>9}  {'x appending':>11} {'x folding':>10}")
    lines = [measure(turns) for turns in sizes]
    for line in lines:
        ms, turns, tokens = line["ours"] * 1e3, int(line["turns"]), int(line["tokens"])
        ratios = [f"{line[name] / line['ours']:.2f}" if name in line else "" for name in ("appended", "folded")]
        print(
            f"{turns:>7} {tokens:>8} {ms:>8.2f} {ms * 1e3 / turns:>8.2f} {ms * 1e6 / tokens:>9.1f}  "
            f"{ratios[0]:>11} {ratios[1]:>10}"
        )
    exponents = {name: growth_exponent(lines, name) for name in ("ours", "appended", "folded")}
    print(f"growth exponent in tokens: ours {exponents['ours']:.3f}, appending {exponents['appended']:.3f}", end="")
    print(f", folding {exponents['folded']:.3f} (up to {FOLDED_UP_TO} turns)")
    forest = conversation(sizes[-1] // 10, retries_every=5)
    held = sum(len(node.new_prompt_token_ids) + len(node.completion.token_ids) for node in forest.nodes)
    snapshots = sum(node.context_length for node in forest.nodes)
    print(f"{len(forest.nodes)} turns, {len(forest.leaves())} of them leaves: {held} tokens are held;", end=" ")
    print(f"the whole context of every turn would be {snapshots / held:.0f} times as many")
    if options.json:
        figures = {"linear": lines, "growth_exponents": exponents, "held": held, "snapshots": snapshots}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
