"""Peers: what a runner asks of the other ranks. ``ALONE`` answers for a process that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from capture_planner.errors import Problem
from capture_planner.records._base import raise_any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Array = np.ndarray[Any, Any]
Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"
"""A value that JSON can hold. Tuples arrive as lists."""


@attrs.frozen
class Place:
    """The place of a process among all ranks.

    Tensor-parallel ranks are neighbours: ``rank = data * tensor_size + tensor``. Raises ``InvalidValue`` for a rank
    that is not below ``size``.
    """

    rank: int
    tensor_size: int = attrs.field(kw_only=True)
    data_size: int = attrs.field(kw_only=True)
    host: str = attrs.field(kw_only=True)
    """Name of the machine, for messages."""

    def __attrs_post_init__(self) -> None:
        wrong = Problem(path=("place", "rank"), message=f"{self.rank} is not below {self.size}")
        raise_any([] if 0 <= self.rank < self.size else [wrong])

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.tensor_size * self.data_size

    @property
    def tensor(self) -> int:
        """Rank among those that share a model."""
        return self.rank % self.tensor_size

    @property
    def data(self) -> int:
        """Number of the replica."""
        return self.rank // self.tensor_size

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Peers:
    """The other ranks of a runner; this class is for a process without any.

    Every method but ``collect`` is collective: all ranks call it, in the same order.
    """

    place = Place(0, tensor_size=1, data_size=1, host="localhost")
    """The place of this process."""

    def exchange(self, topic: str, value: Plain) -> tuple[Plain, ...]:
        """Return the values of all ranks, by rank; no rank goes on before all have come here.

        Takes about a millisecond: for start and capture, not for a step. Raises ``RankError`` on every rank, with
        the ranks that are missing, that died, or that exchange another ``topic``.
        """
        return (value,)

    def agree(self, numbers: Sequence[int]) -> Array:
        """Return the numbers of all ranks, int64 [size, len(numbers)]. Every rank gives the same number of them.

        The small all-gather of a step, on the host. Raises ``RankError`` where the connection to a rank breaks.
        """
        return np.asarray(numbers, np.int64).reshape(1, -1)

    def tensor_group(self) -> ProcessGroup | None:
        """Return the group of the ranks that share this one's model; None for a model on one rank.

        It is for collectives on the device: NCCL on GPUs, gloo on CPUs.
        """
        return None

    def collect(self, topic: str, value: Plain, *, interrupted: bool = False) -> tuple[Plain, ...]:
        """Return the last words of all ranks on the first one, by rank; None where there are none, and on all others.

        Not collective: it waits for no rank that is gone, and raises no ``RankError``.

        :param interrupted: by Ctrl-C, on this rank: all others are to end as if it had come to them.
        """
        return (value,)

    def close(self) -> None:
        """End the groups. Graphs with collectives in them are released before."""


ALONE = Peers()
"""The peers of a single process: so that no caller asks whether it is distributed."""
