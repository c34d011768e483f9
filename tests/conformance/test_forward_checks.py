"""What forwards are compared with: each check passes what is right, and finds one value that is changed."""

from __future__ import annotations

import math
from collections import Counter

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner_conformance import Check, Shape
from capture_planner_conformance import steps as checks
from capture_planner_conformance.failure import Violation
from capture_planner_conformance.scene import VOCABULARY, Arrive, Serve
from capture_planner_runner.serving.workload import Request
from support.runner_conformance import RunnerCheck, RunnerScene, RunnerStage, runner_under_test

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
SCENE = RunnerScene(shape=SHAPE, num_reqs=3, num_tokens=20, size_tokens=(20,), size_reqs=(3,), drafts=2, recurrent=True)
ENTRY = Entry(mode=GraphMode.FULL, num_tokens=4, num_reqs=4, query_len=1)
FLOATS = st.floats(-4, 4, width=16)


@pytest.fixture(scope="module")
def stage():
    """A stage of the reference backend with a drafter, a recurrent layer and three requests."""
    with RunnerStage(runner_under_test(), SCENE) as each:
        for prompt, computed in ((3, 3), (9, 12), (12, 2)):
            each.world.arrive(Arrive(prompt=prompt, computed=computed))
        yield each


@pytest.fixture
def ran(stage):
    """A batch of which the target's forward was just run, with its entry."""
    rows = [(stage.live[0], 2, 1), (stage.live[1], 1, 0), (stage.live[2], 5, 0)]
    batch = stage.batch(rows)
    inputs = batch.target()
    for live, _, _ in rows:
        stage.world.rewind(live)
    return batch, stage.run(batch.batch(Role.TARGET), inputs, eager=False)


def violation(check, *arguments, **named):
    """Return the failure that a check must raise."""
    with pytest.raises(Violation) as raised:
        check(*arguments, **named)
    return raised.value.failure


@given(
    rows=st.integers(1, 3),
    layers=st.integers(1, 3),
    width=st.integers(1, 3),
    tolerance=st.sampled_from((0.0, 0.01, 0.5)),
    data=st.data(),
)
def test_first_wrong_row_is_found_by_a_scan(rows, layers, width, tolerance, data):
    """Row by row and layer by layer: the norm of the error against that of what is right, and a little more."""
    numbers = st.lists(FLOATS, min_size=rows * layers * width, max_size=rows * layers * width)
    want = torch.tensor(data.draw(numbers), dtype=torch.float64).view(rows, layers * width)
    off = st.sampled_from((0.0, 0.0, 0.0, 0.002, 1.0, math.nan, math.inf))
    got = want + torch.tensor([data.draw(off) for _ in range(want.numel())]).view_as(want)
    expected = None
    for row in range(rows):
        for layer in range(layers):
            at = slice(layer * width, (layer + 1) * width)
            error = math.sqrt(sum(float(x) ** 2 for x in got[row, at] - want[row, at]))
            size = math.sqrt(sum(float(x) ** 2 for x in want[row, at]))
            if expected is None and not error <= tolerance * (size + 0.1):
                expected = row, layer
    found = checks.first_wrong_row(got, want, width, tolerance)
    if expected is None:
        assert found is None
    else:
        assert found.startswith(f"layer {expected[1]}, ")
        assert found.endswith(f" in row {expected[0]}")


