"""Plans applied to vLLM's own graph managers and configuration, compared with the plans.

    PYTHONPATH=tests python tests/engines/oracle/run_vllm_apply.py --wheel WHEEL --count 2000

Needs the unpacked wheel, and torch; no GPU and no installed engine. For each random plan, the managers of its roles are
made by the wheel's code with the plugin in it, captured over stand-ins for the device, and asked about the admissible
batches. Then ``launch`` completes a command line for each locked plan, which goes through the wheel's parser and
configuration. At last the names of the unit tests' stand-ins are compared with the wheel's. Exits with 1 on any
difference.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from capture_planner.codec import load_plan
from capture_planner.errors import FlagError
from capture_planner.modes import Role
from capture_planner.records.plan import Plan
from capture_planner_vllm.emulation.engine import emulate
from capture_planner_vllm.emulation.export import export_vllm, plan_sizes
from capture_planner_vllm.emulation.launch import launch_vllm
from capture_planner_vllm.inside import hooks
from engines.generators.vllm import write_models
from engines.generators.vllm_plans import vllm_plans
from engines.oracle.comparison import finish, options, oracle, say, sources
from support import vllm_module

VECTORS = 40
"""Vectors of ranks that are tried of each plan."""
LOCKED = sorted((Path(__file__).parents[3] / "plans" / "locked").glob("*.yaml"))
METHODS = ("eagle", "eagle3")
"""Draft methods for which there is a draft model that fits the target."""


def managers(module: Any, folder: Path, count: int, number: int, seen: Counter[str]) -> int:
    """Compare ``count`` random plans; return how many differ."""
    differing = 0
    with module.engine(folder) as modules:

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(vllm_plans())
        def compare(plan: Plan) -> None:
            nonlocal differing
            hooks.current_plan = lambda: plan
            applied = module.AppliedPlan(modules, plan)
            found = list(applied.differences())
            for text in found:
                say(f"seed {number}, plan {seen['plans']}: {text}")
            differing += bool(found)
            differing += ranks(module, modules, plan, number + seen["plans"], seen)
            seen["plans"] += 1
            seen["graphs"] += sum(len(each) for each in applied.captured.values())
            seen["batches"] += applied.asked_batches
            seen["plans with adapters"] += plan.lora is not None
            seen["plans with dynamic drafts"] += applied.dynamic
            seen["plans with piecewise graphs"] += any(role.mode.has_piecewise for role in plan.roles)

        compare()
        for text in module.stand_in_differences(modules, vllm_module):
            say(text)
            differing += 1
    return differing


def ranks(module: Any, modules: dict[str, Any], plan: Plan, number: int, seen: Counter[str]) -> int:
    """Compare what 2 to 4 data-parallel ranks run of random vectors of a plan; return 1 where something differs."""
    draw = random.Random(number)
    applied = module.AppliedPlan(modules, plan, draw.randint(2, 4))
    admissible = [*applied.batches(Role.TARGET)]
    vectors = [
        [None if draw.random() < 0.2 else draw.choice(admissible) for _ in range(applied.ranks)] for _ in range(VECTORS)
    ]
    found = list(applied.rank_differences(vectors))
    for text in found[:3]:
        say(f"seed {number}, plan {seen['plans']}, {applied.ranks} ranks: {text}")
    seen["vectors of data-parallel ranks"] += len(vectors)
    return bool(found)


def launches(wheel: Path, seen: Counter[str]) -> Iterator[str]:
    """Yield what differs where a launched command line goes through the wheel's own parser and configuration."""
    engine = oracle("vllm_config").VllmOracle(wheel)
    hooks.apply_to_config(sys.modules[hooks.CONFIG])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_models(folder)
        for path in LOCKED:
            plan = load_plan(path)
            hooks.current_plan = lambda plan=plan: plan
            words = [str(folder / "dense")]
            if plan.speculative is not None:
                if plan.speculative.method.value not in METHODS or plan.model.latent is not None:
                    continue
                config = export_vllm(plan).settings["speculative-config"]
                words += ["--speculative-config", json.dumps({**config, "model": str(folder / config["method"])})]
            launch = launch_vllm(plan, words)
            added, on_v1 = launch.arguments, any("model runner V1" in note for note in launch.notes)
            found = engine.answer([*words, *added], plan.environment)
            seen["launches"] += 1
            if not isinstance(found, dict):
                try:
                    emulate([*words, *added], plan.environment)
                except FlagError:
                    # An attention backend that the machine does not have, as the emulation says too.
                    seen["launches refused by vLLM and the emulation"] += 1
                    continue
                yield f"{path.stem}: vLLM refuses {' '.join(added)}: {found.reason}"
                continue
            if on_v1 != (found["runner"] == "v1"):
                yield f"{path.stem}: runner {found['runner']}, and launch says {launch.notes}"
            if on_v1:
                seen["launches on model runner V1, which takes no plan"] += 1
                continue
            sizes = plan_sizes(plan, plan.limits.max_num_tokens)
            if found["sizes"] != sizes or found["max_size"] != max(sizes, default=0):
                yield f"{path.stem}: sizes {found['sizes']} for {sizes}"
            for name, ours in (
                ("max_num_seqs", plan.limits.max_num_reqs),
                ("max_num_batched_tokens", plan.limits.max_num_tokens),
                ("K", 0 if plan.speculative is None else plan.speculative.num_tokens),
            ):
                if found[name] != ours:
                    yield f"{path.stem}: {name} {found[name]} for {ours}"


def main() -> int:
    """Compare and print; exit code 1 on a difference."""
    parser = options(__doc__, "vllm", seed=0)
    parser.set_defaults(count=2000)
    arguments = parser.parse_args()
    seen: Counter[str] = Counter()
    started, folder = time.perf_counter(), sources(arguments)
    differing = managers(oracle("vllm_apply"), folder, arguments.count, arguments.seed, seen)
    for text in launches(folder, seen):
        say(text)
        differing += 1
    return finish("vllm_apply", arguments, dict(seen), differing, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
