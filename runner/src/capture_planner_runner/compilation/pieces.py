"""A traced forward in pieces, between calls of attention and sums over ranks: each kind of piece is compiled once.

Layers differ only by their weights, which pieces are given, so a model of any depth has three kinds or so, and five
where ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

from capture_planner.errors import RunError
from capture_planner.plugins.backend import Scoring
from capture_planner.records.text import counted
from capture_planner_runner.models.host_reads import reads_host
from capture_planner_runner.models.protocols import Attend, Weight
from capture_planner_runner.models.spread import ALL_REDUCE
from capture_planner_runner.ranks.collectives import WHOLE, Collectives

_ROWS = 251
"""T of the trace: that of a large decode step, for which kernels are chosen. A prime, so that no other extent is it."""

_LIFTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


# Attention and recurrence are operators in the trace, which no compiler looks into.


@torch.library.custom_op("capture_planner::attend", mutates_args=())
def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, call: int
) -> torch.Tensor:
    """Stand for an ``Attend`` of a forward, by its number in the forward."""
    raise NotImplementedError("this operator is traced, and never run")


@attend.register_fake
def _(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, call: int
) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("capture_planner::recur", mutates_args=())
def recur(inputs: torch.Tensor, decays: torch.Tensor, layer: int) -> torch.Tensor:
    """Stand for an ``Attend.recur`` of a forward."""
    raise NotImplementedError("this operator is traced, and never run")


@recur.register_fake
def _(inputs: torch.Tensor, decays: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(inputs)


ATTEND, RECUR = torch.ops.capture_planner.attend.default, torch.ops.capture_planner.recur.default


@attrs.frozen(eq=False)
class TracedCalls:
    """An ``Attend`` that leaves an operator in the trace for each call."""

    real: torch.Tensor
    attended: list[tuple[int, float, float | None]] = attrs.Factory(list)
    """Layer, scale and softcap of each call."""

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self.attended.append((layer, scoring.scale, scoring.softcap))
        out: torch.Tensor = ATTEND(query, keys, values, scoring.sinks, len(self.attended) - 1)
        return out

    def recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = RECUR(inputs, decays, layer)
        return out


Slot = tuple[Mapping[str, torch.Tensor | None], str]
"""A module's own dictionary of parameters or buffers, and the name of a tensor in it."""


