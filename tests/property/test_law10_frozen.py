"""Law 10: frozen is frozen.

Pointers, host scalars and backend plan layout at replay equal those at capture, or the replay refuses
with the name of what moved, before anything runs.
"""

from contextlib import contextmanager

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from capture_planner.errors import GuardError
from capture_planner.modes import GraphMode, Role
from capture_planner.plugins import registry
from capture_planner.records.backend import Axis, Fill, Lifetime, MetadataField, PaddingContract, Where
from capture_planner.records.batch import Batch
from capture_planner.records.model import Method
from capture_planner.records.spec import Policy, Sizes
from capture_planner_runner.execution.fields import tensor_of
from capture_planner_runner.execution.guards import GraphState
from capture_planner_runner.options import Options
from support.probe import Probe
from support.worlds import bits, persistent, requests_of, serve, spec_of, world_of

pytestmark = pytest.mark.usefixtures("one_thread")
SCALARS = ("max_query_len", "max_seq_len")
FROZEN = PaddingContract(
    fields=tuple(
        MetadataField(name=name, axis=Axis.SCALAR, fill=Fill.WORST_CASE, lifetime=Lifetime.FROZEN, where=Where.HOST)
        for name in SCALARS
    )
)
SIZES = Sizes(policy=Policy.EXPLICIT, num_tokens=(4, 16), num_reqs=(1, 3))
HOW = ("replaced", "moved", "resized", "restrided")
HALF = settings(max_examples=max(settings.default.max_examples // 2, 3))


@attrs.frozen(eq=False)
class Stage:
    """A runner whose graphs are captured, and the backend that it runs on."""

    runner: object
    probe: Probe

    @property
    def graphs(self):
        """Each graph with its role."""
        return [(role, entry) for role in self.runner.roles.values() for entry in role.graphs]

    def stage(self, role, entry):
        """Bring a batch of the null page to where only the replay is left; return that."""
        inputs = role.warm_up_inputs(entry)
        batch = Batch(role=role.role, num_reqs=inputs.num_reqs, num_tokens=inputs.num_tokens)
        step = role.step(batch, entry, inputs)
        role.stage_inputs(step)
        role.prepare_backends(step)
        return lambda: role.replay_or_run(step, 0.0)


def make(mode=GraphMode.FULL_AND_PIECEWISE, **options):
    """Plan, assemble and capture on a backend with frozen fields, a workspace and a layout."""
    probe = Probe(padding=FROZEN)
    world = world_of(
        spec_of(backend="probe", mode=mode, method=Method.EAGLE3, sizes=SIZES, embeddings=True),
        registry=registry.load_backends(probe),
        seed=99,
    )
    runner = world.runner(options=Options(**options))
    runner.capture()
    return Stage(runner, probe)


@pytest.fixture(scope="module")
def guarded():
    """With guards, as by default. Tests put back what they change."""
    return make()


@pytest.fixture(scope="module")
def trusting():
    """Without guards."""
    return make(trust=True)


def graph_of(stage, data, full=False):
    """Any graph of any role."""
    graphs = [(role, entry) for role, entry in stage.graphs if not full or entry.num_reqs is not None]
    names = {f"{role.role.value}: {entry}": (role, entry) for role, entry in graphs}
    return names[data.draw(st.sampled_from(sorted(names)), label="graph")]


@contextmanager
def changed(held, how):
    """Change where a tensor is for a while: another object, other memory, another shape or other strides."""
    _, holder, attribute = held
    old = tensor_of(held)
    storage, offset, shape, stride = old.untyped_storage(), old.storage_offset(), old.shape, old.stride()
    if how == "moved":
        old.set_(old.clone())
    elif how == "replaced":
        object.__setattr__(holder, attribute, old.clone())
    elif how == "resized":
        object.__setattr__(holder, attribute, old[:-1])
    else:
        object.__setattr__(holder, attribute, old.as_strided(shape, (0,) * len(shape)))
    try:
        yield
    finally:
        object.__setattr__(holder, attribute, old)
        old.set_(storage, offset, shape, stride)


def refused(stage, replay, role, entry):
    """Expect a refusal, after which nothing has changed; return what it says after role and entry."""
    before = {name: bits(tensor) for name, tensor in persistent(stage.runner).items()}
    with pytest.raises(GuardError) as caught:
        replay()
    assert {name: bits(tensor) for name, tensor in persistent(stage.runner).items()} == before
    who, text = f"{role.role.value}: {entry}: ", str(caught.value)
    assert text.startswith(who)
    return text.removeprefix(who)


@given(st.data(), st.sampled_from(HOW))
def test_a_tensor_that_moved_is_refused_by_name(guarded, data, how):
    """Every field, output, state, workspace and cache, of the role whose graph is to be replayed."""
    role, entry = graph_of(guarded, data)
    held = data.draw(st.sampled_from(list(role.persistent())), label="tensor")
    replay = guarded.stage(role, entry)
    with changed(held, how):
        says = refused(guarded, replay, role, entry)
    tensor = tensor_of(held)
    shape, strides = list(tensor.shape), list(tensor.stride())
    now = {"resized": ([shape[0] - 1, *shape[1:]], strides), "restrided": (shape, [0] * len(shape))}
    if how in now:
        assert says == (
            f"{held[0]} has shape {now[how][0]} and strides {now[how][1]}, at capture it had {shape} and {strides}"
        )
    else:
        assert says.startswith(f"{held[0]} is not where it was at capture")
    replay()


def test_everything_that_graphs_touch_is_held(guarded):
    """The names that a refusal can say: fields, outputs, state, workspaces and caches of each role."""
    state = [f"draft_state.{name}" for name in ("token", "hidden", "proposed", "column")]
    of_target = ["hidden", "tokens", "aux"]
    expected = {
        Role.TARGET: [*of_target, "embeddings"],
        Role.DRAFT_PREFILL: ["hidden", *state, *(f"target.{name}" for name in of_target)],
        Role.DRAFT_DECODE: state,
    }
    for kind, role in guarded.runner.roles.items():
        fields = [field.name for field in role.plan.inputs]
        fields += ["sampled_rows", "sampled_counts"] if kind is Role.TARGET else []
        names = [*fields, *expected[kind], "all.workspace", "keys[0]", "values[0]"]
        assert sorted(held[0] for held in role.persistent()) == sorted(f"{kind.value}.{n}" for n in names)


def weights_of(role):
    """Parameters and buffers with a name, by name."""
    return {name: (module, attribute) for name, module, attribute in role.body.weights()}


def replace_object(module, attribute):
    """Put another parameter or buffer in its place."""
    old = getattr(module, attribute)
    new = old.detach().clone()
    setattr(module, attribute, nn.Parameter(new, False) if isinstance(old, nn.Parameter) else new)


def replace_data(module, attribute):
    """Leave the object, and give it other memory."""
    weight = getattr(module, attribute)
    weight.data = weight.data.clone()


def grow(module, attribute):
    """Leave the object, and make it larger."""
    weight = getattr(module, attribute)
    weight.data = torch.cat((weight.data, weight.data))


def remove(module, attribute):
    """Take it away."""
    setattr(module, attribute, None)


@contextmanager
def weight_changed(module, attribute, change):
    """Change a weight for a while."""
    old = getattr(module, attribute)
    data = old.data
    change(module, attribute)
    try:
        yield
    finally:
        old.data = data
        setattr(module, attribute, old)


WAYS = st.sampled_from((replace_object, replace_data, grow, remove))


@given(st.data(), WAYS)
def test_a_weight_that_moved_is_refused_by_name(guarded, data, change):
    """A parameter or a buffer of the role's model."""
    role, entry = graph_of(guarded, data)
    weights = weights_of(role)
    name = data.draw(st.sampled_from(sorted(weights)), label="weight")
    replay = guarded.stage(role, entry)
    with weight_changed(*weights[name], change):
        says = refused(guarded, replay, role, entry)
    said = says.removeprefix("the weight ").partition(" ")[0]
    assert getattr(*weights[said]).data_ptr() == getattr(*weights[name]).data_ptr(), says
    replay()


def outcome(stage, role, entry, replay):
    """Replay with inputs that are no zeros; return what it leaves."""
    body, state = stage.runner.target, stage.runner.draft_state
    kept = [tensor_of(held) for held in role.body.outputs()] or [state.token, state.hidden, state.proposed]
    for tensor in (body.embeddings, body.hidden, body.aux, state.hidden):
        tensor.copy_(torch.linspace(-1.0, 1.0, tensor.numel(), dtype=tensor.dtype).view_as(tensor))
    for tensor in (body.tokens, state.token, state.proposed, state.column):
        tensor.zero_()
    replay()
    return [bits(tensor) for tensor in kept]


@HALF
@given(st.data(), st.sampled_from(HOW), WAYS, st.booleans())
def test_trust_replays_on_what_was_captured(trusting, data, how, change, is_weight):
    """Whatever has been put in its place: what stands in old memory is what the graph made of old memory."""
    role, entry = graph_of(trusting, data, full=True)
    weights = weights_of(role)
    weight = weights[data.draw(st.sampled_from(sorted(weights)), label="weight")]
    held = data.draw(st.sampled_from(list(role.persistent())), label="tensor")
    expected = outcome(trusting, role, entry, trusting.stage(role, entry))
    replay = trusting.stage(role, entry)

    def changed_replay():
        with weight_changed(*weight, change) if is_weight else changed(held, how):
            replay()

    assert outcome(trusting, role, entry, changed_replay) == expected


@HALF
@given(st.data())
def test_weights_loaded_in_place_are_seen(guarded, data):
    """No guard trips, and the replay computes with them."""
    role, entry = graph_of(guarded, data)
    norms = {name: at for name, at in weights_of(role).items() if name.endswith("layernorm.weight")}
    weight = getattr(*norms[data.draw(st.sampled_from(sorted(norms)), label="weight")])

    def run():
        return outcome(guarded, role, entry, guarded.stage(role, entry))

    before, old = run(), weight.clone()
    assert run() == before
    weight.copy_(torch.linspace(-2.0, 2.0, weight.numel(), dtype=weight.dtype))
    with_others = run()
    weight.copy_(old)
    assert with_others != before
    assert run() == before


LAYOUTS = st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(st.data(), LAYOUTS)
def test_another_layout_is_refused_with_both(guarded, data, layout):
    """Of a FULL graph; a PIECEWISE graph holds none of it."""
    role, entry = graph_of(guarded, data)
    replay = guarded.stage(role, entry)
    before = guarded.probe.numbers
    guarded.probe.numbers = layout
    try:
        if entry.num_reqs is None or layout == before:
            replay()
        else:
            says = refused(guarded, replay, role, entry)
            assert f"group all was {before} at capture and is {layout};" in says
    finally:
        guarded.probe.numbers = before


@given(st.data(), st.integers(1, 23))
def test_another_frozen_scalar_is_refused_with_both(guarded, data, length):
    """A model that has become shorter; its PIECEWISE graphs do not care."""
    role, entry = graph_of(guarded, data)
    longest = role.attention._max_model_len
    role.attention._max_model_len = length
    try:
        replay = guarded.stage(role, entry)
        if entry.num_reqs is None:
            replay()
        else:
            says = refused(guarded, replay, role, entry)
            assert says.startswith(f"all.max_seq_len is baked in as 24, and this step has {length};")
    finally:
        role.attention._max_model_len = longest


SMALL = st.integers(1, 2)
BAKED = st.builds(
    GraphState,
    st.fixed_dictionaries({"a.x": SMALL, "b.x": SMALL}),
    st.fixed_dictionaries({"a": st.none() | st.tuples(SMALL), "b": st.none() | st.tuples(SMALL)}),
)


@given(BAKED, BAKED)
def test_the_first_number_that_differs_is_named(then, now):
    """Scalars first, then layouts; equal numbers pass."""
    differing = [name for name in then.frozen if then.frozen[name] != now.frozen[name]]
    differing += [name for name in then.layouts if then.layouts[name] != now.layouts[name]]
    if not differing:
        then.check(now, "who")
    else:
        with pytest.raises(GuardError) as caught:
            then.check(now, "who")
        first, text = differing[0], str(caught.value)
        if first in then.frozen:
            assert text.startswith(
                f"who: {first} is baked in as {then.frozen[first]}, and this step has {now.frozen[first]};"
            )
        else:
            assert f"group {first} was {then.layouts[first]} at capture and is {now.layouts[first]};" in text


def finish(serving):
    """Step until all is served."""
    while not serving.scheduler.done:
        serving.step()


def test_serving_goes_on_when_a_moved_weight_is_back():
    """A step refuses, its session keeps what came before, and the same step runs afterwards."""
    world = world_of(spec_of(k=2, sizes=SIZES))
    requests = requests_of(world, 3)
    with world.runner() as runner:
        runner.capture()
        expected = serve(runner, requests)
        weights = list(world.target.weights())
        for _, module, attribute in (weights[0], weights[-1]):
            serving = runner.start()
            for request in requests:
                serving.scheduler.submit(request, 0.0)
            serving.step()
            with weight_changed(module, attribute, replace_data), pytest.raises(GuardError):
                finish(serving)
            assert len(serving.scheduler.unfinished) > 0
            finish(serving)
            assert {served.name: served.tokens for served in serving.served} == expected
