"""Small worlds that run: a plan that the planner made, a random model and drafter, a few requests.

All computation is in float64, where a graph and an eager step differ by rounding alone.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_runner.execution.fields import tensor_of
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import ForwardObserver, RoleRun
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.models.protocols import Drafter, TargetModel
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request
from support.probe import Probe

PLANS = Path(__file__).parents[2] / "plans"
SPEC = codec.load_spec(PLANS / "specs" / "tiny-reference-cpu.yaml")
CPU = codec.load_environment(PLANS / "environments" / "cpu.yaml")
LONGEST = 24
"""Tokens of the longest sequence."""
VOCABULARY = 32


INSTALLED = registry.load_backends(Probe())
"""The installed backends, and ``probe``, whose draft decodes need the host before each step."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class World:
    """A plan with everything that it takes to run it."""

    plan: Plan
    spec: Spec
    target: TargetModel
    drafter: Drafter | None
    pages: PageFormat
    seed: int
    registry: Registry = INSTALLED

    def __repr__(self) -> str:
        spec, drafter = self.spec, "" if self.drafter is None else f", drafts by {self.drafter.name}"
        schedule = "" if spec.speculative is None else f", {list(spec.speculative.tiers(99))}"
        return (
            f"<{spec.mode.value} on {spec.backend}, {spec.pool.value} pool, {spec.limits}, sizes of "
            f"{spec.sizes.num_tokens} tokens and {spec.sizes.num_reqs} requests{schedule}{drafter}, "
            f"{self.pages}, {self.target.num_layers} layers, {self.target.num_kv_heads} KV heads, seed "
            f"{self.seed}{', embeddings' if spec.model.embeddings else ''}>"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Keep Hypothesis from printing the whole plan."""
        printer.text(repr(self))

    def runner(self, plan: Plan | None = None, *, grapher: Grapher | None = None, **options: Any) -> Runner:
        """Put it together, of this plan or of another; graphs are recorded."""
        plan = plan or self.plan
        drafter = None if plan.speculative is None else self.drafter
        grapher = grapher or RecordedGraphs()
        return Runner(plan, self.target, drafter, self.registry, grapher, pages=self.pages, **options)


def _model(layers: int, kv_heads: int, embeddings: bool = False) -> Model:
    return replace(
        SPEC.model,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=kv_heads,
        head_dim=8,
        hidden_size=16,
        vocab_size=VOCABULARY,
        max_model_len=LONGEST,
        dtype=DataType.FLOAT64,
        embeddings=embeddings,
    )


@functools.cache
def _target(layers: int, kv_heads: int, seed: int) -> TargetModel:
    model = _model(layers, kv_heads)
    return load_target(None, model, device=torch.device("cpu"), dtype=torch.float64, seed=seed)


def spec_of(
    *,
    k: int = 2,
    num_reqs: int = 3,
    num_tokens: int = 16,
    layers: int = 1,
    kv_heads: int = 1,
    method: Method = Method.EAGLE,
    parallel: bool = False,
    draft_layers: int = 1,
    schedule: tuple[tuple[int, int, int], ...] = (),
    embeddings: bool = False,
    **changes: Any,
) -> Spec:
    """Return a spec of a tiny model; ``changes`` are fields of the spec."""
    speculative = None
    if k:
        speculative = Speculative(
            method=method,
            num_tokens=k,
            schedule=schedule,
            model=DraftModel(num_layers=draft_layers),
            parallel_drafting=parallel,
        )
    return replace(
        SPEC,
        model=_model(layers, kv_heads, embeddings),
        limits=Limits(max_num_reqs=num_reqs, max_num_tokens=num_tokens),
        speculative=speculative,
        **changes,
    )


def world_of(
    spec: Spec,
    *,
    registry: Registry = INSTALLED,
    page_size: int = 4,
    seed: int = 0,
    drafts: Any = "random",
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> World:
    """Plan a spec and make its models; ``change`` is what somebody did to the plan afterwards."""
    plan = change(make_plan(spec, CPU, registry))
    target = _target(spec.model.num_layers, spec.model.num_kv_heads, seed)
    drafter = None
    if plan.speculative is not None:
        drafter = choose_drafter(
            drafts,
            plan.speculative,
            target,
            num_states=plan.limits.max_num_reqs,
            length=LONGEST + plan.speculative.num_tokens + 1,
            seed=seed + 1,
        )
    pages = PageFormat(page_size=page_size, num_pages=1 + plan.limits.max_num_reqs * -(-LONGEST // page_size))
    return World(plan=plan, spec=spec, target=target, drafter=drafter, pages=pages, seed=seed, registry=registry)


@st.composite
def worlds(draw: st.DrawFn, modes: Sequence[GraphMode] = tuple(GraphMode)) -> World:
    """Any mode and pool, both kinds of draft decode, graphs of a few sizes that leave much padding."""
    num_reqs, num_tokens = draw(st.integers(2, 5)), draw(st.integers(8, 32))
    k = draw(st.integers(0, 4))
    schedule: Any = ()
    if k > 1 and draw(st.booleans()):
        schedule = ((1, 1, k), (2, num_reqs, draw(st.integers(1, k - 1))))
    method = draw(st.sampled_from(Method))
    parallel = method is not Method.MTP and draw(st.booleans())
    # Of MTP a module for each draft, or one for all.
    draft_layers = draw(st.sampled_from((1, max(k, 1) if method is Method.MTP else 2)))
    sizes = Sizes(
        policy=Policy.EXPLICIT,
        num_tokens=tuple({num_tokens, draw(st.integers(2, num_tokens))}),
        num_reqs=tuple({num_reqs, draw(st.integers(1, num_reqs))}),
    )
    spec = spec_of(
        k=k,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        layers=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 2)),
        method=method,
        parallel=parallel,
        draft_layers=draft_layers,
        schedule=schedule,
        embeddings=draw(st.booleans()),
        mode=draw(st.sampled_from(modes)),
        pool=draw(st.sampled_from(Pool)),
        backend=draw(st.sampled_from(("reference", "probe"))),
        sizes=sizes,
    )
    return world_of(
        spec,
        page_size=draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 3)),
        drafts=draw(st.sampled_from(("random", "chance", "copy"))),
    )


def requests_of(world: World, seed: int) -> tuple[Request, ...]:
    """Return requests in waves: all places taken, then one alone, then all again."""
    random = np.random.default_rng(seed)
    most = world.plan.limits.max_num_reqs
    found = []
    for wave in range(2):
        for index in range(most):
            stays = wave == 0 and index == 0
            output = 8 if stays else int(random.integers(1, 4))
            prompt = random.integers(0, VOCABULARY, int(random.integers(1, LONGEST - output + 1)))
            found.append(
                Request(
                    name=f"{wave}.{index}",
                    arrival=float(wave),
                    prompt=tuple(int(token) for token in prompt),
                    max_new_tokens=output,
                )
            )
    return tuple(found)


def serve(runner: Runner, requests: Sequence[Request], answers: Any = None) -> dict[str, tuple[int, ...]]:
    """Serve, and return what each request was given. A wave comes when one request is left, or none."""
    serving = runner.start(answers=answers)
    for _, wave in itertools.groupby(requests, key=lambda request: request.arrival):
        while len(serving.scheduler.unfinished) + serving.scheduler.waiting > 1:
            serving.step()
        serving.step()
        for request in wave:
            serving.scheduler.submit(request, 0.0)
    while not serving.scheduler.done:
        serving.step()
    return {served.name: served.tokens for served in serving.served}


# What a forward touched.


def caches_of(runner: Runner) -> dict[str, torch.Tensor]:
    """Return the keys and values of every layer, ``[slots, width]``, by role family and layer."""
    return {
        f"{'draft' if role.role.is_drafter else 'target'}.{kind}[{layer}]": tensor.flatten(0, 1).flatten(1)
        for role in runner.roles.values()
        for group in role.groups
        for layer, cache in group.caches.items()
        for kind, tensor in (("keys", cache.keys), ("values", cache.values))
    }


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor: equal where even NaNs are the same."""
    return bytes(tensor.contiguous().numpy().tobytes())


@attrs.frozen(kw_only=True, eq=False)
class Moment:
    """One forward that is about to run, all of it staged."""

    runner: Runner
    role: RoleRun
    entry: Entry | None
    num_tokens: int
    num_reqs: int
    """Real extents."""
    padded_tokens: int
    padded_reqs: int

    @property
    def places(self) -> torch.Tensor:
        """``int64[R]``: the rows of the draft state that are the batch's."""
        return self.role.fields["idx_mapping"][: self.num_reqs].long()

    def slots(self) -> set[int]:
        """Return the slots that the batch owns and this forward may write, null slot left out."""
        written = set(self.role.fields["slot_mapping"][: self.num_tokens].tolist())
        if self.entry is not None and self.entry.draft_steps:
            table = self.role.fields["block_table"][: self.num_reqs].long()
            size = self.runner.pages.page_size
            for row, first in enumerate(self.role.fields["positions"][: self.num_reqs].tolist()):
                for position in range(first + 1, min(first + self.entry.draft_steps, LONGEST)):
                    written.add(int(table[row, position // size]) * size + position % size)
        return written - {0}


def persistent(runner: Runner) -> dict[str, torch.Tensor]:
    """Return every persistent tensor of every role by its name."""
    return {held[0]: tensor_of(held) for role in runner.roles.values() for held in role.persistent()}


class Watcher(ForwardObserver):
    """Observes the forwards of a runner that it was handed to, while ``watching`` lasts."""

    def __init__(self) -> None:
        self._around: Callable[[RoleRun, ForwardStep], AbstractContextManager[None]] = super().forward

    def forward(self, role: RoleRun, step: ForwardStep) -> AbstractContextManager[None]:
        return self._around(role, step)

    @contextmanager
    def watching(
        self,
        runner: Runner,
        before: Callable[[Moment], Any] = lambda _: None,
        after: Callable[[Moment, Any], object] = lambda *_: None,
    ) -> Iterator[dict[tuple[int, Role], list[dict[str, torch.Tensor]]]]:
        """Call ``before`` each forward and ``after`` it, with what ``before`` returned.

        Yields what the real rows of each forward became, by step and role.
        """
        found: dict[tuple[int, Role], list[dict[str, torch.Tensor]]] = defaultdict(list)
        first, inner = len(runner.session.steps), self._around

        @contextmanager
        def around(role: RoleRun, step: ForwardStep) -> Iterator[None]:
            extents = step.extents
            reqs = int((role.fields["idx_mapping"][: extents.reqs] >= 0).sum())
            moment = Moment(
                runner=runner,
                role=role,
                entry=step.entry,
                num_tokens=int(role.fields["query_start_loc"][reqs]),
                num_reqs=reqs,
                padded_tokens=extents.tokens,
                padded_reqs=extents.reqs,
            )
            kept = before(moment)
            with inner(role, step):
                yield
            found[len(runner.session.steps) - first, role.role].append(_real_rows(moment))
            after(moment, kept)

        self._around = around
        try:
            yield found
        finally:
            self._around = inner


def _real_rows(moment: Moment) -> dict[str, torch.Tensor]:
    """Return copies of what a forward computed for real rows."""
    runner, rows = moment.runner, moment.num_tokens
    if moment.role.role is Role.TARGET:
        body = runner.target
        found = {"hidden": body.hidden[:rows]}
        if body.aux is not None:
            found["aux"] = body.aux[:rows]
        if moment.entry is not None and moment.entry.query_len is not None:
            found["tokens"] = body.tokens[:rows]
    else:
        state = runner.draft_state
        assert state is not None, "a drafter has a state"
        found = {"token": state.token[moment.places], "state": state.hidden[moment.places]}
        if moment.role.role is Role.DRAFT_PREFILL:
            found["hidden"] = moment.role.body.hidden[:rows]  # type: ignore[attr-defined]
    return {name: tensor.clone() for name, tensor in found.items()}
