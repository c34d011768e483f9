"""The runner on a GPU: CUDA graphs give the tokens of eager steps, for every backend that is there.

Run as a script for more steps and a table: ``python tests/gpu/test_runner.py --steps 5000``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time

import pytest
import torch

from capture_planner import load
from capture_planner.model import DataType, Method, Model, Speculative
from capture_planner.models.auxiliary import choose_drafter
from capture_planner.models.huggingface import load_target
from capture_planner.modes import GraphMode, GraphSupport, Pool
from capture_planner.planner import plan as make_plan
from capture_planner.runtime.capture import without_graphs, without_speculation
from capture_planner.runtime.kv import PageFormat
from capture_planner.runtime.role import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.workload import generated
from capture_planner.spec import Limits, Policy, Sizes, Spec

BACKENDS = ("reference", "triton", "flash_attention", "flashinfer")
DRAFTS = (0, 1, 2, 3, 5, 7)
MODES = (GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_DECODE_ONLY)
# In 16 bits the likeliest token may differ where two are as likely: exact kernels run in float32.
DTYPES = {"reference": DataType.FLOAT32, "triton": DataType.FLOAT32}
PAGE_SIZE = 16

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def spec_of(backend: str, k: int, mode: GraphMode, pool: Pool, *, reqs: int = 8) -> Spec:
    """Return a small deployment whose heads every backend takes."""
    return Spec(
        model=Model(
            name="tiny",
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            hidden_size=128,
            vocab_size=512,
            max_model_len=256,
            dtype=DTYPES.get(backend, DataType.BFLOAT16),
        ),
        limits=Limits(max_num_reqs=reqs, max_num_tokens=128),
        mode=mode,
        backend=backend,
        speculative=Speculative(method=Method.EAGLE3, num_tokens=k) if k else None,
        sizes=Sizes(policy=Policy.POWERS_OF_TWO),
        pool=pool,
    )


class World:
    """One random deployment on this GPU, and what it serves."""

    def __init__(self, backend: str, seed: int) -> None:
        from capture_planner.runtime.cuda import CudaGraphs
        from capture_planner.runtime.host import this_environment

        rng = random.Random(seed)
        self.k, self.mode, self.pool = rng.choice(DRAFTS), rng.choice(MODES), rng.choice(tuple(Pool))
        self.registry = load()
        spec = spec_of(backend, self.k, self.mode, self.pool)
        self.plan = make_plan(spec, this_environment("here"), self.registry)
        self.device = torch.device("cuda:0")
        self.grapher = CudaGraphs(self.device)
        self.target = load_target(None, self.plan.model, device=self.device, seed=seed)
        self.pages = PageFormat(page_size=PAGE_SIZE, num_pages=1 + 8 * 256 // PAGE_SIZE)
        self.requests = generated(
            24,
            seed=seed,
            rate=rng.choice((None, 50, 400)),
            prompt_tokens=(1, 100),
            output_tokens=(1, 60),
            vocab_size=512,
        )
        self.kind = rng.choice(("random", "chance", "copy"))
        self.seed = seed

    def serve(self, plan, *, answers=None, **options):
        """Serve everything by a plan; return tokens by name, and the session."""
        drafter = None
        if plan.speculative is not None:
            drafter = choose_drafter(
                self.kind,
                plan.speculative,
                self.target,
                places=plan.limits.max_num_reqs,
                length=plan.model.max_model_len + 8,
                seed=self.seed,
            )
        runner = Runner(
            plan,
            self.target,
            drafter,
            self.registry,
            self.grapher,
            pages=self.pages,
            device=self.device,
            options=Options(**options),
        )
        with runner:
            runner.capture()
            served = runner.serve(self.requests, answers=answers)
            return {done.name: done.tokens for done in served}, runner.session

    def check(self) -> dict[str, object]:
        """Compare graphs with eager, and both with plain greedy; return what was seen."""
        plain, _ = self.serve(without_speculation(self.plan, self.registry))
        answers = {request.name: request.prompt + plain[request.name] for request in self.requests}
        eager, _ = self.serve(without_graphs(self.plan), answers=answers)
        graphs, session = self.serve(self.plan, answers=answers, poison=True, debug=True)
        return {
            "k": self.k,
            "mode": self.mode.value,
            "pool": self.pool.value,
            "drafter": self.kind,
            "graphs": len(session.captured),
            "steps": len(session.steps),
            "from graphs": sum(f.entry is not None for f in session.forwards),
            "forwards": len(session.forwards),
            "differ from eager": sum(graphs[name] != eager[name] for name in graphs),
            "differ from plain": sum(graphs[name] != plain[name] for name in graphs),
        }


def served_here(backend: str) -> str | None:
    """Return why a backend does not run here, or None."""
    from capture_planner.contract import Attention
    from capture_planner.modes import Role
    from capture_planner.runtime.host import this_environment

    registry = load()
    if backend not in registry:
        return f"the backend {backend} is not installed"
    spec = spec_of(backend, 0, GraphMode.FULL, Pool.SHARED)
    attention = Attention.of(spec, Role.TARGET, layers=2, window=None)
    support = registry[backend].support(Role.TARGET, attention, this_environment("here"))
    return support.reason if support.level is GraphSupport.NEVER else None


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(int(os.environ.get("CAPTURE_PLANNER_GPU_EXAMPLES", "20")) // 5))
def test_graphs_give_the_tokens_of_eager_steps(backend, seed):
    """With every buffer poisoned before each forward."""
    missing = served_here(backend)
    if missing:
        pytest.skip(missing)
    seen = World(backend, seed).check()
    assert seen["differ from eager"] == 0 or DTYPES.get(backend) is None
    assert seen["from graphs"]


def main() -> int:
    """Run random deployments until so many steps were served by each backend; print a line each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--backends", nargs="*", default=BACKENDS)
    options.add_argument("--seconds", type=float, default=200, help="most time a backend")
    arguments = options.parse_args()
    worst = 0
    for backend in arguments.backends:
        missing = served_here(backend)
        if missing:
            print(json.dumps({"backend": backend, "skipped": missing}), flush=True)  # noqa: T201
            continue
        steps, seed, started, differ, forwards = 0, 0, time.time(), 0, 0
        while steps < arguments.steps and time.time() - started < arguments.seconds:
            seen = World(backend, seed).check()
            seed += 1
            steps += seen["steps"]
            forwards += seen["from graphs"]
            differ += seen["differ from eager"]
            if seen["differ from eager"] or seen["differ from plain"] or seed <= 2:
                print(json.dumps({"backend": backend, "seed": seed - 1, **seen}), flush=True)  # noqa: T201
        total = {"backend": backend, "deployments": seed, "steps": steps, "forwards from graphs": forwards}
        print(json.dumps(total | {"requests that differ from eager": differ}), flush=True)  # noqa: T201
        worst += differ if backend in DTYPES else 0
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
