"""One role at run time: its fields, its backends, and how a forward of it runs.

A forward takes three calls, in this order: ``stage_inputs`` fills and pads the fields,
``prepare_backends`` lets attention do its host work, and ``replay_or_run`` checks the guards and
replays the graph, or runs the same without one. ``run`` makes all three. The graphs themselves, and the
sessions that capture them, are ``RoleGraphs``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import NamedTuple, Protocol

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.errors import GuardError
from capture_planner.modes import Role
from capture_planner.plugins.backend import Scoring
from capture_planner.records.batch import Batch, Entry, batch_text
from capture_planner.records.plan import RolePlan
from capture_planner_runner.execution import padding
from capture_planner_runner.execution.attention import GroupRun, LayerCalls, RecurrentLayers, RoleAttention
from capture_planner_runner.execution.bodies import Body
from capture_planner_runner.execution.context import LENGTHS
from capture_planner_runner.execution.fields import ACROSS_REPLICAS, Extents, Fields, TensorRef, poison, tensor_of
from capture_planner_runner.execution.guards import PointerGuard, refuse_unpadded_requests
from capture_planner_runner.execution.inputs import DERIVED, ForwardStep, StepInputs, null_inputs
from capture_planner_runner.execution.padding import Bounds, Write
from capture_planner_runner.execution.role_graphs import RoleGraphs
from capture_planner_runner.graphs.graph import Graph, Grapher, GraphPool
from capture_planner_runner.options import ExecutionPolicy


@attrs.frozen
class ForwardTimes:
    """Host times of one forward, in seconds from its start."""

    preparation: float
    """Until the backends were prepared."""
    host_seconds: float
    """Until the guards were checked."""
    seconds: float
    """Until it had run, or was launched on a GPU."""

    def __add__(self, other: ForwardTimes) -> ForwardTimes:
        return ForwardTimes(
            self.preparation + other.preparation, self.host_seconds + other.host_seconds, self.seconds + other.seconds
        )


@attrs.frozen(kw_only=True, eq=False)
class ExecutionContext:
    """The values that all roles of a runner share."""

    grapher: Grapher
    policy: ExecutionPolicy
    bounds: Bounds
    page_size: int
    """Tokens per page."""
    apply: Callable[[Sequence[Write]], None]
    """Brings the buffers of any number of roles up to date."""


_NOTHING = nullcontext()


class LayerTensors(NamedTuple):
    """Tensors of one call of attention."""

    queries: torch.Tensor
    """``[T, num_heads, head_dim]``, as ``out``; keys and values have ``num_kv_heads``."""
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor


class ForwardObserver:
    """Watches the forwards of roles. Every method does nothing here: override those that you need.

    ``Runner`` hands it to its roles before anything is captured. What ``attention`` and ``after_tokens`` launch is
    captured too, and is part of each replay.
    """

    def batch(self, requests: Sequence[str]) -> None:
        """Called before the forwards of a step with the names of its requests, a row of the batch each."""

    def run(self, role: RoleRun, batch: Batch, dispatch: Dispatch, *, filled: bool) -> AbstractContextManager[None]:
        """Return a context that is entered before the fields of a forward are filled, and left when it is done.

        In a chain of draft decodes it is around the first one.

        :param filled: the fields hold the inputs already.
        """
        return _NOTHING

    def writes(self, role: RoleRun, writes: list[Write]) -> list[Write]:
        """Return the writes that fill the fields of a step, also of one that is captured."""
        return writes

    def attention(self, role: RoleRun, number: int, layer: int, tensors: LayerTensors) -> AbstractContextManager[None]:
        """Return a context that is entered before a layer attends, and left when its output is written.

        :param number: of the draft decode in a chain, 0 outside of chains.
        """
        return _NOTHING

    def after_tokens(self, role: RoleRun, number: int) -> None:
        """Called after the part per token of draft decode ``number`` in a chain, 0 outside of chains."""

    def forward(self, role: RoleRun, step: ForwardStep) -> AbstractContextManager[None]:
        """Return a context around the replay of a graph, or its forward without one; the step is prepared before."""
        return _NOTHING


class ForwardWrapper(Protocol):
    """Runs the forwards of a role, and something else next to them. An observer only watches."""

    def execute(self, role: RoleRun, step: ForwardStep, started: float) -> ForwardTimes:
        """Run a step that is staged and prepared, by ``RoleRun.execute``; ``started`` is in seconds."""


class RoleRun:
    """One role: its persistent buffers, its backends, and the forwards that use them, from graphs or without.

    :param wrapper: runs the forwards; None: nothing runs next to them.
    """

    def __init__(
        self,
        plan: RolePlan,
        body: Body,
        fields: Fields,
        attention: RoleAttention,
        recurrent: RecurrentLayers,
        context: ExecutionContext,
        observer: ForwardObserver,
        wrapper: ForwardWrapper | None = None,
    ) -> None:
        self.plan = plan
        self.body = body
        self.fields = fields
        self.attention = attention
        self.recurrent = recurrent
        self.bounds, self.page_size = context.bounds, context.page_size
        self.graphs = RoleGraphs(context.grapher)
        self._policy, self._apply = context.policy, context.apply
        self._observer, self._wrapper = observer, wrapper
        self._derived = [buffer for buffer in fields if buffer.field.name in (*DERIVED, LENGTHS)]

    @property
    def role(self) -> Role:
        return self.plan.role

    @property
    def null_slots(self) -> int:
        """Slots of the null page on this rank."""
        return self.page_size // self.attention.context.size

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
                self._poison_if_asked()
                self.stage_inputs(step)
            self.prepare_backends(step)
            return self.replay_or_run(step, started)

    def run_chain(
        self, batch: Batch, dispatch: Dispatch, inputs: StepInputs, steps: int, started: float, *, filled: bool = False
    ) -> tuple[ForwardTimes, int]:
        """Run ``steps`` draft decodes of a batch, from the inputs of the first: one fused graph, or one several times.

        Returns the sum of their times, and the number of forwards: 1 of a fused chain.

        :param filled: the fields on the device hold the inputs already.
        """
        times = self.run(batch, dispatch, inputs, started, filled=filled)
        if dispatch.entry is not None and dispatch.entry.draft_steps is not None:
            # The graph holds the whole chain.
            return times, 1
        step = self.step(batch, dispatch.entry, inputs)
        for _ in range(steps - 1):
            started = perf_counter()
            # Each forward ends with the common fields of the next one, on the device; the host follows.
            step = attrs.evolve(step, inputs=step.inputs.next_draft(self.bounds.positions))
            if not filled and self._derived:
                # No graph advances the fields that follow from others.
                self._apply(padding.table(self._derived, self._derived_values(step.inputs), step.inputs.num_tokens))
            # Eager attention, and a backend that plans on the host, need the lengths of this step.
            self.prepare_backends(step)
            times += self.replay_or_run(step, started)
        return times, steps

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
        values = inputs.declared
        if self._derived:
            values = {**values, **self._derived_values(inputs)}
        return self._observer.writes(self, padding.table(self.fields, values, inputs.num_tokens))

    def _derived_values(self, inputs: StepInputs) -> padding.Values:
        """Return the values of the role's fields that follow from others, see ``inputs.DERIVED``."""
        names = [buffer.field.name for buffer in self._derived]
        found = {name: inputs.declared[name] for name in names if name != LENGTHS}
        return found | {LENGTHS: self.attention.context.lengths(inputs.seq_lens)} if LENGTHS in names else found

    def prepare_backends(self, step: ForwardStep) -> None:
        """Let attention do its host work, for fields that are filled."""
        if self._policy.options.debug:
            # The rows of a dummy batch are all padding, whatever values they have.
            real = {} if step.inputs.is_dummy else step.inputs.declared
            padding.check_bounds(self.fields, real, step.extents, self.bounds)
        self.attention.prepare(step)
        self.recurrent.prepare(step)

    def replay_or_run(self, step: ForwardStep, started: float) -> ForwardTimes:
        """Run a step that is staged and prepared, with whatever is wrapped around its forward."""
        if self._wrapper is not None:
            return self._wrapper.execute(self, step, started)
        return self.execute(step, started)

    def execute(self, step: ForwardStep, started: float) -> ForwardTimes:
        """Replay the entry's graph, or run its forward without it. Raises ``GuardError`` before a replay."""
        entry = step.entry
        with self._observer.forward(self, step):
            prepared = checked = perf_counter()
            # Without ``replay``, an entry's forward runs eagerly at its padded extents: the same kernels and shapes.
            if entry is not None and self._policy.options.replay:
                graph = self.graphs.get(entry)
                if graph is None:
                    raise GuardError(
                        f"{self.role.value}: {entry} has no graph; capture it, or let the dispatcher choose"
                    )
                if not self._policy.options.trust:
                    self.check_guards(entry)
                    checked = perf_counter()
                with _profiled(step):
                    graph.replay()
            else:
                with _profiled(step):
                    self._forward(step.extents, entry)
            if entry is not None and not step.is_full:
                # A PIECEWISE graph pads no requests, so the part per request runs behind it (vllm#39773).
                self.body.per_request(step.extents, None)
            return ForwardTimes(prepared - started, checked - started, perf_counter() - started)

    def check_guards(self, entry: Entry) -> None:
        """Compare the values baked into the entry's graph with the present ones; raises ``GuardError``."""
        self.graphs.check(entry, self.attention.graph_state(), f"{self.role.value}: {entry}")

    def _forward(self, extents: Extents, entry: Entry | None) -> None:
        """Run the body as it is captured, or eagerly: both parts, or the part per token alone."""
        for number in range((entry and entry.draft_steps) or 1):
            self.per_token(number, extents)
        # A PIECEWISE graph holds no part per request: see ``execute``.
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
        # Made outside of the split, in the memory of the graph: the piece after it reads this address at each replay.
        out = query.new_empty(query.shape)

        def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
            self.attention.attend(layer, query, keys, values, out, scoring)

        with self._observer.attention(self, number, layer, LayerTensors(query, keys, values, out)):
            self.graphs.call(attention, reads=(query, keys, values), writes=(out,))
        return out

    def _recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs)
        self.graphs.call(functools.partial(self.recurrent.recur, layer), reads=(inputs, decays), writes=(out,))
        return out

    # Capture.

    def begin_capture(self, pool: GraphPool) -> None:
        """Drop the graphs of before, remember where every tensor is, and capture into ``pool`` from here on."""
        self.graphs.begin(pool, PointerGuard(self.persistent(), self.body.weights()))

    def warm_up(self, entry: Entry) -> None:
        """Run an entry's forward once without a graph, at its padded extents."""
        refuse_unpadded_requests(self.role, entry)
        self._forward(self._warm_up_step(entry).extents, entry)

    def capture(self, entry: Entry) -> Graph:
        """Capture an entry's forward, with metadata made anew."""
        # A warm-up may change metadata or make parts of it, so what is captured is prepared again, as in vLLM 0.33.
        extents = self._warm_up_step(entry).extents
        return self.graphs.capture(entry, lambda: self._forward(extents, entry), self.attention.graph_state)

    def _warm_up_step(self, entry: Entry) -> ForwardStep:
        """Stage and prepare the largest batch that an entry serves, and return its forward."""
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
        # All replicas replay the same entry, so each has its padded tokens.
        across = np.full(len(self.fields[ACROSS_REPLICAS]), entry.num_tokens, dtype=np.int32)
        return attrs.evolve(inputs, num_tokens_across_dp=across)

    def dummy_inputs(self, batch: Batch, ahead: int) -> StepInputs:
        """Return the inputs of a batch without requests, for an idle rank; ``ahead`` decodes follow it."""
        counts = np.full(batch.num_reqs, batch.num_tokens // batch.num_reqs, dtype=np.int64)
        return null_inputs(counts, self.bounds.positions, self.page_size, ahead)

    def _poison_if_asked(self) -> None:
        if self._policy.options.poison:
            self.poison()

    def poison(self) -> None:
        """Overwrite everything that a forward must not depend on."""
        self.fields.poison()
        for held in self.body.outputs():
            poison(tensor_of(held))
        if self.graphs.pool is not None:
            self.graphs.pool.poison()
        for group in self.groups:
            group.workspace.fill_(255)  # NaN as any float of 16 or 32 bits, -1 as an integer

    def release(self) -> None:
        """Release all backends. Graphs go first: they hold pointers into what is released."""
        self.graphs.drop_all()
        self.attention.release()


def stage_together(forwards: Sequence[tuple[RoleRun, StepInputs]]) -> None:
    """Fill the fields of several roles at once: with one copy and one kernel on a GPU."""
    # Before the writes are made: poison spoils the fields, so that each write then fills all of its buffer.
    for role, _ in forwards:
        role._poison_if_asked()
    writes = [write for role, inputs in forwards for write in role.writes(inputs)]
    forwards[0][0]._apply(writes)


def _profiled(step: ForwardStep) -> AbstractContextManager[object]:
    """Return a range for PyTorch's profiler with the role, its graph and its batch; without a profiler, nothing."""
    # A range costs host time at every forward, also where nothing records it.
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    graph = "eager" if step.entry is None else str(step.entry)
    return torch.profiler.record_function(f"{step.batch.role.value}: {graph} for {batch_text(step.batch)}")
