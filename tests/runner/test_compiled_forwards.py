"""A compiled forward: the bits of the one that it was compiled from, for any number of tokens, or a reason."""

import functools
import re
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from capture_planner.plugins.backend import Scoring
from capture_planner.records.model import Model
from capture_planner_runner.compilation.forwards import Compilation, Forwards, inductor, operators
from capture_planner_runner.compilation.pieces import compiled, traced
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.models.loading import weights_of
from support.model_families import FAMILIES, VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
WIDTH = 8
OWN = torch.ones(WIDTH)
SHAPE = Model(name="tiny", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_model_len=64)
SIZES = st.one_of(st.integers(1, 20), st.integers(240, 260))


class Calls:
    """An ``Attend`` whose answers depend on everything that it is given."""

    def __init__(self, rows=None):
        self.rows, self.layers = rows, []

    def __call__(self, layer, query, keys, values, scoring):
        assert all(tensor.is_contiguous() for tensor in (query, keys, values))
        self.layers.append(layer)
        groups = query.shape[1] // keys.shape[1]
        out = torch.tanh(query * scoring.scale) + (keys * values).repeat_interleave(groups, 1) * (1 + layer)
        if scoring.softcap is not None:
            out = out * scoring.softcap
        return out if scoring.sinks is None else out + scoring.sinks[:, None]

    def recur(self, layer, inputs, decays):
        return torch.tanh(inputs.cumsum(0) + decays) + layer

    @property
    def real(self):
        return torch.arange(self.rows) % 3 != 1


