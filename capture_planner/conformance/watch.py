"""Garbage before every forward of a runner, and checks before and after it, however it was started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.conformance.canaries import MOVED_FIELDS, Snapshot
from capture_planner.conformance.capture_attack import Key, WatchedGraphs
from capture_planner.conformance.classification import check_classified
from capture_planner.conformance.failure import Check, Violation, located
from capture_planner.conformance.garbage import SOURCES, Garbage, Outputs, bits, mark
from capture_planner.conformance.private import Kept, private_buffers
from capture_planner.conformance.reference_dispatch import cheapest
from capture_planner.conformance.served_drafts import Proposal, StepRows, proposals_of, rows_of
from capture_planner.conformance.world import World
from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.backend import Fill
from capture_planner.records.batch import Batch
from capture_planner.runtime.execution.fields import FieldBuffer, tensor_of
from capture_planner.runtime.execution.inputs import Array, ForwardStep
from capture_planner.runtime.execution.padding import Write, out_of_bounds
from capture_planner.runtime.execution.role import ForwardObserver, ForwardTimes, RoleRun
from capture_planner.runtime.executor import NULL_SLOT, NULL_STATE
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.serving import Serving

Slots = set[int]
FieldValues = Mapping[str, np.ndarray[Any, Any]]
"""Values of the fields by key, as far as a forward reads."""


@attrs.frozen(kw_only=True, eq=False)
class _Held:
    """What requests hold on the device."""

    caches: Sequence[Sequence[torch.Tensor]]
    """Keys and values by slot, of the target and of the drafter."""
    pools: Sequence[Sequence[torch.Tensor]]
    """Recurrent states."""
    state: Mapping[str, torch.Tensor]
    """The draft state."""


class Watch(ForwardObserver):
    """Around every forward of a runner: garbage before it, checks on both sides.

    Hand it to the runner, whose graphs it marks outputs in, and call ``begin`` before the first forward.

    :param graphs: what the runner captures with.
    :param spared: sources of garbage that are left clean.
    :param tampering: what an audit does to a field, whose values are not checked then.
    :param after: called after the checks of each forward.
    """

    runner: Runner
    world: World
    _persistent: list[tuple[str, int]]

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
        self.served: list[StepRows | Proposal] = []
        """What was verified and proposed while requests were served with drafts, in order."""
        self._after, self._spared, self._kept = after, frozenset(spared), Kept()
        self._trusting, self._inner = tampering is not None, tampering or ForwardObserver()
        self._graphs = graphs
        self._garbage, self._outputs = Garbage(spared), Outputs()
        self._filled = False

    def begin(self, runner: Runner, world: World) -> None:
        """Watch the forwards of a runner that has captured, on the requests of a world."""
        self.runner, self.world = runner, world
        self._persistent = self._pointers()
        self._kept = Kept.of(runner, self._spared)

    def sources(self) -> tuple[str, ...]:
        """Return the names of everything that gets garbage."""
        fields = {buffer.key for role in self.runner.parts.roles.values() for buffer in role.fields}
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
            if dispatch is not EAGER:
                self._check_dispatch(batch, dispatch)

    def writes(self, role: RoleRun, writes: list[Write]) -> list[Write]:
        """Let an audit change them; in a capture session, the next graph may have no memory."""
        self._graphs.staged(role)
        return self._inner.writes(role, writes)

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
        """Mark the output, in graphs too."""
        self._graphs.attention(role)
        return self._outputs.marked(role, layer, out)

    def forward(self, role: RoleRun, step: ForwardStep, started: float) -> ForwardTimes:
        """Run a step between garbage and checks."""
        mode = GraphMode.NONE if step.entry is None else step.entry.mode
        self.ran[f"{role.role.value} {mode.value}"] += 1
        lengths, table = step.inputs.seq_lens, step.inputs.block_table
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.pages = max(self.pages, int(table.max(initial=0)))
        self.padded += step.extents != step.real
        with located(step.batch, step.entry):
            if not self._trusting:
                self._check_classified(role, step)
                values = {buffer.key: buffer.view(step.extents).cpu().numpy() for buffer in role.fields}
                self._check_fields(role, step, values)
                self._check_placed(step, values)
                self._note_rows(role, step, values)
            self._garbage.fields(role, step.extents)
            own, held = self._own_slots(role, step), self._held()
            canaries = None if self._trusting else Snapshot.of(self.runner, role, step.extents)
            replayed = len(self._graphs.replays)
            times = self._inner.forward(role, step, started)
            self._check_replayed(role, step, self._graphs.replays[replayed:])
            if canaries is not None:
                self._check_moved(role, step)
                if (name := canaries.changed()) is not None:
                    raise Check.UNSPOILED.violation(f"the forward changes {name}, which is not its own")
                self._note_proposals(role, step)
            self._check_written(role)
            declared = step.inputs.array("state_indices")
            self._check_slots(held, {int(role.role.is_drafter): own})
            self._check_pools(held, {NULL_STATE, *(() if declared is None else declared.tolist())})
            self._check_state(held, set() if role.role is Role.TARGET else set(step.inputs.idx_mapping.tolist()))
            self._check_pointers()
            if self._after is not None:
                self._after(role, step)
        return times

    def between(self, capture: Callable[[], None]) -> None:
        """Capture between two forwards: it may write null pages and null states, and nothing of a request."""
        held, null = self._held(), set(range(self.world.pages.page_size))
        capture()
        try:
            self._check_slots(held, {0: null, 1: null})
            self._check_pools(held, {NULL_STATE})
            self._check_state(held, set())
            self._check_pointers()
        except Violation as violation:
            notes = (*violation.failure.notes, "a capture on first use changed it")
            raise Violation(attrs.evolve(violation.failure, notes=notes)) from None

    def _held(self) -> _Held:
        state = self.runner.parts.state
        return _Held(
            caches=[[tensor.clone() for tensor in cache.flat()] for cache in self.world.caches],
            pools=[[pool.states.clone() for pool in cache.states] for cache in self.world.caches],
            state={} if state is None else {name: getattr(state, name).clone() for name in _STATE},
        )

    def _note_rows(self, role: RoleRun, step: ForwardStep, values: FieldValues) -> None:
        serving = self.serving()
        if serving is not None and self.runner.drafter is not None and role.role is not Role.DRAFT_DECODE:
            self.served.extend(rows_of(step, values, serving))

    def _note_proposals(self, role: RoleRun, step: ForwardStep) -> None:
        serving, state, speculative = self.serving(), self.runner.parts.state, self.runner.plan.speculative
        if serving is not None and state is not None and speculative is not None and role.role.is_drafter:
            self.served.extend(proposals_of(step, state.proposed, speculative, serving))

    # Checks before.

    def serving(self) -> Serving | None:
        """Return the serving whose steps run now; None for steps of the suite's own."""
        serving = self.runner._serving
        return None if serving is None or serving.done or serving.is_over else serving

    def _check_classified(self, role: RoleRun, step: ForwardStep) -> None:
        """Compare a batch that the scheduler made with its requests: their prompts, and what is computed of them."""
        serving = self.serving()
        if serving is not None and role.role is not Role.DRAFT_DECODE:
            states = serving.scheduler.states
            # After a step that the host has not read, positions are as if all drafts were kept.
            computed = states.computed + states.ahead if role.role is Role.TARGET else None
            check_classified(step, serving.scheduler.unfinished, computed, self.runner.plan.speculative)

    def _check_dispatch(self, batch: Batch, answer: Dispatch) -> None:
        expected = cheapest(self.runner.dispatcher.plan, batch)
        if answer.entry != expected:
            raise Check.DISPATCHED.violation(
                f"the batch is dispatched to {answer.entry or 'no graph'}, and the cheapest compatible graph is "
                f"{expected or 'none'}"
            )
        if expected is None and answer.reason in (None, Reason.UNCOVERED):
            raise Check.DISPATCHED.violation("the batch runs eager without a reason")

    def _check_fields(self, role: RoleRun, step: ForwardStep, values: FieldValues) -> None:
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
            is_ahead = self.runner.policy.run_ahead and self.runner.parts.outcome is None
            is_answer = buffer.field.name == "input_ids" and is_ahead
            if buffer.field.indexes is not None and not (buffer.is_frozen or is_answer):
                real = declared.get(buffer.field.name)
                wrong = out_of_bounds(buffer, values[buffer.key], real, step.extents, role.bounds)
                if wrong is not None:
                    raise Check.BOUNDED.violation(wrong, field=buffer.key, axis=buffer.field.axis.value)

    def _check_placed(self, step: ForwardStep, values: FieldValues) -> None:
        """Compare slots with positions and pages, and pages with those that the scheduler assigned."""
        tokens, reqs = step.real.tokens, step.real.reqs
        names = ("query_start_loc", "block_table", "positions", "slot_mapping", "idx_mapping")
        starts, table, positions, slots, places = (values[name] for name in names)
        owner = np.searchsorted(starts[1 : reqs + 1], np.arange(tokens), side="right")
        page, offset = np.divmod(positions[:tokens], self.world.pages.page_size)
        expected = table[owner, page].astype(np.int64) * self.world.pages.page_size + offset
        wrong = (slots[:tokens] != expected) & (slots[:tokens] != NULL_SLOT)
        if wrong.any():
            token = int(wrong.argmax())
            raise Check.PLACED.violation(
                f"token {token} at position {positions[token]} has slot {slots[token]}, and by its block table "
                f"slot {expected[token]}",
                field="slot_mapping",
            )
        last = starts[1 : reqs + 1] - 1
        wrong = (values["seq_lens"][:reqs] != positions[last] + 1) & (np.diff(starts[: reqs + 1]) > 0)
        if wrong.any():
            row = int(wrong.argmax())
            keys, position = values["seq_lens"][row], positions[last[row]]
            message = f"row {row} has {keys} keys, and its last token is at position {position}"
            raise Check.PLACED.violation(message, field="seq_lens")
        serving = self.serving()
        if serving is None:
            return
        rows = values.get("state_indices")
        pool_row = serving.scheduler.states.pool_row[places[:reqs]]
        if rows is not None and (rows[:reqs] != pool_row).any():
            row = int((rows[:reqs] != pool_row).argmax())
            raise Check.PLACED.violation(f"row {row} has the state of another request", field="state_indices")
        given = serving.scheduler.states.table
        for row in range(reqs):
            width = 1 + int(page[owner == row].max(initial=-1))
            if (table[row, :width] != given[places[row], :width]).any():
                raise Check.PLACED.violation(f"row {row} has pages of another request", field="block_table")

    # Checks after.

    def _check_moved(self, role: RoleRun, step: ForwardStep) -> None:
        """Check after a replay the padding of fields that graphs advance: it must still be the fill."""
        for buffer in role.fields:
            real = step.inputs.array(buffer.field.name)
            if buffer.field.name in MOVED_FIELDS and real is not None and not buffer.is_frozen:
                _check_fill(buffer, buffer.view(step.extents).cpu().numpy(), real, step.real.tokens)

    def _check_replayed(self, role: RoleRun, step: ForwardStep, replays: Sequence[Key]) -> None:
        """Check that the graph of the step's entry was replayed, as it was known at its capture, and no other."""
        expected = [] if step.entry is None else [(role.role, step.entry)]
        if list(replays) != expected:
            graphs = ", ".join(f"{of.value}: {entry}" for of, entry in replays) or "no graph"
            raise Check.REPLAYED.violation(f"{graphs} is replayed for this batch")

    def _check_written(self, role: RoleRun) -> None:
        """Check that attention wrote every row of its outputs, padding included."""
        for layer, output in self._outputs.of(role):
            unwritten = (bits(output) == mark(output)).all(dim=1)
            if bool(unwritten.any()):
                raise Check.WRITTEN.violation(
                    f"attention of layer {layer} does not write row {int(unwritten.nonzero()[0])} of {len(output)}"
                )

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
        return mine | set(range(self.world.pages.page_size))

    def _unread(self, states: Array) -> Array:
        """Say of each request whether the host has not read where its step begins, ``bool[R]``."""
        serving = self.serving()
        return np.zeros(len(states), np.bool_) if serving is None else serving.scheduler.states.is_unread(states)

    def _check_slots(self, before: _Held, own: Mapping[int, Slots]) -> None:
        """Check that no slot changed but those that may, by the number of the cache."""
        for number, (cache, tensors) in enumerate(zip(self.world.caches, before.caches, strict=True)):
            for now, then in zip(cache.flat(), tensors, strict=True):
                changed = (bits(now) != bits(then)).any(dim=1).nonzero().flatten().tolist()
                if others := set(changed) - own.get(number, set()):
                    slot = min(others)
                    raise Check.UNTOUCHED.violation(
                        f"slot {slot} of page {slot // self.world.pages.page_size} changed, and no token of the "
                        f"batch is in it ({'drafter' if number else 'target'}'s cache)"
                    )

    def _check_pools(self, before: _Held, own: set[int]) -> None:
        """Check that no recurrent state changed but those that may."""
        for cache, pools in zip(self.world.caches, before.pools, strict=True):
            for layer, (pool, then) in enumerate(zip(cache.states, pools, strict=True)):
                changed = (bits(pool.states) != bits(then)).flatten(1).any(dim=1).nonzero().flatten().tolist()
                if others := set(changed) - own:
                    raise Check.UNTOUCHED.violation(
                        f"row {min(others)} of the states of recurrent layer {layer} changed, and no request of the "
                        "batch is in it",
                        field="state_indices",
                    )

    def _check_state(self, before: _Held, own: set[int]) -> None:
        """Check that the draft state of no request changed but of those that may."""
        state = self.runner.parts.state
        if state is None:
            return
        others = [row for row in range(state.padding) if row not in own]
        for name, then in before.state.items():
            if not torch.equal(bits(getattr(state, name)[others]), bits(then[others])):
                raise Check.STATE.violation(f"the draft state ({name}) of a request outside the batch changed")

    def _pointers(self) -> list[tuple[str, int]]:
        roles = self.runner.parts.roles.values()
        return [(tensor[0], tensor_of(tensor).data_ptr()) for role in roles for tensor in role.persistent()]

    def _check_pointers(self) -> None:
        for (name, then), (_, now) in zip(self._persistent, self._pointers(), strict=True):
            if now != then:
                raise Check.FROZEN.violation(f"{name} has moved")


def _check_fill(buffer: FieldBuffer, values: np.ndarray[Any, Any], real: np.ndarray[Any, Any], num_tokens: int) -> None:
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
