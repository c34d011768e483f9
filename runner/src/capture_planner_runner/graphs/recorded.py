"""Recorded graphs: the replacement for CUDA graphs on a machine without a GPU.

A capture runs the forward once and keeps every operator that it called: which one, its host numbers, and where in
memory each tensor lay. A replay calls the same operators on the same memory. So what is baked into a CUDA graph is
baked in here: numbers, shapes, pointers, and the order of operators; and what no CUDA graph can hold is refused here,
where every tensor counts as one on the device. Two things differ: a capture here also computes, and intermediates get
their place in the pool when it is over, once it is known how long each is alive.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from capture_planner.errors import CaptureError, RunError
from capture_planner.records.fingerprint import Fingerprint, digest_of
from capture_planner_runner.graphs.dump import write_operators
from capture_planner_runner.graphs.graph import GraphPool
from capture_planner_runner.graphs.leftover import Leftover, leftover
from capture_planner_runner.graphs.operators import (
    calling_line,
    check_host_sync,
    describe,
    is_collective,
    is_plain,
    out_overload,
    plain,
    refusal,
    run_collective,
    run_without_random,
    traits,
)
from capture_planner_runner.graphs.pool import OwnTensor, RecordedPool, Storage, apart, mapped, storage_key, tensors_of

aten = torch.ops.aten

_COPIES = frozenset({aten.clone.default, aten._to_copy.default})
_HOST_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})

Step = Callable[[], object]


@attrs.frozen(eq=False)
class RecordedGraph:
    """One recorded forward; ``RecordedGraphs.capture`` makes it."""

    _steps: tuple[Step, ...]
    _in_inference_mode: bool
    memory: int
    alone: int
    pieces: int
    leftover: Leftover
    _items: tuple[_Call | _Break, ...]

    def fingerprint(self) -> Fingerprint:
        """Return its operators, in order, with their arguments: of tensors the dtype and the shape."""
        operators = [item.described() for item in self._items]
        kernels = Counter(name for name, _ in operators)
        topology = digest_of(*(part for operator in operators for part in operator))
        return Fingerprint(nodes=len(operators), kernels=dict(sorted(kernels.items())), topology=topology)

    def dump(self, stem: Path) -> list[Path]:
        """Write a line for each operator, and for what runs between pieces."""
        return write_operators(stem, (item.described() for item in self._items))

    def replay(self) -> None:
        """Run again on the same storage. Raises ``CaptureError`` while a forward is captured."""
        if _current() is not None:
            raise CaptureError(f"a graph cannot be replayed while another is captured{calling_line()}")
        with torch.inference_mode(self._in_inference_mode), torch.no_grad():
            for step in self._steps:
                step()


class RecordedGraphs:
    """The grapher of a CPU. Graphs hold no gradients: forwards are captured under ``no_grad``."""

    def reading(self) -> None:
        """Return None: a host's memory belongs to many processes, and a recorded graph takes only its pool."""

    def settle(self) -> None:
        """Do nothing: operators are done when they return."""

    def pool(self, limit: int | None = None) -> RecordedPool:
        return RecordedPool(limit)

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> RecordedGraph:
        """Run ``forward`` once and keep what it did.

        Tensors that existed before are used where they are, at every replay. Those that the forward makes get a place
        in the pool; copy what is wanted after a replay into a tensor that existed before. Raises ``CaptureError`` with
        the operator and the line that called it where a CUDA graph could not hold it, ``torch.OutOfMemoryError`` where
        the pool cannot, and what the forward raises; then the pool is as it was before.
        """
        if not isinstance(pool, RecordedPool):
            raise RunError(f"a {type(pool).__name__} is no pool of recorded graphs; make one with pool()")
        if _current() is not None:
            raise CaptureError(f"a capture cannot begin while a forward is captured{calling_line()}")
        recording = _Recording()
        with torch.no_grad():
            with _HostReads(recording), recording:
                forward()
            return recording.finish(pool)

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """End a piece, run ``between`` outside the graph, and begin the next piece.

        Raises ``CaptureError`` outside a capture, and where ``between`` touches a tensor of the graph
        that is not in ``reads`` or ``writes``.
        """
        recording = _current()
        if recording is None:
            raise CaptureError(f"a graph can be split only while its forward is captured{calling_line()}")
        recording.split(functools.partial(between, *reads, *writes), (*reads, *writes))


