"""Recorded graphs against the same programs run eagerly, bit for bit, over a poisoned pool."""

import re
import sys

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from capture_planner.errors import CaptureError, RunError
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.graphs.recorded import RecordedGraphs

GRAPHS: Grapher = RecordedGraphs()
LARGEST = 512
OUTPUT = 128


def same(one, other):
    """Whether two tensors have the same bits, NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@attrs.frozen(eq=False)
class World:
    """What stands before a capture: inputs, weights, indices and an output, all of them persistent."""

    x: torch.Tensor
    weight: torch.Tensor
    index: torch.Tensor
    out: torch.Tensor

    @classmethod
    def of(cls, seed):
        """Make one; the same seed makes the same."""
        generator = torch.Generator().manual_seed(seed)
        return cls(
            torch.randn(4, 6, generator=generator),
            torch.randn(6, 6, generator=generator),
            torch.randint(0, 64, (4,), generator=generator),
            torch.zeros(OUTPUT),
        )

    def become(self, other):
        """Take the values of another, in place."""
        for mine, its in zip(attrs.astuple(self), attrs.astuple(other), strict=True):
            mine.copy_(its)

    def equals(self, other):
        """Whether all values are the same, to the bit."""
        return all(map(same, attrs.astuple(self), attrs.astuple(other)))


# Operators of a program. Each gets the world, a matrix, another matrix and two numbers; what it returns
# is added to the matrices that later ones choose from.


def index_into(world, rows):
    """Indices from the device, inside the rows there are."""
    return world.index % rows


def out_argument(world, a, b, i, j):
    result = torch.empty(0) if i % 2 else torch.empty(a.shape)
    torch.mul(a, 0.5 + j, out=result)
    return result


def constant_changed_in_place(world, a, b, i, j):
    constant = torch.tensor([[1.0, 2.0, float(i)]])
    constant.add_(a.sum())
    return constant


def buffer_written_in_parts(world, a, b, i, j):
    buffer = torch.empty(a.shape[0] + 1, a.shape[1])
    buffer[0].fill_(j)
    buffer[1:].copy_(a)
    return buffer


def view_changed_in_place(world, a, b, i, j):
    base = a.clone()
    view = base.t()
    view[i % view.shape[0]].mul_(2.0)
    base.unsqueeze_(0).squeeze_(0)
    return base + view.t()


def heads_of_one_matrix(world, a, b, i, j):
    q, k, v = torch.cat([a, a * 0.5, a - 1.0], dim=1).chunk(3, dim=1)
    return torch.softmax(q @ k.t(), dim=-1) @ v


FUNCTIONAL = {
    "add": lambda w, a, b, i, j: a + b.mean() * (i + 1),
    "relu": lambda w, a, b, i, j: torch.relu(a) - j,
    "softmax": lambda w, a, b, i, j: torch.softmax(a, dim=i % 2),
    "matmul": lambda w, a, b, i, j: a @ (a if i % 2 else torch.tanh(a)).t(),
    "linear": lambda w, a, b, i, j: functional.linear(a, w.weight[:, :1].expand(6, a.shape[1])),
    "cat": lambda w, a, b, i, j: torch.cat([a, a.flip(0), a[: i % 3]], dim=0),
    "stack": lambda w, a, b, i, j: torch.stack([a, a * j], dim=i % 3).flatten(0, 1),
    "topk": lambda w, a, b, i, j: torch.cat([t.float() for t in a.topk(1 + i % a.shape[1])]),
    "max": lambda w, a, b, i, j: torch.stack([t.float() for t in a.max(dim=i % 2)]),
    "sort": lambda w, a, b, i, j: a.sort(dim=i % 2).values,
    "var_mean": lambda w, a, b, i, j: torch.cat(torch.var_mean(a, dim=0, keepdim=True, correction=0)),
    "unbind": lambda w, a, b, i, j: torch.stack(a.unbind(i % 2)),
    "masked_fill": lambda w, a, b, i, j: a.masked_fill(a > 0.1 * i, float(j)),
    "where": lambda w, a, b, i, j: torch.where(a > b.mean(), a, float(i)),
    "embedding": lambda w, a, b, i, j: functional.embedding(index_into(w, a.shape[0]), a.contiguous()),
    "gather": lambda w, a, b, i, j: a[index_into(w, a.shape[0])],
    "layer_norm": lambda w, a, b, i, j: functional.layer_norm(a, a.shape[1:]),
    "cumsum": lambda w, a, b, i, j: a.cumsum(dim=i % 2),
    "double": lambda w, a, b, i, j: (a.double() * (1 / 3)).to(torch.float32),
    "factories": lambda w, a, b, i, j: torch.arange(3.0) + torch.full((2, 3), 1.0 + i) + torch.zeros(1, 3) * j,
    "like": lambda w, a, b, i, j: torch.ones_like(a) - torch.zeros_like(a) + a.new_full((1,), j),
    "foreach": lambda w, a, b, i, j: torch.cat(torch._foreach_mul([a, a + 1], 2.0)),
    "sdpa": lambda w, a, b, i, j: functional.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None])[
        0, 0
    ],
    "rows_as_blocks": lambda w, a, b, i, j: a.reshape(-1)[: a.numel() // 2 * 2].view(2, -1) if a.numel() > 1 else a,
    "out_argument": out_argument,
    "constant": constant_changed_in_place,
    "parts": buffer_written_in_parts,
    "view_changed": view_changed_in_place,
    "heads": heads_of_one_matrix,
}
VIEWS = {
    "t": lambda w, a, b, i, j: a.t(),
    "rows": lambda w, a, b, i, j: a[i % a.shape[0] :],
    "columns": lambda w, a, b, i, j: a[:, :: 1 + i % 2],
    "narrow": lambda w, a, b, i, j: a.narrow(1, 0, 1 + i % a.shape[1]),
    "select": lambda w, a, b, i, j: a.select(0, i % a.shape[0]).unsqueeze(0),
    "split": lambda w, a, b, i, j: a.split(1 + i, dim=0)[0],
}
IN_PLACE = {
    "add_": lambda w, a, b, i, j: a.add_(0.25 * i),
    "mul_": lambda w, a, b, i, j: a.mul_(b.mean().clone()),
    "clamp_": lambda w, a, b, i, j: a.clamp_(-1.0 - i, 1.0 + j),
    "zero_": lambda w, a, b, i, j: a[: 1 + i % a.shape[0]].zero_(),
    "copy_": lambda w, a, b, i, j: a.copy_(a.flip(0)),
    "masked_fill_": lambda w, a, b, i, j: a.masked_fill_(a > j, 0.5),
    "index_copy_": lambda w, a, b, i, j: a.index_copy_(
        0, index_into(w, a.shape[0])[:1], a[i % a.shape[0]].clone().unsqueeze(0)
    ),
    "index_put_": lambda w, a, b, i, j: a.index_put_((index_into(w, a.shape[0]),), torch.tensor(float(i))),
    "mask_put": lambda w, a, b, i, j: a.__setitem__(a < -j, 2.0),
    "set_item": lambda w, a, b, i, j: a.__setitem__(i % a.shape[0], float(j)),
}
OPERATORS = FUNCTIONAL | VIEWS | IN_PLACE
SPLIT = "split here"


@attrs.frozen
class Instruction:
    """One operator of a program; which matrices it takes depends on how many there are."""

    name: str
    first: int
    second: int
    i: int
    j: int


INSTRUCTIONS = st.builds(
    Instruction,
    name=st.sampled_from([*OPERATORS, *[SPLIT] * 3]),
    first=st.integers(0, 5),
    second=st.integers(0, 5),
    i=st.integers(0, 4),
    j=st.integers(0, 3),
)
PROGRAMS = st.lists(INSTRUCTIONS, min_size=1, max_size=14)


def run(program, world, split):
    """Run a program; ``split(between, reads, writes)`` runs what is eager."""
    matrices = [world.x, world.x * 1.0]
    for step in program:
        a = matrices[-1 - step.first % len(matrices)]
        b = matrices[-1 - step.second % len(matrices)]
        if step.name == SPLIT:
            matrices.append(eagerly(a, b, step, split))
            continue
        result = OPERATORS[step.name](world, a, b, step.i, step.j)
        if isinstance(result, torch.Tensor) and 0 < result.numel() <= LARGEST and step.name not in IN_PLACE:
            matrices.append(result)
        # What falls out here dies, and its bytes are given to another.
        matrices = matrices[-4:]
    flat = torch.cat([matrix.reshape(-1) for matrix in matrices])[:OUTPUT]
    world.out[: flat.numel()].copy_(flat)


def eagerly(a, b, step, split):
    """What attention does: read two tensors of the graph, write one, and look at values on the host."""
    out = a.new_empty(a.shape)
    seen = out if step.i % 2 else out[:, :1]
    if seen is not out:
        out.fill_(-float(step.j))

    def between(a, b, seen):
        scale = 2.0 if a.sum().item() > 0 and a.tolist() else 3.0
        seen.copy_(a[:, : seen.shape[1]] * scale)
        seen.view(-1, *seen.shape[1:])[0].add_(b.abs().amax())

    split(between, (a, b), (seen,))
    return out


def eager(program, world):
    """Run a program as it is."""
    with torch.no_grad():
        run(program, world, lambda between, reads, writes: between(*reads, *writes))


@given(PROGRAMS, st.integers(0, 9), st.booleans())
def test_a_replay_is_the_program_on_the_values_of_now(program, seed, inference):
    """Whatever lay in the pool, and as often as one likes; a capture computes too."""
    world, reference = World.of(0), World.of(0)
    pool = GRAPHS.pool()
    with torch.inference_mode(inference):
        graph = GRAPHS.capture(lambda: run(program, world, GRAPHS.split), pool)
    eager(program, reference)
    assert world.equals(reference)
    assert graph.pieces == 1 + sum(step.name == SPLIT for step in program)
    assert graph.memory == graph.alone == pool.memory
    for values in (World.of(seed), World.of(0), World.of(seed + 1)):
        world.become(values)
        reference.become(values)
        pool.poison()
        graph.replay()
        eager(program, reference)
        assert world.equals(reference)


@given(st.lists(PROGRAMS, min_size=2, max_size=4), st.lists(st.integers(0, 99), max_size=6))
def test_graphs_of_one_pool_may_be_replayed_in_any_order(programs, order):
    """One destroys what another left in the pool, and no more; together they take less than apart."""
    world, reference, pool = World.of(0), World.of(0), GRAPHS.pool()
    graphs = []
    for program in programs:
        before = pool.memory
        graphs.append(GRAPHS.capture(lambda program=program: run(program, world, GRAPHS.split), pool))
        assert pool.memory == before + graphs[-1].memory
        apart = GRAPHS.capture(lambda program=program: run(program, world, GRAPHS.split), GRAPHS.pool())
        assert graphs[-1].alone == apart.memory
    assert pool.memory <= sum(graph.alone for graph in graphs)
    for turn in order:
        world.become(World.of(turn))
        reference.become(World.of(turn))
        if turn % 2:
            pool.poison()
        graphs[turn % len(graphs)].replay()
        eager(programs[turn % len(graphs)], reference)
        assert world.equals(reference)


@given(PROGRAMS)
def test_the_same_graph_again_costs_nothing(program):
    """It finds all its bytes in the pool; and a limit of as many is enough, one less is not."""
    world, pool = World.of(0), GRAPHS.pool()
    first, second = (GRAPHS.capture(lambda: run(program, world, GRAPHS.split), pool) for _ in range(2))
    assert (second.memory, second.alone) == (0, first.alone)
    exact, short = GRAPHS.pool(first.alone), GRAPHS.pool(first.alone - 1)
    GRAPHS.capture(lambda: run(program, world, GRAPHS.split), exact)
    with pytest.raises(torch.OutOfMemoryError, match=f"{first.alone:,}.*{first.alone - 1:,}"):
        GRAPHS.capture(lambda: run(program, world, GRAPHS.split), short)
    assert (exact.memory, short.memory) == (first.alone, 0)


class Passing(TorchDispatchMode):
    """A mode of somebody else, which changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A transformer block of plain operators, with embedding and head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 32, bias=False)
        self.split = None

    def attend(self, q, k, v, out):
        """Causal attention of two heads."""
        q, k, v = (t.view(-1, 2, 8).transpose(0, 1) for t in (q, k, v))
        scores = (q @ k.transpose(1, 2)).masked_fill(torch.ones(q.shape[1], q.shape[1]).triu(1).bool(), -1e9)
        out.view(-1, 2, 8).copy_((scores.softmax(-1) @ v).transpose(0, 1))

    def forward(self, tokens):
        """Return one token for each position."""
        hidden = self.embed(tokens)
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        if self.split is None:
            self.attend(q, k, v, out)
        else:
            self.split(self.attend, (q, k, v), (out,))
        return self.head(functional.gelu(hidden + out)).argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_module_is_captured(pieces, dtype):
    """Parameters with gradients and all: a graph holds none."""
    torch.manual_seed(0)
    model, pool = Block().to(dtype), GRAPHS.pool()
    model.split = GRAPHS.split if pieces == 2 else None
    tokens, out = torch.arange(7), torch.zeros(7, dtype=torch.int64)
    graph = GRAPHS.capture(lambda: out.copy_(model(tokens)), pool)
    assert graph.pieces == pieces
    model.split = None
    for seed in range(3):
        tokens.random_(0, 32, generator=torch.Generator().manual_seed(seed))
        pool.poison()
        graph.replay()
        assert torch.equal(out, model(tokens))


