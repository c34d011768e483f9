"""A batch of a scene: its values, worked out a second time with loops, and the comparison with the runner's."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner_conformance import Case, Shape, play
from capture_planner_conformance.failure import Violation
from capture_planner_conformance.scene import VOCABULARY, Arrive, DraftScheme, RunBatch
from capture_planner_conformance.steps import admits, run_step
from support.runner_conformance import RunnerCheck, RunnerScene, RunnerStage, runner_under_test

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=3, longest=24)
SCENE = RunnerScene(
    shape=SHAPE, num_reqs=4, num_tokens=30, size_tokens=(30,), size_reqs=(4,), drafts=3, recurrent=True, loras=2
)


@pytest.fixture(scope="module")
def stage():
    """Four requests: in its prompt, at its end, one past it, and near the longest sequence."""
    with RunnerStage(runner_under_test(), SCENE) as each:
        for prompt, computed in ((9, 4), (5, 5), (3, 6), (2, 22)):
            each.world.arrive(Arrive(prompt=prompt, computed=computed))
        yield each


def test_a_step_accepts_drafts_that_its_rows_have(stage, monkeypatch):
    """None of a row of one token, and of others at most all but the last token; unknown requests are left out."""
    seen = []

    def batch_of(rows, loras):
        seen.extend((live.number, count, accepted) for live, count, accepted in rows)
        raise InterruptedError

    monkeypatch.setattr(stage, "batch", batch_of)
    with pytest.raises(InterruptedError):
        run_step(stage, RunBatch(rows=((0, 3, 7), (1, 1, 1), (2, 2, 0), (9, 1, 0))))
    assert seen == [(0, 3, 2), (1, 1, 0), (2, 2, 0)]


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), min_size=1, unique_by=lambda row: row[0]
)


@settings(max_examples=min(settings.default.max_examples, 60))
@given(ROWS, st.integers(0, 2))
def test_batch_has_the_values_of_its_requests(stage, drawn, loras):
    """Request by request and token by token: ids, positions, slots, lengths, and what is final after the step."""
    drawn = [(number, min(count, SHAPE.longest - stage.live[number].computed), a) for number, count, a in drawn]
    drawn = [(number, count, max(0, min(accepted, count - 1))) for number, count, accepted in drawn]
    rows = [(stage.live[number], count, accepted) for number, count, accepted in drawn]
    batch = stage.batch(rows, loras)
    inputs = batch.target() if sum(count for _, count, _ in drawn) else None
    found = {} if inputs is None else inputs.declared
    token, settled, drafts = 0, [], 0
    each, shifted = list(batch.each()), list(batch.each(shift=1))
    for index, (live, count, accepted) in enumerate(rows):
        assert each[index][0] == shifted[index][0] == index
        assert each[index][1] is live
        assert (each[index][2].start, each[index][2].stop) == (token, token + count)
        assert batch.starts[index] == token
        past = live.computed >= live.prompt
        settled.append(min(accepted + 1, count) if past else count)
        drafts += max(count - 1, 0) if past else 0
        for shift, ids in ((0, each[index][3]), (1, shifted[index][3])):
            wanted = [int(live.tokens[shift + at]) for at in range(live.computed)]
            for offset in range(count):
                value = int(live.tokens[live.computed + shift + offset])
                wanted.append((value + 1) % VOCABULARY if past and offset > accepted else value)
            assert ids.tolist() == wanted
            if shift == 0:
                assert batch.ids[token : token + count].tolist() == wanted[live.computed :]
        if found:
            for offset in range(count):
                position = live.computed + offset
                assert found["positions"][token + offset] == position
                assert found["slot_mapping"][token + offset] == live.pages[position // 3] * 3 + position % 3
            own = max(count - 1, 0) if past else 0
            ends = live.computed + count - own == max(live.prompt, live.computed + 1)
            assert inputs.sampled_counts[index] == (own + 1 if ends else 0)
            assert found["seq_lens"][index] == live.computed + count
            assert found["idx_mapping"][index] == live.place
            assert found["state_indices"][index] == stage.world.rows[live.number]
            assert found["cu_num_draft_tokens"][index] == drafts
            assert found["last_token_indices"][index] == max(token + count - 1, 0)
            pages = -(-max(one.computed + number for one, number, _ in rows) // 3)
            assert found["block_table"][index, :pages].tolist() == live.pages[:pages]
        token += count
    assert batch.starts[-1] == token == len(batch.ids)
    assert [batch.settled(*row) for row in rows] == settled
    lengths = {count for _, count, _ in rows}
    for role in (Role.TARGET, Role.DRAFT_PREFILL):
        made = batch.batch(role)
        assert (made.role, made.num_reqs, made.num_tokens) == (role, len(rows), token)
        assert made.query_len == (lengths.pop() if len(lengths) == 1 else None) or role is Role.DRAFT_PREFILL
        assert made.past_prompt == all(live.computed >= live.prompt for live, _, _ in rows)
        assert made.active_loras == loras
    decode = batch.batch(Role.DRAFT_DECODE)
    assert (decode.num_reqs, decode.num_tokens, decode.query_len) == (len(rows), len(rows), 1)
    limits = token + len(rows) * SCENE.extra_slots <= 30 and len(rows) <= min(4, token)
    assert admits(stage, rows) == limits


def test_value_that_differs_from_the_runners_is_found(stage):
    """Each of them, and whichever element; a table as far as the step reads it."""
    rows = [(stage.live[1], 3, 1), (stage.live[0], 2, 0)]
    batch = stage.batch(rows)
    right = batch.target()
    assert batch.inputs_by_role[Role.TARGET] is right
    for name, value in right.declared.items():
        if name not in {"input_ids", "positions", "slot_mapping", "seq_lens", "block_table", "idx_mapping"}:
            continue
        for place in np.ndindex(batch._own(Role.TARGET)[name].shape):
            wrong = value.copy()
            wrong[place] += 1
            changed = attrs.evolve(right, **{name: wrong})
            with pytest.raises(Violation) as raised:
                batch.made(Role.TARGET, changed)
            assert raised.value.failure.check is RunnerCheck.MADE
            assert raised.value.failure.role is Role.TARGET
            assert raised.value.failure.message.startswith(f"{name} is [")
    assert batch.inputs_by_role[Role.TARGET] is right
    wider = np.pad(right.block_table, ((0, 0), (0, 2)), constant_values=7)
    more = attrs.evolve(right, block_table=wider)
    assert batch.made(Role.TARGET, more) is more
    assert batch.inputs_by_role[Role.TARGET] is more


KINDS = {
    "modules": {"drafter": DraftScheme.MODULES},
    "own rows of a model": {"drafter": DraftScheme.DRAFT_MODEL, "recurrent": True},
    "parallel": {"drafter": DraftScheme.PARALLEL, "loras": 2},
    "parallel model": {"drafter": DraftScheme.PARALLEL_MODEL},
    "schedule": {"schedule": ((1, 1, 3), (2, 2, 0), (3, 4, 2)), "ranks": 2, "beyond": 1},
    "alone": {"drafts": 0, "coupled": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_kind_of_drafter_pass(kind):
    """Requests in their prompts, past them and near the end, rows without a token, some drafts accepted."""
    scene = attrs.evolve(SCENE, **{"recurrent": False, "loras": 0, **KINDS[kind]})
    steps = (
        Arrive(prompt=9, computed=4),
        Arrive(prompt=5, computed=5),
        Arrive(prompt=3, computed=6, shares=1),
        Arrive(prompt=2, computed=20),
        RunBatch(rows=((0, 3, 0), (1, 4, 1), (2, 2, 1)), loras=2),
        RunBatch(rows=((1, 1, 0), (3, 2, 1), (2, 4, 3))),
        RunBatch(rows=((3, 1, 0),)),
        RunBatch(rows=((3, 1, 0), (0, 0, 0), (1, 2, 0))),
    )
    played = play(runner_under_test(), Case(scene=scene, steps=steps))
    assert played.failure is None, played.failure
    assert not played.skipped
    assert played.log.steps["forward"] == 4


def test_step_moves_its_requests_on(stage):
    """By what is final; a step that does not apply is skipped, and moves nothing."""
    before = {number: live.computed for number, live in stage.live.items()}
    for rows, loras in ((((9, 1, 0),), 0), (((0, 21, 0),), 0), (((0, 0, 0),), 0), ((), 0)):
        assert not run_step(stage, RunBatch(rows=rows, loras=loras))
    assert before == {number: live.computed for number, live in stage.live.items()}
    assert run_step(stage, RunBatch(rows=((0, 3, 1), (9, 1, 0), (1, 4, 2), (2, 2, 9)), loras=9))
    moved = {number: live.computed - before[number] for number, live in stage.live.items()}
    assert moved == {0: 3, 1: 3, 2: 2, 3: 0}
