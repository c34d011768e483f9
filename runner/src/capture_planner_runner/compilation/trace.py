"""A forward of T rows as a graph of operators that holds for any T, or is refused."""

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
from capture_planner_runner.models.host_reads import reads_host
from capture_planner_runner.models.protocols import Weight

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
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    device = next(tensor.device for tensor, _ in inputs.values())
    given = {**inputs, "real": (torch.empty(0, dtype=torch.bool, device=device), 0)}
    fakes = [_fake(mode, *each) for each in given.values()]
    rows: Any = fakes[-1].shape[0]
    calls: list[TracedCalls] = []

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
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
        if node.target.namespace in ("c10d", "_c10d_functional"):
            raise RunError(f"its forward calls other ranks ({node.target}), which is not compiled")
        if reads_host(node.target, fx.map_arg(node.args, lambda each: each.meta.get("val"))):
            raise RunError(f"its forward reads a device value on the host ({node.target})")
    if rows.node.maybe_as_int() is not None:
        raise RunError("its forward needs the number of tokens as a fixed number (by len, int or a comparison)")
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
            slots.setdefault(id(tensor), (own, name))
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
            with graph.inserting_after(last):
                last = graph.placeholder(f"weight_{len(read)}")
            last.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
            placeholders[id(tensor)] = last
            read.append(slot)
        node.replace_all_uses_with(placeholders[id(tensor)])
        graph.erase_node(node)
    return tuple(read)
