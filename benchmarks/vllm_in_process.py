"""What one plan changes in real vLLM: the same engine by itself, with the flags of our own check, and under a plan.

Each case is a vLLM engine in a process of its own (benchmarks/_vllm_worker.py); all of a group are alive at once, and
only one works at a time. Cases alternate within each round, load by load, and serve a load on the same core, which
changes from load to load. Medians over the rounds are reported with their spread. Rounds differ by up to half, as other
work on a shared host slows one, so what must agree within a few percent is compared step by step: two engines serve
the same load at once and run eight steps each by turns; the trimmed mean of their ratios has a 95 % interval. Where K
differs, it is the ratio of the time for a token.
Weights are random and acceptance is synthetic, except in the group ``greedy``.

Groups: ``main`` (EAGLE-3, K=3, 256 requests: vLLM by itself, with --max-cudagraph-capture-size 1024, and under plans
with the draft roles full, draft decodes eager, and all eager), ``dynamic`` (a schedule of draft lengths), ``compile``
(no speculation, vLLM's default mode), ``greedy`` (equal tokens in float32), ``large`` (the shape of Qwen3-8B), and with
``--profile`` ``schedule`` (each fixed K, the schedule that a plan chooses by that profile, adaptive verification).

Needs a CUDA GPU, vLLM 0.33, and this repository's distributions installed where vLLM finds its plugins.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, finish, parser, table, verdict
from _model_configs import write_configs
from _paired import paired_cost, paired_steps, paired_token_cost
from _vllm_cases import TUNED, Case, Group, groups, under_plan

from capture_planner.codec import Document
from capture_planner.records.profile import Profile

COMPARED_TOKENS, COMPARED_RUNS, RATED_RUNS = 384, 5, 3
"""Where steps of two engines are compared: tokens of a request, which 256 requests have room for, and repetitions."""
WORKER = Path(__file__).with_name("_vllm_worker.py")


class Engine:
    """The process of one case; a context manager that ends it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        slug = case.name.replace(",", "").replace(" ", "-")
        environment = dict(os.environ)
        arguments, planned = under_plan(case.plan, case.words, folder / f"{slug}.yaml")
        environment |= planned
        environment["CAPTURE_PLANNER_OBSERVE"] = str(folder / f"observations-{slug}")
        self.command = [sys.executable, str(WORKER), "--", *arguments]
        self._log = (folder / f"{slug}.log").open("wb")
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def end(self) -> None:
        """Let the process end, without waiting for it."""
        with suppress(BrokenPipeError):  # it has ended
            self._process.stdin.close()  # type: ignore[union-attr]

    def answer(self, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, if there is one, and return the next answer; raises where the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.flush()
            tail = Path(self._log.name).read_text("utf-8", errors="replace").splitlines()[-30:]
            raise RuntimeError(f"{self.case.name} has ended:\n" + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(
    group: Group, folder: Path, rounds: int, loads: Sequence[int], *, keep_going: bool
) -> Iterator[dict[str, Any]]:
    """Start the engines of a group in turn, let them serve by turns, and yield all answers after each round."""
    place = folder / group.name
    place.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        # They import vLLM at once and start in turn: vLLM's memory profile needs the GPU for itself.
        started = [stack.enter_context(Engine(case, place)) for case in group.cases]
        engines = []
        for engine, case in zip(started, group.cases, strict=True):
            try:
                facts = engine.answer({})["facts"]
            except RuntimeError as error:
                CONSOLE.print(f"{group.name}: {error}", markup=False)
                if not keep_going:
                    raise
                results[case.name] = {"error": str(error)}
                continue
            CONSOLE.print(f"{group.name}: {case.name}: {facts}", markup=False)
            command = shlex.join(case.words).replace(f"{folder}/", "")
            results[case.name] = {"facts": facts, "words": command, "rounds": []}
            engines.append(engine)
            for load in loads:
                engine.answer(_load(group, load, 8))  # the first steps of a size compile kernels
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for turn in range(rounds):
            # A load takes a fraction of a second: it is repeated, where it is compared.
            for load, repeat in ((size, repeat) for size in loads for repeat in range(max(2, min(4, 128 // size)))):
                core = next(cores)
                for engine in engines[turn % len(engines) :] + engines[: turn % len(engines)]:
                    if repeat and not engine.case.compared:
                        continue
                    answer = engine.answer({**_load(group, load, group.output), "core": core})
                    results[engine.case.name]["rounds"].append({"round": turn, **answer})
            yield results
        for engine in engines:
            times = engine.answer({"device": True})["device_ms"]
            of_loads = {
                role: {load: ms for load, ms in each.items() if int(load) in loads} for role, each in times.items()
            }
            results[engine.case.name]["device_ms"] = of_loads
        yield results
        by_name = {engine.case.name: engine for engine in engines}
        if group.pair is not None and by_name.keys() >= set(group.pair):
            one, other = (by_name[name] for name in group.pair)
            compared: dict[int, dict[str, Any]] = {}
            results[group.pair[0]]["steps_compared"] = {"with": group.pair[1], "loads": compared}
            for load in loads:
                request = {**_load(group, load, COMPARED_TOKENS), "core": next(cores)}
                blocks = paired_steps(one, other, request, COMPARED_RUNS)
                compared[load] = paired_cost([(first["seconds"], second["seconds"]) for first, second in blocks])
            yield results
        if group.rated in by_name:
            one, rated = by_name[group.rated], dict[str, dict[int, Any]]()
            results[group.rated]["tokens_compared"] = rated
            for load, (name, other) in itertools.product(loads, by_name.items()):
                if other is not one:
                    request = {**_load(group, load, COMPARED_TOKENS), "core": next(cores)}
                    # Small loads accept few drafts a run, whose number varies.
                    blocks = paired_steps(one, other, request, max(RATED_RUNS, 16 // load))
                    rated.setdefault(name, {})[load] = paired_token_cost(blocks)
                    yield results
        if group.dispatch:
            core = next(cores)
            for engine in engines:
                if engine.case.name == "plan":
                    observed = engine.answer({**_load(group, 48, 1536), "observing": 12, "core": core})["observing"]
                    (place / "observing.json").write_text(json.dumps(observed))
                    cost = paired_cost(observed.pop("pairs"))
                    results[engine.case.name]["observing"] = cost | observed
            cases = [(reqs, 4) for reqs in range(1, 257)]
            for _, engine in itertools.product(range(3), engines):
                times = engine.answer({"dispatch": cases, "core": core})["dispatch_ns"]
                results[engine.case.name].setdefault("dispatch_ns", []).append(times)
            yield results
        for engine in started:
            engine.end()


def _load(group: Group, requests: int, output: int) -> dict[str, Any]:
    return {"requests": requests, "prompt": group.prompt, "output": output, "tokens": group.tokens}


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return medians with the least and the largest value over the rounds, by case and load."""
    figures = ("tokens_per_second", "tpot_ms_p50", "tpot_ms_p99", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50")
    short: dict[str, Any] = {}
    for name, result in results.items():
        rows = result.get("rounds", ())
        by_load = {load: [row for row in rows if row["requests"] == load] for load in {row["requests"] for row in rows}}
        short[name] = {
            load: {
                figure: [statistics.median(values), min(values), max(values)]
                for figure in figures
                if (values := [row[figure] for row in by_load[load]])
            }
            | {"eager_share": _eager(by_load[load])}
            for load in sorted(by_load)
        }
    return short


def _eager(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of steps that ran eager, by role, over all rounds."""
    totals: dict[str, list[int]] = {}
    for row in rows:
        for role, modes in row.get("steps", {}).items():
            total = totals.setdefault(role, [0, 0])
            total[0] += modes.get("NONE", 0)
            total[1] += sum(modes.values())
    return {role: round(eager / count, 4) for role, (eager, count) in totals.items() if count}


def targets_of(
    group: str, cases: Sequence[Case], results: Mapping[str, Any], short: Mapping[str, Any]
) -> dict[str, bool]:
    """Return which targets hold."""
    targets: dict[str, bool] = {}

    def speeds() -> Iterator[tuple[int, float, str]]:
        """Yield each load with the plan's speed relative to the case that it is compared with, also as text."""
        for load, steps in results["plan"]["steps_compared"]["loads"].items():
            speed, high, low = (1 / (1 + cost) for cost in (steps["cost"], *steps["interval"]))
            yield load, speed, f"{speed:.3f}; 95 %: {low:.3f} to {high:.3f}"

    for case in cases:
        if case.plan is not None:
            planned = {role.role.value: len(role.entries) for role in case.plan.roles}
            captured = results[case.name]["facts"]["graphs"]
            targets[f"{group}: {case.name}: {sum(captured.values())} graphs are those of the plan"] = (
                captured == planned
            )
    if group in ("main", "large"):
        own, flags, plan = "vLLM by itself", "flags of check", "plan"
        # The device takes 21 ms for a step of the large model, and the host is never late: graphs gain 5 % there.
        if group == "main" and short.get(own):  # --cases may leave it out
            gain = short[plan][200]["tokens_per_second"][0] / short[own][200]["tokens_per_second"][0]
            targets[f"{group}: 200 requests, plan at least 2.5x vLLM by itself ({gain:.2f})"] = gain >= 2.5
        for load, speed, text in speeds():
            targets[f"{group}: {load} requests, plan at least 0.98x the flags ({text})"] = speed >= 0.98
        facts = [results[name]["facts"] for name in (flags, plan)]
        graphs, seconds = ([fact[key] for fact in facts] for key in ("graphs", "capture_seconds"))
        counts = [sum(each.values()) for each in graphs]
        targets[f"{group}: graphs at most a quarter ({counts[1]} of {counts[0]})"] = counts[1] * 4 <= counts[0]
        targets[f"{group}: capture at most half the time ({seconds[1]} of {seconds[0]} s)"] = (
            seconds[1] * 2 <= seconds[0]
        )
    if group == "main":
        observed = results["plan"]["observing"]
        cost = observed["cost"] + observed["recorder"]
        low, high = (value + observed["recorder"] for value in observed["interval"])
        targets[f"main: observing costs at most 0.5 % ({cost:.2%}; 95 %: {low:.2%} to {high:.2%})"] = cost <= 0.005
        for role in ("target", "draft_prefill", "draft_decode"):
            # vLLM by itself has no graph for the largest batches, and takes longer to say so.
            times = [min(row[role] for row in results[name]["dispatch_ns"]) for name in ("flags of check", "plan")]
            targets[f"main: dispatch of {role} within 100 ns of vLLM's own ({times[1]} and {times[0]} ns)"] = (
                times[1] <= times[0] + 100
            )
    if group == "compile":
        own_graphs, graphs = (sum(results[name]["facts"]["graphs"].values()) for name in ("vLLM by itself", "plan"))
        for load, speed, text in speeds():
            targets[f"compile: {load} requests, plan at least 1.0x ({text})"] = speed >= 1.0
        targets[f"compile: at most half the graphs ({graphs} of {own_graphs})"] = graphs * 2 <= own_graphs
    if group == "greedy":
        outputs = {
            name: [row["output"] for row in result["rounds"]] for name, result in results.items() if "rounds" in result
        }
        first, *others = outputs.values()
        targets[f"greedy: equal tokens ({', '.join(outputs)})"] = all(other == first for other in others)
    if group == "schedule":
        targets |= dict(schedule_targets(results[TUNED]["tokens_compared"]))
    return targets


def schedule_targets(compared: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Iterator[tuple[str, bool]]:
    """Yield how the chosen schedule does against the best fixed K and adaptive verification.

    All loads together: the mean of the loads' ratios, where the best fixed K gains least.

    :param compared: by which share the schedule takes longer for a token, by case and load.
    """
    speeds = {
        name: {load: 1 / (1 + figure["cost"]) for load, figure in loads.items()} for name, loads in compared.items()
    }
    overall = {name: statistics.geometric_mean(loads.values()) for name, loads in speeds.items()}
    fixed = [name for name in overall if name.startswith("plan, K=")]
    for name in (min(fixed, key=overall.__getitem__), *(name for name in overall if "adaptive" in name)):
        yield f"schedule: all loads, at least 1.0x {name} ({overall[name]:.3f})", overall[name] >= 1.0
    for load in speeds[fixed[0]]:
        best = min(fixed, key=lambda name: speeds[name][load])
        share, figure = speeds[best][load], compared[best][load]
        high, low = (1 / (1 + cost) for cost in figure["interval"])
        text = f"{share:.3f}; 95 %: {low:.3f} to {high:.3f}"
        yield f"schedule: {load} requests, at least 0.98x {best}, the best there ({text})", share >= 0.98


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed or an engine broke."""
    options = parser(__doc__)
    options.add_argument("--groups", nargs="*", default=["main", "dynamic", "compile", "greedy", "large"])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--loads", type=int, nargs="*", help="requests; default: the group's own")
    options.add_argument("--cases", nargs="*", help="names of cases; default: all of a group")
    options.add_argument("--utilization", type=float, default=0.14, help="of the GPU's memory, for each engine")
    options.add_argument("--folder", type=Path, help="for logs, plans and observations; default: a temporary one")
    options.add_argument("--keep-going", action="store_true", help="measure the other cases if an engine breaks")
    options.add_argument("--profile", type=Path, help="times of the small shape on this GPU, for the group schedule")
    arguments = options.parse_args()
    if "schedule" in arguments.groups and arguments.profile is None:
        options.error("the group schedule chooses draft lengths by a profile: give --profile FILE")
    profile = None if arguments.profile is None else Document.read(arguments.profile).load(Profile)
    results: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        write_configs(folder)
        for group in groups(folder, arguments.utilization, profile):
            if group.name not in arguments.groups:
                continue
            chosen = attrs.evolve(
                group, cases=tuple(each for each in group.cases if not arguments.cases or each.name in arguments.cases)
            )
            loads = arguments.loads or group.loads
            for measured in measure(chosen, folder, arguments.rounds, loads, keep_going=arguments.keep_going):
                # Written after each round: a run that is cut off keeps what it has.
                short = summary(measured)
                engines = {name: _short(each) for name, each in measured.items()}
                results[group.name] = {"medians": short, "engines": engines}
                finish(arguments, {"results": results, "targets": targets})
            try:
                targets |= targets_of(group.name, chosen.cases, measured, short)
            except (KeyError, ValueError) as error:
                targets[f"{group.name}: all cases measured (missing {error})"] = False
            finish(arguments, {"results": results, "targets": targets})
            _show(group.name, short)
    for text, holds in targets.items():
        CONSOLE.print(f"{verdict(holds)} {text}")
    return 0 if all(targets.values()) else 1


def _short(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file has of an engine: of its rounds, the throughput."""
    kept = ("round", "requests", "tokens_per_second")
    return {**engine, "rounds": [{name: row[name] for name in kept} for row in engine.get("rounds", ())]}


def _show(name: str, short: Mapping[str, Any]) -> None:
    loads = [str(load) for load in next(iter(short.values()))]
    shown = table(f"{name}: tokens/s, median (least to most)", "case", *loads)
    for case, figures in short.items():
        cells = [row["tokens_per_second"] for row in figures.values()]
        shown.add_row(case, *[f"{middle:,.0f} ({least:,.0f}-{most:,.0f})" for middle, least, most in cells])
    CONSOLE.print(shown)


if __name__ == "__main__":
    sys.exit(main())
