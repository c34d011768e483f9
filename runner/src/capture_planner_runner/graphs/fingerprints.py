"""Fingerprints of CUDA graphs, read through cuda-bindings.

A node is digested with its kernel's name and launch dimensions and with the digests of the nodes before it, so that
the order in which the driver lists nodes does not matter. Kernel arguments are not read: they hold addresses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from capture_planner.errors import CaptureError
from capture_planner.records.fingerprint import Fingerprint, digest_of, kernel_name

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_DIMENSIONS = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")


def load_driver() -> Any:
    """Return the driver's bindings; raises ``CaptureError`` where they are not installed."""
    try:
        from cuda.bindings import driver  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise CaptureError(f"graphs cannot be read, since cuda-bindings is missing ({error}); install it") from error
    return driver


def fingerprint_of(graph: int, driver: Any) -> Fingerprint:
    """Return the fingerprint of a ``cudaGraph_t``; raises ``CaptureError`` where the driver refuses."""
    nodes = _read(driver, graph)
    labels = _labels(nodes)
    kernels = Counter(node.kernel for node in nodes.values() if node.kernel)
    count = sum(node.nodes for node in nodes.values())
    return Fingerprint(nodes=count, kernels=dict(sorted(kernels.items())), topology=digest_of(*sorted(labels.values())))


@attrs.frozen
class GraphNode:
    """One node, without addresses."""

    label: str
    """Its type; of a kernel also the name and the dimensions."""
    kernel: str
    """Empty for other nodes."""
    before: tuple[int, ...]
    """The nodes that it depends on."""
    nodes: int = 1
    """1, and of a child graph its own nodes too."""


def _labels(nodes: Mapping[int, GraphNode]) -> dict[int, str]:
    """Return a digest of each node with all that comes before it."""
    labels: dict[int, str] = {}
    pending = list(nodes)
    while pending:
        key = pending[-1]
        missing = [] if key in labels else [other for other in nodes[key].before if other not in labels]
        if missing:
            pending += missing
            continue
        pending.pop()
        if key not in labels:
            labels[key] = digest_of(nodes[key].label, *sorted(labels[other] for other in nodes[key].before))
    return labels


def _read(driver: Any, graph: int) -> dict[int, GraphNode]:
    """Return the nodes of a graph by their handles."""

    def call(name: str, *arguments: Any) -> tuple[Any, ...]:
        status, *values = getattr(driver, name)(*arguments)
        if int(status):
            raise CaptureError(f"the CUDA driver does not describe a graph: {name} returns {status}")
        return tuple(values)

    handle = driver.CUgraph(graph)
    count = call("cuGraphGetNodes", handle)[-1]
    handles = call("cuGraphGetNodes", handle, count)[0][:count] if count else []
    before: dict[int, list[int]] = {int(node): [] for node in handles}
    edges = call("cuGraphGetEdges", handle)[-1]
    if edges:
        starts, ends, *_ = call("cuGraphGetEdges", handle, edges)
        for start, end in zip(starts[:edges], ends[:edges], strict=True):
            before[int(end)].append(int(start))
    found = {}
    for node in handles:
        (kind,) = call("cuGraphNodeGetType", node)
        name = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_")
        if name == "KERNEL":
            (parameters,) = call("cuGraphKernelNodeGetParams", node)
            kernel = _kernel(parameters, call)
            dimensions = [getattr(parameters, dimension) for dimension in _DIMENSIONS]
            label = f"{name} {kernel} {dimensions}"
            found[int(node)] = GraphNode(label, kernel_name(kernel), tuple(before[int(node)]))
        elif name == "GRAPH":
            inner = fingerprint_of(int(call("cuGraphChildGraphNodeGetGraph", node)[0]), driver)
            label = f"{name} {inner.topology}"
            found[int(node)] = GraphNode(label, "", tuple(before[int(node)]), 1 + inner.nodes)
        else:
            found[int(node)] = GraphNode(name, "", tuple(before[int(node)]))
    return found


def _kernel(parameters: Any, call: Callable[..., tuple[Any, ...]]) -> str:
    """Return the name of a kernel, which a node has as a function of a module or as a kernel of a library."""
    if int(parameters.func):
        (name,) = call("cuFuncGetName", parameters.func)
    elif int(parameters.kern):
        (name,) = call("cuKernelGetName", parameters.kern)
    else:
        return "kernel without a handle"
    return _ADDRESS.sub("0x", name.decode(errors="replace"))
