"""Graphs: what captures a forward and replays it. Recorded on a CPU, CUDA graphs on a GPU."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, Protocol

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.records.batch import Entry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner_runner.graphs.reading import Reading

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (tuple, list, dict, set, CellType, FunctionType)
_DEPTH = 4
"""Limit of objects between a tensor and a frame, or of containers between a tensor and a named object."""
_WIDTH = 64
"""Objects of a level that are followed to frames: the search takes time for each."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Frames that can go on."""


@attrs.frozen
class Leftover:
    """Tensors that a forward made and that outlived its capture: the next replay overwrites them."""

    size: int = 0
    """In bytes."""
    holders: tuple[str, ...] = ()
    """Names of the objects that refer to them."""


def leftover(sizes: Mapping[int, int], key_of: Callable[[torch.Tensor], int], device: str) -> Leftover:
    """Return the tensors in a graph's memory that are still referred to, after collecting garbage and ended frames.

    It looks at all objects of the process. A tensor that no Python object refers to is not seen. A frame that has ended
    does not count: nothing reads its variables any more. An exception that a library keeps, such as the ``ImportError``
    of an optional module, keeps the frames of all its callers, with every tensor in them.

    :param sizes: bytes of each storage that the graph made, by its key.
    :param key_of: the key of a tensor's storage.
    :param device: the type of the tensors' device.
    """
    if not sizes:
        return Leftover()

    def living() -> list[torch.Tensor]:
        # type(), not isinstance: that reads `__class__`, which runs code of lazy objects and proxies.
        plain = (each for each in gc.get_objects() if type(each) in _PLAIN)
        return [
            each
            for each in plain
            # Sparse tensors have no storage to compare.
            if each.device.type == device and each.layout is torch.strided and key_of(each) in sizes
        ]

    gc.collect()
    left = living()
    frames = _ended_frames(left)
    if frames:
        # This list refers to the tensors as well.
        left.clear()
        for frame in frames:
            frame.clear()
        left = living()
    return Leftover(sum(sizes[key] for key in {key_of(tensor) for tensor in left}), _names(left, _holders(left)))


def own_address(tensor: torch.Tensor) -> int:
    """Return where the memory begins that a tensor owns; 0 of one over the memory of another, as pieces keep them."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.resizable() else 0


def _ended_frames(tensors: list[torch.Tensor]) -> list[FrameType]:
    """Return the frames that refer to tensors, also through other objects. A frame that runs is no referrer."""
    frames: list[FrameType] = []
    level: list[Any] = tensors
    for _ in range(_DEPTH):
        # The lists of this search refer to the tensors, too.
        own = {id(tensors), id(level), id(frames)}
        referrers = [each for each in gc.get_referrers(*level[:_WIDTH]) if id(each) not in own] if level else []
        # A generator or a coroutine that is suspended goes on with its variables, so its frame is not cleared.
        frames += [each for each in referrers if type(each) is FrameType and not each.f_code.co_flags & _SUSPENDS]
        # Modules and classes are not followed: what refers to them does not hold the tensors.
        level = [each for each in referrers if not isinstance(each, (FrameType, ModuleType, type))]
    return frames


def _holders(tensors: list[torch.Tensor]) -> list[Any]:
    """Return what refers to tensors, also through containers."""
    holders: list[Any] = []
    level: list[Any] = tensors
    for _ in range(_DEPTH):
        own = {id(tensors), id(level), id(holders)}
        referrers = [each for each in gc.get_referrers(*level) if id(each) not in own] if level else []
        holders += referrers
        level = [each for each in referrers if type(each) in _CONTAINERS]
    return holders


def _names(tensors: list[torch.Tensor], holders: list[Any]) -> tuple[str, ...]:
    """Return the attributes of objects, and variables of modules, that hold tensors or containers of them."""
    held = {id(each) for each in tensors} | {id(each) for each in holders if type(each) in _CONTAINERS}
    names = set()
    for holder in holders:
        if type(holder) not in _CONTAINERS:
            label = str(getattr(holder, "__name__", type(holder).__name__))
            found = [name for name, value in getattr(holder, "__dict__", {}).items() if id(value) in held]
            names |= {f"{label}.{name}" for name in found} or {label}
    return tuple(sorted(names))


class GraphPool(Protocol):
    """The memory that graphs' intermediates live in; graphs that share a pool never run at once.

    What a graph added goes with it, as far as memory can be told apart: a recorded pool gives back each chunk in which
    no graph lies any more, a CUDA pool its segments once none of its graphs is left.
    """

    @property
    def memory(self) -> int:
        """Bytes that the pool holds now."""

    def poison(self) -> None:
        """Overwrite every byte with ``0xFF``: NaN as a float, -1 as an integer."""


class Graph(Protocol):
    """One captured forward."""

    @property
    def memory(self) -> int:
        """Bytes by which this graph grew its pool."""

    @property
    def alone(self) -> int:
        """Bytes that it would take in a separate pool.

        Of a CUDA graph: its tensors when most of them were alive, without what segments round up.
        """

    @property
    def leftover(self) -> Leftover:
        """Tensors that its forward made and that outlived the capture."""

    @property
    def pieces(self) -> int:
        """Number of pieces: 1 for a FULL graph, one more than its attention calls for PIECEWISE."""

    def dump(self, stem: Path) -> list[Path]:
        """Write its contents into files with names that begin with ``stem``, and return them.

        Recorded graphs are text, an operator a line; CUDA graphs are Graphviz, a file a piece.
        """

    def fingerprint(self) -> Fingerprint | None:
        """Return what it is made of; None where nothing reads it. Raises ``CaptureError`` where it cannot be read."""

    def replay(self) -> None:
        """Run again on the same storage, with the host's numbers as they were at capture."""


