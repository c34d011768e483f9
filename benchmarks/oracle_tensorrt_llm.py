"""Run TensorRT-LLM's own functions beside the emulation of them, over random command lines and batches.

    python benchmarks/oracle_tensorrt_llm.py --wheel FOLDER --count 20000 --seed 1

FOLDER has the engine's sources at their paths (``tensorrt_llm/llmapi/llm_args.py`` and so on), at the
commits that ``capture_planner/engines/tensorrt_llm/rules.py`` names: no wheel is on a public index.
Prints how much was compared and every difference; exits with 1 where there is one.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _oracle import ended, options, oracle, say, sources

from capture_planner.dispatch import Dispatch
from capture_planner.engines.tensorrt_llm import ENGINE, DecodeGraphs, agreed
from capture_planner.entry import Batch
from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.errors import FlagError
from capture_planner.modes import Role
from capture_planner.testing.engines import tensorrt_llm as drawn

MACHINE = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1))

Answers = tuple[Any, ...]
"""Sizes, shapes, answers to batches alone, and to those of ranks."""


def batch_of(question: drawn.Question) -> Batch:
    """The batch that a question is about."""
    num_reqs, query_len, past_prompt = question
    tokens = num_reqs + 1 if query_len is None else num_reqs * query_len
    return Batch(
        role=Role.TARGET, num_reqs=num_reqs, num_tokens=tokens, query_len=query_len, past_prompt=past_prompt
    )


def requests(dispatch: Dispatch) -> int | None:
    """Requests of the graph that answers, 0 for none."""
    return 0 if dispatch.entry is None else dispatch.entry.num_reqs


def theirs(module: Any, files: Any, case: drawn.Case) -> Answers | None:
    """What the engine makes of a case; None where it fails."""
    try:
        engine = module.Engine(files, case)
    except ValueError:
        return None
    together = engine.attention_dp and engine.tensor > 1
    return (
        sorted(set(engine.sizes)),
        [(size, engine.width(draft_len)) for size, draft_len in engine.shapes],
        [engine.answers([question], together=False)[0] for question in case.batches],
        [engine.answers(step, together=True) for step in case.ranks] if together else [],
    )


def ours(case: drawn.Case, file: Path) -> Answers | None:
    """What the emulation makes of it; None where it refuses."""
    file.write_text(json.dumps(case.config), "utf-8")
    try:
        emulation = ENGINE.emulate([*case.flags, "--config", str(file)], MACHINE)
    except FlagError:
        return None
    (manager,) = emulation.managers
    assert isinstance(manager, DecodeGraphs)
    together = emulation.parallel.data > 1
    steps = [agreed(manager, list(map(batch_of, step))) for step in case.ranks] if together else []
    return (
        list(emulation.sizes),
        [(graph.entry.num_reqs, graph.entry.query_len) for graph in emulation.graphs],
        [requests(emulation.dispatch(batch_of(question))) for question in case.batches],
        [[requests(answer) for answer in step] for step in steps],
    )


def main() -> int:
    """Compare, and say so."""
    arguments = options(__doc__, "tensorrt_llm").parse_args()
    module = oracle("tensorrt_llm")
    engine, started = module.Sources(sources(arguments)), time.perf_counter()
    batches = refused = different = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in itertools.islice(drawn.cases(arguments.seed), arguments.count):
            expected, found = theirs(module, engine, case), ours(case, Path(folder) / "config.yaml")
            refused += expected is None
            if expected is not None:
                batches += len(expected[2]) + sum(map(len, expected[3]))
            if expected != found:
                different += 1
                say(f"{case}\n  TensorRT-LLM: {expected}\n  here:         {found}")
    counts = {"configurations": arguments.count, "refused by both": refused, "batches": batches}
    return ended(arguments, counts, different, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
