"""Sizes chosen on the first two thirds of a trace, judged on the last third: 60 deployments.

Four traces, with and without three drafts of EAGLE-3, the shipped profiles, and three limits of requests. Each trace
is sped up or slowed down until its steps have 45 % of ``max_num_seqs`` requests on average, in a closed loop at the
profile's own times. The budget is a third of vLLM's graphs. The judge is this script's own: it reads curves by itself,
and shares with the planner no more than the records and the dispatcher. ``targets_of`` has what must hold. ``bound`` is
what a table of so many graphs, with FULL graphs for all decodes, takes at least, even if chosen on the last third.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, conclude, parser, print_table, shipped_environments
from _traces_bound import least_mean

from capture_planner.analysis.arrivals import simulate
from capture_planner.analysis.trace import TraceRow, read_trace
from capture_planner.codec import load_profile
from capture_planner.codec.shipped import shipped_profiles
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning import planner
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.profile import CostCurve, Profile
from capture_planner.records.spec import Budget, Limits, Policy, Sizes, Spec
from capture_planner.records.traffic import Traffic, TrafficCount

PIECEWISE = 1.3
"""Time of a PIECEWISE graph over that of a FULL one, where a profile has no PIECEWISE curve: assumed."""


class Judge:
    """What steps take under the entries of a plan, by the curves of a profile."""

    def __init__(self, profile: Profile, drafts: int) -> None:
        self.profile, self._drafts = profile, drafts
        self.time, self._step = cache(self._time_of), cache(self._every_size_of)

    def _curve(self, role: Role, mode: GraphMode, query_len: int | None) -> tuple[CostCurve | None, float]:
        """Return the curve that is nearest, and what to multiply it by."""
        own = [each for each in self.profile.curves if each.role is role and each.mode is mode]
        if own:
            return min(own, key=lambda each: (each.query_len != query_len, each.draft_steps or 1)), 1.0
        if mode is GraphMode.PIECEWISE:
            curve, _ = self._curve(role, GraphMode.FULL, query_len)
            return curve, PIECEWISE
        return None, 1.0

    def reach(self, role: Role, mode: GraphMode, query_len: int | None) -> int:
        """Return the largest size that was measured."""
        curve, _ = self._curve(role, mode, query_len)
        return 0 if curve is None else curve.tokens[-1]

    def _time_of(self, role: Role, mode: GraphMode, query_len: int | None, tokens: int) -> float:
        """Return the milliseconds of one pass; beyond what was measured a graph takes no less than an eager pass.

        A FULL graph takes no longer than the PIECEWISE one of its size, where that was measured.
        """
        curve, factor = self._curve(role, mode, query_len)
        if curve is None:  # Never eager in this engine: the graph's time, doubled.
            return 2 * self.time(
                role, GraphMode.FULL, query_len, min(tokens, self.reach(role, GraphMode.FULL, query_len))
            )
        sizes, times = curve.tokens, list(accumulate(curve.milliseconds, max))
        factor /= curve.draft_steps or 1
        if tokens > sizes[-1] and mode is GraphMode.FULL:
            pieces, _ = self._curve(role, GraphMode.PIECEWISE, None)
            if pieces is not None and pieces.mode is GraphMode.PIECEWISE and tokens <= pieces.tokens[-1]:
                return max(times[-1], self.time(role, GraphMode.PIECEWISE, None, tokens))
        if tokens > sizes[-1] and mode is not GraphMode.NONE:
            return max(factor * times[-1], self.time(role, GraphMode.NONE, query_len, tokens))
        right = min(bisect_left(sizes, tokens), len(sizes) - 1)
        left = max(right - 1, 0)
        if sizes[right] == tokens or right == 0:
            return factor * times[right]
        slope = (times[right] - times[left]) / (sizes[right] - sizes[left])
        return factor * (times[left] + slope * (tokens - sizes[left]))

    def passes(self, batch: Batch) -> Iterator[tuple[Role, int | None, int, int, int]]:
        """Yield role, query length (None: prompts), requests, tokens and repeats of each pass of a step."""
        each = batch.query_len if batch.past_prompt else None
        yield Role.TARGET, each, batch.num_reqs, batch.num_tokens, 1
        if self._drafts:
            yield Role.DRAFT_PREFILL, each, batch.num_reqs, batch.num_tokens, 1
        if self._drafts > 1:
            yield Role.DRAFT_DECODE, 1, batch.num_reqs, batch.num_reqs, self._drafts - 1

    def every_size(self, batch: Batch) -> float:
        """Return the milliseconds of a step with a graph of each size and mode that was measured, where it pays."""
        return self._step(batch)

    def _every_size_of(self, batch: Batch) -> float:
        ways = []
        for role, each, _, tokens, _ in self.passes(batch):
            modes: list[tuple[GraphMode, int | None]] = [(GraphMode.FULL, each)] if each is not None else []
            modes += [] if role is Role.DRAFT_DECODE else [(GraphMode.PIECEWISE, None)]
            # A drafter's graph hides behind the host's work, also where it takes no less than an eager pass.
            graphs = [each for each in modes if role.is_drafter or tokens <= self.reach(role, *each)]
            choices = [(*graph, tokens) for graph in (*graphs, (GraphMode.NONE, each))]
            ways.append(sorted(choices, key=lambda choice: self.time(role, *choice)))
        targets, *drafts = ways
        # What the host takes depends on how the target runs.
        return min(self.under_ways(batch, [target, *(best for best, *_ in drafts)]) for target in targets)

    def under(self, dispatcher: Dispatcher, batch: Batch) -> float:
        """Return the milliseconds of a step under the graphs of a plan."""
        ways = []
        for role, each, reqs, tokens, _ in self.passes(batch):
            one = Batch.mixed(role, reqs, tokens) if each is None else Batch.decode(role, reqs, each)
            entry = dispatcher.dispatch(one).entry
            own = (GraphMode.NONE, each, tokens)
            ways.append(own if entry is None else (entry.mode, entry.query_len, entry.num_tokens))
        return self.under_ways(batch, ways)

    def under_ways(self, batch: Batch, ways: Sequence[tuple[GraphMode, int | None, int]]) -> float:
        """Return the milliseconds of a step whose passes run in so many modes, query lengths and tokens."""
        profile, kind, passes = self.profile, ways[0][:2], 0.0
        for (role, *_, repeats), (mode, each, tokens) in zip(self.passes(batch), ways, strict=True):
            passes += repeats * self.time(role, mode, each, tokens)
        device = max(passes, profile.floor(*kind))
        return profile.step(batch.num_reqs, device + profile.overhead(*kind) - profile.base_overhead)

    def mean(self, plan: Dispatcher, steps: Mapping[Batch, int]) -> float:
        """Return the mean step under a plan, in milliseconds."""
        return sum(self.under(plan, batch) * count for batch, count in steps.items()) / sum(steps.values())

    def best(self, steps: Mapping[Batch, int]) -> float:
        """Return the mean step with every size, in milliseconds."""
        return sum(self.every_size(batch) * count for batch, count in steps.items()) / sum(steps.values())

    def worst(self, plan: Dispatcher, most: int) -> tuple[float, int]:
        """Return the worst step of any number of decodes against that of every size, and the number."""
        each = 1 + self._drafts
        decodes = (Batch.decode(Role.TARGET, number, each) for number in range(1, most + 1))
        return max((self.under(plan, batch) / self.every_size(batch), batch.num_reqs) for batch in decodes)


ACCEPTANCE = (0.75, 0.55, 0.4)
REQUESTS = (64, 256, 512)
LOAD = 0.45
"""Requests of a step on average, as a share of the most."""
LOST, SLOWER, WORST = 1.005, 1.01, 1.15
"""Most that a mean step may be above that of every size, and above vLLM's; most for any number of decodes."""
NEEDED = 55
"""Cells of 60 that must be within ``LOST``."""
CHOSEN = 2 / 3


