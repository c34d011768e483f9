"""Dumps of CUDA graphs: a Graphviz file for each piece, and replays go on as before."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from capture_planner.modes import GraphMode  # noqa: E402
from capture_planner.records.batch import Entry  # noqa: E402
from capture_planner_runner.graphs.cuda import CudaGraphs  # noqa: E402
from capture_planner_runner.graphs.graph import dump_graphs  # noqa: E402


def test_a_cuda_graph_is_dumped_and_replayed(tmp_path):
    """One file for a graph of one piece, with its nodes; what it computes is the same afterwards."""
    graphs = CudaGraphs(torch.device("cuda"))
    given, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def forward():
        out.copy_(given * 2 + 1)

    forward()
    graph = graphs.capture(forward, graphs.pool())
    entry = Entry(mode=GraphMode.FULL, num_tokens=4, num_reqs=4, query_len=1)
    for _ in range(2):
        (file,) = dump_graphs([("target", entry, graph)], tmp_path)
        assert "digraph" in file.read_text("utf-8")
        given.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        assert out.tolist() == [7.0] * 4
