"""By how much each batch of an observed SGLang put off the next: what its scheduler's loop spends on each."""

from __future__ import annotations

from typing import Any

from capture_planner.measuring.coarsening import Outcome

_PENDING = 8
"""Most batches that wait for results; more mean that results are processed elsewhere, and nothing is known."""


class LoopPace:
    """Divides the time of a scheduler's loop among its batches; what it gives adds up to the time that passed.

    The loop launches a batch (``run_batch``), and processes a result (``process_batch_result``), which waits for the
    device. With overlap the result is that of the batch before, unless two prefills follow each other. So each stretch
    of the loop counts for the batch whose launch or whose result ends it.

    Where the scheduler had nothing to run, as ``after_idle_gap`` of a batch says, the wait is for a request: it
    counts for no batch, and what the batches before it put off is not known.
    """

    def __init__(self) -> None:
        self._ended: float | None = None
        self._launched: dict[Any, tuple[Outcome | None, float]] = {}
        self._processed: list[tuple[Outcome, float]] = []

    def launched(
        self, number: Any, outcome: Outcome | None, started: float, ended: float, *, after_idle: bool
    ) -> list[tuple[Outcome, float]]:
        """End the launch of a batch; return the batches that are known to have put it off, with seconds.

        :param number: SGLang's own of the batch.
        :param outcome: what the target ran; None: it ran nothing.
        :param started: when the launch began, in seconds, and ``ended`` when it was over.
        :param after_idle: whether the scheduler had nothing to run before.
        """
        known, self._processed = ([] if after_idle else self._processed), []
        # Results that never come would be kept for ever.
        if len(self._launched) >= _PENDING:
            self._launched.clear()
        # The wait for a request counts for no batch.
        since = started if after_idle or self._ended is None else self._ended
        self._launched[number] = outcome, ended - since
        self._ended = ended
        return known

    def processed(self, number: Any, ended: float) -> None:
        """End the processing of a batch's result."""
        outcome, seconds = self._launched.pop(number, (None, 0.0))
        if outcome is not None and self._ended is not None:
            self._processed.append((outcome, seconds + ended - self._ended))
        self._ended = ended
