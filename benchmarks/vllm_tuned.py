"""The whole loop in real vLLM: observe, choose sizes from what was observed, run the plan, and compare.

vLLM with the flags of our own check serves a trace; its observation gives the traffic and, as its graphs were timed
right after capture, the profile. A plan of at most ``--graphs`` graphs is made of both. Then vLLM serves the same trace
under the plan, by turns with the first engine. Reported: tokens/s and time per token of both, the mean step time that
the plan predicts, and the one that CUDA events measured.

The trace is a CSV with arrival, prompt and output (see ``capture-planner traffic``); without one, requests arrive in
waves. Needs a CUDA GPU, vLLM 0.33, and this repository's distributions installed where vLLM finds its plugins.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _bench import CONSOLE, ROOT, finish, parser, table, verdict
from _model_configs import write_configs
from _vllm_cases import EAGLE, Case, groups, server_spec
from vllm_in_process import Engine

from capture_planner import codec, load_backends, load_environment
from capture_planner.analysis.trace import trace_rows
from capture_planner.measuring.fits import Prediction, predict
from capture_planner.measuring.observed import observed_profile
from capture_planner.measuring.traffic import SourceOptions, read_traffic
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.measurements import Measurements
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Budget, Policy, Roles, Sizes

EVERY = 4
"""One step in so many is timed while the trace is served."""

FLAGS, TUNED = "flags of check", "tuned plan"


def waves(seconds: float, rate: float) -> list[tuple[float, int, int]]:
    """Return requests whose rate swells to twice ``rate`` a second and falls to nearly nothing, twice."""
    draw = random.Random(7)
    requests, now = [], 0.0
    while now < seconds:
        now += draw.expovariate(rate * max(0.1, 1 - math.cos(4 * math.pi * now / seconds)))
        prompt, output = (min(int(draw.lognormvariate(mean, 0.8)), 1500) for mean in (5.0, 5.3))
        requests.append((round(now, 4), max(prompt, 8), max(output, 8)))
    return requests


def trace_of(file: Path, seconds: float, speedup: float) -> list[tuple[float, int, int]]:
    """Return the first requests of a trace, at ``speedup`` times its pace, as long as they fit the model."""
    rows = trace_rows(codec.read(file), file.name)
    first = min(row.arrival for row in rows)
    timed = [((row.arrival - first) / speedup, min(row.prompt, 2000), min(row.output, 1500)) for row in rows]
    return sorted(row for row in timed if row[0] < seconds)


def tuned_plan(observation: Observation, file: Path, graphs: int) -> tuple[Plan, Prediction]:
    """Return the plan of at most so many graphs that costs least for what was observed, and what its capture takes.

    :param file: where the observation is written.
    """
    spec = server_spec(
        "small",
        Sizes(policy=Policy.MEASURED),
        GraphMode.FULL_DECODE_ONLY,
        EAGLE,
        "flash_attention",
        Roles(),
        budget=Budget(max_graphs=graphs),
    )
    environment = load_environment(ROOT / "plans" / "environments" / "h200.yaml")
    profile = observed_profile(observation, spec.model, environment.device)
    # Without the time apart from passes: CUDA events measure passes alone.
    profile = replace(profile, step_milliseconds=0.0, step_milliseconds_per_request=0.0)
    traffic, _ = read_traffic([str(file)], SourceOptions())
    plan = make_plan(spec, environment, load_backends(), Measurements(traffic=traffic, profile=profile))
    return plan, predict(profile, plan)


def mean_step(observation: Observation) -> tuple[float, float]:
    """Return the mean milliseconds of a step's passes on the device, and the standard error of it.

    Only some steps are timed, and eager passes take several times as long: those on graphs and the eager ones are
    averaged apart, and each counts as often as it ran.
    """
    steps = next(role.steps for role in observation.roles if role.role is Role.TARGET)
    total = variance = 0.0
    for role in observation.roles:
        for eager, count in ((True, role.eager_steps), (False, role.steps - role.eager_steps)):
            samples = [
                each.milliseconds
                for each in role.batches
                for _ in range(each.samples)
                if each.milliseconds is not None and (each.graph is None) is eager
            ]
            if count and samples:
                total += statistics.fmean(samples) * count / steps
                spread = statistics.variance(samples) if len(samples) > 1 else 0.0
                variance += spread / len(samples) * (count / steps) ** 2
    return total, math.sqrt(variance)


def observed(engine: Engine, every: int = EVERY) -> Observation:
    """Return the observation so far of an engine."""
    return codec.loads(engine.answer({"observation": every})["observation"], Observation)


def loop(arguments: Any, folder: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    """Run both engines, and return the results and the targets."""
    load = trace_of(arguments.trace, arguments.seconds, arguments.speedup) if arguments.trace else None
    trace = load or waves(arguments.seconds, arguments.rate)
    words = next(
        case.words
        for group in groups(folder, arguments.utilization)
        if group.name == "main"
        for case in group.cases
        if case.name == FLAGS
    )
    with ExitStack() as stack:
        os.environ["CAPTURE_PLANNER_PROFILE"] = "1"
        flags = stack.enter_context(Engine(Case(name=FLAGS, words=words), folder))
        facts = {FLAGS: flags.answer({})["facts"]}
        warm = [(0.0, prompt, 8) for prompt in (16, 200, 1000) for _ in range(8)]
        flags.answer({"trace": warm})
        flags.answer({"observation": EVERY})
        flags.answer({"trace": trace})
        observation = observed(flags)
        (folder / "observation.yaml").write_text(codec.dumps(observation), encoding="utf-8")
        plan, capture = tuned_plan(observation, folder / "observation.yaml", arguments.graphs)
        del os.environ["CAPTURE_PLANNER_PROFILE"]
        tuned = stack.enter_context(Engine(Case(name=TUNED, words=words, plan=plan), folder))
        facts[TUNED] = tuned.answer({})["facts"]
        tuned.answer({"trace": warm})
        tuned.answer({"observation": EVERY})
        engines = {FLAGS: flags, TUNED: tuned}
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for turn in range(arguments.rounds):
            for name in sorted(engines, reverse=bool(turn % 2)):
                answer = engines[name].answer({"trace": trace})
                rounds[name].append({key: value for key, value in answer.items() if key != "steps"})
                CONSOLE.print(f"{name}: {rounds[name][-1]}", markup=False)
        after = observed(tuned)
        (folder / "tuned-observation.yaml").write_text(codec.dumps(after), encoding="utf-8")
    assert plan.forecast is not None
    predicted, (measured, error) = plan.forecast.mean_step_ms, mean_step(after)
    assert after.graph_mib
    assert after.capture_seconds
    memory, seconds = capture.memory_mib / after.graph_mib - 1, capture.seconds / after.capture_seconds - 1
    counts = {name: sum(each["graphs"].values()) for name, each in facts.items()}
    rate = {name: statistics.median(each["tokens_per_second"] for each in rows) for name, rows in rounds.items()}
    share, off = rate[TUNED] / rate[FLAGS], predicted / measured - 1
    targets = {
        f"at most {arguments.graphs} graphs ({counts[TUNED]} of {counts[FLAGS]})": counts[TUNED] <= arguments.graphs,
        f"at least 0.98x the throughput ({share:.3f})": share >= 0.98,
        f"predicted mean step within 5 % ({predicted:.3f} and {measured:.3f} ms ± {error:.3f}: {off:+.1%})": (
            abs(off) <= 0.05
        ),
        f"predicted memory of the capture within 10 % ({memory:+.1%})": abs(memory) <= 0.1,
        f"predicted time of the capture within 15 % ({seconds:+.1%})": abs(seconds) <= 0.15,
    }
    results = {
        "facts": facts,
        "requests": len(trace),
        "rounds": rounds,
        "tokens_per_second": rate,
        "predicted_ms": predicted,
        "capture": {
            "predicted_mib": capture.memory_mib,
            "mib": after.graph_mib,
            "predicted_seconds": capture.seconds,
            "seconds": after.capture_seconds,
        },
        "measured_ms": measured,
        "measured_error_ms": error,
        "measured_with_flags_ms": mean_step(observation),
        "sizes": {
            role.role.value: [[e.mode.value, e.num_tokens, e.query_len] for e in role.entries] for role in plan.roles
        },
    }
    return results, targets


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, help="CSV of requests; default: waves of requests")
    options.add_argument("--seconds", type=float, default=8.0, help="length of the load")
    options.add_argument("--speedup", type=float, default=15.0, help="pace of the trace")
    options.add_argument("--rate", type=float, default=150.0, help="requests per second of the waves")
    options.add_argument("--graphs", type=int, default=32, help="most graphs of the plan")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--utilization", type=float, default=0.14, help="of the GPU's memory, for each engine")
    options.add_argument("--folder", type=Path, help="for logs, plans and observations; default: a temporary one")
    arguments = options.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        write_configs(folder)
        results, targets = loop(arguments, folder)
    finish(arguments, {"results": results, "targets": targets})
    shown = table("tokens/s, median", *results["tokens_per_second"])
    shown.add_row(*[f"{value:,.0f}" for value in results["tokens_per_second"].values()])
    CONSOLE.print(shown)
    for text, holds in targets.items():
        CONSOLE.print(f"{verdict(holds)} {text}")
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
