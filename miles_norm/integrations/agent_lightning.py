"""Agent Lightning's rollouts as train data, and drop-ins for its advantages and for what its loss divides by.

Neither it nor verl is imported. Two assignments before training starts put the drop-ins in place:

    from agentlightning.verl import trainer
    from miles_norm.integrations import agent_lightning

    trainer.compute_rollout_level_advantage = agent_lightning.compute_rollout_level_advantage
    trainer.normalize_advantages_by_rollout = agent_lightning.normalize_advantages_by_rollout
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.ids import IdColumn, encode_ids
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.conversion import convert_samples_to_train_data
from miles_norm.errors import ConfigError, SampleError, format_rows
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards
from miles_norm.session.trace import TraceLevel, trace_rows
from miles_norm.train_data import TrainData

__all__ = [
    "compute_rollout_level_advantage",
    "convert_rollouts_to_train_data",
    "normalize_advantages_by_rollout",
]

Ids = Sequence[Any] | np.ndarray[Any, Any]

_ESTIMATORS: Final = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
}
"""verl's names of the estimators that are computed here."""

_CLOSE: Final = 1e-5
"""How far sibling rows' rewards may differ, relative to the largest: what upstream allows as well."""


def convert_rollouts_to_train_data(
    rollouts: Iterable[Any],
    config: NormalizationConfig | None = None,
    *,
    level: TraceLevel = "trajectory",
    loss_config: LossConfig | None = None,
) -> TrainData:
    """Train data of ``CompletedRollout`` objects, or of the dicts of their JSON, for a trainer of one's own.

    Args:
        rollouts: As the rollout manager returns them; read by ``miles_norm.session.trace``, which decides what is a
            row, and never changed.
        config: Defaults to ``NormalizationConfig()``. Upstream's ``reward_fillna_value`` of 0 for a ``final_reward`` of
            None is ``missing_reward="zero"``.
        level: Of Agent Lightning's ``trace_aggregator``.
        loss_config: For the column ``weights``; upstream's is ``LossConfig(divisor="trained_rows")``.

    Raises:
        MilesNormError: whatever ``trace_rows`` and ``convert_samples_to_train_data`` raise.

    >>> def rollout(name, reward, *calls):
    ...     triplets = [{"prompt": {"token_ids": p}, "response": {"token_ids": r}} for p, r in calls]
    ...     return {"rollout_id": name, "data_id": "d", "final_reward": reward, "triplets": triplets}
    >>> rollouts = [rollout("a", 1.0, ([1], [2]), ([1, 2, 3], [4])), rollout("b", 0.0, ([1], [5]), ([6], [7]))]
    >>> data = convert_rollouts_to_train_data(rollouts, NormalizationConfig(advantage_estimator="dr_grpo"))
    >>> data["tokens"].tolists(), data["rewards"].tolist(), data["rollout_mask_sums"].tolist()
    ([[1, 2, 3, 4], [1, 5], [6, 7]], [0.5, -0.5, -0.5], [2, 2, 2])
    """
    return convert_samples_to_train_data(trace_rows(rollouts, level).samples, config, loss_config=loss_config)


def normalize_advantages_by_rollout(
    advantages: Tensor,
    response_mask: Tensor,
    rollout_ids: Ids,
    *,
    num_trained_rows: int | None = None,
    divisor: Literal["trained_rows", "rollouts"] | None = None,
) -> Tensor:
    r"""Advantages divided by the tokens of their rollout and a count, for a loss that is summed over tokens.

    .. math:: A'_{n,t} = \frac{A_{n,t}}{\max(L_r D, 1)}

    L_r: trainable tokens of the row's rollout. D: ``num_trained_rows``, or the number of rollouts.

    Why ``divisor``: upstream divides by rows where it is given their number, so that the total weight of a batch is
    rollouts / rows and shrinks when rollouts are cut into more rows; by rollouts it is 1 (docs/loss.md).

    Args:
        advantages: Per token ``[N, T]``.
        response_mask: 1 on trainable tokens ``[N, T]``.
        rollout_ids: ``[N]``, unique over the batch.
        num_trained_rows: Rows of the batch, as the trainer passes it; later versions pass none.
        divisor: None: ``trained_rows`` where ``num_trained_rows`` is given, else ``rollouts``, as upstream. Set it with
            ``functools.partial(normalize_advantages_by_rollout, divisor="rollouts")``.

    Returns:
        ``[N, T]`` in the dtype of the advantages; the divisor itself is float64, where upstream's has that dtype. A
        rollout without a trainable token keeps its advantages, as upstream.

    Raises:
        SampleError: another number of ids than rows, no rows, rows without an id.
        ConfigError: ``num_trained_rows`` below 1, or ``divisor="trained_rows"`` without it.

    Two rollouts on three rows, of 3 tokens each:

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    >>> for settings in ({"num_trained_rows": 3}, {"num_trained_rows": 3, "divisor": "rollouts"}):
    ...     scaled = normalize_advantages_by_rollout(torch.ones(3, 3), mask, ["A", "A", "B"], **settings)
    ...     print(round(float((scaled * mask).sum()), 4))
    0.6667
    1.0
    """
    ids = encode_ids(rollout_ids, "rollout", advantages.shape[0], advantages.device)
    if advantages.shape[0] == 0:
        raise _bad_batch("advantages", "no rows", "at least one row")
    _refuse_missing(ids)
    unique, rollout = torch.unique(ids.codes, return_inverse=True)
    count = _count(num_trained_rows, divisor, len(unique))
    tokens = torch.zeros(len(unique), dtype=torch.float64, device=advantages.device)
    tokens.index_add_(0, rollout, (response_mask != 0).sum(dim=-1).to(tokens))
    scale = (tokens * count).clamp_min(1.0)[rollout]
    return (advantages / scale[:, None]).to(advantages.dtype)


