"""Hypothesis profiles: ``HYPOTHESIS_PROFILE`` is ci, dev (the default) or thorough."""

import os

from hypothesis import HealthCheck, Phase, settings

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile("ci", max_examples=60, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("dev", max_examples=100, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "quick",
    max_examples=40,
    deadline=None,
    suppress_health_check=_SLOW,
    phases=(Phase.explicit, Phase.generate),
)
settings.register_profile("thorough", max_examples=3000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
