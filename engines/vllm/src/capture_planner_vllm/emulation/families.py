"""Families of graphs other than those of plain batches: what settings show of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capture_planner.engines import checkpoints
from capture_planner.engines.emulation import EncoderGraphs
from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphMode
from capture_planner_vllm.emulation.config import Configuration
from capture_planner_vllm.emulation.encoder_budgets import ENCODER, encoders, is_limited_to_text
from capture_planner_vllm.emulation.refusals import not_emulated
from capture_planner_vllm.emulation.settings import RunnerVersion, VllmSettings

_KEY = "cudagraph_mm_encoder"


def check_families(settings: VllmSettings) -> None:
    """Raise ``NotEmulated`` where model runner V1 captures graphs of microbatches while it serves, or mixes them up."""
    if settings.mode is GraphMode.NONE or settings.overlap is None or settings.runner is RunnerVersion.V2:
        return
    if settings.mode is GraphMode.FULL:
        subject = "model runner V1 captures FULL graphs of microbatches while it serves"
        raise not_emulated("--enable-dbo", subject, "request FULL_AND_PIECEWISE, or leave it out")
    if settings.max_loras:
        subject = "model runner V1 has one graph of microbatches for all numbers of adapters"
        raise not_emulated("--enable-dbo", subject, "leave it out, or drop the adapters")


def encoder_graphs(settings: VllmSettings, configuration: Configuration) -> tuple[EncoderGraphs, ...]:
    """Return the graphs of the model's encoder; raises ``FlagError`` where vLLM stops or they are not emulated.

    Model runner V2 captures them without graphs of the language model too, V1 only with these.
    """
    line, model, options = configuration.line, configuration.model, configuration.encoder
    if not options.asked or configuration.eager or model.odd is not None:
        return ()
    if model.multimodal and line.get("language_model_only", False):
        message = "vLLM refuses it with graphs of the encoder, which never runs then"
        raise refusal("--language-model-only", message, "drop one of both")
    if settings.runner is RunnerVersion.V1 and settings.mode is GraphMode.NONE:
        return ()
    if not model.known:
        raise not_emulated(ENCODER, f"graphs of the encoder of {model.name}", checkpoints.remedy(model.name), _KEY)
    for flag, present in (
        ("--limit-mm-per-prompt", is_limited_to_text(line.get("limit_mm_per_prompt"))),
        ("--video-pruning-rate", bool(line.get("video_pruning_rate"))),
    ):
        if present:
            raise not_emulated(flag, "graphs of the encoder with it", "leave it out")
    if model.architecture in encoders()["others"]:
        subject = f"graphs of the encoder of a {model.architecture}"
        raise not_emulated(ENCODER, subject, "leave it out to see the graphs of the language model", _KEY)
    if model.architecture not in encoders()["doubled"]:
        says = f"vLLM captures no encoder of a {model.architecture or 'text model'}, and says nothing"
        configuration.note("encoder", "graphs", "none", says)
        return ()
    return (options.graphs(min(settings.max_num_batched_tokens, settings.max_model_len)),)


def note_stages(configuration: Configuration) -> None:
    """Note which of the graphs each pipeline stage has, where there are several."""
    stages = configuration.pipeline
    if stages > 1:
        says = f"each of {stages} pipeline stages captures the target's graphs, of its own layers"
        others = {
            "the drafter's are the last stage's": configuration.spec,
            "the encoder runs on the first": configuration.encoder.asked,
        }
        says = "; ".join([says, *(text for text, present in others.items() if present)])
        configuration.note("stages", 1, stages, says)


def shown_families(settings: VllmSettings, configuration: Configuration) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the settings of each family that the engine has graphs of, with their sources."""
    line, overlap = configuration.line, settings.overlap
    if configuration.model.multimodal or configuration.encoder.asked:
        yield _KEY, (configuration.encoder.asked, line.source("compilation_config"))
    if configuration.pipeline > 1:
        yield "pipeline_parallel_size", (configuration.pipeline, line.source("pipeline_parallel_size"))
    if configuration.decode_context > 1:
        flag = "decode_context_parallel_size"
        yield flag, (configuration.decode_context, line.source(flag))
    if overlap is not None:
        name = "enable_dbo" if "enable_dbo" in line.values else "ubatch_size"
        yield "microbatches", (overlap.microbatches, line.source(name))
        for name, value in (("decode", overlap.decode_tokens), ("prefill", overlap.prefill_tokens)):
            flag = f"dbo_{name}_token_threshold"
            yield flag, (value, line.source(flag))
