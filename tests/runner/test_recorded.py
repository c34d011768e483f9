"""Recorded graphs against the same programs run eagerly, bit for bit, over a poisoned pool."""

import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from capture_planner.errors import CaptureError, RunError
from capture_planner_runner.graphs.recorded import RecordedGraphs
from support.recording import GRAPHS


class NoOpMode(TorchDispatchMode):
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
        with NoOpMode():
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