class Grapher(Protocol):
    """Captures graphs on one kind of device."""

    def reading(self) -> Reading | None:
        """Wait for the device, give back what no tensor owns, and read its memory; None: a host."""

    def settle(self) -> None:
        """Wait until the device has done all that it was given."""

    def pool(self, limit: int | None = None) -> GraphPool:
        """Make a pool that refuses to hold more than ``limit`` bytes."""

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> Graph:
        """Run ``forward`` once and keep what it did.

        Raises ``CaptureError`` where it did what no graph can hold, such as reading a device value on the host, and
        ``torch.OutOfMemoryError`` where the pool cannot hold it; then the pool is as it was before.
        """

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """End a piece, run ``between(*reads, *writes)`` outside the graph, and begin the next piece.

        Called by the forward while it is captured; ``between`` is run there, and once at this place
        of every replay, on tensors over the same memory as at capture. ``reads`` and ``writes`` are all
        the tensors of the graph that it touches: a graph keeps where they are and not the tensors, so
        that their memory is there for what comes after them, and ``between`` must not keep them either.
        """


def dump_graphs(graphs: Iterable[tuple[str, Entry, Graph]], folder: Path) -> list[Path]:
    """Write each graph into ``folder``, under its role and entry, and return the files.

    Raises ``RunError`` where the folder cannot be written; no half of a file, and no empty folder, is left then.
    """
    files, name = [], ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for role, entry, graph in graphs:
            # The text of an entry has spaces and commas.
            name = re.sub(r"[^a-z0-9_]+", "-", f"{role} {entry}".lower()).strip("-")
            files += graph.dump(folder / name)
    except (OSError, RuntimeError) as error:  # the latter from CUDA
        with suppress(OSError):
            for half in folder.glob(f"{name}.*"):
                half.unlink()
            # Raises, and leaves the folder, if other files are in it.
            folder.rmdir()
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder}: graphs cannot be dumped: {reason}; name another folder") from error
    return files


def write_operators(stem: Path, operators: Iterable[tuple[str, str]]) -> list[Path]:
    """Write each operator with its arguments in a line of ``stem.txt``, and return the file."""
    file = stem.with_name(f"{stem.name}.txt")
    file.write_text("".join(f"{name} {arguments}\n" for name, arguments in operators), encoding="utf-8")
    return [file]