def test_what_dies_makes_room():
    """A chain of ten takes as much as the two that are alive at once; an allocation or a view is no use."""
    x, pool = torch.randn(16, 16), GRAPHS.pool()

    def chain():
        last, h = torch.empty_like(x), torch.cos(x)
        first = h
        for _ in range(10):
            h = torch.sin(h)
        x.copy_(last.copy_(h))
        first.unsqueeze_(0).view(-1)

    assert GRAPHS.capture(chain, pool).memory == 2 * x.nbytes


def test_a_graph_holds_no_gradients():
    """Neither what is captured, nor what runs between its pieces."""
    weight, out, made = nn.Parameter(torch.ones(3)), torch.zeros(3), []

    def forward():
        y = weight * 2
        GRAPHS.split(lambda y: made.append(y * weight), (y,), ())
        out.copy_(y)

    with torch.enable_grad():
        GRAPHS.capture(forward, GRAPHS.pool()).replay()
    assert [tensor.requires_grad for tensor in (out, *made)] == [False] * 3


def test_operators_of_a_library_are_captured():
    """One result is new, one is a view and one is its argument, which it changes."""
    with torch.library._scoped_library("recorded_test", "DEF") as library:
        library.define("mixed(Tensor(a!) x, Tensor y) -> (Tensor(a!), Tensor, Tensor)")
        library.impl("mixed", lambda x, y: (x.add_(1), x + y, y.view(-1)), "CPU")
        x, y, out, pool = torch.zeros(2), torch.ones(2), torch.zeros(3, 2), GRAPHS.pool()
        graph = GRAPHS.capture(lambda: out.copy_(torch.stack(torch.ops.recorded_test.mixed(x, y))), pool)
        y.fill_(5.0)
        pool.poison()
        graph.replay()
        assert out.tolist() == [[2.0, 2.0], [7.0, 7.0], [5.0, 5.0]]


