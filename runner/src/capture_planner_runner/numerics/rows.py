"""Copies of the token ids that the target's forwards read, and of the hidden states that they computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch

from capture_planner.records.batch import Entry
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import ForwardObserver, RoleRun

MEMORY = 1 << 30
"""Limit of kept hidden states, in bytes."""


@attrs.frozen(eq=False)
class _KeptForward:
    requests: tuple[str, ...]
    starts: list[int]
    positions: torch.Tensor
    """``int64[T]``, as the forward reads them: of a step that runs ahead, the host has upper bounds."""
    entry: Entry | None
    ids: torch.Tensor
    """``int64[T]``, as the forward reads them."""
    hidden: torch.Tensor | None
    """``[T, hidden_size]``; None where the memory was used up."""


@attrs.frozen(kw_only=True, eq=False)
class ServedRows:
    """The hidden states of served sequences."""

    hidden: torch.Tensor
    """``[rows, hidden_size]``"""
    places: tuple[tuple[str, int], ...]
    """The request and the position of each row."""
    entries: tuple[Entry | None, ...]
    """The graph that computed each row; None: eager."""
    not_kept: int
    absent: tuple[tuple[str, int], ...]
    """The first position of each request for which no forward read the request's own token."""


class RowKeeper(ForwardObserver):
    """Copies ids, positions and hidden states of the target's forwards, on the device and in its stream's order.

    Nothing is captured and nothing waits for the device: graphs and batches are those of a run without it.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._kept: list[_KeptForward] = []
        self._requests: tuple[str, ...] = ()
        self._memory = memory

    def batch(self, requests: Sequence[str]) -> None:
        self._requests = tuple(requests)

    @contextmanager
    def forward(self, role: RoleRun, step: ForwardStep) -> Iterator[None]:
        """Copy what the target reads and leaves."""
        body, inputs = role.body, step.inputs
        # Without requests these are the dummy rows of an idle replica.
        if not isinstance(body, TargetBody) or not self._requests:
            yield
            return
        tokens = inputs.num_tokens
        if body.embeddings is None:
            # Before the forward: a graph may end with the fields of the next step.
            ids = body.input_ids(tokens).clone()
        else:
            assert inputs.input_ids is not None, "embeddings are made of ids that the host knows"
            ids = torch.from_numpy(inputs.input_ids.copy())
        positions = body.fields["positions"][:tokens].clone()
        yield
        size = body.hidden[:tokens].nbytes
        hidden = body.hidden[:tokens].clone() if size <= self._memory else None
        self._memory -= size if hidden is not None else 0
        starts = inputs.query_start_loc.tolist()
        self._kept.append(_KeptForward(self._requests, starts, positions, step.entry, ids, hidden))

    def rows(self, sequences: Mapping[str, Sequence[int]]) -> ServedRows:
        """Return every row that belongs to these sequences: prompts and outputs, by the requests' names.

        Rows at and behind a draft that was refused belong to none, and nothing follows from the last token.
        """
        places: list[tuple[str, int]] = []
        entries: list[Entry | None] = []
        hidden: list[torch.Tensor] = []
        read = {name: [False] * (len(tokens) - 1) for name, tokens in sequences.items()}
        not_kept = 0
        for kept in self._kept:
            ids, positions, chosen = kept.ids.tolist(), kept.positions.tolist(), []
            for name, (start, end) in zip(kept.requests, itertools.pairwise(kept.starts), strict=True):
                tokens = sequences.get(name, ())
                for row in range(start, end):
                    at = positions[row]
                    # A refused draft: this row and those behind it belong to no sequence.
                    if at >= len(tokens) - 1 or ids[row] != tokens[at]:
                        break
                    read[name][at] = True
                    chosen.append((row, (name, at)))
            if kept.hidden is None:
                not_kept += len(chosen)
                continue
            places += [place for _, place in chosen]
            entries += [kept.entry] * len(chosen)
            hidden.append(kept.hidden[[row for row, _ in chosen]])
        absent = tuple((name, seen.index(False)) for name, seen in read.items() if not all(seen))
        rows = torch.cat(hidden) if hidden else torch.empty(0)
        return ServedRows(hidden=rows, places=tuple(places), entries=tuple(entries), not_kept=not_kept, absent=absent)
