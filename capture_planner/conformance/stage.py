"""A scene that is set up: plan, runner and graphs; and what each step does, with all its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch

from capture_planner.analysis.lint import Severity, lint
from capture_planner.conformance.drafts import check_drafts
from capture_planner.conformance.finding import Check, Finding, Violation
from capture_planner.conformance.outputs import Outputs
from capture_planner.conformance.probe import Heads, ProbeDrafter, ProbeTarget, Tables
from capture_planner.conformance.rows import Rows
from capture_planner.conformance.scene import (
    VOCABULARY,
    Arrive,
    Depart,
    Forward,
    Move,
    Reload,
    Scene,
    Serve,
    Step,
)
from capture_planner.conformance.served import check_serving
from capture_planner.conformance.targets import check_target
from capture_planner.conformance.watch import EAGER, Watch, in_words
from capture_planner.conformance.world import Family, Live, World
from capture_planner.modes import Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
from capture_planner.runtime.execution.chain import run_chain
from capture_planner.runtime.execution.inputs import StepInputs
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""How far a row may be off, by its norm: what kernels of that type round, and far below one wrong key."""

SPARE_PLACES = 2
"""Requests' worth of pages that are free beside those that all places take."""


@attrs.frozen(kw_only=True)
class Tested:
    """What is put through: a backend of a registry, on a device, planned for an environment."""

    backend: str
    registry: Registry
    environment: Environment
    device: torch.device
    grapher: Grapher