@pytest.mark.parametrize("size", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("part", [0.999, 1.001])
def test_error_that_rounding_can_make_is_no_error(size, part):
    """It grows with the norm of the row, and is not 0 where that is."""
    want = torch.tensor([[0.0, size, 0.0, 2.0]], dtype=torch.float64)
    got = want + torch.tensor([[0.0, 0.0, part * 0.03 * 2.1, 0.0]])
    assert (checks.first_wrong_row(got, want, 2, 0.03) is None) == (part < 1)
    off = want + torch.tensor([[part * 0.03 * (size + 0.1), 0.0, 0.0, 0.0]])
    assert (checks.first_wrong_row(off, want, 2, 0.03) is None) == (part < 1)


@given(st.lists(st.lists(FLOATS, min_size=2, max_size=2), min_size=1, max_size=3), st.data())
def test_likeliest_token_is_found_by_a_scan(hidden, data):
    """Of all tokens, or as near as what rounding makes of the largest weights; never one that is no token."""
    head = torch.from_numpy(np.random.default_rng(1).normal(size=(2, VOCABULARY)) * 3)
    largest = max(math.hypot(*column) for column in head.T.tolist())
    tokens, tolerance = [], 1e-13
    for row in hidden:
        logits = [sum(x * float(head[i, token]) for i, x in enumerate(row)) for token in range(VOCABULARY)]
        order = sorted(range(VOCABULARY), key=lambda token: -logits[token])
        tokens.append(data.draw(st.sampled_from((order[0], order[1], order[2]))))
        short = logits[order[0]] - logits[tokens[-1]]
        tolerance = max(tolerance, short / (4 * (math.hypot(*row) + 0.1) * largest))
    rows = torch.tensor(hidden, dtype=torch.float64)
    assert checks.is_likeliest(torch.tensor(tokens), rows, head, tolerance * 1.001)
    if tolerance > 1e-9:
        assert not checks.is_likeliest(torch.tensor(tokens), rows, head, tolerance * 0.999)
    for wrong in (-1, VOCABULARY):
        assert not checks.is_likeliest(torch.tensor([*tokens[1:], wrong]), rows, head, 100.0)
    ends = torch.tensor([0, VOCABULARY - 1])
    assert checks.is_likeliest(ends, torch.zeros(2, 2, dtype=torch.float64), head, tolerance)


@pytest.mark.parametrize(
    ("entry", "eager", "law"), [(ENTRY, False, "ROWS"), (ENTRY, True, "EAGER"), (None, False, "EAGER")]
)
def test_wrong_row_of_a_step_without_a_graph_is_an_eager_one(entry, eager, law):
    """Whether it ran so by choice or because no graph serves it."""
    assert checks.row_check(entry, eager=eager) is Check[law]


def test_target_rows_tokens_slots_and_states_are_compared(stage, ran):
    """Each by itself: with its request and its layer."""
    batch, entry = ran
    body, cache = stage.runner.target, stage.world.caches[0]
    checks.check_target(stage, batch, entry, eager=False)
    width, layers = SHAPE.heads * SHAPE.head_dim, stage.target.tables.shape.layers
    for index, live, where, ids in batch.each():
        for row in range(where.start, where.stop):
            for layer in range(layers + 1):
                value = body.hidden[row, layer * width].clone()
                body.hidden[row, layer * width] += 1
                failure = violation(checks.check_target, stage, batch, entry, eager=False)
                name = f"attention of layer {layer}" if layer < layers else "the state of recurrent layer 0"
                assert failure.check is Check.ROWS
                assert failure.message.startswith(f"{name}, off by ")
                assert failure.message.endswith(f" in row {row - where.start} of request {index} in the batch")
                assert violation(checks.check_target, stage, batch, entry, eager=True).check is Check.EAGER
                body.hidden[row, layer * width] = value
        pool = cache.states[0]
        for position in range(max(0, len(ids) - min(pool.positions, where.stop - where.start)), len(ids)):
            state = pool.states[stage.world.rows[live.number], position % pool.positions]
            state += 1
            failure = violation(checks.check_target, stage, batch, entry, eager=False)
            assert (failure.check, failure.field) == (Check.STORED, "state_indices")
            assert f"row {stage.world.rows[live.number]} of the states of recurrent layer 0" in failure.message
            assert failure.message.endswith(f"request {index} in the batch after its position {position}")
            state -= 1
    checks.check_target(stage, batch, entry, eager=False)


def test_tokens_of_decodes_are_compared(stage):
    """Where the graph samples: of uniform batches alone."""
    rows = [(stage.live[0], 1, 0), (stage.live[1], 1, 0)]
    batch = stage.batch(rows)
    for live, _, _ in rows:
        stage.world.rewind(live)
    stage.run(batch.batch(Role.TARGET), batch.target(), eager=True)
    body = stage.runner.target
    wanted = stage.target.tables
    for _, live, where, ids in batch.each():
        logits = wanted.rows(ids, live.computed) @ stage.target.head.double()
        body.tokens[where] = logits.argmax(1)
    decode = attrs.evolve(ENTRY, num_reqs=3, num_tokens=3)
    checks.check_target(stage, batch, decode, eager=False)
    for row in range(2):
        body.tokens[row] += 1
        failure = violation(checks.check_target, stage, batch, decode, eager=False)
        assert (failure.check, failure.message) == (Check.ROWS, "a token is not the likeliest of its row")
        checks.check_target(stage, batch, attrs.evolve(decode, query_len=None), eager=False)
        checks.check_target(stage, batch, None, eager=True)
        body.tokens[row] -= 1


def test_slots_hold_the_keys_and_values_of_their_tokens(stage, ran):
    """Each of them in each layer; what is in the null slot is no matter."""
    batch, _ = ran
    inputs = batch.inputs_by_role[Role.TARGET]
    cache = stage.world.caches[0]
    for tensor in (each.flatten(0, 1) for each in cache.tensors()):
        for slot in inputs.slot_mapping.tolist():
            tensor[slot] += 1
            assert violation(checks.check_slots, stage, batch, Role.TARGET).check is Check.STORED
            tensor[slot] -= 1
        tensor[0] += 1
    checks.check_slots(stage, batch, Role.TARGET)
    batch.inputs_by_role[Role.TARGET] = attrs.evolve(inputs, slot_mapping=np.zeros_like(inputs.slot_mapping))
    checks.check_slots(stage, batch, Role.TARGET)
    batch.inputs_by_role[Role.DRAFT_PREFILL] = inputs
    assert violation(checks.check_slots, stage, batch, Role.DRAFT_PREFILL).check is Check.STORED


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)), max_size=4),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_requests_are_as_long_as_their_step_says(requests, seed, loras):
    """A token of a prompt and one of output at least; a prompt leaves room for a token. With LoRA they have one adapter
    more than can be active, by turns, or none.
    """
    scene = attrs.evolve(SCENE, seed=seed, loras=loras)
    made = checks._requests(Serve(requests=tuple(requests)), 24, scene)
    assert [each.name for each in made] == [f"served {number}" for number in range(len(requests))]
    for (prompt, output, arrival), each in zip(requests, made, strict=True):
        assert len(each.prompt) == min(max(prompt, 1), 23)
        assert each.max_new_tokens == max(output, 1)
        assert each.arrival == pytest.approx(arrival / 100)
        assert all(0 <= token < VOCABULARY for token in each.prompt)
    many = checks._requests(Serve(requests=((20, 1, 0),) * 20), 24, scene)
    assert {token for each in many for token in each.prompt} == set(range(VOCABULARY))
    assert {each.adapter for each in many} == set(range(loras + 2 if loras else 1))


