"""Recorded graphs: the replacement for CUDA graphs on a machine without a GPU.

A capture runs the forward once and keeps every operator that it called: which one, its host numbers, and where in
memory each tensor lay. A replay calls the same operators on the same memory. So what is baked into a CUDA graph is
baked in here: numbers, shapes, pointers, and the order of operators; and what no CUDA graph can hold is refused here,
where every tensor counts as one on the device. Two things differ: a capture here also computes, and intermediates get
their place in the pool when it is over, once it is known how long each is alive.
"""

from __future__ import annotations

import bisect
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from capture_planner.errors import CaptureError, RunError
from capture_planner.records.fingerprint import Fingerprint, digest_of
from capture_planner_runner.graphs.graph import Grapher, GraphPool, Leftover, leftover, write_operators
from capture_planner_runner.models.host_reads import is_mask

ALIGNMENT = 64
"""Bytes; a place in a chunk is as aligned as an allocation, since kernels round by alignment."""


@attrs.frozen
class Block:
    """``size`` bytes that are alive from operator ``first`` to operator ``last``, both included."""

    first: int
    last: int
    size: int


@attrs.frozen
class Layout:
    """Places of blocks, in existing chunks and a new one."""

    places: tuple[tuple[int, int], ...]
    """Chunk and offset in bytes of each block; chunk ``n`` is the new one after ``n`` that exist."""
    grows: int
    """Bytes of the new chunk; 0 where none is needed."""
    alone: int
    """Bytes of the chunk that there would be without others."""


def lay_out(blocks: Sequence[Block], chunks: Sequence[int] = ()) -> Layout:
    """Lay blocks out so that no two that are alive at once share a byte.

    ``chunks`` are the sizes in bytes of those that exist. Largest block first, each at the lowest
    free offset of the first chunk that has room; what fits none goes into one new chunk. The new
    chunk is never larger than it would be if there were no chunks.
    """
    fresh, alone = _first_fit(blocks, ())
    places, grows = _first_fit(blocks, chunks) if chunks else (fresh, alone)
    if grows > alone:
        # Existing chunks can be worse than none, since first fit is no optimum: then only a new one is used.
        places, grows = tuple((len(chunks), offset) for _, offset in fresh), alone
    return Layout(places, grows, alone)