@attrs.frozen
class Cell:
    """One deployment and one trace."""

    trace: str
    profile: str
    drafts: int
    max_num_reqs: int

    @property
    def name(self) -> str:
        """The cell in a line."""
        return f"{self.trace} {self.profile.split('.h200')[0]} K={self.drafts} {self.max_num_reqs}"


def bursts(seed: int = 30, seconds: float = 3600.0) -> list[TraceRow]:
    """Return a trace whose load rises over an hour, with a burst of a minute about every six."""
    rows: list[TraceRow] = []
    draw, now, until, factor = random.Random(seed), 0.0, 0.0, 1.0
    while now < seconds:
        if now >= until:
            factor = 4.0 if factor == 1.0 else 1.0
            until = now + draw.expovariate(1 / (60 if factor > 1 else 300))
        rate = 1.6 * factor * (0.4 + 1.2 * now / seconds)
        now += draw.expovariate(rate)
        prompt = min(max(round(draw.lognormvariate(math.log(350), 1.1)), 1), 7000)
        output = min(max(round(draw.lognormvariate(math.log(180), 0.8)), 1), 2000)
        rows.append(TraceRow(now, prompt, output, len(rows) + 2))
    return rows


def faster(rows: Sequence[TraceRow], pace: float) -> list[TraceRow]:
    """Return a trace ``pace`` times as fast."""
    return [attrs.evolve(row, arrival=row.arrival / pace) for row in rows]


