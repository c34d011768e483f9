"""One role at run time: its fields, its graphs, and the one way that a forward of it is run.

Dispatch, fill and pad, prepare the backends, check the guards, replay: or, where no entry serves the
batch, the same without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.errors import BackendError, CapturePlannerError
from capture_planner.modes import GraphMode, Refresh, Role
from capture_planner.records.backend import Lifetime
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import GroupPlan, RolePlan
from capture_planner.runtime.execution import padding
from capture_planner.runtime.execution.bodies import Body
from capture_planner.runtime.execution.fields import Extents, Fields, Held, poison, tensor_of
from capture_planner.runtime.execution.guards import Baked, PointerGuard, refuse_unpadded_requests
from capture_planner.runtime.execution.host_fields import HostFields
from capture_planner.runtime.execution.padding import Bounds, Write
from capture_planner.runtime.execution.step import DERIVED, Made, derive
from capture_planner.runtime.execution.updates import TorchUpdates, Updates
from capture_planner.runtime.executor import Executor, LayerCache, Metadata, Scoring
from capture_planner.runtime.graphs.graph import Graph, Grapher, Pool


@attrs.frozen(kw_only=True)
class Options:
    """How carefully a plan is run."""

    trust: bool = False
    """Replay without guards."""
    debug: bool = False
    """Check the bounds of every index field at every step; slow."""
    poison: bool = False
    """Overwrite buffers, outputs, workspaces and pools with NaN and out-of-range integers before
    every forward: what then still comes out right does not depend on them."""
    strict: bool = False
    """Stop where a graph does not fit into memory, instead of leaving it out."""
    replay: bool = True
    """Replay graphs. False: nothing is captured, and each batch runs what its graph would hold, at its
    padded extents: the same kernels on the same shapes, so that what then differs is the capture's."""
    run_ahead: bool | None = None
    """Enqueue each step before the tokens of the one before it are read, so that a GPU has no pause
    between steps; None: where there is a GPU. Never with a drafter, whose verification needs the tokens,
    with embeddings, which are made from them, or with ``debug``."""
    drafts_on_device: bool | None = None
    """Verify, and fill the drafter's fields, where the target's answers are, instead of waiting for them
    on the host; None: where there is a GPU. Not where a backend of the drafter needs lengths on the host."""
    compare: bool = False
    """Run what a graph serves eager too, and stop at the first tensor that differs: see ``compare``. Poisons
    before every forward, and nothing runs ahead or drafts on the device. Raises ``DifferenceError``."""


@attrs.frozen(kw_only=True, eq=False)
class GroupRun:
    """One attention group with what executes it."""

    plan: GroupPlan
    executor: Executor
    caches: Mapping[int, LayerCache]
    workspace: torch.Tensor
    who: str
    """Backend, distribution and version, for messages."""
    refresh: Refresh
    """Whether its metadata needs the host between two steps of a decode."""


@attrs.frozen
class Ran:
    """What one forward was: its answer, and its times in seconds."""

    dispatch: Dispatch
    extents: Extents
    preparation: float
    host_seconds: float
    seconds: float


