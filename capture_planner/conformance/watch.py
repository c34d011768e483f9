"""Garbage before every forward of a runner, and checks before and after it, however it was started."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from capture_planner.conformance.failure import Check, Failure, Violation
from capture_planner.conformance.garbage import SOURCES, Garbage
from capture_planner.conformance.outputs import Outputs, bits, mark
from capture_planner.conformance.reference_dispatch import cheapest
from capture_planner.conformance.world import World
from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.backend import Fill
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.text import counted
from capture_planner.runtime.execution.fields import Extents, FieldBuffer, tensor_of
from capture_planner.runtime.execution.inputs import ForwardStep, StepInputs
from capture_planner.runtime.execution.padding import out_of_bounds
from capture_planner.runtime.execution.role import ForwardTimes, RoleRun
from capture_planner.runtime.execution.updates import LENGTHS
from capture_planner.runtime.executor import NULL_SLOT
from capture_planner.runtime.runner import Runner

Slots = set[int]
FieldValues = Mapping[str, np.ndarray[Any, Any]]
"""Values of the fields by key, as far as a forward reads."""


class Watch:
    """Around every forward of a runner: garbage before it, checks on both sides."""

    def __init__(
        self, runner: Runner, world: World, spared: Iterable[str] = (), *, trusting: bool = False, outputs: Outputs
    ) -> None:
        self.runner, self.world, self._trusting, self._outputs = runner, world, trusting, outputs
        self._garbage = Garbage(spared)
        self.ran: Counter[str] = Counter()
        """Forwards by role and mode: the mode of the graph, or NONE."""
        self.largest = (0, 0)
        """The most requests and the most tokens of a batch; not always of the same."""
        self.batch: Batch | None = None
        self._filled = False
        for role in runner.parts.roles.values():
            role.run = functools.partial(self._run, role, role.run)  # type: ignore[method-assign]
            role.replay_or_run = functools.partial(self._forward, role, role.replay_or_run)  # type: ignore[method-assign]
        self._persistent = self._where()

    def sources(self) -> tuple[str, ...]:
        """Return the names of everything that gets garbage."""
        fields = {buffer.key for role in self.runner.parts.roles.values() for buffer in role.fields}
        return (*SOURCES, *sorted(fields))

    # Around one forward.

    def _run(
        self,
        role: RoleRun,
        inner: Callable[..., ForwardTimes],
        batch: Batch,
        dispatch: Dispatch,
        inputs: StepInputs,
        started: float,
        *,
        filled: bool = False,
    ) -> ForwardTimes:
        self.batch, self._filled = batch, filled
        self.largest = (max(self.largest[0], batch.num_reqs), max(self.largest[1], batch.num_tokens))
        self._garbage.before(role, filled=filled)
        try:
            times = inner(batch, dispatch, inputs, started, filled=filled)
        except Violation:
            raise
        except Exception as error:
            where = {"role": role.role, "entry": dispatch.entry, "batch": describe_batch(batch)}
            raise Violation.of(error, **where) from error
        if dispatch is not EAGER:
            self._check_dispatch(role, batch, dispatch)
        return times

    def _forward(
        self, role: RoleRun, inner: Callable[..., ForwardTimes], step: ForwardStep, started: float
    ) -> ForwardTimes:
        entry, extents = step.entry, step.extents
        mode = GraphMode.NONE if entry is None else entry.mode
        self.ran[f"{role.role.value} {mode.value}"] += 1
        if not self._trusting:
            held = {buffer.key: buffer.view(extents).cpu().numpy() for buffer in role.fields}
            self._check_fields(role, entry, extents, step.inputs, held)
            self._check_placed(role, step, held)
        self._garbage.beyond(role, extents)
        mine = self._own_slots(role, step)
        caches = [[tensor.clone() for tensor in cache.flat()] for cache in self.world.caches]
        state = self._state()
        times = inner(step, started)
        if not self._trusting:
            self._check_moved(role, entry, extents, step.inputs)
        self._check_written(role, entry)
        self._check_untouched(role, entry, mine, caches)
        self._check_state(role, step, state)
        self._check_pointers(role, entry)
        return times

    # Checks before.

    def _check_dispatch(self, role: RoleRun, batch: Batch, answer: Dispatch) -> None:
        expected = cheapest(self.runner.dispatcher.plan, batch)
        if answer.entry != expected:
            self._refuse(
                Check.DISPATCHED,
                f"the batch is dispatched to {answer.entry or 'no graph'}, and the cheapest compatible graph is "
                f"{expected or 'none'}",
                role,
                answer.entry,
            )
        if expected is None and answer.reason in (None, Reason.UNCOVERED):
            self._refuse(Check.DISPATCHED, "the batch runs eager without a reason", role, None)

    def _check_fields(
        self, role: RoleRun, entry: Entry | None, extents: Extents, inputs: StepInputs, held: FieldValues
    ) -> None:
        values, batch = inputs.declared, self.batch
        assert batch is not None, "a forward belongs to a batch"
        for buffer in role.fields:
            real = values.get(buffer.field.name)
            if real is None and buffer.field.fill is not Fill.REPEAT_LAST:
                # A graph that filled its own fields: derived ones are as the last step of the host left them.
                real = inputs.array(buffer.field.name)
            if real is not None and not buffer.is_frozen:
                self._check_fill(role, entry, held[buffer.key], buffer, real, batch)
        for buffer in role.fields:
            is_answer = buffer.field.name == "input_ids" and self.runner.policy.run_ahead
            if buffer.field.indexes is not None and not (buffer.is_frozen or is_answer):
                real = values.get(buffer.field.name)
                wrong = out_of_bounds(buffer, held[buffer.key], real, extents, role.bounds)
                if wrong is not None:
                    axis = buffer.field.axis.value
                    self._refuse(Check.BOUNDED, str(wrong), role, entry, field=buffer.key, axis=axis)

    def _check_fill(
        self,
        role: RoleRun,
        entry: Entry | None,
        held: np.ndarray[Any, Any],
        buffer: FieldBuffer,
        real: np.ndarray[Any, Any],
        batch: Batch,
    ) -> None:
        field = buffer.field
        fill = field.value or 0
        if field.fill is Fill.REAL_TOTAL:
            fill = batch.num_tokens
        elif field.fill is Fill.REPEAT_LAST and len(real):
            fill = int(real[-1])
        tail = held[len(real) :]
        wide = held[: len(real), real.shape[1] :] if real.ndim == 2 else held[:0]
        if (tail != fill).any() or (wide != fill).any():
            found = tail[tail != fill] if (tail != fill).any() else wide[wide != fill]
            self._refuse(
                Check.FILLED,
                f"the padding of {buffer.key} must be {fill} ({field.fill.value}), and is {found.flat[0]}",
                role,
                entry,
                field=buffer.key,
                axis=field.axis.value,
            )

    def _check_placed(self, role: RoleRun, step: ForwardStep, held: FieldValues) -> None:
        """Compare slots with positions and pages, and pages with those that the scheduler assigned."""
        entry, tokens, reqs = step.entry, step.real.tokens, step.real.reqs
        names = ("query_start_loc", "block_table", "positions", "slot_mapping", "idx_mapping")
        starts, table, positions, slots, places = (held[name] for name in names)
        owner = np.searchsorted(starts[1 : reqs + 1], np.arange(tokens), side="right")
        page, offset = np.divmod(positions[:tokens], self.world.pages.page_size)
        expected = table[owner, page].astype(np.int64) * self.world.pages.page_size + offset
        wrong = (slots[:tokens] != expected) & (slots[:tokens] != NULL_SLOT)
        if wrong.any():
            token = int(wrong.argmax())
            self._refuse(
                Check.PLACED,
                f"token {token} at position {positions[token]} has slot {slots[token]}, and by its block table "
                f"slot {expected[token]}",
                role,
                entry,
                field="slot_mapping",
            )
        given = self.pages_of()
        if given is not None:
            for row in range(reqs):
                width = 1 + int(page[owner == row].max(initial=-1))
                if (table[row, :width] != given[places[row], :width]).any():
                    self._refuse(
                        Check.PLACED, f"row {row} has pages of another request", role, entry, field="block_table"
                    )

    def pages_of(self) -> np.ndarray[Any, Any] | None:
        """Return the pages of each place, if a scheduler assigns them."""
        serving = self.runner._serving
        if serving is None or serving.done or serving.is_over:
            return None
        return serving.scheduler.states.table

    # Checks after.

    def _check_moved(self, role: RoleRun, entry: Entry | None, extents: Extents, inputs: StepInputs) -> None:
        """Check after a replay the padding of fields that graphs advance: it must still be the fill."""
        assert self.batch is not None, "a forward belongs to a batch"
        for buffer in role.fields:
            real = inputs.array(buffer.field.name)
            if buffer.field.name in _MOVED and real is not None and not buffer.is_frozen:
                held = buffer.view(extents).cpu().numpy()
                self._check_fill(role, entry, held, buffer, real, self.batch)

    def _check_written(self, role: RoleRun, entry: Entry | None) -> None:
        """Check that attention wrote every row of its outputs, padding included."""
        for layer, output in self._outputs.of(role):
            unwritten = (bits(output) == mark(output)).all(dim=1)
            if bool(unwritten.any()):
                self._refuse(
                    Check.WRITTEN,
                    f"attention of layer {layer} does not write row {int(unwritten.nonzero()[0])} of {len(output)}",
                    role,
                    entry,
                )

    def _own_slots(self, role: RoleRun, step: ForwardStep) -> Slots:
        """Return the slots that the batch may write: those of its tokens, and the null page."""
        entry, inputs = step.entry, step.inputs
        mine = None if inputs.slot_mapping is None else set(inputs.slot_mapping.tolist())
        table, positions = inputs.block_table, inputs.positions
        if mine is None or role.role is Role.DRAFT_DECODE:
            # Slots that only the graph computes follow from positions and pages: of this step and, in a chain,
            # of the later ones. If drafts were verified on the device, the host knows an upper bound of positions.
            steps = (entry and entry.draft_steps) or 1
            drafts = self.runner.plan.speculative
            early = drafts.num_tokens if drafts and self._filled else 0
            size, longest = self.world.pages.page_size, self.runner.plan.model.max_model_len
            mine = mine or set()
            for row, first in enumerate(positions.tolist()):
                for position in range(max(first - early, 0), min(first + steps, longest)):
                    if position // size < table.shape[1]:
                        mine.add(int(table[row, position // size]) * size + position % size)
        return mine | set(range(self.world.pages.page_size))

    def _check_untouched(
        self, role: RoleRun, entry: Entry | None, mine: Slots, before: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        for number, (cache, held) in enumerate(zip(self.world.caches, before, strict=True)):
            own = mine if bool(number) == role.role.is_drafter else set()
            for tensor, then in zip(cache.flat(), held, strict=True):
                same = (bits(tensor) == bits(then)).all(dim=1)
                if bool(same.all()):
                    continue
                others = set((~same).nonzero().flatten().tolist()) - own
                if others:
                    slot = min(others)
                    self._refuse(
                        Check.UNTOUCHED,
                        f"slot {slot} of page {slot // self.world.pages.page_size} changed, and no token of the "
                        f"batch is in it ({'drafter' if number else 'target'}'s cache)",
                        role,
                        entry,
                    )

    def _state(self) -> dict[str, torch.Tensor]:
        state = self.runner.parts.state
        return {} if state is None else {name: getattr(state, name).clone() for name in _STATE}

    def _check_state(self, role: RoleRun, step: ForwardStep, before: Mapping[str, torch.Tensor]) -> None:
        state = self.runner.parts.state
        if state is None:
            return
        mine = set() if role.role is Role.TARGET else {*step.inputs.idx_mapping.tolist(), state.padding}
        others = [row for row in range(state.padding) if row not in mine]
        for name, then in before.items():
            if not torch.equal(bits(getattr(state, name)[others]), bits(then[others])):
                self._refuse(
                    Check.STATE, f"the draft state ({name}) of a request outside the batch changed", role, step.entry
                )

    def _where(self) -> list[tuple[str, int]]:
        return [
            (held[0], tensor_of(held).data_ptr())
            for role in self.runner.parts.roles.values()
            for held in role.persistent()
        ]

    def _check_pointers(self, role: RoleRun, entry: Entry | None) -> None:
        for (name, then), (_, now) in zip(self._persistent, self._where(), strict=True):
            if now != then:
                self._refuse(Check.FROZEN, f"{name} has moved", role, entry)

    def _refuse(
        self, check: Check, message: str, role: RoleRun, entry: Entry | None, *, field: str = "", axis: str = ""
    ) -> None:
        raise Violation(
            Failure(
                check=check,
                message=message,
                role=role.role,
                entry=entry,
                batch="" if self.batch is None else describe_batch(self.batch),
                field=field,
                axis=axis,
            )
        )


_STATE = ("token", "hidden", "proposed")
_MOVED = ("positions", "slot_mapping", *LENGTHS)


def describe_batch(batch: Batch) -> str:
    """Describe a batch in a few words."""
    text = f"{counted(batch.num_reqs, 'request')}, {counted(batch.num_tokens, 'token')}"
    if batch.query_len is not None:
        text += f", {batch.query_len} each"
    return text + ("" if batch.past_prompt else ", prompts among them")


EAGER = Dispatch(None, reason=Reason.MODE)
"""Dispatches any batch to no graph."""
