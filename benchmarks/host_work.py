"""Host work of a decode step, outside the model: values, dispatch, fill, padding, backend and guards.

Serves tiny deployments on recorded graphs, one thread, and takes each forward's host time from the
ledger: what a step of 64 requests costs, whether it grows with the number of captured graphs, how it
grows with requests, and what the guards are of it. The schedule of a step is left out, and so is the
replay. With a drafter a step has three forwards, so three times are added.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable

import torch
from _bench import conclude, parser, print_table, shipped_environments, shipped_specs

from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.ledger.rows import Forward
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import generated

TARGET_MICROSECONDS = 150
REQUESTS = (1, 4, 16, 64, 128, 256)
GRAPHS = (1, 8, 64, 256)
PAGE_SIZE = 16


def deployment(num_reqs: int, sizes: Iterable[int], *, speculative: bool) -> Plan:
    """Return a plan of the tiny model with decode graphs of these sizes alone."""
    spec = shipped_specs()["tiny-reference-cpu"]
    assert spec.speculative is not None, "the shipped spec has a drafter"
    drafts = spec.speculative.num_tokens if speculative else 0
    spec = replace(
        spec,
        mode=GraphMode.FULL_DECODE_ONLY,
        limits=Limits(max_num_reqs=num_reqs, max_num_tokens=max(num_reqs * (1 + drafts), 64)),
        speculative=spec.speculative if speculative else None,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(sizes)),
    )
    return make_plan(spec, shipped_environments()["cpu"], registry.load_backends())


def serve(plan: Plan, num_reqs: int, steps: int, *, trust: bool = False) -> list[float]:
    """Return the host microseconds of each full decode step."""
    model = load_target(None, plan.model, device=torch.device("cpu"))
    drafter = None
    if plan.speculative is not None:
        length = plan.model.max_model_len
        drafter = choose_drafter("random", plan.speculative, model, num_states=num_reqs, length=length)
    pages = PageFormat(page_size=PAGE_SIZE, num_pages=1 + num_reqs * plan.model.max_model_len // PAGE_SIZE)
    requests = generated(
        num_reqs, seed=1, rate=None, prompt_tokens=(8, 8), output_tokens=(steps, steps), vocab_size=model.vocab_size
    )
    options = Options(trust=trust)
    with Runner(plan, model, drafter, registry.load_backends(), RecordedGraphs(), pages=pages, options=options) as run:
        run.capture()
        run.serve(requests)
        return full_steps(run.session.forwards, num_reqs)


def full_steps(forwards: Iterable[Forward], num_reqs: int) -> list[float]:
    """Add up the host time of the forwards of each step that decodes all requests."""
    times: dict[int, float] = {}
    mixed = set()
    for forward in forwards:
        times[forward.step] = times.get(forward.step, 0.0) + forward.host_seconds * 1e6
        if forward.query_len is None or forward.num_reqs != num_reqs or forward.entry is None:
            mixed.add(forward.step)
    return [time for step, time in times.items() if step not in mixed]


def median(plan: Plan, num_reqs: int, *, trust: bool = False) -> float:
    """Return the least of three runs' medians of 120 steps: other work on the machine only adds."""
    return min(statistics.median(serve(plan, num_reqs, 120, trust=trust)) for _ in range(3))


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    by_requests, drafted, trusted = {}, {}, {}
    for num_reqs in REQUESTS:
        plain = deployment(num_reqs, (num_reqs,), speculative=False)
        by_requests[num_reqs] = median(plain, num_reqs)
        trusted[num_reqs] = median(plain, num_reqs, trust=True)
        with_drafts = deployment(num_reqs, (num_reqs,), speculative=True)
        drafted[num_reqs] = median(with_drafts, num_reqs)
    by_graphs = {}
    for graphs in GRAPHS:
        # 64 requests always, so only the number of other graphs differs.
        sizes = sorted({64, *range(1, min(graphs, 64)), *range(65, graphs + 1)})
        many = deployment(256, sizes, speculative=False)
        by_graphs[len(many.roles[0].entries)] = median(many, 64)
    rows = ((n, *(f"{times[n]:.0f}" for times in (by_requests, trusted, drafted))) for n in REQUESTS)
    columns = ("requests", "plain", "without guards", "with a drafter")
    print_table("host us of a decode step (median)", columns, rows)
    flat = ((graphs, f"{time:.0f}") for graphs, time in by_graphs.items())
    print_table("host us of a decode step of 64 requests", ("graphs", "plain"), flat)
    growth = max(by_graphs.values()) / min(by_graphs.values())
    each, below = (by_requests[256] - by_requests[64]) / 192, by_requests[64] / 64
    targets = {
        f"64 requests within {TARGET_MICROSECONDS} us ({by_requests[64]:.0f})": by_requests[64] <= TARGET_MICROSECONDS,
        f"flat in graphs: the slowest is {growth:.2f} of the quickest": growth <= 1.25,
        f"linear in requests: {each:.2f} us for each above 64, {below:.2f} below": each <= 1.25 * below,
    }
    results = {"plain": by_requests, "without_guards": trusted, "with_drafter": drafted, "by_graphs": by_graphs}
    return conclude(arguments, {"results": results}, targets)


if __name__ == "__main__":
    sys.exit(main())
