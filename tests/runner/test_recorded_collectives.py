"""Collectives of torch.distributed in recorded graphs, over a group of one rank; ranks/test_spread.py has several."""

import pytest
import torch
import torch.distributed as dist

from capture_planner.errors import CaptureError
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.ranks.collectives import GroupCollectives


@pytest.fixture(scope="module")
def group():
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def forward_of(among, inputs, out):
    """Return a forward that sums, gathers, and leaves both in ``out``."""

    def forward():
        out[0].copy_(among.all_reduce(inputs * 2) + 1)
        out[1].copy_(among.gather(inputs + 3)[0])

    return forward


def test_each_replay_communicates_what_is_there_then(group):
    """Of any values, however the pool was left before."""
    among, inputs, out = GroupCollectives(group), torch.zeros(5), torch.zeros(2, 5)
    graphs = RecordedGraphs()
    pool = graphs.pool()
    graph = graphs.capture(forward_of(among, inputs, out), pool)
    for value in (1.0, -4.0, 7.0):
        inputs.fill_(value)
        pool.poison()
        graph.replay()
        assert torch.equal(out, torch.tensor([[2 * value + 1] * 5, [value + 3] * 5]))
    assert among.calls == 2


def test_a_fingerprint_names_collectives_and_no_group(group):
    """Two captures of the same forward are equal, though a group is an object of its process."""
    among, inputs, out = GroupCollectives(group), torch.zeros(5), torch.zeros(2, 5)
    graphs = RecordedGraphs()
    prints = [graphs.capture(forward_of(among, inputs, out), graphs.pool()).fingerprint() for _ in range(2)]
    assert prints[0] == prints[1]
    assert prints[0].kernels["c10d.allreduce_.default"] == 1


def test_a_collective_whose_result_arrives_later_is_refused(group):
    """Functional collectives return a tensor that nothing has arrived in: a replay would copy it too soon."""
    inputs = torch.ones(3)

    def forward():
        torch.ops._c10d_functional.all_reduce(inputs, "sum", group.group_name)

    graphs = RecordedGraphs()
    with pytest.raises(CaptureError, match="its result arrives later"):
        graphs.capture(forward, graphs.pool())


def test_ranks_part_once_their_graphs_are_gone(group):
    """A group must outlive the graphs that hold calls of it, and says how many there are."""
    among, inputs, out = GroupCollectives(group), torch.zeros(5), torch.zeros(2, 5)
    graphs = RecordedGraphs()
    graph = graphs.capture(forward_of(among, inputs, out), graphs.pool())
    among.keep(graph)
    with pytest.raises(Exception, match="1 graph with collectives"):
        among.release()
    del graph
    among.release()
