"""Graph and eager side by side: healthy runs have no difference, and each fault is found where it is."""

import functools
import json
import math
import tempfile
from collections import Counter
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn

from capture_planner.errors import DifferenceError, PlanningError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.records.model import DataType, Method
from capture_planner.records.spec import Policy, Sizes
from capture_planner.runtime.assembly import DTYPES, dtype_of
from capture_planner.runtime.eager_check import agreement
from capture_planner.runtime.eager_check import check as compare
from capture_planner.runtime.eager_check.check import EagerCheck
from capture_planner.runtime.execution.role import ForwardObserver
from capture_planner.runtime.execution.taps import TapKey, Taps
from capture_planner.runtime.graphs.recorded import RecordedGraph, RecordedGraphs
from capture_planner.runtime.models.auxiliary import choose_drafter
from capture_planner.runtime.models.huggingface import load_target
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.workload import Request
from capture_planner_reference import Reference
from support.probe import Probe
from support.runs import CPU, requests_for, runnable_specs
from support.worlds import requests_of, serve, spec_of, world_of

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 5))
COMPARE = Options(compare=True)
SIZES = Sizes(policy=Policy.EXPLICIT, num_tokens=(5, 16), num_reqs=(3, 4))
"""Graphs that pad tokens and requests."""


# Healthy ---------------------------------------------------------------------------------------


def configured(spec, folder):
    """Return the configuration of a model with the sliding windows of the spec; None where it has none."""
    shape = spec.model
    windows = [group.window for group in spec.roles.target.groups for _ in range(group.layers)]
    if not any(windows):
        return None
    numbers = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 24,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_model_len,
        "use_sliding_window": True,
        "sliding_window": max(filter(None, windows)),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
    (folder / "config.json").write_text(json.dumps(numbers), "utf-8")
    return folder


