"""Engines that serve arriving requests by turns: what vllm_arriving.py and sglang_arriving.py share.

One engine is observed; ``capture-planner tune`` makes a plan of that; then all serve the loads by turns. The results
have medians and spread, ratios, steps without a graph, promises and targets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

import attrs
from _arriving import WARM_UP, name_of, settings
from _arriving_turns import compared, error_of, merged_plan, own_plan
from _bench import CONSOLE, conclude, finish, parser, print_table
from _model_configs import SHAPES, write_adapters

from capture_planner.codec import dumps, load_plan
from capture_planner.codec.reading import load_observation
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Roles, Spec

ITSELF, EXPERT, TUNED = "by itself", "expert's list", "tuned"
MERGED = "merged"
"""The engine in which plans take turns."""
AGAIN = "by itself, again"
"""An engine that differs from ``ITSELF`` by its start alone, and begins to serve where the tuned one does."""
COLUMNS = (ITSELF, EXPERT, TUNED, AGAIN)

GIB = 1 << 30
KV_GIB = {"0.6b": 12, "8b": 12, "30b-a3b": 8}
"""Memory of each engine's KV cache: given, so that engines of one GPU can start at once."""

OBSERVED_SEED, FIRST_SEED = 7, 100
"""Of the load that is observed, and of the first round."""

MOST_OBSERVED = 4
"""How often each load is served at most while the first engine is observed."""

FIGURES = (
    *("tokens_per_second", "step_ms", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50"),
    *("steps_of_target", "busy_seconds"),
)
"""What is summarised of each load; ``step_ms`` and ``steps_of_target`` are computed here."""


@attrs.frozen(kw_only=True)
class Group:
    """One deployment, whose engines serve by turns."""

    name: str
    shape: str = "0.6b"
    k: int = 0
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Arguments of ``LLM(...)`` that differ from the usual ones."""
    loads: tuple[Mapping[str, Any], ...]
    columns: tuple[str, ...]
    adapters: int = 0
    layers: int | None = None
    """Of the model; None: all."""

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Return the argument of the worker; writes the model into ``folder``."""
        folders = write_adapters(folder / self.shape, self.config, self.adapters) if self.adapters else []
        usual = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": KV_GIB[self.shape] * GIB}
        found = settings(self.shape, self.k, folder, config=self.config, adapters=self.adapters)
        return {"options": {**found, **usual, **self.options}, "adapters": [str(path) for path in folders]}

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        config = SHAPES[self.shape][0]
        return config if self.layers is None else {**config, "num_hidden_layers": self.layers}


class Child:
    """A process that answers lines, with more variables and its stderr in a file; a context manager that ends it."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **variables},
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stdout: IO[str]) -> None:
        """Queue each line, and an empty one at the end."""
        with stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def end(self) -> None:
        """Let the process end, without waiting for it."""
        with suppress(BrokenPipeError):  # it has ended
            self._stdin.close()

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request; raises ``RuntimeError`` where the process has ended."""
        try:
            self._stdin.write(json.dumps(request) + "\n")
            self._stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._ended() from None

    def answer(self, request: Mapping[str, Any] | None = None, seconds: float | None = None) -> dict[str, Any]:
        """Send a request, if there is one, and return the next answer.

        :param seconds: how long to wait for it; None: until it comes.
        :raises RuntimeError: where the process has ended, with the last lines of its log.
        :raises TimeoutError: where no answer has come.
        """
        if request is not None:
            self.ask(request)
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"{self.name} has not answered for {seconds:.0f} s") from None
        if not line:
            self._lines.put("")
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        self._log.flush()
        tail = Path(self._log.name).read_text("utf-8", errors="replace").splitlines()[-30:]
        return RuntimeError(f"{self.name} has ended:\n" + "\n".join(tail))


@attrs.frozen(kw_only=True)
class Limits:
    """When a run ends.

    :param rounds: the most.
    :param observed: steps of the target that are observed at least.
    :param until: the second of ``time.monotonic`` by which the last answer is to be there.
    """

    rounds: int
    observed: int
    until: float

    @property
    def left(self) -> float:
        """Seconds until the end, at least one."""
        return max(1.0, self.until - time.monotonic())


