"""Faults of backends, updates, weights and chains: the eager check names each at the first tensor that differs."""

import functools

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from capture_planner.modes import GraphMode, Role
from capture_planner.records.model import Method
from capture_planner_runner.graphs.recorded import RecordedGraph
from capture_planner_runner.serving.workload import Request
from support.eager_faults import COMPARE, FaultyReference, difference_of, world
from support.probe import Probe
from support.worlds import requests_of, serve

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_stale_block_table_is_found_at_its_layer():
    """From layer 1 on, a graph reads the table of its capture: layer 1, attention, and nothing before it."""
    tables = {}

    def stale(layer, given):
        if layer < 1:
            return given
        table = given.fields["block_table"]
        old = tables.setdefault(given.entry, torch.zeros_like(table))
        return attrs.evolve(given, fields={**given.fields, "block_table": old})

    diff = difference_of(world(FaultyReference(metadata=stale)))
    assert (diff.role, diff.layer, diff.tensor) == (Role.TARGET, 1, "attention")
    assert (diff.after, diff.row, diff.request) == ("layer 1, value cache", 0, diff.requests[0])
    assert diff.graph != diff.eager
    assert diff.error > diff.tolerance


def test_a_baked_host_number_is_found_where_it_is_used():
    """A graph scales by the longest sequence of its capture."""

    def scaled(layer, out, metadata):
        if layer == 1:
            out.mul_(1 + int(metadata.host["seq_lens"].max()))

    def by_host(layer, out, metadata):
        out.mul_(1 + float(np.max(metadata.host["seq_lens"])) * (layer == 1))

    for spoil in (scaled, by_host):
        diff = difference_of(world(FaultyReference(spoil)))
        assert (diff.layer, diff.tensor, diff.rows) == (1, "attention", diff.num_tokens)


def test_a_number_that_is_none_is_a_difference():
    """NaN in one real row, which no tolerance lets pass."""

    def spoil(layer, out, metadata):
        if layer == 0:
            out[:1].fill_(float("nan"))

    diff = difference_of(world(FaultyReference(spoil)))
    assert (diff.layer, diff.tensor, diff.row, diff.rows) == (0, "attention", 0, 1)
    assert (diff.graph, diff.error) == (None, None)
    assert diff.eager is not None


def test_padding_may_be_anything():
    """NaN in the padded rows alone is no difference: it reaches no real row."""

    def spoil(layer, out, metadata):
        starts = metadata.fields["query_start_loc"]
        padded = torch.arange(len(out)) >= starts[-1]
        out.masked_fill_(padded[:, None, None], float("nan"))

    made = world(FaultyReference(spoil))
    with made.runner(options=COMPARE) as runner:
        runner.capture()
        serve(runner, requests_of(made, 1))
        assert any(forward.padded_tokens and forward.entry.num_reqs for forward in runner.session.forwards)
        assert runner.comparison.report().difference is None


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
        role = runner.roles[Role.TARGET]
        store, stored = role.attention._updates.store, lambda *_: None
        swap = functools.partial(monkeypatch.setattr, role.attention._updates, "store")
        in_graphs(role, lambda: swap(stored), lambda: swap(store))

    diff = difference_of(world(mode=GraphMode.FULL), plant)
    assert (diff.layer, diff.tensor) == (0, "key cache")
    assert diff.request in diff.requests
    assert diff.row >= 4


def test_a_graph_that_leaves_its_output_unwritten_is_found_there():
    """What the eager forward left in the same buffer is poison by then."""

    def plant(runner):
        body = runner.target
        own, other = body.hidden, torch.zeros_like(body.hidden)
        swap = functools.partial(setattr, body, "hidden")
        in_graphs(runner.roles[Role.TARGET], lambda: swap(other), lambda: swap(own))

    diff = difference_of(world(), plant)
    assert (diff.layer, diff.tensor, diff.graph) == (None, "hidden", None)


@pytest.mark.parametrize("backend", [None, Probe()])
def test_drafts_past_the_end_of_the_model_write_where_anybody_may(backend):
    """To the null slot, and rows of padding after them: what is there is no diff."""
    made, slots = world(backend, k=3), []
    with made.runner(options=COMPARE) as runner:
        runner.capture()
        role = runner.roles[Role.DRAFT_DECODE]
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
        assert runner.comparison.report().difference is None
    assert any(slots) or backend is None


def test_a_stale_slot_is_found_in_the_cache():
    """Rows of padding write where rows of a larger batch did: a slot that another token owns is named."""

    def plant(runner):
        role = runner.roles[Role.TARGET]
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

    diff = difference_of(world(), plant)
    assert (diff.layer, diff.tensor, diff.after) == (0, "key cache", "layer 0, values")
    assert diff.padded_reqs
    assert diff.eager is None
    assert diff.row >= 4


def test_a_stale_tail_of_a_field_is_found_before_the_replay():
    """Slots past the batch keep poison: the field is named, and nothing is indexed with it."""

    def plant(runner):
        role = runner.roles[Role.TARGET]
        apply = role._apply

        def short(writes):
            for write in writes:
                if write.buffer.key == "slot_mapping" and write.real is not None:
                    write.rows = len(write.real)
            apply(writes)

        role._apply = short

    diff = difference_of(world(), plant)
    assert (diff.tensor, diff.layer, diff.request, diff.after) == ("field slot_mapping", None, None, None)
    assert diff.row == diff.num_tokens
    seen = {field.name: field for field in diff.fields}
    assert len(seen["slot_mapping"].real) == diff.num_tokens
    assert set(seen["slot_mapping"].padding) == {diff.graph}
    assert seen["seq_lens"].padding == [0] * diff.padded_reqs


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
        weights = runner.roles[role].body.weights()
        module, name = next((m, n) for full, m, n in weights if full.endswith(weight))
        other = nn.Parameter(torch.rand_like(getattr(module, name)) + 1, requires_grad=False)
        monkeypatch.setitem(module._parameters, name, other)

    diff = difference_of(world(k=2 * role.is_drafter), armed=armed, trust=True)
    assert (diff.role, diff.layer, diff.tensor, diff.after) == (role, layer, tensor, after)


class UpdatesWithoutMove:
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
        body = runner.roles[Role.DRAFT_DECODE].body
        body.updates = UpdatesWithoutMove(body.updates)

    diff = difference_of(world(backend, k=3, mode=GraphMode.FULL), plant)
    assert (diff.role, diff.draft_step) == (Role.DRAFT_DECODE, 1)
    assert (diff.layer, diff.tensor) == (layer, tensor)
    assert (diff.entry.draft_steps is None) == (backend is not None)


@pytest.mark.parametrize("k", [0, 2])
def test_a_graph_that_does_nothing_is_found_at_its_first_tensor(monkeypatch, k):
    """Nothing of the eager forward is left for it to be mistaken for."""
    diff = difference_of(world(k=k), lambda _: monkeypatch.setattr(RecordedGraph, "replay", lambda self: None))
    assert (diff.layer, diff.tensor, diff.graph, diff.error) == (0, "queries", None, None)


def test_auxiliary_states_are_compared(monkeypatch):
    """Those that EAGLE-3 reads: a graph that leaves them out leaves poison."""

    def plant(runner):
        body = runner.target
        monkeypatch.setattr(body, "aux_layers", (0, *body.aux_layers[1:]))

    def armed(runner):
        runner.target.aux_layers = (1, *runner.target.aux_layers[1:])

    diff = difference_of(world(k=1, method=Method.EAGLE3), plant, armed)
    assert (diff.role, diff.tensor) == (Role.TARGET, "aux")
