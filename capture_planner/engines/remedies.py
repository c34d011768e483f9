"""The very flags that mend what the lint of an engine finds, where they can be worked out; else nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.export.mend import mend_vllm, target_decodes
from capture_planner.engines.walk import Run
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.plan import Decision

_GRID = 16
"""vLLM's own sizes above 256 are multiples of it, and the largest one is rounded down to one."""


def of_lacking(emulation: Emulation, found: Iterable[Run]) -> str:
    """Name the size up to which decodes want graphs: where a list is given, as a part of it."""
    decodes = [(run.last, run.query_len or 1) for run in found]
    requests = max(last for last, _ in decodes)
    tokens = max(last * width for last, width in decodes)
    listed = bool(emulation.asked_sizes)
    if emulation.engine == "sglang":
        flag = (
            "add {} to --cuda-graph-bs-decode, and keep the others"
            if listed
            else "raise --cuda-graph-max-bs-decode to {}"
        )
        return flag.format(requests)
    if emulation.engine == "tensorrt-llm":
        config = "cuda_graph_config"
        return (
            f"add {requests} to {config}.batch_sizes, and keep the others"
            if listed
            else f"raise {config}.max_batch_size to {requests}"
        )
    if listed:
        limit = "; --max-cudagraph-capture-size, where it is given, has to be the same"
        return f"add {tokens} to --cudagraph-capture-sizes, and keep the others{limit}"
    if tokens % _GRID == 0:
        return f"raise --max-cudagraph-capture-size to {tokens}"
    # A graph of more requests than there can be is not captured, so that a rounded size would not do.
    own = " ".join(map(str, emulation.sizes))
    return f"give --cudagraph-capture-sizes {own} {tokens}"


def of_missed(emulation: Emulation, role: Role, found: Iterable[Run]) -> str:
    """Name the sizes with which no batch misses a graph that is captured for it."""
    modes, decodes = emulation.modes, any(run.kind is Kind.DECODE for run in found)
    if emulation.engine == "sglang" and not decodes:
        # It takes no graph that pads a prefill to more than twice its tokens.
        return "list sizes in --cuda-graph-bs-prefill at most twice each batch, as far as ranks divide them"
    if emulation.engine != "vllm" or not modes[role].is_separate:
        return ""
    if role is Role.DRAFT_PREFILL and modes[role] is modes[Role.TARGET]:
        return "the list of sizes that mends the target mends this too"
    return _sizes_for_vllm(emulation) if role is Role.TARGET else ""


def _sizes_for_vllm(emulation: Emulation) -> str:
    """Return the list of sizes with which no decode of vLLM's target misses a graph.

    It has no more FULL graphs than there are now, where such a list exists.
    """
    full = [graph.entry for graph in emulation.graphs if graph.role is Role.TARGET and graph.entry.query_len]
    made = mend_vllm(
        target_decodes(emulation),
        emulation.limits.max_num_reqs,
        graphs=len({(entry.num_tokens, entry.query_len) for entry in full}),
        wider=emulation.sizes,
        query_lens={entry.query_len for entry in full if entry.query_len},
    )
    return f"give --cudagraph-capture-sizes {' '.join(map(str, made.sizes))}, with which none does"


def of_unreached(emulation: Emulation, role: Role) -> str:
    """Say what graphs follow from that no flag takes apart."""
    if role.is_drafter:
        return f"nothing to do: the sizes of the {role} are the target's"
    if emulation.engine == "tensorrt-llm":
        return "nothing to do: the schedule of draft lengths adds them"
    flag = "--cudagraph-capture-sizes" if emulation.engine == "vllm" else "--cuda-graph-bs-decode"
    return (
        f"fewer {flag} leave fewer: each is captured for every query length of the schedule and every number of "
        "adapters, and some batch may need the others"
    )


def of_dropped(emulation: Emulation, dropped: Sequence[int]) -> str:
    """Say which limit drops sizes that are asked for."""
    limits, most = emulation.limits, max(dropped)
    if emulation.engine == "vllm" and most > limits.max_num_tokens:
        return f"leave them out, or raise --max-num-batched-tokens from {limits.max_num_tokens} to {most}"
    if emulation.engine == "tensorrt-llm" and most > limits.max_num_reqs:
        return f"leave them out, or raise max_batch_size from {limits.max_num_reqs} to {most}"
    if emulation.engine == "sglang" and most > limits.max_num_reqs:
        most_reqs = limits.max_num_reqs
        return f"leave out sizes above the {most_reqs} requests of a rank, and those that its ranks do not divide"
    return ""


_LOWERED = {
    "deepep": "name another --all2all-backend, such as deepep_low_latency",
    "kv-connector": "leave the KV connector's layerwise transfer out",
    "pooling": "nothing to do: no flag gives such a model more",
    "encoder-decoder": "nothing to do: no flag gives such a model more",
    "stock-compile": "leave -cc.mode at VLLM_COMPILE",
    "compilation": "leave -cc.mode at VLLM_COMPILE",
    "schedule-v1": "leave VLLM_USE_V2_MODEL_RUNNER out: model runner V2 captures schedules",
}
"""What to do about a mode that one of vLLM's rules lowers, by the rule."""


def of_lowered(emulation: Emulation, decision: Decision) -> str:
    """Name the flag that lowered a mode."""
    return _LOWERED.get(decision.rule, "") if emulation.engine == "vllm" else ""


def of_padding(emulation: Emulation, run: Run) -> str:
    """Name sizes between the smallest batch of a run and its graph, each twice the one before it."""
    width = run.query_len or 1
    unit = width if emulation.engine == "vllm" else 1
    padded = max(asked.batch.num_tokens + asked.answer.padded_tokens for asked in run.asked)
    counts = [run.first * unit]
    while counts[-1] * 2 * width < padded * unit:
        counts.append(counts[-1] * 2)
    sizes = " ".join(map(str, counts))
    if emulation.engine == "vllm":
        return f"add {sizes} to --cudagraph-capture-sizes, and keep the others"
    if emulation.engine == "tensorrt-llm":
        return f"add {sizes} to cuda_graph_config.batch_sizes, and keep the others"
    phase = "prefill" if run.kind is Kind.MIXED else "decode"
    return f"add {sizes} to --cuda-graph-bs-{phase}, and keep the others"
