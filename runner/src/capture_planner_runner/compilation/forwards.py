"""The forwards of one body: compiled where they can be, and as they are where they cannot."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from torch import fx

from capture_planner.errors import RunError, one_line
from capture_planner.records.text import counted
from capture_planner_runner.models.protocols import Attend, Weight
from capture_planner_runner.ranks.collectives import WHOLE, Collectives
from capture_planner_runner.ranks.outcomes import refuse_other_states
from capture_planner_runner.ranks.peers import ALONE, Peers, Place

if TYPE_CHECKING:
    from capture_planner_runner.compilation.pieces import CompiledForward, Compiler, Function


CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where Inductor reads the folder of its caches from, each time that it needs it."""

OPTIONS: dict[str, bool | int] = {
    # A timing decides nothing: each start has the same kernels, bits and fingerprints.
    "deterministic": True,
    "triton.autotune_pointwise": False,
    # A model has a dozen kernels: to start a process for each core takes longer than to compile them.
    "compile_threads": 1,
}
"""Options of Inductor, by their names in ``torch._inductor.config``."""


def operators(module: fx.GraphModule, inputs: list[Any]) -> Function:
    """Run the operators one by one, as they were traced: recorded graphs see them."""
    return module


def inductor(module: fx.GraphModule, inputs: list[Any]) -> Function:
    """Compile with Inductor, for any T. Its caches on disk have what an earlier process compiled."""
    # make_fx leaves fake tensors under `val`, and Inductor's `from_graph` looks for them under `example_value`.
    for node in module.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    with warnings.catch_warnings():
        # A hint that TF32 would be faster, though how float32 is rounded is not for the runner to decide; and what
        # torch says to its own modules.
        warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor import standalone_compile  # takes seconds

        options = {"config_patches": dict(OPTIONS)}
        compiled: Function = standalone_compile(module, inputs, dynamic_shapes="from_graph", options=options)
    return compiled


def compiler_for(device: torch.device, place: Place) -> Compiler:
    """Return Inductor on a GPU. Elsewhere operators are run as they are: Inductor's code for a CPU calls none."""
    if device.type != "cuda":
        return operators
    if place.size > 1:
        keep_apart(place.rank)
    return inductor


