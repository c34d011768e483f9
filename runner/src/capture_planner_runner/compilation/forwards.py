"""The forwards of one body: compiled where they can be, and as they are where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, cast

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.records.text import counted
from capture_planner_runner.models.protocols import Attend, Weight
from capture_planner_runner.ranks.collectives import WHOLE, Collectives
from capture_planner_runner.ranks.outcomes import refuse_other_states
from capture_planner_runner.ranks.peers import ALONE, Peers

if TYPE_CHECKING:
    from capture_planner_runner.compilation.pieces import CompiledForward, Compiler

Inputs = Mapping[str, torch.Tensor]
Forward = Callable[..., Sequence[torch.Tensor]]
"""Called with an ``Attend``, a variant and inputs by name."""

ROWS: Mapping[str, int | None] = {"positions": -1, "active": None}
"""Which dimension of an input is a row for each token; 0 of all that are not named here."""


@attrs.frozen(eq=False)
class Same:
    """An object as a key: by what it is, and not by what it equals."""

    _value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


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
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler and of a model's own code, anything
            name = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
            return None, f"{name}{' '.join(str(error).split())[:300]}"
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
            from capture_planner_runner.compilation.pieces import compiled
            from capture_planner_runner.compilation.trace import traced

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
