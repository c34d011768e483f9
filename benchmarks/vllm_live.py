"""Graphs of a running vLLM, changed between two of its steps: what a change costs, what it breaks, and whether it pays.

Sections, each by itself with ``--only``, for each K of ``--k``:

- ``probe``: seconds and MiB of a graph that is captured while vLLM serves, and what dropping it gives back; inter-token
  latency of running requests without changes, with one graph a step, and with all at once; what a change writes;
- ``shift``: a load that shifts in four phases, served under vLLM's own list, the plan of the first phase, the plan of
  all phases together, each phase's own plan gone over to while requests run (``live``), and the same without the change
  (``oracle``). ``capture-planner tune`` makes the plan of each phase from an observation of it. One restart is timed;
- ``wake``: an engine sleeps, wakes and serves, with its graphs kept, all captured first, and captured as needed;
- ``kill``: an engine is killed while its graphs change, and another one starts and serves.

All engines are child processes (_live_worker.py) with random weights of the shape of Qwen3-0.6B. Results are written as
they come: a run that is cut off keeps them. Needs a CUDA GPU with room for four engines of about 20 GiB, and vLLM 0.33.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from _arriving_rounds import GIB, Child, Group, Limits, planner, report_of
from _bench import CONSOLE, finish, parser

from capture_planner.records._base import replace

WORKER = Path(__file__).with_name("_live_worker.py")
SECTIONS = ("probe", "shift", "wake", "kill")
PHASES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("chat", {"in_flight": 32, "mean_output": 160}, 220),
    ("wave of long prompts", {"in_flight": 250, "max_prompt": 3000, "mean_output": 100}, 700),
    ("few", {"in_flight": 8, "mean_output": 200}, 45),
    ("batch", {"in_flight": 200, "max_prompt": 64, "mean_output": 160}, 800),
)
"""Phases of the load that shifts: name, load, and requests for two to four seconds."""
CHANGED_LOAD = {"in_flight": 100, "requests": 500, "mean_output": 120}
"""What is served while graphs change, or after waking."""
ARMS = ("itself", "first", "static", "live", "oracle")
HALF_HOUR = 1800.0
OBSERVED_STEPS = 4000
"""Of each observation: ``tune`` promises nothing below 1,000 steps to judge on, and judges on a part of them."""
TUNE_SECONDS = 150.0
"""Most time that a run waits for ``tune``."""


def arguments_of(k: int, folder: Path, *, sleeps: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for an engine that can sleep, or cannot; writes its models."""
    options: dict[str, Any] = {"kv_cache_memory_bytes": 12 * GIB, "enable_prefix_caching": False}
    options["compilation_config"] = {"max_cudagraph_capture_size": 1024}
    if sleeps:
        options["enable_sleep_mode"] = True
    found: dict[str, Any] = Group(name=f"k{k}", k=k, options=options, loads=(), columns=()).arguments(folder)["options"]
    return found


class LiveRun:
    """What the engines of a run share: a folder, a time to end, and rows by section, written after each."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        until = time.monotonic() + arguments.seconds
        self.limits = Limits(rounds=arguments.rounds, observed=0, until=until)
        self.folder = (arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, Any] = {}
        self.scale: float = arguments.scale
        self._arguments, self._stack = arguments, stack

    def add(self, section: str, k: int, row: Mapping[str, Any]) -> None:
        """Add a row, print it, and write all."""
        self.rows.setdefault(section, {}).setdefault(f"K={k}", []).append(dict(row))
        CONSOLE.print(f"{section} K={k}: {json.dumps(row)}", markup=False, highlight=False, soft_wrap=True)
        finish(self._arguments, {"sections": self.rows})

    def start(self, k: int, name: str, *, sleeps: bool = False, plan: Path | None = None) -> LiveChild:
        """Let an engine begin to start; without a plan it observes."""
        observing = {"CAPTURE_PLANNER_OBSERVE": str(self.folder / f"observed-{k}"), "CAPTURE_PLANNER_PROFILE": "1"}
        variables = observing if plan is None else {"CAPTURE_PLANNER_PLAN": str(plan)}
        command = [sys.executable, str(WORKER), json.dumps(arguments_of(k, self.folder, sleeps=sleeps))]
        log = self.folder / f"{name}-{k}.log"
        child = self._stack.enter_context(Child(f"{name} of K={k}", command, variables, log))
        child.ask({})
        return LiveChild(k, child, self)


class LiveChild:
    """An engine, and the run that has its rows."""

    def __init__(self, k: int, child: Child, run: LiveRun) -> None:
        self.k, self.child, self.run = k, child, run

    def started(self, section: str) -> bool:
        """Wait for the start; False, with a row that says so, where it failed."""
        try:
            self.run.add(section, self.k, self.child.answer(None, self.run.limits.left))
        except (RuntimeError, TimeoutError) as error:
            self.run.add(section, self.k, {"error": str(error)[-3000:]})
            return False
        return True

    def ask(self, section: str, **request: Any) -> list[dict[str, Any]]:
        """Send a request, and add its rows to a section as they come; return them."""
        self.send(**request)
        return self.receive(section)

    def send(self, **request: Any) -> None:
        """Send a request, whose rows are received later; where the engine has ended, that is the answer."""
        with suppress(RuntimeError):
            self.child.ask(request)

    def receive(self, section: str) -> list[dict[str, Any]]:
        """Add the rows of the request that was sent to a section as they come; return them."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                row = self.child.answer(None, self.run.limits.left)
            except (RuntimeError, TimeoutError) as error:
                row = {"error": str(error)[-3000:]}
            if "done" in row:
                return found
            self.run.add(section, self.k, row)
            found.append(row)
            if "error" in row and "plan" not in row:
                return found