def _first_fit(blocks: Sequence[Block], chunks: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the places of blocks, and the bytes of the new chunk."""
    places = [(0, 0)] * len(blocks)
    # Start, end, first and last of what lies in each chunk, by start. A graph has few: loops are faster than arrays.
    placed: list[list[tuple[int, int, int, int]]] = [[] for _ in range(len(chunks) + 1)]
    for index in sorted(range(len(blocks)), key=lambda i: (-blocks[i].size, blocks[i].first, i)):
        block = blocks[index]
        # An empty tensor gets a place too: a pointer into the pool, like every other.
        size = max(1, -(-block.size // ALIGNMENT)) * ALIGNMENT
        for chunk, others in enumerate(placed):
            offset = _lowest(size, block, others)
            # The last chunk is the new one, which is as large as its blocks need.
            if chunk == len(chunks) or offset + size <= chunks[chunk]:
                bisect.insort(others, (offset, offset + size, block.first, block.last))
                places[index] = chunk, offset
                break
    return tuple(places), max((end for _, end, _, _ in placed[-1]), default=0)


def _lowest(size: int, block: Block, others: Sequence[tuple[int, int, int, int]]) -> int:
    """Return the lowest offset at which ``size`` bytes overlap none of what is alive at once with ``block``."""
    begins, ends, free = block.first, block.last, 0
    for start, end, first, last in others:
        if first <= ends and last >= begins:
            if start - free >= size:
                break
            if end > free:
                free = end
    return free


class RecordedPool:
    """Chunks of host memory, which never move, that graphs of one grapher share. ``limit`` in bytes; None: none.

    Graphs own the chunks that they lie in: a chunk is given back with the last of its graphs.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._references: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def _chunks(self) -> list[torch.UntypedStorage]:
        return [chunk for reference in self._references if (chunk := reference()) is not None]

    @property
    def memory(self) -> int:
        return sum(chunk.nbytes() for chunk in self._chunks)

    def poison(self) -> None:
        for chunk in self._chunks:
            torch.empty(0, dtype=torch.uint8).set_(chunk).fill_(0xFF)

    def hold(self, blocks: Sequence[Block]) -> tuple[list[tuple[torch.UntypedStorage, int]], Layout]:
        """Give memory to the blocks of one graph; other graphs' blocks may lie in the same bytes.

        Returns the chunk of each block with the offset in it, in bytes, and the layout.

        Raises ``torch.OutOfMemoryError`` where the pool would hold more than its limit; it is then as it was before.
        """
        chunks = self._chunks
        layout = lay_out(blocks, [chunk.nbytes() for chunk in chunks])
        if self.limit is not None and self.memory + layout.grows > self.limit:
            raise torch.OutOfMemoryError(
                f"a graph needs {layout.grows:,} bytes more than its pool holds ({self.memory:,} bytes), "
                f"and the pool may hold {self.limit:,}; capture fewer or smaller graphs, or raise the limit"
            )
        if layout.grows:
            chunks.append(torch.UntypedStorage(layout.grows))  # type: ignore[no-untyped-call]
        self._references = [weakref.ref(chunk) for chunk in chunks]
        return [(chunks[chunk], offset) for chunk, offset in layout.places], layout


def storage_key(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage object: equal for all views of it."""
    return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]


class Storage:
    """A storage that a capture touched: the graph's own, or one that stood before.

    It is not kept alive, so that a capture takes no more memory than an eager forward; the weak
    reference only keeps its address from being given to another.
    """

    def __init__(self, tensor: torch.Tensor, *, is_own: bool) -> None:
        self.is_own = is_own
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._first: int | None = None
        self._last = 0
        self.size = 0
        """Bytes that it needs; 0: no operator touched it."""
        self._chunk: torch.UntypedStorage | None = None
        self._offset = 0

    @property
    def is_alive(self) -> bool:
        """Return True if a tensor has it."""
        return not self._reference.expired()  # type: ignore[no-untyped-call]

    @property
    def block(self) -> Block | None:
        """The bytes that it needs, and when; None: no operator touched it."""
        return None if self._first is None else Block(self._first, self._last, self.size)

    def touch(self, when: int, size: int) -> None:
        """Take note that operator ``when``, the last so far, uses it; it has ``size`` bytes by then."""
        if self._first is None:
            self._first = when
        self._last, self.size = when, size

    def settle(self, chunk: torch.UntypedStorage, offset: int) -> None:
        """Let it begin at byte ``offset`` of a pool's chunk."""
        self._chunk, self._offset = chunk, offset

    def point(self, tensor: torch.Tensor, offset: int, shape: torch.Size, stride: tuple[int, ...]) -> None:
        """Point ``tensor`` at where this storage settled; ``offset`` is in elements of the tensor."""
        assert self._chunk is not None, "storages settle before tensors do"
        tensor.set_(self._chunk, self._offset // tensor.itemsize + offset, shape, stride)


@attrs.frozen(eq=False)
class OwnTensor:
    """A tensor in one of the graph's own storages, as an operator saw it."""

    storage: Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: Storage) -> OwnTensor:
        return cls(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        self.storage.point(tensor, self.offset, self.shape, self.stride)
        return tensor

    def made(self) -> torch.Tensor:
        return self.move(torch.empty(0, dtype=self.dtype))


@contextmanager
def apart(lent: Sequence[tuple[torch.Tensor, OwnTensor]]) -> Iterator[None]:
    """Give the lent tensors memory of their own for a while.

    What is touched in the graph's own memory meanwhile was not lent, and would be elsewhere at replay.
    """
    keys = [storage_key(tensor) for tensor, _ in lent]
    # The copies are the recording's and not the forward's: without modes nothing of them is recorded.
    with _disable_current_modes():
        # One copy per storage, so that views of the same memory stay views of the same copy.
        storages = {key: tensor.untyped_storage() for key, (tensor, _) in zip(keys, lent, strict=True)}
        copies = {key: storage.clone() for key, storage in storages.items()}  # type: ignore[no-untyped-call]
        for key, (tensor, own) in zip(keys, lent, strict=True):
            tensor.set_(copies[key], own.offset, own.shape, own.stride)
    try:
        yield
    finally:
        with _disable_current_modes():
            for key, storage in storages.items():
                # What was written meanwhile is the forward's, and operators after the split read it.
                storage.copy_(copies[key])
            for key, (tensor, own) in zip(keys, lent, strict=True):
                tensor.set_(storages[key], own.offset, own.shape, own.stride)


_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that hold no tensor. Each operator's arguments are searched several times."""


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with each tensor, or place of one, changed."""
    kind = type(tree)
    if kind in _LEAVES:
        return tree
    if kind is torch.Tensor or kind is OwnTensor or issubclass(kind, torch.Tensor):
        return change(tree)
    if issubclass(kind, (list, tuple)):
        return kind([item if type(item) in _LEAVES else mapped(item, change) for item in tree])
    if issubclass(kind, dict):
        return {name: mapped(item, change) for name, item in tree.items()}
    return tree


def tensors_of(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors of arguments or of a result, in order."""
    found: list[torch.Tensor] = []
    _collect(trees, found)
    return found


def _collect(trees: Iterable[Any], found: list[torch.Tensor]) -> None:
    for tree in trees:
        kind = type(tree)
        if kind is torch.Tensor:  # first, as most are
            found.append(tree)
        elif kind in _LEAVES:
            continue
        elif isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            _collect(tree, found)
        elif isinstance(tree, dict):
            _collect(tree.values(), found)


aten = torch.ops.aten

_CONSTANTS = frozenset({aten.lift.default, aten.lift_fresh.default})
_ALLOCATIONS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


@attrs.frozen(kw_only=True)
class Traits:
    """Properties of an operator for a recording."""

    is_composite: bool
    """Composed of other operators on a CPU; those are recorded."""
    may_wait: bool
    """Its host code may wait for device values, depending on its arguments."""
    is_unfinished: bool
    """Its result arrives later."""
    changes_view: bool
    """It changes how a tensor looks at memory."""
    is_constant: bool
    """It makes a tensor from numbers of the program."""
    may_draw: bool
    """It may draw random numbers, depending on its arguments."""
    is_allocation: bool
    """It allocates memory without writing to it."""
    has_effect: bool
    """It writes into its arguments, or talks to other ranks."""


@functools.cache
def traits(func: Any) -> Traits:
    """Return the traits of an operator, computed once."""

    def has(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))

    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    # No tag says when these wait for the device: `check_host_sync` decides by their arguments.
    packets = (aten.index, aten.index_put, aten.index_put_, aten.repeat_interleave, aten._linalg_check_errors)
    return Traits(
        is_composite=has("CompositeImplicitAutograd") and not has("CPU"),
        may_wait=bool(reads) or func.overloadpacket in packets,
        is_unfinished=is_unfinished(func),
        changes_view=torch.Tag.inplace_view in func.tags,
        is_constant=func in _CONSTANTS,
        may_draw=torch.Tag.nondeterministic_seeded in func.tags,
        is_allocation=func in _ALLOCATIONS,
        has_effect=func._schema.is_mutable or is_collective(func),
    )


# Overloads that write into given tensors ----------------------------------------------------

_OUT_DIFFERS = frozenset({aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default})


@attrs.frozen
class OutOverload:
    """An overload that writes into given tensors."""

    op: Any
    names: tuple[str, ...]
    """The arguments that it writes into, one for each result."""


@functools.cache
def out_overload(func: Any) -> OutOverload | None:
    """Return the overload that does the same into given tensors, or None where that is not sure.

    Some operators that are neither core nor pointwise compute other values then, in the last bit or
    completely: ``_linalg_svd``, ``linalg_qr``, ``binary_cross_entropy`` (torch 2.13).
    """
    is_common = torch.Tag.core in func.tags or torch.Tag.pointwise in func.tags
    if not is_common or func in _OUT_DIFFERS or func._schema.is_mutable:
        return None

    def signature(arguments: Any) -> list[tuple[str, str, bool]]:
        return [(a.name, str(a.type), a.kwarg_only) for a in arguments if not a.is_out]

    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [argument for argument in other._schema.arguments if argument.is_out]
        if (
            len(outs) == len(func._schema.returns)
            and all(str(argument.type) == "Tensor" for argument in outs)
            and signature(other._schema.arguments) == signature(func._schema.arguments)
        ):
            return OutOverload(other, tuple(argument.name for argument in outs))
    return None


# Collectives: on a GPU their wait is an edge of the graph; here each replay waits on the host ---


def is_collective(operator: Any) -> bool:
    """Say whether an operator is a collective of ``torch.distributed``."""
    return bool(operator.namespace == "c10d")


def is_unfinished(operator: Any) -> bool:
    """Return True for a functional collective: its result arrives later."""
    return bool(operator.namespace == "_c10d_functional")


def plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without groups and reductions, which are objects that differ between processes."""
    return tuple(each for each in arguments if not isinstance(each, torch.ScriptObject))


def run_collective(operator: Any, arguments: Any, named: Any) -> None:
    """Run it, and wait until its tensors hold the result."""
    result = operator._op(*arguments, **named)
    # Operators of c10d return their work, or their tensors and after them the work.
    work = result[-1] if isinstance(result, tuple | list) else result
    work.wait()


# Refusals ----------------------------------------------------------------------------------

_OUR_FILES = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parent) + "/")


def check_host_sync(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse an operator whose host code waits for device values."""
    if torch.Tag.data_dependent_output in func.tags or func is aten._linalg_check_errors.default:
        raise refusal(func, "it reads a device value on the host", "keep values on the device")
    if func is aten.index.Tensor:
        is_dynamic = any(is_mask(index) for index in args[1])
    elif func.overloadpacket in (aten.index_put, aten.index_put_):
        is_dynamic = args[2].numel() != 1 and any(is_mask(index) for index in args[1])  # one value: as masked_fill
    elif func is aten.repeat_interleave.Tensor:
        # Without the size of the result, torch sums the repeats on the device and reads the sum.
        is_dynamic = kwargs.get("output_size") is None
    else:
        is_dynamic = torch.Tag.dynamic_output_shape in func.tags
    if is_dynamic:
        raise refusal(func, "a shape depends on device values", "select with torch.where or masked_fill")


def run_without_random(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, and refuse it if it drew random numbers (with a dropout of 0 it does not)."""
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
    generator = next(given, torch.default_generator)
    before = generator.get_state()
    result = func(*args, **kwargs)
    if not torch.equal(before, generator.get_state()):
        raise refusal(func, "a replay would draw the same random numbers again", "sample outside")
    return result


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.is_cpu
        and tensor.layout is torch.strided
        # The memory of a conjugate or negated view holds other numbers than the tensor does.
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def describe(tensor: torch.Tensor) -> str:
    kind = "a conjugate or negated view" if tensor.is_conj() or tensor.is_neg() else type(tensor).__name__
    return f"{kind} of {tensor.dtype} and {tensor.layout} on {tensor.device}"


def refusal(func: object, why: str, remedy: str) -> CaptureError:
    return CaptureError(f"no graph can hold {func}{calling_line()}: {why}; {remedy}")


def calling_line() -> str:
    """Return where the caller's own code is: its innermost line outside torch and this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OUR_FILES):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


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
        # A tensor that was made in inference mode can be changed in place in that mode alone.
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
        # The out overloads that torch generates for these copy twice: into a new tensor, and from that.
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

    # Otherwise torch refuses higher-order operators itself, without the line or a remedy.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unlent: set[int] | None = None
        """The graph's own storages while something runs between two pieces; None: nothing does."""
        self._items: list[_Call | _Break] = []
        self._storages: dict[int, Storage] = {}

    @property
    def is_between(self) -> bool:
        """Whether something runs between two pieces."""
        return self._unlent is not None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the compiler of torch out: it is imported, and stands around each operator, to keep off this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and keep it, or refuse it."""
        kwargs = kwargs or {}
        if self._unlent is not None:
            if any(is_plain(tensor) and storage_key(tensor) in self._unlent for tensor in tensors_of(args, kwargs)):
                raise CaptureError(
                    f"what runs between two pieces calls {func} on a tensor of the graph that is not among "
                    f"the reads and writes of the split{calling_line()}; name that very tensor, or derive from it there"
                )
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            raise refusal(func, "it is a higher-order operator", "call what it stands for")
        known = traits(func)
        if known.is_composite:
            with self:  # its parts are recorded, not itself
                return func.decompose(*args, **kwargs)
        if known.may_wait:
            check_host_sync(func, args, kwargs)
        if known.is_unfinished:
            raise refusal(func, "its result arrives later", "call torch.distributed, which waits for it")
        if known.changes_view:
            # Tensors are recorded as they look.
            return func(*args, **kwargs)
        # Before it runs: a tensor that no operator so far has made existed before the capture.
        for tensor in tensors_of(args, kwargs):
            self._meet(tensor, func, is_own=False)
        if known.is_constant:
            # The forward may change it in place: each replay needs it as it was.
            func = aten.clone.default
        result = run_without_random(func, args, kwargs) if known.may_draw else func._op(*args, **kwargs)
        outputs = tensors_of(result)
        # A result in memory that was known before is a view, or an argument that was changed in place.
        fresh = [self._meet(output, func, is_own=True) for output in outputs]
        # Views and allocations write nothing, and tensors are kept by place and shape, so these need no step.
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
            self._unlent = {key for key, storage in self._storages.items() if storage.is_own}
            try:
                between()
            finally:
                self._unlent = None

    def finish(self, pool: RecordedPool) -> RecordedGraph:
        """Give each of the graph's own storages its place in the pool, and make the graph."""
        own = [(storage, storage.block) for storage in self._storages.values() if storage.is_own]
        used = [(storage, block) for storage, block in own if block is not None]
        left = self._leftover()  # before lent tensors are pointed into the pool
        places, layout = pool.hold([block for _, block in used])
        for (storage, _), (chunk, offset) in zip(used, places, strict=True):
            storage.settle(chunk, offset)
        return RecordedGraph(
            steps=tuple(item.step() for item in self._items),
            in_inference_mode=torch.is_inference_mode_enabled(),
            memory=layout.grows,
            alone=layout.alone,
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


def grapher_for(device: torch.device, *, accounts: bool = True) -> Grapher:
    """Return what captures on a device; ``accounts``: and reads a GPU's memory around each capture."""
    if device.type == "cuda":
        from capture_planner_runner.graphs.cuda import CudaGraphs

        return CudaGraphs(device, accounts=accounts)
    return RecordedGraphs()
