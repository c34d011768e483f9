"""A drafter's configuration and backends, as SGLang's own functions make them without a GPU."""

from __future__ import annotations

import contextlib
import types
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


def backends(m: Any, spec: Any, draft: Any) -> tuple[Any, Any]:
    """Return a drafter's backends of decodes and of its first pass; for ordinary attention any will do."""
    if draft.attention_arch == m.configs.AttentionArch.MLA:
        return _latent(m, spec)
    backend = object.__new__(m.attention.FlashAttentionBackend)
    return backend, backend


def _latent(m: Any, spec: Any) -> tuple[Any, Any]:
    """Run SGLang's factory of a drafter's backends; what a constructor refuses before it needs a device counts."""
    shells = [m.attention.FlashAttentionBackend, m.triton_attention.TritonAttnBackend]
    shells += [getattr(m, name) for name in ("flashinfer_mla", "flashmla", "trtllm_mla", "cutedsl_mla")]
    kinds = {
        kind
        for each in shells
        for kind in (vars(each).values() if isinstance(each, types.ModuleType) else [each])
        if isinstance(kind, type) and kind.__name__.endswith("Backend")
    }
    kinds |= {m.triton_attention.TritonMultiStepDraftBackend, m.attention.FlashAttentionMultiStepBackend}
    kept = {kind: kind.__init__ for kind in kinds}

    def shell(made: Any, *arguments: Any, **named: Any) -> None:
        if "MultiStep" in type(made).__name__:
            with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                kept[type(made)](made, *arguments, **named)
            made.attn_backends = []

    text = types.SimpleNamespace()
    runner = types.SimpleNamespace(
        use_mla_backend=True,
        draft_attention_backend=None,
        model_config=types.SimpleNamespace(hf_config=text, hf_text_config=text),
    )
    for kind in kinds:
        kind.__init__ = shell
    try:
        factory = m.drafts.DraftBackendFactory(runner, spec.speculative_eagle_topk, spec.speculative_num_steps)
        return factory.create_decode_backend(), factory.create_draft_extend_backend()
    finally:
        for kind, init in kept.items():
            kind.__init__ = init
