"""The baseline ``verl`` against verl 0.9.1 itself, on rollouts of several rows."""

import numpy as np
import pytest
import torch

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.audit.baselines import baseline_advantages

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl: make test-verl")

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_same_as_verl(seed: int, scaled: bool) -> None:
    """Fan-outs of 1 to 4, prompts of 2 to 5 rollouts, the first of one row; equal rewards in every third prompt."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(8):
        for rollout in range(1 if prompt == 0 else int(rng.integers(2, 6))):
            reward = 0.7 if prompt % 3 == 1 else round(float(rng.normal()), 2)
            fan_out = 1 if prompt == 0 else int(rng.integers(1, 5))
            ids = {"group_index": prompt, "rollout_id": f"{prompt}/{rollout}"}
            rows += [{**ids, "reward": reward, "response_length": 1} for _ in range(fan_out)]
    config = NormalizationConfig(grpo_std_normalization=scaled)
    ours = baseline_advantages(normalize_rewards(rows, config), "verl")
    theirs = core_algos.get_adv_estimator_fn("grpo")(
        token_level_rewards=torch.tensor([[row["reward"]] for row in rows]),
        response_mask=torch.ones(len(rows), 1),
        index=np.array([row["group_index"] for row in rows], dtype=object),
        norm_adv_by_std_in_grpo=scaled,
    )[0][:, 0]
    equal = torch.tensor([row["group_index"] % 3 == 1 for row in rows])
    torch.testing.assert_close(ours[~equal], theirs[~equal], rtol=1e-5, atol=1e-6)
    # Equal rewards leave rounding, divided by next to nothing, whose digits depend on the order of a sum.
    assert float(ours[equal].abs().max()) < 0.2
    assert float(theirs[equal].abs().max()) < 0.2
