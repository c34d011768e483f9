"""The memory of recorded graphs: chunks that never move, laid out by lifetimes; tensors in arguments and results."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

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


@attrs.frozen(eq=False)
class Allocation:
    """The memory that a pool gave to one graph."""

    places: tuple[tuple[torch.UntypedStorage, int], ...]
    """Chunk and offset in bytes of each block."""
    memory: int
    """Bytes by which the pool grew."""
    alone: int
    """Bytes of a separate pool."""


class RecordedPool:
    """Chunks of host memory that graphs of one grapher share. ``limit`` in bytes; None: none.

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

    def hold(self, blocks: Sequence[Block]) -> Allocation:
        """Give memory to the blocks of one graph; other graphs' blocks may lie in the same bytes.

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
        places = tuple((chunks[chunk], offset) for chunk, offset in layout.places)
        return Allocation(places, layout.grows, layout.alone)


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
    with _disable_current_modes():
        storages = {key: tensor.untyped_storage() for key, (tensor, _) in zip(keys, lent, strict=True)}
        copies = {key: storage.clone() for key, storage in storages.items()}  # type: ignore[no-untyped-call]
        for key, (tensor, own) in zip(keys, lent, strict=True):
            tensor.set_(copies[key], own.offset, own.shape, own.stride)
    try:
        yield
    finally:
        with _disable_current_modes():
            for key, storage in storages.items():
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
        if type(tree) in _LEAVES:
            continue
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            _collect(tree, found)
        elif isinstance(tree, dict):
            _collect(tree.values(), found)
