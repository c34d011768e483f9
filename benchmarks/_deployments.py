"""Deployments for ``gpu_equality.py`` and tests/gpu: each backend, tiny models and Qwen3-0.6B's shape."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from _model_configs import DRAFT_VOCABULARY, small_model, write_small_config

from capture_planner import load_backends
from capture_planner.modes import Chain, GraphMode, GraphSupport, Pool, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.environment import Environment
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_runner.compilation.forwards import Compilation
from capture_planner_runner.execution.role import ForwardObserver
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.host import this_environment
from capture_planner_runner.ledger.session import Session
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.models.protocols import TargetModel
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request, generated

DRAFTS = (0, 1, 2, 3, 5, 7)
MODES = (GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.FULL_DECODE_ONLY)
KINDS = ("random", "chance", "copy")
CYCLE = len(DRAFTS) * len(MODES)
"""Deployments after which each K was served in each mode."""
LONGEST, VOCABULARY = 256, 512
REGISTRY = load_backends()

Tokens = dict[str, tuple[int, ...]]
Answers = Mapping[str, tuple[int, ...]]


@attrs.frozen(kw_only=True)
class Case:
    """A backend as it is planned."""

    name: str
    backend: str
    dtypes: tuple[DataType, ...]
    """Taken in turns. In float32 a kernel is exact up to the order of sums."""
    page_sizes: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] = ((4, 2),)
    """Query and KV heads, taken in turns."""
    capability: str | None = None
    """The compute capability that is planned for; None: the device's own."""


CASES = {
    case.name: case
    for case in (
        Case(name="reference", backend="reference", dtypes=(DataType.FLOAT32,), page_sizes=(16, 1, 64)),
        Case(
            name="triton",
            backend="triton",
            dtypes=(DataType.FLOAT32, DataType.BFLOAT16),
            page_sizes=(16, 1, 64),
            heads=((4, 2), (8, 2), (2, 2)),
        ),
        Case(name="flash_attention", backend="flash_attention", dtypes=(DataType.BFLOAT16,), page_sizes=(16, 64, 128)),
        # XQA is compiled for each page size and query length, so there is one page size; the 0.6B
        # deployments have another.
        Case(name="flashinfer", backend="flashinfer", dtypes=(DataType.BFLOAT16,), page_sizes=(16,)),
        # SM80 has no decode kernel without a host plan: the wrappers serve everything. Four query heads a
        # KV head take tensor cores.
        Case(
            name="flashinfer_wrappers",
            backend="flashinfer",
            dtypes=(DataType.BFLOAT16,),
            page_sizes=(16, 64, 1),
            heads=((4, 2), (8, 2)),
            capability="8.0",
        ),
    )
}


def environment(case: Case, device: torch.device) -> Environment:
    """Return this machine as it is planned for: its GPU, or its processor alone where ``device`` is the CPU."""
    here = this_environment("here", gpu=device.type == "cuda")
    if case.capability is None:
        return here
    return replace(here, device=replace(here.device, capability=case.capability))


def missing(case: Case, device: torch.device) -> str | None:
    """Return why a case cannot be served on a device, or None."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    if device.type == "cpu" and case.capability is not None:
        return "it is planned for a CUDA device"
    if case.backend not in REGISTRY:
        return f"the backend {case.backend} is not installed"
    spec = tiny(case, 0, random.Random(0))
    attention = Attention.of(spec, Role.TARGET, layers=2, window=None)
    support = REGISTRY[case.backend].support(Role.TARGET, attention, environment(case, device))
    return support.reason if support.level is GraphSupport.NEVER else None


def tiny(case: Case, index: int, draw: random.Random) -> Spec:
    """Return the spec of a tiny deployment: K and mode follow from ``index``, the rest is drawn."""
    k = DRAFTS[index % len(DRAFTS)]
    num_reqs = draw.choice((3, 8, 13))
    num_tokens = draw.choice((32, 96, 128))
    heads, kv_heads = case.heads[index // 2 % len(case.heads)]
    return Spec(
        model=Model(
            name="tiny",
            num_layers=2,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=64,
            hidden_size=128,
            vocab_size=VOCABULARY,
            max_model_len=LONGEST,
            dtype=case.dtypes[index % len(case.dtypes)],
        ),
        limits=Limits(max_num_reqs=num_reqs, max_num_tokens=num_tokens),
        # One more in each half of the cycle, since 4 does not go into 6 evenly.
        mode=MODES[(index + index // (CYCLE // 2)) % len(MODES)],
        backend=case.backend,
        speculative=_speculative(k, num_reqs, index, draw) if k else None,
        sizes=draw.choice(
            (
                Sizes(policy=Policy.MINIMAX, graphs=3),
                # Some batches are larger than every graph, and run eager.
                Sizes(policy=Policy.EXPLICIT, num_tokens=(24,), num_reqs=(2, num_reqs - 1)),
            )
        ),
        pool=draw.choice(tuple(Pool)),
    )


def _speculative(k: int, num_reqs: int, index: int, draw: random.Random) -> Speculative:
    schedule: tuple[tuple[int, int, int], ...] = ()
    if k > 1 and draw.random() < 0.5:
        first = draw.randint(1, num_reqs - 1)
        schedule = ((1, first, k), (first + 1, num_reqs, draw.choice([less for less in DRAFTS if less < k])))
    return Speculative(
        method=draw.choice((Method.EAGLE, Method.EAGLE3)),
        num_tokens=k,
        schedule=schedule,
        chain=tuple(Chain)[index // len(DRAFTS) % 2],
    )


def small(case: Case, k: int) -> Spec:
    """Return the spec of a deployment that is over in a second: whole graphs, pieces, a fused chain."""
    spec = tiny(case, 0, random.Random(0))
    return replace(
        spec,
        model=replace(spec.model, dtype=case.dtypes[-1]),
        limits=Limits(max_num_reqs=3, max_num_tokens=32),
        mode=GraphMode.FULL_AND_PIECEWISE,
        speculative=Speculative(method=Method.EAGLE3, num_tokens=k) if k else None,
        sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(16,), num_reqs=(1, 3)),
    )


def qwen(case: Case, k: int) -> Spec:
    """Return a spec of Qwen3-0.6B's shape: a few sizes, whole graphs and piecewise ones."""
    return Spec(
        model=small_model(max_model_len=512, dtype=case.dtypes[-1]),
        limits=Limits(max_num_reqs=8, max_num_tokens=128),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend=case.backend,
        speculative=Speculative(method=Method.EAGLE3, num_tokens=k, model=DraftModel(vocab_size=DRAFT_VOCABULARY))
        if k
        else None,
        sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(64, 128), num_reqs=(2, 8)),
    )