def test_served_tokens_are_the_greedy_choice(stage):
    """A request gets max_new_tokens, each the greedy choice after the tokens before it."""
    request = Request(name="one", arrival=0.0, prompt=(5, 17, 3), max_new_tokens=4)
    ids = list(request.prompt)
    for _ in range(4):
        hidden = stage.target.tables.rows(np.array(ids), len(ids) - 1)
        ids.append(int((hidden @ stage.target.head.double()).argmax()))
    tokens = tuple(ids[3:])
    checks._check_tokens(stage, request, tokens)
    checks._check_answered(request, tokens)
    failure = violation(checks._check_answered, request, tokens[:3])
    assert (failure.check, failure.message) == (Check.TOKENS, "one asked for 4 tokens and has 3")
    for number in range(4):
        wrong = (*tokens[:number], (tokens[number] + 1) % VOCABULARY, *tokens[number + 1 :])
        failure = violation(checks._check_tokens, stage, request, wrong)
        assert failure.check is Check.TOKENS
        assert failure.message == f"token {number + 1} of one (prompt of 3) is not the model's greedy choice"
        assert failure.role is Role.TARGET


def test_forwards_of_a_session_are_those_that_ran(stage):
    """Each kind as often; those before are not counted."""
    for _ in range(2):
        before = Counter(stage.watch.ran)
        checks.check_serving(stage, Serve(requests=((3, 4, 0), (2, 2, 1))))
    stage._check_counted()
    ran = stage.watch.ran - before
    assert ran
    for kind, count in ran.items():
        stage._ran = before - Counter({kind: 1}) - before
        assert violation(stage._check_counted).check is RunnerCheck.COUNTED
        stage._ran = Counter(before)
        stage._ran[kind] += 1
        failure = violation(stage._check_counted)
        assert failure.message == f"{kind} ran {count - 1} times, and the session has {count}"
    last = stage.runner.session.forwards[-1]
    stage._recorded, stage._ran = len(stage.runner.session.forwards), before
    assert violation(stage._check_counted).check is RunnerCheck.COUNTED
    assert last.repeats >= 1


def test_request_that_is_too_long_must_be_refused(stage, monkeypatch):
    """Of 24 tokens one is served, and of 25 none."""
    checks.check_serving(stage, Serve(requests=((20, 4, 0), (20, 5, 0))))
    started = []

    class OpenServing:
        def cut_off(self):
            """End it."""

    monkeypatch.setattr(stage.runner, "start", lambda requests: started.extend(requests) or OpenServing())
    failure = violation(checks.check_serving, stage, Serve(requests=((20, 5, 0),)))
    assert (failure.check, failure.message) == (Check.TOKENS, "a request of 25 tokens was accepted")
    assert [each.length for each in started] == [25]

    def refused(requests):
        raise RunError("too long")

    monkeypatch.setattr(stage.runner, "start", refused)
    checks.check_serving(stage, Serve(requests=((20, 5, 0),)))