class RoleRun:
    """Everything that one role needs to run, and its graphs."""

    def __init__(
        self,
        plan: RolePlan,
        body: Body,
        fields: Fields,
        groups: Sequence[GroupRun],
        *,
        dispatcher: Dispatcher,
        grapher: Grapher,
        page_size: int,
        bounds: Bounds,
        options: Options,
        apply: Callable[[Sequence[Write]], None] = padding.apply,
        updates: Updates | None = None,
    ) -> None:
        self.plan, self.body, self.fields, self.groups = plan, body, fields, tuple(groups)
        self.dispatcher, self.options = dispatcher, options
        self.graphs: dict[Entry, Graph] = {}
        self.pool: Pool | None = None
        self._grapher, self.page_size, self._bounds = grapher, page_size, bounds
        self._baked: dict[Entry, Baked] = {}
        self._guard: PointerGuard | None = None
        self._group_of = {layer: group for group in groups for layer in group.caches}
        self._metadata: dict[str, Metadata] = {}
        self._described: tuple[Entry | None, Extents, Extents, int] | None = None
        self._derived = sorted({buffer.field.name for buffer in fields} | self._host_names())
        self._frozen = {group.plan.name: _frozen_scalars(group.plan) for group in groups}
        self._splitting, self._apply, self._updates = False, apply, updates or TorchUpdates()

    def _host_names(self) -> set[str]:
        return {field.name for group in self.groups for field in group.plan.padding.fields}

    @property
    def role(self) -> Role:
        return self.plan.role

    @property
    def goes_on_alone(self) -> bool:
        """Whether graphs can bring this role's metadata to the next token of a decode by themselves."""
        return all(group.refresh is Refresh.IN_GRAPH for group in self.groups)

    def persistent(self) -> Iterator[Held]:
        """Every persistent tensor that graphs touch, weights left out."""
        for buffer in self.fields:
            yield f"{self.role.value}.{buffer.key}", buffer, "tensor"
        for name, holder, attribute in (*self.body.outputs(), *self.body.inputs()):
            yield f"{self.role.value}.{name}", holder, attribute
        for group in self.groups:
            yield f"{self.role.value}.{group.plan.name}.workspace", group, "workspace"
            for layer, cache in group.caches.items():
                yield f"{self.role.value}.keys[{layer}]", cache, "keys"
                yield f"{self.role.value}.values[{layer}]", cache, "values"

    def watch(self) -> None:
        """Take down where everything is, before the first capture."""
        self._guard = PointerGuard(self.persistent(), self.body.weights())

    # What runs.

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return which entry serves a batch, or why none does."""
        return self.dispatcher.dispatch(batch)

    def run(
        self,
        batch: Batch,
        values: Made,
        started: float,
        *,
        filled: bool = False,
        answer: Dispatch | None = None,
    ) -> Ran:
        """Run one forward of a batch with its real values, which were begun at ``started``.

        ``filled``: the fields on the device hold them already, padding included. ``answer`` overrides the
        dispatcher's.
        """
        answer = answer or self.dispatch(batch)
        entry = answer.entry
        real = Extents(tokens=batch.num_tokens, reqs=batch.num_reqs, pages=self.fields.capacity.pages)
        if not filled and self.options.poison:
            self.poison()
        extents = self.ready(entry, real, values) if filled else self.stage(entry, real, values)
        return self.again(answer, entry, extents, started)

    def again(self, answer: Dispatch, entry: Entry | None, extents: Extents, started: float) -> Ran:
        """Run what is staged: replay the entry's graph, or run eagerly without one."""
        prepared = ready = perf_counter()
        if entry is not None and self.options.replay:
            if not self.options.trust:
                self.check(entry)
                ready = perf_counter()
            self.graphs[entry].replay()
        else:
            self._forward(extents, entry)
        if entry is not None and entry.num_reqs is None:
            self.body.per_request(extents, None)
        return Ran(answer, extents, prepared - started, ready - started, perf_counter() - started)

    def fill(self, values: Made) -> list[Write]:
        """Return what brings the fields to a step's values, padding included."""
        derive(values, self._derived, self.page_size)
        return padding.table(self.fields, values, len(values["positions"]))

    def stage(self, entry: Entry | None, real: Extents, values: Made) -> Extents:
        """Fill and pad the fields of one forward, and let the backends prepare.

        Returns the extents that the model runs at; requests are padded for FULL graphs alone.
        """
        self._apply(self.fill(values))
        return self.ready(entry, real, values)

    def ready(self, entry: Entry | None, real: Extents, values: Made) -> Extents:
        """Let the backends prepare for fields that are filled; see ``stage``."""
        extents = real if entry is None else _padded(entry, real)
        if self.options.debug:
            padding.check_bounds(self.fields, values, extents, self._bounds)
        self.prepare(entry, real, extents, values)
        return extents

    def follow(self, values: Made) -> None:
        """Bring the fields that follow from the common ones to a draft step that the graph moved to."""
        derive(values, self._derived, self.page_size)
        following = [buffer for buffer in self.fields if buffer.field.name in DERIVED]
        self._apply(padding.table(following, values, len(values["positions"])))

    def prepare(self, entry: Entry | None, real: Extents, extents: Extents, values: Made) -> None:
        """Give every group the metadata of a step, at the extents that attention sees."""
        full = entry is not None and entry.num_reqs is not None
        # What describes a full graph's step is read from fields and values when it is asked for.
        described = self._described is not None and self._described == (entry, real, extents, id(values))
        if not (full and described):
            self._describe(entry, real, extents if full else real, values, full)
            self._described = (entry, real, extents, id(values))
        for group in self.groups:
            try:
                group.executor.prepare(self._metadata[group.plan.name])
            except Exception as error:
                raise self._blamed(group, entry, "prepare", error) from error

    def _describe(self, entry: Entry | None, real: Extents, seen: Extents, values: Made, full: bool) -> None:
        """Make the metadata of each group."""
        query = _longest_query(entry, values, full)
        length = self._bounds.positions if full else int(values["seq_lens"].max(initial=0))
        for group in self.groups:
            self._metadata[group.plan.name] = Metadata(
                entry=entry,
                num_reqs=seen.reqs,
                num_tokens=seen.tokens,
                max_query_len=query,
                max_seq_len=length,
                fields=self.fields.views(group.plan.name, seen),
                host=HostFields(self.fields.by_group[group.plan.name], values, seen, real.tokens),
            )

    def check(self, entry: Entry) -> None:
        """Compare what the entry's graph baked in with what is there now; raises ``GuardError``."""
        who = f"{self.role.value}: {entry}"
        if self._guard is not None:
            self._guard.check(who)
        self._baked[entry].check(self._bake(), who)

    def _bake(self) -> Baked:
        frozen, layouts = {}, {}
        for group in self.groups:
            name = group.plan.name
            metadata = self._metadata[name]
            if metadata.is_full:
                for scalar in self._frozen[name]:
                    frozen[f"{name}.{scalar}"] = getattr(metadata, scalar)
                try:
                    layout = group.executor.layout()
                    if layout is not None and type(layout) is not tuple:
                        raise TypeError(f"it returned {layout!r}, not a tuple of integers or None")
                except Exception as error:
                    raise self._blamed(group, metadata.entry, "layout", error) from error
                layouts[name] = layout
        return Baked(frozen, layouts)

    # What is captured.

    def warm_up(self, entry: Entry, values: Made) -> None:
        """Run an entry's forward once without a graph, at its padded extents."""
        refuse_unpadded_requests(self.role, entry)
        self._forward(self._staged(entry, values), entry)

    def capture(self, entry: Entry, values: Made, pool: Pool) -> Graph:
        """Capture an entry's forward, with metadata made anew."""
        extents = self._staged(entry, values)
        self._splitting = entry.mode is GraphMode.PIECEWISE
        try:
            graph = self._grapher.capture(lambda: self._forward(extents, entry), pool)
        finally:
            self._splitting = False
        self.graphs[entry] = graph
        self._baked[entry] = self._bake()
        return graph

    def _staged(self, entry: Entry, values: Made) -> Extents:
        tokens, reqs = len(values["input_ids"]), len(values["seq_lens"])
        real = Extents(tokens=tokens, reqs=reqs, pages=self.fields.capacity.pages)
        return self.stage(entry, real, values)

    def _forward(self, extents: Extents, entry: Entry | None) -> None:
        """Run the body as it is captured, or eagerly: both parts, or the part per token alone."""
        for step in range((entry and entry.draft_steps) or 1):
            self._per_token(step, extents)
        if entry is None or entry.num_reqs is not None:
            self.body.per_request(extents, entry)

    def _per_token(self, step: int, extents: Extents) -> None:
        """Run the part per token; ``step``: of a chain."""
        self.body.per_token(extents, self._attend)

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        out = query.new_empty(query.shape)
        if not self._splitting:
            self._attend_now(layer, query, keys, values, out, scoring)
            return out

        def attention(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
        ) -> None:
            self._attend_now(layer, query, keys, values, out, scoring)

        self._grapher.split(attention, reads=(query, keys, values), writes=(out,))
        return out

    def _attend_now(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        scoring: Scoring,
    ) -> None:
        """Store keys and values, and attend; rows that attention does not see become zero."""
        group = self._group_of[layer]
        metadata = self._metadata[group.plan.name]
        rows = metadata.num_tokens
        slots = self.fields["slot_mapping"][:rows]
        self._updates.store(group.caches[layer], slots, keys[:rows], values[:rows])
        if rows < out.shape[0]:
            out[rows:].zero_()
        try:
            group.executor.attend(layer, query[:rows], out[:rows], scoring, metadata)
        except Exception as error:
            raise self._blamed(group, metadata.entry, f"attend of layer {layer}", error) from error

    def seen_rows(self) -> int:
        """Return the tokens that attention sees in the step that is prepared."""
        return next(iter(self._metadata.values())).num_tokens

    def poison(self) -> None:
        """Overwrite all that a forward must not depend on."""
        self.fields.poison()
        for held in self.body.outputs():
            poison(tensor_of(held))
        if self.pool is not None:
            self.pool.poison()
        for group in self.groups:
            group.workspace.fill_(255)

    def release(self) -> None:
        """Release all backends. Graphs go first: they hold pointers into what is released."""
        self.graphs.clear()
        broken = []
        for group in self.groups:
            try:
                group.executor.release()
            except Exception as error:
                broken.append(self._blamed(group, None, "release", error))
        if broken:
            raise broken[0]

    def _blamed(self, group: GroupRun, entry: Entry | None, call: str, error: Exception) -> Exception:
        """Return an error that names the backend, the role and the entry; ours are left as they are."""
        if isinstance(error, (CapturePlannerError, torch.OutOfMemoryError)):
            return error
        step = "" if call == "release" else f", {entry or 'eager step'}"
        where = f"{self.role.value}, group {group.plan.name}{step}"
        says = " ".join(f"{type(error).__name__}: {error}".split())
        return BackendError(f"{group.who} broke in {call} ({where}): {says}; tell its authors")


def _frozen_scalars(group: GroupPlan) -> list[str]:
    """Return the frozen fields of a group that are scalars of a step's metadata."""
    known = ("max_query_len", "max_seq_len")
    return [f.name for f in group.padding.fields if f.lifetime is Lifetime.FROZEN and f.name in known]


def _padded(entry: Entry, real: Extents) -> Extents:
    return attrs.evolve(
        real, tokens=entry.num_tokens, reqs=real.reqs if entry.num_reqs is None else entry.num_reqs
    )


def _longest_query(entry: Entry | None, values: Made, full: bool) -> int:
    if full and entry is not None:
        return entry.query_len or entry.num_tokens
    return int(np.diff(values["query_start_loc"]).max(initial=0))
