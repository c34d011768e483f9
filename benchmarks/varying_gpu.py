"""Decode graphs of varying query lengths on a GPU, against uniform ones.

The shape of Qwen3-0.6B with random weights and an EAGLE-3 head of K drafts. How many drafts are proposed in a step, and
how many are accepted, is drawn for each request (``--proposals``, ``--acceptance``), so that all contenders run the
same steps of the same requests:

- uniform: every request verifies K drafts, filled up with any token, in graphs of 1 + K tokens each;
- varying: every request verifies the drafts that it has, in graphs of 1 to 1 + K tokens each;
- piecewise: the same decodes as of varying ones, in PIECEWISE graphs of mixed batches, attention outside;
- full: the same decodes, in FULL graphs of any batch, by tokens.

Of each: graphs, time and memory of the capture, tokens/s, and the share of the target's decodes by mode. With
``--device cpu`` a tiny model is served from recorded graphs, which shows that it works and nothing about times.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from _bench import CONSOLE, finish, parser, provenance, table, verdict
from _deployments import CASES, REGISTRY, environment, missing
from _qwen3 import DRAFT_VOCABULARY, shape, write_config

from capture_planner.bench.rig import Effort, Rig, clock_of
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, DraftModel, Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.runtime.chosen import drafter_of
from capture_planner.runtime.compilation.forwards import Compilation
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.models.huggingface import load_target
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat

PROPOSALS = (0.8, 0.5, 0.25)
"""Of the chances to draft: a drafter that stops where it is unsure, as EAGLE-3 with a confidence threshold does."""
ACCEPTANCE = (0.7, 0.45, 0.22)
CONTENDERS = ("uniform", "varying", "piecewise", "full")
MODES = {"piecewise": GraphMode.PIECEWISE, "full": GraphMode.FULL}
"""Of contenders that have no graphs of their own for decodes."""
PAGE = 64


@attrs.frozen(kw_only=True)
class Load:
    """Requests that all arrive at once."""

    requests: tuple[int, ...]
    """Most requests at once, one load each."""
    prompt: int
    output: int
    rounds: int


class Campaign:
    """One process: a model, a device, and the results so far."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
        on_cpu = self.device.type == "cpu"
        self.load = Load(requests=(2, 4), prompt=8, output=12, rounds=1)
        if not on_cpu:
            self.load = Load(requests=tuple(arguments.requests), prompt=128, output=arguments.tokens, rounds=2)
        model = shape(max_model_len=1024, dtype=DataType.FLOAT32 if on_cpu else DataType.BFLOAT16)
        tiny = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "hidden_size": 16, "vocab_size": 97}
        self.shape = replace(model, **tiny, max_model_len=64) if on_cpu else model
        with tempfile.TemporaryDirectory() as folder:
            write_config(self.shape, Path(folder))
            dtype = getattr(torch, self.shape.dtype.value)
            self.model = load_target(Path(folder), self.shape, device=self.device, dtype=dtype)
        self.grapher = grapher_for(self.device)
        self.drafter = drafter_of(self.plan("uniform"), self.model, "random")
        # Contenders differ in their graphs alone, so that layers are compiled once.
        self.compilation = Compilation()
        self.results: dict[str, Any] = {}

    def plan(self, contender: str) -> Plan:
        """Return the plan of a contender; all have the same sizes."""
        most, drafts = max(self.load.requests), len(self.arguments.proposals)
        ladder = tuple(sorted({most, *(1 << power for power in range(most.bit_length()))}))
        spec = Spec(
            model=self.shape,
            limits=Limits(max_num_reqs=most, max_num_tokens=max(64, 32 * most)),
            mode=MODES.get(contender, GraphMode.FULL_AND_PIECEWISE),
            backend=CASES[self.arguments.backend].backend,
            speculative=Speculative(
                method=Method.EAGLE3,
                num_tokens=drafts,
                model=DraftModel(vocab_size=min(DRAFT_VOCABULARY, self.shape.vocab_size or 0)),
                varying_decodes=() if contender == "uniform" else (Role.TARGET, Role.DRAFT_PREFILL),
            ),
            sizes=Sizes(
                policy=Policy.EXPLICIT,
                num_reqs=ladder,
                num_tokens=tuple(sorted({*(size * each for size in ladder for each in (1, 2, 1 + drafts)), 32 * most})),
            ),
        )
        return make_plan(spec, environment(CASES[self.arguments.backend], self.device), REGISTRY)

    def measure(self, contender: str) -> dict[str, Any]:
        """Capture a contender's graphs, and serve each load from them."""
        plan = self.plan(contender)
        longest = self.load.prompt + self.load.output + 2 * len(self.arguments.proposals)
        rig = Rig(
            plan=plan,
            model=self.model,
            drafter=self.drafter,
            registry=REGISTRY,
            grapher=self.grapher,
            device=self.device,
            pages=PageFormat(page_size=PAGE, num_pages=1 + plan.limits.max_num_reqs * -(-longest // PAGE)),
            clock=clock_of(self.device),
            effort=Effort(),
            sizes=self.load.requests,
            options=Options(acceptance=self.arguments.acceptance, proposals=self.arguments.proposals),
            compilation=self.compilation,
        )
        with rig.runner(plan) as runner:
            before = self.held()
            started = time.perf_counter()
            runner.capture()
            pools = {id(role.pool): role.pool.memory for role in runner.parts.roles.values() if role.pool}
            found: dict[str, Any] = {
                "graphs": plan.num_graphs,
                "decode graphs": sum(e.tokens_each is not None for role in plan.roles for e in role.entries),
                "capture seconds": time.perf_counter() - started,
                "pool MiB": sum(pools.values()) / (1 << 20),
                "device MiB": (self.held() - before) / (1 << 20),
            }
            for count in self.load.requests:
                found[f"{count} requests"] = self.serve(rig, runner, count)
        return found

    def held(self) -> int:
        """Return the bytes of the device that are not free; 0 without one."""
        if self.device.type == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def serve(self, rig: Rig, runner: Runner, count: int) -> dict[str, Any]:
        """Serve a load, once to warm up; return rates, and what served the target's decodes."""
        rates: list[float] = []
        modes: Counter[str] = Counter()
        verified = computed = steps = 0
        for number in range(self.load.rounds + 1):
            seen = len(runner.session.forwards)
            requests = rig.requests(count, self.load.prompt, self.load.output, seed=number)
            started = time.perf_counter()
            answers = runner.serve(requests)
            seconds = time.perf_counter() - started
            if not number:
                continue
            rates.append(sum(answer.output_tokens for answer in answers) / seconds)
            prompts = {step.index for step in runner.session.steps if step.prompts}
            for forward in runner.session.forwards[seen:]:
                if forward.role is Role.TARGET and forward.step not in prompts:
                    modes["eager" if forward.entry is None else forward.mode.value] += 1
                    verified += forward.num_tokens
                    computed += forward.num_tokens + forward.padded_tokens
                    steps += 1
        decodes = max(sum(modes.values()), 1)
        return {
            "tokens per second": statistics.median(rates),
            "decode steps": steps,
            "verified tokens a step": verified / max(steps, 1),
            "computed tokens a step": computed / max(steps, 1),
            "share by mode": {mode: number / decodes for mode, number in sorted(modes.items())},
        }

    def keep(self, contender: str, found: dict[str, Any]) -> None:
        """Write everything so far."""
        self.results[contender] = found
        finish(self.arguments, {"results": self.results, "targets": self.targets()})

    def targets(self) -> dict[str, bool]:
        """Say what must hold of the contenders that were measured."""
        varying, uniform = self.results.get("varying"), self.results.get("uniform")
        targets = {}
        if varying is not None:
            for count in self.load.requests:
                share = varying[f"{count} requests"]["share by mode"].get(GraphMode.FULL.value, 0.0)
                targets[f"varying: every decode of {count} requests has a full graph"] = share == 1.0
        if varying is not None and uniform is not None:
            targets["varying: no more graphs than uniform"] = varying["graphs"] <= uniform["graphs"]
        return targets


def show(campaign: Campaign) -> None:
    """Print the contenders next to each other."""
    shown = table("contenders", "of", *campaign.results)
    for name in ("graphs", "decode graphs", "capture seconds", "pool MiB", "device MiB"):
        shown.add_row(name, *(f"{found[name]:,.1f}".removesuffix(".0") for found in campaign.results.values()))
    for count in campaign.load.requests:
        of_load = [found[f"{count} requests"] for found in campaign.results.values()]
        for name in ("tokens per second", "verified tokens a step", "computed tokens a step"):
            shown.add_row(f"{count} requests: {name}", *(f"{found[name]:,.1f}" for found in of_load))
        for mode in ("FULL", "PIECEWISE", "eager"):
            shares = (found["share by mode"].get(mode, 0.0) for found in of_load)
            shown.add_row(f"{count} requests: decodes {mode}", *(f"{share:.0%}" for share in shares))
    CONSOLE.print(shown)


def shares(text: str) -> tuple[float, ...]:
    """Read ``0.8,0.5,0.25``."""
    return tuple(map(float, text.split(",")))


def main() -> int:
    """Measure, print and write; exit code 1 where a decode of varying lengths has no full graph."""
    options = parser(__doc__)
    options.add_argument("--backend", default="triton", choices=list(CASES))
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=CONTENDERS)
    options.add_argument("--requests", nargs="*", type=int, default=[8, 64], help="requests at once, a load each")
    options.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    options.add_argument("--proposals", type=shares, default=PROPOSALS, help="shares of steps with drafts 0 to i")
    options.add_argument("--acceptance", type=shares, default=ACCEPTANCE, help="shares of steps that accept 0 to i")
    options.add_argument("--seconds", type=float, default=170, help="no contender is begun after so many")
    arguments = options.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("there is no CUDA device; --device cpu serves a tiny model")
    if arguments.device == "cpu":
        arguments.backend = "reference"
    if (why := missing(CASES[arguments.backend], torch.device(arguments.device))) is not None:
        options.error(f"{arguments.backend}: {why}")
    began = time.perf_counter()
    campaign = Campaign(arguments)
    CONSOLE.print(provenance(), highlight=False)
    for contender in arguments.only:
        if time.perf_counter() - began > arguments.seconds:
            CONSOLE.print(f"{contender}: not measured, the time is over", highlight=False)
            continue
        campaign.keep(contender, campaign.measure(contender))
        CONSOLE.print(f"{contender}: {campaign.results[contender]}", highlight=False)
    show(campaign)
    targets = campaign.targets()
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}", highlight=False)
    return 0 if targets and all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