@attrs.frozen(eq=False)
class _Call:
    """An operator with its arguments: numbers as they are, tensors as places."""

    op: Any
    args: Any
    kwargs: Any
    results: tuple[OwnTensor | None, ...]
    """Destination of each tensor of the result; None: it is there already, or is no tensor."""

    def described(self) -> tuple[str, str]:
        """Return the operator's name and its arguments: of tensors the dtype and the shape."""
        return str(self.op), repr(mapped((plain(self.args), self.kwargs), _shape))

    def step(self) -> Step:
        """Return what runs it on the pool."""
        args, kwargs = mapped(self.args, _make), mapped(self.kwargs, _make)
        results = [None if result is None else result.made() for result in self.results]
        landing = [result for result in results if result is not None]
        if is_collective(self.op):
            return functools.partial(run_collective, self.op, args, kwargs)
        if not landing:
            return functools.partial(self.op._op, *args, **kwargs)
        if self.op in _COPIES:
            return functools.partial(aten.copy_.default._op, landing[0], args[0])
        out = out_overload(self.op)
        if out is not None and len(landing) == len(out.names):
            return functools.partial(out.op._op, *args, **kwargs, **dict(zip(out.names, landing, strict=True)))
        return functools.partial(_compute_and_copy, self.op._op, args, kwargs, results)


def _compute_and_copy(op: Any, args: Any, kwargs: Any, results: list[torch.Tensor | None]) -> None:
    for place, value in zip(results, tensors_of(op(*args, **kwargs)), strict=True):
        if place is not None:
            place.copy_(value)