class Stage:
    """One scene. Use it as a context: leaving releases the backend."""

    def __init__(
        self,
        tested: Tested,
        scene: Scene,
        *,
        spared: Sequence[str] = (),
        trusting: bool = False,
        tamper: Callable[[Runner], None] = lambda runner: None,
    ) -> None:
        """Plan, assemble and capture; raises ``Violation`` where that shows a fault.

        ``spared`` are sources of garbage that are left clean. ``tamper`` is called before anything is
        captured: an audit changes there how the runner treats a field, and is ``trusting`` then: what
        stands in fields is not checked.
        """
        self.scene, self.tested = scene, tested
        self._turn = True
        self.plan = make_plan(scene.spec(tested.backend), tested.environment, tested.registry)
        errors = [found for found in lint(self.plan) if found.rule.severity is Severity.ERROR]
        if errors:
            raise Violation(Finding(check=Check.PLANNED, says=str(errors[0]), role=errors[0].diagnostic.role))
        shape, device = scene.shape, tested.device
        self.tolerance = TOLERANCE[shape.dtype]
        self.target, self.drafter = _models(scene, self.plan, device)
        each = -(-shape.longest // shape.page_size)
        pages = PageFormat(page_size=shape.page_size, num_pages=1 + (scene.num_reqs + SPARE_PLACES) * each)
        self.runner = Runner(
            self.plan,
            self.target,
            self.drafter,
            tested.registry,
            tested.grapher,
            pages=pages,
            device=device,
            options=Options(run_ahead=scene.ahead, drafts_on_device=scene.ahead),
        )
        try:
            tamper(self.runner)
            outputs = Outputs()
            for role in self.runner.parts.roles.values():
                outputs.watch(role)
            self.runner.capture()
            self.world = World(
                tuple(self._families()), pages, scene.num_reqs, shape.longest, scene.drafts + 2, scene.seed
            )
            for source in self.world.is_spoilt:
                self.world.is_spoilt[source] = source not in spared
            self.world.refresh()
            self.watch = Watch(self.runner, self.world, spared, trusting=trusting, outputs=outputs)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the backend."""
        self.runner.__exit__()

    def _families(self) -> Iterator[Family]:
        roles = self.runner.parts.roles
        models: dict[Role, Tables] = {Role.TARGET: self.target.tables}
        if self.drafter is not None:
            models[Role.DRAFT_PREFILL] = self.drafter.tables
        for role, tables in models.items():
            found = {layer: cache for group in roles[role].groups for layer, cache in group.caches.items()}
            yield Family(tables, [found[layer] for layer in sorted(found)], int(role.is_drafter))

    # Steps.

    @property
    def live(self) -> dict[int, Live]:
        """The requests that are there, by number."""
        return self.world.live

    def draft_tokens(self, num_reqs: int) -> int:
        """Return k for a batch of so many requests."""
        return 0 if self.plan.speculative is None else self.plan.speculative.draft_tokens(num_reqs)

    @torch.no_grad()
    def do(self, step: Step) -> bool:
        """Do one step; raises ``Violation`` for what does not hold.

        Returns False for a step that does not apply, which is left out: a request that is not there, or a
        batch that the limits do not admit.
        """
        match step:
            case Arrive():
                self.world.arrive(step)
            case Depart() if step.request in self.live:
                self.world.depart(self.live[step.request])
            case Move() if step.request in self.live:
                self.world.move(self.live[step.request])
            case Reload():
                self.target.tables.load(step.seed)
                if self.drafter is not None:
                    self.drafter.tables.load(step.seed + 1)
                self.world.refresh()
            case Forward():
                return self._forward(step)
            case Serve():
                check_serving(self, step)
            case _:
                return False
        return True

    def admits(self, rows: Sequence[tuple[Live, int, int]]) -> bool:
        """Say whether the limits admit a batch of these rows."""
        limits, tokens = self.plan.limits, sum(count for _, count, _ in rows)
        return (
            len(rows) <= min(limits.max_num_reqs, tokens)
            and tokens <= limits.max_num_tokens
            and all(live.computed + count <= self.scene.shape.longest for live, count, _ in rows)
        )

    def _forward(self, step: Forward) -> bool:
        rows = [
            (self.live[request], count, max(0, min(kept, count - 1)))
            for request, count, kept in step.rows
            if request in self.live
        ]
        if not rows or not self.admits(rows):
            return False
        batch = Rows(self, rows)
        made = batch.target()

        def forward(eager: bool) -> None:
            entry = self.run(Role.TARGET, batch.batch(Role.TARGET), made, eager=eager)
            check_target(self, batch, entry, eager=eager)

        self.both_ways(forward)
        k = self.draft_tokens(len(rows))
        if self.drafter is not None and k and all(count for _, count, _ in rows):
            check_drafts(self, batch, made, k)
        for live, count, kept in rows:
            live.computed += batch.settled(live, count, kept)
        for live, _, _ in rows:
            self.world.compute(live)
        return True

    def both_ways(self, forward: Callable[[bool], None]) -> None:
        """Run a forward eager and from its graph, and which of them is the first in turns.

        What a backend keeps from one forward to the next is made right by an eager one of the same batch.
        Where rows of the graph, run first, are wrong, an eager run says whether it is the graph's fault.
        """
        self._turn = not self._turn
        for eager in (self._turn, not self._turn):
            try:
                forward(eager)
            except Violation as violation:
                if violation.finding.check is Check.ROWS and not self._turn:
                    self._refuse_eager(forward)
                raise

    @staticmethod
    def _refuse_eager(forward: Callable[[bool], None]) -> None:
        """Raise the violation of an eager run, where its rows are wrong as well."""
        try:
            forward(True)
        except Violation as violation:
            if violation.finding.check is Check.EAGER:
                raise

    def run(self, role: Role, batch: Batch, made: StepInputs, *, eager: bool, steps: int = 1) -> Entry | None:
        """Run one forward, or a chain of them, from a graph or eager."""
        run = self.runner.parts.roles[role]
        longest = self.scene.shape.longest
        dispatch = EAGER if eager else self.runner.dispatcher.dispatch(batch)
        run_chain(run, batch, dispatch, made, steps, max_model_len=longest)
        return dispatch.entry

    # Beside.

    def on(self, array: np.ndarray) -> torch.Tensor:
        """Return an array on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.tested.device)

    def refuse(
        self, check: Check, says: str, batch: Rows | None, role: Role | None, entry: Entry | None
    ) -> None:
        """Raise the violation of a check."""
        words = "" if batch is None or role is None else in_words(batch.batch(role))
        raise Violation(Finding(check=check, says=says, role=role, entry=entry, batch=words))


def _models(scene: Scene, plan: Plan, device: torch.device) -> tuple[ProbeTarget, ProbeDrafter | None]:
    """Make the probe models of a plan."""
    dtype, shape = getattr(torch, scene.shape.dtype), scene.shape
    windows = tuple(group.window for group in plan.role(Role.TARGET).groups for _ in range(group.layers))
    heads = Heads(
        layers=plan.model.num_layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        windows=windows,
    )
    tables = Tables(heads, VOCABULARY, shape.longest, dtype, device, scene.seed)
    target = ProbeTarget(tables, VOCABULARY, shape.longest, scene.seed + 1)
    if plan.speculative is None:
        return target, None
    attention = Attention.of(plan, Role.DRAFT_DECODE, layers=1, window=None)
    heads = Heads(
        layers=plan.speculative.model.num_layers,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        windows=(None,) * plan.speculative.model.num_layers,
    )
    tables = Tables(heads, VOCABULARY, shape.longest, dtype, device, scene.seed + 2)
    aux = (0,) if scene.eagle3 else ()
    return target, ProbeDrafter(tables, target, aux, scene.seed + 3)
