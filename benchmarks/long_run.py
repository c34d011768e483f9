"""Memory of the process over a million steps, and over 24 hours of arrivals.

The scheduler, the drafts that are accepted, the session and its report are the runner's own. Of all steps but the
first ``--real-steps``, forwards are left out and their tokens are made up, so that a step takes the host's work alone.
Requests come one by one, as to a server: by day more than by night (``--hours``, on a clock of ``STEP_SECONDS`` a step;
idle time is skipped), over and over until ``--steps`` are done or ``--seconds`` are over. Resident memory must stay
within ``--growth`` of what it was after a tenth of the steps, and the report is written at the end: its counts are
compared with those that this script adds up by itself. ``--device cuda`` serves from CUDA graphs, of which the first
``--real-steps`` are replays, and watches the device's memory, too.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch
from _bench import CONSOLE, finish, parser, shipped_environments, shipped_specs, verdict
from _deployments import CASES, REGISTRY, environment

from capture_planner.codec import dumps_json
from capture_planner.modes import Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.report.plain import plain
from capture_planner.report.run import summary
from capture_planner.runtime.execution.role import ForwardTimes
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.models.auxiliary import choose_drafter
from capture_planner.runtime.models.huggingface import load_target
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.agreement import OneReplica
from capture_planner.runtime.serving.batches import step_batch
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.pending import PendingStep
from capture_planner.runtime.serving.serving import Serving
from capture_planner.runtime.serving.states import ScheduledBatch
from capture_planner.runtime.serving.warming import WarmUpLauncher
from capture_planner.runtime.serving.workload import Request
from capture_planner.runtime.session import MOST_ROWS, RunReport, Session

STEP_SECONDS = 0.05
ACCEPTANCE = (0.7, 0.4)
DAY = 24 * 3600.0


@attrs.define(eq=False)
class HostLauncher(WarmUpLauncher):
    """Leaves forwards out after so many steps, and notes them all the same."""

    _real_steps: int = attrs.field(kw_only=True)

    def launch(self, scheduled: ScheduledBatch, started: float) -> PendingStep:
        if self._count < self._real_steps:
            return super(WarmUpLauncher, self).launch(scheduled, started)
        inputs = self._host_inputs(scheduled)
        batch = step_batch(Role.TARGET, scheduled, inputs)
        now = perf_counter() - started
        self._note(self._count, batch, self._dispatcher.dispatch(batch), ForwardTimes(now, now, now))
        return self._made_up(scheduled, inputs, started)


def arrivals(hours: float, rate: float, seed: int) -> Iterator[tuple[float, int, int]]:
    """Yield arrival, prompt and output tokens without end: a Poisson process whose rate goes with the day."""
    draw, now = random.Random(seed), 0.0
    while True:
        share = 0.5 - 0.45 * math.cos(2 * math.pi * (now % DAY) / DAY)
        now += draw.expovariate(rate * share)
        yield now, draw.randint(1, 40), min(int(draw.expovariate(1 / 40)) + 1, 150)


def memory(device: torch.device) -> dict[str, int]:
    """Return the resident memory of the process and the used memory of the GPU, in bytes."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    found = {"resident": pages * os.sysconf("SC_PAGE_SIZE")}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["device"] = total - free
    return found


@attrs.define
class Own:
    """What the script counts by itself."""

    requests: int = 0
    output_tokens: int = 0

    def finished(self, done: Any) -> None:
        self.requests += 1
        self.output_tokens += done.output_tokens


