"""How fast do samples become train data? Ratios against a plain conversion to a dict of lists, measured in this run.

    python benchmarks/convert.py            2,500 responses of 8,192 tokens, about a minute, 2 GB
    python benchmarks/convert.py --short    250 responses of 2,048 tokens
    python benchmarks/convert.py --json F   the figures to a file as well

The plain conversion does what trainers do: a row's reward is looked up per rollout (the sibling with the most trainable
tokens, for which every mask is summed), normalized per prompt group, masks are filled and zeroed, and every mask is
summed again for the tokens of its rollout. It gets Python lists in all comparisons; ours gets the same lists, then an
array per row and field, as rollout engines make them, then views of one buffer per field, as files give them. Results
are compared first.
Times are the best of several runs; memory is the growth of the peak of a process of its own, as a share of the payload.
"""

import argparse
import dataclasses
import functools
import gc
import json
import operator
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import in_new_process, peak_growth

from miles_norm import NormalizationConfig, Sample, convert_samples_to_train_data
from miles_norm.columns.masks import count_masks
from miles_norm.storage import read_train_data, write_train_data

FAN_OUT = (1, 2, 3, 4, 5)
FAN_OUT_SHARES = (0.36, 0.22, 0.18, 0.13, 0.11)
ROLLOUTS_PER_GROUP = 8
PROMPT = 1_024
READ_FIELDS = (
    "group_index", "index", "rollout_id", "reward", "loss_mask", "response_length", "remove_sample", "is_padding",
    "status", "adapter", "tokens", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl",
    "rollout_routed_experts", "rollout_indexer_topk", "train_metadata", "multimodal_train_inputs", "weight_versions",
    "metadata",
)  # fmt: skip
"""What a conversion looks at in every row."""
CONFIG = NormalizationConfig(advantage_estimator="grpo")


def make_samples(rows: int, response: int, kind: str, seed: int = 0) -> list[Sample]:
    """Prompts of 1,024 tokens and responses of one length, in which turns of 200 and observations of 130 alternate.

    Their lengths are uniform from nearly nothing to twice the mean, so that about 60% of the response is trainable.
    ``kind`` is "lists", "arrays" (one per row) or "views" (of one array per field).
    """
    rng = np.random.default_rng(seed)
    fan_out = rng.choice(FAN_OUT, p=FAN_OUT_SHARES, size=rows)
    rollout = np.repeat(np.arange(rows), fan_out)[:rows].tolist()
    reward = rng.random(rows)
    ids = rng.integers(0, 150_000, (rows, PROMPT + response))
    masks = turns(rng, rows, response)
    log_probs = rng.random((rows, response), dtype=np.float32) - 1
    give = {"lists": np.ndarray.tolist, "arrays": np.ndarray.copy, "views": lambda row: row}[kind]
    return [
        Sample(
            group_index=rollout[n] // ROLLOUTS_PER_GROUP,
            index=rollout[n],
            tokens=give(ids[n]),
            response_length=response,
            reward=float(reward[rollout[n]]),
            loss_mask=give(masks[n]),
            rollout_log_probs=give(log_probs[n]),
            remove_sample=n % 50 == 49,
            status="completed",
        )
        for n in range(rows)
    ]


def turns(rng: np.random.Generator, rows: int, response: int) -> np.ndarray[Any, Any]:
    """Loss masks ``[rows, response]``: turns are 1, observations are 0."""
    pairs = rows * response // 330 + 1000
    lengths = np.stack([rng.integers(20, 381, pairs), rng.integers(20, 241, pairs)], axis=1).ravel()
    return (
        np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)[: rows * response].reshape(rows, response).view(np.uint8)
    )


def payload(rows: int, response: int) -> int:
    """Bytes of the arrays: int64 ids, uint8 masks and float32 log-probs."""
    return rows * (8 * (PROMPT + response) + 5 * response)


def plain_rewards(samples: list[Sample]) -> list[float]:
    groups: dict[Any, dict[Any, list[int]]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group_index, {}).setdefault(sample.index, []).append(row)
    rewards = [0.0] * len(samples)
    for rollouts in groups.values():
        spoken = []
        for rows in rollouts.values():
            trainable = [0 if samples[row].remove_sample else sum(samples[row].loss_mask) for row in rows]
            spoken.append(samples[rows[trainable.index(max(trainable))]].reward)
        values = torch.tensor(spoken, dtype=torch.float32)
        scale = values.std() + 1e-6 if len(spoken) > 1 else 1.0
        values = (values - values.mean()) / scale
        for rows, value in zip(rollouts.values(), values.tolist(), strict=True):
            for row in rows:
                rewards[row] = value
    return rewards