def slug(name: str) -> str:
    """Return a name for a folder."""
    return name.replace(" ", "-")


class Shift:
    """The load that shifts, on one engine."""

    def __init__(self, engine: LiveChild) -> None:
        self.engine, self.run = engine, engine.run
        self.folder = self.run.folder / f"shift-{engine.k}"
        self._loads = [
            {**load, "name": name, "requests": max(2 * load["in_flight"], round(requests * self.run.scale))}
            for name, load, requests in PHASES
        ]
        self._phases = [slug(load["name"]) for load in self._loads]
        self._of = dict.fromkeys((*self._phases, "all", "itself"), "start")
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.files: dict[str, Path] = {}
        self._rows: list[dict[str, Any]] = []

    def observe(self) -> None:
        """Observe each phase, and all together; let ``tune`` begin."""
        self.engine.ask("shift", do="observe", name="warm-up", tag="ow", loads=self._loads, steps=1,
                        folder=str(self.folder / "warm-up"))  # fmt: skip
        for name, observed in (*((slug(load["name"]), [load]) for load in self._loads), ("all", self._loads)):
            rows = self.engine.ask("shift", do="observe", name=name, tag=f"o{name}", loads=observed,
                                   steps=OBSERVED_STEPS, folder=str(self.folder / name))  # fmt: skip
            if rows and "error" not in rows[-1]:
                self._processes[name] = planner("tune", name, "-o", f"tuned-{name}", folder=self.folder)

    def prepare(self) -> None:
        """Wait for the plans, and price each on the engine."""
        sources: dict[str, Any] = {"itself": _own_sizes()}
        soon = replace(self.run.limits, until=min(self.run.limits.until, time.monotonic() + TUNE_SECONDS))
        for name, process in self._processes.items():
            try:
                report = report_of(process, soon.left)
            except RuntimeError as error:
                self.run.add("shift", self.engine.k, {"tune": name, "error": str(error)[-1500:]})
                continue
            said = {key: report.get(key) for key in ("verdict", "reason", "today", "proposed", "assumptions")}
            self.run.add("shift", self.engine.k, {"tune": name, **said})
            plan = self.folder / f"tuned-{name}" / "plan.yaml"
            if report.get("verdict") == "change" and plan.exists():
                sources[name], self.files[name] = str(plan), plan
        rows = self.engine.ask("shift", do="plans", plans=sources)
        self._of |= {row["plan"]: row["plan"] for row in rows if "plan" in row and "error" not in row}

    def round(self, turn: int) -> None:
        """Serve every phase under every arm, once; arms take turns in beginning."""
        arms = [*ARMS[turn % len(ARMS) :], *ARMS[: turn % len(ARMS)]]
        for index, load in enumerate(self._loads):
            name, before = self._phases[index], self._phases[index - 1]
            for arm in arms:
                if self.run.limits.until - time.monotonic() < 15:
                    return
                plan = {"itself": "itself", "first": self._phases[0], "static": "all"}.get(arm, name)
                request = {"do": "phase", "load": load, "tag": f"s{turn}{index}{arm}", "seed": 100 + turn,
                           "plan": self._of[plan]}  # fmt: skip
                if arm == "live":
                    request |= {"from": self._of[before], "together": 2}
                for row in self.engine.ask("rounds", **request):
                    self._rows.append({"arm": arm, "phase": name, "round": turn, **row})
                    self.run.add("shifted", self.engine.k, self._rows[-1])

    def restart(self) -> None:
        """Start an engine under the plan of all phases, as a restart would."""
        began = time.monotonic()
        plan = self.files.get("all") or next(iter(self.files.values()), None)
        engine = self.run.start(self.engine.k, "restart", plan=plan)
        engine.started("restart")
        self.run.add("restart", self.engine.k, {"process_to_ready_seconds": round(time.monotonic() - began, 1)})
        engine.child.end()

    def summary(self) -> None:
        """Add medians by arm, tokens of half an hour of each phase, and the ratios that the issue asks for."""
        rates: dict[str, dict[str, float]] = {}
        for arm in ARMS:
            for name in self._phases:
                found = [row["tokens_per_second"] for row in self._rows if (row["arm"], row["phase"]) == (arm, name)
                         and "tokens_per_second" in row]  # fmt: skip
                if found:
                    rates.setdefault(arm, {})[name] = statistics.median(found)
        whole = {arm: statistics.fmean(each.values()) for arm, each in rates.items() if len(each) == len(self._phases)}
        row: dict[str, Any] = {"medians": rates, "mean_of_equal_phases": whole}
        statics = [whole[arm] for arm in ("itself", "first", "static") if arm in whole]
        if statics and "oracle" in whole:
            paused = [each["pause_seconds"] for each in self._rows if each["arm"] == "live"]
            share = statistics.median(paused) / HALF_HOUR
            row |= {
                "oracle_over_best_static": whole["oracle"] / max(statics),
                "live_over_best_static_compressed": whole.get("live", 0.0) / max(statics),
                "live_over_best_static_half_hours": whole["oracle"] * (1 - share) / max(statics),
                "pause_seconds_median": statistics.median(paused),
            }
        self.run.add("summary", self.engine.k, row)