@attrs.frozen(eq=False)
class Trace:
    """A forward as a graph. Its placeholders are T, the inputs, and the weights, in this order."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    rows: tuple[str, int]
    """An input, and its dimension that is T."""
    weights: tuple[Slot, ...]
    calls: TracedCalls


def traced(
    forward: Callable[..., Sequence[torch.Tensor]],
    inputs: Mapping[str, tuple[torch.Tensor, int | None]],
    weights: Iterable[Weight],
) -> Trace:
    """Trace ``forward(attend, **inputs)``, which returns tensors.

    Of each input a tensor of the right kind is given, and which of its dimensions is T, if any; ``attend.real`` is an
    input too. Raises ``RunError`` for a forward that reads values on the host, that depends on T other than by
    extents, or that reads a tensor which is not among its inputs and ``weights``; and what the forward raises.
    """
    shapes = ShapeEnv()
    # Weights and constants of the forward are real tensors.
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    device = next(tensor.device for tensor, _ in inputs.values())
    # ``attend.real`` reaches a model only through its calls, and compiled pieces may read it as well.
    given = {**inputs, "real": (torch.empty(0, dtype=torch.bool, device=device), 0)}
    fakes = [_fake(mode, *each) for each in given.values()]
    rows: Any = fakes[-1].shape[0]
    calls: list[TracedCalls] = []

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        # make_fx may run the forward more than once: the last trace is the one that is kept.
        *others, real = tensors
        calls.append(TracedCalls(real))
        return list(forward(calls[-1], **dict(zip(inputs, others, strict=True))))

    try:
        with torch.no_grad():
            module = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes)
    except GuardOnDataDependentSymNode as error:
        raise RunError("its forward reads a device value on the host, and takes another path for it") from error
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        # A collective of the model's own is outside ALL_REDUCE, where the runner checks that all ranks are there.
        if node.target.namespace in ("c10d", "_c10d_functional"):
            raise RunError(f"its forward calls other ranks ({node.target}), which is not compiled")
        if reads_host(node.target, fx.map_arg(node.args, lambda each: each.meta.get("val"))):
            raise RunError(f"its forward reads a device value on the host ({node.target})")
    # The trace would hold for this one number of tokens.
    if rows.node.maybe_as_int() is not None:
        raise RunError("its forward needs the number of tokens as a fixed number (by len, int or a comparison)")
    # Any other guard splits batches by their size, and the pieces are compiled for one side of it.
    guards = sorted({str(guard.expr) for guard in shapes.guards})
    if guards:
        raise RunError(f"its forward takes other paths for other numbers of tokens: it checks {', '.join(guards[:3])}")
    _with_rows(module.graph, rows)
    per_row = next((name, dimension) for name, (_, dimension) in inputs.items() if dimension is not None)
    return Trace(module, tuple(given), per_row, _with_weights(mode, module, weights), calls[-1])


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, dimension: int | None) -> torch.Tensor:
    sizes, strides = list(tensor.shape), tensor.stride()
    dynamic = [DimDynamic.STATIC] * len(sizes)
    if dimension is not None:
        # Dimensions of one extent are one symbol, and no other dimension has this extent.
        sizes[dimension], dynamic[dimension] = _ROWS, DimDynamic.DUCK
        # The layout is the input's own: a permuted input stays permuted, or kernels would be compiled for another one.
        order = sorted(range(len(sizes)), key=lambda index: -strides[index])
        tensor = torch.empty([sizes[index] for index in order], dtype=tensor.dtype, device=tensor.device).permute(
            *(order.index(index) for index in range(len(sizes)))
        )
    context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
    return mode.from_tensor(tensor, symbolic_context=context)


def _with_rows(graph: fx.Graph, rows: Any) -> None:
    """Let T be the first placeholder, instead of being read from tensors here and there."""
    with graph.inserting_before(next(iter(graph.nodes))):
        placeholder = graph.placeholder("num_rows")
    placeholder.meta["val"] = rows
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.SymInt) and value.node.expr == rows.node.expr:
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)


def _with_weights(mode: FakeTensorMode, module: fx.GraphModule, weights: Iterable[Weight]) -> tuple[Slot, ...]:
    """Let tensors of the model be placeholders; return where each is, in order."""
    graph = module.graph
    slots: dict[int, Slot] = {}
    for _, holder, name in weights:
        own = holder._parameters if name in holder._parameters else holder._buffers
        tensor = own[name]
        if tensor is not None:
            slots.setdefault(id(tensor), (own, name))  # tied weights are one placeholder
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    placeholders: dict[int, fx.Node] = {}
    read: list[Slot] = []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = getattr(module, node.target)
        slot = slots.get(id(tensor))
        if slot is None:
            if all(user.target in _LIFTS for user in node.users):
                continue  # a number that the forward makes a tensor of
            raise RunError(f"its forward reads a tensor {list(tensor.shape)} that is not among its weights")
        if id(tensor) not in placeholders:
            # Behind the placeholders that are there: a Trace has T, the inputs and the weights in this order.
            with graph.inserting_after(last):
                last = graph.placeholder(f"weight_{len(read)}")
            # The sizes of weights are numbers: T is the only symbol of the graph.
            last.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
            placeholders[id(tensor)] = last
            read.append(slot)
        node.replace_all_uses_with(placeholders[id(tensor)])
        graph.erase_node(node)
    return tuple(read)


Function = Callable[..., Sequence[Any]]
Compiler = Callable[[fx.GraphModule, list[Any]], Function]
"""Makes a function of a graph, for example inputs: fake tensors, of which T is a symbol."""

_Values = list[Any]

_CUTS = frozenset({ATTEND, RECUR, ALL_REDUCE})
"""Operators between pieces. They are called as the model does, in its order, and graphs hold what they then call."""


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
class _Sum:
    """A step of a forward: ranks add their parts."""

    among: Collectives
    reads: tuple[int]
    write: int
    is_own: bool
    """Whether nothing else reads the memory of the part, which the sum may then overwrite."""

    def run(self, values: _Values, attend: Attend) -> None:
        part = values[self.reads[0]].contiguous()
        values[self.write] = self.among.all_reduce(part if self.is_own else part.clone())


_Step = _Piece | _Attention | _Recurrence | _Sum


@attrs.frozen(eq=False)
class CompiledForward:
    """A forward that ``compiled`` made of a trace; for any number of rows."""

    kinds: int
    """Number of compiled functions."""
    pieces: int
    """Pieces that run in one forward."""
    sums: int
    """Sums over ranks in one forward."""
    _inputs: tuple[str, ...]
    _rows: tuple[str, int]
    _weights: tuple[tuple[Mapping[str, torch.Tensor | None], str], ...]
    _steps: tuple[tuple[_Step, tuple[int, ...]], ...]
    """Each with the values that nothing reads after it."""
    _size: int
    _outputs: tuple[int, ...]
    _reads_real: bool

    @property
    def outline(self) -> str:
        """What ranks that share a model have in common of it."""
        return f"{counted(self.pieces, 'piece')} of {counted(self.kinds, 'kind')}, {counted(self.sums, 'sum')}"

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


def compiled(trace: Trace, compiler: Compiler, among: Collectives = WHOLE) -> CompiledForward:
    """Cut a trace at attention and at sums ``among`` ranks, and compile each kind of piece."""
    nodes = [node for node in trace.module.graph.nodes if node.op != "output"]
    (output,) = (node for node in trace.module.graph.nodes if node.op == "output")
    results: list[fx.Node] = list(output.args[0])
    given = [node for node in nodes if node.op == "placeholder"]
    places = {node: index for index, node in enumerate(given)}
    functions: dict[object, Function] = {}
    steps: list[_Step] = []
    for part in _parts([node for node in nodes if node.op != "placeholder"]):
        if part[0].target in _CUTS:
            (node,) = part
            places[node] = len(places)
            reads = tuple(places[tensor] for tensor in node.args if isinstance(tensor, fx.Node))
            steps.append(_call(node, reads, places[node], trace, among))
            continue
        within = set(part)
        outs = [node for node in part if node in results or any(user not in within for user in node.users)]
        operators = [node.target for node in part if isinstance(node.target, torch._ops.OpOverload)]
        # What nothing reads, and what writes nothing, is dead code of the trace.
        if not outs and not any(operator._schema.is_mutable for operator in operators):
            continue
        sources, graph, key = _piece(part, outs)
        if key not in functions:
            module = fx.GraphModule(trace.module, graph)
            # Layers of one kind share a function; their weights are among its arguments.
            functions[key] = compiler(module, [node.meta["val"] for node in sources])
        for node in outs:
            places[node] = len(places)
        steps.append(_Piece(functions[key], tuple(places[n] for n in sources), tuple(places[n] for n in outs)))
    real = given[len(trace.inputs)]
    kept = {places[node] for node in results}
    lasts: list[tuple[int, ...]] = []
    for step in reversed(steps):
        writes = step.writes if isinstance(step, _Piece) else (step.write,)
        # From the end: what no later step reads is dropped after this one, so that a graph's memory is reused.
        lasts.append(tuple({*step.reads, *writes} - kept))
        kept = kept | {*step.reads}
    return CompiledForward(
        kinds=len(functions),
        pieces=sum(isinstance(step, _Piece) for step in steps),
        sums=sum(isinstance(step, _Sum) for step in steps),
        inputs=trace.inputs,
        rows=trace.rows,
        weights=trace.weights,
        steps=tuple(zip(steps, lasts[::-1], strict=True)),
        size=len(places),
        outputs=tuple(places[node] for node in results),
        reads_real=bool(real.users),
    )


def _call(
    node: fx.Node, reads: tuple[int, ...], write: int, trace: Trace, among: Collectives
) -> _Attention | _Recurrence | _Sum:
    """Return the step of an operator between pieces."""
    last: Any = node.args[-1]
    if node.target is ALL_REDUCE:
        return _Sum(among, (reads[0],), write, _is_own(last))
    if node.target is RECUR:
        return _Recurrence(last, (reads[0], reads[1]), write)
    layer, scale, softcap = trace.calls.attended[last]
    return _Attention(layer, scale, softcap, reads, write)


def _is_own(part: fx.Node) -> bool:
    """Say whether a value that a sum reads is in memory of its own, which no other operator reads."""
    while _is_view(part) and len(part.users) == 1:
        part = part.all_input_nodes[0]
    is_made = isinstance(part.target, torch._ops.OpOverload) and part.target not in _CUTS
    return is_made and not _is_view(part) and len(part.users) == 1


def _is_view(node: fx.Node) -> bool:
    """Say whether an operator returns memory that it was given."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    has_alias = any(argument.alias_info is not None for argument in target._schema.arguments)
    # Its schema does not say that the result is its argument's memory.
    return has_alias or target is torch.ops.aten._unsafe_view.default


def _parts(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Cut operators into pieces; each attention and each sum is a piece of its own."""
    parts: list[list[fx.Node]] = []
    for node in nodes:
        if node.target in _CUTS or not parts or parts[-1][0].target in _CUTS:
            parts.append([])
        parts[-1].append(node)
    return parts


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
    # Strides are part of a kind: a kernel compiled for one layout reads another one wrongly.
    kinds = [_kind(node.meta["val"]) for node in reads]
    return reads, graph, (repr(lines), repr(kinds), tuple(numbers[node] for node in outs))


def _kind(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return str(value.dtype), str(tuple(value.shape)), str(value.stride()), str(value.device)
