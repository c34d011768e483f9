"""Rows of dummy inputs that count as tokens while the target of a mixture of experts is timed.

vLLM captures with rows that are marked as padding and all hold token 0 (v1/worker/gpu/cudagraph_utils.py, 0.33). The
routers of a mixture give padding to no expert (``VLLM_MOE_SKIP_PADDING``), and equal tokens to the same few. So a
replay on such rows takes what the padding of a batch takes, without the experts of its tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs


@attrs.frozen
class DummyRows:
    """The rows of a model runner whose target is a mixture that skips padding."""

    _buffers: Any
    """vLLM's ``InputBuffers``."""
    _vocab_size: int

    @classmethod
    def of(cls, runner: Any, note: Callable[[str], None]) -> DummyRows | None:
        """Return the rows of a model runner; None: they stay padding, with a note where that matters."""
        if not getattr(sys.modules.get("vllm.envs"), "VLLM_MOE_SKIP_PADDING", False):
            return None
        drafter = getattr(runner.vllm_config.speculative_config, "draft_model_config", None)
        reasons = {}
        if is_mixture := _num_experts(runner.vllm_config.model_config) > 0:
            reasons["target"] = _obstacle(runner)
        if _num_experts(drafter):
            reasons["drafter"] = "only the target's are timed on tokens"
        for name, reason in reasons.items():
            if reason is not None:
                note(f"graphs of the {name} were timed on padding, which its experts skip: {reason}")
        fills = is_mixture and reasons["target"] is None
        return cls(runner.input_buffers, int(runner.vocab_size)) if fills else None

    def fill(self, tokens: int) -> None:
        """Let the first rows count as tokens, each with an id of its own, and the others be padding."""
        import torch

        ids = self._buffers.input_ids
        # Of a generator of our own: the engine's random numbers stay those that it has without a profile.
        ids.random_(0, self._vocab_size, generator=torch.Generator(ids.device).manual_seed(0))
        self._buffers.is_padding.fill_(True)
        self._buffers.is_padding[:tokens].fill_(False)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Make all rows padding again at the end, as a capture leaves them."""
        import torch

        try:
            yield
        finally:
            # As vLLM makes its buffers: they cannot be written outside of this mode.
            with torch.inference_mode():
                self._buffers.input_ids.zero_()
                self._buffers.is_padding.fill_(True)


def _obstacle(runner: Any) -> str | None:
    """Return why the rows of a target cannot count as tokens; None: they can."""
    if not all(hasattr(getattr(runner, "input_buffers", None), name) for name in ("input_ids", "is_padding")):
        return "this release has other buffers for its inputs"
    if getattr(runner.vllm_config.parallel_config, "enable_eplb", False):
        return "vLLM would count tokens in the load by which it places experts"
    if getattr(runner, "pcp_manager", None) is not None:
        return "prefill context parallelism has buffers of its own"
    return None


def _num_experts(config: Any) -> int:
    return int(config.get_num_experts()) if hasattr(config, "get_num_experts") else 0
