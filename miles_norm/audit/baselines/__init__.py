"""What named frameworks compute by default, to compare with: for audits and documents, never for training.

Each is a pure function of a result: it takes the rewards, ids and settings from it and none of its numbers. They keep
the frameworks' precision and their rules for groups, so that differences are shown as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from miles_norm.audit.baselines.agent_lightning import agent_lightning_advantages
from miles_norm.audit.baselines.miles import miles_2369_advantages, miles_2498_advantages
from miles_norm.audit.baselines.rows import row_advantages
from miles_norm.audit.baselines.slime import slime_advantages
from miles_norm.audit.baselines.verl import verl_advantages
from miles_norm.errors import ConfigError, shown
from miles_norm.result import NormalizedRewards

__all__ = ["BASELINES", "Baseline", "baseline_advantages", "find_baseline"]


@dataclass(frozen=True)
class Baseline:
    """A rule to compare with."""

    compute: Callable[[NormalizedRewards], Tensor]
    """Gives float32 ``[N]``."""
    rule: str
    """What is counted, as the rest of a sentence after "where"."""


BASELINES: Final = MappingProxyType(
    {
        "rows": Baseline(row_advantages, "each row counts as a rollout"),
        "miles-2369": Baseline(miles_2369_advantages, "the mainstream row speaks for its rollout"),
        "miles-2498": Baseline(miles_2498_advantages, "siblings must share one reward"),
        "slime": Baseline(slime_advantages, "rows are grouped by their number"),
        "agent-lightning": Baseline(agent_lightning_advantages, "the first row speaks for its rollout, in bfloat16"),
        "verl": Baseline(verl_advantages, "each row is an observation of its prompt, in float32"),
    }
)
"""Rules by the names that ``miles-norm audit --baseline`` takes."""


def find_baseline(name: str) -> Baseline:
    """The baseline of this name.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str) or name not in BASELINES:
        raise ConfigError(
            f"baseline {shown(name)}",
            got="no such baseline",
            expected=f"one of {', '.join(BASELINES)}",
            reason="advantages are compared with what a known rule gives",
            remedy="name one of these",
        )
    return BASELINES[name]


def baseline_advantages(result: NormalizedRewards, name: str = "rows") -> Tensor:
    """Advantages that another rule gives on the same rows under the same settings.

    Returns:
        float32 ``[N]``; NaN where the rule gives that.

    Raises:
        ConfigError: no such baseline, or a setting that it does not have.
        MilesNormError: rows with which the framework stops.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0] * 3, rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 4, 2])
    >>> result = normalize_columns(columns)
    >>> [round(value, 4) for value in result.advantages.tolist()]
    [0.7071, 0.7071, -0.7071]
    >>> [round(value, 4) for value in baseline_advantages(result, "verl").tolist()]
    [0.5773, 0.5773, -1.1547]
    """
    return find_baseline(name).compute(result)
