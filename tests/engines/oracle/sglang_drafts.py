"""A drafter's configuration and backends, as SGLang's own functions make them without a GPU."""

from __future__ import annotations

import contextlib
import types
from functools import cache
from typing import Any


def config(m: Any, record: Any, algorithm: Any) -> Any:
    """Return the configuration of the draft, with the class that SGLang makes of a checkpoint; None without one."""
    if not (algorithm.is_eagle() or algorithm.is_standalone()):
        return None
    path = m.memory.resolving_view(record).speculative_draft_model_path
    return m.configs.ModelConfig.from_server_args(record, model_path=path, is_draft_model=True)


def sizes(spec: Any) -> list[int]:
    """Return steps, branches and verified tokens."""
    return [spec.speculative_num_steps, spec.speculative_eagle_topk, spec.speculative_num_draft_tokens]


_SHELLS = (
    *("attention", "triton_attention", "flashinfer", "flashinfer_mla", "trtllm_attention", "flashmla", "trtllm_mla"),
    *("cutedsl_mla", "sparse"),
)
"""Modules of backends that a draft can have."""


@cache
def _kinds(*modules: Any) -> frozenset[Any]:
    """Return the backends' classes, and those of their steps."""
    found = (kind for module in modules for kind in vars(module).values())
    return frozenset(kind for kind in found if isinstance(kind, type) and kind.__name__.endswith("Backend"))


def backends(m: Any, spec: Any, draft: Any) -> tuple[Any, Any]:
    """Run SGLang's factory of a drafter's backends; what a constructor refuses before it needs a device counts."""
    kept = {kind: kind.__init__ for kind in _kinds(*(getattr(m, name) for name in _SHELLS))}

    def shell(kind: Any) -> Any:
        def init(made: Any, *arguments: Any, **named: Any) -> None:
            if "MultiStep" in kind.__name__:
                with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                    kept[kind](made, *arguments, **named)
                made.attn_backends = []

        return init

    runner = types.SimpleNamespace(
        init_new_workspace=False,
        plan_stream_for_flashinfer=object(),
        use_mla_backend=draft.attention_arch == m.configs.AttentionArch.MLA,
        draft_attention_backend=spec.speculative_draft_attention_backend,
        model_config=draft,
    )
    for kind in kept:
        kind.__init__ = shell(kind)
    try:
        if spec.speculative_draft_attention_backend:
            m.registry.ATTENTION_BACKENDS[spec.speculative_draft_attention_backend](runner)
        factory = m.drafts.DraftBackendFactory(runner, spec.speculative_eagle_topk, spec.speculative_num_steps)
        return factory.create_decode_backend(), factory.create_draft_extend_backend()
    finally:
        for kind, init in kept.items():
            kind.__init__ = init
