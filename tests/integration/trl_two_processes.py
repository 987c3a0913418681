"""One update of two processes that share a prompt: torchrun --nproc_per_node 2 trl_two_processes.py FOLDER."""

import sys
from pathlib import Path
from typing import Any

import torch
from trl_models import Gradients, prompts, tokenizer, trainer
from trl_steps import FIVE_ROLLOUTS, rewards_of, rows_with_reward

from miles_norm import NormalizationConfig
from miles_norm.integrations.trl import fill_rows


def rollout_function(given: list[str], trainer: Any) -> dict[str, Any]:
    """The same rollouts and ids on both; the second one's rewards are lower by 2."""
    assert given == ["w0 w1"] * 4
    lower = 2.0 * trainer.accelerator.process_index
    rollouts = [rows_with_reward(rows, reward - lower) for rows, reward in FIVE_ROLLOUTS["w0 w1"]]
    return fill_rows([rollouts], len(given), tokenizer().pad_token_id)


def main(folder: Path) -> None:
    """Writes the gradients and the number of rollouts to gradients.pt."""
    subject = trainer(
        folder,
        rewards_of,
        settings={"num_generations": 8, "gradient_accumulation_steps": 1, "ddp_backend": "gloo"},
        train_dataset=prompts("w0 w1"),
        rollout_func=rollout_function,
        normalization_config=NormalizationConfig(advantage_estimator="dr_grpo"),
    )
    gradients = Gradients()
    subject.add_callback(gradients)
    subject.train()
    if subject.accelerator.is_main_process:
        named = {name.removeprefix("module."): gradient for name, gradient in gradients.of_steps[0].items()}
        torch.save((named, subject.normalized_rewards.index.num_rollouts), folder / "gradients.pt")
    # Its threads would be there still when the process ends, which aborts it now and then.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
