"""What the tests of the command line share: dumps, and the outcome of a run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/data/miles_session_v2.pt"
DATA = ROOT / "tests/fast/data"
MAINSTREAM, LORA, SLIME = DATA / "miles_mainstream.pt", DATA / "miles_multi_lora.pt", DATA / "slime_dump.pt"


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        """stdout as one JSON object; NaN and Infinity, which are no JSON, fail."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} in the output")

        return json.loads(self.out, parse_constant=refuse)


def many_groups(count: int) -> list[dict[str, Any]]:
    """Four rollouts a group; every tenth group is all equal, group 123 has one rollout, group 7 the widest rewards."""
    rewards = {7: [0.0, 0.0, 0.0, 100.0], 123: [1.0]}
    return [
        {"group_index": f"p{group:03d}", "rollout_id": f"{group}/{n}", "reward": reward}
        for group in range(count)
        for n, reward in enumerate(rewards.get(group, [0.5] * 4 if group % 10 == 0 else [0.0, 0.0, 1.0, 1.0]))
    ]