@attrs.frozen(eq=False)
class _Break:
    """A call between two pieces, and the tensors of the graph that it reads."""

    between: Callable[[], object]
    tensors: tuple[tuple[torch.Tensor, OwnTensor], ...]

    def described(self) -> tuple[str, str]:
        return "between pieces", repr([_shape(tensor) for tensor, _ in self.tensors])

    def step(self) -> Step:
        """Point the caller's own tensors into the pool: ``between`` refers to them."""
        for tensor, place in self.tensors:
            place.move(tensor)
        return self.between


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a forward so far."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_between = False
        self._items: list[_Call | _Break] = []
        self._storages: dict[int, Storage] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the compiler of torch out: it is imported, and stands around each operator, to keep off this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and keep it, or refuse it."""
        kwargs = kwargs or {}
        if self.is_between:
            self._check_lent(func, tensors_of(args, kwargs))
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            raise refusal(func, "it is a higher-order operator", "call what it stands for")
        known = traits(func)
        if known.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        if known.may_wait:
            check_host_sync(func, args, kwargs)
        if known.is_unfinished:
            raise refusal(func, "its result arrives later", "call torch.distributed, which waits for it")
        if known.changes_view:
            # Tensors are recorded as they look.
            return func(*args, **kwargs)
        for tensor in tensors_of(args, kwargs):
            self._meet(tensor, func, is_own=False)
        if known.is_constant:
            # The forward may change it in place: each replay needs it as it was.
            func = aten.clone.default
        result = run_without_random(func, args, kwargs) if known.may_draw else func._op(*args, **kwargs)
        outputs = tensors_of(result)
        # A result in memory that was known before is a view, or an argument that was changed in place.
        fresh = [self._meet(output, func, is_own=True) for output in outputs]
        if not known.is_allocation and (known.has_effect or any(fresh)):
            results = tuple(self._own(out) if new else None for out, new in zip(outputs, fresh, strict=True))
            self._items.append(_Call(func, mapped(args, self._see), mapped(kwargs, self._see), results))
        return result

    def split(self, between: Callable[[], object], tensors: Sequence[torch.Tensor]) -> None:
        """Run ``between`` and keep that it runs here, on these tensors."""
        if self.is_between:
            raise CaptureError(f"what runs between two pieces cannot split the graph again{calling_line()}")
        for tensor in tensors:
            self._meet(tensor, "split", is_own=False)
        own = [tensor for tensor in tensors if self._storages[storage_key(tensor)].is_own]
        lent = tuple((tensor, self._own(tensor)) for tensor in own)
        self._items.append(_Break(between, lent))
        with apart(lent):
            self.is_between = True
            try:
                between()
            finally:
                self.is_between = False

    def finish(self, pool: RecordedPool) -> RecordedGraph:
        """Give each of the graph's own storages its place in the pool, and make the graph."""
        own = [(storage, storage.block) for storage in self._storages.values() if storage.is_own]
        used = [(storage, block) for storage, block in own if block is not None]
        left = self._leftover()  # before lent tensors are pointed into the pool
        allocation = pool.hold([block for _, block in used])
        for (storage, _), (chunk, offset) in zip(used, allocation.places, strict=True):
            storage.settle(chunk, offset)
        return RecordedGraph(
            steps=tuple(item.step() for item in self._items),
            in_inference_mode=torch.is_inference_mode_enabled(),
            memory=allocation.memory,
            alone=allocation.alone,
            pieces=1 + sum(isinstance(item, _Break) for item in self._items),
            leftover=left,
            items=tuple(self._items),
        )

    def _leftover(self) -> Leftover:
        """Return the own storages that are alive after the forward. Pieces keep the tensors that they lend."""
        lent = {storage_key(tensor) for item in self._items if isinstance(item, _Break) for tensor, _ in item.tensors}
        own = {key: storage for key, storage in self._storages.items() if storage.is_own and key not in lent}
        sizes = {key: storage.size for key, storage in own.items() if storage.is_alive}
        return leftover(sizes, storage_key, "cpu")

    def _meet(self, tensor: torch.Tensor, func: Any, *, is_own: bool) -> bool:
        """Return whether the tensor's storage is new; then it is the graph's own, or stood before."""
        if not is_plain(tensor):
            raise refusal(func, f"it works on {describe(tensor)}", "use plain strided CPU tensors")
        key = storage_key(tensor)
        if key in self._storages:
            return False
        self._storages[key] = Storage(tensor, is_own=is_own)
        return True

    def _see(self, tensor: torch.Tensor) -> torch.Tensor | OwnTensor:
        """Return the tensor as it is for the operator that is being kept, whatever becomes of it."""
        return self._own(tensor) if self._storages[storage_key(tensor)].is_own else tensor.detach()

    def _own(self, tensor: torch.Tensor) -> OwnTensor:
        storage = self._storages[storage_key(tensor)]
        storage.touch(len(self._items), tensor.untyped_storage().nbytes())
        return OwnTensor.of(tensor, storage)

    def _check_lent(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        storages = [self._storages.get(storage_key(tensor)) for tensor in tensors if is_plain(tensor)]
        if any(storage is not None and storage.is_own for storage in storages):
            raise CaptureError(
                f"what runs between two pieces calls {func} on a tensor of the graph that is not among "
                f"the reads and writes of the split{calling_line()}; name that very tensor, or derive from it there"
            )


class _HostReads(TorchFunctionMode):
    """Refuses what reads a tensor on the host without calling an operator."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS and not self._recording.is_between:
            raise refusal(func.__name__, "it reads a device value on the host", "keep values on the device")
        return func(*args, **(kwargs or {}))


def _current() -> _Recording | None:
    """Return the recording of this thread's capture."""
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode for mode in modes if isinstance(mode, _Recording)), None)


def _shape(tensor: torch.Tensor | OwnTensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _make(tensor: torch.Tensor | OwnTensor) -> torch.Tensor:
    return tensor.made() if isinstance(tensor, OwnTensor) else tensor