def test_numbers_of_the_host_are_baked():
    """A Python number, and with it a shape, stays what it was at capture."""
    x, out, host = torch.arange(4.0), torch.zeros(4), {"scale": 2.0, "rows": 3}

    def forward():
        out[: host["rows"]].copy_(x[: host["rows"]] * host["scale"])

    graph = GRAPHS.capture(forward, GRAPHS.pool())
    host.update(scale=5.0, rows=1)
    out.zero_()
    graph.replay()
    assert out.tolist() == [0.0, 2.0, 4.0, 0.0]


def test_pointers_are_baked():
    """A parameter that is replaced is not seen, by whatever means; one that is written is."""
    layer, x, out = nn.Linear(2, 1, bias=False), torch.ones(1, 2), torch.zeros(1, 1)
    weight = layer.weight
    with torch.no_grad():
        weight.fill_(1.0)
    graph = GRAPHS.capture(lambda: out.copy_((x * layer.weight).sum(1, keepdim=True)), GRAPHS.pool())
    with torch.no_grad():
        old = weight.detach()
        weight.data = torch.full((1, 2), 7.0)
        layer.weight = nn.Parameter(torch.full((1, 2), 8.0))
        graph.replay()
        assert out.item() == 2.0
        old.fill_(3.0)
        graph.replay()
        assert out.item() == 6.0


