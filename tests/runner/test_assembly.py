"""A plan put together with a model: extents, caches, groups and backends, and what is refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.planning.planner import plan
from capture_planner.records._base import replace
from capture_planner.records.backend import Axis, Fill, MetadataField, PaddingContract, Workspace
from capture_planner.records.model import DataType, DraftModel, Method, Speculative
from capture_planner.records.plan import GroupPlan, RolePlan, Support
from capture_planner.records.spec import GroupSpec, Limits, Roles, RoleSpec, Spec
from capture_planner.testing import plans
from capture_planner_reference import Reference
from capture_planner_runner.execution.role import ForwardObserver
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.assembly import (
    assemble,
    buffer_bytes,
    capacity_of,
    dtype_of,
    kv_cache_bytes,
    layers_of,
)
from capture_planner_runner.models.drafters import load_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.serving.states import PageFormat
from support import launches
from support.launches import HERE, registry_of

CPU = torch.device("cpu")
PAGES = PageFormat(page_size=4, num_pages=30)
MODEL = replace(launches.MODEL, num_layers=3, max_model_len=32)
SPEC = Spec(
    model=MODEL,
    limits=Limits(max_num_reqs=3, max_num_tokens=12),
    backend="reference",
    speculative=Speculative(method=Method.EAGLE, num_tokens=2, model=DraftModel(num_layers=2)),
)
HYBRID = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 16,
    "vocab_size": 20,
    "max_position_embeddings": 32,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
}
"""The first layer sees everything, the others 8 tokens."""


class WatchedReference(Reference):
    """The reference backend under any name, with a list of what was reserved and what is not released."""

    def __init__(self, name="reference", device=0, declares=()):
        self.name, self._device, self._declares = name, device, declares
        self.reserved, self.held = [], []

    def workspace(self, role, model, environment, entries, limits):
        """As many bytes as it was made with."""
        return Workspace(device=self._device, pinned=self._device // 2, formula="of a test")

    def padding(self, role, model, environment):
        """What it was made with."""
        return PaddingContract(fields=tuple(self._declares))

    def reserve(self, reservation):
        """Take down who is reserved."""
        executor = super().reserve(reservation)
        key = (reservation.role, reservation.group)
        self.reserved.append(reservation)
        self.held.append(key)
        release = executor.release

        def released():
            self.held.remove(key)
            release()

        executor.release = released
        return executor


class PlansOnly:
    """A backend without torch: what a planner needs, and no ``reserve``."""

    def __init__(self, name):
        self.name, self._real = name, Reference()
        self.support, self.padding = self._real.support, self._real.padding
        self.refresh, self.workspace = self._real.refresh, self._real.workspace


def put_together(spec, *backends, planned_with=None, target=None):
    """Plan a spec and assemble it; return both."""
    made = plan(spec, HERE, registry_of(*(planned_with or backends)))
    target = target or load_target(None, made.model, device=CPU, dtype=dtype_of(made.model.dtype))
    drafter = load_drafter(None, made.speculative, target) if made.speculative else None
    parts = assemble(
        made,
        target,
        drafter,
        registry_of(*backends),
        RecordedGraphs(),
        pages=PAGES,
        device=CPU,
        options=Options(),
        observer=ForwardObserver(),
    )
    return made, parts


@given(plans(max_reqs=16, max_tokens=256), st.integers(1, 64))
def test_capacity_covers_every_entry_and_every_batch_that_the_limits_admit(made, page_size):
    """And nothing is larger than the largest of them."""
    capacity = capacity_of(made, PageFormat(page_size=page_size, num_pages=2))
    entries = [entry for role in made.roles for entry in role.entries]
    assert capacity.tokens == max([made.limits.max_num_tokens] + [e.num_tokens for e in entries])
    assert capacity.reqs == max([made.limits.max_num_reqs] + [e.num_reqs for e in entries if e.num_reqs])
    assert (capacity.pages - 1) * page_size < made.model.max_model_len <= capacity.pages * page_size


def role_of(groups):
    """A target with groups of ``(layers, window)``."""
    planned = [
        GroupPlan(
            name=f"g{index}",
            layers=layers,
            backend="b",
            window=window,
            distribution="d",
            version="1",
            support=Support(level=GraphSupport.ALWAYS, reason="r"),
            padding=PaddingContract(),
        )
        for index, (layers, window) in enumerate(groups)
    ]
    return RolePlan(role=Role.TARGET, requested=GraphMode.FULL, mode=GraphMode.FULL, groups=tuple(planned), inputs=())


@st.composite
def layerings(draw):
    """Windows of a model's layers, and groups that cut each kind of layer into parts."""
    windows = draw(st.lists(st.sampled_from((None, 8, 16)), min_size=1, max_size=8))
    groups = []
    for window in dict.fromkeys(windows):
        left = windows.count(window)
        while left:
            layers = draw(st.integers(1, left))
            groups.append((layers, window))
            left -= layers
    return windows, draw(st.permutations(groups))


