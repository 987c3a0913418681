"""What an epoch does for each divisor and plan: the table and the picture of ``docs/loss.md``.

    python docs/loss_plots.py        draws docs/loss_divisor.svg; needs matplotlib, the extra "plots"

Eight rollouts of 60 trainable tokens are cut evenly into one to five rows. Every token has the loss theta, whose
gradient is 1: SGD and Adam with learning rate 1 are run on the weighted sums, and the table says how far theta went.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_norm import LossConfig, RolloutColumns, UpdateConfig, loss_weights, normalize_columns, plan_updates
from miles_norm.loss import UpdatePlan
from miles_norm.result import NormalizedRewards

ROLLOUTS, TOKENS = 8, 60
FAN_OUTS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Case:
    """How a batch is cut into updates, and what the loss divides by."""

    name: str
    updates: dict[str, Any]
    loss: dict[str, Any]


BY_BATCH_ROWS = {"divisor": "trained_rows", "scope": "batch"}
CASES = (
    Case("whole rollouts, 4 an update; rollouts of the update", {"rollouts_per_update": 4}, {}),
    Case("4 rows an update; rollouts of the update", {"unit": "rows", "rows_per_update": 4}, {}),
    Case("4 rows an update; rows of the batch", {"unit": "rows", "rows_per_update": 4}, BY_BATCH_ROWS),
    Case("7 rows an update, floored; rows of the batch", {"unit": "rows", "rows_per_update": 7}, BY_BATCH_ROWS),
    Case(
        "4 rows an update, at most 2 updates; rows of the batch",
        {"unit": "rows", "rows_per_update": 4, "max_updates": 2},
        BY_BATCH_ROWS,
    ),
)


@dataclass(frozen=True)
class Epoch:
    """What one epoch over the batch did."""

    rows: int
    dropped_rows: int
    updates: int
    mass: float
    sgd: float
    adam: float


def batch(fan_out: int) -> NormalizedRewards:
    """The eight rollouts, half of them right, each on ``fan_out`` rows."""
    rollout = torch.arange(ROLLOUTS).repeat_interleave(fan_out)
    tokens = torch.full_like(rollout, TOKENS // fan_out)
    columns = RolloutColumns(
        group=torch.zeros_like(rollout), rollout=rollout, reward=rollout % 2, trainable_tokens=tokens
    )
    return normalize_columns(columns)


def distance(plan: UpdatePlan, weights: torch.Tensor, optimizer: type[torch.optim.Optimizer], **settings: Any) -> float:
    """How far the parameter goes in one epoch."""
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    steps = optimizer([theta], lr=1.0, **settings)
    tokens = plan.result.trainable_tokens
    for rows in plan.updates:
        steps.zero_grad()
        (weights[rows] * tokens[rows] * theta).sum().backward()
        steps.step()
    return abs(theta.item())


def epoch(case: Case, fan_out: int) -> Epoch:
    """Run one epoch."""
    result = batch(fan_out)
    plan = plan_updates(result, UpdateConfig(**case.updates))
    weights = loss_weights(result, LossConfig(**case.loss), plan)
    planned = sum(map(len, plan.updates))
    return Epoch(
        rows=result.index.num_rows,
        dropped_rows=result.index.num_rows - planned,
        updates=plan.num_updates,
        mass=float((weights * result.trainable_tokens).sum()),
        sgd=distance(plan, weights, torch.optim.SGD),
        adam=distance(plan, weights, torch.optim.Adam, eps=1e-12),
    )


def table(fan_outs: tuple[int, ...] = (1, 2, 3)) -> str:
    """The epochs as a Markdown table."""
    lines = [
        "| updates; divisor | rows | dropped | updates | mass per update | mass per epoch | SGD | Adam |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        for fan_out in fan_outs:
            e = epoch(case, fan_out)
            name = case.name if fan_out == fan_outs[0] else ""
            numbers = f"{e.mass / e.updates:.3f} | {e.mass:.3f} | {e.sgd:.3f} | {e.adam:.3f}"
            lines.append(f"| {name} | {e.rows} | {e.dropped_rows} | {e.updates} | {numbers} |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Draw how far SGD and Adam go over the fan-out."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same bytes each time, and text as text.
    mpl.rcParams.update({"svg.hashsalt": "miles_norm", "svg.fonttype": "none", "font.size": 8})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    markers = ("o", "s", "^", "v", "x")
    for axis, optimizer in zip(axes, ("sgd", "adam"), strict=True):
        for case, marker in zip(CASES, markers, strict=True):
            moved = [getattr(epoch(case, fan_out), optimizer) for fan_out in FAN_OUTS]
            axis.plot(FAN_OUTS, moved, marker=marker, markersize=6, fillstyle="none", linewidth=1, label=case.name)
        axis.set_title({"sgd": "SGD", "adam": "Adam"}[optimizer])
        axis.set_xlabel("rows per rollout")
        axis.set_xticks(FAN_OUTS)
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.15, 12)
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("distance of one epoch / learning rate")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1, frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("loss_divisor.svg"))
