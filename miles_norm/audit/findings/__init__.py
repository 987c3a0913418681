"""What is wrong with a dump: named checks, each with a sentence, the rows or groups concerned, and what mends it.

Checks read a result and never change it. A check returns None where there is nothing to say; thresholds are constants
beside the checks that have them.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from miles_norm.audit.findings.evidence import Evidence, Finding
from miles_norm.audit.findings.identity import (
    collided_ids,
    duplicate_padding,
    guessed_groups,
    incomplete_groups,
    missing_ids,
    stale_sizes,
)
from miles_norm.audit.findings.signal import (
    disagreeing_siblings,
    mask_length,
    nearly_equal_rewards,
    nothing_trains,
    single_rollout_groups,
    unscored_rewards,
    untrained_rollouts,
    zero_variance,
)
from miles_norm.audit.findings.weight import baseline_refuses, changed_advantages, fan_out_weight

__all__ = ["CHECKS", "Evidence", "Finding", "find"]

CHECKS: Final = MappingProxyType(
    {
        check.__name__: check
        for check in (
            # What makes all other figures wrong stands first.
            guessed_groups,
            stale_sizes,
            collided_ids,
            missing_ids,
            duplicate_padding,
            unscored_rewards,
            disagreeing_siblings,
            mask_length,
            nothing_trains,
            baseline_refuses,
            changed_advantages,
            fan_out_weight,
            zero_variance,
            single_rollout_groups,
            incomplete_groups,
            untrained_rollouts,
            nearly_equal_rewards,
        )
    }
)
"""Each check by its name, which is that of its finding, the most serious first."""

Check = Callable[[Evidence], Finding | None]


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """Findings of all checks, the most serious first.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=None, rollout=[0, 1], reward=[1, 0], trainable_tokens=[3, 3])
    >>> [finding] = find(Evidence(normalize_columns(columns)))
    >>> finding.name, finding.problem
    ('guessed_groups', 'Prompt groups were guessed: no row has group_index, so all 2 rows share one baseline.')
    >>> finding.remedy
    'set group_index on every row when it is sampled, name another field with group_key, or pass ...'
    """
    checks: tuple[Check, ...] = tuple(CHECKS.values())
    return tuple(finding for check in checks if (finding := check(evidence)) is not None)
