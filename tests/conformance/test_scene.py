"""A case is data: what is written is read again, and the oracle says what attention is defined as."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner_conformance.deployments import scenes
from capture_planner_conformance.probe import LayerShape, Tables
from capture_planner_conformance.scene import Arrive, Case, Depart, Move, Reload, RunBatch, Scene, Serve, dumps, loads
from capture_planner_conformance.shapes import KERNELS, SMALL
from support.reference import dispatch as cheapest
from support.runner_conformance import RunnerScene
from support.runner_conformance.models import RECURRENT, RecurrentTables

small = st.integers(0, 9)
STEPS = st.one_of(
    st.builds(Arrive, prompt=small, computed=small, shares=st.none() | small),
    st.builds(Depart, request=small),
    st.builds(Move, request=small),
    st.builds(Reload, seed=small),
    st.builds(RunBatch, rows=st.lists(st.tuples(small, small, small)).map(tuple)),
    st.builds(Serve, requests=st.lists(st.tuples(small, small, small)).map(tuple)),
)


@pytest.mark.parametrize("kind", [Scene, RunnerScene])
@given(st.data(), st.lists(STEPS).map(tuple))
def test_a_case_is_read_as_it_was_written(kind, data, steps):
    """Write and read are inverse, on one line."""
    case = Case(scene=data.draw(scenes((*SMALL, *KERNELS), kind=kind)), steps=steps)
    text = dumps(case)
    assert loads(text, kind) == case
    assert "\n" not in text
    assert dumps(loads(text, kind)) == text


WRITTEN = dumps(Case(scene=Scene(shape=SMALL[0]), steps=(Arrive(prompt=3, computed=2), RunBatch(rows=((0, 1, 0),)))))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"steps":[', '"stepz":[', "expected an object with scene and a list of steps"),
        ('{"scene"', '{"more":1,"scene"', "expected an object with scene and a list of steps"),
        ('"heads"', '"kv_heads"', "'kv_heads' is given twice"),
        ('"heads":', '"heads":0,"heds":', "scene.shape.heds: unknown key"),
        ('"do":"arrive"', '"do":"arive"', "steps[0]: expected an object whose `do` is one of arrive,"),
        ('"prompt":3', '"prompt":"3"', "steps[0].prompt: expected an integer, got '3'"),
        ('"prompt":3', '"prompt":-3', "steps[0].prompt: must be at least 0, got -3"),
        ('"prompt":3', '"prompt":true', "steps[0].prompt: expected an integer, got"),
        ("[0,1,0]", "[0,1]", "steps[1].rows[0]: expected"),
        ('"page_size":4', '"page_size":0', "scene.shape.page_size: must be at least 1, got 0"),
        ('{"shape"', '{"mode":"HALF","shape"', "scene.mode: expected one of NONE, PIECEWISE,"),
        ('{"shape"', '{"schedule":[[1,2]],"shape"', "scene.schedule[0]: expected"),
        (WRITTEN, "[]", "expected an object with scene and a list of steps"),
        (WRITTEN, WRITTEN[:-1], "delimiter"),
    ],
)
def test_what_is_no_case_is_refused_with_its_place(old, new, says):
    """Where it is, what was expected and what was found; and what to give instead."""
    assert old in WRITTEN
    with pytest.raises(RunError) as raised:
        loads(WRITTEN.replace(old, new))
    assert says in str(raised.value)
    assert str(raised.value).endswith("copy it as it was printed")


@given(scenes(SMALL))
def test_a_scene_is_a_spec(scene):
    """Every scene that is drawn can be planned: its limits hold its drafts."""
    spec = scene.spec("reference")
    assert spec.limits.max_num_tokens >= 1 + scene.drafts
    assert (spec.speculative is None) == (scene.drafts == 0)


@given(
    st.integers(1, 12),
    st.data(),
    st.sampled_from([(2, 1), (2, 2), (4, 2)]),
    st.sampled_from([(None,), (3,), (None, 2)]),
)
def test_the_oracle_is_attention(length, data, heads, windows):
    """Held against loops over every row, head and key."""
    first = data.draw(st.integers(0, length - 1))
    shape = LayerShape(heads=heads[0], kv_heads=heads[1], head_dim=3, windows=windows)
    tables = Tables(shape, 11, 12, torch.float64, torch.device("cpu"), 1)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 10), min_size=length, max_size=length)))
    query, keys, values = tables.split(ids, torch.arange(length))
    found = tables.attended(ids, first).view(length - first, len(windows), heads[0], 3)
    for row in range(first, length):
        for layer, window in enumerate(windows):
            begin = 0 if window is None else max(0, row - window + 1)
            for head in range(heads[0]):
                of = head // (heads[0] // heads[1])
                scores = [
                    math.exp(float(query[row, layer, head] @ keys[key, layer, of]) / math.sqrt(3))
                    for key in range(begin, row + 1)
                ]
                want = sum(score * values[begin + index, layer, of] for index, score in enumerate(scores)) / sum(scores)
                torch.testing.assert_close(found[row - first, layer, head], want)


@given(st.integers(0, 200), st.integers(0, 9))
def test_the_oracle_of_states_is_the_recurrence(length, seed):
    """Held against one token after the other, from none, also where a sequence is longer than what is done at once."""
    shape = LayerShape(heads=2, kv_heads=1, head_dim=2, windows=(None,))
    tables = RecurrentTables(shape, 11, 200, torch.float64, torch.device("cpu"), seed)
    ids = torch.randint(11, (length,), generator=torch.Generator().manual_seed(seed))
    inputs, decays = tables.recurrences(ids, torch.arange(length))
    state, want = torch.zeros(RECURRENT, shape.width, dtype=torch.float64), []
    for added, kept in zip(inputs, decays, strict=True):
        state = kept.exp() * state + added
        want.append(state)
    found = tables.states(ids)
    assert len(found) == length
    if length:
        torch.testing.assert_close(found, torch.stack(want))


def test_a_table_is_loaded_in_place():
    """Weights are reloaded where they are, as graphs need."""
    shape = LayerShape(heads=2, kv_heads=1, head_dim=4, windows=(None,))
    tables = Tables(shape, 5, 6, torch.float32, torch.device("cpu"), 1)
    where, before = tables.by_token.data_ptr(), tables.by_token.clone()
    tables.load(2)
    assert tables.by_token.data_ptr() == where
    assert not torch.equal(tables.by_token, before)


@pytest.mark.parametrize("num_reqs", [-1, 0, 1, 5])
def test_the_scan_sends_no_impossible_batch_to_a_graph(num_reqs):
    """As many tokens as requests at least, and one request at least."""
    from capture_planner.planning.planner import plan
    from capture_planner.plugins import registry
    from capture_planner.records.batch import Batch
    from capture_planner_conformance.scene import Scene
    from support.runs import CPU

    made = plan(Scene(shape=SMALL[0]).spec("reference"), CPU, registry.load_backends())
    batch = Batch(role=Role.TARGET, num_reqs=num_reqs, num_tokens=max(num_reqs - 1, 0))
    assert cheapest(made, batch) is None
    assert cheapest(made, Batch(role=Role.TARGET, num_reqs=1, num_tokens=1, active_loras=-1)) is None
