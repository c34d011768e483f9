"""vLLM's own graphs of encoders: which models have them, and the budgets that its manager makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

FRAMES = 1


def of_class(architecture: str) -> Any:
    """Return the engine's class of an architecture if it captures its encoder, or None."""
    from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
    from vllm.model_executor.models.registry import ModelRegistry

    found = ModelRegistry.models[architecture].load_model_cls()
    return found if supports_encoder_cudagraph(found) else None


def least(found: Any, config: Any = None) -> int | None:
    """Return the least budget of a class; None where it depends on more than ``config``."""
    limits = SimpleNamespace(max_num_batched_tokens=1 << 30, max_model_len=1 << 30)
    engine = SimpleNamespace(scheduler_config=limits, model_config=limits)
    model = SimpleNamespace(model_config=limits, config=config, vllm_config=engine)
    try:
        return int(found.get_encoder_cudagraph_budget_range(model, engine)[0])
    except AttributeError:
        return None


def budgets(config: Any, mode: str) -> list[Any] | None:
    """Return the budgets and the most images of the engine's manager, as both model runners would make it; else None.

    ``mode`` is the resolved one of the language model, without which model runner V1 captures nothing.
    """
    model, compilation = config.model_config, config.compilation_config
    if not compilation.cudagraph_mm_encoder or model.enforce_eager or not model.is_multimodal_model:
        return None
    if mode == "NONE" and not config.use_v2_model_runner:
        return None
    found = of_class(model.architectures[0])
    if found is None:
        return None
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
    from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

    own = SimpleNamespace(model_config=model, config=model.hf_config, vllm_config=config)
    encoder = SimpleNamespace(
        get_encoder_cudagraph_config=lambda: EncoderCudaGraphConfig(
            modalities=["image"], buffer_keys=[], out_hidden_size=1, max_frames_per_video=FRAMES
        ),
        get_encoder_cudagraph_budget_range=lambda config: found.get_encoder_cudagraph_budget_range(own, config),
    )
    manager = EncoderCudaGraphManager(config, None, None, encoder)
    return [*manager.path_token_budgets.values(), manager.max_batch_size]
