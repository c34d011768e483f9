"""Fingerprints: equal for two captures, other where a kernel or its launch is, and without any address."""

import re
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import CaptureError
from capture_planner.modes import Role
from capture_planner.records.fingerprint import LONGEST, Fingerprint, Fingerprints, kernel_name
from capture_planner_runner.graphs.cuda import fingerprint_of
from capture_planner_runner.graphs.recorded import RecordedGraphs
from support.planted import Deployment, scaled_attention

# A driver without a device: the functions of cuda.bindings.driver that are called, over graphs as plain data.


class DriverStandin:
    """The driver's functions over ``graphs``: of each its nodes, each with type, kernel, grid and predecessors."""

    CUgraph = staticmethod(lambda handle: handle)

    def __init__(self, graphs, *, broken=""):
        self._graphs, self._broken = graphs, broken
        self._nodes = {node["handle"]: node for graph in graphs.values() for node in graph}

    def _answer(self, name, *values):
        return (999 if name == self._broken else 0, *values)

    def cuGraphGetNodes(self, graph, count=0):  # noqa: N802
        """Return so many handles, in the order of the data."""
        handles = [node["handle"] for node in self._graphs[graph]]
        return self._answer("cuGraphGetNodes", handles[:count] or None, len(handles))

    def cuGraphGetEdges(self, graph, count=0):  # noqa: N802
        """Return starts, ends and data of edges, as CUDA 13 does."""
        pairs = [(before, node["handle"]) for node in self._graphs[graph] for before in node["before"]]
        starts, ends = [start for start, _ in pairs], [end for _, end in pairs]
        return self._answer("cuGraphGetEdges", starts[:count], ends[:count], [None] * count, len(pairs))

    def cuGraphNodeGetType(self, node):  # noqa: N802
        """Return a member with the name of the type."""
        kind = types.SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{self._nodes[node]['type']}")
        return self._answer("cuGraphNodeGetType", kind)

    def cuGraphKernelNodeGetParams(self, node):  # noqa: N802
        """Return dimensions, and the kernel as a function or as a library's."""
        found = self._nodes[node]
        sizes = dict.fromkeys(("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY"), found["grid"])
        is_function = found["kernel"].startswith("f")
        return self._answer(
            "cuGraphKernelNodeGetParams",
            types.SimpleNamespace(
                **sizes, blockDimZ=1, sharedMemBytes=0, func=node * is_function, kern=node * (not is_function)
            ),
        )

    def cuFuncGetName(self, node):  # noqa: N802
        """Return the name, with an address in it, as CuTe DSL has them."""
        return self._answer("cuFuncGetName", f"{self._nodes[node]['kernel']}_at_0x{node:012x}".encode())

    cuKernelGetName = cuFuncGetName  # noqa: N815

    def cuGraphChildGraphNodeGetGraph(self, node):  # noqa: N802
        """Return a graph inside a node."""
        return self._answer("cuGraphChildGraphNodeGetGraph", self._nodes[node]["child"])


@st.composite
def graphs(draw):
    """A graph of a few nodes, each after some of those before it."""
    nodes = []
    for index in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(("KERNEL", "KERNEL", "MEMCPY", "MEMSET")))
        before = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        kernel = draw(st.sampled_from(("fused", "from_library", "gemm")))
        nodes.append({"type": kind, "kernel": kernel, "grid": draw(st.integers(1, 3)), "before": before})
    return nodes


def placed(nodes, order, base):
    """Return the nodes with handles from ``base`` on, listed in another order."""
    handles = [base + 0x1000 * index for index in order]
    found = [
        node | {"handle": handles[index], "before": [handles[other] for other in sorted(node["before"])]}
        for index, node in enumerate(nodes)
    ]
    return sorted(found, key=lambda node: node["handle"])


def read(nodes, order, base=0x7F0000000000):
    """Return the fingerprint of a graph whose nodes lie there."""
    return fingerprint_of(1, DriverStandin({1: placed(nodes, order, base)}))


@given(graphs(), st.data())
def test_addresses_and_order_are_no_part_of_a_fingerprint(nodes, data):
    """Another process has other handles, and another driver may list nodes in another order."""
    orders = st.permutations(range(len(nodes)))
    first, second = (read(nodes, data.draw(orders), base) for base in (0x7F0000000000, 0x550000000000))
    assert first == second
    assert first.nodes == len(nodes)
    assert sum(first.kernels.values()) == sum(node["type"] == "KERNEL" for node in nodes)
    assert not any(re.search("0x[0-9a-f]", name) for name in first.kernels)