def _own_sizes() -> list[int]:
    """Return vLLM's own sizes at its default bound of 512 tokens."""
    return [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def main(words: Sequence[str] | None = None) -> int:
    """Measure and write."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", default=SECTIONS, choices=SECTIONS)
    options.add_argument("--k", nargs="*", type=int, default=[3, 0], help="speculative tokens")
    options.add_argument("--seconds", type=float, default=570, help="most time of all")
    options.add_argument("--rounds", type=int, default=3, help="of the load that shifts, at most")
    options.add_argument("--scale", type=float, default=1.0, help="requests of a phase")
    options.add_argument("--folder", type=Path, help="for logs, observations and plans; default: a temporary one")
    arguments = options.parse_args(words)
    sections = {*arguments.only}
    with ExitStack() as stack:
        run = LiveRun(arguments, stack)
        # All start together: most of a start is the host's, and nothing is timed yet.
        servers = [run.start(k, "server") for k in arguments.k if {"probe", "shift"} & sections]
        sleepers = [run.start(k, "sleeper", sleeps=True) for k in arguments.k if "wake" in sections]
        servers = [each for each in servers if each.started("server")]
        sleepers = [each for each in sleepers if each.started("sleeper")]
        for each in sleepers:
            each.ask("wake", do="wake", load=CHANGED_LOAD, tag="w", rounds=arguments.rounds)
            each.child.end()
        measure(servers, sections, run.limits)
        for k in arguments.k if "kill" in sections else ():
            killed(k, run)
    return 0


def killed(k: int, run: LiveRun) -> None:
    """Kill an engine while its graphs change one at a time, and let the next one serve the same load."""
    for name in ("killed", "after the kill"):
        engine = run.start(k, slug(name))
        if not engine.started("kill"):
            return
        engine.send(do="latency", load={**CHANGED_LOAD, "requests": 300}, tag="k", rounds=1)
        if name == "killed":
            # Its row "none" comes first; then each step has a change.
            run.add("kill", k, {"until": engine.child.answer(None, run.limits.left)})
            time.sleep(2)
            engine.child.kill()
        engine.receive("kill")


def measure(engines: Sequence[LiveChild], sections: set[str], limits: Limits) -> None:
    """Run what is timed, one engine after another, while the others wait."""
    for engine in engines if "probe" in sections else ():
        engine.ask("probe", do="state", load={**CHANGED_LOAD, "requests": 150}, tag="p")
        engine.ask("probe", do="probe")
        engine.ask("latency", do="latency", load=CHANGED_LOAD, tag="l")
    shifts = [Shift(each) for each in engines if "shift" in sections]
    for each in shifts:
        each.observe()
    for each in shifts:
        each.prepare()
    for turn in range(limits.rounds):
        for each in shifts:
            each.round(turn)
    for each in shifts:
        each.summary()
    for engine in engines:
        engine.child.end()
    for each in shifts[:1]:
        if limits.left > 60:
            each.restart()


if __name__ == "__main__":
    sys.exit(main())
