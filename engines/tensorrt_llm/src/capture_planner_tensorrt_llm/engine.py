"""Flags -> emulation: each rule of ``rules``, with what it made of the flags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from capture_planner.engines.emulation import Decisions, Emulation, Setting
from capture_planner.engines.engine import DYNAMO, Engine
from capture_planner.engines.parsing import refusal
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits, Parallel
from capture_planner.records.text import counted
from capture_planner_tensorrt_llm import rules
from capture_planner_tensorrt_llm.configuration import resolve
from capture_planner_tensorrt_llm.export import export_tensorrt_llm
from capture_planner_tensorrt_llm.fixes import TensorRTLLMFixes
from capture_planner_tensorrt_llm.flags import FLAGS
from capture_planner_tensorrt_llm.logs import LOGS
from capture_planner_tensorrt_llm.manager import TargetGraphs
from capture_planner_tensorrt_llm.settings import Drafting, GraphConfig, ServeSettings

NAME = "tensorrt-llm"
VERSION = "1.3.0rc"
"""There is no release with all of these rules; ``rules`` names the commits that they were read at."""
_SAME = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
"""Flags that a worker of Dynamo has too, written with dashes."""
BY_LENGTH = (
    "sparse attention skips its indexer for short sequences, so each graph counts once and may be captured twice; "
    "the same batches have one"
)


def emulate(command: Sequence[str], environment: Environment) -> Emulation:
    """Return what TensorRT-LLM captures with these flags; raises ``FlagError`` with all that is wrong."""
    del environment  # No rule depends on it.
    resolved = resolve(command)
    decisions = Decisions()
    graphs, source = _graphs(resolved, decisions)
    drafting, requests, tokens = resolved.drafting, resolved.max_batch_size, resolved.max_num_tokens
    return Emulation(
        engine=NAME,
        version=VERSION,
        command=tuple(command),
        settings=_settings(resolved, graphs, source),
        sizes=graphs.sizes,
        asked_sizes=tuple(resolved.graphs.batch_sizes or ()) if resolved.graphs else (),
        managers=(graphs,),
        decisions=tuple(decisions),
        limits=Limits(max_num_reqs=requests, max_num_tokens=tokens),
        speculative=None if drafting is None else drafting.speculative(requests, tokens),
        assumptions=(BY_LENGTH,) if resolved.by_length and graphs.shapes else (),
        # With attention DP each tensor-parallel rank schedules batches of its own.
        parallel=Parallel(data=resolved.tensor) if resolved.attention_dp else Parallel(tensor=resolved.tensor),
    )


ENGINE = Engine(
    name=NAME,
    version=VERSION,
    emulate=emulate,
    export=export_tensorrt_llm,
    flags=FLAGS,
    logs=LOGS,
    programs=("trtllm-serve serve", "trtllm-serve", "python -m dynamo.trtllm", "serve"),
    wrappers={
        "python -m dynamo.trtllm": {
            **DYNAMO,
            **dict.fromkeys(("--model", "--model-path"), ""),
            **dict.fromkeys(("--served-model-name", "--disaggregation-mode", "--kv-block-size"), 1),
            **dict.fromkeys(("--free-gpu-memory-fraction", "--expert-parallel-size", "--gpus-per-node"), 1),
            "--extra-engine-args": "--extra_llm_api_options",
            "--tensor-parallel-size": "--tp_size",
            "--pipeline-parallel-size": "--pp_size",
            **{f"--{name.replace('_', '-')}": f"--{name}" for name in _SAME},
        }
    },
    limits=("--max_batch_size", "--max_num_tokens", "--config"),
    fixes=TensorRTLLMFixes(),
    aliases=("trtllm-serve", "trtllm", "trt-llm"),
)


def _graphs(resolved: ServeSettings, decisions: Decisions) -> tuple[TargetGraphs, str]:
    """Apply the rules and record their decisions; return the graphs and the source of their sizes."""
    for name in resolved.overridden:
        decisions.note("flag-over-file", "file", "flag", f"the flag overrides {name} of the file")
    drafting = resolved.drafting
    if drafting is not None:
        _note_drafting(drafting, resolved, decisions)
    if resolved.graphs is None:
        decisions.note("graphs-off", None, "NONE", "cuda_graph_config is null, so every batch runs eager")
        return TargetGraphs(sizes=(), shapes=(), padding=False, max_batch_size=resolved.max_batch_size), "file"
    sizes, padding, source = _sizes(resolved.graphs, drafting, decisions)
    most = rules.most_together(resolved.max_batch_size, resolved.max_num_tokens, resolved.width)
    admitted = rules.admitted_sizes(sizes, most, padding)
    if admitted != sizes:
        dropped = tuple(size for size in sizes if size not in admitted)
        says = (
            f"at most {counted(most, 'request')} of up to {counted(resolved.width, 'token')} fit into a batch, "
            "so larger sizes are dropped"
        )
        if most in admitted and most not in sizes:
            says += f"; with padding, {most} replaces the first of them"
        decisions.note("sizes-admitted", dropped, tuple(s for s in admitted if s not in sizes), says)
        source = "sizes-admitted"
    schedule = resolved.schedule
    if schedule is not None and not admitted:
        raise refusal(
            "--max_num_tokens",
            "TensorRT-LLM refuses it: start-up needs the largest capture size, and no size is left; "
            f"{resolved.max_num_tokens} tokens do not hold one request of {resolved.width}",
            f"give at least {resolved.width}",
        )
    lengths, longest = ((0,), 0) if drafting is None else (drafting.draft_lens, drafting.max_draft_len)
    shapes = rules.captured_shapes(admitted, lengths, schedule, longest)
    _note_shapes(admitted, shapes, resolved, decisions)
    return TargetGraphs(
        sizes=tuple(dict.fromkeys(admitted)),
        shapes=shapes,
        padding=padding,
        max_batch_size=resolved.max_batch_size,
        drafting=drafting,
        schedule=schedule,
    ), source


def _note_drafting(drafting: Drafting, resolved: ServeSettings, decisions: Decisions) -> None:
    if drafting.decoding_type == "Eagle":
        decisions.note("eagle-is-eagle3", "Eagle", "Eagle3", "the PyTorch backend treats Eagle as Eagle3")
    if drafting.algorithm.one_engine:
        says = f"the drafter of {drafting.decoding_type} runs inside the target's graphs, so only the target has a role"
        decisions.note("one-engine", drafting.decoding_type, "target", says)
    schedule = drafting.schedule
    if schedule is not None and resolved.schedule is None:
        says = f"{drafting.decoding_type} pads drafts to the longest, so the schedule does not change query lengths"
        decisions.note("schedule-without-effect", _written(schedule), drafting.max_draft_len, says)


def _sizes(config: GraphConfig, drafting: Drafting | None, decisions: Decisions) -> tuple[tuple[int, ...], bool, str]:
    """Return the sizes before any is dropped, whether batches are padded, and where the sizes come from."""
    padding, source = config.enable_padding, "file"
    sizes = rules.configured_sizes(config.batch_sizes, config.max_batch_size, padding)
    if config.batch_sizes is None:
        top = config.max_batch_size or rules.DEFAULT_MAX_BATCH_SIZE
        switch, kind = ("on", "eights, and 64s above 128") if padding else ("off", "all up to 32, then powers of two")
        origin = "" if config.max_batch_size else ", the default"
        says = f"batch_sizes is not set, so sizes are generated up to {top}{origin}; with padding {switch}: {kind}"
        decisions.note("generated-sizes", None, sizes, says)
        source = "generated-sizes"
    elif sizes != config.batch_sizes:
        decisions.note("sizes-sorted", config.batch_sizes, sizes, "sizes are sorted in ascending order")
        source = "sizes-sorted"
    schedule = None if drafting is None else drafting.schedule
    if schedule is None:
        return sizes, padding, source
    if not padding:
        padding = True
        says = "with a schedule of draft lengths, batches are always padded; enable_padding is ignored"
        decisions.note("schedule-pads", False, True, says)
    with_thresholds = rules.with_thresholds(sizes, schedule)
    if with_thresholds != sizes:
        added = tuple(size for size in with_thresholds if size not in sizes)
        says = "the thresholds of the schedule, up to the largest size, are added to the sizes"
        decisions.note("schedule-sizes", None, added, says)
        source = "schedule-sizes"
    return with_thresholds, padding, source


def _note_shapes(
    sizes: Sequence[int], shapes: Sequence[rules.Shape], resolved: ServeSettings, decisions: Decisions
) -> None:
    drafting, schedule = resolved.drafting, resolved.schedule
    if not shapes:
        decisions.note("graphs-off", "FULL_DECODE_ONLY", "NONE", "no size is left, so every batch runs eager")
        return
    if schedule is not None and drafting is not None:
        says = (
            "each size is captured with the draft length of its threshold; the largest size is also captured with "
            "the maximum draft length, so that no later graph grows the shared workspace"
        )
        decisions.note("schedule-graphs", _written(schedule), counted(len(shapes), "graph"), says)
    elif drafting is not None and len(drafting.draft_lens) > 1:
        says = (
            f"batches of more than {drafting.max_concurrency} requests do not draft, so each size is captured "
            "with and without drafts"
        )
        decisions.note("graphs-without-drafts", len(set(sizes)), len(shapes), says)
    decisions.note("decode-only", "any batch", "decodes", "batches with a prompt run eager")
    if drafting is not None and drafting.algorithm.one_engine:
        says = "each shape is captured twice: for greedy batches, and for batches that sample"
        decisions.note("sampling-variants", len(shapes), 2 * len(shapes), says)
    if resolved.attention_dp and resolved.tensor > 1:
        says = (
            f"a graph runs only if all {resolved.tensor} ranks decode, and have the same number of requests "
            "after padding to the largest rank"
        )
        decisions.note("ranks-agree", "each rank", "all ranks", says)


def _written(schedule: Mapping[int, int]) -> str:
    return ", ".join(f"{draft_len} to {threshold}" for threshold, draft_len in schedule.items())


def _settings(resolved: ServeSettings, graphs: TargetGraphs, sizes_source: str) -> tuple[Setting, ...]:
    drafting, config = resolved.drafting, "cuda_graph_config"
    values: dict[str, Any] = {
        "max_batch_size": resolved.max_batch_size,
        "max_num_tokens": resolved.max_num_tokens,
        "tensor_parallel_size": resolved.tensor,
        "enable_attention_dp": resolved.attention_dp,
    }
    sources = defaultdict(lambda: "default", resolved.sources)
    rows = [(name, value, sources[name]) for name, value in values.items()]
    if resolved.graphs is None:
        rows.append((config, None, sources[config]))
    else:
        changed = graphs.padding is not resolved.graphs.enable_padding
        rows.append((f"{config}.enable_padding", graphs.padding, "schedule-pads" if changed else sources[config]))
        rows.append((f"{config}.batch_sizes", list(graphs.sizes), sizes_source))
    if drafting is None:
        rows.append(("speculative_config", None, "default"))
    else:
        values = {
            "decoding_type": drafting.decoding_type,
            "max_draft_len": drafting.max_draft_len,
            "max_total_draft_tokens": drafting.total_draft_tokens,
            "draft_len_schedule": drafting.schedule and {str(k): v for k, v in drafting.schedule.items()},
            "max_concurrency": drafting.max_concurrency,
        }
        rows += [(f"speculative_config.{name}", value, "file") for name, value in values.items()]
    return tuple(Setting(name=name, value=value, source=source) for name, value, source in rows)
