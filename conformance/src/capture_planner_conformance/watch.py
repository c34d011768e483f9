"""Around every forward of a runner, however it was started: garbage before it, and checks on both sides.

A scene's runner captures through ``WatchedGraphs``. They let a session run out of memory or break off, and they know
which graph belongs to which entry without asking the runner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.backend import Fill
from capture_planner.records.batch import Batch, Entry
from capture_planner_conformance.failure import Check, Violation, located
from capture_planner_conformance.memory import (
    MOVED_FIELDS,
    SOURCES,
    Canary,
    Garbage,
    Kept,
    Outputs,
    Snapshot,
    bits,
    canaries_of,
    mark,
    on_host,
    private_buffers,
)
from capture_planner_conformance.scene import CaptureAttack
from capture_planner_conformance.served_rows import RequestRows, ServedForward, requests_by_state, rows_of
from capture_planner_conformance.world import ModelCache, World
from capture_planner_runner.execution.fields import Extents, FieldBuffer, TensorRef, tensor_of
from capture_planner_runner.execution.inputs import Array, ForwardStep
from capture_planner_runner.execution.padding import Write, out_of_bounds
from capture_planner_runner.execution.role import ForwardObserver, LayerTensors, RoleRun
from capture_planner_runner.graphs.graph import Graph, Grapher, GraphPool, Leftover
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.serving import Serving

Key = tuple[Role, Entry | None]
"""Which graph: its role and its entry."""

Slots = set[int]
FieldValues = Mapping[str, np.ndarray[Any, Any]]
"""Values of the fields by key, as far as a forward reads."""


class InjectedError(RuntimeError):
    """Raised by the suite in the middle of a capture session."""


class WatchedGraphs:
    """The grapher of one scene. In a ``session`` captures are disturbed; those on first use are not.

    :param beneath: captures and replays.
    """

    def __init__(self, beneath: Grapher, attack: CaptureAttack) -> None:
        self.leftovers: dict[Key, Leftover] = {}
        """What outlived the capture of a graph, where anything did."""
        self.broken: Key | None = None
        """The capture that the suite broke off."""
        self._beneath, self._attack = beneath, attack
        self._staged: Counter[Role] = Counter()
        self._breaks = 0
        self.is_open = False
        """Whether a session runs."""
        self.key: Key | None = None
        """The forward that attends now, or did last."""

    @contextmanager
    def session(self, *, breaks: int = 0) -> Iterator[None]:
        """Watch a capture session; ``breaks``: the number of the attention call that raises, 0 for none."""
        self.is_open, self._breaks = True, breaks
        self._staged.clear()
        self.leftovers.clear()
        try:
            yield
        finally:
            self.is_open, self._breaks = False, 0

    def staged(self, role: RoleRun) -> None:
        """Take note that a forward is prepared; raises for a graph that is to find no memory."""
        if self.is_open and self._attack.alone:
            # The number may be larger than the count of the role's graphs.
            staged, alone = self._staged[role.role], (self._attack.alone - 1) % len(role.plan.entries)
            self._staged[role.role] += 1
            # The graph that fits is staged twice: to warm up, and to be captured.
            if staged - (staged > alone) != alone:
                for buffer in role.fields:
                    buffer.spoil()  # What was to be written into it is not.
                raise torch.OutOfMemoryError("the suite leaves memory for one graph of a role")

    def attention(self, role: RoleRun) -> None:
        """Take note of which forward attends; raises in a session that is to break off here."""
        self.key = role.role, next(iter(role.attention.metadata.values())).entry
        if self.is_open:
            # From 0 this only goes down, so then no call breaks.
            self._breaks -= 1
            if self._breaks == 0:
                self.broken = self.key
                raise InjectedError("the suite breaks this capture session off")

    # As a grapher.

    def reading(self) -> Reading | None:
        return self._beneath.reading()

    def settle(self) -> None:
        self._beneath.settle()

    def pool(self, limit: int | None = None) -> GraphPool:
        return self._beneath.pool(limit)

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> Graph:
        """Capture, and take note of what outlives it."""
        graph = self._beneath.capture(forward, pool)
        assert self.key is not None, "a forward attends"
        if graph.leftover.size:
            self.leftovers[self.key] = graph.leftover
        return graph

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        self._beneath.split(between, reads, writes)


@attrs.frozen(kw_only=True, eq=False)
class _Held:
    """What requests hold on the device."""

    caches: Sequence[torch.Tensor]
    """Keys and values by slot, of the target and of the drafter, bit by bit: ``[slots, bits]``."""
    state: Mapping[str, torch.Tensor]
    """The draft state."""


class Watch(ForwardObserver):
    """Around every forward of a runner: garbage before it, checks on both sides.

    Hand it to the runner, whose graphs it marks outputs in, and call ``begin`` before the first forward. A subclass
    checks more, in ``check_dispatch``, ``check_fields`` and ``check_after``.

    :param graphs: what the runner captures with.
    :param spared: sources of garbage that are left clean.
    :param tampering: what an audit does to a field, whose values are not checked then.
    :param after: called after the checks of each forward.
    """

    runner: Runner
    world: World
    _persistent: list[tuple[TensorRef, int]]
    """Every persistent tensor, and where it was after the capture."""

    def __init__(
        self,
        graphs: WatchedGraphs,
        spared: Iterable[str] = (),
        tampering: ForwardObserver | None = None,
        after: Callable[[RoleRun, ForwardStep], None] | None = None,
    ) -> None:
        self.ran: Counter[str] = Counter()
        """Forwards by role and mode: the mode of the graph, or NONE."""
        self.largest = (0, 0)
        """The most requests and the most tokens of a batch; not always of the same."""
        self.longest, self.pages = 0, 0
        """The most keys of a request, and the highest page number that a batch read."""
        self.padded = 0
        """Forwards of graphs that are larger than their batch."""
        self.served_forwards: list[ServedForward] = []
        """Of the target, and first ones of the drafter, while requests were served."""
        self._after, self._spared, self._kept = after, frozenset(spared), Kept()
        self._trusting, self._inner = tampering is not None, tampering or ForwardObserver()
        self.graphs = graphs
        self._garbage, self._outputs = Garbage(spared), Outputs()
        self._filled = False

    def begin(self, runner: Runner, world: World) -> None:
        """Watch the forwards of a runner that has captured, on the requests of a world."""
        self.runner, self.world = runner, world
        self._persistent = [
            (held, tensor_of(held).data_ptr()) for role in runner.roles.values() for held in role.persistent()
        ]
        self._canaries: dict[tuple[Role, Extents], tuple[Canary, ...]] = {}
        self._kept = Kept.of(runner, self._spared)

    def sources(self) -> tuple[str, ...]:
        """Return the names of everything that gets garbage."""
        fields = {buffer.key for role in self.runner.roles.values() for buffer in role.fields}
        return (*SOURCES, *sorted(fields), *private_buffers(self.runner))

    # Around one forward.

    @contextmanager
    def run(self, role: RoleRun, batch: Batch, dispatch: Dispatch, *, filled: bool) -> Iterator[None]:
        """Write garbage before the fields are filled, and check the dispatch afterwards."""
        self._filled = filled
        self.largest = (max(self.largest[0], batch.num_reqs), max(self.largest[1], batch.num_tokens))
        self._garbage.before(role, filled=filled)
        self._kept.restore()
        with located(batch, dispatch.entry):
            yield
            # EAGER is the suite's own answer, and not the dispatcher's.
            if dispatch is not EAGER:
                self.check_dispatch(batch, dispatch)

    def writes(self, role: RoleRun, writes: list[Write]) -> list[Write]:
        """Let an audit change them; in a capture session, the next graph may have no memory."""
        self.graphs.staged(role)
        return self._inner.writes(role, writes)

    def attention(self, role: RoleRun, number: int, layer: int, tensors: LayerTensors) -> AbstractContextManager[None]:
        """Mark the output, in graphs too."""
        self.graphs.attention(role)
        return self._outputs.marked(role, layer, tensors.out)

    @contextmanager
    def forward(self, role: RoleRun, step: ForwardStep) -> Iterator[None]:
        """Write garbage before a forward, and check everything around it."""
        mode = GraphMode.NONE if step.entry is None else step.entry.mode
        self.ran[f"{role.role.value} {mode.value}"] += 1
        lengths, table = step.inputs.seq_lens, step.inputs.block_table
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.pages = max(self.pages, int(table.max(initial=0)))
        self.padded += step.extents != step.real
        served: tuple[RequestRows, ...] = ()
        with located(step.batch, step.entry):
            if not self._trusting:
                values = on_host({buffer.key: buffer.view(step.extents) for buffer in role.fields})
                self.check_fields(role, step, values)
                # A draft decode reads drafts, which are not always tokens of the request.
                if (serving := self.serving()) is not None and role.role is not Role.DRAFT_DECODE:
                    served = tuple(rows_of(step, values, requests_by_state(serving.scheduler.unfinished)))
            # After the checks of what was filled: nothing beyond the extents may be read.
            self._garbage.fields(role, step.extents)
            own, held = self._own_slots(role, step), self._held()
            canaries = None if self._trusting else Snapshot.of(self._canaries_of(role, step.extents))
            with self._inner.forward(role, step):
                yield
            if canaries is not None:
                self.check_after(role, step)
                self._check_moved(role, step)
                if (name := canaries.changed()) is not None:
                    raise Check.UNSPOILED.violation(f"the forward changes {name}, which is not its own")
            self._check_written(role)
            if served:
                self._keep(role, step, served)
            self._check_slots(held, {int(role.role.is_drafter): own})
            self._check_state(held, set() if role.role is Role.TARGET else set(step.inputs.idx_mapping.tolist()))
            self._check_pointers()
            if self._after is not None:
                self._after(role, step)

    def _keep(self, role: RoleRun, step: ForwardStep, rows: tuple[RequestRows, ...]) -> None:
        """Keep the rows of a forward of served requests."""
        # By layer: the copies are in the order in which layers first attended.
        outputs = [output[: step.real.tokens] for _, output in sorted(self._outputs.of(role), key=itemgetter(0))]
        self.served_forwards.append(
            ServedForward(
                role=role.role, entry=step.entry, batch=step.batch, rows=rows, outputs=torch.stack(outputs, dim=1)
            )
        )

    def between(self, capture: Callable[[], None]) -> None:
        """Capture between two forwards: it may write null pages, and nothing of a request."""
        held, null = self._held(), set(range(self.world.pages.page_size))
        capture()
        try:
            self._check_slots(held, {0: null, 1: null})
            self._check_state(held, set())
            self._check_pointers()
        except Violation as violation:
            notes = (*violation.failure.notes, "a capture on first use changed it")
            raise Violation(attrs.evolve(violation.failure, notes=notes)) from None

    def _canaries_of(self, role: RoleRun, extents: Extents) -> tuple[Canary, ...]:
        """Return the canaries of a forward; a tensor that is replaced has moved, which is looked at apart."""
        key = role.role, extents
        if key not in self._canaries:
            self._canaries[key] = canaries_of(self.runner, role, extents)
        return self._canaries[key]

    def _held(self) -> _Held:
        state = self.runner.draft_state
        return _Held(
            caches=[_slots_of(cache) for cache in self.world.caches],
            state={} if state is None else {name: getattr(state, name).clone() for name in _STATE},
        )

    # Checks before.

    def serving(self) -> Serving | None:
        """Return the serving whose steps run now; None for steps of the suite's own."""
        serving = self.runner._serving
        return None if serving is None or serving.done or serving.is_over else serving

    def check_dispatch(self, batch: Batch, answer: Dispatch) -> None:
        """Check how a batch was dispatched, after its forward; the suite trusts the runner."""

    def check_after(self, role: RoleRun, step: ForwardStep) -> None:
        """Check what a forward did, in addition to what it read and wrote; the suite trusts the runner."""

    def check_fields(self, role: RoleRun, step: ForwardStep, values: FieldValues) -> None:
        """Check the fill of padding, and that indices are within bounds."""
        declared = step.inputs.declared
        for buffer in role.fields:
            real = declared.get(buffer.field.name)
            if real is None and buffer.field.fill is not Fill.REPEAT_LAST:
                # A graph that filled its own fields: derived ones are as the last step of the host left them.
                real = step.inputs.array(buffer.field.name)
            if real is not None and not buffer.is_frozen:
                _check_fill(buffer, values[buffer.key], real, step.real.tokens)
        for buffer in role.fields:
            # Without a drafter, the graph itself puts tokens in place of negative ids.
            is_ahead = self.runner.policy.run_ahead and self.runner.drafter is None
            is_answer = buffer.field.name == "input_ids" and is_ahead
            if buffer.field.indexes is not None and not (buffer.is_frozen or is_answer):
                real = declared.get(buffer.field.name)
                wrong = out_of_bounds(buffer, values[buffer.key], real, step.extents, role.bounds)
                if wrong is not None:
                    raise Check.BOUNDED.violation(wrong, field=buffer.key, axis=buffer.field.axis.value)

    # Checks after.

    def _check_moved(self, role: RoleRun, step: ForwardStep) -> None:
        """Check after a replay the padding of fields that graphs advance: it must still be the fill."""
        moved = [buffer for buffer in role.fields if buffer.field.name in MOVED_FIELDS and not buffer.is_frozen]
        values = on_host({buffer.key: buffer.view(step.extents) for buffer in moved})
        for buffer in moved:
            real = step.inputs.array(buffer.field.name)
            if real is not None:
                _check_fill(buffer, values[buffer.key], real, step.real.tokens)

    def _check_written(self, role: RoleRun) -> None:
        """Check that attention wrote every row of its outputs, padding included."""
        outputs = dict(self._outputs.of(role))
        if not outputs:
            return
        unwritten = torch.stack([(bits(output) == mark(output)).all(dim=1) for output in outputs.values()]).nonzero()
        if len(unwritten):
            number, row = unwritten[0].tolist()
            layer, output = list(outputs.items())[number]
            raise Check.WRITTEN.violation(f"attention of layer {layer} does not write row {row} of {len(output)}")

    def _own_slots(self, role: RoleRun, step: ForwardStep) -> Slots:
        """Return the slots that the batch may write: its tokens' slots, and the null page."""
        entry, inputs = step.entry, step.inputs
        mine = None if inputs.slot_mapping is None else set(inputs.slot_mapping.tolist())
        table, positions = inputs.block_table, inputs.positions
        unread = self._unread(inputs.idx_mapping)
        if mine is None or role.role is Role.DRAFT_DECODE or unread.any():
            # Slots that only the graph computes follow from positions and pages: of this step and, in a chain,
            # of the later ones. If drafts of a step were verified on the device, the host knows an upper bound of the
            # positions after it: in its own draft decodes, and in all forwards of a step that is launched ahead.
            steps = (entry and entry.draft_steps) or 1
            drafts = self.runner.plan.speculative
            most = drafts.num_tokens if drafts and self._filled else 0
            early = most * (unread.astype(np.int64) + (mine is None or role.role is Role.DRAFT_DECODE))
            size, longest = self.world.pages.page_size, self.runner.plan.model.max_model_len
            mine = mine or set()
            firsts = positions[inputs.query_start_loc[:-1]]
            for row, first in enumerate(firsts.tolist()):
                for position in range(max(first - int(early[row]), 0), min(first + steps, longest)):
                    if position // size < table.shape[1]:
                        mine.add(int(table[row, position // size]) * size + position % size)
        # Padded rows write the null page.
        return mine | set(range(self.world.pages.page_size))

    def _unread(self, states: Array) -> Array:
        """Say of each request whether the host has not read where its step begins, ``bool[R]``."""
        serving = self.serving()
        return np.zeros(len(states), np.bool_) if serving is None else serving.scheduler.states.is_unread(states)

    def _check_slots(self, before: _Held, own: Mapping[int, Slots]) -> None:
        """Check that no slot changed but those that may, by the number of the cache."""
        pairs = zip(self.world.caches, before.caches, strict=True)
        changed = torch.stack([_changed(_slots_of(cache), then) for cache, then in pairs])
        for number, slots in enumerate(changed.cpu().numpy()):
            if others := set(np.flatnonzero(slots).tolist()) - own.get(number, set()):
                slot = min(others)
                raise Check.UNTOUCHED.violation(
                    f"slot {slot} of page {slot // self.world.pages.page_size} changed, and no token of the "
                    f"batch is in it ({'drafter' if number else 'target'}'s cache)"
                )

    def _check_state(self, before: _Held, own: set[int]) -> None:
        """Check that the draft state of no request changed but of those that may."""
        state = self.runner.draft_state
        if state is None:
            return
        # The row behind the last request is for padding, and may hold anything.
        others = [row for row in range(state.padding) if row not in own]
        changed = torch.stack([_changed(getattr(state, name), then) for name, then in before.state.items()])
        for name, rows in zip(before.state, changed.cpu().numpy(), strict=True):
            if rows[others].any():
                raise Check.STATE.violation(f"the draft state ({name}) of a request outside the batch changed")

    def _check_pointers(self) -> None:
        for held, then in self._persistent:
            if tensor_of(held).data_ptr() != then:
                raise Check.FROZEN.violation(f"{held[0]} has moved")


def _slots_of(cache: ModelCache) -> torch.Tensor:
    """Return a copy of the bits of a cache, ``[slots, bits]``."""
    return torch.cat([bits(tensor) for tensor in cache.flat()], dim=1)


def _changed(now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    """Say of each row whether its bits changed."""
    return (bits(now) != bits(then)).view(len(then), -1).any(dim=1)


def _check_fill(buffer: FieldBuffer, values: np.ndarray[Any, Any], real: np.ndarray[Any, Any], num_tokens: int) -> None:
    # Most forwards without a graph have no padding.
    if values.shape == real.shape:
        return
    field, fill = buffer.field, buffer.field.value or 0
    if field.fill is Fill.REAL_TOTAL:
        fill = num_tokens
    elif field.fill is Fill.REPEAT_LAST and len(real):
        fill = int(real[-1])
    wrong = values != fill
    wrong[tuple(map(slice, real.shape))] = False
    if wrong.any():
        raise Check.FILLED.violation(
            f"the padding of {buffer.key} must be {fill} ({field.fill.value}), and is {values[wrong][0]}",
            field=buffer.key,
            axis=field.axis.value,
        )


_STATE = ("token", "hidden", "proposed")

EAGER = Dispatch(None, reason=Reason.MODE)
"""Dispatches any batch to no graph."""
