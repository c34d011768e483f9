"""A probe with operators other than attention: a recurrent layer, and rows that depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch
from torch import nn

from capture_planner.plugins.backend import NULL_STATE
from capture_planner_conformance.probe import Rows, Tables
from capture_planner_conformance.scene import Arrive, Scene
from capture_planner_conformance.world import GARBAGE, LiveRequest, ModelCache, World
from capture_planner_runner.models.protocols import Attend
from capture_planner_runner.serving.states import PageFormat

RECURRENT = 1
"""Recurrent layers of a model that has some; states are as wide as a layer's attention output."""


class RecurrentTables(Tables):
    """Tables with the inputs and decays of recurrent layers too, ``[rows, recurrent, 2 * width]``."""

    states_by_token: torch.Tensor
    states_by_position: torch.Tensor

    def sizes(self, vocabulary: int, longest: int) -> dict[str, tuple[int, ...]]:
        wide = 2 * self.shape.width
        return super().sizes(vocabulary, longest) | {
            "states_by_token": (vocabulary, RECURRENT, wide),
            "states_by_position": (longest, RECURRENT, wide),
        }

    @property
    def state_widths(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.shape.width,) * RECURRENT

    @property
    def width(self) -> int:
        return super().width + RECURRENT * self.shape.width

    def name(self, layer: int) -> str:
        recurrent = layer - self.shape.layers
        return super().name(layer) if recurrent < 0 else f"the state of recurrent layer {recurrent}"

    def recurrences(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of recurrent layers, and the logarithms of their decays: ``[T, recurrent, width]``.

        :param change: done to the rows first, ``[T, recurrent, 2 * width]``.
        """
        inputs, decays = change(self.states_by_token[ids] + self.states_by_position[positions]).chunk(2, dim=-1)
        return inputs, -nn.functional.softplus(decays) / _LASTING

    def computed(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        return torch.cat([super().computed(ids, first), self.states(ids)[first:].flatten(1)], dim=1)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return, in float64, the states after each of a request's tokens, ``[S, recurrent, width]``."""
        inputs, decays = (part.double() for part in self.recurrences(ids, torch.arange(len(ids), device=ids.device)))
        earlier = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=ids.device).tril()[:, :, None, None]
        found: list[torch.Tensor] = []
        last = torch.zeros_like(inputs[:1])
        for added, kept in zip(torch.split(inputs, _CHUNK), torch.split(decays, _CHUNK), strict=True):
            total, rows = kept.cumsum(0), len(added)
            spread = (total[:, None] - total).exp() * added
            within = torch.where(earlier[:rows, :rows], spread, 0).sum(1)
            found.append(within + total.exp() * last)
            last = found[-1][-1:]
        return torch.cat(found)

    def outputs(
        self,
        of_rows: Rows,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        layers: Iterable[int] | None = None,
    ) -> torch.Tensor:
        attention = super().outputs(of_rows, ids, positions, attend, layers)
        inputs, decays = self.recurrences(ids, positions, of_rows.spoiled(attend.real))
        states = [attend.recur(layer, inputs[:, layer], decays[:, layer]) for layer in range(RECURRENT)]
        return torch.cat([attention, *states], dim=1)


class CoupledRows(Rows):
    """Rows of a batch that depend on each other, at the end of each model."""

    def coupled(self, hidden: torch.Tensor, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return coupled(hidden, ids, real)


def coupled(hidden: torch.Tensor, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return rows ``[T, hidden_size]`` that depend on all real rows of a batch.

    They are scaled by the largest element of all, as activations quantized per tensor are (vllm#37442, #38436), and
    by the load of an expert, which a router chooses by the token's id. Real rows must not depend on padding.
    """
    largest = torch.where(real[:, None], hidden.abs(), 0).amax().clamp(min=torch.finfo(hidden.dtype).tiny)
    same_expert = (ids[:, None] - ids) % _EXPERTS == 0
    load = (same_expert & real).sum(1)
    return hidden / largest * (_LEVEL * (1 + load / _EXPERTS)).to(hidden.dtype)[:, None]


class RunnerWorld(World):
    """Requests that have a row each in the pool of recurrent states, if there is one."""

    def __init__(
        self,
        caches: Sequence[ModelCache],
        pages: PageFormat,
        scene: Scene,
        pool_rows: int,
        spared: Collection[str] = (),
    ) -> None:
        """Fill the cache and the pools.

        :param pool_rows: of each pool, the null state's included.
        """
        self.rows: dict[int, int] = {}
        """The row of each live request, by its number."""
        self._free = list(range(1, pool_rows))
        self._draw = np.random.default_rng(scene.seed)
        super().__init__(caches, pages, scene, spared)

    def arrive(self, step: Arrive) -> LiveRequest | None:
        if self._free:
            return super().arrive(step)
        self._arrived += 1
        return None

    def compute(self, live: LiveRequest) -> None:
        if live.number not in self.rows:
            self.rows[live.number] = self._free.pop(int(self._draw.integers(len(self._free))))
        super().compute(live)

    def depart(self, live: LiveRequest) -> None:
        self._free.append(self.rows.pop(live.number))
        super().depart(live)

    def rewind(self, live: LiveRequest) -> None:
        """Write the states after the last computed token, as earlier steps would have; the others are garbage."""
        for cache in self.caches:
            if not cache.states:
                continue
            assert isinstance(cache.tables, RecurrentTables), "of a model with states"
            ids = torch.from_numpy(live.tokens[: live.computed]).to(cache.tables.by_token.device)
            expected, row = cache.tables.states(ids)[-1:], self.rows[live.number]
            for layer, pool in enumerate(cache.states):
                pool.states[row] = GARBAGE
                if live.computed:
                    pool.states[row, (live.computed - 1) % pool.positions] = expected[0, layer].to(pool.states.dtype)

    def spoil_free(self) -> None:
        """Fill rows that no request owns with NaN too, that of the null state included."""
        super().spoil_free()
        free = [] if "free pages" in self.spared else self._free
        rows = [*free, *([] if "null page" in self.spared else [NULL_STATE])]
        for pool in (pool for cache in self.caches for pool in cache.states):
            pool.states[rows] = float("nan")


_CHUNK = 64
"""Tokens whose states are computed from each other at once: all of a long sequence would take gigabytes."""

_LASTING = 8.0
"""The larger, the longer a state lasts: it loses a tenth with a token."""

_EXPERTS = 4

_LEVEL = 4.0
"""The largest element of coupled rows, about as large as of rows that are not."""
