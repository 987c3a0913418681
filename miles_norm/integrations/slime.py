"""What slime's trainer can call: advantages with a token-level KL penalty, and a check of what reached it.

    --custom-advantage-function-path miles_norm.integrations.slime.compute_advantages
    --rollout-data-postprocess-path miles_norm.integrations.slime.check_rollout_data

The hooks for rewards and train data are those of ``miles_norm.integrations.miles``. slime is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from miles_norm.errors import ConfigError, SampleError, format_rows, shown
from miles_norm.integrations.slime_columns import finite_numbers, kl_rows, rank_columns
from miles_norm.loss.checks import is_number

__all__ = ["check_rollout_data", "compute_advantages"]


def compute_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> None:
    r"""Each row's reward, as the hooks normalized it, on its tokens, less a KL penalty.

    .. math:: A_{n,t} = r_n - \beta \, \mathrm{KL}_{n,t}

    with :math:`\beta` of ``--kl-coef``. Why: under ``--advantage-estimator`` grpo, gspo and cispo slime leaves
    ``--kl-coef`` unread. Outcome rewards are normalized before the penalty is added, so that it does not move a
    baseline.

    Args:
        args: The trainer's; ``kl_coef`` is read.
        rollout_data: A rank's share of the batch: ``rewards`` and ``kl``, one tensor per row, of this rank's tokens.
            ``advantages`` and ``returns`` are written, float32, one tensor per row.

    Raises:
        ConfigError: ``--kl-coef`` that is no number from 0 on.
        SampleError: what ``check_rollout_data`` raises; rewards or KL that are missing, of another number of rows, or
            NaN or infinite. All rows are named.

    >>> import torch
    >>> data = {"rewards": [0.5, -0.5], "kl": [torch.zeros(2), torch.ones(1)], "rollout_ids": [0, 1],
    ...         "loss_masks": [torch.ones(2), torch.ones(1)], "rollout_mask_sums": [2, 1]}
    >>> compute_advantages(type("Args", (), {"kl_coef": 0.25})(), data)
    >>> [row.tolist() for row in data["advantages"]]
    [[0.5, 0.5], [-0.75]]
    """
    coefficient = getattr(args, "kl_coef", 0.0)
    if not is_number(coefficient, 0):
        raise ConfigError(
            "--kl-coef",
            got=shown(coefficient),
            expected="a finite number from 0 on",
            reason="the KL of each token is multiplied by it and taken from the advantage",
            remedy="set --kl-coef, 0 for no penalty",
        )
    columns = _check(rollout_data, "", "rewards", "kl")
    rewards = finite_numbers("rewards", columns["rewards"])
    rows = kl_rows(columns["kl"])
    advantages = [reward - float(coefficient) * kl for reward, kl in zip(rewards, rows, strict=True)]
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = list(advantages)


def check_rollout_data(args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """Refuse a batch whose rollouts would not be divided by their own tokens.

    Why: without ``rollout_mask_sums`` the loss would divide each row by the row's own tokens, and a rollout would weigh
    more the more rows it has; nothing else would fail.

    Args:
        args: Not read.
        rollout_id: The number of the training step, for the message.
        rollout_data: A rank's share of the batch.

    Raises:
        SampleError: ``rollout_mask_sums`` did not reach the trainer; a sum that is no whole number, differs between
            rows of one rollout or is below the tokens of its rows here (of the row alone where ``rollout_ids`` did not
            come); columns of different lengths, rows without an id, masks with entries other than 0 and 1. All rows are
            named.
    """
    _check(rollout_data, f" in step {shown(rollout_id)}")


def _check(data: Any, step: str, *more: str) -> dict[str, list[Any]]:
    columns = rank_columns(data, step, more)
    ids, sums, counts = columns["rollout_ids"], columns["rollout_mask_sums"], columns["tokens"]
    first: dict[Any, int] = {}
    tokens: dict[Any, int] = {}
    for rollout, value, count in zip(ids, sums, counts, strict=True):
        first.setdefault(rollout, value)
        tokens[rollout] = tokens.get(rollout, 0) + count
    bad = [
        row
        for row, (rollout, value) in enumerate(zip(ids, sums, strict=True))
        if not value == first[rollout] >= tokens[rollout]
    ]
    if bad:
        raise SampleError(
            f"rollout_mask_sums of {format_rows(bad)} of this rank{step}",
            got=", ".join(f"{sums[row]} for rollout {ids[row]}" for row in bad[:10]),
            expected="the same on all rows of a rollout, and no less than the tokens that its rows have here: "
            + ", ".join(str(tokens[ids[row]]) for row in bad[:10]),
            reason="the loss of a rollout is divided by the trainable tokens of all of its rows",
            remedy="look for what changes masks or ids after conversion; rollout_mask_sums has to follow",
            rows=bad,
        )
    return columns