@given(layerings())
def test_every_layer_is_in_the_group_of_its_window(layering):
    """In the model's order, as many as the group has, and each in one group."""
    windows, groups = layering
    found = layers_of(role_of(groups), dict(enumerate(windows)))
    assert sorted(layer for layers in found for layer in layers) == list(range(len(windows)))
    for layers, (count, window) in zip(found, groups, strict=True):
        assert len(layers) == count
        assert layers == sorted(layers)
        assert {windows[layer] for layer in layers} == {window}
    seen = {}
    for layers, (_, window) in zip(found, groups, strict=True):
        assert layers[0] > seen.get(window, -1)
        seen[window] = layers[-1]


def test_one_group_has_all_layers_whatever_their_windows():
    """A spec that tells no groups apart plans one."""
    assert layers_of(role_of([(3, None)]), {0: None, 1: 8, 2: 16}) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("groups", "windows", "says"),
    [
        ([(2, None)], (None,) * 3, "the group g0 has 2 layers, and the model has 3 in all"),
        ([(4, 8)], (None,) * 3, "the group g0 has 4 layers, and the model has 3 in all"),
        ([(2, None), (1, 8)], (None, 8, 8), "g0 has 2 layers, and the model has 1 of full attention"),
        ([(1, None), (2, 4)], (None, 8, 8), "g1 has 2 layers, and the model has 0 with a window of 4"),
        ([(1, None), (1, 8)], (None, 8, 8), "no group of the plan has layer 2 of the model"),
    ],
)
def test_layers_that_do_not_match_are_refused(groups, windows, says):
    """With the group, what it has and what the model has."""
    with pytest.raises(RunError) as caught:
        layers_of(role_of(groups), dict(enumerate(windows)))
    assert str(caught.value).startswith("target: ")
    assert says in str(caught.value)


def test_each_group_gets_the_caches_of_its_layers(tmp_path):
    """A hybrid model: full and windowed layers, on a backend each; both drafter roles share theirs."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HYBRID))
    model = replace(MODEL, hidden_size=32)
    groups = (GroupSpec(name="windowed", layers=2, window=8, backend="other"), GroupSpec(name="full", layers=1))
    spec = replace(SPEC, model=model, roles=Roles(target=RoleSpec(groups=groups)))
    target = load_target(config, model, device=CPU, dtype=torch.float64)
    full, windowed = WatchedReference(), WatchedReference("other")
    made, parts = put_together(spec, full, windowed, target=target)
    of = {(r.role, r.group): r for r in full.reserved + windowed.reserved}
    assert [r.group for r in windowed.reserved] == ["windowed"]
    assert list(of[Role.TARGET, "full"].caches) == [0]
    assert list(of[Role.TARGET, "windowed"].caches) == [1, 2]
    assert of[Role.TARGET, "windowed"].attention.window == 8
    assert of[Role.TARGET, "full"].attention.window is None
    drafts = [of[role.role, role.groups[0].name].caches for role in made.roles if role.role.is_drafter]
    assert len(drafts) == 2
    assert dict(drafts[0]) == dict(drafts[1])
    assert list(drafts[0]) == [0, 1]
    caches = [cache for r in of.values() for cache in r.caches.values()]
    assert len({cache.keys.data_ptr() for cache in caches}) == 5
    for role, run in parts.roles.items():
        assert of[role, run.groups[0].plan.name].entries == made.role(role).entries


def test_a_reservation_has_buffers_at_full_capacity():
    """The declared fields, the workspace that the plan says, zeroed, and the runner's own tensors."""
    tiles = MetadataField(name="tiles", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=3)
    backend = WatchedReference(device=100, declares=[tiles])
    made, parts = put_together(SPEC, backend)
    capacity = capacity_of(made, PAGES)
    for reservation in backend.reserved:
        assert reservation.workspace.shape == (100,)
        assert reservation.pinned.shape == (50,)
        assert not reservation.workspace.any()
        assert reservation.fields["tiles"].tolist() == [3] * capacity.reqs
        assert reservation.fields["slot_mapping"].shape == (capacity.tokens,)
        held = parts.roles[reservation.role].fields
        assert reservation.fields["seq_lens"] is held["seq_lens"]
        assert reservation.page_size == PAGES.page_size
        assert reservation.limits == made.limits


