"""Sample batches, cut them in every shape, and compare what the estimators make of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from cutting import SHAPES, cut
from estimators import ADVANTAGES, ESTIMATORS, PLANS, Batches, Estimator, gradients
from intervals import Box, Range, axes_along, critical_value
from race import DIFFICULTY, Exact, exact, sample
from torch import Tensor

from miles_norm.errors import ConfigError

PROMPTS, GROUP, UPDATE = len(DIFFICULTY), 8, 16
BATCH = PROMPTS * GROUP
"""Rollouts in a batch: 8 prompts, 8 rollouts each; whole-rollout updates hold 16 of them, updates of rows 16 rows."""
FEWEST_BATCHES, CHUNK = 50, 125
ROUNDING = 1e-9
"""Differences below this part of the true gradient come from adding in another order."""

Key = tuple[str, str, str, Estimator]
"""Shape, plan, advantage estimator and estimator."""


@dataclass(frozen=True)
class Settings:
    """What is run.

    Raises:
        ConfigError: rollouts that are no whole number of batches, or too few for intervals.
    """

    rollouts: int = 200_000
    seed: int = 0

    def __post_init__(self) -> None:
        fewest = FEWEST_BATCHES * BATCH
        if self.rollouts % BATCH or self.rollouts < fewest:
            raise ConfigError(
                "rollouts",
                got=str(self.rollouts),
                expected=f"a multiple of {BATCH}, {fewest} or more",
                reason=f"a batch holds {BATCH} rollouts, and intervals are over independent batches",
                remedy=f"for example {max(round(self.rollouts / BATCH) * BATCH, fewest)}",
            )

    @property
    def batches(self) -> int:
        """Number of independent batches."""
        return self.rollouts // BATCH

    @property
    def steps(self) -> int:
        """How often ``measure`` says that it has come further."""
        return -(-self.batches // CHUNK) * len(SHAPES)


def measure(settings: Settings, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run the study; the results are plain values, ready for JSON."""
    truth = exact()
    found, rows = _sampled(settings, truth, advance)
    comparisons = len(PLANS) * len(ADVANTAGES) * len(ESTIMATORS)
    parameters = len(truth.gradient)
    # Of each comparison with the true gradient also its rotated parameters, its variance and its cosine.
    cutting = critical_value((len(SHAPES) - 1) * comparisons * parameters, settings.batches)
    gradient = critical_value(len(SHAPES) * comparisons * (2 * parameters + 2) + 2 * parameters, settings.batches)
    cut_shapes = [key for key in found if key[0] != "no cut"]
    return {
        "settings": {
            "rollouts": settings.rollouts, "batches": settings.batches, "seed": settings.seed, "prompts": PROMPTS,
            "rollouts_per_prompt": GROUP, "update_size": UPDATE, "critical_value_cutting": cutting,
            "critical_value_gradient": gradient,
        },
        "exact": {
            "success_rates": truth.success_rates.tolist(), "success": truth.success, "tokens": truth.tokens,
            "gradient": truth.gradient.tolist(),
        },
        "shapes": [_shape(name, truth, rows[name] / settings.rollouts) for name in SHAPES],
        "cutting": [_named(key) | _against_uncut(found, key, truth, cutting) for key in cut_shapes],
        "gradient": [_named(key) | _against_truth(found[key], truth, gradient) for key in found],
        "random_denominator": [_random_denominator(found, plan, truth, gradient) for plan in PLANS[:2]],
    }  # fmt: skip


def _sampled(settings: Settings, truth: Exact, advance: Callable[[], None]) -> tuple[dict[Key, Tensor], dict[str, int]]:
    """Gradients ``[B, 6]`` of all batches, and the number of rows of each shape."""
    draw = torch.Generator().manual_seed(settings.seed)
    parts: dict[Key, list[Tensor]] = defaultdict(list)
    rows: dict[str, int] = defaultdict(int)
    for first in range(0, settings.batches, CHUNK):
        number = min(CHUNK, settings.batches - first)
        # Prompts are in random order, so that an update of a part of the batch holds some of each.
        prompt = torch.rand(number, BATCH, generator=draw).argsort(dim=1) // GROUP
        group = torch.arange(number)[:, None] * PROMPTS + prompt
        rollouts = sample(prompt.flatten(), draw)
        for name, shape in SHAPES.items():
            pieces = cut(rollouts, shape(truth.success), draw)
            rows[name] += len(pieces.tokens)
            batches = Batches(group.flatten(), rollouts.reward, pieces, BATCH, UPDATE)
            for found in gradients(batches, truth.tokens, draw):
                parts[name, found.plan, found.advantage, found.estimator].append(found.gradients)
            advance()
    return {key: torch.cat(each) for key, each in parts.items()}, rows


