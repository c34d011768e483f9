"""Capture: when graphs are captured, and what captures between the steps of requests may cost."""

import enum

from capture_planner.errors import Problem
from capture_planner.records._base import ByteCount, Seconds, field, raise_any, record

LAZY_EXAMPLE = "write capture: {policy: lazy, memory: 512MiB, seconds_per_minute: 1.0}"
"""What a spec says for lazy capture, budget included."""


class CapturePolicy(enum.Enum):
    """When graphs are captured."""

    START = "start"
    """All of them before the first request."""
    LAZY = "lazy"
    """At start those that are worth it, each of the others on first use, within a budget."""


@record
class CaptureTiming:
    """When graphs are captured, and what captures between the steps of requests may cost."""

    policy: CapturePolicy = field("start, or lazy: some graphs on first use", default=CapturePolicy.START)
    memory: ByteCount | None = field(
        "lazy: device memory that is reserved for graphs captured on first use", default=None
    )
    seconds_per_minute: Seconds | None = field("lazy: time of a minute in which graphs may be captured", default=None)

    def __attrs_post_init__(self) -> None:
        budget = {"memory": self.memory, "seconds_per_minute": self.seconds_per_minute}
        lazy = self.policy is CapturePolicy.LAZY
        raise_any(
            Problem(path=(name,), message="lazy capture needs a budget", remedy=LAZY_EXAMPLE)
            if lazy
            else Problem(path=(name,), message=f"the policy start takes no {name}", remedy="only lazy does")
            for name, given in budget.items()
            if (given is None) is lazy
        )