def spec_of(cell: Cell, profile: Profile) -> Spec:
    """Return the deployment, with vLLM's own sizes."""
    drafts = max(cell.drafts, 1)
    speculative = Speculative(method=Method.EAGLE3, num_tokens=drafts, acceptance=ACCEPTANCE[:drafts])
    return Spec(
        model=replace(profile.model, max_model_len=max(profile.model.max_model_len, 40960)),
        limits=Limits(max_num_reqs=cell.max_num_reqs, max_num_tokens=8192),
        backend="flash_attention",
        speculative=speculative if cell.drafts else None,
        sizes=Sizes(policy=Policy.VLLM),
    )


def paced(rows: Sequence[TraceRow], spec: Spec, judge: Judge) -> tuple[Counter[Batch], ...]:
    """Return the steps of a trace in the order of time, as fast as the load asks, at the times of every size."""
    low, high, wanted = 1e-3, 1e4, LOAD * spec.limits.max_num_reqs
    for _ in range(18):
        pace = math.sqrt(low * high)
        arriving = faster(rows, pace)
        blocks = simulate(arriving, spec.limits, spec.speculative, judge.every_size, acceptance=ACCEPTANCE).blocks
        load = _load(blocks)
        if abs(load / wanted - 1) < 0.02:
            break
        low, high = (pace, high) if load < wanted else (low, pace)
    return blocks


def _load(blocks: Sequence[Counter[Batch]]) -> float:
    counts = sum(blocks, Counter[Batch]())
    return sum(batch.num_reqs * count for batch, count in counts.items()) / counts.total()


def first_part(blocks: Sequence[Counter[Batch]], share: float) -> tuple[Counter[Batch], Counter[Batch]]:
    """Return the steps before and after a share of all."""
    total, before, after = sum(block.total() for block in blocks), Counter[Batch](), Counter[Batch]()
    for block in blocks:
        (before if before.total() + block.total() / 2 <= share * total else after).update(block)
    return before, after


def traffic_of(steps: Mapping[Batch, int]) -> Traffic:
    """Return steps as traffic."""
    counts = sorted(steps.items(), key=lambda item: (item[0].num_tokens, item[0].num_reqs))
    rows = (
        TrafficCount(
            role=batch.role,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            query_len=batch.query_len,
            past_prompt=batch.past_prompt,
            count=count,
        )
        for batch, count in counts
    )
    return Traffic(sources=("a trace",), batches=tuple(rows))


def judged(cell: Cell, rows: Sequence[TraceRow], *, hindsight: bool) -> dict[str, Any]:
    """Return the figures of a cell.

    :param hindsight: choose by the steps that judge.
    """
    profile = profiles()[cell.profile]
    spec, judge = spec_of(cell, profile), Judge(profile, cell.drafts)
    environment, backends = shipped_environments()["h200"], registry.load_backends()
    theirs = planner.plan(spec, environment, backends)
    blocks = paced(rows, spec, judge)
    seen, rest = first_part(blocks, CHOSEN)
    graphs = theirs.num_graphs // 3
    budget = replace(spec, sizes=Sizes(policy=Policy.MEASURED), budget=Budget(max_graphs=graphs))
    row: dict[str, Any] = attrs.asdict(cell) | {
        "load": round(_load(blocks) / cell.max_num_reqs, 3),
        "steps": rest.total(),
        "vllm_graphs": theirs.num_graphs,
    }
    try:
        measurements = Measurements(traffic=traffic_of(rest if hindsight else seen), profile=profile)
        ours = planner.plan(budget, environment, backends, measurements)
    except CapturePlannerError as error:
        return row | {"error": str(error).splitlines()[0]}
    own, other = Dispatcher(ours), Dispatcher(theirs)
    best = judge.best(rest)
    regret, number = judge.worst(own, cell.max_num_reqs)
    entries = ours.role(Role.TARGET).entries
    return row | {
        "graphs": ours.num_graphs,
        "ratio": judge.mean(own, rest) / best,
        "vllm_ratio": judge.mean(other, rest) / best,
        "bound": least_mean(judge, rest, graphs) / best,
        "full_decodes": any(entry.mode is GraphMode.FULL and entry.query_len for entry in entries),
        "worst": regret,
        "worst_requests": number,
    }


