"""Hypothesis profiles: "ci" takes the same examples each time, "dev" searches on and prints how to repeat a failure."""

import os

import torch
from hypothesis import HealthCheck, settings

# No deadline: the first call into torch is slower than any later one. Batches with many parts are drawn slowly.
COMMON = {
    "deadline": None,
    "max_examples": 25,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", print_blob=True, **COMMON)
settings.register_profile("ci", derandomize=True, **COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Test batches are small, and handing them to a pool of threads costs more than the work.
torch.set_num_threads(1)
