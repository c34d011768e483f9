"""Law 8 for what really ran: random steps of 2 to 4 replicas, processes with gloo between them, on recorded graphs.

Each round makes a random plan and random requests, and deals them to the replicas, which serve them. Then all must have
had the same vectors, in the same order; each forward must have run what ``agree`` finds for its vector over a plan that
was read again; idle ranks must have run along; and each replica must have said what it says alone. In every fourth
round one rank captures nothing, and all must run eagerly, with the reason. Rounds go on until ``--steps`` steps have
run.

Exit code 1 on any violation, with the round that repeats it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import CONSOLE, conclude, parser, print_table, shipped_environments, shipped_specs

from capture_planner import codec
from capture_planner.analysis.data_parallel import agree
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, DraftModel, Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Parallel, Policy, Sizes
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.request import drafter_of
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.ranks.connection import connected
from capture_planner_runner.ranks.group import RankGroup
from capture_planner_runner.ranks.peers import ALONE, Peers
from capture_planner_runner.ranks.processes import run_ranks
from capture_planner_runner.ranks.watch import WaitLimits
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.steps import vectors_of
from capture_planner_runner.serving.workload import Request

REGISTRY = registry.load_backends()
VOCABULARY, LONGEST, PAGE = 32, 32, 4


def plan_of(rng: random.Random, size: int) -> Plan:
    """Return a random plan for so many replicas."""
    spec = shipped_specs()["tiny-reference-cpu"]
    reqs, tokens = rng.randint(1, 5), rng.randint(8, 24)
    k = rng.choice((0, 0, 1, 2, 3))
    method = rng.choice((Method.EAGLE, Method.EAGLE3, Method.DRAFT_MODEL))
    schedule = ((1, 1, k), (2, max(reqs, 2), 1)) if k > 1 and rng.random() < 0.5 else ()
    speculative = None
    if k:
        speculative = Speculative(method=method, num_tokens=k, schedule=schedule, model=DraftModel(num_layers=1))
    shape = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "hidden_size": 16}
    spec = replace(
        spec,
        model=replace(spec.model, **shape, vocab_size=VOCABULARY, max_model_len=LONGEST, dtype=DataType.FLOAT64),
        limits=Limits(max_num_reqs=reqs, max_num_tokens=max(tokens, reqs * (2 + 2 * k))),
        mode=rng.choice([mode for mode in GraphMode if mode is not GraphMode.NONE]),
        speculative=speculative,
        sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(rng.randint(2, 8), 8), num_reqs=(rng.randint(1, reqs), reqs)),
        parallel=Parallel(data=size),
    )
    return make_plan(spec, shipped_environments()["cpu"], REGISTRY)


def requests_of(rng: random.Random, size: int) -> list[Request]:
    """Return random requests, which arrive in bursts, with pauses in which some ranks are idle."""
    found, clock = [], 0.0
    for index in range(rng.randint(size, 5 * size)):
        clock += rng.choice((0.0, 0.0, 0.02, 0.15))
        output = rng.randint(1, 12)
        length = rng.randint(1, LONGEST - output)
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(length))
        found.append(Request(name=f"r{index}", arrival=clock, prompt=prompt, max_new_tokens=output))
    return found


def serve(plan: Plan, requests: list[Request], peers: Peers, *, captured: bool) -> tuple[Runner, dict[str, Any]]:
    """Serve requests on this rank; ``captured``: with graphs, captured by each rank for itself."""
    target = load_target(None, plan.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    drafter = drafter_of(plan, target, "random", seed=3)
    pages = PageFormat(page_size=PAGE, num_pages=1 + plan.limits.max_num_reqs * -(-LONGEST // PAGE))
    runner = Runner(plan, target, drafter, REGISTRY, RecordedGraphs(), pages=pages, peers=peers)
    with runner:
        if captured:
            together, runner.peers = runner.peers, ALONE
            runner.capture()
            runner.peers = together
        served = runner.serve(requests)
    return runner, {done.name: list(done.tokens) for done in served}


def violations(plan: Plan, runner: Runner, captured: bool) -> tuple[list[str], Counter[str]]:
    """Return what this rank did otherwise than the vectors say, and what was seen."""
    read = codec.loads(codec.dumps(plan), Plan)
    dispatcher, roles = Dispatcher(read), [role.role for role in read.roles]
    found, counts = [], Counter[str]()
    steps = runner.session.rank_steps
    ran = {(forward.step, forward.role): forward for forward in runner.session.forwards}
    for index, step in enumerate(steps):
        counts["idle"] += step.is_idle
        for role, vector in vectors_of(roles, step.numbers).items():
            agreement, forward = agree(dispatcher, vector), ran.get((index, role))
            if forward is None:
                if not step.is_idle and role is not Role.DRAFT_DECODE:
                    found.append(f"step {index}: {role.value} did not run")
                continue
            if step.is_idle:
                found.append(f"step {index}: {role.value} ran requests on an idle rank")
            if (forward.entry, forward.reason) != (agreement.entry, agreement.reason):
                found.append(f"step {index}: {role.value} ran {forward.entry}, agreed on {agreement.entry}")
            counts["from graphs"] += forward.entry is not None
            counts["eager"] += forward.entry is None
            counts["eager because of a rank"] += forward.reason is Reason.RANK
            if not captured and forward.entry is not None:
                found.append(f"step {index}: {role.value} ran a graph, and a rank has none")
    return found, counts


def rank_work(peers: RankGroup, seed: int, most: int, file: Path) -> None:
    """Run rounds until ``most`` steps have run; the first rank writes what was seen."""
    place, steps, number = peers.place, 0, 0
    counts, seconds = Counter[str](), list[float]()
    bad: list[str] = []
    while steps < most and not bad:
        rng = random.Random(f"{seed}:{place.size}:{number}")
        plan, requests = plan_of(rng, place.size), requests_of(rng, place.size)
        without = rng.randrange(place.size) if number % 4 == 3 else None
        mine = requests[place.rank :: place.size]
        runner, tokens = serve(plan, mine, peers, captured=place.rank != without)
        _, alone = serve(plan, mine, ALONE, captured=False)
        found, seen = violations(plan, runner, without is None)
        found += ["other tokens than alone"] if tokens != alone else []
        numbers = [step.numbers for step in runner.session.rank_steps]
        shared: Any = peers.exchange(f"round {number}", [numbers, found, dict(seen)])
        if len({json.dumps(each[0]) for each in shared}) != 1:
            bad.append(f"round {number}: the ranks had other vectors")
        for rank, each in enumerate(shared):
            bad += [f"round {number}, rank {rank}: {what}" for what in each[1]]
            counts.update(each[2])
        seconds += [step.seconds for step in runner.session.rank_steps]
        steps, number = steps + len(numbers), number + 1
    if place.rank == 0:
        result = {
            "replicas": place.size,
            "rounds": number,
            "steps": steps,
            "counts": dict(counts),
            "agreement us": {"median": round(float(np.median(seconds)) * 1e6, 1)},
            "violations": bad[:20],
        }
        file.write_text(json.dumps(result), "utf-8")


def run(size: int, seed: int, most: int) -> dict[str, Any]:
    """Run the rounds of so many replicas."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"

        def work(me: Any, say: Any) -> int:
            torch.set_num_threads(1)
            try:
                with connected(me, WaitLimits(start=60.0), lambda verdict, raised: os._exit(1)) as connection:
                    peers = RankGroup(connection, tensor_size=1, data_size=size, device=torch.device("cpu"))
                    rank_work(peers, seed, most, file)
                    peers.close()
            except Exception as error:
                say(f"rank {me.rank}: {type(error).__name__}: {error}")
                return 1
            return 0

        said: list[str] = []
        run_ranks(size, work, said.append)
        found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {"replicas": size, "steps": 0}
        return found | {"says": said}


def main() -> int:
    """Run each number of replicas in turn."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=5000, help="over all numbers of replicas")
    options.add_argument("--replicas", type=int, nargs="+", default=[2, 3, 4])
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    results, started = [], time.perf_counter()
    for size in arguments.replicas:
        results.append(run(size, arguments.seed, -(-arguments.steps // len(arguments.replicas))))
    written = {"seed": arguments.seed, "results": results, "wall_seconds": time.perf_counter() - started}
    counted = ("idle", "eager because of a rank")
    rows = (
        (
            *(result.get(key) for key in ("replicas", "rounds", "steps")),
            *(result.get("counts", {}).get(key) for key in counted),
            len(result.get("violations", result["says"])),
        )
        for result in results
    )
    print_table("Steps of replicas", ("replicas", "rounds", "steps", *counted, "violations"), rows)
    for result in results:
        for line in (*result.get("violations", ()), *result["says"]):
            CONSOLE.print(line, markup=False, highlight=False)
    holds = all(not result["says"] and result.get("violations") == [] for result in results)
    return conclude(arguments, written, {"law 8 holds for what ran": holds})


if __name__ == "__main__":
    sys.exit(main())
