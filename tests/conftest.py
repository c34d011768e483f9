"""Hypothesis profiles: ``HYPOTHESIS_PROFILE`` is ci, dev (the default), thorough or mutation.

ci takes the same examples each time and does not shrink a failure: its time is bounded. Run a test
that fails there with dev, which does. mutation is ci with fewer examples: benchmarks/mutation.py
runs the tests some two thousand times.
"""

import os

from hypothesis import HealthCheck, Phase, settings

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_UNSHRUNK = (Phase.explicit, Phase.generate)

settings.register_profile(
    "ci", max_examples=50, derandomize=True, deadline=None, suppress_health_check=_SLOW, phases=_UNSHRUNK
)
settings.register_profile("dev", max_examples=100, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("thorough", max_examples=3000, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "mutation",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=_SLOW,
    phases=_UNSHRUNK,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