def compute_rollout_level_advantage(
    batch: Any,
    *,
    adv_estimator: Any,
    gamma: float,
    lam: float,
    num_repeat: int,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any | None = None,
    compute_advantage_fn: Callable[..., Any] | None = None,
) -> tuple[Any, dict[str, int]]:
    """One advantage per rollout, on the trainable tokens of all of its rows.

    Args:
        batch: A ``DataProto``. Read: ``token_level_rewards`` and ``response_mask`` ``[N, T]``; ``rollout_id_list`` and
            ``uid``, or ``data_id_list`` in its place. Written: ``advantages`` and ``returns``, float32 ``[N, T]``;
            ``uid`` where it was not there.
        adv_estimator: ``grpo``, ``rloo``, ``opo`` or the vectorized two, as names or as verl's enum.
        gamma: Of outcome rewards nothing is discounted; read by ``compute_advantage_fn`` only, as are ``lam``,
            ``num_repeat`` and ``config``.
        lam: See ``gamma``.
        num_repeat: See ``gamma``.
        norm_adv_by_std_in_grpo: Divide by the standard deviation in ``grpo``.
        config: See ``gamma``.
        compute_advantage_fn: verl's ``compute_advantage``, for an estimator that is not computed here: it is called on
            the row of each rollout that has the most trainable tokens, and what it gives is broadcast.

    Unlike upstream: the arithmetic is float64, where upstream's is in the dtype of the scores, bfloat16; a prompt with
    one rollout gives 0, where verl keeps the raw reward in ``grpo``; ``opo`` weighs a rollout by the tokens of all of
    its rows; a rollout without a trainable token is in the statistics, where upstream fails.

    Returns:
        The same batch, and counts of rows and rollouts for the log.

    Raises:
        ConfigError: another estimator without ``compute_advantage_fn``.
        GroupingError: rows without a uid.
        SampleError: a missing field or rollout id; of ``compute_advantage_fn``, tokens of a row with different values.
        DisagreeingRewardsError: sibling rows whose rewards differ by more than 1e-5 of the largest, as a KL penalty in
            the rewards (``algorithm.use_kl_in_reward``) makes them.
    """
    columns = _columns(batch)
    name = getattr(adv_estimator, "value", adv_estimator)
    if compute_advantage_fn is None and name not in _ESTIMATORS:
        raise ConfigError(
            "algorithm.adv_estimator",
            got=repr(name),
            expected=", ".join(_ESTIMATORS),
            reason="verl's other estimators whiten, discount or need a critic",
            remedy="choose one of these, or pass compute_advantage_fn=verl.trainer.ppo.ray_trainer.compute_advantage",
        )
    settings = NormalizationConfig(
        advantage_estimator=_ESTIMATORS.get(name, "grpo"),  # type: ignore[arg-type]
        grpo_std_normalization=bool(norm_adv_by_std_in_grpo),
        rollout_reward="shared",
        shared_reward_tolerance=_CLOSE,
        group_fallback="error",
    )
    result = normalize_columns(columns, settings)
    mask = batch.batch["response_mask"]
    if compute_advantage_fn is None:
        values = dict.fromkeys(("advantages", "returns"), result.rollout_advantages)
    else:
        computed = compute_advantage_fn(
            batch[result.mainstream_rows.tolist()],
            adv_estimator=adv_estimator,
            gamma=gamma,
            lam=lam,
            num_repeat=num_repeat,
            norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
            config=config,
        )
        values = _rollout_values(computed, result)
    for key, value in values.items():
        rows = value[result.index.row_rollout]
        batch.batch[key] = rows[:, None] * mask.to(rows.dtype)
    return batch, _counts(result)


