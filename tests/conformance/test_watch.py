"""The checks around a forward, each with what it must find: real forwards, of which one value is changed afterwards."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import Reason, Role
from capture_planner.records.backend import Axis, Fill, MetadataField
from capture_planner_conformance import Case, Check, Shape, play
from capture_planner_conformance.failure import Law, Violation
from capture_planner_conformance.memory import mark
from capture_planner_conformance.scene import Arrive, RunBatch, Serve
from capture_planner_conformance.watch import _check_fill
from capture_planner_runner.execution.fields import FieldBuffer
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import RoleRun
from support.runner_conformance import RunnerCheck, RunnerScene, RunnerStage, runner_under_test

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=3, longest=24)
SCENE = RunnerScene(
    shape=SHAPE, num_reqs=3, num_tokens=20, size_tokens=(8, 20), size_reqs=(2, 3), drafts=3, recurrent=True, layers=2
)
CASE = Case(
    scene=SCENE,
    steps=(
        Arrive(prompt=5, computed=6),
        Arrive(prompt=9, computed=9),
        Arrive(prompt=12, computed=2),
        RunBatch(rows=((0, 2, 1), (1, 1, 0), (2, 5, 0))),
        RunBatch(rows=((0, 4, 2), (1, 4, 0))),
        Serve(requests=((3, 4, 0), (7, 3, 0))),
    ),
)
After = Callable[[RunnerStage, RoleRun, ForwardStep], None]


def after_each(check: After, case: Case = CASE) -> int:
    """Call a check after each forward of a case; return how often it was called."""
    calls = []

    def hook(stage: RunnerStage, role: RoleRun, step: ForwardStep) -> None:
        calls.append(step)
        check(stage, role, step)

    played = play(runner_under_test(), case, after=hook)
    assert played.failure is None, played.failure
    return len(calls)


def violation(law: Law, check: Callable[..., object], *arguments: object) -> str:
    """Return the message of the violation that a check must raise."""
    with pytest.raises(Violation) as raised:
        check(*arguments)
    assert raised.value.failure.check is law
    return raised.value.failure.message


def test_slots_follow_from_positions_and_pages() -> None:
    """Of each real token; while requests are served, pages and states are those of the scheduler."""
    served = []

    def check(stage: RunnerStage, role: RoleRun, step: ForwardStep) -> None:
        if role.role is Role.DRAFT_DECODE:
            return
        watch, size = stage.watch, stage.world.pages.page_size
        values = {buffer.key: buffer.view(step.extents).cpu().numpy().copy() for buffer in role.fields}
        real = step.inputs
        for name in ("positions", "slot_mapping", "query_start_loc", "block_table", "idx_mapping", "state_indices"):
            if name in values and real.array(name) is not None:
                array = real.array(name)
                values[name][tuple(map(slice, array.shape))] = array
        watch._check_placed(step, values)
        owners = np.repeat(np.arange(real.num_reqs), np.diff(real.query_start_loc))
        slots = values["slot_mapping"]
        for token, row in enumerate(owners):
            was = int(slots[token])
            slots[token] = was + 1
            position = int(values["positions"][token])
            message = violation(RunnerCheck.PLACED, watch._check_placed, step, values)
            expected = int(values["block_table"][row, position // size]) * size + position % size
            assert f"token {token} at position {position} has slot {was + 1}, " in message
            assert message.endswith(f"slot {expected}")
            slots[token] = 0  # The null slot, of a token that is written nowhere.
            watch._check_placed(step, values)
            slots[token] = was
        if watch.serving() is None:
            return
        served.append(role.role)
        for row in range(real.num_reqs):
            width = 1 + max(int(values["positions"][token]) // size for token in np.flatnonzero(owners == row))
            for column in range(width):
                table, before = values["block_table"], slots.copy()
                table[row, column] += 1
                inside = (owners == row) & (values["positions"][: len(owners)] // size == column)
                slots[: len(owners)][inside] += size
                message = violation(RunnerCheck.PLACED, watch._check_placed, step, values)
                assert message == f"row {row} has pages of another request"
                table[row, column] -= 1
                slots[:] = before
            if "state_indices" in values:
                values["state_indices"][row] += 1
                message = violation(RunnerCheck.PLACED, watch._check_placed, step, values)
                assert message == f"row {row} has the state of another request"
                values["state_indices"][row] -= 1
        watch._check_placed(step, values)

    assert after_each(check) > 10
    assert {Role.TARGET, Role.DRAFT_PREFILL} <= set(served)


@pytest.mark.parametrize("scene", [SCENE, attrs.evolve(SCENE, ahead=True, fused=False), attrs.evolve(SCENE, drafts=0)])
def test_batch_may_write_its_own_slots_alone(scene: RunnerScene) -> None:
    """Those of its tokens and the null page; in a chain also those of the next steps, up to the longest sequence."""
    ends = Case(scene=scene, steps=(*CASE.steps[:3], Arrive(prompt=2, computed=21), *CASE.steps[3:]))

    def slots_of(stage: RunnerStage, role: RoleRun, step: ForwardStep) -> set[int]:
        size, inputs = stage.world.pages.page_size, step.inputs
        wanted = set(range(size))
        if inputs.slot_mapping is not None:
            wanted |= {int(slot) for slot in inputs.slot_mapping}
        serving, is_decode = stage.watch.serving(), inputs.slot_mapping is None or role.role is Role.DRAFT_DECODE
        chain = 1 if step.entry is None or step.entry.draft_steps is None else step.entry.draft_steps
        for row, place in enumerate(inputs.idx_mapping):
            unread = serving is not None and serving.scheduler.states.is_unread(np.array([place]))[0]
            early = scene.drafts * (bool(unread) + is_decode) if stage.watch._filled else 0
            if is_decode or unread:
                begin = int(inputs.positions[inputs.query_start_loc[row]])
                for position in range(SHAPE.longest):
                    if begin - early <= position < begin + chain and position // size < inputs.block_table.shape[1]:
                        wanted.add(int(inputs.block_table[row][position // size]) * size + position % size)
        return wanted

    def check(stage: RunnerStage, role: RoleRun, step: ForwardStep) -> None:
        size, own = stage.world.pages.page_size, stage.watch._own_slots(role, step)
        assert own == slots_of(stage, role, step)
        # What is beyond the table has no slot.
        one_page = attrs.evolve(step.inputs, block_table=step.inputs.block_table[:, :1])
        narrow = attrs.evolve(step, inputs=one_page)
        assert stage.watch._own_slots(role, narrow) == slots_of(stage, role, narrow)

        held, number = stage.watch._held(), int(role.role.is_drafter)
        before = held.caches
        stage.watch._check_slots(held, {number: own})
        slots = range(stage.world.pages.num_pages * size)
        other = next(slot for slot in slots if slot not in own)
        for which in range(len(before)):
            for column in range(0, before[which].shape[1], 4):
                then = [bits.clone() for bits in before]
                then[which][other, column + 3] += 1
                then[which][max(own), column] += 1
                spoiled = attrs.evolve(held, caches=then)
                message = violation(Check.UNTOUCHED, stage.watch._check_slots, spoiled, {number: own})
                slot = other if which == number else min(other, max(own))
                assert f"slot {slot} of page {slot // size} changed" in message
                assert ("drafter's cache" in message) == (which == 1)
        then = [bits.clone() for bits in before]
        then[number][sorted(own)] += 1
        stage.watch._check_slots(attrs.evolve(held, caches=then), {number: own})

    assert after_each(check, ends) > 5


def test_states_of_other_requests_stay() -> None:
    """Recurrent states of the batch and the null state may change, and draft states of its requests."""

    def check(stage: RunnerStage, role: RoleRun, step: ForwardStep) -> None:
        held = stage.watch._held()
        pools = stage.watch._copied()
        declared = step.inputs.array("state_indices")
        own = {0} | (set() if declared is None else set(declared.tolist()))
        stage.watch._check_pools(pools, own)
        for row in range(len(pools[0][0])):
            then = [[states.clone() for states in each] for each in pools]
            then[0][0][row : row + 1].view(torch.uint8)[..., -1] ^= 1
            if row in own:
                stage.watch._check_pools(then, own)
            else:
                message = violation(Check.UNTOUCHED, stage.watch._check_pools, then, own)
                assert message.startswith(f"row {row} of the states of recurrent layer 0 changed")
        state = stage.runner.draft_state
        assert state is not None
        assert list(held.state) == ["token", "hidden", "proposed"]
        mine = set() if role.role is Role.TARGET else set(step.inputs.idx_mapping.tolist())
        stage.watch._check_state(held, mine)
        for name, tensor in held.state.items():
            for row in range(state.padding):
                changed = tensor.clone()
                changed[row : row + 1].view(torch.uint8)[..., 0] ^= 1
                spoiled = attrs.evolve(held, state={**held.state, name: changed})
                if row in mine:
                    stage.watch._check_state(spoiled, mine)
                else:
                    message = violation(Check.STATE, stage.watch._check_state, spoiled, mine)
                    assert f"({name})" in message

    assert after_each(check) > 10


def test_replays_outputs_addresses_and_the_dispatch_are_checked() -> None:
    """The graph of the entry and no other, all rows of all outputs, buffers where they were, the cheapest entry.

    Forwards are counted by role and mode, with the largest batch, the longest request and the highest page.
    """
    steps: list[ForwardStep] = []

    def check(stage: RunnerStage, role: RoleRun, step: ForwardStep) -> None:
        watch, key = stage.watch, (role.role, step.entry)
        steps.append(step)
        modes = [f"{each.batch.role.value} {'NONE' if each.entry is None else each.entry.mode.value}" for each in steps]
        assert watch.ran == {kind: modes.count(kind) for kind in modes}
        assert watch.padded == sum(each.extents != each.real for each in steps)
        assert watch.longest == max(int(each.inputs.seq_lens.max()) for each in steps)
        assert watch.pages == max(int(each.inputs.block_table.max()) for each in steps)
        most = [max(getattr(each.batch, name) for each in steps) for name in ("num_reqs", "num_tokens")]
        assert watch.largest == tuple(most)
        right = [] if step.entry is None else [key]
        watch._check_replayed(role, step, right)
        other = next(entry for entry in role.plan.entries if entry != step.entry)
        for wrong in ([*right, (role.role, other)], [(role.role, other)], *([[]] if right else [])):
            message = violation(RunnerCheck.REPLAYED, watch._check_replayed, role, step, wrong)
            assert message.startswith(f"{role.role.value}: " if wrong else "no graph is replayed")
        for layer, output in watch._outputs.of(role):
            for row in range(len(output)):
                kept = output[row:].clone()
                output[row:].view(torch.int64).fill_(mark(output))
                message = violation(Check.WRITTEN, watch._check_written, role)
                assert message == f"attention of layer {layer} does not write row {row} of {len(output)}"
                output[row:] = kept
                output[row, :1].view(torch.int64).fill_(mark(output))
                watch._check_written(role)
                output[row:] = kept
        watch._check_pointers()
        held, then = watch._persistent[-1]
        watch._persistent[-1] = held, then + 8
        assert violation(Check.FROZEN, watch._check_pointers) == f"{held[0]} has moved"
        watch._persistent[-1] = held, then

        batch = step.batch
        answer = stage.runner.dispatcher.dispatch(batch)
        watch.check_dispatch(batch, answer)
        worse = next(entry for entry in role.plan.entries if entry != answer.entry)
        message = violation(RunnerCheck.DISPATCHED, watch.check_dispatch, batch, Dispatch(worse, reason=None))
        assert message.endswith(f"is {answer.entry or 'none'}")
        assert message.startswith(f"the batch is dispatched to {worse},")
        large = attrs.evolve(batch, num_tokens=99, query_len=None)
        for reason in (None, Reason.UNCOVERED):
            silent = Dispatch(None, reason=reason)
            message = violation(RunnerCheck.DISPATCHED, watch.check_dispatch, large, silent)
            assert message == "the batch runs eager without a reason"
        refused = Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        if watch.serving() is None:
            watch.check_dispatch(large, refused)
        else:
            message = violation(RunnerCheck.CLASSIFIED, watch.check_dispatch, large, refused)
            assert message == "the batch was scheduled, and counts as one that is not admissible"

    assert after_each(check) > 10


FIELDS = st.builds(
    lambda fill, value: MetadataField(
        name="field", axis=Axis.REQUEST, fill=fill, value=value if fill is Fill.CONSTANT else None
    ),
    st.sampled_from((Fill.CONSTANT, Fill.REAL_TOTAL, Fill.REPEAT_LAST, Fill.NULL_SLOT)),
    st.integers(-2, 2),
)


@given(FIELDS, st.lists(st.integers(-3, 3), max_size=4), st.integers(0, 3), st.integers(-3, 3), st.data())
def test_padding_is_the_fill(
    field: MetadataField, real: list[int], more: int, tokens: int, data: st.DataObject
) -> None:
    """A constant, the number of tokens, or the last real value; 0 where there is none."""
    fill = {
        Fill.CONSTANT: field.value or 0,
        Fill.REAL_TOTAL: tokens,
        Fill.REPEAT_LAST: real[-1] if real else 0,
        Fill.NULL_SLOT: 0,
    }[field.fill]
    size = len(real) + more
    buffer = FieldBuffer("key", field, torch.zeros(size, dtype=torch.int64))
    values = np.array([*real, *[fill] * more], dtype=np.int64)
    _check_fill(buffer, values, np.array(real, dtype=np.int64), tokens)
    if size:
        place = data.draw(st.integers(0, size - 1))
        values[place] += 1
        if place < len(real):
            _check_fill(buffer, values, np.array(real, dtype=np.int64), tokens)
        else:
            message = violation(Check.FILLED, _check_fill, buffer, values, np.array(real), tokens)
            assert message == f"the padding of key must be {fill} ({field.fill.value}), and is {fill + 1}"
