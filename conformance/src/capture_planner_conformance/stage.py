"""A backend under test, and a scene that is set up for it: plan, models, runner, graphs and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import ClassVar

import attrs
import numpy as np
import torch

from capture_planner.analysis.lint import Severity, lint
from capture_planner.modes import Reason, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry as plugins
from capture_planner.plugins.backend import Backend, KernelSizes
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import grouped, replace
from capture_planner.records.backend import Attention, Support
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import most_loras, request_step, token_step
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.plan import GroupPlan, Plan, RolePlan, StatePool
from capture_planner.records.spec import Parallel
from capture_planner_conformance.distant_pages import DistantPages
from capture_planner_conformance.failure import Check, Violation
from capture_planner_conformance.probe import (
    GARBAGE,
    LayerShape,
    ProbeAdapters,
    ProbeDrafter,
    ProbeTarget,
    Rows,
    Tables,
)
from capture_planner_conformance.scene import VOCABULARY, Case, DraftScheme, Scene, loads
from capture_planner_conformance.scene_batch import Row, SceneBatch
from capture_planner_conformance.tampering import Tampering
from capture_planner_conformance.watch import EAGER, InjectedError, Watch, WatchedGraphs
from capture_planner_conformance.world import ModelCache, World
from capture_planner_runner.execution.inputs import ForwardStep, StepInputs
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.graphs.recorded import grapher_for
from capture_planner_runner.host import device_of, this_environment
from capture_planner_runner.launch.assembly import kv_dtype_of
from capture_planner_runner.numerics.tolerance import TOLERANCES
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

SOFTCAP = 1.5
"""Close to the scores of the probe, so that it matters."""

SHARP = 1.6
"""What scales differ from the usual one by."""

SPARE_REQS = 2
"""Requests whose pages are free in addition to the pages of all places."""


@attrs.frozen(kw_only=True)
class Subject:
    """A backend of a registry, on a device, planned for an environment; and what it is tested with."""

    backend: str
    registry: Registry
    environment: Environment
    device: torch.device
    grapher: Grapher
    stage: type[Stage]
    """Sets up its scenes: ``Stage``, or a subclass with more features of scenes and more checks."""

    @property
    def kernel_sizes(self) -> KernelSizes:
        """Where its kernels change, as far as it says."""
        return KernelSizes.of(self.registry[self.backend].backend)

    def loads(self, text: str) -> Case:
        """Read a case of such a scene, as ``scene.loads`` does."""
        return loads(text, self.stage.scene_type)


def under_test(
    backend: str | Backend, *, environment: Environment | None = None, stage: type[Stage] | None = None
) -> Subject:
    """Return a backend as it is tested on this machine: an installed one by its name, or any object.

    Plans are made for ``environment``, by default this machine's. Packages of a CPU host are left out,
    since no recorded graph depends on one. ``stage`` sets up its scenes, by default ``Stage``. Raises ``BackendError``
    if no backend of that name is installed.
    """
    if isinstance(backend, str):
        name, registry = backend, plugins.load_backends()
    else:
        name, registry = backend.name, plugins.load_backends(Plugin(backend), installed=False)
    machine = environment or this_environment("here")
    if machine.device.kind is DeviceKind.CPU:
        machine = Environment(name=machine.name, device=machine.device)
    device = device_of(machine)
    return Subject(
        backend=registry[name].name,
        registry=registry,
        environment=machine,
        device=device,
        grapher=grapher_for(device, accounts=False),
        stage=stage or Stage,
    )


class Plugin:
    """A plugin with one backend. Plans name it as the distribution, so its name has no underscore."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @hookimpl
    def capture_planner_backends(self) -> tuple[Backend, ...]:
        return (self._backend,)


