"""A traced forward in pieces, between calls of attention: each kind of piece is compiled once.

Layers differ by their weights alone, which pieces are given, so a model of any depth has three kinds or so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from capture_planner.runtime.compilation.operators import ATTEND, RECUR
from capture_planner.runtime.compilation.trace import Trace
from capture_planner.runtime.models.protocols import Attend, Scoring

Function = Callable[..., Sequence[Any]]
Compiler = Callable[[fx.GraphModule, list[Any]], Function]
"""Makes a function of a graph, for example inputs: fake tensors, of which T is a symbol."""

_Values = list[Any]


@attrs.frozen(eq=False)
class _Piece:
    """A step of a forward: a compiled function of values before, by their index."""

    function: Function
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    def run(self, values: _Values, attend: Attend) -> None:
        for index, value in zip(self.writes, self.function(*[values[index] for index in self.reads]), strict=True):
            values[index] = value


@attrs.frozen(eq=False)
class _Attention:
    """A step of a forward: one layer attends."""

    layer: int
    scale: float
    softcap: float | None
    reads: tuple[int, ...]
    """Queries, keys and values, and sinks where there are any."""
    write: int

    def run(self, values: _Values, attend: Attend) -> None:
        query, keys, others, *sinks = (values[index] for index in self.reads)
        scoring = Scoring(scale=self.scale, softcap=self.softcap, sinks=sinks[0] if sinks else None)
        # Kernels may have laid them out in another way than the operators that were traced.
        values[self.write] = attend(self.layer, query.contiguous(), keys.contiguous(), others.contiguous(), scoring)


@attrs.frozen(eq=False)
class _Recurrence:
    """A step of a forward: one recurrent layer."""

    layer: int
    reads: tuple[int, int]
    write: int

    def run(self, values: _Values, attend: Attend) -> None:
        inputs, decays = (values[index] for index in self.reads)
        values[self.write] = attend.recur(self.layer, inputs, decays)


@attrs.frozen(eq=False)
class CompiledForward:
    """A forward that ``compiled`` made of a trace; for any number of rows."""

    kinds: int
    """How many functions were compiled."""
    pieces: int
    """How many pieces run in one forward."""
    _inputs: tuple[str, ...]
    _rows: tuple[str, int]
    _weights: tuple[tuple[Mapping[str, torch.Tensor | None], str], ...]
    _steps: tuple[tuple[_Piece | _Attention | _Recurrence, tuple[int, ...]], ...]
    """Each with the values that nothing reads after it."""
    _size: int
    _outputs: tuple[int, ...]
    _reads_real: bool

    def __call__(self, attend: Attend, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Run it on tensors of the kinds that were traced."""
        name, dimension = self._rows
        values: _Values = [inputs[name].shape[dimension]]
        values += [inputs.get(name) for name in self._inputs]
        if self._reads_real:
            values[len(self._inputs)] = attend.real
        # Read anew: where a weight is replaced, eager steps use the new one, as they do without a compiler.
        values += [slots[name] for slots, name in self._weights]
        values += [None] * (self._size - len(values))
        with torch.no_grad():
            for step, last in self._steps:
                step.run(values, attend)
                for index in last:
                    values[index] = None
        return [values[index] for index in self._outputs]


def compiled(trace: Trace, compiler: Compiler) -> CompiledForward:
    """Cut a trace at attention, and compile each kind of piece."""
    nodes = [node for node in trace.module.graph.nodes if node.op != "output"]
    (output,) = (node for node in trace.module.graph.nodes if node.op == "output")
    results: list[fx.Node] = list(output.args[0])
    given = [node for node in nodes if node.op == "placeholder"]
    places = {node: index for index, node in enumerate(given)}
    functions: dict[object, Function] = {}
    steps: list[_Piece | _Attention | _Recurrence] = []
    for part in _parts([node for node in nodes if node.op != "placeholder"]):
        if part[0].target in (ATTEND, RECUR):
            (node,) = part
            *tensors, number = node.args
            reads = tuple(places[tensor] for tensor in tensors if isinstance(tensor, fx.Node))
            places[node] = len(places)
            if node.target is RECUR:
                steps.append(_Recurrence(number, reads, places[node]))  # type: ignore[arg-type]
            else:
                steps.append(_Attention(*trace.calls.attended[number], reads, places[node]))  # type: ignore[index]
            continue
        within = set(part)
        outs = [node for node in part if node in results or any(user not in within for user in node.users)]
        if not outs and not any(_is_mutable(node) for node in part):
            continue
        sources, graph, key = _piece(part, outs)
        if key not in functions:
            module = fx.GraphModule(trace.module, graph)
            functions[key] = compiler(module, [node.meta["val"] for node in sources])
        for node in outs:
            places[node] = len(places)
        steps.append(_Piece(functions[key], tuple(places[n] for n in sources), tuple(places[n] for n in outs)))
    real = given[len(trace.inputs)]
    return CompiledForward(
        kinds=len(functions),
        pieces=sum(isinstance(step, _Piece) for step in steps),
        inputs=trace.inputs,
        rows=trace.rows,
        weights=trace.weights,
        steps=tuple(zip(steps, _lasts(steps, {places[node] for node in results}), strict=True)),
        size=len(places),
        outputs=tuple(places[node] for node in results),
        reads_real=bool(real.users),
    )


def _parts(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Cut operators into pieces; attention is alone."""
    parts: list[list[fx.Node]] = []
    for node in nodes:
        if node.target in (ATTEND, RECUR) or not parts or parts[-1][0].target in (ATTEND, RECUR):
            parts.append([])
        parts[-1].append(node)
    return parts


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _piece(part: Sequence[fx.Node], outs: Sequence[fx.Node]) -> tuple[list[fx.Node], fx.Graph, object]:
    """Return what a piece reads, its graph, and what is the same for pieces of one kind."""
    reads: list[fx.Node] = []
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in part:
        for before in node.all_input_nodes:
            if before not in copies:
                reads.append(before)
                copies[before] = graph.placeholder(f"input_{len(reads)}")
        copies[node] = node  # its place is taken; it is copied when all placeholders are there
    for node in reads:
        copies[node].meta = dict(node.meta)
    numbers = {node: index for index, node in enumerate((*reads, *part))}
    for node in part:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = [copies[node] for node in outs]
    graph.output(results).meta["val"] = [node.meta["val"] for node in outs]
    lines = [
        (node.op, str(node.target), repr(fx.map_arg((node.args, node.kwargs), lambda arg: f"%{numbers[arg]}")))
        for node in part
    ]
    kinds = [_kind(node.meta["val"]) for node in reads]
    return reads, graph, (repr(lines), repr(kinds), tuple(numbers[node] for node in outs))


def _kind(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return str(value.dtype), str(tuple(value.shape)), str(value.stride()), str(value.device)


def _lasts(steps: Sequence[_Piece | _Attention | _Recurrence], kept: set[int]) -> list[tuple[int, ...]]:
    """Return for each step the values that it is the last to read."""
    lasts: list[tuple[int, ...]] = []
    for step in reversed(steps):
        writes = step.writes if isinstance(step, _Piece) else (step.write,)
        lasts.append(tuple({*step.reads, *writes} - kept))
        kept = kept | {*step.reads}
    return lasts[::-1]
