"""The requests of a scene: their tokens, their pages, and what the cache must hold of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from capture_planner.conformance.probe import Tables
from capture_planner.conformance.scene import VOCABULARY, Arrive
from capture_planner.runtime.executor import NULL_PAGE, LayerCache
from capture_planner.runtime.serving.kv import PageFormat

GARBAGE = 6.0
"""What stands in the owned slots that nobody wrote: finite, as keys of others are, and far from them."""


@attrs.define(eq=False)
class Live:
    """One request."""

    number: int
    place: int
    tokens: np.ndarray
    """``int64[longest + lookahead]``: all that it will ever read, known from the first."""
    prompt: int
    computed: int
    """Tokens whose keys and values are settled."""
    pages: list[int]


@attrs.define(eq=False)
class Family:
    """The tables of one model with the cache that its roles share."""

    tables: Tables
    caches: Sequence[LayerCache]
    shift: int
    """How many positions after its own the token of a row stands: 0 of a target, 1 of a drafter."""

    def flat(self) -> Iterator[torch.Tensor]:
        """Yield keys and values of each layer, ``[slots, kv_heads * dim]``."""
        for cache in self.caches:
            for tensor in (cache.keys, cache.values):
                yield tensor.flatten(0, 1).flatten(1)

    def made(self, ids: torch.Tensor, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield what ``flat`` must hold of tokens at positions, ``[T, kv_heads * dim]`` each."""
        _, keys, values = self.tables.split(ids, positions)
        for layer in range(len(self.caches)):
            yield keys[:, layer].flatten(1)
            yield values[:, layer].flatten(1)


class World:
    """Who is there, in which pages. A page may belong to several that share a prefix."""

    def __init__(
        self,
        families: Sequence[Family],
        pages: PageFormat,
        places: int,
        longest: int,
        lookahead: int,
        seed: int,
    ) -> None:
        self.families, self.pages = tuple(families), pages
        self.live: dict[int, Live] = {}
        self._longest, self._lookahead, self._seed = longest, lookahead, seed
        self._places = list(range(places))
        self._owners = np.zeros(pages.num_pages, dtype=np.int64)
        self._owners[NULL_PAGE] = 1
        self._arrived = 0
        self.is_spoilt = {"free pages": True, "null page": True}

    # Coming and going.

    def arrive(self, step: Arrive) -> Live | None:
        """Let a request in; None where there is no place or no page for it."""
        number, self._arrived = self._arrived, self._arrived + 1
        draw = np.random.default_rng((self._seed, number))
        tokens = draw.integers(0, VOCABULARY, self._longest + self._lookahead)
        prompt = max(1, min(step.prompt, self._longest))
        computed = max(0, min(step.computed, self._longest - 1))
        other = None if step.shares is None else self.live.get(step.shares)
        shared: list[int] = []
        if other is not None:
            shared = other.pages[: min(other.computed, computed) // self.pages.page_size]
            tokens[: len(shared) * self.pages.page_size + 1] = other.tokens[
                : len(shared) * self.pages.page_size + 1
            ]
        free = np.flatnonzero(self._owners == 0).tolist()
        wanted = self.pages.pages(self._longest) - len(shared)
        if not self._places or len(free) < wanted:
            return None
        # Any of the free ones, in any order: a block table is no range.
        own = draw.permutation(free)[:wanted].tolist()
        place = self._places.pop(int(draw.integers(len(self._places))))
        live = Live(number, place, tokens, prompt, computed, shared + own)
        self._owners[live.pages] += 1
        self._fill_pages(own, GARBAGE)
        self.live[number] = live
        self.compute(live)
        return live

    def depart(self, live: Live) -> None:
        """Let it go; what nobody has any more is free."""
        del self.live[live.number]
        self._places.append(live.place)
        self._owners[live.pages] -= 1
        self.spoil_free()

    def move(self, live: Live) -> None:
        """Give it other pages for its own ones, as far as there are free ones."""
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

    def compute(self, live: Live) -> None:
        """Write keys and values of all that is settled, as steps before would have."""
        positions = np.arange(live.computed)
        slots = self.slots(live, positions)
        for family in self.families:
            ids, at = self._on(family, live.tokens[positions + family.shift], positions)
            where = torch.from_numpy(slots).to(ids.device)
            for cache, made in zip(family.flat(), family.made(ids, at), strict=True):
                cache[where] = made

    def slots(self, live: Live, positions: np.ndarray) -> np.ndarray:
        """Return the slots of positions, ``int64[n]``."""
        page, offset = np.divmod(positions, self.pages.page_size)
        return np.asarray(live.pages, dtype=np.int64)[page] * self.pages.page_size + offset

    def spoil_free(self) -> None:
        """Overwrite what no request has, the null page included, with what nobody may read."""
        free = np.flatnonzero(self._owners == 0).tolist() if self.is_spoilt["free pages"] else []
        null = [NULL_PAGE] if self.is_spoilt["null page"] else []
        self._fill_pages([*free, *null], float("nan"))

    def refresh(self) -> None:
        """Make the cache anew, after somebody else had it."""
        self._fill_pages(list(range(self.pages.num_pages)), GARBAGE)
        self.spoil_free()
        for live in self.live.values():
            self.compute(live)

    def _fill_pages(self, pages: list[int], value: float) -> None:
        if not pages:
            return
        for family in self.families:
            for cache in family.caches:
                cache.keys[pages] = value
                cache.values[pages] = -value

    @staticmethod
    def _on(family: Family, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        device = family.tables.by_token.device
        return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
