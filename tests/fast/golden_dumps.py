"""Real rollout dumps, and what Miles, slime and Agent Lightning returned on them (``data/golden.json``)."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from miles_norm import RolloutDump, read_dump

DATA = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
GOLDEN: dict[str, Any] = json.loads((DATA / "golden.json").read_text(encoding="utf-8"))["files"]
# The same eight rollouts, one row per turn and turns merged into trajectories.
AGENT_LIGHTNING: dict[str, Any] = json.loads((DATA / "agl_golden.json").read_text(encoding="utf-8"))

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo_std_on": {"advantage_estimator": "grpo"},
    "grpo_std_off": {"advantage_estimator": "grpo", "grpo_std_normalization": False},
    "gspo_std_on": {"advantage_estimator": "gspo"},
    "gspo_std_off": {"advantage_estimator": "gspo", "grpo_std_normalization": False},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "grpo_no_normalization": {"advantage_estimator": "grpo", "rewards_normalization": False},
}
LAYOUT: dict[str, Any] = {"n_samples_per_prompt": 4, "rollout_batch_size": 6}
# The mainstream rule of one version is our default; the other demands that siblings share one reward.
POLICY = {"miles_pr2369": "mainstream", "miles_head": "shared"}


@functools.cache
def dump_of(name: str) -> RolloutDump:
    return read_dump((EXAMPLES if name == "miles_session_v2.pt" else DATA) / name)


def miles_results() -> list[Any]:
    """One pytest parameter per dump, version of Miles and variant of the settings, with what it returned there."""
    return sorted(
        (
            pytest.param(name, version, variant, upstream, id=f"{name}-{version}-{variant}")
            for name, versions in GOLDEN.items()
            for version in POLICY.keys() & versions.keys()
            for variant, upstream in versions[version]["post_process_rewards"].items()
        ),
        key=lambda param: str(param.id),
    )