def runner_of(spec, options, seed):
    """A runner of a tiny deployment in the spec's dtype; some random ones have no plan."""
    try:
        plan, dtype = make_plan(spec, CPU, registry.load_backends()), dtype_of(spec.model.dtype)
    except PlanningError:
        reject()
    with tempfile.TemporaryDirectory() as folder:
        source = configured(spec, Path(folder))
        target = load_target(source, plan.model, device=torch.device("cpu"), dtype=dtype, seed=seed)
    places, length = plan.limits.max_num_reqs, plan.model.max_model_len
    drafter = None
    if plan.speculative is not None:
        length += plan.speculative.num_tokens + 1
        drafter = choose_drafter("random", plan.speculative, target, num_states=places, length=length, seed=seed)
    pages = PageFormat(page_size=4, num_pages=1 + places * -(-length // 4))
    return Runner(plan, target, drafter, registry.load_backends(), RecordedGraphs(), pages=pages, options=options)


@settings(FEW, max_examples=FEW.max_examples * 2)
@given(st.data(), st.sampled_from((*[DataType.FLOAT64] * 3, *DTYPES)), st.integers(0, 9))
def test_a_healthy_deployment_has_no_difference(data, dtype, seed):
    """Every forward that a graph served is compared, in any dtype; tokens are those without comparing."""
    spec = data.draw(runnable_specs(dtype=dtype))
    requests = data.draw(requests_for(spec))
    told = {}
    for options in (COMPARE, Options()):
        with runner_of(spec, options, seed) as runner:
            runner.capture()
            told[options.compare] = {done.name: done.tokens for done in runner.serve(requests)}
            if options.compare:
                found, forwards = runner.parts.comparison.report(), runner.session.forwards
    assert found.difference is None
    compared, eager = Counter(), Counter()
    for forward in forwards:
        (eager if forward.entry is None else compared)[forward.role] += forward.repeats
    assert (found.compared, found.eager) == (compared, eager)
    assert found.steps == len({forward.step for forward in forwards if forward.entry is not None})
    assert all(seen.error <= seen.tolerance for seen in found.largest)
    if dtype is DataType.FLOAT64:
        assert told[True] == told[False]
        assert found.near_ties == 0


# Faults ----------------------------------------------------------------------------------------


class Faulty(Reference):
    """The reference backend; ``spoil`` is called after each attention inside a graph, and may change it.

    ``metadata`` returns what attention inside a graph is given instead of its metadata.
    """

    name = "probe"

    def __init__(self, spoil=lambda layer, out, metadata: None, metadata=lambda layer, given: given):
        self.spoil, self.given = spoil, metadata

    @hookimpl
    def capture_planner_backends(self):
        """A plugin that brings itself."""
        return (self,)

    def reserve(self, reservation):
        """Wrap the executor's attention."""
        executor = super().reserve(reservation)
        attend = executor.attend

        def spoiled(layer, query, out, scoring, metadata):
            inside = metadata.is_full and not reservation.role.is_drafter
            attend(layer, query, out, scoring, self.given(layer, metadata) if inside else metadata)
            if inside:
                self.spoil(layer, out, metadata)

        executor.attend = spoiled
        return executor


def world(backend=None, k=0, mode=GraphMode.FULL_AND_PIECEWISE, **changes):
    """Two layers and four places, with graphs that pad; a backend of the test's, or the reference."""
    name = {} if backend is None else {"registry": registry.load_backends(backend)}
    spec = spec_of(
        k=k, num_reqs=4, layers=2, mode=mode, sizes=SIZES, backend="probe" if name else "reference", **changes
    )
    return world_of(spec, **name)


def found(made, plant=lambda runner: None, armed=lambda runner: None, **options):
    """Serve with a fault that is planted before capture or armed after it, and return the difference.

    Whatever is found must be the first of all that differs, as found by brute force.
    """
    seen = []
    inner = EagerCheck._compare_tensors

    def kept(role, forward, graph, eager, *rest):
        seen.append((graph, eager))
        inner(role, forward, graph, eager, *rest)

    with pytest.MonkeyPatch.context() as patch, made.runner(options=Options(compare=True, **options)) as runner:
        patch.setattr(EagerCheck, "_compare_tensors", kept)
        plant(runner)
        runner.capture()
        armed(runner)
        with pytest.raises(DifferenceError) as caught:
            serve(runner, requests_of(made, 1))
        told = caught.value.difference
        assert told is runner.parts.comparison.report().difference
        assert told.step == len(runner.session.steps)
    assert str(told) == str(caught.value)
    assert told.requests
    assert len(told.requests) == told.num_reqs
    assert told.num_tokens + told.padded_tokens == told.entry.num_tokens
    if not told.tensor.startswith("field ") and not (told.tensor.endswith("cache") and told.eager is None):
        assert first_of(*seen[-1]) == (told.layer, told.tensor)
    return told


ORDER = ("queries", "keys", "values", "key cache", "value cache", "attention", "aux", "hidden", "tokens")


def first_of(graph, eager):
    """Every tensor that differs, number by number, and the first of them in the order of computation."""
    wrong = []
    for key, wanted in eager.items():
        held = graph[key]
        if key.name == "tokens":
            wanted = wanted.argmax(-1)
        if key.name.endswith("cache"):
            # A row of the null slot is anybody's; no real row of these batches writes it.
            assert len(held) == len(wanted)
        if not torch.allclose(held.double(), wanted.double(), rtol=1e-7, atol=1e-9):
            name = ORDER.index(key.name) if key.name in ORDER else len(ORDER)
            wrong.append((key.step, math.inf if key.layer is None else key.layer, name, key))
    key = min(wrong, key=lambda found: found[:3])[3]
    return key.layer, key.name


def test_a_stale_block_table_is_found_at_its_layer():
    """From layer 1 on, a graph reads the table of its capture: layer 1, attention, and nothing before it."""
    tables = {}

    def stale(layer, given):
        if layer < 1:
            return given
        table = given.fields["block_table"]
        old = tables.setdefault(given.entry, torch.zeros_like(table))
        return attrs.evolve(given, fields={**given.fields, "block_table": old})

    told = found(world(Faulty(metadata=stale)))
    assert (told.role, told.layer, told.tensor) == (Role.TARGET, 1, "attention")
    assert (told.after, told.row, told.request) == ("layer 1, value cache", 0, told.requests[0])
    assert told.graph != told.eager
    assert told.error > told.tolerance


def test_a_baked_host_number_is_found_where_it_is_used():
    """A graph scales by the longest sequence of its capture."""

    def scaled(layer, out, metadata):
        if layer == 1:
            out.mul_(1 + int(metadata.host["seq_lens"].max()))

    def by_host(layer, out, metadata):
        out.mul_(1 + float(np.max(metadata.host["seq_lens"])) * (layer == 1))

    for spoil in (scaled, by_host):
        told = found(world(Faulty(spoil)))
        assert (told.layer, told.tensor, told.rows) == (1, "attention", told.num_tokens)


def test_a_number_that_is_none_is_a_difference():
    """NaN in one real row, which no tolerance lets pass."""

    def spoil(layer, out, metadata):
        if layer == 0:
            out[:1].fill_(float("nan"))

    told = found(world(Faulty(spoil)))
    assert (told.layer, told.tensor, told.row, told.rows) == (0, "attention", 0, 1)
    assert (told.graph, told.error) == (None, None)
    assert told.eager is not None


def test_padding_may_be_anything():
    """NaN in the padded rows alone is no difference: it reaches no real row."""

    def spoil(layer, out, metadata):
        starts = metadata.fields["query_start_loc"]
        padded = torch.arange(len(out)) >= starts[-1]
        out.masked_fill_(padded[:, None, None], float("nan"))

    made = world(Faulty(spoil))
    with made.runner(options=COMPARE) as runner:
        runner.capture()
        serve(runner, requests_of(made, 1))
        assert any(forward.padded_tokens and forward.entry.num_reqs for forward in runner.session.forwards)
        assert runner.parts.comparison.report().difference is None


class StaleSlots:
    """Updates of a role whose graphs take slots from a buffer with a stale tail."""

    def __init__(self, role):
        self._inner, self._role = role.attention._updates, role
        self.slots = torch.zeros_like(role.fields["slot_mapping"])
        self.inside = False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def store(self, cache, slots, keys, values):
        """Inside a graph, from the buffer."""
        self._inner.store(cache, self.slots[: len(slots)] if self.inside else slots, keys, values)


def in_graphs(role, before, after):
    """Call ``before`` and ``after`` around each forward that is captured."""
    forward = role._forward

    def around(extents, entry):
        before()
        try:
            forward(extents, entry)
        finally:
            after()

    role._forward = around


def test_a_graph_that_stores_nothing_is_found_in_the_cache(monkeypatch):
    """What the eager forward stored is not there any more when the graph runs."""

    def plant(runner):
        role = runner.parts.roles[Role.TARGET]
        store, stored = role.attention._updates.store, lambda *_: None
        swap = functools.partial(monkeypatch.setattr, role.attention._updates, "store")
        in_graphs(role, lambda: swap(stored), lambda: swap(store))

    told = found(world(mode=GraphMode.FULL), plant)
    assert (told.layer, told.tensor) == (0, "key cache")
    assert told.request in told.requests
    assert told.row >= 4


def test_a_graph_that_leaves_its_output_unwritten_is_found_there():
    """What the eager forward left in the same buffer is poison by then."""

    def plant(runner):
        body = runner.parts.target
        own, other = body.hidden, torch.zeros_like(body.hidden)
        swap = functools.partial(setattr, body, "hidden")
        in_graphs(runner.parts.roles[Role.TARGET], lambda: swap(other), lambda: swap(own))

    told = found(world(), plant)
    assert (told.layer, told.tensor, told.graph) == (None, "hidden", None)


@pytest.mark.parametrize("backend", [None, Probe()])
def test_drafts_past_the_end_of_the_model_write_where_anybody_may(backend):
    """To the null slot, and rows of padding after them: what is there is no difference."""
    made, slots = world(backend, k=3), []
    with made.runner(options=COMPARE) as runner:
        runner.capture()
        role = runner.parts.roles[Role.DRAFT_DECODE]
        prepare = role.prepare_backends

        def prepared(step):
            padded = step.extents.reqs - step.real.reqs
            slots.append(step.entry is not None and padded and (step.inputs.slot_mapping == 0).sum())
            prepare(step)

        role.prepare_backends = prepared
        prompts = [tuple(range(length)) for length in (5, 21)]
        runner.serve(
            [
                Request(name=str(i), arrival=0.0, prompt=prompt, max_new_tokens=min(24 - len(prompt), 9))
                for i, prompt in enumerate(prompts)
            ]
        )
        assert runner.parts.comparison.report().difference is None
    assert any(slots) or backend is None


def test_a_stale_slot_is_found_in_the_cache():
    """Rows of padding write where rows of a larger batch did: a slot that another token owns is named."""

    def plant(runner):
        role = runner.parts.roles[Role.TARGET]
        updates = role.attention._updates = StaleSlots(role)
        forward, prepare = role._forward, role.prepare_backends

        def flagged(extents, entry):
            updates.inside = entry is not None and entry.num_reqs is not None
            try:
                forward(extents, entry)
            finally:
                updates.inside = False

        def prepared(step):
            updates.slots[: step.real.tokens] = torch.from_numpy(step.inputs.slot_mapping)
            prepare(step)

        role._forward, role.prepare_backends = flagged, prepared

    told = found(world(), plant)
    assert (told.layer, told.tensor, told.after) == (0, "key cache", "layer 0, values")
    assert told.padded_reqs
    assert told.eager is None
    assert told.row >= 4


def test_a_stale_tail_of_a_field_is_found_before_the_replay():
    """Slots past the batch keep poison: the field is named, and nothing is indexed with it."""

    def plant(runner):
        role = runner.parts.roles[Role.TARGET]
        apply = role._apply

        def short(writes):
            for write in writes:
                if write.buffer.key == "slot_mapping" and write.real is not None:
                    write.rows = len(write.real)
            apply(writes)

        role._apply = short

    told = found(world(), plant)
    assert (told.tensor, told.layer, told.request, told.after) == ("field slot_mapping", None, None, None)
    assert told.row == told.num_tokens
    seen = {field.name: field for field in told.fields}
    assert len(seen["slot_mapping"].real) == told.num_tokens
    assert set(seen["slot_mapping"].padding) == {told.graph}
    assert seen["seq_lens"].padding == [0] * told.padded_reqs


@pytest.mark.parametrize(
    ("weight", "role", "layer", "tensor", "after"),
    [
        ("layers.0.self_attn.q_proj.weight", Role.TARGET, 0, "queries", None),
        ("layers.1.self_attn.k_proj.weight", Role.TARGET, 1, "keys", "layer 1, queries"),
        ("layers.1.self_attn.v_proj.weight", Role.TARGET, 1, "values", "layer 1, keys"),
        ("layers.0.mlp.down_proj.weight", Role.TARGET, 1, "queries", "layer 0, attention"),
        ("layers.1.self_attn.o_proj.weight", Role.TARGET, None, "hidden", "layer 1, attention"),
        ("model.norm.weight", Role.TARGET, None, "hidden", "layer 1, attention"),
        ("lm_head.weight", Role.TARGET, None, "tokens", "hidden"),
        ("fc.weight", Role.DRAFT_PREFILL, 0, "queries", None),
        ("layers.0.mlp.up_proj.weight", Role.DRAFT_PREFILL, None, "hidden", "layer 0, attention"),
    ],
)
def test_a_replaced_weight_is_found_where_it_is_read_first(monkeypatch, weight, role, layer, tensor, after):
    """Replays go on with the old one: without guards nothing else would say so."""

    def armed(runner):
        weights = runner.parts.roles[role].body.weights()
        module, name = next((m, n) for full, m, n in weights if full.endswith(weight))
        other = nn.Parameter(torch.rand_like(getattr(module, name)) + 1, requires_grad=False)
        monkeypatch.setitem(module._parameters, name, other)

    told = found(world(k=2 * role.is_drafter), armed=armed, trust=True)
    assert (told.role, told.layer, told.tensor, told.after) == (role, layer, tensor, after)


class Unmoved:
    """Updates that leave the fields of a draft decode where they are."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def advance(self, moving, rows, tokens=None):
        """Nothing."""


@pytest.mark.parametrize(("backend", "layer", "tensor"), [(None, 0, "queries"), (Probe(), None, "field positions")])
def test_a_chain_that_does_not_move_on_is_found_at_its_second_step(backend, layer, tensor):
    """In a fused chain the queries turn by the wrong position; in a chain of graphs the field says so."""

    def plant(runner):
        body = runner.parts.roles[Role.DRAFT_DECODE].body
        body.updates = Unmoved(body.updates)

    told = found(world(backend, k=3, mode=GraphMode.FULL), plant)
    assert (told.role, told.draft_step) == (Role.DRAFT_DECODE, 1)
    assert (told.layer, told.tensor) == (layer, tensor)
    assert (told.entry.draft_steps is None) == (backend is not None)


@pytest.mark.parametrize("k", [0, 2])
def test_a_graph_that_does_nothing_is_found_at_its_first_tensor(monkeypatch, k):
    """Nothing of the eager forward is left for it to be mistaken for."""
    told = found(world(k=k), lambda _: monkeypatch.setattr(RecordedGraph, "replay", lambda self: None))
    assert (told.layer, told.tensor, told.graph, told.error) == (0, "queries", None, None)


def test_auxiliary_states_are_compared(monkeypatch):
    """Those that EAGLE-3 reads: a graph that leaves them out leaves poison."""

    def plant(runner):
        body = runner.parts.target
        monkeypatch.setattr(body, "aux_layers", (0, *body.aux_layers[1:]))

    def armed(runner):
        runner.parts.target.aux_layers = (1, *runner.parts.target.aux_layers[1:])

    told = found(world(k=1, method=Method.EAGLE3), plant, armed)
    assert (told.role, told.tensor) == (Role.TARGET, "aux")


# Near ties -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_half", [True, False])
def test_another_draft_of_equal_states_is_a_tie_in_half_precision_alone(monkeypatch, is_half):
    """Then it is counted, and what the chain goes on with is not compared; else it is a difference."""
    if is_half:
        monkeypatch.setattr(compare, "HALF", 0)

    def plant(runner):
        body = runner.parts.roles[Role.DRAFT_DECODE].body
        role, propose = runner.parts.roles[Role.DRAFT_DECODE], body.drafter.propose
        forward = role._forward

        def other(hidden, places, positions):
            return (propose(hidden, places, positions) + 1) % 32

        def inside(extents, entry):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(body.drafter, "propose", other)
                forward(extents, entry)

        role._forward = inside

    made = world(k=3, mode=GraphMode.FULL)
    if not is_half:
        told = found(made, plant)
        assert (told.tensor, told.draft_step, told.after) == ("draft_state.token", 0, "draft_state.hidden")
    else:
        with made.runner(options=COMPARE) as runner:
            plant(runner)
            runner.capture()
            serve(runner, requests_of(made, 1))
            report = runner.parts.comparison.report()
        assert report.difference is None
        drafts = [f for f in runner.session.forwards if f.role is Role.DRAFT_DECODE and f.entry is not None]
        assert report.near_ties == sum(forward.num_reqs for forward in drafts)


# Parts -----------------------------------------------------------------------------------------


FLOATS = st.floats(-1e3, 1e3, width=32) | st.just(math.nan) | st.just(math.inf)


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS, FLOATS), min_size=1, max_size=5))
def test_row_errors_are_norms_relative_to_the_eager_row(rows):
    """As computed number by number; infinite where a number is not finite, 0 for equal rows."""
    table = torch.tensor(rows, dtype=torch.float64)
    graph, eager = table[:, :2], table[:, 2:]
    for error, (a, b, c, d) in zip(agreement.row_errors(graph, eager).tolist(), rows, strict=True):
        apart, norm = math.hypot(a - c, b - d), math.hypot(c, d)
        wanted = math.inf if not math.isfinite(apart) else 0 if not apart else apart / norm if norm else math.inf
        if math.isnan(a + b + c + d) or math.isinf(abs(a) + abs(b) + abs(c) + abs(d)):
            assert error > max(agreement.TOLERANCES.values()) or (a, b) == (c, d)
        else:
            assert error == pytest.approx(wanted)
    finite = eager.nan_to_num(0, 0)
    assert agreement.row_errors(finite, finite).max() == 0


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=6), st.lists(st.integers(-5, 5), min_size=6, max_size=6))
def test_whole_numbers_are_equal_or_not(first, second):
    """No tolerance: infinite where one differs."""
    graph, eager = torch.tensor(first), torch.tensor(second[: len(first)])
    errors = agreement.row_errors(graph, eager).tolist()
    assert errors == [0 if a == b else math.inf for a, b in zip(first, second, strict=False)]
    assert agreement.tolerance_of(eager) == 0


@given(st.integers(-2, 5), st.lists(st.floats(-10, 10), min_size=4, max_size=4))
def test_a_token_falls_short_by_its_logit(token, logits):
    """Of the largest one, as a share of the largest magnitude; a token that is none falls short of all."""
    short = float(agreement.shortfall(torch.tensor([token]), torch.tensor([logits], dtype=torch.float64)))
    if not 0 <= token < 4:
        assert short == math.inf
    else:
        gap = max(logits) - logits[token]
        assert short == pytest.approx(gap / max(map(abs, logits)) if gap else 0)


@given(st.sampled_from([*agreement.TOLERANCES]), st.integers(0, 5), st.integers(0, 3))
def test_a_print_changes_where_a_slot_is_written(dtype, slot, column):
    """That slot's and no other's, in any dtype."""
    cache = torch.ones(6, 4, dtype=dtype)
    before = agreement.prints(cache)
    cache[slot, column] = 1.5
    assert (agreement.prints(cache) != before).nonzero().tolist() == [[slot]]


def test_taps_keep_the_front_rows_of_steps_in_order():
    """Buffers are as large as the largest graph, keep nothing while they are off, and can be poisoned."""
    taps = Taps(3)
    for step in (0, 1):
        taps.keep(TapKey(step, 0, "queries"), torch.full((2, 4), float(step)))
    with taps.off():
        taps.keep(TapKey(0, 0, "queries"), torch.ones(9, 4))
    kept = dict(taps.kept(2))
    assert [key.step for key in kept] == [0, 1]
    assert all(buffer.shape == (3, 4) for buffer in kept.values())
    assert [buffer[:2].mean().item() for buffer in kept.values()] == [0, 1]
    assert [key.step for key, _ in taps.kept(1)] == [0]
    taps.poison()
    assert all(buffer.isnan().all() for buffer in kept.values())


@pytest.mark.parametrize("options", [{"replay": False}, {"run_ahead": True}, {"drafts_on_device": True}])
def test_what_leaves_no_moment_to_compare_is_refused(options):
    """By name; nothing else is."""
    with pytest.raises(RunError, match=f"{next(iter(options))} is"):
        world().runner(options=Options(compare=True, **options))


def test_a_role_that_is_not_compared_is_the_plain_one():
    """Nothing is captured in addition; comparing poisons, and runs no step ahead."""
    made = world(k=2)
    with made.runner() as plain, made.runner(options=COMPARE) as runner:
        assert {type(role._observer) for role in plain.parts.roles.values()} == {ForwardObserver}
        assert plain.parts.comparison is None
        assert {type(role._observer) for role in runner.parts.roles.values()} == {EagerCheck}
        assert runner.policy.options.poison
        assert not runner.policy.run_ahead
        assert not runner.policy.drafts_on_device
