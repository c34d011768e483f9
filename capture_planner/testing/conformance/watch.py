"""What is spoilt before every forward, and what is checked around it, whoever began it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from capture_planner.contract import Axis, Fill
from capture_planner.dispatch import Dispatch
from capture_planner.entry import Batch, Entry
from capture_planner.errors import RunError
from capture_planner.modes import Reason, Role
from capture_planner.runtime import padding
from capture_planner.runtime.fields import Extents, FieldBuffer, poison, tensor_of
from capture_planner.runtime.role import Ran, RoleRun
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.step import Made
from capture_planner.runtime.updates import DraftState
from capture_planner.testing.conformance.dispatching import cheapest
from capture_planner.testing.conformance.finding import Check, Finding, Violation, broke
from capture_planner.testing.conformance.world import World
from capture_planner.words import counted

Slots = set[int]


class Watch:
    """Around every forward of a runner: garbage before it, checks on both sides."""

    def __init__(
        self, runner: Runner, world: World, spared: Iterable[str] = (), *, trusting: bool = False
    ) -> None:
        self.runner, self.world, self._trusting = runner, world, trusting
        self.spared = frozenset(spared)
        """Sources of garbage that are left clean; see ``sources``."""
        self.ran: Counter[str] = Counter()
        """Forwards, by role and by what ran: the mode of a graph, or NONE."""
        self.batch: Batch | None = None
        self._values: Made = {}
        self._filled = False
        self._places: np.ndarray | None = None
        for role in runner.parts.roles.values():
            role.run = functools.partial(self._run, role, role.run)  # type: ignore[method-assign]
            role.again = functools.partial(self._again, role, role.again)  # type: ignore[method-assign]
        self._persistent = self._where()

    def sources(self) -> tuple[str, ...]:
        """Return the names of all that is spoilt."""
        fields = {buffer.key for role in self.runner.parts.roles.values() for buffer in role.fields}
        return ("outputs", "pool", "workspace", "null page", "free pages", *sorted(fields))

    # Around one forward.

    def _run(
        self,
        role: RoleRun,
        inner: Callable[..., Ran],
        batch: Batch,
        values: Made,
        started: float,
        *,
        filled: bool = False,
        answer: Dispatch | None = None,
    ) -> Ran:
        self.batch, self._values, self._filled = batch, values, filled
        self._spoil(role, filled=filled)
        try:
            ran = inner(batch, values, started, filled=filled, answer=answer)
        except Violation:
            raise
        except Exception as error:
            entry = (answer or role.dispatch(batch)).entry
            raise Violation(broke(error, role=role.role, entry=entry, batch=in_words(batch))) from error
        if answer is None:
            self._check_dispatch(role, batch, ran.dispatch)
        return ran

    def _again(
        self,
        role: RoleRun,
        inner: Callable[..., Ran],
        answer: Dispatch,
        entry: Entry | None,
        extents: Extents,
        started: float,
    ) -> Ran:
        self.ran[f"{role.role.value} {answer.mode.value}"] += 1
        if not self._trusting:
            self._check_fields(role, entry, extents)
        self._spoil_beyond(role, extents)
        mine = self._own_slots(role, entry)
        caches = {index: tensor.clone() for index, tensor in enumerate(self._caches(role))}
        state = self._state()
        ran = inner(answer, entry, extents, started)
        self._check_untouched(role, entry, mine, caches)
        self._check_state(role, entry, state)
        self._check_pointers(role, entry)
        return ran

    # Garbage.

    def _spoil(self, role: RoleRun, *, filled: bool) -> None:
        """Overwrite all that a forward must not depend on; fields only where they are filled after it."""
        if not filled:
            for buffer in role.fields:
                if not buffer.is_frozen and buffer.key not in self.spared:
                    poison(buffer.tensor)
                    buffer.spoil()
        if "outputs" not in self.spared:
            for held in role.body.outputs():
                poison(tensor_of(held))
        if "pool" not in self.spared and role.pool is not None:
            role.pool.poison()
        if "workspace" not in self.spared:
            for group in role.groups:
                group.workspace.fill_(255)

    def _spoil_beyond(self, role: RoleRun, extents: Extents) -> None:
        """Overwrite what lies past the extents that this forward has."""
        for buffer in role.fields:
            if not buffer.is_frozen and buffer.key not in self.spared:
                poison(buffer.tensor[extents.rows(buffer.field) :])
                buffer.spoil()

    # Checks before.

    def _check_dispatch(self, role: RoleRun, batch: Batch, answer: Dispatch) -> None:
        expected = cheapest(role.dispatcher.plan, batch)
        if answer.entry != expected:
            self._refuse(
                Check.DISPATCHED,
                f"this batch was sent to {answer.entry or 'no graph'}, and the cheapest compatible graph is "
                f"{expected or 'none'}",
                role,
                answer.entry,
            )
        if expected is None and answer.reason in (None, Reason.UNCOVERED):
            self._refuse(Check.DISPATCHED, "this batch runs eager, and no reason is given", role, None)

    def _check_fields(self, role: RoleRun, entry: Entry | None, extents: Extents) -> None:
        values, batch = self._values, self.batch
        assert batch is not None, "a forward belongs to a batch"
        for buffer in role.fields:
            real = values.get(buffer.field.name)
            if real is not None and not buffer.is_frozen:
                self._check_fill(role, entry, extents, buffer, real, batch)
        checked = [
            b for b in role.fields if not (b.field.name == "input_ids" and self.runner.parts.target.ahead)
        ]
        try:
            padding.check_bounds(checked, values, extents, role._bounds)
        except RunError as error:
            self._refuse(Check.BOUNDED, str(error), role, entry, field=str(error).partition("[")[0])

    def _check_fill(
        self,
        role: RoleRun,
        entry: Entry | None,
        extents: Extents,
        buffer: FieldBuffer,
        real: np.ndarray[Any, Any],
        batch: Batch,
    ) -> None:
        held = buffer.view(extents).cpu().numpy()
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
                f"the padding of {buffer.key} must hold {fill} ({field.fill.value}) and has {found.flat[0]}",
                role,
                entry,
                field=buffer.key,
                axis=field.axis.value,
            )

    # Checks after.

    def _own_slots(self, role: RoleRun, entry: Entry | None) -> Slots:
        """Return the slots that the batch may write, as the values of the step say."""
        values = self._values
        mine = set(values["slot_mapping"].tolist()) if "slot_mapping" in values else None
        table, positions = values["block_table"], values["positions"]
        if mine is None or role.role is Role.DRAFT_DECODE:
            # Slots that only the graph knows follow from positions and pages: of this step and, in a chain,
            # of those behind it.
            # Where drafts were verified on the device, the host only knows the last position that there can be.
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

    def _caches(self, role: RoleRun) -> Iterable[torch.Tensor]:
        for family in self.world.families:
            yield from family.flat()

    def _check_untouched(
        self, role: RoleRun, entry: Entry | None, mine: Slots, before: Mapping[int, torch.Tensor]
    ) -> None:
        drafts = bool(role.role.is_drafter)
        index = 0
        for number, family in enumerate(self.world.families):
            own = mine if bool(number) == drafts else set()
            for tensor in family.flat():
                then = before[index]
                same = (_bits(tensor) == _bits(then)).all(dim=1)
                index += 1
                if bool(same.all()):
                    continue
                others = set((~same).nonzero().flatten().tolist()) - own
                if others:
                    slot = min(others)
                    self._refuse(
                        Check.UNTOUCHED,
                        f"the slot {slot} of page {slot // self.world.pages.page_size} changed, and no token "
                        f"of the batch is there ({'drafter' if number else 'target'}'s cache)",
                        role,
                        entry,
                    )

    def _state(self) -> dict[str, torch.Tensor]:
        state = self.runner.parts.state
        return {} if state is None else {name: getattr(state, name).clone() for name in _STATE}

    def _check_state(self, role: RoleRun, entry: Entry | None, before: Mapping[str, torch.Tensor]) -> None:
        state = self.runner.parts.state
        if state is None:
            return
        mine = set() if role.role is Role.TARGET else {*self._values["idx_mapping"].tolist(), state.padding}
        others = [row for row in range(state.padding) if row not in mine]
        for name, then in before.items():
            if not torch.equal(_bits(getattr(state, name)[others]), _bits(then[others])):
                self._refuse(
                    Check.STATE,
                    f"the draft state ({name}) of a request that is not in the batch",
                    role,
                    entry,
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
                self._refuse(Check.FROZEN, f"{name} is no longer where it was", role, entry)

    def _refuse(
        self, check: Check, says: str, role: RoleRun, entry: Entry | None, *, field: str = "", axis: str = ""
    ) -> None:
        raise Violation(
            Finding(
                check=check,
                says=says,
                role=role.role,
                entry=entry,
                batch="" if self.batch is None else in_words(self.batch),
                field=field,
                axis=axis,
            )
        )


_STATE = ("token", "hidden", "proposed")


def in_words(batch: Batch) -> str:
    """Say what a batch is."""
    text = f"{counted(batch.num_reqs, 'request')}, {counted(batch.num_tokens, 'token')}"
    if batch.query_len is not None:
        text += f", {batch.query_len} each"
    return text + ("" if batch.past_prompt else ", prompts among them")


def fields_of(names: Iterable[str], roles: Iterable[RoleRun]) -> dict[str, Axis]:
    """Return the axis of each named field."""
    wanted = set(names)
    return {buffer.key: buffer.field.axis for role in roles for buffer in role.fields if buffer.key in wanted}


def nothing_captured(batch: Batch) -> Dispatch:
    """Return the answer that runs a batch eager."""
    return Dispatch(None, reason=Reason.MODE)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal where bits are, NaNs included."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.itemsize])


__all__ = ["DraftState", "Watch", "fields_of", "in_words", "nothing_captured"]
