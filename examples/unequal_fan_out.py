"""One prompt, three rollouts, six rows: what row-level and rollout-level normalization make of it."""

from miles_norm import NormalizationConfig, normalize_rewards

rows = [
    {"group_index": 0, "rollout_id": rollout, "reward": reward, "response_length": 20}
    for rollout, reward, fan_out in ((0, 0.0, 4), (1, 1.0, 1), (2, 1.0, 1))
    for _ in range(fan_out)
]
result = normalize_rewards(rows, NormalizationConfig(advantage_estimator="dr_grpo"))
row_mean = sum(row["reward"] for row in rows) / len(rows)

print("per row:    ", [round(row["reward"] - row_mean, 3) for row in rows])
print("per rollout:", [round(advantage, 3) for advantage in result.advantages.tolist()])
print(result.explain(4))
