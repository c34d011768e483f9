"""Check LoRA of the runner: batches of mixed adapters from graphs, each request against its adapter alone.

Whatever a batch holds next to it, a request has the tokens of the model with its own adapter, and padded tokens have
none. The model is a tiny Llama in float64 with random weights; answers are computed densely, a request at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins.backend import Scoring
from capture_planner.records.backend import LORA_FIELDS
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Lora, Policy, Sizes, Spec
from capture_planner_conformance.failure import Check, Violation, located
from capture_planner_conformance.stage import under_test
from capture_planner_conformance.suite import search_settings
from capture_planner_runner.execution.attention import LayerCalls
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import ForwardObserver, RoleRun
from capture_planner_runner.models.adapters import Adapter, LoraAdapters, Product, random_adapters
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import HuggingFaceModel, load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

MODEL = Model(
    name="tiny", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, hidden_size=16, vocab_size=61,
    max_model_len=32, dtype=DataType.FLOAT64,
)  # fmt: skip
LIMITS = Limits(max_num_reqs=4, max_num_tokens=24)
NUM_ADAPTERS = 3


def check_adapters(seed: int, workloads: int = 30) -> str | None:
    """Serve so many random workloads with the reference backend; return what is wrong with one that fails, or None.

    The same seed draws the same workloads. A runner serves many of them, so a failure may need what was served before:
    it is said then that it comes and goes.
    """
    subject = under_test("reference")
    target = load_target(None, MODEL, device=subject.device, dtype=torch.float64, seed=1)
    adapters = random_adapters(target.linears(), NUM_ADAPTERS, seed=2)
    watch, messages = _Padding(), list[str]()
    with ExitStack() as releases:
        runners = []
        for plan in _plans():
            pages = PageFormat(page_size=4, num_pages=1 + LIMITS.max_num_reqs * 8)
            drafter = None
            if plan.speculative is not None:
                drafter = choose_drafter("random", plan.speculative, target, num_states=4, length=40)
            loaded = LoraAdapters(target.linears(), adapters)
            runner = Runner(
                plan,
                target,
                drafter,
                subject.registry,
                subject.grapher,
                pages=pages,
                options=Options(compile=False),
                observer=watch,
                adapters=loaded,
            )
            releases.enter_context(runner)
            runner.capture()
            runners.append(runner)

        @hypothesis.seed(seed)
        @search_settings(workloads)
        @hypothesis.given(st.sampled_from(range(len(runners))), _workloads())
        def hold(index: int, requests: tuple[Request, ...]) -> None:
            try:
                served = {done.name: done.tokens for done in runners[index].serve(requests)}
                for request in requests:
                    _check_tokens(target, adapters, request, served[request.name])
            except Violation as violation:
                messages.append(violation.failure.message)
                raise

        try:
            hold()
        except Violation as violation:
            return violation.failure.message
        except hypothesis.errors.Flaky:
            return f"{messages[0]} (it comes and goes with what was served before)"
        return None


def _plans() -> Iterator[Plan]:
    """Yield plans whose graphs leave much padding: with and without drafts, adapters specialised by number or not."""
    subject = under_test("reference")
    drafts = Speculative(method=Method.EAGLE, num_tokens=2)
    for specialize, speculative in itertools.product((True, False), (None, drafts)):
        spec = Spec(
            model=MODEL,
            limits=LIMITS,
            mode=GraphMode.FULL_AND_PIECEWISE,
            backend=subject.backend,
            speculative=speculative,
            sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(2, 4), num_tokens=(8, 24)),
            lora=Lora(max_active=2, specialize=specialize),
        )
        yield make_plan(spec, subject.environment, subject.registry)


@st.composite
def _workloads(draw: st.DrawFn) -> tuple[Request, ...]:
    """Return requests with any adapters; most prompts are one token, so that one often takes a finished one's row."""
    some = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, NUM_ADAPTERS)), min_size=2, max_size=8))
    return tuple(
        Request(
            name=str(number),
            arrival=0.0,
            prompt=(token,) * draw(st.sampled_from((1, 1, 1, 2, 5))),
            max_new_tokens=draw(st.integers(1, 5)),
            adapter=adapter,
        )
        for number, (token, adapter) in enumerate(some)
    )


class _Padding(ForwardObserver):
    """Checks before each forward that the padding of what LoRA reads is its fill: no adapter."""

    def forward(self, role: RoleRun, step: ForwardStep) -> AbstractContextManager[None]:
        if role.role is Role.TARGET:
            for field in LORA_FIELDS:
                held, real = role.fields[field.name], step.inputs.array(field.name)
                padding = held[0 if real is None else len(real) :]
                if bool(padding.ne(field.value or 0).any()):
                    with located(step.batch, step.entry):
                        raise Check.FILLED.violation(
                            f"the padding of {field.name} must be {field.value}, and is {padding.tolist()[0]}"
                        )
        return super().forward(role, step)


@torch.no_grad()
def _check_tokens(
    target: HuggingFaceModel, adapters: tuple[Adapter, ...], request: Request, tokens: tuple[int, ...]
) -> None:
    """Check that each token is the likeliest of the model with the request's adapter, after those before it."""
    ids = torch.tensor([*request.prompt, *tokens[:-1]])
    own: Mapping[str, Product] = adapters[request.adapter - 1].products if request.adapter else {}
    with ExitStack() as hooks:
        for name, layer in target.linears().items():
            if name in own:
                hooks.callback(layer.register_forward_hook(partial(_added, own[name])).remove)
        positions = torch.arange(len(ids))
        attend = LayerCalls(_dense, torch.ones_like(positions))
        hidden, _ = target.forward(input_ids=ids, embeddings=None, positions=positions, attend=attend)
    logits = target.logits(hidden[len(request.prompt) - 1 :])
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    wrong = chosen < logits.max(1).values - 1e-9
    if len(tokens) != request.max_new_tokens or bool(wrong.any()):
        number = int(wrong.to(torch.int64).argmax())
        raise Check.TOKENS.violation(
            f"token {number + 1} of {request.name} is not the greedy choice of the model with adapter {request.adapter}"
        )


def _added(product: Product, layer: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output + functional.linear(functional.linear(given[0], product.down.double()), product.up.double())


def _dense(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attend causally over one request, ``[T, heads, dim]``."""
    times = query.shape[1] // keys.shape[1]
    heads = (query, keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1))
    q, k, v = (each.transpose(0, 1) for each in heads)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale).transpose(0, 1)
