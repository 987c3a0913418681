"""TRL: a ``GRPOTrainer`` whose advantages and loss weights are those of rollouts.

from miles_norm.integrations.trl import RolloutGRPOTrainer

trainer = RolloutGRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), rollout_func=...)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.integrations.padded import trainable_tokens
from miles_norm.integrations.trl_config import check_loss_type, divided_by, normalization_settings
from miles_norm.integrations.trl_rows import PADDING, ROLLOUT, check_output, fill_rows, number_rollouts, padding_rows
from miles_norm.loss import loss_weights
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards

__all__ = ["RolloutGRPOTrainer", "fill_rows"]


class RolloutGRPOTrainer(GRPOTrainer):
    r"""``GRPOTrainer`` that counts each rollout once, in the statistics of its prompt and in the loss.

    A row's advantage is replaced by

    .. math:: A'_n = D_n w_n A_n

    with the advantage and the loss weight of its rollout and what TRL divides its token losses by (``divided_by``), so
    that TRL's loss is :math:`\sum_n w_n \sum_t m_{n,t} \, l_{n,t}`. Every ``loss_type`` but ``bnpo`` then is the same
    mean, that of ``loss_config``, and keeps its own token losses. KL and entropy carry no weights.

    Rows are siblings where ``rollout_func`` gives them one ``rollout_id``; without it each row is a rollout, as with
    tools and ``environment_factory``, which make one row of each. Rows with ``is_padding`` enter nothing.

    The rows of a generation batch are shuffled and cut into K = steps_per_generation / gradient_accumulation_steps
    updates. The weights count the batch; an update gets K times its share, which is the mass of one on average. K = 1,
    TRL's default, is exact: all siblings are in one update. With ``scope: batch``, and with
    ``divisor: nominal_rollouts``, which counts an update already, K is left out.

    Args:
        *args: Of ``GRPOTrainer``.
        normalization_config: None for GRPO, divided by the group's deviation if ``scale_rewards`` is "group", or GDPO
            over the reward functions if ``multi_objective_aggregation`` is "normalize_then_sum".
        loss_config: Defaults to ``LossConfig()``.
        rollout_func: Of ``GRPOTrainer``. It may also return ``rollout_id`` and ``is_padding``; see ``fill_rows``.
        **settings: Of ``GRPOTrainer``.

    ``normalized_rewards`` is the result of the last batch, of all processes. ``rollout_ids`` and ``loss_weights``, one
    per row, are among what TRL shuffles and splits. Metrics of the result are logged beside TRL's, which are of rows.

    Raises:
        ConfigError: ``loss_type="bnpo"``, ``scale_rewards="batch"``, or arguments that contradict
            ``normalization_config``.
        SampleError: while training, a rollout function that returns another number of rows than it was given prompts,
            and what else ``check_output`` refuses.
        MilesNormError: while training, whatever ``normalize_columns`` raises; TRL's None is an unscored row, of which
            ``missing_reward`` decides.
    """

    def __init__(
        self,
        *args: Any,
        normalization_config: NormalizationConfig | None = None,
        loss_config: LossConfig | None = None,
        rollout_func: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> None:
        if rollout_func is not None:
            rollout_func = self._remembering(rollout_func)
        super().__init__(*args, rollout_func=rollout_func, **settings)
        check_loss_type(self.loss_type)
        self.normalization_config = normalization_settings(
            self.args, normalization_config, self.reward_func_names, self.reward_weights.tolist()
        )
        self.loss_config = loss_config or LossConfig()
        self.normalized_rewards: NormalizedRewards | None = None
        self._of_rollout_func: Mapping[str, Any] = {}

    def _remembering(self, rollout_func: Callable[..., Any]) -> Callable[..., Any]:
        """The rollout function, its row counts checked and its ids kept: a dataset may have such columns too."""

        @functools.wraps(rollout_func)
        def checked(prompts: list[Any], trainer: Any) -> Any:
            output = rollout_func(prompts, trainer)
            check_output(output, len(prompts))
            self._of_rollout_func = output
            return output

        return checked

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        ends = (*self.eos_token_ids, self._tokenizer.pad_token_id)
        self._truncated = [ids[-1] not in ends for ids in completion_ids_list]
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._of_rollout_func = {}
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        result = self.normalized_rewards = self._normalize(trainable_tokens("env_mask", mask).sum(dim=1))
        weights = loss_weights(result, self.loss_config)
        factor = divided_by(self.loss_type, result.columns.trainable_tokens, self.max_completion_length)
        if self.model.training and (
            self.loss_config.scope == "batch" or self.loss_config.divisor == "nominal_rollouts"
        ):
            factor = factor * self.args.gradient_accumulation_steps / self.args.steps_per_generation
        local = slice(self.accelerator.process_index * len(mask), (self.accelerator.process_index + 1) * len(mask))
        output["advantages"] = (result.advantages * weights * factor).float()[local]
        output["rollout_ids"] = result.index.row_rollout[local]
        output["loss_weights"] = weights.float()[local]
        self._log_result(result)
        return output

    def _normalize(self, local_tokens: Tensor) -> NormalizedRewards:
        """Advantages of the rows of all processes, in TRL's order: the rows of a prompt are adjacent."""
        rows, device = len(local_tokens), local_tokens.device
        size = self.num_generations if self.model.training else self.num_generations_eval
        start = self.accelerator.process_index * rows
        of_function = self._of_rollout_func
        rollout = number_rollouts(of_function.get(ROLLOUT), [(start + row) // size for row in range(rows)])
        padding = padding_rows(of_function.get(PADDING), rows)
        given = torch.tensor([rollout, self._truncated, padding], dtype=torch.int64, device=device).T
        given[:, 0] += start
        of_rows = self.accelerator.gather(torch.cat([given, local_tokens[:, None]], dim=1))
        rollout_ids, truncated, is_padding, tokens = of_rows.unbind(dim=1)
        rewards = self._rewards.to(device, torch.float64)
        total = (rewards * self.reward_weights.to(rewards)).nansum(dim=1)
        components = None
        if self.normalization_config.advantage_estimator == "gdpo":
            components = dict(zip(self.reward_func_names, rewards.unbind(dim=1), strict=True))
        columns = RolloutColumns(
            group=torch.arange(len(of_rows), device=device) // size,
            rollout=rollout_ids,
            reward=total.masked_fill(rewards.isnan().all(dim=1), torch.nan),
            trainable_tokens=tokens,
            truncated=truncated,
            padding=is_padding if bool(is_padding.any()) else None,
            components=components,
        )
        return normalize_columns(columns, self.normalization_config)

    def _log_result(self, result: NormalizedRewards) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in result.metrics().items():
            self._metrics[mode][name].append(value)
        # TRL has logged its own advantages, which are not used.
        logged, values = self._logs["advantages"], result.advantages.tolist()
        for _ in range(min(len(logged), len(values))):
            logged.pop()
        logged.extend(values)