def misses(row: Mapping[str, Any]) -> list[str]:
    """Return why a cell does not hold, in words."""
    if "error" in row:
        return [f"no plan: {row['error']}"]
    found = []
    if row["ratio"] > LOST:
        found.append(f"{row['ratio'] - 1:.2%} above every size")
    if 3 * row["graphs"] > row["vllm_graphs"]:
        found.append(f"{row['graphs']} graphs of {row['vllm_graphs']}")
    if row["ratio"] > SLOWER * row["vllm_ratio"]:
        found.append(f"{row['ratio'] / row['vllm_ratio'] - 1:.2%} slower than vLLM's list")
    if not row["full_decodes"]:
        found.append("no full decode graph of the target")
    if row["worst"] > WORST:
        found.append(f"decodes of {row['worst_requests']} take {row['worst'] - 1:.0%} more than every size")
    return found


def targets_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return what must hold of all cells."""
    known = [row for row in rows if "error" not in row]
    near = sum(row["ratio"] <= LOST and 3 * row["graphs"] <= row["vllm_graphs"] for row in known)
    slower = sum(row["ratio"] > SLOWER * row["vllm_ratio"] for row in known)
    bare = sum(not row["full_decodes"] for row in known)
    padded = sum(row["worst"] > WORST for row in known)
    needed = math.ceil(NEEDED * len(rows) / 60)
    able = sum(row["bound"] <= LOST for row in known)
    within = f"within {LOST} of every size with a third of vLLM's graphs: {near} of {len(rows)}, {needed} needed"
    within += f", {able} by the bound"
    return {
        within: near >= needed,
        f"slower than vLLM's list by more than {SLOWER - 1:.0%}: {slower}": slower == 0,
        f"without full decode graphs of the target: {bare}": bare == 0,
        f"some number of decodes takes more than {WORST - 1:.0%} above every size: {padded}": padded == 0,
        f"without a plan: {len(rows) - len(known)}": len(known) == len(rows),
    }


@cache
def profiles() -> dict[str, Profile]:
    """Return the shipped profiles of an H200 by name."""
    loaded = {name: load_profile(path) for name, path in shipped_profiles().items()}
    return {name: each for name, each in sorted(loaded.items()) if "H200" in each.device.name}


def cells(traces: Sequence[str]) -> Iterator[Cell]:
    """Yield every deployment: a profile without a drafter has none."""
    for name, profile in profiles().items():
        for drafts in (0, 3) if profile.speculative else (0,):
            for trace in traces:
                yield from (Cell(trace, name, drafts, most) for most in REQUESTS)


def _work(job: tuple[Cell, Sequence[TraceRow], bool]) -> dict[str, Any]:
    cell, rows, hindsight = job
    return judged(cell, rows, hindsight=hindsight)


def main() -> int:
    """Judge all cells; fails where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True, help="folder of CSV files of requests")
    options.add_argument("--only", default="", help="judge only cells with this text in their name")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--hindsight", action="store_true", help="choose on the last third itself")
    arguments = options.parse_args()
    os.nice(10)
    rows_of: dict[str, Sequence[TraceRow]] = {path.stem: read_trace(path) for path in arguments.traces.glob("*.csv")}
    rows_of["bursts"] = bursts()
    every = (cell for cell in cells(sorted(rows_of)) if arguments.only in cell.name)
    jobs = [(cell, rows_of[cell.trace], arguments.hindsight) for cell in every]
    rows = []
    with multiprocessing.Pool(arguments.processes) as pool:
        for (cell, *_), row in zip(jobs, pool.imap(_work, jobs), strict=True):
            rows.append(row)
            CONSOLE.print(f"{cell.name}: {'; '.join(misses(row)) or 'holds'}")
    columns = ("steps", "graphs", "vllm_graphs", "ratio", "bound", "vllm_ratio", "worst")
    shown = (
        (_name(row), *(f"{row[key]:.3f}" if isinstance(row.get(key), float) else row.get(key) for key in columns))
        for row in rows
    )
    print_table("Held-out traces: mean step and worst decode against every size", ("cell", *columns), shown)
    targets = targets_of(rows)
    return conclude(arguments, {"rows": rows, "misses": {_name(row): misses(row) for row in rows}}, targets)


def _name(row: Mapping[str, Any]) -> str:
    return Cell(**{field.name: row[field.name] for field in attrs.fields(Cell)}).name


if __name__ == "__main__":
    sys.exit(main())