class Stage(AbstractContextManager["Stage"]):
    """One scene. Use it as a context: leaving releases the backend.

    This is where the suite is extended: a subclass, named in ``under_test``, has scenes with more features, models with
    other layers and checks of more than a backend.
    """

    scene_type: ClassVar[type[Scene]] = Scene
    graphs_type: ClassVar[type[WatchedGraphs]] = WatchedGraphs
    watch_type: ClassVar[type[Watch]] = Watch
    batch_type: ClassVar[type[SceneBatch]] = SceneBatch

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
        self._eager_first, self._without_eager = True, tampering is not None and tampering.is_of_padding
        registry = capped(subject.registry, subject.backend, scene) if scene.capped else subject.registry
        self.plan = make_plan(scene.spec(subject.backend), subject.environment, registry)
        if scene.beyond:
            self.plan = widened(self.plan, scene.beyond, registry)
        for finding in lint(self.plan):
            if finding.rule.severity is Severity.ERROR:
                raise Check.PLANNED.violation(str(finding), role=finding.diagnostic.role)
        shape, device = scene.shape, subject.device
        self.tolerance = TOLERANCES[getattr(torch, shape.dtype)].layer
        # By the seed, so that a search tries every kind of garbage.
        padding = None if "padded rows" in spared else GARBAGE[scene.seed % len(GARBAGE)]
        self.target, self.drafter = self._models(padding)
        each = -(-shape.longest // shape.page_size)
        # A full cache holds half of the places at full length, so that pages run out before places do.
        reqs = -(-scene.num_reqs // 2) if scene.full_cache else scene.num_reqs + SPARE_REQS
        pages = PageFormat(page_size=shape.page_size, num_pages=1 + reqs * each)  # 1: the null page
        if scene.distant:
            pages = DistantPages.reserved(pages, kv_dtype_of(self.plan.model), device)
        self.graphs = self.graphs_type(subject.grapher, scene.capture)
        self.watch = self.watch_type(self.graphs, spared, tampering, None if after is None else partial(after, self))
        self.runner = Runner(
            self.plan,
            self.target,
            self.drafter,
            registry,
            self.graphs,
            pages=pages,
            device=device,
            options=self.options(),
            observer=self.watch,
            adapters=ProbeAdapters(self.target) if scene.loras else None,
        )
        try:
            if tampering is not None:
                tampering.begin(self.runner)
            self._capture()
            # After the capture, whose warm-ups would overwrite garbage in the null page.
            self.world = self.make_world(tuple(self._caches()), pages, spared)
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

    # What a subclass may add.

    def options(self) -> Options:
        """Return the options of the runner."""
        # Not compiled: each scene has its own model, and compiling it would take longer than the scene.
        return Options(run_ahead=self.scene.ahead, drafts_on_device=self.scene.ahead, compile=False)

    def tables(self, role: Role, shape: LayerShape, seed: int) -> Tables:
        """Return the layers of the model of a role."""
        dtype = getattr(torch, self.scene.shape.dtype)
        return Tables(shape, VOCABULARY, self.scene.shape.longest, dtype, self.subject.device, seed)

    def rows(self, role: Role, padding: float | None) -> Rows:
        """Return what the model of a role does with the rows of a batch."""
        return Rows(padding=padding)

    def make_world(self, caches: Sequence[ModelCache], pages: PageFormat, spared: Sequence[str]) -> World:
        """Return the requests of the scene, of which there are none yet."""
        return World(caches, pages, self.scene, spared)

    def check_ran(self, batch: SceneBatch) -> None:
        """Check what else a forward of the target did; the suite looks at rows and slots."""

    def begin_serving(self) -> None:
        """Take note of what is there before requests are served."""

    def check_served(self, requests: Sequence[Request], tokens: Mapping[str, tuple[int, ...]]) -> None:
        """Check how requests were served; ``tokens`` are their outputs by name, of the lengths asked for."""

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
            # A lazy entry whose capture was given up leaves its batches eager for good.
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
        # The session ended before the attention call that should have failed: nothing was attacked.
        if self.graphs.broken is None:
            if error is not None:
                raise error
            return False
        role, entry = self.graphs.broken
        where = {"role": role, "entry": entry}
        if error is None:
            raise Check.RECOVERED.violation("an error inside a capture session is not raised", **where)
        # Another error is the backend's own, and is reported as such.
        if not _is_injected(error):
            raise error
        if role.value not in str(error) or str(entry) not in str(error):
            raise Check.RECOVERED.violation(f"the error names no role and entry: {error}", **where)
        # A graph of a broken session may replay a kernel that was never recorded.
        kept = [run.role.value for run in runner.roles.values() if run.graphs]
        if kept or runner.dispatcher.plan.num_graphs:
            owner = ", ".join(kept) or "the dispatcher"
            raise Check.RECOVERED.violation(f"graphs of a session that broke off are left ({owner})", **where)
        return True

    def _models(self, padding: float | None) -> tuple[ProbeTarget, ProbeDrafter | None]:
        scene, plan, longest, seed = self.scene, self.plan, self.scene.shape.longest, self.scene.seed

        def tables(role: Role, windows: tuple[int | None, ...], seed: int) -> Tables:
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
            )
            return self.tables(role, shape, seed)

        windows = tuple(group.window for group in plan.role(Role.TARGET).groups for _ in range(group.layers))
        # Each table and head has its own seed, so that a wrong one shows.
        own, of_rows = tables(Role.TARGET, windows, seed), self.rows(Role.TARGET, padding)
        # One adapter more than can be active: a request may have to wait for another's to end.
        adapters = scene.loras + 1 if scene.loras else 0
        target = ProbeTarget(own, of_rows, VOCABULARY, longest, seed + 1, agreeing=scene.agreeing, adapters=adapters)
        if plan.speculative is None:
            return target, None
        own = tables(Role.DRAFT_PREFILL, (None,) * plan.speculative.model.num_layers, seed + 2)
        of_rows = self.rows(Role.DRAFT_PREFILL, padding)
        return target, ProbeDrafter(own, of_rows, target, scene.drafter, seed + 3, agreeing=scene.agreeing)

    def _caches(self) -> Iterator[ModelCache]:
        roles = self.runner.roles
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
        # The first module reads the token one position later, and each further module one more.
        if kind is DraftScheme.MODULES and role.is_drafter:
            return tuple(range(1, layers + 1))
        return (int(role.is_drafter and kind.reads_states),) * layers

    def batch(self, rows: Sequence[Row], loras: int = 0) -> SceneBatch:
        """Return the batch of these rows, of live requests."""
        draft_tokens, draft = self.draft_tokens(len(rows)), self.runner.draft_rows
        return self.batch_type(self.scene, self.world, rows, loras, draft_tokens=draft_tokens, draft=draft)

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
        are wrong without a graph as well. An attack on padding needs no eager run, which has none.
        """
        if self._without_eager:
            forward(False)
            return
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
            # The graph is captured after this step: the step itself runs eager, as the first use of a shape does.
            first_use.request_capture(batch)
        run = self.runner.roles[batch.role]
        run.run_chain(batch, dispatch, made, steps, perf_counter())
        return dispatch.entry

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        """Return an array as a tensor on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.subject.device)


