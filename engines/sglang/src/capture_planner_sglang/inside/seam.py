"""The places of SGLang 0.5.23 that the plugin hooks, and the check that they are what it knows."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import attrs

from capture_planner.engines.inside import resolve
from capture_planner.modes import Role

LOG = logging.getLogger("capture_planner.sglang")

# The hooks depend on names within functions, which patch releases change too.
VERSIONS = ("0.5.23",)

_RUNNER = "sglang.srt.model_executor.runner"
RUNNERS: Mapping[Role, str] = {
    Role.TARGET: f"{_RUNNER}.decode_cuda_graph_runner.DecodeCudaGraphRunner",
    Role.DRAFT_PREFILL: ("sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"),
    Role.DRAFT_DECODE: "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
}
"""The class of each role's decode graphs."""

PREFILL_RUNNER = f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
"""The class of prompts' graphs, of the target and of a drafter."""

CONTEXT = "sglang.srt.runtime_context"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
PROCESS_RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
SIZES = f"{_RUNNER}.base_cuda_graph_runner.get_batch_sizes_to_capture"
CAPTURE = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph"
DRAFT_CLASS = "sglang.srt.speculative.eagle_worker_v2._select_spec_graph_runner_cls"
EAGER = f"{_RUNNER}.eager_runner.EagerRunner.execute"
DRAFT_CHAIN = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
ACCEPTED = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
)


@attrs.frozen
class HookedFunction:
    """A function of SGLang: its path, its parameters, and attributes that its code must name."""

    path: str
    parameters: tuple[str, ...]
    names: frozenset[str] = frozenset()


_BUILT = frozenset({"capture_bs", "captured_req_width", "max_bs", "capture"})
_EAGLE = ("self", "eagle_worker")

APPLY = (
    HookedFunction(SCHEDULER, ("self", "server_args", "port_args")),
    HookedFunction(
        SIZES,
        ("model_runner", "captured_req_width", "gathered_buffer_required"),
        frozenset({"cuda_graph_config", "decode", "bs", "req_to_token_pool", "size"}),
    ),
    HookedFunction(CAPTURE, ("model_runner",), frozenset({"GraphCapture", "is_draft_worker"})),
    HookedFunction(DRAFT_CLASS, ("builtin_runner_cls", "oot_runner_cls")),
    HookedFunction(
        f"{RUNNERS[Role.TARGET]}.__init__",
        (
            *("self", "model_runner", "attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"),
            "record_nolora_graph",
        ),
        _BUILT,
    ),
    HookedFunction(
        f"{RUNNERS[Role.DRAFT_PREFILL]}.__init__",
        (*_EAGLE, "draft_extend_attn_backend", "speculative_num_steps"),
        _BUILT,
    ),
    HookedFunction(
        f"{RUNNERS[Role.DRAFT_DECODE]}.__init__", (*_EAGLE, "draft_attn_backend", "speculative_num_steps"), _BUILT
    ),
)
"""Functions that are hooked to apply a plan."""

_SHAPE = ("self", "size", "forward", "stream_idx", "variant_label", "attention_variant")
_EXECUTED = ("self", "forward_batch")

OBSERVE = (
    *(each for each in APPLY if each.path.endswith("__init__")),
    HookedFunction(f"{PREFILL_RUNNER}.__init__", ("self", "model_runner"), frozenset({"capture_num_tokens", "max_bs"})),
    *(HookedFunction(f"{runner}.capture_one_shape", _SHAPE) for runner in RUNNERS.values()),
    HookedFunction(f"{PREFILL_RUNNER}.capture_one_shape", ("self", "size", "prefix_num_chunks")),
    HookedFunction(
        f"{RUNNERS[Role.TARGET]}.execute", (*_EXECUTED, "pp_proxy_tensors"), frozenset({"_replay_graph_key"})
    ),
    HookedFunction(f"{RUNNERS[Role.DRAFT_PREFILL]}.execute", (*_EXECUTED, "select_index"), frozenset({"bs"})),
    HookedFunction(f"{RUNNERS[Role.DRAFT_DECODE]}.execute", _EXECUTED, frozenset({"bs"})),
    HookedFunction(f"{PREFILL_RUNNER}.execute", (*_EXECUTED, "kwargs"), frozenset({"_shape_key"})),
    HookedFunction(EAGER, (*_EXECUTED, "pp_proxy_tensors", "kwargs"), frozenset({"is_decode", "is_idle"})),
    HookedFunction(DRAFT_CHAIN, _EXECUTED, frozenset({"speculative_num_steps", "topk"})),
    HookedFunction(RUN_BATCH, ("self", "batch", "pp_proxy_tensors"), frozenset({"after_idle_gap", "forward_iter"})),
    HookedFunction(PROCESS_RESULT, ("self", "batch", "result")),
    HookedFunction(ACCEPTED, ("self", "result", "batch"), frozenset({"num_correct_drafts_per_req_cpu"})),
)
"""Functions that are hooked to observe."""


def context() -> ModuleType:
    """Return SGLang's module of resolved values."""
    return importlib.import_module(CONTEXT)


def unknown(seams: tuple[HookedFunction, ...], find: Callable[[str], Any] = resolve) -> Iterator[str]:
    """Yield what differs from the SGLang that the plugin knows: the version first, then each function."""
    version = find("sglang.version").__version__
    # Of another release its number says more than a list of functions.
    if version not in VERSIONS:
        yield f"SGLang is {version}, the plugin knows {', '.join(VERSIONS)}"
        return
    for seam in seams:
        try:
            # Another plugin may have wrapped it first.
            function = inspect.unwrap(find(seam.path))
        except (ImportError, AttributeError) as error:
            yield f"{seam.path}: {error}"
            continue
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != seam.parameters:
            yield f"{seam.path} takes {', '.join(parameters)}, not {', '.join(seam.parameters)}"
        # A function can keep its parameters and do something else; the hooks rely on these names.
        missing = seam.names - _names(function.__code__)
        if missing:
            yield f"{seam.path} does not use {', '.join(sorted(missing))}"


def _names(code: Any) -> set[str]:
    """Return all names in a function's code, with those of the functions in it."""
    inner = (each for each in code.co_consts if inspect.iscode(each))
    return {*code.co_names, *(name for each in inner for name in _names(each))}
