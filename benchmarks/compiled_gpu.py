"""Compiled bodies on a GPU: what they save, what they cost, and whether they compute the same.

The shape of Qwen3-0.6B with random weights, for each backend: steps of 1 to 256 requests compiled and not, the time to
compile without and with what an earlier process left on disk, tokens/s of 64 requests of 128 + 128 tokens, how far
logits are from a dense forward in float32, and random steps from graphs that must have the tokens of the same compiled
kernels without a graph. ``--device cpu`` serves the reference backend from recorded graphs, with few layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import attrs
import torch
from _bench import CONSOLE, finish, parser, provenance, verdict
from _deployments import CASES, REGISTRY, deployment, environment, missing, qwen, small
from _equality import check, faults
from _qwen3 import shape, write_config

from capture_planner.bench.decode import row
from capture_planner.bench.rig import Effort, Rig, clock_of, trimmed
from capture_planner.bench.throughput import Load, throughput
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, DraftModel, Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.runtime.chosen import drafter_of
from capture_planner.runtime.compilation.compilers import OPTIONS
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.models.huggingface import load_target
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat

REQUESTS = (1, 8, 64, 256)
GOAL = 0.55
"""Of a step that is not compiled."""
PARTS = ("steps", "drafted", "throughput", "equality")
PAGE = 64


class Campaign:
    """One process: a model, a device, and the results so far."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
        self.grapher = grapher_for(self.device)
        on_cpu = self.device.type == "cpu"
        self.requests = (1, 2) if on_cpu else REQUESTS
        model = shape(max_model_len=1024, dtype=DataType.FLOAT32 if on_cpu else DataType.BFLOAT16)
        self.shape = replace(model, num_layers=2, hidden_size=64, vocab_size=512) if on_cpu else model
        with tempfile.TemporaryDirectory() as folder:
            write_config(self.shape, Path(folder))
            dtype = getattr(torch, self.shape.dtype.value)
            self.model = load_target(Path(folder), self.shape, device=self.device, dtype=dtype)
        self.began = time.perf_counter()
        self.results: dict[str, Any] = {}
        self.targets: dict[str, bool] = {}

    def left(self) -> float:
        """Return the seconds that are left."""
        return float(self.arguments.seconds) - (time.perf_counter() - self.began)

    def plan(self, name: str, drafts: int = 0) -> Plan:
        """Return a server's plan: pieces and whole graphs, of a few sizes; with drafts of an EAGLE-3 head."""
        most = max(self.requests)
        spec = Spec(
            model=self.shape,
            limits=Limits(max_num_reqs=most, max_num_tokens=64 if most < 8 else 8192),
            mode=GraphMode.FULL_AND_PIECEWISE,
            backend=CASES[name].backend,
            speculative=Speculative(
                method=Method.EAGLE3,
                num_tokens=drafts,
                model=DraftModel(vocab_size=min(32000, self.shape.vocab_size or 0)),
            )
            if drafts
            else None,
            sizes=Sizes(
                policy=Policy.EXPLICIT,
                num_tokens=(64,) if most < 8 else (64, 256, 1024, 4096, 8192),
                num_reqs=self.requests,
            ),
        )
        return make_plan(spec, environment(CASES[name], self.device), REGISTRY)

    def rig(self, name: str, *, compiled: bool, drafts: int = 0) -> Rig:
        """Return what measures one backend."""
        plan = self.plan(name, drafts)
        longest = 512 if self.device.type == "cuda" else 128
        return Rig(
            plan=plan,
            model=self.model,
            drafter=drafter_of(plan, self.model, "random"),
            registry=REGISTRY,
            grapher=self.grapher,
            device=self.device,
            pages=PageFormat(page_size=PAGE, num_pages=1 + plan.limits.max_num_reqs * -(-longest // PAGE)),
            clock=clock_of(self.device),
            effort=Effort(windows=3, steps=20 if self.device.type == "cuda" else 3, runs=1),
            sizes=self.requests,
            options=Options(compile=compiled),
        )

    def steps(self, name: str) -> dict[str, Any]:
        """Measure steps and bare replays, compiled and not."""
        return self._steps(name, "steps", 0)

    def drafted(self, name: str) -> dict[str, Any]:
        """Measure steps with three drafts of an EAGLE-3 head."""
        return self._steps(name, "drafted", 3)

    def _steps(self, name: str, part: str, drafts: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for compiled in (True, False):
            rig = self.rig(name, compiled=compiled, drafts=drafts)
            with rig.runner(trimmed(rig.plan, rig.sizes)) as runner:
                if compiled:
                    found["compilation"] = compilation(runner)
                    self.targets[f"{name}, {part}: all is compiled"] = not runner.compilation.not_compiled
                    CONSOLE.print(f"{name}: {found['compilation']}", highlight=False)
                runner.capture()
                pools = {id(role.pool): role.pool.memory for role in runner.parts.roles.values() if role.pool}
                found[f"pool bytes, compiled {compiled}"] = sum(pools.values())
                for size in rig.sizes:
                    with rig.trying(f"{size} requests"):
                        measured = row(rig, runner, size, rig.effort.windows, graphs=True)
                        times = {"step ms": measured.step * 1e3, "bare ms": measured.bare * 1e3}
                        found.setdefault(str(size), {})["compiled" if compiled else "not compiled"] = times
                        CONSOLE.print(f"{name}, {size} requests, compiled {compiled}: {times}", highlight=False)
            if rig.absent:
                CONSOLE.print(rig.absent, markup=False)
                found.setdefault("absent", []).extend(attrs.asdict(absent) for absent in rig.absent)
            self.keep(name, part, found)
        for number in self.requests:
            both = found.get(str(number), {})
            if len(both) == 2:
                both["ratio"] = both["compiled"]["step ms"] / both["not compiled"]["step ms"]
                self.targets[f"{name}, {part}, {number} requests: at most {GOAL} of a step that is not compiled"] = (
                    both["ratio"] <= GOAL
                )
        return found

    def throughput(self, name: str) -> dict[str, Any]:
        """Serve 64 requests of 128 + 128 tokens, compiled and not."""
        load = Load() if self.device.type == "cuda" else Load(requests=4, prompt=16, output=16)
        found = {}
        for compiled in (True, False):
            rig = self.rig(name, compiled=compiled)
            rate = throughput(rig, load, lambda done: None, compare=False).tokens_per_second
            found["compiled" if compiled else "not compiled"] = rate
            CONSOLE.print(f"{name}, compiled {compiled}: {rate:,.0f} tokens/s", highlight=False)
            self.keep(name, "tokens per second", found)
        return found

    def equality(self, name: str) -> dict[str, Any]:
        """Serve random requests from graphs and from the same kernels without; compare tokens and logits."""
        case, steps = CASES[name], 0
        seen: list[dict[str, Any]] = []
        began, share = time.perf_counter(), max(self.left() - 10, 20)
        while steps < self.arguments.steps and (not seen or time.perf_counter() - began < share):
            seed = self.arguments.seed + len(seen)
            spec = (qwen if self.device.type == "cuda" else small)(case, (0, 3)[seed % 2])
            # The first one is short, so that there is a result early.
            requests = self.arguments.requests if seen else 24
            subject = deployment(case, spec, self.device, self.grapher, seed=seed, requests=requests, outputs=(8, 80))
            record = check(subject, eager=False, compile=True)
            record["faults"] = faults(record)
            seen.append(record)
            steps += record["steps"]
            kept = {
                "steps": steps,
                "deployments": len(seen),
                "differ from the same kernels": sum(each["differ from the same kernels"] for each in seen),
                "worst logits": max(each["logits"]["worst"] for each in seen),
                "worst logits of the dtype alone": max(each["logits of the dtype alone"]["worst"] for each in seen),
                "faults": [fault for each in seen for fault in each["faults"]],
                "seconds": time.perf_counter() - began,
            }
            CONSOLE.print(f"{name}: {kept}", highlight=False)
            self.keep(name, "equality", kept)
        self.targets[f"{name}: nothing differs from the same kernels, logits within the bound"] = not kept["faults"]
        return kept

    def keep(self, name: str, part: str, found: Any) -> None:
        """Write everything so far."""
        self.results.setdefault(name, {})[part] = found
        finish(self.arguments, {"results": self.results, "targets": self.targets})


def compilation(runner: Runner) -> dict[str, Any]:
    """Return what compiling took."""
    made = runner.compilation
    return {"kinds": made.kinds, "seconds": made.seconds, "not compiled": made.not_compiled}


def cached(arguments: Any, name: str) -> dict[str, Any]:
    """Compile in a process of its own, from the caches on disk of this one; return what it took."""
    command = [sys.executable, __file__, "--only-compile", "--device", arguments.device, "--backends", name]
    command += ["--autotune"] if arguments.autotune else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure, print and write; exit code 1 where a goal is missed or something differs."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", default=["triton", "flashinfer"], choices=list(CASES))
    options.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    options.add_argument("--steps", type=int, default=5000, help="random steps of each backend")
    options.add_argument("--seed", type=int, default=0, help="of the first random deployment; the next has one more")
    options.add_argument("--requests", type=int, default=160, help="requests of each random deployment")
    options.add_argument("--seconds", type=float, default=240)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--autotune", action="store_true", help="with Inductor's own settings")
    options.add_argument("--only-compile", action="store_true", help="print what compiling takes, as JSON")
    arguments = options.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("there is no CUDA device; --device cpu serves the reference backend")
    if arguments.autotune:
        OPTIONS.clear()
    if arguments.only_compile:
        campaign = Campaign(arguments)
        rig = campaign.rig(arguments.backends[0], compiled=True)
        with rig.runner(rig.plan) as runner:
            CONSOLE.file.write(json.dumps(compilation(runner)) + "\n")
        return 0
    # A folder of its own, so that the first time to compile is without what others left on disk.
    folder = tempfile.mkdtemp(prefix="inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    campaign = Campaign(arguments)
    CONSOLE.print(provenance(), highlight=False)
    share = arguments.seconds / len(arguments.backends)
    for number, name in enumerate(arguments.backends, 1):
        why = missing(CASES[name], campaign.device)
        if why is not None:
            campaign.keep(name, "skipped", why)
            continue
        arguments.seconds = share * number
        for part in arguments.only:
            try:
                campaign.keep(name, part, getattr(campaign, part)(name))
            except Exception as error:
                traceback.print_exc()
                campaign.targets[f"{name}: {part}"] = False
                campaign.keep(name, part, {"error": f"{type(error).__name__}: {error}"})
        if "steps" in arguments.only and number == 1:
            campaign.keep(name, "compiled again", cached(arguments, name))
    for target, holds in campaign.targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}", highlight=False)
    finish(arguments, {"results": campaign.results, "targets": campaign.targets})
    return 0 if campaign.targets and all(campaign.targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