def _named(key: Key) -> dict[str, Any]:
    shape, plan, advantage, estimator = key
    return {"shape": shape, "plan": plan, "advantage": advantage, "estimator": estimator.name}


def _shape(name: str, truth: Exact, rows: float) -> dict[str, Any]:
    """Expected rows and single-row share, of failures, successes and all, and the mean rows that were sampled."""
    shape = SHAPES[name](truth.success)
    means = shape @ torch.arange(1, shape.shape[1] + 1, dtype=shape.dtype)
    share = torch.tensor([1 - truth.success, truth.success], dtype=shape.dtype)
    return {
        "shape": name,
        "single_row": [*shape[:, 0].tolist(), float(share @ shape[:, 0])],
        "rows": [*means.tolist(), float(share @ means)],
        "sampled_rows": rows,
    }


def _against_uncut(found: dict[Key, Tensor], key: Key, truth: Exact, critical: float) -> dict[str, Any]:
    """The difference that cutting makes, relative to the mean gradient of the same rollouts uncut."""
    uncut = found["no cut", *key[1:]]
    difference = found[key] - uncut
    difference[difference.abs() < ROUNDING * truth.gradient.norm()] = 0
    box = Box.of(difference, critical)
    length = float(uncut.mean(dim=0).norm())
    return {
        "difference": _percent(box.length().scaled(1 / length)),
        "identical": not difference.any(),
        "holds_zero": box.holds_zero,
        "largest_z": box.largest_z,
        "mean": (box.mean / length).tolist(),
        "standard_error": (box.error / length).tolist(),
    }


def _against_truth(gradient: Tensor, truth: Exact, critical: float) -> dict[str, Any]:
    """Bias, direction, variance and cosine, in units of the length of the true gradient."""
    length = truth.gradient.norm()
    bias = Box.of((gradient - truth.gradient) / length, critical)
    turned = Box.of(gradient @ axes_along(truth.gradient) / length, critical)
    squares = (gradient - gradient.mean(dim=0)).square().sum(dim=1, keepdim=True) / length**2
    cosine = torch.nn.functional.cosine_similarity(gradient, truth.gradient[None], dim=1)[:, None]
    return {
        "bias": _percent(bias.length()),
        "holds_zero": bias.holds_zero,
        "largest_z": bias.largest_z,
        "along": list(astuple(turned.number(0))),
        "angle": list(astuple(turned.angle())),
        "variance": list(astuple(Box.of(squares, critical).number(0))),
        "cosine": list(astuple(Box.of(cosine, critical).number(0))),
        "mean": bias.mean.tolist(),
        "standard_error": bias.error.tolist(),
    }


def _random_denominator(found: dict[Key, Tensor], plan: str, truth: Exact, critical: float) -> dict[str, Any]:
    """Bias of ``token_mean`` with ``rloo``: its difference to ``constant``, which has none, over the same rollouts.

    The noise that both share is gone, so that the interval is narrower than that of either.
    """
    tokens, constant = (
        gradients
        for name in ("token_mean", "constant")
        for key, gradients in found.items()
        if (*key[:3], key[3].name) == ("no cut", plan, "rloo", name)
    )
    box = Box.of((tokens - constant) / truth.gradient.norm(), critical)
    size = BATCH if plan == "whole batch" else UPDATE
    return {"rollouts": size, "bias": _percent(box.length()), "holds_zero": box.holds_zero}


def _percent(span: Range) -> list[float]:
    return list(astuple(span.scaled(100)))
