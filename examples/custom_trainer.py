"""A trainer in plain PyTorch: rollouts of one to three rows, one advantage per rollout, each rollout weighing alike."""

import torch
from torch.nn.utils.rnn import pad_sequence

from miles_norm import UpdateConfig, loss_weights, normalize_rewards, plan_updates
from miles_norm.loss import clipped_loss, reduce_token_losses

PROMPTS, ROLLOUTS, TOKENS = 4, 8, 6  # prompts of a step, rollouts of each, tokens of a rollout
torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(PROMPTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, PROMPTS))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)


def sample_rows() -> list[dict]:
    """Rewards are shares of tokens that repeat the prompt; whatever else a trainer needs rides along in the rows."""
    rows = []
    for rollout, prompt in enumerate(n // ROLLOUTS for n in range(PROMPTS * ROLLOUTS)):
        log_probs = policy(torch.tensor(prompt)).log_softmax(-1).detach()
        tokens = torch.multinomial(log_probs.exp(), TOKENS, replacement=True)
        row = {"group_index": prompt, "rollout_id": rollout, "reward": (tokens == prompt).double().mean().item()}
        parts = tokens.chunk(1 + rollout % 3)
        rows += [row | {"tokens": t, "log_probs": log_probs[t], "loss_mask": torch.ones(len(t))} for t in parts]
    return rows


for step in range(21):
    rows = sample_rows()
    result = normalize_rewards(rows)
    plan = plan_updates(result, UpdateConfig(rollouts_per_update=16))  # two optimizer steps, no rollout in both
    weights = loss_weights(result, plan=plan)
    tokens, old, mask = (pad_sequence([r[key] for r in rows], True) for key in ("tokens", "log_probs", "loss_mask"))
    for n in plan.updates:
        new = policy(result.index.row_group[n]).log_softmax(-1).gather(1, tokens[n])
        losses, _ = clipped_loss(new, old[n], result.advantages[n][:, None], mask[n])
        reduce_token_losses(losses, weights[n], mask[n]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step:<2}  {len(rows)} rows, mean reward of the rollouts {result.rollout_rewards.mean():.1f}")