def served(runner: Runner, arguments: Any, own: Own) -> tuple[list[dict[str, float]], float]:
    """Serve until the steps or the seconds are over; return readings of memory, and the simulated seconds."""
    scheduler, session = runner._scheduler(()), runner.session
    launcher = HostLauncher(
        scheduler,
        runner.parts,
        runner.dispatcher,
        OneReplica(),
        runner.pages,
        session,
        0,
        acceptance=runner._acceptance,
        deadline=0.0,
        real_steps=arguments.real_steps,
    )
    serving = Serving(scheduler, launcher, OneReplica(), session, runner.drafter, {}, own.finished, False)
    readings, now, started, number = [], 0.0, perf_counter(), 0
    coming = arrivals(arguments.hours, arguments.rate, 1)
    upcoming = next(coming)
    while session.tally.steps < arguments.steps and perf_counter() - started < arguments.seconds:
        while upcoming[0] <= now:
            prompt = tuple((7 * number + place) % 97 for place in range(upcoming[1]))
            request = Request(name=f"r{number}", arrival=upcoming[0], prompt=prompt, max_new_tokens=upcoming[2])
            scheduler.submit(request, perf_counter())
            number, upcoming = number + 1, next(coming)
        if serving.step():
            now += STEP_SECONDS
        else:
            now = upcoming[0]
        if session.tally.steps % max(arguments.steps // 50, 1) == 0:
            gc.collect()
            used = memory(runner.device)
            readings.append({"steps": session.tally.steps, "hours": now / 3600, **used})
            if len(readings) % 5 == 1:
                mib = ", ".join(f"{each / 2**20:.1f} MiB {name}" for name, each in used.items())
                CONSOLE.print(f"{session.tally.steps:>9,} steps, {now / 3600:6.2f} h, {mib}")
    session.serve_seconds = perf_counter() - started
    serving.cut_off()
    return readings, now


def report_of(runner: Runner) -> RunReport:
    """Return the report of what was served."""
    session = runner.session
    return RunReport(
        plan=runner.plan,
        model=runner.model.name,
        backends={},
        host={},
        captured=tuple(session.captured),
        forwards=tuple(session.forwards),
        steps=tuple(session.steps),
        served=tuple(session.served),
        every_step=session.every_step,
        every_request=session.every_request,
        tally=session.tally,
        acceptance=ACCEPTANCE,
        buffers=0,
        kv_cache=0,
        capture_seconds=session.capture_seconds,
        serve_seconds=session.serve_seconds,
    )


def main() -> int:
    """Serve, print and write; exit code 1 where memory grew or a count is wrong."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=1_000_000, help="steps in all (default 1,000,000)")
    options.add_argument("--seconds", type=float, default=1800.0, help="stop after so long (default 1800)")
    options.add_argument("--real-steps", type=int, default=2000, help="first steps with all forwards (default 2000)")
    options.add_argument("--hours", type=float, default=24.0, help="hours that must be simulated (default 24)")
    options.add_argument("--rate", type=float, default=2.0, help="requests a second at noon (default 2)")
    options.add_argument("--growth", type=float, default=0.02, help="share by which memory may grow (default 0.02)")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--backend", choices=list(CASES), default="reference")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    case = CASES[arguments.backend]
    here = environment(case, device) if device.type == "cuda" else shipped_environments()["cpu"]
    plan = make_plan(replace(shipped_specs()["tiny-reference-cpu"], backend=case.backend), here, REGISTRY)
    assert plan.speculative is not None, "the shipped spec has a drafter"
    model = load_target(None, plan.model, device=device)
    states, length = plan.limits.max_num_reqs, plan.model.max_model_len + plan.speculative.num_tokens + 1
    drafter = choose_drafter("random", plan.speculative, model, num_states=states, length=length)
    pages = PageFormat(page_size=16, num_pages=1 + states * plan.model.max_model_len // 16)
    with Runner(
        plan,
        model,
        drafter,
        REGISTRY,
        grapher_for(device),
        device=device,
        pages=pages,
        options=Options(acceptance=ACCEPTANCE),
        session=Session(most=MOST_ROWS),
    ) as runner:
        runner.capture()
        own = Own()
        readings, now = served(runner, arguments, own)
        report = report_of(runner)
    numbers, written = summary(report), len(dumps_json(plain(report)))
    later = [each for each in readings if each["steps"] >= arguments.steps / 10] or readings[-1:]
    growth = {
        name: max(each[name] for each in later) / later[0][name] - 1
        for name in ("resident", "device")
        if name in later[0]
    }
    accepted = numbers.acceptance
    shares = [] if accepted is None else [round(place.rate or 0.0, 4) for place in accepted.positions]
    targets = {
        **{
            f"{name} memory grew by {grown:.2%} after the first tenth": grown <= arguments.growth
            for name, grown in growth.items()
        },
        f"{numbers.finished:,} requests and {numbers.output_tokens:,} tokens are counted": (
            own.requests == numbers.finished and own.output_tokens <= numbers.output_tokens
        ),
        f"the report has {written / 2**20:.1f} MiB": written < 32 << 20,
        f"{now / 3600:.1f} hours were simulated": now / 3600 >= arguments.hours,
    }
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    results = {
        "steps": report.counts.steps,
        "seconds": report.serve_seconds,
        "hours": now / 3600,
        "acceptance": shares,
        "latency": plain(numbers.latency),
        "readings": readings,
    }
    finish(arguments, {"results": results, "targets": targets})
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