@attrs.frozen(kw_only=True)
class Rig:
    """How the engines of a benchmark are run.

    :param worker: the script that each engine runs in, as _arriving_worker.py.
    :param arguments: returns the argument of the worker; it may write the model into a folder.
    :param expert: returns the plan of the list that was written by hand; None: without it.
    :param together: whether engines can start at the same time.
    """

    worker: Path
    arguments: Callable[[Group, Path], Mapping[str, Any]]
    expert: Callable[[Group], Plan] | None
    together: bool


class Deployment:
    """One group while it is measured: its engines, and its part of the results."""

    def __init__(self, group: Group, rig: Rig, folder: Path, stack: ExitStack) -> None:
        self.group, self.folder = group, folder / group.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stack, self._together = stack, rig.together
        self._command = [sys.executable, str(rig.worker), json.dumps(rig.arguments(group, self.folder))]
        self.children: dict[str, Child] = {}
        self.results: dict[str, Any] = {
            "shape": group.shape,
            "k": group.k,
            "layers": group.config["num_hidden_layers"],
            "options": dict(group.options),
            "loads": [name_of(load) for load in group.loads],
            "engines": {},
            "rounds": [],
            "errors": [],
        }

    def failed(self, what: str, error: Exception) -> None:
        """Note an error; the other engines go on."""
        self.results["errors"].append(f"{what}: {error}")
        CONSOLE.print(f"{self.group.name}: {what}: {error}", markup=False)

    def start(self, plans: Mapping[str, Path | None], limits: Limits) -> None:
        """Start engines, each under its plan or by itself, together where they can."""
        for column, plan in plans.items():
            self._begin(column, plan)
            if not self._together:
                self._await_start(column, limits)
        if self._together:
            for column in plans:
                self._await_start(column, limits)

    def _begin(self, column: str, plan: Path | None) -> None:
        slug = slug_of(column)
        variables = {
            "CAPTURE_PLANNER_OBSERVE": str(self.folder / f"observed-{slug}"),
            "ARRIVING_LOCK": str(self.folder.parent / "capture.lock"),
        }
        if plan is None:
            variables["CAPTURE_PLANNER_PROFILE"] = "1"
        else:
            variables["CAPTURE_PLANNER_PLAN"] = str(plan)
        child = self._stack.enter_context(
            Child(f"{self.group.name}, {column}", self._command, variables, self.folder / f"{slug}.log")
        )
        self.children[column] = child
        child.ask({})

    def _await_start(self, column: str, limits: Limits) -> None:
        answer = self._ask(column, None, limits)
        if answer is not None:
            self.results["engines"][column] = answer["facts"]
            CONSOLE.print(f"{self.group.name}: {column}: {answer['facts']}", markup=False)

    def warm_up(self, column: str, limits: Limits, loads: Iterable[Mapping[str, Any]] = (WARM_UP,)) -> None:
        """Serve requests that are neither observed nor measured: the first steps of a size compile kernels."""
        for index, load in enumerate(loads):
            self._ask(column, {"load": load, "tag": f"w{index}", "seed": 1, "unobserved": True}, limits)

    def observe(self, limits: Limits) -> Path | None:
        """Serve the loads on the engine by itself until enough is observed; return the folder of the observation."""
        rows: list[dict[str, Any]] = []
        for turn, (index, load) in itertools.product(range(MOST_OBSERVED), enumerate(self.group.loads)):
            if index == 0 and sum(with_steps(row)["steps_of_target"] or 0 for row in rows) >= limits.observed:
                break
            request = {"load": load, "tag": f"o{turn}l{index}", "seed": OBSERVED_SEED + turn}
            row = self._ask(ITSELF, request, limits)
            if row is None:
                break
            rows.append({"load": name_of(load), **row})
        self.results["observed"] = rows
        (self.folder / "observed.json").write_text(json.dumps(rows), encoding="utf-8")
        return self.observation(ITSELF, limits)

    def observed_earlier(self, folder: Path) -> Path:
        """Take the observation, and what was measured of it, from the folder of an earlier run; return its folder."""
        earlier = folder / self.group.name
        self.results["observed"] = json.loads((earlier / "observed.json").read_text("utf-8"))
        return earlier / "before"

    def merge(self, given: Mapping[str, Path | None], steps: int, limits: Limits) -> None:
        """Start one engine that has the graphs of all plans, vLLM's own included, which take turns of so many steps.

        :param given: the plans by column; vLLM's own is ``ITSELF``.
        """
        if (engine := self.children.pop(ITSELF, None)) is not None:
            engine.end()
        plans = {column: load_plan(file) for column, file in given.items() if file is not None}
        self.results["turns"] = {"steps": steps, "graphs": {}, "rows": []}
        if not plans:
            return
        (file,) = (self.folder / "before").iterdir()
        plans = {ITSELF: own_plan(load_observation(file), next(iter(plans.values()))), **plans}
        files = {}
        for column, plan in {**plans, MERGED: merged_plan([*plans.values()])}.items():
            files[column] = self.folder / f"{slug_of(column)}.yaml"
            files[column].write_text(dumps(plan), encoding="utf-8")
        self.start({MERGED: files.pop(MERGED)}, limits)
        request = {"plans": {column: str(file) for column, file in files.items()}, "steps": steps}
        answer = self._ask(MERGED, request, limits)
        if answer is not None:
            self.results["turns"]["graphs"] = answer["graphs"]
            self.warm_up(MERGED, limits, self.group.loads)

    def take_turns(self, turn: int, index: int, load: Mapping[str, Any], limits: Limits) -> None:
        """Let the plans serve a load by turns."""
        figures = self._ask(MERGED, {"load": load, "tag": f"r{turn}l{index}", "seed": FIRST_SEED + turn}, limits)
        if figures is not None:
            row = {"load": name_of(load), "round": turn, **figures}
            self.results["turns"]["rows"].append(row)
            CONSOLE.print(f"{self.group.name}: round {turn}, {row['load']}: {compared([row])}", markup=False)

    def observation(self, column: str, limits: Limits) -> Path | None:
        """Return a folder with a copy of an engine's observation so far."""
        answer = self._ask(column, {"observation": True}, limits)
        if answer is None:
            return None
        source = Path(answer["file"])
        target = self.folder / f"{source.parent.name}-so-far"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target / source.name)
        return target

    def serve(self, turn: int, index: int, load: Mapping[str, Any], limits: Limits) -> None:
        """Let each engine serve a load; each begins in as many rounds as the others."""
        columns = list(self.children)
        for column in (*columns[turn % len(columns) :], *columns[: turn % len(columns)]) if columns else ():
            request = {"load": load, "tag": f"r{turn}l{index}", "seed": FIRST_SEED + turn}
            figures = self._ask(column, request, limits)
            if figures is not None:
                row = {"column": column, "load": name_of(load), "round": turn, **figures}
                self.results["rounds"].append(row)
                text = ", ".join(f"{name} {figures[name]}" for name in ("tokens_per_second", "itl_ms_p99"))
                CONSOLE.print(f"{self.group.name}: round {turn}, {row['load']}, {column}: {text}", markup=False)

    def tune(self, observed: Path | None, limits: Limits) -> Path | None:
        """Note what ``tune`` says of an observation; return the new plan, where it changes something."""
        if observed is None:
            return None
        shutil.copytree(observed, self.folder / "before")
        before = time.monotonic()
        try:
            report = report_of(planner("tune", "before", "-o", "tuned", folder=self.folder), limits.left)
        except RuntimeError as error:
            self.failed("tune", error)
            return None
        kept = ("verdict", "reason", "today", "proposed", "assumptions", "notes", "steps")
        self.results["tune"] = {name: report.get(name) for name in kept}
        self.results["tune"]["waited_seconds"] = round(time.monotonic() - before, 1)
        CONSOLE.print(f"{self.group.name}: tune: {report.get('verdict')}: {report.get('reason')}", markup=False)
        plan = self.folder / "tuned" / "plan.yaml"
        return plan if report.get("verdict") == "change" and plan.exists() else None

    def _ask(self, column: str, request: Mapping[str, Any] | None, limits: Limits) -> dict[str, Any] | None:
        """Return the next answer of an engine; None, with a note, where there is no answer."""
        child = self.children.get(column)
        if child is None:
            return None
        try:
            return child.answer(request, limits.left)
        except (RuntimeError, TimeoutError) as error:
            self.failed(column, error)
            self.children.pop(column).end()
            return None


