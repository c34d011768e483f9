"""The bench of the Qwen3-0.6B shape on a GPU, for each backend: bfloat16, random weights.

Two plans a backend: without a drafter for steps, preparation, throughput and capture, and with K=5 for
the draft chain, the pools and the preparation of all roles. Transformers' continuous batching does not depend
on our backend: it is measured once, with the first backend, and all are compared with it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from _bench import CONSOLE, conclude, finish, parser
from _model_configs import DRAFT_VOCABULARY, small_model, write_small_config

from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.plugins.profiler import Progress
from capture_planner.records.environment import Environment
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.report.page import page
from capture_planner.report.plain import plain
from capture_planner.report.terminal import tables
from capture_planner_runner.bench import Bench, BenchReport, measure, verdicts
from capture_planner_runner.bench.record import Throughput
from capture_planner_runner.host import this_environment
from capture_planner_runner.report.bench import bench_report

MODEL = small_model(max_model_len=1024)
K = 5
PLAIN, DRAFTED = ("decode", "preparation", "throughput", "capture"), ("preparation", "chain", "pools")


def deployment(backend: str, environment: Environment, drafts: int) -> Plan:
    """Return the plan of a server of 256 requests, all of its graphs included."""
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend=backend,
        sizes=Sizes(policy=Policy.VLLM),
        speculative=Speculative(method=Method.EAGLE3, num_tokens=drafts, model=DraftModel(vocab_size=DRAFT_VOCABULARY))
        if drafts
        else None,
    )
    return make_plan(spec, environment, registry.load_backends())


@contextmanager
def log_progress(task: str, total: int) -> Iterator[Any]:
    """Say which figure is measured; bars do not belong into a log."""
    CONSOLE.print(f"{task} ...")
    yield lambda now: None


def measure_plan(
    backend: str, drafts: int, model: Path, arguments: Any, progress: Progress, *, compare: bool
) -> BenchReport:
    """Measure one plan."""
    figures = DRAFTED if drafts else PLAIN
    return measure(
        deployment(backend, this_environment("here"), drafts),
        registry.load_backends(),
        Bench(model=model, only=tuple(name for name in figures if name in arguments.only), compare=compare),
        progress,
    )


def write_page(report: BenchReport, file: Path) -> None:
    """Write the page, where this machine has what draws it; the figures do not depend on that."""
    try:
        html = page(bench_report(report))
    except CapturePlannerError as error:
        CONSOLE.print(f"no page: {error}", markup=False)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(html, encoding="utf-8")


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed or something broke."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", default=["flash_attention", "triton", "flashinfer"])
    options.add_argument("--only", nargs="*", default=[*PLAIN, *DRAFTED], help="figures; default: all")
    options.add_argument("--pages", type=Path, help="folder to write a page for each bench into")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    first: Throughput | None = None
    with tempfile.TemporaryDirectory() as folder:
        write_small_config(Path(folder))
        for backend in arguments.backends:
            for drafts in (0, K):
                name = f"{backend}, K={drafts}"
                CONSOLE.rule(name)
                compare = first is None and not drafts
                try:
                    report = measure_plan(backend, drafts, Path(folder), arguments, log_progress, compare=compare)
                except CapturePlannerError as error:
                    # One backend that is not there must not cost the figures of the others.
                    CONSOLE.print(f"{name}: {error}", markup=False)
                    results[name], targets[f"{name}: measured"] = {"error": str(error)}, False
                    continue
                throughput = report.throughput
                if throughput is not None and throughput.other is not None:
                    first = throughput
                elif throughput is not None and first is not None:
                    throughput = attrs.evolve(throughput, other=first.other, other_says=first.other_says)
                    report = attrs.evolve(report, throughput=throughput)
                CONSOLE.print(tables(bench_report(report)))
                results[name] = plain(report)
                targets |= {f"{name}: {each.what} ({each.reached:.3g})": each.holds for each in verdicts(report)}
                targets |= {f"{name}: {absent.figure} measured": False for absent in report.failed}
                # Written anew after each: a run that is cut off keeps what it has.
                finish(arguments, {"results": results, "targets": targets})
                if arguments.pages is not None:
                    write_page(report, arguments.pages / f"bench-{backend}-k{drafts}.html")
    return conclude(arguments, {"results": results}, targets)


if __name__ == "__main__":
    sys.exit(main())