def keep_apart(rank: int) -> None:
    """Let this process, one rank of several, keep what it compiles from here on in a folder of its own.

    In a folder that ranks share, one may load the code of another one's GPU (pytorch#188332), or kernels of which two
    wrote the files at once (pytorch#92664).
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    shared, own = Path(cache_dir()), f"rank-{rank}"
    # A second call finds this rank's folder set already.
    if shared.name != own:
        os.environ[CACHE] = str(shared / own)


Inputs = Mapping[str, torch.Tensor]
Forward = Callable[..., Sequence[torch.Tensor]]
"""Called with an ``Attend``, a variant and inputs by name."""

ROWS: Mapping[str, int | None] = {"positions": -1, "active": None}
"""Which dimension of an input is a row for each token; 0 of all that are not named here."""


@attrs.define(eq=False)
class Compilation:
    """Compiled forwards, for one runner or for several of the same networks, which then compile nothing again.

    Ranks compile the same: what one of them cannot compile runs as it is on all.
    """

    peers: Peers = ALONE
    among: Collectives = WHOLE
    """Collectives that sums over ranks use in a forward."""
    seconds: float = 0.0
    """Seconds of compiling, failures included."""
    not_compiled: list[str] = attrs.Factory(list)
    """Forwards that run uncompiled, with the reason."""
    _forwards: dict[Hashable, CompiledForward | None] = attrs.Factory(dict)

    @property
    def kinds(self) -> int:
        """Number of compiled pieces; layers that differ only by their weights share theirs."""
        return sum(forward.kinds for forward in self._forwards.values() if forward is not None)

    def find(self, key: Hashable, label: str, build: Callable[[], CompiledForward]) -> CompiledForward | None:
        """Return the forward of a key, compiled if it is not there; None where a rank cannot compile it.

        Raises ``RankError`` where ranks compiled forwards of other pieces: another number of collectives is in them.
        """
        if key not in self._forwards:
            forward, reason = self._timed(build)
            answers = self.peers.exchange(f"compiling {label}", [reason, None if forward is None else forward.outline])
            reasons = [cast("list[str | None]", answer)[0] for answer in answers]
            if any(reasons):
                self.not_compiled.append(f"{label}: {_by_rank(reasons)}")
            else:
                refuse_other_states(f"compiling {label}", [cast("list[str]", answer)[1] for answer in answers])
            self._forwards[key] = None if any(reasons) else forward
        return self._forwards[key]

    def facts(self) -> dict[str, str]:
        """Describe it, for a report."""
        facts = {"compiled": f"{counted(self.kinds, 'kind')} of pieces in {self.seconds:.1f} s"} if self.kinds else {}
        return facts | ({"not compiled": "; ".join(self.not_compiled)} if self.not_compiled else {})

    def _timed(self, build: Callable[[], CompiledForward]) -> tuple[CompiledForward | None, str | None]:
        """Return what was compiled, or why it cannot be."""
        started = perf_counter()
        try:
            return build(), None
        # A lack of memory does not mean that the forward cannot be compiled.
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler and of a model's own code, anything
            name = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
            return None, f"{name}{one_line(error)[:300]}"
        finally:
            self.seconds += perf_counter() - started


def _by_rank(reasons: Sequence[str | None]) -> str:
    """Return why some ranks cannot compile a forward; their numbers are left out where all say the same."""
    if len(set(reasons)) == 1:
        return str(reasons[0])
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)


class Forwards:
    """The compiled forwards of one body by variant: of a target for so many active adapters, of a drafter by module.

    A variant is compiled once, for any number of rows; one that is not runs as it is. Nothing is compiled by a call.
    """

    def __init__(self) -> None:
        self.compiled: dict[int, CompiledForward] = {}

    def run(self, forward: Forward, attend: Attend, variant: int, inputs: Inputs) -> Sequence[torch.Tensor]:
        """Run one variant; ``forward`` is what it was compiled from."""
        found = self.compiled.get(variant)
        return forward(attend, variant, **inputs) if found is None else found(attend, inputs)

    def compile(
        self,
        forward: Forward,
        network: Hashable,
        variant: int,
        inputs: Inputs,
        weights: Iterable[Weight],
        compiler: Compiler,
        compilation: Compilation,
        label: str,
    ) -> None:
        """Compile one variant for inputs like these, unless a body of this network did so before."""
        kinds = {name: (tensor, _dimension(name, tensor)) for name, tensor in inputs.items()}

        def build() -> CompiledForward:
            # Here, since tracing needs sympy, which takes a second to import.
            from capture_planner_runner.compilation.pieces import compiled, traced

            trace = traced(lambda attend, **given: forward(attend, variant, **given), kinds, weights)
            return compiled(trace, compiler, compilation.among)

        key = (network, variant, compiler, *((name, _kind(*each)) for name, each in sorted(kinds.items())))
        found = compilation.find(key, label, build)
        if found is not None:
            self.compiled[variant] = found


def _kind(tensor: torch.Tensor, rows: int | None) -> Hashable:
    extents = tuple(size for index, size in enumerate(tensor.shape) if index != rows)
    return tensor.dtype, tensor.device, tensor.ndim, rows, extents


def _dimension(name: str, tensor: torch.Tensor) -> int | None:
    dimension = ROWS.get(name, 0)
    return dimension if dimension is None else dimension % tensor.ndim


@contextlib.contextmanager
def compiled_seconds() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each kernel that Triton compiles within the context, in order.

    Kernels that are in Triton's cache on disk are not among them, nor what other libraries compile. The list stays
    empty without Triton 3.4 or later.
    """
    seconds: list[float] = []
    try:
        compilation = importlib.import_module("triton.knobs").compilation
    except ImportError:
        yield seconds
        return
    before = compilation.listener

    def listener(*, times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            seconds.append(times.total * 1e-6)
        if before is not None:
            before(times=times, cache_hit=cache_hit, **others)

    compilation.listener = listener
    try:
        yield seconds
    finally:
        compilation.listener = before