X = torch.linspace(-1.0, 1.0, 8)
UNSEEN = torch.zeros(2)


def fails(name, code):
    """A program that no graph can hold, with the operator that says so."""
    return pytest.param(name, code, id=name)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        fails("_local_scalar_dense", lambda: X.sum().item()),
        fails("_local_scalar_dense", lambda: int(X[0])),
        fails("_local_scalar_dense", lambda: 1 if X.sum() > 0 else 2),
        fails("_local_scalar_dense", lambda: X[: torch.tensor(3)]),
        fails("_local_scalar_dense", lambda: torch.is_nonzero(X[0])),
        fails("equal", lambda: torch.equal(X, X)),
        fails("allclose", lambda: torch.allclose(X, X)),
        fails("tolist", lambda: X.tolist()),
        fails("numpy", lambda: X.numpy()),
        fails("__array__", lambda: X.__array__()),
        fails("nonzero", lambda: X.nonzero()),
        fails("masked_select", lambda: X.masked_select(X > 0)),
        fails("index.Tensor", lambda: X[X > 0]),
        fails("index_put_", lambda: X.index_put_((X > 0,), X[:4])),
        fails("_unique2", lambda: X.unique()),
        fails("repeat_interleave", lambda: X.repeat_interleave(torch.ones(8, dtype=torch.int64))),
        fails("bincount", lambda: torch.bincount(X.long().abs())),
        fails("rand.", lambda: torch.rand(3)),
        fails("normal_", lambda: torch.empty(3).normal_(generator=torch.Generator())),
        fails("bernoulli", lambda: torch.bernoulli(X.abs())),
        fails("multinomial", lambda: torch.multinomial(X.softmax(0), 1)),
        fails("rrelu", lambda: functional.rrelu(X, training=True)),
        fails("_to_copy", lambda: X.to("meta")),
        fails("_conj", lambda: torch.complex(X, X).conj()),
        fails("sparse", lambda: X.to_sparse()),
    ],
)
def test_what_no_graph_can_hold_is_refused(name, code, inference):
    """By the operator's name, with the line that called it, and what to do."""
    pool = GRAPHS.pool(1 << 20)
    GRAPHS.capture(lambda: X * 2, pool)
    before, values = pool.memory, X.clone()
    with pytest.raises(CaptureError) as caught, torch.inference_mode(inference):
        GRAPHS.capture(lambda: (X + 1, code()), pool)
    place = f"{code.__code__.co_filename}:{code.__code__.co_firstlineno}"
    assert re.match(rf"no graph can hold .*{re.escape(name)}.* at {re.escape(place)}: .+; .+", str(caught.value))
    assert pool.memory == before
    assert torch.equal(X, values)


