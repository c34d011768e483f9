"""Fingerprints of captured graphs: what is equal in two processes, and differs where a kernel changed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import attrs

from capture_planner.errors import Problem
from capture_planner.modes import Role
from capture_planner.records._base import NonNegative, Pattern, Tally, field, record

LONGEST = 160
"""Characters of a kernel's name that are kept; a digest stands for the rest."""

Topology = Annotated[str, Pattern(r"[0-9a-f]{16}", "16 hexadecimal digits")]
KernelCounts = Annotated[
    str,
    Pattern(r"([1-9][0-9]{0,8}\*[0-9]{1,6}( [1-9][0-9]{0,8}\*[0-9]{1,6})*)?", "counts and indexes such as 28*0 1*4"),
]
"""One text, since a list of pairs for every graph would make a plan too large to be read."""


@attrs.frozen(kw_only=True)
class Fingerprint:
    """Kernels and structure of one graph, without addresses."""

    nodes: int
    """Nodes of a CUDA graph, of all pieces together; operators of a recorded graph."""
    kernels: Mapping[str, int]
    """Number of times that each kernel, or operator, is in it."""
    topology: str
    """A digest of all nodes with their dimensions and of the edges between them."""

    @classmethod
    def of_pieces(cls, pieces: Sequence[Fingerprint]) -> Fingerprint:
        """Return the fingerprint of a graph in pieces."""
        kernels = sum((Counter(piece.kernels) for piece in pieces), Counter[str]())
        # A FULL graph is one piece, and its topology stays as it is.
        topology = pieces[0].topology if len(pieces) == 1 else digest_of(*(piece.topology for piece in pieces))
        return cls(nodes=sum(piece.nodes for piece in pieces), kernels=dict(sorted(kernels.items())), topology=topology)


def digest_of(*parts: object) -> str:
    """Return 16 hexadecimal digits of some parts, by their text."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def kernel_name(name: str) -> str:
    """Return the name of a kernel, cut where it is long: those of templates have thousands of characters."""
    # Long names may differ only near their end, so a digest of the whole name follows.
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 18]}..{digest_of(name)}"


@record
class GraphFingerprint:
    """The fingerprint of one graph of a plan."""

    role: Role = field("the role")
    graph: NonNegative = field("index into the role's graphs, in capture order")
    nodes: Tally = field("nodes of the graph, of all pieces together")
    topology: Topology = field("digest of the nodes, their dimensions and their edges")
    kernels: KernelCounts = field("number of times that each kernel is in it: count*index into the names", default="")

    @property
    def counts(self) -> dict[int, int]:
        """How often each kernel is in it, by its index into the names."""
        pairs = (part.split("*") for part in self.kernels.split())
        return {int(index): int(count) for count, index in pairs}


@record
class Fingerprints:
    """What the graphs of a plan were made of when it ran."""

    torch: str = field("version of torch")
    device: str = field("the device's own name")
    kernels: tuple[str, ...] = field("names of kernels", default=())
    graphs: tuple[GraphFingerprint, ...] = field("a fingerprint of each graph that was captured")

    def _problems(self) -> Iterator[Problem]:
        for index, graph in enumerate(self.graphs):
            for kernel in graph.counts:
                if kernel >= len(self.kernels):
                    message = f"kernel {kernel}, and there are {len(self.kernels)} names"
                    yield Problem(path=("graphs", index, "kernels"), message=message, remedy="names count from 0")

    @classmethod
    def of(cls, found: Mapping[tuple[Role, int], Fingerprint], *, torch: str, device: str) -> Fingerprints:
        """Return the fingerprints of graphs, by role and index in capture order."""
        names = sorted({name for each in found.values() for name in each.kernels})
        places = {name: index for index, name in enumerate(names)}
        graphs = tuple(
            GraphFingerprint(
                role=role,
                graph=index,
                nodes=each.nodes,
                topology=each.topology,
                kernels=" ".join(f"{each.kernels[name]}*{places[name]}" for name in sorted(each.kernels)),
            )
            for (role, index), each in found.items()
        )
        return cls(torch=torch, device=device, kernels=tuple(names), graphs=graphs)

    def updated(self, found: Fingerprints) -> Fingerprints:
        """Return these with what a later run found; on another device or torch, only what it found."""
        # Another device or torch has other kernels, so what was found before does not apply.
        if (self.torch, self.device) != (found.torch, found.device):
            return found
        # A graph that this run did not capture keeps its fingerprint.
        return Fingerprints.of(self.by_graph() | found.by_graph(), torch=self.torch, device=self.device)

    def by_graph(self) -> dict[tuple[Role, int], Fingerprint]:
        """Return the fingerprint of each graph, by role and index in capture order."""
        return {
            (graph.role, graph.graph): Fingerprint(
                nodes=graph.nodes,
                kernels={self.kernels[index]: count for index, count in graph.counts.items()},
                topology=graph.topology,
            )
            for graph in self.graphs
        }