def _is_injected(error: BaseException | None) -> bool:
    """Say whether an error comes of the one that the suite raised."""
    while error is not None and not isinstance(error, InjectedError):
        error = error.__cause__ or error.__context__  # the backend or the runner may have wrapped it
    return error is not None


def _raise_if_eager_fails(forward: Callable[[bool], None]) -> None:
    try:
        forward(True)
    except Violation as violation:
        if violation.failure.check is Check.EAGER:
            raise


# A backend that captures fewer requests than it could.


@attrs.frozen(kw_only=True)
class _CappedBackend(RegisteredBackend):
    """Captures at most ``most`` requests, ``is_windowed``: in the group with windows alone."""

    most: int
    is_windowed: bool

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        # The group of full attention keeps its own limit, so the planner has two to go by.
        own = super().support(role, model, environment)
        if self.is_windowed and model.window is None:
            return own
        return replace(own, max_num_reqs=min(own.max_num_reqs or self.most, self.most))


def capped(registry: Registry, backend: str, scene: Scene) -> Registry:
    """Return a registry with the backend alone, which says that it captures no more requests than the scene has."""
    own = registry[backend]
    return Registry(
        [
            _CappedBackend(
                backend=own.backend,
                distribution=own.distribution,
                version=own.version,
                most=scene.capped,
                is_windowed=scene.shape.windowed,
            )
        ]
    )


# Plans with entries beyond the limits, as people edit them by hand and as engines align them.


def widened(plan: Plan, more: int, registry: Registry) -> Plan:
    """Return the plan with its largest entries wider by ``more`` requests, or tokens, or the next aligned number.

    Workspaces and the pool of recurrent states are sized for the wider entries.
    """
    roles = tuple(_wider_role(plan, role, more, registry) for role in plan.roles)
    return replace(plan, roles=roles, states=StatePool.of(plan, roles, plan.speculative))


def _wider_role(plan: Plan, role: RolePlan, more: int, registry: Registry) -> RolePlan:
    entries = tuple(_wider(role.entries, more, plan.parallel))

    def sized(group: GroupPlan) -> GroupPlan:
        attention = Attention.of(plan, role.role, layers=group.layers, window=group.window)
        backend = registry[group.backend]
        workspace = backend.workspace(role.role, attention, plan.environment, entries, plan.limits)
        return replace(group, workspace=workspace)

    return replace(role, entries=entries, groups=tuple(map(sized, role.groups)))


def _wider(entries: tuple[Entry, ...], more: int, parallel: Parallel) -> Iterator[Entry]:
    """Yield the entries; of those that differ in size alone, the largest is wider."""
    alike = grouped(entries, _kind)
    largest = {max(each, key=lambda entry: (entry.num_tokens, entry.num_reqs or 0)) for each in alike.values()}
    for entry in entries:
        if entry not in largest:
            yield entry
        # A graph of decodes stays one: its tokens are a multiple of each request's, aligned for all ranks.
        elif entry.tokens_each is not None:
            step = request_step(entry.tokens_each, parallel)
            reqs = -(-((entry.num_reqs or 0) + more) // step) * step
            yield replace(entry, num_reqs=reqs, num_tokens=reqs * entry.tokens_each)
        else:
            step = token_step(parallel)
            tokens = -(-(entry.num_tokens + more) // step) * step
            reqs_or_none = None if entry.num_reqs is None else entry.num_reqs + more
            yield replace(entry, num_tokens=tokens, num_reqs=reqs_or_none)


def _kind(entry: Entry) -> tuple[object, ...]:
    return entry.mode, entry.query_len, entry.max_query_len, entry.active_loras, entry.draft_steps
