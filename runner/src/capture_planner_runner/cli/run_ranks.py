"""``run`` on several ranks: one process each, started by ``--ranks``, by torchrun, or by hand."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from capture_planner.cli.ending import INTERRUPTED, Say, exit_code_of, say_error
from capture_planner.errors import CapturePlannerError, RankError, RunError
from capture_planner.records.plan import Plan

if TYPE_CHECKING:
    from capture_planner_runner.launch.launch import MakeReport, Outcome
    from capture_planner_runner.ledger.session import RunReport
    from capture_planner_runner.ranks.peers import Peers
    from capture_planner_runner.ranks.processes import RankProcess
    from capture_planner_runner.ranks.watch import RankVerdict

LAST_WORDS = 2.0
"""Seconds for a partial report of a process whose main thread hangs."""


class PartialReport:
    """The report of what has run so far, shown once: by the main thread, or in place of it where it hangs."""

    def __init__(self, show: Callable[[RunReport], None]) -> None:
        self._show, self._lock = show, threading.Lock()
        self._make: MakeReport | None = None

    def offer(self, make: MakeReport) -> None:
        """Set the function that makes the report."""
        self._make = make

    def show(self, fault: str) -> bool:
        """Show the report, if there is one, and it was not shown; return whether it is shown now."""
        with self._lock:
            make, self._make = self._make, None
            report = None if make is None else make(fault)
            if report is not None:
                self._show(report)
            return report is not None

    def withdraw(self) -> None:
        """Show nothing from here on, because the complete report is shown."""
        with self._lock:
            self._make = None


@attrs.frozen(kw_only=True)
class RankCommand:
    """The command of one rank, from its launch to its exit code."""

    me: RankProcess
    plan: Callable[[], Plan]
    execute: Callable[[Plan, Peers, Callable[[MakeReport], None]], Outcome]
    """Runs the plan with the other ranks; its third argument takes what makes a report of what has run."""
    show: Callable[[Outcome], object]
    """Shows what was run; on the first rank the report of all."""
    show_partial: Callable[[RunReport], None]
    as_json: bool
    slow: float | None

    def __call__(self, say: Say) -> int:
        """Return the exit code. Each line of an error is passed to ``say`` once."""
        said: set[str] = set()

        def say_once(line: str) -> None:
            if line not in said:
                said.add(line)
                say(line)

        partial_report = PartialReport(self.show_partial if self.me.rank == 0 else lambda report: None)
        work = partial(self._run, partial_report, say_once)
        return exit_code_of(work, as_json=self.as_json and self.me.rank == 0, say=say_once)

    def _run(self, partial_report: PartialReport, say: Say) -> object:
        from capture_planner_runner.launch.refusals import refuse_other_size
        from capture_planner_runner.ranks.connection import connected
        from capture_planner_runner.ranks.group import RankGroup
        from capture_planner_runner.ranks.watch import WaitLimits, sentence

        def end(verdict: RankVerdict, is_raised: bool) -> NoReturn:
            """End around a main thread that hangs in a collective: first the error, then what has run."""
            if not verdict.interrupted:
                say(verdict.says)
            fault = "" if verdict.interrupted else verdict.says
            last_words = threading.Thread(target=partial_report.show, args=(fault,), daemon=True)
            last_words.start()
            last_words.join(LAST_WORDS)
            sys.stdout.flush()
            os._exit(INTERRUPTED if verdict.interrupted else 1)

        limits = WaitLimits(slow=self.slow, start=max(WaitLimits().start, self.slow or 0))
        outcome = None
        try:
            with connected(self.me, limits, end) as connection:
                plan = self.plan()
                refuse_other_size(plan, self.me.size)
                device = _device(plan, self.me)
                parallel = plan.parallel
                peers = RankGroup(connection, tensor_size=parallel.tensor, data_size=parallel.data, device=device)
                outcome = self.execute(plan, peers, partial_report.offer)
                if outcome.report.interrupted:
                    raise KeyboardInterrupt
                peers.close()
        except Exception as error:
            fault = str(error) if isinstance(error, RankError) else f"rank {self.me.rank} ended: {sentence(error)}"
            # First what has run, then the error: a reader of the terminal sees the cause last.
            is_shown = partial_report.show(fault)
            # An unexpected error is shown as a traceback, after the report.
            if not is_shown or not isinstance(error, CapturePlannerError):
                raise
            say(str(error))
            return 1
        except KeyboardInterrupt:
            if outcome is None:
                partial_report.show("")
                if self.me.rank:
                    return INTERRUPTED
                raise
        partial_report.withdraw()
        return self.show(outcome)


def launched() -> RankProcess | None:
    """Return the launcher's values for this process; None without a launcher."""
    from capture_planner_runner.ranks.processes import RankProcess

    return RankProcess.of(os.environ)


def _device(plan: Plan, me: RankProcess) -> Any:
    """Return the device of this rank, which is the current one from here on."""
    import torch

    from capture_planner_runner import host

    device = host.device_of(plan.environment)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if me.local_rank >= count:
        raise RunError(
            f"rank {me.rank} is number {me.local_rank} on its host, which has {count} CUDA devices; each rank needs "
            "one of its own"
        )
    torch.cuda.set_device(me.local_rank)
    return host.device_of(plan.environment)


def run_here(plan: Plan, size: int, command: Callable[[RankProcess], RankCommand]) -> int:
    """Run all ranks of a plan on this host, and return the exit code of the first that failed, or 0."""
    # Imported before the fork, so that the ranks share it.
    importlib.import_module("capture_planner_runner.models.huggingface")
    from capture_planner_runner.launch.refusals import refuse_other_size
    from capture_planner_runner.ranks.forking import run_ranks

    refuse_other_size(plan, size)
    return run_ranks(size, lambda me, say: command(me)(say), say_error)


def run_as_rank(command: RankCommand) -> NoReturn:
    """Run one rank of several that were launched; its error is noted for torchrun, too, which shows it at its end."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    def say(line: str) -> None:
        say_error(line)
        get_error_handler().record_exception(RankError(line))

    code = command(say)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the groups of torch would wait for ranks that are gone.
    os._exit(code)
