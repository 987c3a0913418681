"""How the loss side computes on a device, where it looks at no value."""

import pytest

from miles_norm.loss import checks, tokens
from miles_norm.loss.policy import gspo


@pytest.fixture(name="as_on_a_device")
def fixture_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are taken for tensors elsewhere, so that what happens there can be seen."""
    for module in (checks, tokens, gspo):
        monkeypatch.setattr(module, "on_cpu", lambda tensor: False)
