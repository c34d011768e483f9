"""Graphs of a running vLLM, changed between two of its steps: what a change costs, what it breaks, and whether it pays.

Sections, each by itself with ``--only``, for each K of ``--k``:

- ``probe``: seconds and MiB of a graph that is captured while vLLM serves, and what dropping it gives back; inter-token
  latency of running requests without changes, with one graph a step, and with all at once; what a change writes;
- ``growth``: which buffers bound later graphs, each tried;
- ``tokens``: float32, greedy: tokens of running requests with and without changes; a difference counts where the token
  was no tie;
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from _arriving_rounds import GIB, Child, Group, Limits, planner, report_of
from _bench import CONSOLE, finish, parser

from capture_planner.records._base import replace

WORKER = Path(__file__).with_name("_live_worker.py")
SECTIONS = ("probe", "growth", "tokens", "shift", "wake", "kill")
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


def arguments_of(k: int, folder: Path, *, exact: bool, sleeps: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for an engine; writes its models.

    :param exact: float32 with real acceptance and few graphs, for tokens; else as it would serve.
    :param sleeps: whether it can sleep.
    """
    options: dict[str, Any] = {"kv_cache_memory_bytes": (6 if exact else 12) * GIB, "enable_prefix_caching": False}
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, *([192, 256] if k else [])]
    if exact:
        options |= {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    else:
        options["compilation_config"] = {"max_cudagraph_capture_size": 1024}
    if sleeps:
        options["enable_sleep_mode"] = True
    group = Group(name=f"k{k}", k=k, options=options, loads=(), columns=())
    found: dict[str, Any] = group.arguments(folder)["options"]
    if exact and k:
        kept = ("method", "model", "num_speculative_tokens")
        found["speculative_config"] = {name: found["speculative_config"][name] for name in kept}
    return found


class Results:
    """Rows by section, written after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.rows: dict[str, Any] = {}

    def add(self, section: str, k: int, row: Mapping[str, Any]) -> None:
        """Add a row, print it, and write all."""
        self.rows.setdefault(section, {}).setdefault(f"K={k}", []).append(dict(row))
        CONSOLE.print(f"{section} K={k}: {json.dumps(row)}", markup=False, highlight=False, soft_wrap=True)
        finish(self._arguments, {"sections": self.rows})


class LiveChild:
    """An engine, and where its rows go."""

    def __init__(self, k: int, child: Child, results: Results) -> None:
        self.k, self.child, self._results = k, child, results

    def started(self, section: str, seconds: float) -> bool:
        """Wait for the start; False, with a row that says so, where it failed."""
        try:
            self._results.add(section, self.k, self.child.answer(None, seconds))
        except (RuntimeError, TimeoutError) as error:
            self._results.add(section, self.k, {"error": str(error)[-3000:]})
            return False
        return True

    def ask(self, section: str, seconds: float, **request: Any) -> list[dict[str, Any]]:
        """Send a request, and add its rows to a section as they come; return them."""
        self.send(**request)
        return self.receive(section, seconds)

    def send(self, **request: Any) -> None:
        """Send a request, whose rows are received later; where the engine has ended, that is the answer."""
        with suppress(RuntimeError):
            self.child.ask(request)

    def receive(self, section: str, seconds: float) -> list[dict[str, Any]]:
        """Add the rows of the request that was sent to a section as they come; return them."""
        found: list[dict[str, Any]] = []
        until = time.monotonic() + seconds
        while True:
            try:
                row = self.child.answer(None, max(1.0, until - time.monotonic()))
            except (RuntimeError, TimeoutError) as error:
                row = {"error": str(error)[-3000:]}
            if "done" in row:
                return found
            self._results.add(section, self.k, row)
            found.append(row)
            if "error" in row and "plan" not in row:
                return found


def tune_all(folder: Path, names: Sequence[str]) -> dict[str, subprocess.Popen[str]]:
    """Start ``tune`` of each observation in a folder; each writes a plan into ``tuned-NAME``."""
    return {name: planner("tune", name, "-o", f"tuned-{name}", folder=folder) for name in names}


def tuned_plans(
    processes: Mapping[str, subprocess.Popen[str]], folder: Path, limits: Limits
) -> Iterator[tuple[str, dict[str, Any], Path | None]]:
    """Yield what each ``tune`` says, and its plan where it changes something."""
    for name, process in processes.items():
        try:
            report = report_of(process, limits.left)
        except RuntimeError as error:
            yield name, {"error": str(error)[-1500:]}, None
            continue
        plan = folder / f"tuned-{name}" / "plan.yaml"
        said = {key: report.get(key) for key in ("verdict", "reason", "today", "proposed", "assumptions")}
        yield name, said, plan if report.get("verdict") == "change" and plan.exists() else None


def slug(name: str) -> str:
    """Return a name for a folder."""
    return name.replace(" ", "-")


def loads(scale: float) -> list[dict[str, Any]]:
    """Return the loads of the phases."""
    return [
        {**load, "name": name, "requests": max(2 * load["in_flight"], round(requests * scale))}
        for name, load, requests in PHASES
    ]


class Shift:
    """The load that shifts, on one engine."""

    def __init__(self, engine: LiveChild, folder: Path, results: Results, arguments: argparse.Namespace) -> None:
        self.engine, self._results = engine, results
        self.folder = folder / f"shift-{engine.k}"
        self._loads = loads(arguments.scale)
        self._phases = [slug(load["name"]) for load in self._loads]
        self._of = dict.fromkeys((*self._phases, "all", "itself"), "start")
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.files: dict[str, Path] = {}
        self._rows: list[dict[str, Any]] = []

    def observe(self, limits: Limits) -> None:
        """Observe each phase, and all together; let ``tune`` begin."""
        self.engine.ask("shift", limits.left, do="observe", name="warm-up", tag="ow", loads=self._loads, steps=1,
                        folder=str(self.folder / "warm-up"))  # fmt: skip
        for name, observed in (*((slug(load["name"]), [load]) for load in self._loads), ("all", self._loads)):
            rows = self.engine.ask("shift", limits.left, do="observe", name=name, tag=f"o{name}", loads=observed,
                                   steps=OBSERVED_STEPS, folder=str(self.folder / name))  # fmt: skip
            if rows and "error" not in rows[-1]:
                self._processes |= tune_all(self.folder, [name])

    def prepare(self, limits: Limits) -> None:
        """Wait for the plans, and price each on the engine."""
        sources: dict[str, Any] = {"itself": _own_sizes()}
        soon = replace(limits, until=min(limits.until, time.monotonic() + TUNE_SECONDS))
        for name, said, plan in tuned_plans(self._processes, self.folder, soon):
            self._results.add("shift", self.engine.k, {"tune": name, **said})
            if plan is not None:
                sources[name], self.files[name] = str(plan), plan
        rows = self.engine.ask("shift", limits.left, do="plans", plans=sources)
        self._of |= {row["plan"]: row["plan"] for row in rows if "plan" in row and "error" not in row}

    def round(self, turn: int, limits: Limits) -> None:
        """Serve every phase under every arm, once; arms take turns in beginning."""
        arms = [*ARMS[turn % len(ARMS) :], *ARMS[: turn % len(ARMS)]]
        for index, load in enumerate(self._loads):
            name, before = self._phases[index], self._phases[index - 1]
            for arm in arms:
                if limits.until - time.monotonic() < 15:
                    return
                plan = {"itself": "itself", "first": self._phases[0], "static": "all"}.get(arm, name)
                request = {"do": "phase", "load": load, "tag": f"s{turn}{index}{arm}", "seed": 100 + turn,
                           "plan": self._of[plan]}  # fmt: skip
                if arm == "live":
                    request |= {"from": self._of[before], "together": 2}
                for row in self.engine.ask("rounds", limits.left, **request):
                    self._rows.append({"arm": arm, "phase": name, "round": turn, **row})
                    self._results.add("shifted", self.engine.k, self._rows[-1])

    def restart(self, stack: ExitStack, limits: Limits) -> None:
        """Start an engine under the plan of all phases, as a restart would."""
        plan = self.files.get("all") or next(iter(self.files.values()), None)
        variables = {} if plan is None else {"CAPTURE_PLANNER_PLAN": str(plan)}
        began = time.monotonic()
        child = start(
            self.engine.k, self.folder.parent, stack, self._results, exact=False, name="restart", more=variables
        )
        child.started("restart", limits.left)
        self._results.add("restart", self.engine.k, {"process_to_ready_seconds": round(time.monotonic() - began, 1)})
        child.child.end()

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
        self._results.add("summary", self.engine.k, row)


def _own_sizes() -> list[int]:
    """Return vLLM's own sizes at its default bound of 512 tokens."""
    return [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def start(
    k: int, folder: Path, stack: ExitStack, results: Results, *, exact: bool, name: str,
    sleeps: bool = False, more: Mapping[str, str] | None = None,
) -> LiveChild:  # fmt: skip
    """Let an engine begin to start."""
    command = [sys.executable, str(WORKER), json.dumps(arguments_of(k, folder, exact=exact, sleeps=sleeps))]
    variables = dict(more or {})
    if not exact and not variables:
        variables = {"CAPTURE_PLANNER_OBSERVE": str(folder / f"observed-{k}"), "CAPTURE_PLANNER_PROFILE": "1"}
    child = stack.enter_context(Child(f"{name} of K={k}", command, variables, folder / f"{name}-{k}.log"))
    child.ask({})
    return LiveChild(k, child, results)


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
    limits = Limits(rounds=arguments.rounds, observed=0, until=time.monotonic() + arguments.seconds)
    results = Results(arguments)
    with ExitStack() as stack:
        folder = (arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        exact = {"tokens", "growth"} & {*arguments.only}
        serving = {"probe", "shift"} & {*arguments.only}
        # All start together: most of a start is the host's, and nothing is timed yet.
        exacts = [start(k, folder, stack, results, exact=True, name="exact") for k in arguments.k if exact]
        servers = [start(k, folder, stack, results, exact=False, name="server") for k in arguments.k if serving]
        sleepers = [
            start(k, folder, stack, results, exact=False, name="sleeper", sleeps=True)
            for k in arguments.k
            if "wake" in arguments.only
        ]
        exacts = [each for each in exacts if each.started("exact", limits.left)]
        servers = [each for each in servers if each.started("server", limits.left)]
        sleepers = [each for each in sleepers if each.started("sleeper", limits.left)]
        correct(exacts, exact, limits)
        for each in sleepers:
            each.ask("wake", limits.left, do="wake", load=CHANGED_LOAD, tag="w", rounds=arguments.rounds)
            each.child.end()
        measure(servers, serving, folder, results, arguments, limits, stack)
        if "kill" in arguments.only:
            for k in arguments.k:
                killed(k, folder, stack, results, limits)
    return 0


def killed(k: int, folder: Path, stack: ExitStack, results: Results, limits: Limits) -> None:
    """Kill an engine while its graphs change one at a time, and let the next one serve the same load."""
    for name in ("killed", "after the kill"):
        engine = start(k, folder, stack, results, exact=False, name=slug(name))
        if not engine.started("kill", limits.left):
            return
        engine.send(do="latency", load={**CHANGED_LOAD, "requests": 300}, tag="k", rounds=1)
        if name == "killed":
            # Its row "none" comes first; then each step has a change.
            results.add("kill", k, {"until": engine.child.answer(None, limits.left)})
            time.sleep(2)
            engine.child.kill()
        engine.receive("kill", limits.left)


def correct(engines: Sequence[LiveChild], sections: set[str], limits: Limits) -> None:
    """Run what has no clock, on all engines together, and end them."""
    load = {"in_flight": 24, "requests": 120, "max_prompt": 256, "max_output": 160, "mean_output": 90}
    for section in ("tokens", "growth"):
        if section in sections:
            few = load if section == "tokens" else {**load, "requests": 30}
            for each in engines:
                each.send(do=section, load=few, tag=section[0])
            for each in engines:
                each.receive(section, limits.left)
    for each in engines:
        each.child.end()


def measure(
    engines: Sequence[LiveChild], sections: set[str], folder: Path, results: Results, arguments: argparse.Namespace,
    limits: Limits, stack: ExitStack,
) -> None:  # fmt: skip
    """Run what is timed, one engine after another, while the others wait."""
    if "probe" in sections:
        for engine in engines:
            engine.ask("probe", limits.left, do="state", load={**CHANGED_LOAD, "requests": 150}, tag="p")
            engine.ask("probe", limits.left, do="probe")
            engine.ask("latency", limits.left, do="latency", load=CHANGED_LOAD, tag="l")
    shifts = [Shift(each, folder, results, arguments) for each in engines if "shift" in sections]
    for each in shifts:
        each.observe(limits)
    for each in shifts:
        each.prepare(limits)
    for turn in range(limits.rounds):
        for each in shifts:
            each.round(turn, limits)
    for each in shifts:
        each.summary()
    for engine in engines:
        engine.child.end()
    for each in shifts[:1]:
        if limits.left > 60:
            each.restart(stack, limits)


if __name__ == "__main__":
    sys.exit(main())