def plain_conversion(samples: list[Sample]) -> dict[str, Any]:
    rewards = plain_rewards(samples)
    loss_masks = []
    for sample in samples:
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        assert len(mask) == sample.response_length
        loss_masks.append([0] * sample.response_length if sample.remove_sample else mask)
    ids = [sample.index if sample.rollout_id is None else sample.rollout_id for sample in samples]
    sums: dict[Any, int] = {}
    for rollout, mask in zip(ids, loss_masks, strict=True):
        sums[rollout] = sums.get(rollout, 0) + sum(mask)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [1 if sample.status == "truncated" else 0 for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": ids,
        "loss_masks": loss_masks,
        "rollout_mask_sums": [sums[rollout] for rollout in ids],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def ours(samples: list[Sample]) -> Any:
    return convert_samples_to_train_data(samples, CONFIG)


def check_same(samples: list[Sample]) -> None:
    expected, found = plain_conversion(samples), ours(samples).as_miles_dict()
    assert found.keys() == expected.keys()
    torch.testing.assert_close(torch.tensor(found.pop("rewards")), torch.tensor(expected.pop("rewards")))
    assert found == expected


def best(*calls: Callable[[], object], seconds: float = 4.0) -> list[float]:
    """Best time of each call, taken in turns so that a busy machine slows all of them."""
    gc.collect()
    times: list[list[float]] = [[] for _ in calls]
    while (sum(map(sum, times)) < seconds and len(times[0]) < 200) or len(times[0]) < 4:
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            of_call.append(time.perf_counter() - start)
    return [min(of_call) for of_call in times]


def peak_share(rows: int, response: int, kind: str) -> float:
    ours(make_samples(100, 16, kind))  # load everything that is loaded on first use
    samples = make_samples(rows, response, kind)
    data, growth = peak_growth(lambda: ours(samples))
    assert len(data) == rows
    return growth / payload(rows, response)


def profile(samples: list[Sample]) -> dict[str, float]:
    """Milliseconds of what a conversion cannot do without: reading the fields of every row, looking at every mask.

    Of the plain conversion, the two sums over every mask that it takes.
    """
    names = [field.name for field in dataclasses.fields(Sample)]
    masks = [sample.loss_mask for sample in samples]
    own = best(
        lambda: ours(samples),
        lambda: [list(map(operator.attrgetter(name), samples)) for name in READ_FIELDS if name in names],
        lambda: count_masks(masks),
        lambda: [sum(mask) + sum(mask) for mask in masks] if isinstance(masks[0], list) else None,
        seconds=8.0,
    )
    parts = dict(zip(("conversion", "reading_fields", "counting_masks", "two_sums_of_lists"), own, strict=True))
    return {name: seconds * 1e3 for name, seconds in parts.items()}


def decoding(rows: int, response: int) -> dict[str, float]:
    """Seconds to decode train data from safetensors: to columns, to columns of which every byte is read, to lists."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.safetensors"
        write_train_data(ours(make_samples(rows, response, "views")), path)
        fields = ("tokens", "loss_masks", "rollout_log_probs")
        columns, touched, lists = best(
            lambda: [read_train_data(path)[name].values for name in fields],
            lambda: [read_train_data(path)[name].values.sum() for name in fields],
            lambda: read_train_data(path).as_miles_dict(),
        )
    return {"columns": columns, "touched": touched, "lists": lists}


def print_profiles(figures: dict[str, Any]) -> None:
    lists, arrays = (figures[kind]["profile_ms"] for kind in ("lists", "arrays"))
    print(
        f"of {lists['conversion']:.1f} ms from lists, counting the masks takes {lists['counting_masks']:.1f} ms ",
        end="",
    )
    print(f"and reading the fields {lists['reading_fields']:.1f} ms;")
    sums = lists["two_sums_of_lists"]
    print(f"  of {figures['plain_ms']:.1f} ms of the plain one, its two sums over the masks {sums:.1f} ms")
    print(
        f"of {arrays['conversion']:.1f} ms from arrays, counting the masks takes {arrays['counting_masks']:.1f} ms ",
        end="",
    )
    print(f"and reading the fields {arrays['reading_fields']:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="smaller sizes, a few seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows, response = (250, 2_048) if options.short else (2_500, 8_192)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}")
    check_same(make_samples(100, 1_500, "lists"))
    samples = make_samples(rows, response, "lists")
    plain, from_lists = best(lambda: plain_conversion(samples), lambda: ours(samples))
    figures: dict[str, Any] = {"rows": rows, "response_tokens": response, "plain_ms": plain * 1e3}
    print(f"{rows} rows with a response of {response} tokens, fan-out {', '.join(map(str, FAN_OUT))}")
    print(f"{'conversion':<16} {'ms':>8} {'us/row':>7} {'x faster':>9}  peak extra memory")
    print(f"{'plain, lists':<16} {plain * 1e3:>8.1f} {plain / rows * 1e6:>7.2f} {'1':>9}")
    for kind in ("lists", "arrays", "views"):
        if kind == "lists":
            own = from_lists
        else:
            samples = []  # before the next ones are made
            samples = make_samples(rows, response, kind)
            own = best(functools.partial(ours, samples))[0]
        figures[kind] = {"ms": own * 1e3, "times_faster": plain / own, "profile_ms": profile(samples)}
        memory = ""
        if kind != "lists":
            assert np.shares_memory(ours(samples)["tokens"].row(0), samples[0].tokens)
            if sys.platform == "linux":
                figures[kind]["peak_share_of_payload"] = in_new_process(peak_share, rows, response, kind)
                memory = f"{figures[kind]['peak_share_of_payload']:.2%} of the payload"
        print(f"{'ours, ' + kind:<16} {own * 1e3:>8.1f} {own / rows * 1e6:>7.2f} {plain / own:>9.1f}  {memory}")
    print_profiles(figures)
    rows = 50 if options.short else 500
    seconds = decoding(rows, response)
    figures["decoding_s"] = seconds
    print(f"decoding {rows} rows from safetensors to lists takes {seconds['lists'] * 1e3:.1f} ms;")
    print(f"  to columns it is {seconds['lists'] / seconds['columns']:.0f} times faster (mapped into memory), ", end="")
    print(f"with every byte read {seconds['lists'] / seconds['touched']:.1f} times")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