class Network(nn.Module):
    """Layers of one kind, with what Hugging Face models do not use: recurrence, and which rows are real."""

    def __init__(self, layers, step=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.step = step

    def forward(self, attend, variant, states):
        for number, layer in enumerate(self.layers):
            states = torch.tanh(layer(states)) + states
            if self.step is not None:
                states = self.step(states)
            heads = states.view(-1, 2, WIDTH // 2)
            out = attend(number, heads, heads, heads, Scoring(scale=0.5))
            states = attend.recur(number, out.reshape(-1, WIDTH), states)
        weight = torch.where(attend.real, 1.0, 0.0)
        return [states - (states * weight[:, None]).sum(0) / weight.sum()]


def network(layers=2, step=None):
    """Return a network without gradients; always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Network(layers, step).requires_grad_(False)


def compile_network(model, compiler=operators):
    """Compile a network for any number of rows."""
    trace = traced(
        lambda attend, **inputs: model(attend, 0, **inputs),
        {"states": (torch.zeros(1, WIDTH), 0)},
        weights_of(model.named_modules()),
    )
    return compiled(trace, compiler)


@functools.cache
def counted_network(layers):
    """Return a network, the same compiled, and the pieces that were compiled so far."""
    model, modules = network(layers), []

    def counting(module, inputs):
        modules.append(module)
        return operators(module, inputs)

    return model, compile_network(model, counting), modules


def reason_of(model):
    """Return why a network is not compiled; it then runs as it is."""
    forwards, compilation = Forwards(), Compilation()
    states = torch.ones(3, WIDTH)
    weights = list(weights_of(model.named_modules()))
    for _ in range(2):  # the second is not tried again
        forwards.compile(model, model, 0, {"states": states}, weights, operators, compilation, "target")
    assert not forwards.compiled
    assert torch.equal(*(forwards.run(model, Calls(3), 0, {"states": states})[0], model(Calls(3), 0, states)[0]))
    (reason,) = compilation.not_compiled
    assert compilation.facts() == {"not compiled": reason}
    return reason


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Return the forward of a family, and the same compiled; once each."""
    pairs = {}

    def load(name):
        if name not in pairs:
            folder = tmp_path_factory.mktemp("model")
            FAMILIES[name]().save_pretrained(folder)
            model = load_target(folder, SHAPE, device=CPU, dtype=torch.float32)

            def forward(attend, input_ids, positions):
                return model.forward(
                    input_ids=input_ids, embeddings=None, positions=positions, attend=attend, aux_layers=(2, 0)
                )

            kinds = {"input_ids": (torch.zeros(1, dtype=torch.int64), 0), "positions": places(model, 1)}
            pairs[name] = model, forward, compiled(traced(forward, kinds, model.weights()), operators)
        return pairs[name]

    return load


def places(model, rows):
    """Return positions, and their dimension for rows."""
    positions = torch.arange(rows) % 60
    return (torch.stack([positions, positions // 2, 63 - positions]), 1) if model.mrope else (positions, 0)


CASES = [pytest.param(name, marks=() if name in ("gpt-oss", "qwen2-vl") else pytest.mark.thorough) for name in FAMILIES]


@pytest.mark.parametrize("name", CASES)
@given(rows=SIZES, seed=st.integers(0, 99))
def test_a_compiled_model_has_the_bits_of_the_model_for_any_number_of_tokens(family, name, rows, seed):
    model, forward, found = family(name)
    ids = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(seed))
    inputs = {"input_ids": ids, "positions": places(model, rows)[0]}
    assert all(map(torch.equal, found(Calls(), inputs), forward(Calls(), **inputs)))
    # What comes before the first attention, between two of them, and after the last one.
    assert (found.kinds, found.pieces) == (3, 1 + model.num_layers)


@given(rows=SIZES, layers=st.integers(1, 4))
def test_layers_that_differ_by_weights_alone_are_compiled_once(rows, layers):
    """Recurrence and which rows are real included; nothing is compiled by a call."""
    model, found, modules = counted_network(layers)
    calls = Calls(rows)
    states = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    assert torch.equal(found(calls, {"states": states})[0], model(Calls(rows), 0, states)[0])
    assert calls.layers == list(range(layers))
    # Up to an attention, from it to a recurrence, and after the last one.
    assert len(modules) == found.kinds == 3


def test_weights_are_read_when_the_forward_runs():
    """Changed in place or replaced: guards look at what graphs hold, and eager steps use what is there."""
    model, states = network(), torch.ones(4, WIDTH)
    found = compile_network(model)
    model.layers[0].weight.mul_(2)
    model.layers[1].weight = nn.Parameter(torch.eye(WIDTH), requires_grad=False)
    assert torch.equal(found(Calls(4), {"states": states})[0], model(Calls(4), 0, states)[0])


def test_a_value_is_dropped_after_the_last_piece_that_reads_it():
    """What a piece leaves must not stay in the pool of a graph until the forward ends."""
    alive, kept = [], []

    class Watching(Calls):
        def __call__(self, layer, query, keys, values, scoring):
            alive.append(sum(reference() is not None for reference in kept))
            kept.append(weakref.ref(query.untyped_storage()))
            return super().__call__(layer, query, keys, values, scoring)

    model = network(4)
    compile_network(model)(Watching(5), {"states": torch.ones(5, WIDTH)})
    assert max(alive) <= 1


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda states: states * states.max().item(), "reads a device value on the host .aten._local_scalar_dense"),
        (lambda states: states if states.sum() > 0 else -states, "on the host, and takes another path"),
        (lambda states: states[states[:, 0] > 0].sum() + states, "reads a device value on the host .aten.index.Tensor"),
        (lambda states: states * (2 if states.shape[0] > 16 else 3), "it checks .* 16"),
        (lambda states: states * len(states), "the number of tokens as a fixed number"),
        (lambda states: states * OWN, "not among its weights"),
    ],
)
def test_a_forward_that_no_graph_could_hold_runs_as_it_is_and_says_why(step, reason):
    found = reason_of(network(step=step))
    assert found.startswith("target: ")
    assert re.search(reason, found), found


@pytest.mark.thorough
def test_inductor_computes_the_same_but_for_rounding():
    """Compiled once, run with any number of rows."""
    model = network(3)
    found = compile_network(model, inductor)
    for rows in (1, 2, 3, 16, 250, 251, 300):
        states = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(found(Calls(rows), {"states": states})[0], model(Calls(rows), 0, states)[0])
