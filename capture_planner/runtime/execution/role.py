"""One role at run time: its fields, its graphs, and how a forward of it runs.

A forward takes three calls, in this order: ``stage_inputs`` fills and pads the fields,
``prepare_backends`` lets attention do its host work, and ``replay_or_run`` checks the guards and
replays the graph, or runs the same without one. ``run`` makes all three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.errors import GuardError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import RolePlan
from capture_planner.runtime.execution import padding
from capture_planner.runtime.execution.attention import GroupRun, RoleAttention
from capture_planner.runtime.execution.bodies import Body
from capture_planner.runtime.execution.calls import LayerCalls
from capture_planner.runtime.execution.fields import ACROSS_REPLICAS, Extents, Fields, TensorRef, poison, tensor_of
from capture_planner.runtime.execution.guards import GraphState, PointerGuard, refuse_unpadded_requests
from capture_planner.runtime.execution.inputs import DERIVED, ForwardStep, StepInputs, null_inputs
from capture_planner.runtime.execution.padding import Bounds, Write
from capture_planner.runtime.execution.profiling import profiled
from capture_planner.runtime.execution.recurrent import RecurrentLayers
from capture_planner.runtime.executor import Scoring
from capture_planner.runtime.graphs.graph import Graph, Grapher, GraphPool
from capture_planner.runtime.options import ExecutionPolicy


@attrs.frozen
class ForwardTimes:
    """What one forward took, in seconds from when it was begun."""

    preparation: float
    """Until the backends were prepared."""
    host_seconds: float
    """Until the guards were checked."""
    seconds: float


@attrs.frozen(kw_only=True, eq=False)
class ExecutionContext:
    """What all roles of a runner share."""

    grapher: Grapher
    policy: ExecutionPolicy
    bounds: Bounds
    page_size: int
    """Tokens per page."""
    apply: Callable[[Sequence[Write]], None]
    """Brings the buffers of any number of roles up to date."""


class ForwardObserver:
    """Watches the forwards of roles. Every method does nothing here: override those that you need.

    ``Runner`` hands it to its roles before anything is captured. What ``attention`` and ``after_tokens`` launch is
    captured too, and is part of each replay.
    """

    def batch(self, requests: Sequence[str]) -> None:
        """Called before the forwards of a step with the names of its requests, a row of the batch each."""

    def run(self, role: RoleRun, batch: Batch, dispatch: Dispatch, *, filled: bool) -> AbstractContextManager[None]:
        """Return what is entered before the fields of a forward are filled, and left when it is done.

        Of a chain of draft decodes it is around the first one. ``filled``: the fields hold the inputs already.
        """
        return nullcontext()

    def writes(self, role: RoleRun, writes: list[Write]) -> list[Write]:
        """Return what fills the fields of a step, also of one that is captured."""
        return writes

    def attention(
        self,
        role: RoleRun,
        number: int,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> AbstractContextManager[None]:
        """Return what is entered before a layer attends, and left when ``out`` is written.

        :param number: of the draft decode in a chain, 0 outside of chains.
        :param query: ``[T, num_heads, head_dim]``, as ``out``; keys and values have ``num_kv_heads``.
        """
        return nullcontext()

    def after_tokens(self, role: RoleRun, number: int) -> None:
        """Called after the part per token of draft decode ``number`` in a chain, 0 outside of chains."""

    def forward(self, role: RoleRun, step: ForwardStep, started: float) -> ForwardTimes:
        """Run a step that is staged and prepared, by ``RoleRun.execute``; ``started`` is in seconds."""
        return role.execute(step, started)


class RoleRun:
    """One role: its persistent buffers, its backends, its graphs, and the forwards that use them."""

    def __init__(
        self,
        plan: RolePlan,
        body: Body,
        fields: Fields,
        attention: RoleAttention,
        recurrent: RecurrentLayers,
        context: ExecutionContext,
        observer: ForwardObserver,
    ) -> None:
        self.plan = plan
        self.body = body
        self.fields = fields
        self.attention = attention
        self.recurrent = recurrent
        self.bounds, self.page_size = context.bounds, context.page_size
        self.graphs: dict[Entry, Graph] = {}
        """What is replayed: the graphs of the last capture session, once it has ended."""
        self.pool: GraphPool | None = None
        """Where its graphs live; None before ``begin_capture``."""
        self._policy, self._grapher, self._apply = context.policy, context.grapher, context.apply
        self._observer = observer
        self._guard: PointerGuard | None = None
        self._states: dict[Entry, GraphState] = {}
        self._captured: dict[Entry, tuple[Graph, GraphState]] = {}
        """Graphs of a session that has not ended: nothing of it is replayed before (vllm#28334)."""
        self._derived = [buffer for buffer in fields if buffer.field.name in DERIVED]
        self._is_splitting = False

    @property
    def role(self) -> Role:
        return self.plan.role

    @property
    def groups(self) -> tuple[GroupRun, ...]:
        """Its attention groups, in the plan's order."""
        return self.attention.groups

    def persistent(self) -> Iterator[TensorRef]:
        """Yield every persistent tensor that graphs touch, except for weights."""
        for buffer in self.fields:
            yield f"{self.role.value}.{buffer.key}", buffer, "tensor"
        for name, holder, attribute in (*self.body.outputs(), *self.body.inputs()):
            yield f"{self.role.value}.{name}", holder, attribute
        yield from self.attention.persistent()
        for name, holder, attribute in self.recurrent.persistent():
            yield f"{self.role.value}.{name}", holder, attribute

    # One forward.

    def run(
        self, batch: Batch, dispatch: Dispatch, inputs: StepInputs, started: float, *, filled: bool = False
    ) -> ForwardTimes:
        """Run one forward of a batch, begun at ``started``, from the graph that dispatch chose or eagerly.

        :param filled: the fields on the device hold the inputs already, padding included.
        """
        with self._observer.run(self, batch, dispatch, filled=filled):
            step = self.step(batch, dispatch.entry, inputs)
            if not filled:
                if self._policy.options.poison:
                    self.poison()
                self.stage_inputs(step)
            self.prepare_backends(step)
            return self.replay_or_run(step, started)

    def step(self, batch: Batch, entry: Entry | None, inputs: StepInputs) -> ForwardStep:
        """Return the forward of a batch by ``entry``, or eagerly."""
        adapters = min(batch.active_loras, batch.num_reqs)
        real = Extents(
            tokens=batch.num_tokens, reqs=batch.num_reqs, pages=self.fields.capacity.pages, adapters=adapters
        )
        extents = real
        if entry is not None:
            # A PIECEWISE graph pads tokens alone. Each request has one adapter at most.
            reqs = real.reqs if entry.num_reqs is None else entry.num_reqs
            adapters = self.adapters_of(entry)
            extents = Extents(tokens=entry.num_tokens, reqs=reqs, pages=real.pages, adapters=adapters)
        return ForwardStep(batch=batch, entry=entry, inputs=inputs, real=real, extents=extents)

    def adapters_of(self, entry: Entry) -> int:
        """Return how many adapters an entry's graph holds."""
        most = min(entry.num_tokens, self.bounds.reqs) if entry.num_reqs is None else entry.num_reqs
        return min(entry.active_loras, most)

    def stage_inputs(self, step: ForwardStep) -> None:
        self._apply(self.writes(step.inputs))

    def writes(self, inputs: StepInputs) -> list[Write]:
        """Return the writes that bring the fields to a step's inputs, padding included."""
        for buffer in self._derived:
            inputs.declared[buffer.field.name]
        return self._observer.writes(self, padding.table(self.fields, inputs.declared, inputs.num_tokens))

    def stage_derived(self, step: ForwardStep) -> None:
        """Fill the fields that follow from others, for a draft decode whose other fields a graph filled."""
        if self._derived:
            values = {buffer.field.name: step.inputs.declared[buffer.field.name] for buffer in self._derived}
            self._apply(padding.table(self._derived, values, step.inputs.num_tokens))

    def prepare_backends(self, step: ForwardStep) -> None:
        """Let attention do its host work, for fields that are filled."""
        if self._policy.options.debug:
            real = {} if step.inputs.is_dummy else step.inputs.declared
            padding.check_bounds(self.fields, real, step.extents, self.bounds)
        self.attention.prepare(step)
        self.recurrent.prepare(step)

    def replay_or_run(self, step: ForwardStep, started: float) -> ForwardTimes:
        """Let the observer run what is prepared."""
        return self._observer.forward(self, step, started)

    def execute(self, step: ForwardStep, started: float) -> ForwardTimes:
        """Replay the entry's graph, or run its forward without it. Raises ``GuardError`` before a replay."""
        prepared = checked = perf_counter()
        entry = step.entry
        if entry is not None and self._policy.options.replay:
            graph = self.graphs.get(entry)
            if graph is None:
                raise GuardError(f"{self.role.value}: {entry} has no graph; capture it, or let the dispatcher choose")
            if not self._policy.options.trust:
                self.check_guards(entry)
                checked = perf_counter()
            with profiled(step):
                graph.replay()
        else:
            with profiled(step):
                self._forward(step.extents, entry)
        if entry is not None and not step.is_full:
            # A PIECEWISE graph pads no requests, so what belongs to requests runs behind it (vllm#39773).
            self.body.per_request(step.extents, None)
        return ForwardTimes(prepared - started, checked - started, perf_counter() - started)

    def check_guards(self, entry: Entry) -> None:
        """Compare what the entry's graph baked in with what is there now; raises ``GuardError``."""
        label = f"{self.role.value}: {entry}"
        if self._guard is not None:
            self._guard.check(label)
        self._states[entry].check(self.attention.graph_state(), label)

    def _forward(self, extents: Extents, entry: Entry | None) -> None:
        """Run the body as it is captured, or eagerly: both parts, or the part per token alone."""
        for number in range((entry and entry.draft_steps) or 1):
            self.per_token(number, extents)
        if entry is None or entry.num_reqs is not None:
            self.body.per_request(extents, entry)

    def per_token(self, number: int, extents: Extents) -> None:
        """Run the body's part per token, of draft decode ``number`` in a chain; 0 outside of chains."""
        slots = self.fields["slot_mapping"][: extents.tokens]
        self.body.per_token(extents, LayerCalls(functools.partial(self._attend, number), slots, self._recur))
        self._observer.after_tokens(self, number)

    def _attend(
        self, number: int, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        out = query.new_empty(query.shape)

        def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
            self.attention.attend(layer, query, keys, values, out, scoring)

        with self._observer.attention(self, number, layer, query, keys, values, out):
            if self._is_splitting:
                self._grapher.split(attention, reads=(query, keys, values), writes=(out,))
            else:
                attention(query, keys, values, out)
        return out

    def _recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs)
        recurrence = functools.partial(self.recurrent.recur, layer)
        if self._is_splitting:
            self._grapher.split(recurrence, reads=(inputs, decays), writes=(out,))
        else:
            recurrence(inputs, decays, out)
        return out

    # Capture.

    def begin_capture(self, pool: GraphPool) -> None:
        """Drop the graphs of before, remember where every tensor is, and capture into ``pool`` from here on."""
        self.abandon_capture()
        self.pool = pool
        self._guard = PointerGuard(self.persistent(), self.body.weights())

    def warm_up(self, entry: Entry) -> None:
        """Run an entry's forward once without a graph, at its padded extents."""
        refuse_unpadded_requests(self.role, entry)
        self._forward(self._warm_up_step(entry).extents, entry)

    def capture(self, entry: Entry) -> Graph:
        """Capture an entry's forward, with metadata made anew."""
        assert self.pool is not None, "begin_capture comes first"
        pool, extents = self.pool, self._warm_up_step(entry).extents
        self._is_splitting = entry.mode is GraphMode.PIECEWISE
        try:
            graph = self._grapher.capture(lambda: self._forward(extents, entry), pool)
        finally:
            self._is_splitting = False
        self._captured[entry] = graph, self.attention.graph_state()
        return graph

    def drop(self, entry: Entry) -> None:
        """Let go of the graph of an entry, if there is one: another rank has none of it."""
        self._captured.pop(entry, None)

    def end_capture(self) -> None:
        """Let all graphs of the session be replayed."""
        self.graphs.update({entry: graph for entry, (graph, _) in self._captured.items()})
        self._states.update({entry: state for entry, (_, state) in self._captured.items()})
        self._captured.clear()

    def keep_capture(self, entry: Entry) -> None:
        """Let the graph of an entry be replayed next to those that are there, if it was captured."""
        if entry in self._captured:
            self.graphs[entry], self._states[entry] = self._captured.pop(entry)

    def abandon_capture(self) -> None:
        """Drop all graphs, and what is known of them: everything runs eager."""
        self._drop_graphs()
        self.pool = self._guard = None

    def _drop_graphs(self) -> None:
        for graphs in (self.graphs, self._states, self._captured):
            graphs.clear()

    def _warm_up_step(self, entry: Entry) -> ForwardStep:
        """Stage and prepare the largest batch that an entry serves."""
        inputs = self.warm_up_inputs(entry)
        batch = Batch(
            role=self.role,
            num_reqs=inputs.num_reqs,
            num_tokens=inputs.num_tokens,
            query_len=entry.query_len,
            past_prompt=entry.tokens_each is not None,
            max_query_len=entry.max_query_len,
        )
        step = attrs.evolve(self.step(batch, entry, inputs), for_capture=True)
        self.stage_inputs(step)
        self.prepare_backends(step)
        return step

    def warm_up_inputs(self, entry: Entry) -> StepInputs:
        """Return the largest batch that the entry serves; it reads and writes null page and null state alone.

        Every request has one token at least, no request is longer than the model, and there are no more
        than the limits admit: what an entry has beyond that is padding, at capture as at replay.
        """
        longest = self.bounds.positions
        reqs = min(entry.num_reqs or entry.num_tokens, entry.num_tokens, self.bounds.reqs)
        tokens = reqs * entry.tokens_each if entry.tokens_each else min(entry.num_tokens, reqs * longest)
        counts = np.full(reqs, tokens // reqs, dtype=np.int64)
        counts[: tokens % reqs] += 1
        inputs = null_inputs(counts, longest, self.page_size)
        if ACROSS_REPLICAS not in self.fields:
            return inputs
        across = np.full(len(self.fields[ACROSS_REPLICAS]), entry.num_tokens, dtype=np.int32)
        return attrs.evolve(inputs, num_tokens_across_dp=across)

    def dummy_inputs(self, batch: Batch, ahead: int) -> StepInputs:
        """Return the inputs of a batch without requests, of a rank that runs along; ``ahead`` decodes follow it."""
        counts = np.full(batch.num_reqs, batch.num_tokens // batch.num_reqs, dtype=np.int64)
        return null_inputs(counts, self.bounds.positions, self.page_size, ahead)

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
        self._drop_graphs()
        self.attention.release()
