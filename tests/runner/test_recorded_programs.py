"""Recorded graphs of random programs: a replay is the program, in any order and from one pool."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from support.recording import GRAPHS, same

LARGEST = 512
OUTPUT = 128


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
    third = GRAPHS.capture(lambda: run(program, world, GRAPHS.split), exact)
    with pytest.raises(torch.OutOfMemoryError, match=f"{first.alone:,}.*{first.alone - 1:,}"):
        GRAPHS.capture(lambda: run(program, world, GRAPHS.split), short)
    assert (exact.memory, third.memory, short.memory) == (first.alone, first.alone, 0)