def histories(nodes):
    """Return what a graph computes: of each node itself and the histories of those before it, in any order."""
    found = []
    for node in nodes:
        launch = (node["kernel"], node["grid"]) if node["type"] == "KERNEL" else ()
        found.append((node["type"], launch, tuple(sorted(found[index] for index in node["before"]))))
    return sorted(found)


@given(graphs(), st.data())
def test_another_kernel_launch_or_edge_is_another_fingerprint(nodes, data):
    """Each change of one node is seen, but an edge that moves between nodes with equal histories."""
    before = read(nodes, range(len(nodes)))
    for index, node in enumerate(nodes):
        edges = data.draw(st.sets(st.integers(0, index - 1)) if index else st.just(set()))
        for other in ({"kernel": "other"}, {"grid": node["grid"] + 1}, {"before": edges}):
            changed = [*nodes[:index], node | other, *nodes[index + 1 :]]
            after = read(changed, range(len(nodes)))
            assert (after.topology == before.topology) is (histories(changed) == histories(nodes))
            assert (after.kernels != before.kernels) is ("kernel" in other and node["type"] == "KERNEL")


def test_graphs_inside_nodes_count():
    """Their nodes and their topology; their kernels are not listed twice."""
    inner = placed([{"type": "KERNEL", "kernel": "gemm", "grid": 1, "before": set()}], [0], 0x100)
    outer = [{"type": "GRAPH", "kernel": "", "grid": 1, "before": set(), "handle": 0x900, "child": 2}]
    found = fingerprint_of(1, DriverStandin({1: outer, 2: inner}))
    inner[0]["grid"] = 2
    other = fingerprint_of(1, DriverStandin({1: outer, 2: inner}))
    assert found.nodes == other.nodes == 2
    assert found.topology != other.topology


def test_a_driver_that_refuses_is_an_error():
    """With the call, and what it returned."""
    with pytest.raises(CaptureError, match="cuGraphGetNodes returns 999"):
        fingerprint_of(1, DriverStandin({1: []}, broken="cuGraphGetNodes"))


@given(st.text(max_size=4 * LONGEST), st.text(max_size=4 * LONGEST))
def test_names_of_kernels_are_short_and_stay_apart(one, other):
    """A digest stands for the end of a long name."""
    assert len(kernel_name(one)) <= LONGEST
    assert (kernel_name(one) == kernel_name(other)) is (one == other)


@given(st.dictionaries(st.tuples(st.sampled_from(Role), st.integers(0, 9)), graphs(), max_size=4))
def test_a_plan_holds_fingerprints_as_they_are(found):
    """By role and index, with one list of names for all."""
    prints = {key: read(nodes, range(len(nodes))) for key, nodes in found.items()}
    assert Fingerprints.of(prints, torch="2.13", device="one").by_graph() == prints


# Recorded graphs.


def recorded(rows, factor=2.0):
    """Capture a small forward over new tensors."""
    held, out = torch.randn(rows, 4), torch.zeros(rows, 4)
    grapher = RecordedGraphs()
    return grapher.capture(lambda: out.copy_((held * factor).relu()), grapher.pool()).fingerprint()


@settings(max_examples=10)
@given(st.integers(1, 6), st.floats(0.5, 2))
def test_recorded_graphs_have_the_fingerprint_of_their_operators(rows, factor):
    """Host numbers and shapes are part of it, addresses are not."""
    found = recorded(rows, factor)
    assert found == recorded(rows, factor)
    assert found.kernels == {"aten.copy_.default": 1, "aten.mul.Tensor": 1, "aten.relu.default": 1}
    for other in (recorded(rows + 1, factor), recorded(rows, factor + 1)):
        assert other.topology != found.topology
        assert other.kernels == found.kernels


def test_two_runs_have_the_same_fingerprints_and_another_operator_is_seen():
    """In graphs that hold attention: between the pieces of the others nothing is captured."""
    deployment = Deployment(layers=1, requests=2)
    first, again, spoiled = (
        {(done.role, done.entry): done.fingerprint for done in deployment.launch(backend).report.captured}
        for backend in (None, None, scaled_attention(0))
    )
    assert first == again
    for (role, entry), found in first.items():
        assert isinstance(found, Fingerprint)
        assert (spoiled[role, entry] != found) is (entry.num_reqs is not None)