def _refuse_missing(ids: IdColumn | None) -> None:
    if ids is not None and ids.missing is not None:
        rows = torch.nonzero(ids.missing)[:, 0].tolist()
        raise _bad_batch(f"rollout id of {format_rows(rows)}", "None", "an id on every row", rows)


def _count(num_trained_rows: int | None, divisor: str | None, rollouts: int) -> int:
    if num_trained_rows is not None and num_trained_rows < 1:
        got, expected = f"num_trained_rows={num_trained_rows}", "at least 1"
    elif divisor not in (None, "trained_rows", "rollouts"):
        got, expected = f"divisor={divisor!r}", "'trained_rows' or 'rollouts'"
    elif divisor == "trained_rows" and num_trained_rows is None:
        got, expected = "divisor='trained_rows' without num_trained_rows", "the number of rows"
    else:
        return rollouts if divisor == "rollouts" or num_trained_rows is None else num_trained_rows
    raise ConfigError(
        "normalize_advantages_by_rollout",
        got=got,
        expected=expected,
        reason="the advantages are divided by it",
        remedy="pass num_trained_rows=len(batch), or divisor='rollouts'",
    )


def _columns(batch: Any) -> RolloutColumns:
    ids = _field(batch.non_tensor_batch, "rollout_id_list", "non_tensor_batch")
    uid = batch.non_tensor_batch.get("uid")
    if uid is None:
        uid = _field(batch.non_tensor_batch, "data_id_list", "non_tensor_batch")
        batch.non_tensor_batch["uid"] = uid
    mask = _field(batch.batch, "response_mask", "batch")
    rewards = _field(batch.batch, "token_level_rewards", "batch")
    columns = RolloutColumns(
        group=list(uid),
        rollout=list(ids),
        reward=rewards.detach().to(torch.float64).sum(dim=-1),
        trainable_tokens=(mask != 0).sum(dim=-1),
    )
    _refuse_missing(columns.rollout)
    return columns


def _field(fields: Any, name: str, where: str) -> Any:
    value = fields[name] if name in fields.keys() else None  # noqa: SIM118  # a TensorDict is no plain mapping
    if value is None:
        raise _bad_batch(f"{name} in {where}", "no such field", "one entry per row")
    return value


def _rollout_values(computed: Any, result: NormalizedRewards) -> dict[str, Tensor]:
    """What the estimator gave each rollout's row, as one number ``[R]`` per field."""
    mask = computed.batch["response_mask"].bool()
    first = mask.to(torch.uint8).argmax(dim=-1, keepdim=True)
    values = {}
    for name in ("advantages", "returns"):
        if name not in computed.batch.keys():  # noqa: SIM118
            continue
        tokens = computed.batch[name]
        scalars = tokens.gather(1, first)
        differs = (mask & ~torch.isclose(tokens, scalars)).any(dim=-1)
        if bool(differs.any()):
            rows = result.mainstream_rows[differs].tolist()
            raise _bad_batch(f"{name} of {format_rows(rows)}", "values that differ between tokens", "one value", rows)
        values[name] = scalars[:, 0].masked_fill(~mask.any(dim=-1), 0.0)
    return values


def _counts(result: NormalizedRewards) -> dict[str, int]:
    fan_out = torch.bincount(result.index.row_rollout, minlength=result.index.num_rollouts)
    prefix = "training/rollout_level_advantage"
    return {
        f"{prefix}/n_rows": result.index.num_rows,
        f"{prefix}/n_rollouts": result.index.num_rollouts,
        f"{prefix}/n_multi_row_rollouts": int((fan_out > 1).sum()),
        f"{prefix}/max_rows_per_rollout": int(fan_out.max()),
    }


def _bad_batch(subject: str, got: str, expected: str, rows: Sequence[int] = ()) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected=expected,
        reason="rows are put together into rollouts, and rollouts into prompt groups, by their ids",
        remedy="pass the batch that Agent Lightning's rollout adapter made, response_mask and rewards filled in",
        rows=rows,
    )
