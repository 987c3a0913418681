"""One training step with both sides: rewards normalized over rollouts, the loss averaged over rollouts."""

import torch

from miles_norm import UpdateConfig, loss_weights, normalize_rewards, plan_updates
from miles_norm.loss import clipped_loss, reduce_token_losses

rows = [  # two prompts, two rollouts each; rollout 1 was cut into three rows
    {"group_index": rollout // 2, "rollout_id": rollout, "reward": float(rollout % 2), "loss_mask": mask}
    for rollout, mask in ((0, [1, 1, 1, 1]), (1, [0, 1, 1]), (1, [1, 1]), (1, [1]), (2, [1, 1]), (3, [1, 0, 1]))
]
mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["loss_mask"]) for row in rows], batch_first=True)
policy = torch.nn.Parameter(torch.full(mask.shape, -1.0))  # stands for a model: one log-prob per token
optimizer = torch.optim.SGD([policy], lr=1.0)
old_log_probs = policy.detach().clone()

result = normalize_rewards(rows)
plan = plan_updates(result, UpdateConfig(rollouts_per_update=2, max_tokens_per_gpu=6))
weights = loss_weights(result, plan=plan)
for micro_batches in plan.micro_batches(mask.sum(dim=1)):
    for batch in micro_batches:
        advantages = result.advantages[batch][:, None]
        losses, metrics = clipped_loss(policy[batch], old_log_probs[batch], advantages, mask[batch])
        reduce_token_losses(losses, weights[batch], mask[batch]).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("rows", micro_batches, "weights", [round(w, 3) for n in micro_batches for w in weights[n].tolist()])