@pytest.mark.parametrize(
    "code",
    [
        lambda: functional.dropout(X, training=False),
        lambda: functional.scaled_dot_product_attention(*[X.view(1, 1, 4, 2)] * 3),
        lambda: X.repeat_interleave(torch.ones(8, dtype=torch.int64), output_size=8),
        lambda: X.clone().masked_fill_(X > 0, 0.0),
        lambda: X.clone().index_put_((X > 0,), torch.tensor(1.0)),
        lambda: X[torch.tensor([1, 2])],
    ],
)
def test_what_a_graph_can_hold_is_not(code):
    """Neighbours of the refused: nothing is drawn, no shape depends on a value."""
    out = torch.zeros_like(code())
    pool = GRAPHS.pool()
    graph = GRAPHS.capture(lambda: out.copy_(code()), pool)
    out.zero_()
    pool.poison()
    graph.replay()
    assert torch.equal(out, code())


def test_an_exception_passes_through():
    """The pool is as it was, and the next capture is none the wiser."""
    pool = GRAPHS.pool()

    def raises():
        y = X + 1
        GRAPHS.split(lambda y, _: y.add_(1), (y,), (y,))
        GRAPHS.split(lambda y: 1 / 0, (y,), ())

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            GRAPHS.capture(raises, pool)
        assert pool.memory == 0
    assert X.sum().item() < 1e-6
    assert GRAPHS.capture(lambda: X + 1, pool).pieces == 1


