"""Hypothesis profiles: "ci" takes the same examples each time, "dev" searches on and prints how to repeat a failure."""

import os

from hypothesis import settings

# No deadline: the first call into torch is slower than any later one.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