def planner(*words: str, folder: Path) -> subprocess.Popen[str]:
    """Start capture-planner as a user would; its output is JSON."""
    command = [sys.executable, "-m", "capture_planner", *words, "--format", "json"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def report_of(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Return what a command of capture-planner reports; raises ``RuntimeError`` with what it said instead."""
    try:
        output, errors = process.communicate(timeout=seconds)
        report: dict[str, Any] = json.loads(output)
    except subprocess.TimeoutExpired:
        process.kill()
        raise RuntimeError("no answer") from None
    except ValueError:
        raise RuntimeError(f"exit code {process.returncode}: {errors[-2000:]}") from None
    return report


def slug_of(column: str) -> str:
    """Return what the files of a column are called."""
    return column.replace(" ", "-").replace("'", "")


def measure(
    group: Group,
    rig: Rig,
    folder: Path,
    limits: Limits,
    *,
    again: bool,
    turns: int,
    others: Sequence[Path],
    earlier: Path | None,
) -> Iterator[dict[str, Any]]:
    """Measure a group, one load after another; yield its results as they come.

    :param again: whether a second engine by itself serves, too.
    :param turns: steps of a turn, of the plans in one engine; 0: each has an engine.
    :param others: plans that take turns, too.
    :param earlier: folder of an earlier run whose observation is tuned; None: one engine is observed first.
    """
    with ExitStack() as stack:
        each = Deployment(group, rig, folder, stack)
        plans: dict[str, Path | None] = {} if earlier and turns else {ITSELF: None}
        expert = None
        if EXPERT in group.columns and rig.expert is not None:
            expert = each.folder / "expert.yaml"
            expert.write_text(dumps(rig.expert(group)), encoding="utf-8")
            if not turns:
                plans[EXPERT] = expert
        each.start(plans, limits)
        yield summarised(each.results)
        if earlier is None:
            # The first engine compiles kernels that the others load from disk. Such steps have no interval.
            each.warm_up(ITSELF, limits, group.loads)
        observed = each.observe(limits) if earlier is None else each.observed_earlier(earlier)
        yield summarised(each.results)
        plan = each.tune(observed, limits)
        if turns:
            each.merge({EXPERT: expert, TUNED: plan, **{file.stem: file for file in others}}, turns, limits)
        else:
            later: dict[str, Path | None] = {} if plan is None else {TUNED: plan}
            if again:
                later[AGAIN] = None
            each.start(later, limits)
            for column in [name for name in each.children if name != ITSELF]:
                each.warm_up(column, limits)
        yield summarised(each.results)
        longest = 0.0
        for turn in range(limits.rounds):
            if limits.left < 1.1 * longest:
                CONSOLE.print(f"round {turn} takes {longest:.0f} s, and {limits.left:.0f} s are left", markup=False)
                break
            began = time.monotonic()
            for index, load in enumerate(group.loads):
                (each.take_turns if turns else each.serve)(turn, index, load, limits)
            longest = max(longest, time.monotonic() - began)
            yield summarised(each.results)


def summarised(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a group with medians and spread, ratios, eager steps and the promise."""
    if "turns" in results:
        return _by_turns(results)
    rows = [with_steps(row) for row in (*results["rounds"],)]
    by_column = {column: [row for row in rows if row["column"] == column] for column in COLUMNS}
    # Two starts of one engine differ as much as two plans do: where there is a second, both are what is compared with.
    baseline = [*by_column[ITSELF], *by_column[AGAIN]]
    if not by_column[TUNED] and results.get("tune", {}).get("verdict") == "keep":
        by_column[TUNED] = baseline = by_column[ITSELF]
    medians = {
        column: {
            load: {figure: _spread([row[figure] for row in mine if row.get(figure) is not None]) for figure in FIGURES}
            for load in results["loads"]
            if (mine := [row for row in found if row["load"] == load])
        }
        for column, found in by_column.items()
        if found
    }
    ratios = {
        f"{column} / {ITSELF}": {
            load: {
                figure: ratio(by_column[column], by_column[ITSELF] if column == AGAIN else baseline, load, figure)
                for figure in ("tokens_per_second", "itl_ms_p99", "ttft_ms_p50")
            }
            for load in medians[column]
        }
        for column in COLUMNS[1:]
        if column in medians and ITSELF in medians
    }
    if EXPERT in medians and TUNED in medians:
        ratios[f"{TUNED} / {EXPERT}"] = {
            load: {"tokens_per_second": ratio(by_column[TUNED], by_column[EXPERT], load, "tokens_per_second")}
            for load in medians[TUNED]
        }
    return {
        **results,
        "medians": medians,
        "ratios": ratios,
        "without_graph": {column: without_graph(found) for column, found in by_column.items() if found},
        "promise": promise(results, baseline, by_column[TUNED]),
    }


def _by_turns(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of plans that took turns, with what an equal step took under each."""
    turns, graphs = results["turns"], results["turns"]["graphs"]
    kept = results.get("tune", {}).get("verdict") == "keep"

    def of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found = compared(rows)
        if kept and found["step_ms"]:
            found["step_ms"] = {**found["step_ms"], TUNED: found["step_ms"][ITSELF]}
            found["errors"] |= {pair.replace(ITSELF, TUNED): error for pair, error in found["errors"].items()}
        return found

    by_load = {load: [row for row in turns["rows"] if row["load"] == load] for load in results["loads"]}
    every = of(turns["rows"])
    steps = every["step_ms"] or {}
    return {
        **results,
        "medians": {},
        "turns": {
            **turns,
            "graphs": {**graphs, TUNED: graphs[ITSELF]} if kept and ITSELF in graphs else graphs,
            "by_load": {load: of(rows) for load, rows in by_load.items() if rows},
            "all_loads": every,
        },
        "promise": stated(results, steps.get(ITSELF), steps.get(TUNED)),
    }


def with_steps(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a load with the steps of the target, and the mean time of one."""
    steps = sum(row.get("graphs_of_steps", {}).get("target", {}).values())
    return {
        **row,
        "steps_of_target": steps or None,
        "step_ms": round(row["busy_seconds"] / steps * 1e3, 4) if steps else None,
    }


def _spread(values: Sequence[float]) -> list[float] | None:
    """Return the median, the least and the largest value."""
    return [round(statistics.median(values), 4), min(values), max(values)] if values else None


def ratio(
    mine: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]], load: str, figure: str
) -> list[float] | None:
    """Return the median, the least and the largest ratio of a figure over the rounds that both have served.

    :param other: of several engines, their mean of a round counts.
    """
    theirs: dict[int, list[float]] = {}
    for row in other:
        if row["load"] == load and row.get(figure):
            theirs.setdefault(row["round"], []).append(row[figure])
    found = [
        row[figure] / statistics.geometric_mean(theirs[row["round"]])
        for row in mine
        if row["load"] == load and row["round"] in theirs and row.get(figure)
    ]
    return [round(each, 4) for each in (statistics.median(found), min(found), max(found))] if found else None


def without_graph(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of steps that ran without a graph, by role, over all rounds."""
    totals: dict[str, list[int]] = {}
    for row in rows:
        for role, kinds in row.get("graphs_of_steps", {}).items():
            total = totals.setdefault(role, [0, 0])
            total[0] += kinds.get("NONE", 0)
            total[1] += sum(kinds.values())
    return {role: round(eager / count, 4) for role, (eager, count) in totals.items() if count}


def mean_step(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean milliseconds of a step of the target over some loads; None without one."""
    found = [with_steps(row) for row in rows]
    steps = sum(row["steps_of_target"] or 0 for row in found)
    return round(sum(row["busy_seconds"] for row in found) / steps * 1e3, 4) if steps else None


def promise(
    results: Mapping[str, Any], baseline: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the mean step that ``tune`` states today and under the plan, and the measured ones, in milliseconds.

    A host drifts: the same engine took up to 1.6 times as long in a later round. So what is stated for the plan is
    compared at the speed of the rounds: times what engines by themselves took in them, by what one took when observed.
    """
    sides = baseline, tuned
    served = set.intersection(*({(row["load"], row["round"]) for row in rows} for rows in sides))
    itself, after = (mean_step(row for row in rows if (row["load"], row["round"]) in served) for rows in sides)
    return stated(results, itself, after)


def stated(results: Mapping[str, Any], itself: float | None, after: float | None) -> dict[str, Any]:
    """Return what ``tune`` stated of a mean step and what it took, as observed and under the plan.

    :param itself: what an engine by itself took when the plan was served, in milliseconds.
    :param after: what the tuned one took.
    """
    tune, measured = results.get("tune") or {}, mean_step(results.get("observed", ()))
    found: dict[str, Any] = {}
    if not (before := tune.get("today")) or not measured:
        return found
    said = before["mean_step_ms"]
    found["before"] = {"stated_ms": said, "measured_ms": measured, "off": round(said / measured - 1, 4)}
    if tune.get("verdict") == "change" and itself and after:
        said, drift = tune["proposed"]["mean_step_ms"], itself / measured
        found["after"] = {"stated_ms": said, "measured_ms": after, "drift": round(drift, 4)}
        found["after"]["off"] = round(said * drift / after - 1, 4)
    return found


def targets_of(group: Group, result: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the targets of a group, and whether each is met."""
    name = group.name
    tune, turns = result.get("tune") or {}, result.get("turns")
    # What ``tune`` keeps takes no turns where no list by hand does.
    served = TUNED in result["medians"] if turns is None else turns["by_load"] or tune.get("verdict") == "keep"
    if not served:
        reasons = "; ".join(each.strip().splitlines()[-1] for each in result["errors"])
        yield f"{name}: tuned measured ({reasons or tune.get('reason', 'not served')})", False
        return
    if turns is not None:
        yield from _targets_of_turns(name, result)
        return
    ratios, engines = result["ratios"], result["engines"]
    ours = engines.get(TUNED) or engines[ITSELF]
    for load, found in ratios[f"{TUNED} / {ITSELF}"].items():
        middle, text = _of(found["tokens_per_second"])
        if EXPERT in group.columns:
            latency, latencies = _of(found["itl_ms_p99"])
            yield f"{name}: {load}, p99 inter-token latency at most that by itself ({latencies})", latency <= 1.0
            if name == "0.6b-3" and load.startswith("wave"):
                yield f"{name}: {load}, at least 1.35x by itself ({text})", middle >= 1.35
        else:
            yield f"{name}: {load}, at least 0.98x by itself ({text})", middle >= 0.98
    for load, found in ratios.get(f"{TUNED} / {EXPERT}", {}).items():
        middle, text = _of(found["tokens_per_second"])
        yield f"{name}: {load}, tuned at least the expert's tokens/s ({text})", middle >= 1.0
    if EXPERT in engines:
        yield _half(name, ours["graphs"], engines[EXPERT]["graphs"])
    yield from _promised(name, result)


def _targets_of_turns(name: str, result: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the targets of a group whose plans took turns."""
    turns = result["turns"]
    for load, found in {**turns["by_load"], "all loads": turns["all_loads"]}.items():
        steps = found["step_ms"] or {}
        # A list by hand may be as good, so that one of two equal plans would fail by chance: two errors are left to it.
        for other, most, errors in ((EXPERT, 1.0, 2), (ITSELF, 1 / 0.98, 0)):
            if TUNED in steps and other in steps:
                longer, error = steps[TUNED] / steps[other], error_of(found, TUNED, other)
                text = f"{longer:.3f} +- {error:.3f}"
                met = longer <= most + errors * error
                yield f"{name}: {load}, an equal step takes at most that of {other} ({text})", met
    graphs = turns["graphs"]
    if EXPERT in graphs and TUNED in graphs:
        yield _half(name, graphs[TUNED], graphs[EXPERT])
    yield from _promised(name, result)


def _half(name: str, ours: Mapping[str, int], experts: Mapping[str, int]) -> tuple[str, bool]:
    counts = sum(ours.values()), sum(experts.values())
    return f"{name}: at most half of the expert's graphs ({counts[0]} of {counts[1]})", counts[0] * 2 <= counts[1]


def _promised(name: str, result: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    for when, found in result["promise"].items():
        text = f"{found['stated_ms']:.2f} and {found['measured_ms']:.2f} ms: {found['off']:+.1%}"
        text += f", the host {found['drift']:.2f} times as slow" if "drift" in found else ""
        yield f"{name}: mean step {when} within 10 % ({text})", abs(found["off"]) <= 0.1


def _of(values: Sequence[float] | None) -> tuple[float, str]:
    """Return the median and a text with the spread; not a number where nothing was measured."""
    if values is None:
        return float("nan"), "not measured"
    return values[0], f"{values[0]:.3f}; {values[1]:.3f} to {values[2]:.3f}"


def show(name: str, result: Mapping[str, Any]) -> None:
    """Print what a group gave."""
    rows = []
    if "turns" in result:
        columns = [*result["turns"]["graphs"]]
        for load, found in {**result["turns"]["by_load"], "all loads": result["turns"]["all_loads"]}.items():
            if steps := found["step_ms"]:
                rows.append((load, *[f"{steps[each]:.3f} +- {error_of(found, ITSELF, each):.1%}" for each in columns]))
        print_table(f"{name}: milliseconds of an equal step, error against {ITSELF}", ("load", *columns), rows)
        return
    medians = result["medians"]
    for load in result["loads"]:
        cells = [medians[column].get(load, {}).get("tokens_per_second") for column in medians]
        rows.append((load, *["-" if each is None else "{:,.0f} ({:,.0f}-{:,.0f})".format(*each) for each in cells]))
    print_table(f"{name}: tokens/s, median (least to most)", ("load", *medians), rows)


def without_drafter(spec: Spec) -> Spec:
    """Return a spec without speculative decoding, and without what it says of drafters."""
    return replace(spec, speculative=None, roles=Roles(target=spec.roles.target))


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a command line with the options that both benchmarks have."""
    options = parser(doc)
    options.add_argument("--expert", type=Path, help="spec with the list that is compared; default: without it")
    options.add_argument("--rounds", type=int, default=9, help="the most; fewer where the time ends")
    options.add_argument("--again", action="store_true", help="a second engine by itself: what two starts differ by")
    options.add_argument(
        "--turns",
        type=int,
        default=0,
        metavar="STEPS",
        help="serve under all plans in one engine of vLLM, in turns of so many steps; default: an engine for each",
    )
    options.add_argument("--plan", type=Path, nargs="*", default=[], help="plans of these files take turns, too")
    options.add_argument("--observed", type=Path, help="--folder of an earlier run, whose observations are tuned")
    options.add_argument("--observed-steps", type=int, default=2000, help="of the target: the loads repeat until then")
    options.add_argument("--seconds", type=float, default=540, help="no round begins that could end later")
    options.add_argument("--scale", type=float, default=1.0, help="requests of each load, relative to the usual ones")
    options.add_argument("--folder", type=Path, help="for logs, plans and observations; default: a temporary one")
    return options


def run(arguments: argparse.Namespace, groups: Sequence[Group], rig_in: Callable[[Path], Rig]) -> int:
    """Measure groups, print and write what came as it comes; exit code 1 where a target is missed.

    :param rig_in: returns how engines are run; it may write into the folder that it gets.
    """
    if arguments.plan and not arguments.turns:
        sys.exit("--plan: plans take turns in one engine; give --turns STEPS")
    end = time.monotonic() + arguments.seconds
    results: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        rig = rig_in(folder)
        for index, group in enumerate(groups):
            share = (end - time.monotonic()) / (len(groups) - index)
            limits = Limits(rounds=arguments.rounds, observed=arguments.observed_steps, until=time.monotonic() + share)
            earlier = targets
            for found in measure(
                group,
                rig,
                folder,
                limits,
                again=arguments.again,
                turns=arguments.turns,
                others=arguments.plan,
                earlier=arguments.observed,
            ):
                results[group.name] = found
                targets = earlier | dict(targets_of(group, found))
                finish(arguments, {"results": results, "targets": targets})
    for name, result in results.items():
        show(name, result)
    return conclude(arguments, {"results": results}, targets)
