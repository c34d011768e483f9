"""Sums over ranks in compiled forwards: called as the model calls them, and ranks compile the same or nothing."""

import os
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from capture_planner.errors import RankError
from capture_planner_runner.compilation.forwards import CACHE, Compilation, inductor, keep_apart, operators
from capture_planner_runner.compilation.pieces import compiled, traced
from capture_planner_runner.models.loading import weights_of
from capture_planner_runner.models.spread import PartialLinear, sum_of
from support.rank_threads import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 6


class Overwriting:
    """Collectives whose sums depend on their place among all, and leave nothing of what they were given."""

    rank, size, facts = 0, 2, {}

    def __init__(self, *, in_place):
        self.in_place, self.calls = in_place, 0

    def all_reduce(self, partial):
        self.calls += 1
        total = partial * 2 + self.calls
        return partial.copy_(total) if self.in_place else total


READERS = {
    "the sum": lambda layer, states: layer(states),
    "an equal part": lambda layer, states: nn.functional.linear(states, layer.weight) * layer(states),
    "the part, too": lambda layer, states: with_part(layer, nn.functional.linear(states, layer.weight)),
    "a copy": lambda layer, states: with_part(layer, states.clone() * 1) + states,
    "its input": lambda layer, states: layer(states) + states,
    "two sums of one part": lambda layer, states: layer(states) * layer(states),
    "a view": lambda layer, states: layer(states.unsqueeze(0))[0] - states.view(-1, WIDTH),
    "other rows": lambda layer, states: layer(states.t().contiguous().t()).flip(1),
    "nothing": lambda layer, states: (layer(states), states)[1] + 1,
}


def with_part(layer, part):
    """Return the sum of a part, less what the part was before."""
    return sum_of(part, layer._among) - part[:, :1]


def forward_of(names, weights, among):
    """Return a forward of layers, each followed by a reader of its sum, and the weights that it reads."""
    layers = nn.ModuleList(PartialLinear(weight, None, among) for weight in weights[: len(names)])

    def forward(attend, states):
        for name, layer in zip(names, layers, strict=True):
            states = torch.tanh(READERS[name](layer, states))
        return [states]

    return forward, list(weights_of(layers.named_modules()))


def compiled_of(names, compiler, among):
    """Return the forward compiled, and what it says where sums overwrite nothing."""
    weights = torch.randn(4, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
    forward, held = forward_of(names, weights, among)
    found = compiled(traced(forward, {"states": (torch.zeros(1, WIDTH), 0)}, held), compiler, among)

    def expected(states):
        return forward_of(names, weights, Overwriting(in_place=False))[0](None, states)

    return found, expected


class Clones(TorchDispatchMode):
    """Counts copies of whole tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@given(names=st.lists(st.sampled_from(sorted(READERS)), min_size=1, max_size=4), rows=st.integers(1, 9))
@example(names=sorted(READERS)[:4], rows=3)
def test_sums_run_in_the_models_order_and_nothing_reads_what_they_overwrite(names, rows):
    """As often as the model calls them, also where nothing reads the sum."""
    among = Overwriting(in_place=True)
    found, expected = compiled_of(names, operators, among)
    assert among.calls == 0  # a trace communicates nothing
    states = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    kept = states.clone()
    assert torch.equal(found(None, {"states": states})[0], expected(states)[0])
    assert torch.equal(states, kept)
    assert among.calls == found.sums == len(names) + names.count("two sums of one part")


@pytest.mark.parametrize(("name", "copies"), [("the sum", 0), ("its input", 0), ("a view", 0), ("the part, too", 1)])
def test_a_part_that_nothing_else_reads_is_not_copied(name, copies):
    """A copy for each sum would cost as much as the sum, where there are few rows."""
    found, _ = compiled_of([name], operators, Overwriting(in_place=True))
    with Clones() as clones:
        found(None, {"states": torch.ones(2, WIDTH)})
    assert clones.count == copies


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(READERS))
def test_inductor_leaves_each_part_to_its_sum(name):
    """It makes one tensor of equal expressions, and reuses memory; but for rounding the sums are the same."""
    among = Overwriting(in_place=True)
    found, expected = compiled_of([name, name], inductor, among)
    for rows in (2, 5, 251):
        among.calls = 0
        states = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(found(None, {"states": states})[0], expected(states)[0])


class Outline:
    """A compiled forward, as far as ranks compare it."""

    kinds = 1

    def __init__(self, outline):
        self.outline = outline


@given(st.lists(st.sampled_from(("same", "same", "same", "error", "other")), min_size=1, max_size=5))
def test_ranks_compile_the_same_or_nothing_and_all_say_which_could_not(ranks):
    """Ranks that compiled other pieces would wait for each other in a forward: they stop instead."""

    def work(peers):
        mine = ranks[peers.place.rank]

        def build():
            if mine == "error":
                raise ValueError("odd")
            return Outline(mine)

        compilation = Compilation(peers)
        found = [compilation.find("network", "target", build) for _ in range(2)]  # the second is not tried again
        return found, compilation.not_compiled, peers.topics

    outcomes = on_ranks(len(ranks), work)
    broken = [rank for rank, each in enumerate(ranks) if each == "error"]
    if broken:
        named = "; ".join(f"rank {rank}: ValueError: odd" for rank in broken)
        reason = f"target: {'ValueError: odd' if len(broken) == len(ranks) else named}"
        assert outcomes == [([None, None], [reason], ["compiling target"])] * len(ranks)
    elif len(set(ranks)) > 1:
        few = {each for each, count in Counter(ranks).items() if count < max(Counter(ranks).values())}
        assert all(isinstance(outcome, RankError) for outcome in outcomes)
        assert not few or {ranks[rank] for rank in outcomes[0].ranks} == few
    else:
        assert all(found[0] is found[1] is not None and not reasons for found, reasons, _ in outcomes)


def test_each_rank_keeps_what_it_compiles_in_a_folder_of_its_own(monkeypatch, tmp_path):
    """However often it compiles: one folder, below the one that a person chose."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    for _ in range(2):
        keep_apart(3)
    assert os.environ[CACHE] == str(tmp_path / "rank-3")
