"""The requests of a scene: their tokens, their pages, and the contents of the cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import attrs
import numpy as np
import torch

from capture_planner.plugins.backend import NULL_PAGE, LayerCache
from capture_planner_conformance.probe import Tables
from capture_planner_conformance.scene import VOCABULARY, Arrive, Scene
from capture_planner_runner.execution.attention import StateCache
from capture_planner_runner.serving.states import PageFormat

GARBAGE = 6.0
"""Fills owned slots that were not written: finite, as other keys are, and far from them."""


@attrs.define(eq=False)
class LiveRequest:
    """One request."""

    number: int
    place: int
    tokens: np.ndarray
    """``int64[longest + K + 2]``: every token that it will ever read."""
    prompt: int
    computed: int
    """Tokens whose keys and values are final."""
    pages: list[int]

    def advance(self, tokens: int) -> None:
        self.computed += tokens


@attrs.define(eq=False)
class ModelCache:
    """The cache that the roles of one model share, and its tables."""

    tables: Tables
    layers: Sequence[LayerCache]
    states: Sequence[StateCache]
    """The pool of each recurrent layer; the suite's own models have none."""
    shifts: tuple[int, ...]
    """Distance from a row's position to its token's, by layer: 0 for a target, 1 for a drafter that reads its states,
    and one more for each module."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the keys and values of each layer, ``[pages, page_size, kv_heads, dim]``."""
        for cache in self.layers:
            yield from (cache.keys, cache.values)

    def flat(self) -> Iterator[torch.Tensor]:
        """Yield them as ``[slots, kv_heads * dim]``: a copy where the cache is packed, or pages lie apart."""
        for tensor in self.tensors():
            yield tensor.flatten(0, 1).flatten(1)

    def expected(self, ids: torch.Tensor, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the contents of ``flat`` for tokens at positions, ``[T, kv_heads * dim]`` each."""
        _, keys, values = self.tables.split(ids, positions)
        for layer, cache in enumerate(self.layers):
            yield keys[:, layer].flatten(1).to(cache.keys.dtype)
            yield values[:, layer].flatten(1).to(cache.values.dtype)

    def of_request(self, tokens: np.ndarray, positions: np.ndarray) -> Iterator[torch.Tensor]:
        """Yield the contents of ``flat`` for the positions of a request with ``tokens``."""
        device = self.tables.by_token.device
        at, found = torch.from_numpy(positions).to(device), {}
        for shift in set(self.shifts):
            found[shift] = list(self.expected(torch.from_numpy(tokens[positions + shift]).to(device), at))
        for layer, shift in enumerate(self.shifts):
            yield from found[shift][2 * layer : 2 * layer + 2]


class World:
    """Live requests and their pages. Requests that share a prefix share pages."""

    def __init__(
        self, caches: Sequence[ModelCache], pages: PageFormat, scene: Scene, spared: Collection[str] = ()
    ) -> None:
        """Fill the cache; ``spared`` names pages that get no garbage: "free pages", "null page"."""
        self.caches, self.pages = tuple(caches), pages
        self.live: dict[int, LiveRequest] = {}
        self._scene, self._longest = scene, scene.shape.longest
        self._places = list(range(scene.num_reqs))
        self._owners = np.zeros(pages.num_pages, dtype=np.int64)
        self._owners[NULL_PAGE] = 1  # never free
        self._arrived = 0
        self.spared = frozenset(spared)
        self.refresh()

    # Arrivals and departures.

    def arrive(self, step: Arrive) -> LiveRequest | None:
        """Add a request, unless no place or too few pages are free."""
        number, self._arrived = self._arrived, self._arrived + 1
        # By number: a request has the same tokens, whatever came before it.
        draw = np.random.default_rng((self._scene.seed, number))
        # Tokens past the longest sequence can be drafted.
        tokens = draw.integers(0, VOCABULARY, self._longest + self._scene.drafts + 2)
        prompt = max(1, min(step.prompt, self._longest))
        computed = max(0, min(step.computed, self._longest - 1))  # with room for another token
        other = None if step.shares is None else self.live.get(step.shares)
        shared: list[int] = []
        if other is not None:
            shared = other.pages[: min(other.computed, computed) // self.pages.page_size]
            # A layer reads tokens behind its position; shared pages are of the same ones.
            alike = len(shared) * self.pages.page_size + max(1, *(max(cache.shifts) for cache in self.caches))
            tokens[:alike] = other.tokens[:alike]
        free = np.flatnonzero(self._owners == 0).tolist()
        # For its full length: steps may go on to the model's end.
        wanted = self.pages.pages(self._longest) - len(shared)
        if not self._places or len(free) < wanted:
            return None
        # In random order: a block table need not be a range.
        own = draw.permutation(free)[:wanted].tolist()
        place = self._places.pop(int(draw.integers(len(self._places))))
        live = LiveRequest(number, place, tokens, prompt, computed, shared + own)
        self._owners[live.pages] += 1
        self._fill_pages(own, GARBAGE)
        self.live[number] = live
        self.compute(live)
        return live

    def depart(self, live: LiveRequest) -> None:
        """Remove a request; pages that no other shares are free."""
        del self.live[live.number]
        self._places.append(live.place)
        self._owners[live.pages] -= 1
        self.spoil_free()

    def move(self, live: LiveRequest) -> None:
        """Exchange its own pages for free ones, as far as there are any."""
        free = np.flatnonzero(self._owners == 0).tolist()
        alone = [index for index, page in enumerate(live.pages) if self._owners[page] == 1]
        for index, page in zip(alone, reversed(free), strict=False):
            self._owners[live.pages[index]] -= 1
            live.pages[index] = page
            self._owners[page] += 1
            self._fill_pages([page], GARBAGE)
        self.spoil_free()
        self.compute(live)

    # The cache.

    def compute(self, live: LiveRequest) -> None:
        """Write the keys and values of computed tokens, as earlier steps would have."""
        positions = np.arange(live.computed)
        where = np.divmod(self.slots(live, positions), self.pages.page_size)
        for cache in self.caches:
            page, offset = (torch.from_numpy(each).to(cache.tables.by_token.device) for each in where)
            for tensor, expected in zip(cache.tensors(), cache.of_request(live.tokens, positions), strict=True):
                tensor[page, offset] = expected.view(-1, *tensor.shape[2:])
        self.rewind(live)

    def rewind(self, live: LiveRequest) -> None:
        """Restore what a forward of the target moves on, other than slots: nothing, in the suite's own models."""

    def slots(self, live: LiveRequest, positions: np.ndarray) -> np.ndarray:
        """Return the slots of positions, ``int64[n]``."""
        page, offset = np.divmod(positions, self.pages.page_size)
        return np.asarray(live.pages, dtype=np.int64)[page] * self.pages.page_size + offset

    def spoil_free(self) -> None:
        """Fill pages that no request owns, the null page included, with NaN."""
        free = [] if "free pages" in self.spared else np.flatnonzero(self._owners == 0).tolist()
        null = [] if "null page" in self.spared else [NULL_PAGE]
        self._fill_pages([*free, *null], float("nan"))

    def refresh(self) -> None:
        """Restore the whole cache, after other requests used it."""
        self._fill_pages(list(range(self.pages.num_pages)), GARBAGE)
        self.spoil_free()
        for live in self.live.values():
            self.compute(live)

    def _fill_pages(self, pages: list[int], value: float) -> None:
        if not pages:
            return
        for layer in (layer for cache in self.caches for layer in cache.layers):
            layer.keys[pages] = value
            layer.values[pages] = -value  # another number, so that keys taken for values show
