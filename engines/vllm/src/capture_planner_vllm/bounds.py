"""Flags of vLLM 0.33 that decide nothing about graphs, and keep it from starting where their values are odd."""

from __future__ import annotations

from capture_planner_vllm.flags import Given, refusal
from capture_planner_vllm.model import Model
from capture_planner_vllm.parts import Part

_BASES = ("all", "none")
_LEAST = {"long_prefill_token_threshold": 0, "stream_interval": 1, "max_logprobs": -1}
_EXTERNAL, _HYBRID, _LOCAL, _RANK = (
    *("--data-parallel-external-lb", "--data-parallel-hybrid-lb"),
    *("--data-parallel-size-local", "--data-parallel-rank"),
)


def check_bounds(given: Given, max_model_len: int) -> None:
    """Raise ``FlagError`` for the first value out of its range; ``max_model_len`` is the target's, in tokens."""
    share = given.get("gpu_memory_utilization", 0.9)
    if not 0 < share <= 1:
        raise refusal("--gpu-memory-utilization", f"vLLM wants a share up to 1, got {share}", "as in 0.9")
    for name, least in _LEAST.items():
        value = given.get(name)
        if value is not None and value < least:
            flag = f"--{name.replace('_', '-')}"
            raise refusal(flag, f"vLLM wants at least {least}, got {value}", f"give {least} or more")
    long = given.get("long_prefill_token_threshold") or 0
    if long > max_model_len:
        reason = f"vLLM refuses {long}, more than a prompt's {max_model_len} tokens"
        raise refusal("--long-prefill-token-threshold", reason, "give less, or leave it out")


def check_ranks(given: Given, model: Model, *, data: int, ranks: int) -> None:
    """Raise ``FlagError`` for data parallelism that vLLM cannot launch on one node.

    ``data`` is the number of data-parallel ranks; ``ranks`` that of all among which experts are spread.
    """
    if given.get("enable_eplb", False):
        if not given.get("enable_expert_parallel", False):
            raise refusal("--enable-eplb", "vLLM balances experts that are spread only", "give -ep too")
        if ranks < 2:
            raise refusal("--enable-eplb", "vLLM balances experts over several ranks", "leave it out")
    if given.get("nnodes", 1) > 1:
        return  # the rank and the local size follow from the node
    rank, local = given.get("data_parallel_rank"), given.get("data_parallel_size_local")
    hybrid, external = (
        given.get("data_parallel_hybrid_lb", False),
        given.get("data_parallel_external_lb", False),
    )
    if hybrid and external:
        raise refusal(
            _HYBRID, "vLLM balances in one way, and --data-parallel-external-lb is another", "drop one"
        )
    if external and rank is None:
        raise refusal(_EXTERNAL, "vLLM wants the rank then", f"give {_RANK} too")
    if rank is not None:
        if data == 1:
            raise refusal(_RANK, "vLLM takes a rank of several only", "leave it out")
        if model.known and not model.experts:
            raise refusal(_RANK, "vLLM takes it for models with experts only", "leave it out")
        if local not in (None, 1):
            raise refusal(_LOCAL, f"vLLM runs one rank here where its number is given, not {local}", "give 1")
        if not 0 <= rank < data:
            raise refusal(_RANK, f"vLLM counts {data} ranks from 0, got {rank}", f"give 0 to {data - 1}")
    elif hybrid and local is None:
        raise refusal(_HYBRID, "vLLM wants the number of ranks on this node", f"give {_LOCAL} too")
    if local is not None and local > data:
        raise refusal(_LOCAL, f"vLLM has {data} ranks in all, got {local}", f"give {data} or fewer")


def check_compilation(cc: Part) -> None:
    """Raise ``FlagError`` for the first part of ``--compilation-config`` of another kind than vLLM's."""
    for key in ("splitting_ops", "custom_ops"):
        value = cc.given.get(key) or []
        if not isinstance(value, list):
            raise cc.refuse(key, f"vLLM wants a list of operators, not {value!r}", "as in []")
        for item in value:
            if not isinstance(item, str):
                raise cc.refuse(key, f"vLLM wants names of operators, not {item!r}", "as in []")
    ops = cc.given.get("custom_ops") or ()
    for op in ops:
        if op not in _BASES and not op.startswith(("+", "-")):
            raise cc.refuse("custom_ops", f"vLLM cannot read {op!r}", f"write +{op} or -{op}")
    if sum(op in _BASES for op in ops) > 1:
        raise cc.refuse("custom_ops", "vLLM takes all or none, once", "drop one of both")
    key = "compile_ranges_endpoints"
    if cc.given.get(key) is not None and any(end < 1 for end in cc.integers(key) or ()):
        raise cc.refuse(key, "vLLM wants ends of at least 1", "give 1 or more")
    cc.integer("cudagraph_num_of_warmups")
    cc.boolean("cudagraph_copy_inputs")
    saved = cc.text("compile_cache_save_format")
    if saved not in (None, "binary", "unpacked"):
        raise cc.refuse("compile_cache_save_format", f"vLLM does not know {saved}", "give binary or unpacked")
