"""vLLM 0.33's graphs of encoders: budgets in powers of two, as ``v1/worker/encoder_cudagraph.py`` makes them.

``encoders.json`` has under ``doubled`` the architectures whose classes capture their encoder with one graph a budget,
from ``LEAST`` tokens on (``get_encoder_cudagraph_budget_range``), and under ``others`` those that capture it and are
not emulated: their budgets depend on the image processor, or each has several graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capture_planner.engines.emulation import EncoderGraphs
from capture_planner.engines.history import json_table
from capture_planner.engines.parsing import refusal
from capture_planner_vllm.emulation.parts import Part

ENCODER = "--compilation-config"
LEAST = 64
"""Tokens that the smallest image becomes, by the classes."""
_ITEMS = "encoder_cudagraph_max_vision_items_per_batch"
_BUDGETS = "encoder_cudagraph_token_budgets"
_FRAMES = "encoder_cudagraph_max_frames_per_batch"


def encoders() -> Mapping[str, Sequence[str]]:
    """Return the architectures with graphs of their encoders: ``doubled`` budgets, and ``others``."""
    return json_table(__package__, "encoders.json")


@attrs.frozen(kw_only=True)
class EncoderOptions:
    """What the flags say of encoder graphs."""

    asked: bool
    budgets: tuple[int, ...] = ()
    """Empty: from the model's range."""
    items: int = 0
    """0: from the budgets."""

    @classmethod
    def of(cls, part: Part) -> EncoderOptions:
        """Read the parts of ``--compilation-config``; raises ``FlagError`` where vLLM refuses them."""
        asked = bool(part.boolean("cudagraph_mm_encoder"))
        budgets, items = part.integers(_BUDGETS) or [], part.integer(_ITEMS) or 0
        if any(budget <= 0 for budget in budgets):
            raise part.refuse(_BUDGETS, f"vLLM requires positive budgets, got {budgets}", "give budgets from 1 on")
        for key in (_ITEMS, _FRAMES):
            if asked and (part.integer(key) or 0) < 0:
                raise part.refuse(key, f"vLLM requires at least 0, got {part.given[key]}", "leave it out")
        return cls(asked=asked, budgets=tuple(sorted(budgets)), items=items)

    def graphs(self, most: int) -> EncoderGraphs:
        """Return the graphs for batches of up to ``most`` tokens."""
        # Given both, vLLM takes them as they are; given one, it infers the other from the model.
        if self.budgets and self.items:
            if self.items > self.budgets[0]:
                message = f"{self.items} images do not fit the least budget of {self.budgets[0]} tokens"
                raise refusal(ENCODER, f"vLLM stops: {message}", "give fewer images, or larger budgets", _ITEMS)
            return EncoderGraphs(budgets=self.budgets, max_items=self.items, reach=most)
        if most < LEAST:
            message = f"vLLM stops: its encoder graphs have {LEAST} tokens or more, and a batch has at most {most}"
            raise refusal(ENCODER, message, "give more --max-num-batched-tokens", "cudagraph_mm_encoder")
        budgets = self.budgets or _doubled(max(LEAST, self.items), most)
        return EncoderGraphs(budgets=budgets, max_items=self.items or min(most // LEAST, budgets[0]), reach=most)


def _doubled(least: int, most: int) -> tuple[int, ...]:
    budgets = [least << power for power in range(most.bit_length()) if least << power <= most]
    return tuple(dict.fromkeys((*budgets, most)))


def is_limited_to_text(limits: Mapping[str, Any] | None) -> bool:
    """Whether some modality is limited to 0, which may leave the encoder out."""
    counts: Sequence[Any] = [
        each.get("count") if isinstance(each, Mapping) else each for each in (limits or {}).values()
    ]
    return 0 in counts
