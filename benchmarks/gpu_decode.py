"""A decode step on a GPU against a bare replay of the same graph; Qwen3-0.6B shape, bf16, random weights.

The step is all of it: schedule, values, dispatch, fill and padding, guards, replay, tokens back to the
host, verification. The bare replay is the graph alone, many times in a row, by CUDA events.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _bench import CONSOLE, finish, parser, table, verdict
from transformers import Qwen3Config

from capture_planner import registry
from capture_planner.model import DataType, Model
from capture_planner.models.huggingface import load_target
from capture_planner.modes import GraphMode, Role
from capture_planner.plan import Plan
from capture_planner.planner import plan as make_plan
from capture_planner.runtime.cuda import CudaGraphs
from capture_planner.runtime.host import this_environment
from capture_planner.runtime.kv import PageFormat
from capture_planner.runtime.role import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.workload import generated
from capture_planner.spec import Limits, Policy, Sizes, Spec

TARGET = 1.08
REQUESTS = (1, 8, 64, 256)
HIDDEN, VOCABULARY = 1024, 151936
MODEL = Model(
    name="Qwen3-0.6B shape",
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    max_model_len=1024,
    dtype=DataType.BFLOAT16,
)


def deployment(backend: str, num_reqs: int) -> Plan:
    """Return a plan with one decode graph of the size that is measured."""
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=num_reqs, max_num_tokens=max(2048, num_reqs)),
        mode=GraphMode.FULL_DECODE_ONLY,
        backend=backend,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(num_reqs,)),
    )
    return make_plan(spec, this_environment("here"), registry.load())


def bare(runner: Runner, times: int) -> float:
    """Return the milliseconds of a replay of the decode graph, from many in a row."""
    role = runner.parts.roles[Role.TARGET]
    (graph,) = role.graphs.values()
    for _ in range(3):
        graph.replay()
    found = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(times):
            graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / times)
    return float(statistics.median(found))


def decodes(runner: Runner, num_reqs: int) -> int:
    """Return how many steps decoded all requests from a graph."""
    return sum(f.entry is not None and f.num_reqs == num_reqs for f in runner.session.forwards)


def measure(backend: str, num_reqs: int, page_size: int, steps: int, grapher: CudaGraphs) -> dict[str, Any]:
    """Serve one batch of decodes, and compare its steps with the bare graph."""
    plan = deployment(backend, num_reqs)
    device = torch.device("cuda:0")
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=3072,
            num_hidden_layers=MODEL.num_layers,
            num_attention_heads=MODEL.num_heads,
            num_key_value_heads=MODEL.num_kv_heads,
            head_dim=MODEL.head_dim,
            max_position_embeddings=40960,
            architectures=["Qwen3ForCausalLM"],
        )
        config.save_pretrained(folder)
        model = load_target(Path(folder), plan.model, device=device, dtype=torch.bfloat16)
    pages = PageFormat(page_size=page_size, num_pages=1 + num_reqs * MODEL.max_model_len // page_size)
    requests = generated(
        num_reqs,
        seed=1,
        rate=None,
        prompt_tokens=(128, 128),
        output_tokens=(steps, steps),
        vocab_size=VOCABULARY,
    )
    found: dict[str, Any] = {"backend": backend, "requests": num_reqs}
    for name, options in (("step_ms", Options()), ("trusting_step_ms", Options(trust=True))):
        with Runner(
            plan, model, None, registry.load(), grapher, pages=pages, device=device, options=options
        ) as runner:
            runner.capture()
            serving = runner.start(requests)
            serving.scheduler.arrive(0.0, 0.0)
            while serving.step():
                # In the middle, where all rows are real: the replays write what is there already.
                if "bare_ms" not in found and decodes(runner, num_reqs) == steps // 2:
                    found["bare_ms"] = bare(runner, 50)
            full = [
                (step.seconds, forward.host_seconds)
                for step, forward in zip(runner.session.steps, runner.session.forwards, strict=True)
                if forward.entry is not None and step.num_reqs == num_reqs
            ][5:]
            found[name] = statistics.median(seconds for seconds, _ in full) * 1e3
            found[name.replace("step_ms", "host_us")] = statistics.median(host for _, host in full) * 1e6
            found["graph_bytes"] = [captured.memory for captured in runner.session.captured]
    found["ratio"] = found["step_ms"] / found["bare_ms"]
    return found


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", default=["flash_attention", "triton", "flashinfer"])
    options.add_argument("--page-size", type=int, default=64)
    options.add_argument("--steps", type=int, default=100)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    grapher = CudaGraphs(torch.device("cuda:0"))
    results = []
    shown = table("ms of a decode step (median)", "backend, requests", "bare", "step", "ratio", "host us")
    for backend in arguments.backends:
        for num_reqs in REQUESTS:
            row = measure(backend, num_reqs, arguments.page_size, arguments.steps, grapher)
            results.append(row)
            CONSOLE.print(json.dumps(row))
            shown.add_row(
                f"{backend}, {num_reqs}",
                f"{row['bare_ms']:.2f}",
                f"{row['step_ms']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['host_us']:.0f}",
            )
    CONSOLE.print(shown)
    worst = max(row["ratio"] for row in results)
    targets = {f"each step at most {TARGET} of its bare graph (worst {worst:.2f})": worst <= TARGET}
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(arguments, {"results": results, "targets": targets})
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
