"""One batch through every integration that is installed, and the page that shows it."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from doc_scripts import imported

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/integrations/parity.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", name="parity")
def fixture_parity() -> Iterator[ModuleType]:
    with imported(ROOT / "docs/integrations/parity.py") as module:
        yield module


def test_every_installed_integration_gives_the_same(parity: ModuleType) -> None:
    batch = parity.ragged_batch()
    installed = [i for i in parity.INTEGRATIONS if i.package is None or find_spec(i.package)]
    assert len(installed) >= 6
    reference, *others = [integration.run(batch) for integration in installed]
    for outcome in others:
        assert outcome.advantages.dtype == torch.float32
        assert torch.equal(outcome.advantages.view(torch.int32), reference.advantages.view(torch.int32))
        torch.testing.assert_close(outcome.loss.double(), reference.loss, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(outcome.gradient.double(), reference.gradient, rtol=1e-6, atol=1e-9)


def test_the_reference_by_hand(parity: ModuleType) -> None:
    """Eq. 16 of arXiv:2608.17528 written down once more: rollouts, their tokens, the clip, one after the other."""
    batch = parity.ragged_batch()
    reference = parity.INTEGRATIONS[0].run(batch)
    total, clipped = 0.0, set()
    for group in (0, 1):
        rollouts = {row["rollout_id"]: row["reward"] for row in batch.rows if row["group_index"] == group}
        mean = sum(rollouts.values()) / 3
        std = (sum((reward - mean) ** 2 for reward in rollouts.values()) / 2) ** 0.5
        for rollout, reward in rollouts.items():
            advantage, losses = (reward - mean) / (std + 1e-6), []
            for n, row in enumerate(batch.rows):
                if row["rollout_id"] != rollout:
                    continue
                assert float(reference.advantages[n]) == pytest.approx(advantage, rel=1e-6)
                for t, trained in enumerate(row["loss_mask"]):
                    ratio = float((batch.new[n, t] - batch.old[n, t]).exp())
                    bounded = min(max(ratio, 0.8), 1.2)
                    if trained:
                        losses.append(-min(ratio * advantage, bounded * advantage))
                        clipped |= {ratio < 0.8, (ratio > 1.2) * 2}
            total += sum(losses) / len(losses) / 6
    assert float(reference.loss) == pytest.approx(total, rel=1e-6)
    assert clipped >= {True, 2}  # below and above


def test_the_page_shows_what_the_script_prints(parity: ModuleType) -> None:
    lines = parity.table().splitlines()
    shown = [line for line in lines if "not installed" not in line]
    assert [line for line in shown if line not in PAGE] == []
    assert [i.name for i in parity.INTEGRATIONS if f"| {i.name} |" not in PAGE] == []
    assert PAGE.count("\n| ") == len(lines) - 1  # the line of dashes has no blank


def test_a_framework_that_is_not_installed_is_shown_as_such(parity: ModuleType) -> None:
    missing = parity.Integration("nobody", parity.miles_norm_alone, "a_package_that_nobody_has")
    assert parity.table((missing,)).splitlines()[-1] == "| nobody | not installed | | |"


def test_the_table_says_where_an_integration_differs(parity: ModuleType) -> None:
    def wrong(batch: object) -> object:
        outcome = parity.miles_norm_alone(batch)
        return parity.Outcome(outcome.advantages + 0.5, outcome.loss, outcome.gradient * 1.1)

    assert parity.table((parity.Integration("wrong", wrong),)).splitlines()[-1].startswith("| wrong | off by 5.0e-01 |")
    assert parity.table((parity.Integration("wrong", wrong),)).endswith("off by 1.0e-01 |")
