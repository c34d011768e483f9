"""vLLM's own capture and replay under random plans, compared with eager steps.

    PYTHONPATH=tests python tests/engines/oracle/run_vllm_captures.py --wheel WHEEL --count 2000

Needs the unpacked wheel, and torch; no GPU and no installed engine. For each random plan the wheel's managers capture a
tiny model and a drafter, over CUDA graphs that record operators (``cuda_graphs``), and run random batches: the outputs
and the drafts are those of eager steps, buffers have room, graphs are captured in the order in which they stand, and no
step captures one. Every tenth deployment also runs under vLLM's own lists. Exits with 1 on any difference.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
from collections import Counter

import torch

from capture_planner.modes import GraphMode, Role
from engines.generators.vllm_plans import TINY
from engines.generators.vllm_random import random_plan
from engines.oracle.comparison import finish, options, oracle, say, sources

OWN = 10
"""Of so many deployments one runs under vLLM's own lists too."""


def main() -> int:
    """Compare and print; exit code 1 on a difference."""
    parser = options(__doc__, "vllm", seed=0)
    parser.set_defaults(count=2000)
    arguments = parser.parse_args()
    logging.getLogger("capture_planner").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    captures, seen, differing = oracle("vllm_captures"), Counter[str](), 0
    started = time.perf_counter()
    with captures.engine(sources(arguments)) as modules:
        for index in range(arguments.count):
            seed = arguments.seed * 1_000_000 + index
            plan = random_plan(
                random.Random(seed), model=TINY, max_num_reqs=(1, 4, 16, 48), max_num_tokens=(48, 128, 384)
            )
            own = index % OWN == 0
            found = captures.compare(modules, plan, seed, own=own)
            for text in found[:2]:
                say(f"seed {seed}: {text}")
            differing += bool(found)
            target = plan.role(Role.TARGET)
            largest = {
                mode: max((entry.num_tokens for entry in target.entries if entry.mode is mode), default=0)
                for mode in (GraphMode.FULL, GraphMode.PIECEWISE)
            }
            seen["plans"] += 1
            seen["graphs"] += plan.num_graphs
            seen["batches"] += captures.STEPS
            seen[f"plans of {target.mode.value}"] += 1
            seen["plans with a decode above every mixed graph"] += (
                0 < largest[GraphMode.PIECEWISE] < largest[GraphMode.FULL]
            )
            seen["plans with drafts"] += plan.speculative is not None
            seen["plans with dynamic drafts"] += plan.speculative is not None and bool(plan.speculative.ranges)
            seen["plans with adapters"] += plan.lora is not None
            seen["deployments under vLLM's own lists"] += own
            if index % 20 == 19:
                gc.collect()
            if index % 200 == 199:
                say(f"{index + 1} plans, {differing} differ, {time.perf_counter() - started:.0f} s")
    return finish("vllm_captures", arguments, dict(seen), differing, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
