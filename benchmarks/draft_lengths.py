"""The schedule of draft lengths that a profile and an acceptance give, next to each fixed K: figures of the model.

Rates are tokens per second of decodes at each number of requests, by the profile's times, with the sizes that were
chosen together with the lengths. The words at the end start vLLM with the schedule; ``vllm_in_process.py --groups
schedule --profile FILE`` measures the same there, against each fixed K and vLLM's adaptive verification.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, finish, parser, table, verdict
from _vllm_cases import ACCEPTANCE

from capture_planner.codec import Document, load_environment
from capture_planner.engines import find_engine
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.draft_lengths import DraftProblem, Span, optimum
from capture_planner.planning.measured_schedule import choose_schedule
from capture_planner.planning.planner import plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, ScheduleSource, Speculative
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Budget, Limits, Spec
from capture_planner.records.traffic import Traffic

LOADS = (1, 2, 4, 8, 16, 32, 64, 100, 128, 160, 200, 256)


def rate(problem: DraftProblem, spans: Sequence[Span], num_reqs: int) -> float:
    """Return the tokens per second of ``num_reqs`` requests, padded to the size that serves them."""
    span = next(span for span in spans if span.first <= num_reqs <= span.last)
    length = next(length for length in problem.lengths if length.k == span.k)
    milliseconds = length.padded[span.last - 1] + length.exact[num_reqs - 1]
    return num_reqs * length.tokens / milliseconds * 1e3


def main() -> int:
    """Choose, print and write; exit code 1 where the schedule is below a fixed K."""
    options = parser(__doc__)
    options.add_argument("profile", type=Path, help="a profile, as `capture-planner profile` writes it")
    options.add_argument("--traffic", type=Path, help="how often each batch ran; default: every batch size equally")
    options.add_argument(
        "--acceptance", type=float, nargs="*", help="share of steps in which drafts 0 to i are accepted, by i"
    )
    options.add_argument("--requests", type=int, default=256, help="most requests in a batch")
    options.add_argument("--graphs", type=int, help="most graphs of decodes; default: every batch size is a size")
    options.add_argument("--environment", default="h200", help="a shipped environment")
    arguments = options.parse_args()
    profile = Document.read(arguments.profile).load(Profile)
    traffic = None if arguments.traffic is None else Document.read(arguments.traffic).load(Traffic)
    acceptance = tuple(arguments.acceptance or ACCEPTANCE)
    drafter = profile.speculative or Speculative(method=Method.EAGLE3, num_tokens=1)
    speculative = replace(drafter, num_tokens=len(acceptance), schedule=ScheduleSource.MEASURED, acceptance=acceptance)
    spec = Spec(
        model=profile.model,
        limits=Limits(max_num_reqs=arguments.requests, max_num_tokens=8192),
        mode=GraphMode.FULL_DECODE_ONLY,
        backend="flash_attention",
        speculative=speculative,
        parallel=profile.parallel,
        budget=Budget(max_graphs=arguments.graphs),
    )
    measurements = Measurements(profile=profile, traffic=traffic)
    chosen = choose_schedule(spec, dict.fromkeys(Role, GraphMode.FULL_DECODE_ONLY), measurements)
    problem, spans = chosen.problem, chosen.spans
    cases = {"schedule": spans} | {
        f"K={length.k}": optimum(attrs.evolve(problem, lengths=(length,)))
        for length in problem.lengths
        if length.most == problem.most
    }
    loads = [load for load in LOADS if load <= problem.most]
    rows = {name: {load: round(rate(problem, each, load), 1) for load in loads} for name, each in cases.items()}
    together = {name: problem.work(1, problem.most) / problem.total(each) * 1e3 for name, each in cases.items()}
    shown = table("tokens/s of decodes, by the model", "requests", *cases)
    for load in loads:
        shown.add_row(str(load), *(f"{row[load]:,.0f}" for row in rows.values()))
    shown.add_row("all", *(f"{value:,.0f}" for value in together.values()))
    CONSOLE.print(shown)
    for decision in chosen.decisions:
        CONSOLE.print(decision.message, markup=False)
    environment = load_environment(ROOT / "plans" / "environments" / f"{arguments.environment}.yaml")
    words = _words(plan(spec, environment, registry.load_backends(), measurements))
    CONSOLE.print(shlex.join(["vllm", "serve", *words]), markup=False, soft_wrap=True)
    best = max(value for name, value in together.items() if name != "schedule")
    target = f"the schedule is at least the best fixed K ({together['schedule'] / best:.4f}x)"
    holds = together["schedule"] >= best * (1 - 1e-9)
    CONSOLE.print(f"{verdict(holds)} {target}")
    schedule = [list(attrs.astuple(span)) for span in spans]
    results: dict[str, Any] = {"tokens_per_second": rows, "together": together, "spans": schedule, "words": words}
    finish(arguments, {"results": json.loads(json.dumps(results)), "targets": {target: holds}})
    return 0 if holds else 1


def _words(planned: Any) -> list[str]:
    """Return the words that start vLLM for a plan, without the plan itself."""
    launch = find_engine("vllm").launch
    assert launch is not None
    return list(launch(planned, ()).arguments)


if __name__ == "__main__":
    sys.exit(main())
