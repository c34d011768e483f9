"""By how much each step of an observed vLLM put off the next: the host's time to launch it, and the wait for it."""

from __future__ import annotations

from collections import deque
from typing import Any

from capture_planner.measuring.coarsening import Outcome
from capture_planner.modes import Role
from capture_planner_vllm.inside.steps import Pass


class StepPace:
    """Divides the time of an engine among its steps; what it gives adds up to the time from start to start.

    The engine's loop (vllm/v1/engine/core.py) launches a step, from ``execute_model`` to the end of ``sample_tokens``,
    and then waits for tokens. Without asynchronous scheduling they are the step's own. With it,
    ``step_with_batch_queue`` launches the next step first: the wait after step n + 1 is for step n, which has been on
    the device meanwhile. So a step costs its launch, which is nearly all where the host launches kernel by kernel, and
    the wait for its tokens, which is nearly all where the device is behind.

    The loop blocks for other reasons only where it has no unfinished request. Then the next step has none that ran
    before, and the time of the steps before it is not known.
    """

    def __init__(self, ahead: int) -> None:
        """:param ahead: how many steps are launched before the engine waits for the tokens of one."""
        self._ahead = ahead
        self._began: float | None = None
        self._ended: float | None = None
        self._target: Outcome | None = None
        self._launches: deque[tuple[Outcome, float]] = deque()
        """Steps whose tokens have not come, with the seconds of their launch."""

    def started(self, now: float, *, joined: bool) -> tuple[Outcome, float] | None:
        """Begin a step; return the step whose tokens came since the last one began, and the seconds that it cost.

        :param joined: whether all requests of the step are new: the engine may have waited for them.
        """
        ended, self._began, self._ended, self._target = self._ended, now, None, None
        # The engine waited for a request, or a run that is no step came between: earlier steps have no known end.
        if ended is None or joined:
            self._launches.clear()
        # As many steps are still ahead of the tokens that have come; the oldest beyond them is done.
        if ended is None or len(self._launches) <= self._ahead:
            return None
        outcome, launch = self._launches.popleft()
        return outcome, launch + now - ended

    def dispatched(self, passed: Pass | None) -> None:
        """Take a pass of the step."""
        if passed is not None and passed[0][0] is Role.TARGET:
            self._target = passed[0]

    def launched(self, now: float) -> None:
        """End the launch of the step; one without a batch of the target is none."""
        if self._began is not None and self._target is not None:
            self._launches.append((self._target, now - self._began))
            self._ended = now
        self._began = None

    def interrupted(self) -> None:
        """Take a run that is no step."""
        self._began = self._ended = None
        self._launches.clear()


def steps_ahead(config: Any) -> int:
    """Return how many steps a vLLM launches before it waits for the tokens of one, by its configuration."""
    batches = getattr(config, "max_concurrent_batches", None)  # not in 0.31
    if batches is None:
        batches = 1 + bool(getattr(config.scheduler_config, "async_scheduling", False))
    return max(int(batches) - 1, 0)
