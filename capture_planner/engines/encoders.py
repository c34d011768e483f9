"""The graphs of a multimodal model's encoder, which an engine captures apart from those of the language model."""

from __future__ import annotations

from bisect import bisect_left

import attrs


@attrs.frozen(kw_only=True)
class EncoderGraphs:
    """One graph for each budget: images are packed into the smallest one that holds the tokens that they become."""

    budgets: tuple[int, ...]
    """In tokens that leave the encoder, ascending."""
    max_items: int
    """Most images or videos in one replay."""
    reach: int
    """The most tokens that one batch of images can become."""

    def budget(self, tokens: int, items: int = 1) -> int | None:
        """Return the budget that images of so many tokens in all are padded to; None: they run eager, or apart."""
        at = bisect_left(self.budgets, tokens)
        return self.budgets[at] if items <= self.max_items and at < len(self.budgets) else None
