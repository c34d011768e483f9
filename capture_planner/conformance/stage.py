"""A scene that is set up: plan, models, runner, graphs and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch

from capture_planner.analysis.lint import Severity, lint
from capture_planner.conformance.capture_attack import InjectedError, WatchedGraphs
from capture_planner.conformance.draft_scheme import DraftScheme
from capture_planner.conformance.failure import Check, Violation
from capture_planner.conformance.probe import GARBAGE, LayerShape, ProbeDrafter, ProbeTarget, Rows, Tables
from capture_planner.conformance.scene import VOCABULARY, Scene
from capture_planner.conformance.subject import Subject
from capture_planner.conformance.tampering import Tampering
from capture_planner.conformance.watch import EAGER, Watch
from capture_planner.conformance.widening import widened
from capture_planner.conformance.world import ModelCache, World
from capture_planner.modes import Reason, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import most_loras
from capture_planner.records.plan import Plan
from capture_planner.runtime.assembly import kv_dtype_of
from capture_planner.runtime.execution.chains import run_chain
from capture_planner.runtime.execution.inputs import ForwardStep, StepInputs
from capture_planner.runtime.execution.role import RoleRun
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Relative error of a row's norm: more than kernels of that type round, far less than one wrong key."""

SOFTCAP = 1.5
"""Close to the scores of the probe, so that it matters."""

SHARP = 1.6
"""What scales differ from the usual one by."""

SPARE_REQS = 2
"""Requests whose pages are free in addition to the pages of all places."""


