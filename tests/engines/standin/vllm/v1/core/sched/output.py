"""What the scheduler gives for a step."""

from dataclasses import dataclass, field


@dataclass
class SchedulerOutput:
    """The requests of a step; ``uniform``, ``drafts`` and ``sampled`` say what the stand-in does with them."""

    num_scheduled_tokens: dict
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict
    scheduled_new_reqs: list = field(default_factory=list)
    uniform: int | None = None
    drafts: int = 0
    sampled: list | None = None
