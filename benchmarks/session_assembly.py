"""How fast do sessions become rows? Ratios against plain assemblies in Python lists, measured in this run.

    python benchmarks/session_assembly.py            conversations of up to 10,000 turns, about half a minute
    python benchmarks/session_assembly.py --short    up to 1,000 turns, a few seconds
    python benchmarks/session_assembly.py --json F   the figures to a file as well

Two plain assemblies give the same row of a linear conversation: one appends the tokens, mask and log-probs of turn
after turn to lists; the other folds two turns at a time into a new sample, as session servers do that merge samples.
Every turn has the whole prompt that was sent and a completion. Results are compared first.
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
BASE = Sample(index=0)


@dataclass
class Turn:
    """What a server that holds lists has of a turn: tokens of prompt and completion, and log-probs."""

    tokens: list[int]
    log_probs: list[float]


def conversation(turns: int, retries_every: int = 0) -> TrajectoryForest:
    """A conversation in which every so many turns are tried twice; the second attempt goes on."""
    rng = np.random.default_rng(0)
    forest = TrajectoryForest(max_nodes=10**6)
    parent: int | None = None
    for turn in range(turns):
        before = np.empty(0, np.int32) if parent is None else forest.token_ids(parent)
        prompt = np.concatenate([before, rng.integers(0, 150_000, ASKED, np.int32)])
        for _ in range(2 if retries_every and turn % retries_every == 0 else 1):
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
    """The turns of a linear conversation; every one holds its whole context, so this is done for short ones only."""
    return [Turn(forest.token_ids(node.seq).tolist(), node.completion.log_probs.tolist()) for node in forest.nodes]


def appended(turns: list[Turn]) -> dict[str, list[Any]]:
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    for number, turn in enumerate(turns):
        new = len(turn.tokens) - len(turn.log_probs) - len(tokens)
        if number:
            mask += [0] * new
            log_probs += [0.0] * new
        tokens += turn.tokens[len(tokens) :]
        mask += [1] * len(turn.log_probs)
        log_probs += turn.log_probs
    return {"tokens": tokens, "loss_mask": mask, "rollout_log_probs": log_probs}


def folded(turns: list[Turn]) -> dict[str, list[Any]]:
    def row(turn: Turn) -> dict[str, list[Any]]:
        return {
            "tokens": turn.tokens,
            "loss_mask": [1] * len(turn.log_probs),
            "rollout_log_probs": turn.log_probs,
        }

    whole = row(turns[0])
    for turn in turns[1:]:
        one = row(turn)
        assert one["tokens"][: len(whole["tokens"])] == whole["tokens"]
        new = len(one["tokens"]) - len(whole["tokens"]) - len(one["loss_mask"])
        whole = {
            "tokens": one["tokens"],
            "loss_mask": whole["loss_mask"] + [0] * new + one["loss_mask"],
            "rollout_log_probs": whole["rollout_log_probs"] + [0.0] * new + one["rollout_log_probs"],
        }
    return whole


def ours(forest: TrajectoryForest) -> list[Sample]:
    return assemble(forest, BASE, drop_retries)


def check_same() -> None:
    forest = conversation(50)
    turns = as_lists(forest)
    assert appended(turns) == folded(turns)
    [row] = ours(forest)
    for name, values in appended(turns).items():
        assert getattr(row, name).tolist() == values
    [row] = ours(conversation(50, retries_every=5))
    assert len(row.tokens) == 50 * (ASKED + ANSWERED)


def growth_exponent(tokens: list[int], seconds: list[float]) -> float:
    """Slope of log time over log tokens; 1 is linear."""
    return float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="smaller sizes, a few seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    print(f"numpy {np.__version__}, Python {platform.python_version()}")
    check_same()
    sizes = [100, 300, 1_000] if options.short else [100, 300, 1_000, 3_000, 10_000]
    lines: list[dict[str, float]] = []
    print(f"one conversation, {ASKED} tokens asked and {ANSWERED} sampled a turn, one row")
    print(
        f"{'turns':>7} {'tokens':>8} {'ms':>8} {'us/turn':>8} {'ns/token':>9} {'x appended lists':>17} {'x folded':>9}"
    )
    for turns in sizes:
        forest = conversation(turns)
        tokens = forest.nodes[-1].context_length
        line: dict[str, float] = {"turns": turns, "tokens": tokens, "seconds": best(lambda forest=forest: ours(forest))}
        ratios = ["", ""]
        if turns <= 1_000:  # lists of all contexts of 10,000 turns would be 20 GB
            held = as_lists(forest)
            for number, plain in enumerate((appended, folded)):
                line[plain.__name__] = best(lambda plain=plain, held=held: plain(held), 0.5)
                ratios[number] = f"{line[plain.__name__] / line['seconds']:.2f}"
        lines.append(line)
        seconds = line["seconds"]
        print(
            f"{turns:>7} {tokens:>8} {seconds * 1e3:>8.2f} {seconds / turns * 1e6:>8.2f} {seconds / tokens * 1e9:>9.1f} "
            f"{ratios[0]:>17} {ratios[1]:>9}"
        )
    exponents = {"ours": growth_exponent([int(line["tokens"]) for line in lines], [line["seconds"] for line in lines])}
    for plain in ("appended", "folded"):
        measured = [line for line in lines if plain in line]
        exponents[plain] = growth_exponent(
            [int(line["tokens"]) for line in measured], [line[plain] for line in measured]
        )
    print(
        f"growth exponent in tokens up to {sizes[-1]} turns: {exponents['ours']:.3f} "
        f"(up to 1000 turns: appended lists {exponents['appended']:.3f}, folded {exponents['folded']:.3f})"
    )
    forest = conversation(sizes[-1], retries_every=5)
    leaves = len(forest.leaves())
    held_tokens = sum({id(node.log): len(node.log.ids(node.context_length)) for node in forest.nodes}.values())
    figures = {"linear": lines, "growth_exponents": exponents, "leaves": leaves, "held_tokens": held_tokens}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
