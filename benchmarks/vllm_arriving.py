"""vLLM under requests that keep arriving: by itself, under a list that an engineer wrote by hand, and tuned.

The first engine serves the loads with ``CAPTURE_PLANNER_OBSERVE`` and ``CAPTURE_PLANNER_PROFILE=1``; ``capture-planner
tune`` of that one observation chooses the plan of the third. Then all engines of a deployment serve the loads by
turns, ``--rounds`` times, with requests that were not observed. Where ``tune`` says ``keep``, the engine by itself
counts as tuned, too.

Measured: tokens/s, the mean step (the time in which some request was in flight, by steps of the target), inter-token
latency, time to first token, steps without a graph by role, graphs with the time and memory of their capture, and what
``tune`` promised: the mean step today, which the observed load is measured against, and the one under the plan.

With ``--turns STEPS`` one engine has the graphs of all plans, and dispatches by each in turns of so many steps: a host
drifts by more than plans differ, and turns have the same host. What an equal step takes is compared.

``--deployments`` measures ten other deployments, by itself and tuned. ``--only`` names the groups: SHAPE-K of the grid
(0.6b-3, 0.6b-0, 8b-3, ...), or deployments. Groups run one after another, so that their engines fit on the GPU.
Results are written as they come: a run that is cut off keeps them.

Needs a CUDA GPU and vLLM 0.33; this repository's packages are found on PYTHONPATH or installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _arriving_rounds import EXPERT, GIB, ITSELF, TUNED, Group, Rig, command_line, run, without_drafter
from _bench import ROOT
from _model_configs import SHAPES

from capture_planner import codec, load_backends, load_environment
from capture_planner.analysis.trace import read_trace
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner.records.plan import Plan

WORKER = Path(__file__).with_name("_arriving_worker.py")

HALF = 24
"""Layers of the mixture, half of its own, so that three engines fit on one GPU: a step has half of the kernels, on the
host and on the device."""

REQUESTS = {"0.6b": (700, 350, 100), "8b": (350, 250, 60), "30b-a3b": (350, 250, 60)}
"""Of the wave, of the load of 200 in flight, and of 32 in flight: a few seconds each."""


def grid(traces: Sequence[Mapping[str, Any]], scale: float) -> Iterator[Group]:
    """Yield the shapes with three draft tokens and with none, for ``scale`` times REQUESTS and loads of traces."""
    for shape in SHAPES:
        for k in (3, 0):
            yield Group(
                name=f"{shape}-{k}",
                shape=shape,
                k=k,
                loads=(*_loads(shape, scale), *traces),
                columns=(ITSELF, EXPERT, TUNED),
                layers=HALF if shape == "30b-a3b" else None,
            )


def _loads(shape: str, scale: float) -> list[dict[str, Any]]:
    wave, many, few = (max(1, round(number * scale)) for number in REQUESTS[shape])
    return [
        {"wave": [10, 250], "requests": wave},
        {"in_flight": 200, "requests": many},
        {"in_flight": 32, "requests": few},
    ]


def deployments(scale: float) -> Iterator[Group]:
    """Yield ten deployments of the 0.6B shape that differ from the grid's in one thing or two."""
    decodes = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
    for name, k, options in (
        ("full-decode-only", 3, decodes),
        ("max-num-seqs-64", 3, {"max_num_seqs": 64}),
        ("max-num-seqs-512", 3, {"max_num_seqs": 512}),
        ("chunks-of-2048", 3, {"max_num_batched_tokens": 2048}),
        ("five-drafts", 5, {}),
        ("lora", 0, {}),
        ("kv-fp8", 0, {"kv_cache_dtype": "fp8"}),
        ("kv-bf16", 1, {"kv_cache_dtype": "bfloat16"}),
        ("no-drafter-64", 0, {"max_num_seqs": 64}),
        ("no-drafter-full-decode-only", 0, decodes),
    ):
        most = 500 if options.get("max_num_seqs") == 512 else 250
        loads: list[dict[str, Any]] = [
            {"wave": [10, most], "requests": max(1, round(500 * scale))},
            {"in_flight": 32, "requests": max(1, round(70 * scale))},
        ]
        adapters = 2 if name == "lora" else 0
        if adapters:
            loads = [{**load, "adapters": 50} for load in loads]
        yield Group(
            name=name,
            k=k,
            options={"kv_cache_memory_bytes": 7 * GIB, **options},
            loads=tuple(loads),
            columns=(ITSELF, TUNED),
            adapters=adapters,
        )


def expert_plan(file: Path, group: Group) -> Plan:
    """Return the plan of a list that was written by hand, for the model and the draft length of a group."""
    spec = codec.load_spec(file)
    config, drafter = group.config, SHAPES[group.shape][1]
    model = replace(
        spec.model,
        name=group.shape,
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
    )
    spec = replace(spec, model=model)
    if group.k:
        drafts = DraftModel(vocab_size=drafter["draft_vocab_size"])
        spec = replace(spec, speculative=Speculative(method=Method.EAGLE3, num_tokens=group.k, model=drafts))
    else:
        spec = without_drafter(spec)
    environment = load_environment(ROOT / "plans" / "environments" / "h200.yaml")
    return make_plan(spec, environment, load_backends())


def chosen(groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """Return the groups of these names, in that order, or all; raises ``ValueError`` for an unknown name."""
    by_name = {group.name: group for group in groups}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"no group {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(groups)


def trace_load(file: Path, requests: int, seconds: float) -> dict[str, Any]:
    """Return the load of the first requests of a trace, at the pace at which they all arrive in so many seconds."""
    arrivals = sorted(row.arrival for row in read_trace(str(file)))[:requests]
    return {
        "trace": str(file.resolve()),
        "requests": requests,
        "speedup": max(1.0, (arrivals[-1] - arrivals[0]) / seconds),
        "name": file.stem,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = command_line(__doc__)
    options.add_argument("--deployments", action="store_true", help="ten other deployments, by itself and tuned")
    options.add_argument("--only", nargs="*", default=[], metavar="GROUP", help="such as 0.6b-3; default: all")
    options.add_argument("--trace", type=Path, nargs="*", default=[], help="CSV of requests that is served, too")
    options.add_argument("--trace-requests", type=int, default=200, help="requests of a trace: the first ones")
    options.add_argument("--trace-seconds", type=float, default=5.0, help="time in which they arrive")
    arguments = options.parse_args(words)
    traces = [trace_load(file, arguments.trace_requests, arguments.trace_seconds) for file in arguments.trace]
    scale, expert = arguments.scale, arguments.expert
    every = deployments(scale) if arguments.deployments else grid(traces, scale)
    rig = Rig(
        worker=WORKER,
        arguments=Group.arguments,
        expert=None if expert is None else lambda group: expert_plan(expert, group),
        together=True,
    )
    return run(arguments, chosen(list(every), arguments.only), lambda folder: rig)


if __name__ == "__main__":
    sys.exit(main())