class Stage(AbstractContextManager["Stage"]):
    """One scene. Use it as a context: leaving releases the backend."""

    def __init__(
        self,
        subject: Subject,
        scene: Scene,
        *,
        spared: Sequence[str] = (),
        tampering: Tampering | None = None,
        after: Callable[[Stage, RoleRun, ForwardStep], None] | None = None,
    ) -> None:
        """Plan, assemble and capture; raises ``Violation`` for a failure that this shows.

        :param spared: sources of garbage that are left clean.
        :param tampering: how an audit treats a field. Fields are not checked then.
        :param after: called after the checks of each forward.
        """
        self.scene, self.subject = scene, subject
        self._eager_first = True
        self.plan = make_plan(scene.spec(subject.backend), subject.environment, subject.registry)
        if scene.beyond:
            self.plan = widened(self.plan, scene.beyond, subject.registry)
        for finding in lint(self.plan):
            if finding.rule.severity is Severity.ERROR:
                raise Check.PLANNED.violation(str(finding), role=finding.diagnostic.role)
        shape, device = scene.shape, subject.device
        self.tolerance = TOLERANCE[shape.dtype]
        padding = None if "padded rows" in spared else GARBAGE[scene.seed % len(GARBAGE)]
        of_rows = Rows(coupled=scene.coupled, padding=padding)
        self.target, self.drafter = _models(scene, self.plan, of_rows, device)
        each = -(-shape.longest // shape.page_size)
        reqs = -(-scene.num_reqs // 2) if scene.full_cache else scene.num_reqs + SPARE_REQS
        pages = PageFormat(page_size=shape.page_size, num_pages=1 + reqs * each)
        self.graphs = WatchedGraphs(subject.grapher, scene.capture)
        self.watch = Watch(self.graphs, spared, tampering, None if after is None else partial(after, self))
        self.runner = Runner(
            self.plan,
            self.target,
            self.drafter,
            subject.registry,
            self.graphs,
            pages=pages,
            device=device,
            options=Options(run_ahead=scene.ahead, drafts_on_device=scene.ahead, compile=scene.compiled),
            observer=self.watch,
        )
        try:
            if tampering is not None:
                tampering.begin(self.runner)
            self._capture()
            rows = self.plan.states.rows if self.plan.states else 1 + scene.num_reqs
            self.world = World(tuple(self._caches()), pages, scene, rows, spared)
            self.live = self.world.live
            """The live requests by number."""
            self.watch.begin(self.runner, self.world)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.runner.__exit__()

    def _capture(self) -> None:
        """Capture as the scene says; what is left of the session, or born in it, is a violation."""
        attack = self.scene.capture
        if not attack.breaks or (self._broke_off() and not attack.stays_eager):
            with self.graphs.session():
                self.runner.capture(order=attack.arranged)
        self._check_born()

    def capture_asked(self) -> None:
        """Capture what the batches of a lazy plan asked for; it must leave live requests and states alone.

        What was captured while requests were served is looked at, too.
        """
        first_use = self.runner.first_use()
        if first_use is not None and first_use.is_due():
            self.watch.between(first_use.capture)
        for done in self.runner.session.captured:
            if done.waiver is not None and done.waiver.reason is Reason.LAZY:
                raise Check.RAN.violation(done.waiver.message, role=done.role, entry=done.entry)
        self._check_born()

    def _check_born(self) -> None:
        for (role, entry), left in self.graphs.leftovers.items():
            raise Check.BORN.violation(
                f"{left.size:,} bytes that the capture made are kept after it, by {', '.join(left.holders[:3])}, where "
                "the next replay overwrites them; make what lasts in reserve",
                role=role,
                entry=entry,
            )

    def _broke_off(self) -> bool:
        """Capture with an error in the middle of it, and check what is left; False: it was over before."""
        attack, runner = self.scene.capture, self.runner
        error: Exception | None = None
        with self.graphs.session(breaks=attack.breaks):
            try:
                runner.capture(order=attack.arranged)
            except Exception as raised:
                error = raised
        if self.graphs.broken is None:
            if error is not None:
                raise error
            return False
        role, entry = self.graphs.broken
        where = {"role": role, "entry": entry}
        if error is None:
            raise Check.RECOVERED.violation("an error inside a capture session is not raised", **where)
        if not _is_injected(error):
            raise error
        if role.value not in str(error) or str(entry) not in str(error):
            raise Check.RECOVERED.violation(f"the error names no role and entry: {error}", **where)
        kept = [run.role.value for run in runner.parts.roles.values() if run.graphs]
        if kept or runner.dispatcher.plan.num_graphs:
            owner = ", ".join(kept) or "the dispatcher"
            raise Check.RECOVERED.violation(f"graphs of a session that broke off are left ({owner})", **where)
        return True

    def _caches(self) -> Iterator[ModelCache]:
        roles = self.runner.parts.roles
        models: dict[Role, Tables] = {Role.TARGET: self.target.tables}
        if self.drafter is not None:
            models[Role.DRAFT_PREFILL] = self.drafter.tables
        for role, tables in models.items():
            found = {layer: cache for group in roles[role].groups for layer, cache in group.caches.items()}
            states = roles[role].recurrent.caches
            layers = [found[layer] for layer in sorted(found)]
            yield ModelCache(tables, layers, states, self._shifts(role, len(layers)))

    def _shifts(self, role: Role, layers: int) -> tuple[int, ...]:
        """Return how much later than its position each layer of a model reads its token."""
        kind = self.scene.drafter
        if kind is DraftScheme.MODULES and role.is_drafter:
            return tuple(range(1, layers + 1))
        return (int(role.is_drafter and kind.reads_states),) * layers

    def draft_tokens(self, num_reqs: int) -> int:
        """Return k for a batch of so many requests."""
        return 0 if self.plan.speculative is None else self.plan.speculative.draft_tokens(num_reqs)

    def most_loras(self, num_reqs: int) -> int:
        """Return the most active adapters of a batch of so many requests."""
        return min(num_reqs, most_loras(Role.TARGET, self.plan))

    def reload(self, seed: int) -> None:
        self.target.tables.load(seed)
        if self.drafter is not None:
            self.drafter.tables.load(seed + 1)
        self.world.refresh()

    def both_ways(self, forward: Callable[[bool], None]) -> None:
        """Call ``forward(eager)`` eager and not, in alternating order.

        An eager run of a batch repairs what a backend keeps from one forward to the next, so the graph must
        sometimes run first. If the rows of the graph, run first, are wrong, an eager run says whether they
        are wrong without a graph as well.
        """
        self._eager_first = not self._eager_first
        for eager in (self._eager_first, not self._eager_first):
            try:
                forward(eager)
            except Violation as violation:
                if violation.failure.check is Check.ROWS and not self._eager_first:
                    _raise_if_eager_fails(forward)
                raise

    def run(self, batch: Batch, made: StepInputs, *, eager: bool, steps: int = 1) -> Entry | None:
        """Run one forward of the batch's role, or a chain of them, from a graph or eager."""
        first_use = self.runner.first_use()
        dispatch = EAGER if eager else self.runner.dispatcher.dispatch(batch)
        if first_use is not None and not eager:
            first_use.ask(batch)
        run = self.runner.parts.roles[batch.role]
        run_chain(run, batch, dispatch, made, steps, max_model_len=self.scene.shape.longest)
        return dispatch.entry

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        """Return an array as a tensor on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.subject.device)


def _is_injected(error: BaseException | None) -> bool:
    """Say whether an error comes of the one that the suite raised."""
    while error is not None and not isinstance(error, InjectedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _raise_if_eager_fails(forward: Callable[[bool], None]) -> None:
    try:
        forward(True)
    except Violation as violation:
        if violation.failure.check is Check.EAGER:
            raise


def _models(scene: Scene, plan: Plan, of_rows: Rows, device: torch.device) -> tuple[ProbeTarget, ProbeDrafter | None]:
    def tables(role: Role, windows: tuple[int | None, ...], seed: int, recurrent: int = 0) -> Tables:
        attention = Attention.of(plan, role, layers=1, window=None)
        shape = LayerShape(
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            windows=windows,
            scale_factor=SHARP if scene.sharp else 1.0,
            softcap=SOFTCAP if scene.softcap else None,
            has_sinks=scene.sinks,
            kv_dtype=kv_dtype_of(plan.model),
            recurrent=recurrent,
        )
        return Tables(shape, VOCABULARY, longest, getattr(torch, scene.shape.dtype), device, seed)

    longest, seed = scene.shape.longest, scene.seed
    windows = tuple(group.window for group in plan.role(Role.TARGET).groups for _ in range(group.layers))
    recurrent = plan.model.recurrent.layers if plan.model.recurrent else 0
    target = ProbeTarget(
        tables(Role.TARGET, windows, seed, recurrent), of_rows, VOCABULARY, longest, seed + 1, agreeing=scene.agreeing
    )
    if plan.speculative is None:
        return target, None
    drafter = tables(Role.DRAFT_PREFILL, (None,) * plan.speculative.model.num_layers, seed + 2)
    return target, ProbeDrafter(drafter, of_rows, target, scene.drafter, seed + 3, agreeing=scene.agreeing)
