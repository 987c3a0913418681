"""verl and TRL for the parity table: a batch the way each framework takes it, and what its own code makes of it.

Each function takes a batch with ``rows`` (Miles' field names), ``mask`` int64 ``[N, T]``, and log-probs ``old`` and
``new``, float64 ``[N, T]``. It gives the float32 advantages ``[N]``, the loss, and its gradient ``[N, T]`` for ``new``.
The clip is 0.2 on both sides, the default of both frameworks.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor

Outcome = tuple[Tensor, Tensor, Tensor]


def verl_outcome(batch: Any) -> Outcome:
    """verl's ``compute_advantage`` on its DataProto, and the policy loss of that name."""
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.workers.config import ActorConfig

    from miles_norm.integrations.verl import rollout_uids

    rewards = torch.zeros(batch.mask.shape)
    rewards[:, 0] = torch.tensor([row["reward"] for row in batch.rows])
    uids = rollout_uids(
        [str(row["group_index"]) for row in batch.rows],
        [row["rollout_id"] for row in batch.rows],
    )
    data = DataProto.from_dict(
        tensors={"response_mask": batch.mask, "token_level_rewards": rewards}, non_tensors={"uid": uids}
    )
    plain = compute_advantage(data, adv_estimator="miles_norm", config=AlgoConfig()).batch["advantages"]
    of_rows = plain.gather(1, batch.mask.argmax(dim=1, keepdim=True))[:, 0]
    weighted = compute_advantage(data, adv_estimator="miles_norm_weighted", config=AlgoConfig()).batch["advantages"]
    new = batch.new.clone().requires_grad_()
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    loss, _ = get_policy_loss_fn("miles_norm_weighted")(
        batch.old, new, weighted.double(), batch.mask, loss_agg_mode="token-mean", config=actor
    )
    return of_rows, loss.detach(), torch.autograd.grad(loss, new)[0]


def trl_outcome(batch: Any) -> Outcome:
    """A ``RolloutGRPOTrainer`` that scores the rows, and TRL's own loss of the log-probs given here."""
    with tempfile.TemporaryDirectory() as folder:
        return _of_trainer(batch, _trainer(batch, folder))


def _trainer(batch: Any, folder: str) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig

    from miles_norm.integrations.trl import RolloutGRPOTrainer, fill_rows

    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", "a", "b", "c"])}
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), **special)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes))
    groups: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for row in batch.rows:
        mask = row["loss_mask"]
        filled = {"prompt_ids": [5], "completion_ids": [5] * len(mask), "logprobs": [0.0] * len(mask), "env_mask": mask}
        filled["outcome"] = row["reward"]
        groups.setdefault(row["group_index"], {}).setdefault(row["rollout_id"], []).append(filled)
    size = max(sum(map(len, group.values())) for group in groups.values())
    return RolloutGRPOTrainer(
        model,
        reward_funcs=lambda outcome, **_: [value or 0.0 for value in outcome],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=size,
            per_device_train_batch_size=size * len(groups),
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(groups)}),
        processing_class=tokenizer,
        rollout_func=lambda prompts, trainer: fill_rows([list(g.values()) for g in groups.values()], size, 0),
    )


def _of_trainer(batch: Any, trainer: Any) -> Outcome:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions(
        [{"prompt": "a"} for _ in range(trainer.args.per_device_train_batch_size)]
    )
    real = (~trainer.normalized_rewards.columns.padding).nonzero()[:, 0]
    old, new = (torch.zeros(inputs["completion_ids"].shape, dtype=torch.float64) for _ in range(2))
    given = batch.new.clone().requires_grad_()
    old[real], new[real] = batch.old, given
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    loss = trainer._compute_loss(trainer.model, inputs | {"old_per_token_logps": old})
    return trainer.normalized_rewards.advantages[real], loss.detach(), torch.autograd.grad(loss, given)[0]