@functools.lru_cache(maxsize=2)
def _large(dtype: DataType, device: torch.device) -> TargetModel:
    """Return the 0.6B model with random weights; the last ones are kept, as they take seconds."""
    model = small_model(max_model_len=512, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        write_small_config(Path(folder))
        return load_target(Path(folder), model, device=device, dtype=getattr(torch, dtype.value))


@functools.lru_cache(maxsize=1)
def _compilation(target: int) -> Compilation:
    """Return what the runs of a model share, by its ``id``; the last one's is kept, and with it the model."""
    return Compilation()


@attrs.frozen(kw_only=True, eq=False)
class Deployment:
    """A plan with everything that it takes to run it."""

    plan: Plan
    target: TargetModel
    pages: PageFormat
    requests: tuple[Request, ...]
    kind: str
    """Where drafts come from: a random head, the answers by chance, or the answers."""
    seed: int
    device: torch.device
    grapher: Grapher

    def serve(
        self, plan: Plan, answers: Answers | None = None, *, observer: ForwardObserver | None = None, **options: Any
    ) -> Run:
        """Serve all requests by a plan; ``observer`` sees its forwards.

        Bodies are not compiled unless ``options`` say so, since each tiny model would take seconds.
        """
        drafter = None
        if plan.speculative is not None:
            drafter = choose_drafter(
                self.kind,  # type: ignore[arg-type]
                plan.speculative,
                self.target,
                num_states=plan.limits.max_num_reqs,
                length=plan.model.max_model_len + plan.speculative.num_tokens + 1,
                seed=self.seed,
            )
        runner = Runner(
            plan,
            self.target,
            drafter,
            REGISTRY,
            self.grapher,
            pages=self.pages,
            device=self.device,
            options=Options(**{"compile": False} | options),
            observer=observer,
            compilation=_compilation(id(self.target)),
        )
        with runner:
            runner.capture()
            served = runner.serve(self.requests, answers=answers)
            pools = {id(role.graphs.pool): role.graphs.pool for role in runner.roles.values() if role.graphs.pool}
            return Run(
                tokens={done.name: done.tokens for done in served},
                session=runner.session,
                pool_bytes=sum(pool.memory for pool in pools.values()),
                ahead=runner.policy.run_ahead,
                not_compiled=tuple(runner.compilation.not_compiled),
            )


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """What came of serving a deployment once."""

    tokens: Tokens
    session: Session
    pool_bytes: int
    ahead: bool
    """Whether steps were launched before the tokens of the one before were read."""
    not_compiled: tuple[str, ...] = ()
    """Of compiled bodies, what could not be."""


def deployment(
    case: Case,
    spec: Spec,
    device: torch.device,
    grapher: Grapher,
    *,
    seed: int,
    requests: int,
    prompts: tuple[int, int] = (1, 100),
    outputs: tuple[int, int] = (1, 80),
) -> Deployment:
    """Return a deployment of a spec; what the spec leaves open follows from the seed."""
    draw = random.Random(f"{case.name} {seed}")
    plan = make_plan(spec, environment(case, device), REGISTRY)
    large = spec.model.name != "tiny"
    page_size = 64 if large else draw.choice(case.page_sizes)
    each = -(-spec.model.max_model_len // page_size)
    dtype = getattr(torch, spec.model.dtype.value)
    return Deployment(
        plan=plan,
        target=_large(spec.model.dtype, device)
        if large
        else load_target(None, plan.model, device=device, dtype=dtype, seed=seed),
        pages=PageFormat(page_size=page_size, num_pages=1 + spec.limits.max_num_reqs * each),
        requests=generated(
            requests,
            seed=seed,
            rate=draw.choice((None, 50, 400)),
            prompt_tokens=prompts,
            output_tokens=outputs,
            vocab_size=spec.model.vocab_size or VOCABULARY,
        ),
        kind=draw.choice(KINDS),
        seed=seed,
        device=device,
        grapher=grapher,
    )