def test_captures_do_not_mix():
    """Neither nested, nor with a replay inside, nor split outside or in between; nor in a foreign pool."""
    pool = GRAPHS.pool()
    graph = GRAPHS.capture(lambda: X + 1, pool)
    inner = (
        lambda: RecordedGraphs().capture(lambda: None, pool),
        graph.replay,
        lambda: GRAPHS.split(lambda: GRAPHS.split(lambda: None, (), ()), (), ()),
        lambda: GRAPHS.split(graph.replay, (), ()),
    )

    def within_another_mode():
        with Passing():
            graph.replay()

    for code in (*inner, within_another_mode):
        with pytest.raises(CaptureError, match=re.escape(__file__)):
            GRAPHS.capture(code, pool)
    with pytest.raises(CaptureError, match="only while"):
        GRAPHS.split(lambda: None, (), ())
    with pytest.raises(RunError, match="object is no pool"):
        GRAPHS.capture(lambda: None, object())


def test_what_runs_between_pieces_touches_nothing_but_what_it_names():
    """Else it would run on the wrong memory at replay; the same view made there is fine."""
    pool = GRAPHS.pool()

    def forward(derive):
        y = X * 2
        view = y[:4]
        other = X * 3
        touched = {"view": lambda: view, "other": lambda: other, "fine": lambda: y[:4], "before": lambda: X}
        GRAPHS.split(lambda *_: touched[derive]().add_(0), (y, UNSEEN), (y,))

    for derive in ("view", "other"):
        with pytest.raises(CaptureError, match="not among the reads and writes"):
            GRAPHS.capture(lambda derive=derive: forward(derive), pool)
    for derive in ("fine", "before"):
        GRAPHS.capture(lambda derive=derive: forward(derive), pool)


def test_a_capture_keeps_no_intermediate_alive():
    """It takes the memory of an eager forward, and what was captured before stays where it was."""
    x = torch.ones(1 << 10)
    held = []

    def forward():
        y = x + 1
        held.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
        del y
        assert held[0].expired()
        x.mul_(2)

    GRAPHS.capture(forward, GRAPHS.pool())


def test_the_place_is_that_of_the_innermost_code_of_the_caller():
    """Frames of torch between it and the operator do not count."""
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda *_: X.sum().item())
    line = sys._getframe().f_lineno - 1
    with pytest.raises(CaptureError, match=rf"{re.escape(__file__)}:{line}:"):
        GRAPHS.capture(lambda: layer(X), GRAPHS.pool())