@pytest.mark.parametrize("kv_dtype", [None, DataType.FLOAT32, DataType.BFLOAT16, DataType.FP8])
def test_bytes_add_up(kv_dtype):
    """The cache: pages of every layer; buffers: each tensor that is no cache, once."""
    backend = WatchedReference(device=1000)
    _, parts = put_together(replace(SPEC, model=replace(MODEL, kv_dtype=kv_dtype)), backend)
    width = {None: 8, DataType.FLOAT32: 4, DataType.BFLOAT16: 2, DataType.FP8: 1}[kv_dtype]
    layers = MODEL.num_layers + SPEC.speculative.model.num_layers
    row = MODEL.num_kv_heads * MODEL.head_dim * width
    assert kv_cache_bytes(parts.roles.values()) == 2 * layers * PAGES.num_pages * PAGES.page_size * row
    fields = sum(role.fields.memory for role in parts.roles.values())
    state, target = parts.drafting.state, parts.target
    outputs = [target.hidden, target.tokens, parts.roles[Role.DRAFT_PREFILL].body.hidden]
    outputs += [state.token, state.hidden, state.proposed, state.column]
    assert buffer_bytes(parts.roles.values()) == fields + sum(t.nbytes for t in outputs) + 3 * 1000


def test_a_backend_that_cannot_run_is_refused():
    """It plans, and has no reserve; the message says whose it is."""
    with pytest.raises(RunError, match=r"'reference' \(of-a-test 1\.2\) plans and does not execute"):
        put_together(SPEC, PlansOnly("reference"))


def tiles(**changes):
    """A field that a backend declares."""
    return MetadataField(**{"name": "tiles", "axis": Axis.REQUEST, "fill": Fill.CONSTANT, "value": 0} | changes)


@pytest.mark.parametrize(
    ("planned", "now", "names"),
    [
        ((), (tiles(),), "(tiles)"),
        ((tiles(),), (), "(tiles)"),
        ((tiles(),), (tiles(value=1),), "(tiles)"),
        ((tiles(),), (tiles(name="splits"), tiles(name="blocks")), "(blocks, splits, tiles)"),
    ],
)
def test_a_backend_that_declares_other_fields_than_the_plan_is_refused(planned, now, names):
    """New, gone or filled otherwise: each is named, with both versions."""
    backend = WatchedReference(declares=now)
    with pytest.raises(RunError) as caught:
        put_together(SPEC, backend, planned_with=[WatchedReference(declares=planned)])
    assert "the plan was made with of-a-test 1.2" in str(caught.value)
    assert names in str(caught.value)
    assert not backend.reserved


def test_a_field_that_did_not_change_is_not_named():
    """Of two fields one is new; the other is as it was."""
    with pytest.raises(RunError) as caught:
        put_together(
            SPEC,
            WatchedReference(declares=(tiles(), tiles(name="blocks"))),
            planned_with=[WatchedReference(declares=(tiles(),))],
        )
    assert "(blocks)" in str(caught.value)


def test_a_backend_that_is_not_installed_is_refused():
    """The registry's own sentence."""
    with pytest.raises(BackendError, match="no backend named 'reference' is installed"):
        put_together(SPEC, WatchedReference("other"), planned_with=[WatchedReference()])


def test_a_backend_that_breaks_in_reserve_is_named():
    """Whatever it raises becomes an error with its name, the role and the group."""

    class Breaks(WatchedReference):
        def reserve(self, reservation):
            raise KeyError("no such kernel")

    with pytest.raises(BackendError, match=r"'reference' \(of-a-test 1\.2\) broke in reserve \(target, group"):
        put_together(SPEC, Breaks())


def test_what_was_reserved_is_released_where_a_later_backend_is_refused():
    """The target's backend is ready when the drafter's turns out to be of no use."""
    good, bad = WatchedReference(), PlansOnly("plans-only")
    roles = Roles(draft_decode=RoleSpec(backend="plans-only"))
    with pytest.raises(RunError, match="plans and does not execute"):
        put_together(replace(SPEC, roles=roles), good, bad)
    assert not good.held


@pytest.mark.parametrize("kind", DataType)
def test_the_runner_computes_in_floats_that_torch_has(kind):
    """And says which, where it is asked for another."""
    if kind in (DataType.FP8, DataType.NVFP4):
        with pytest.raises(RunError, match=f"in {kind.value}; the runner computes in bfloat16, float16"):
            dtype_of(kind)
    else:
        assert dtype_of(kind) == getattr(torch, kind.value)


def test_a_plan_without_a_drafter_has_a_target_alone():
    """No state, no cache but the target's, and no graph yet."""
    backend = WatchedReference()
    made, parts = put_together(replace(SPEC, speculative=None), backend)
    assert set(parts.roles) == {role.role for role in made.roles} == {Role.TARGET}
    assert parts.drafting is None
    assert not parts.roles[Role.TARGET].graphs
    assert [len(reservation.caches) for reservation in backend.reserved] == [MODEL.num_layers]
