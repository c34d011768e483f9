"""Lines that engines log of their steps; ``tests/measuring/data`` has those of the engines' own functions."""

import json


def vllm_iteration(engine, index, context, generation, milliseconds=9.81, dummy=False, encoder=""):
    """VLLM 0.33: ``context`` and ``generation`` are each requests and tokens."""
    return (
        f"Engine {engine:03d}: Iteration({index}): {context[0]} context requests, {context[1]} context tokens, "
        f"{generation[0]} generation requests, {generation[1]} generation tokens, iteration elapsed time: "
        f"{milliseconds:.2f} ms{' (dummy)' if dummy else ''}, GPU KV cache usage: 3.1%{encoder}"
    )


def vllm_graph_table(rows, mode="FULL_AND_PIECEWISE"):
    """VLLM 0.33: each row has tokens, padded tokens, runtime mode and count; the lines have no prefix."""
    header = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
    cells = [tuple(map(str, (tokens, padded, padded - tokens, ran, count))) for tokens, padded, ran, count in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    table = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in (header, *cells)]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    settings = ["**CUDAGraph Config Settings:**", "", f"- Mode: {mode}", "- Capture sizes: [1, 2, 4, 8, 16]", ""]
    return [*settings, "**CUDAGraph Stats:**", "", table[0], rule, *table[1:]]


def sglang_decode(requests, accept=""):
    """SGLang 0.5.23; ``accept``: what it says under speculation."""
    return (
        f"Decode batch, #running-req: {requests}, #token: 3456, token usage: 0.05, {accept}cuda graph: True, "
        "gen throughput (token/s): 812.00, #queue-req: 0"
    )


def sglang_prefill(seqs, tokens, replayed=0):
    """SGLang 0.5.23."""
    return (
        f"Prefill batch, #new-seq: {seqs}, #new-token: {tokens}, #cached-token: 7, token usage: 0.05, "
        "#running-req: 12, #queue-req: 0, #pending-token: 3, "
        f"{f'#replay-token: {replayed}, ' if replayed else ''}cuda graph: False, input throughput (token/s): 9000.00"
    )


def tensorrt_llm(index, context, generation, rank=0, newer=True):
    """TensorRT-LLM, by the text of ``py_executor.py``; ``newer``: of 1.3, where the requests stand first."""
    requests = context[0] + generation[0]
    first = f"num_scheduled_requests = {requests}, kv_cache_util = 0.100, " if newer else ""
    last = "" if newer else f"num_scheduled_requests: {requests}, "
    return (
        f"iter = {index}, global_rank = {rank}, rank = {rank}, {first}currank_total_requests = 0/12, "
        f"host_step_time = 7.39ms, prev_device_step_time = {'N/A' if not index else '7.1ms'}, timestamp = 2026-11-22 "
        f"05:51:30, {last}states = {{'num_ctx_requests': {context[0]}, 'num_ctx_tokens': {context[1]}, "
        f"'num_generation_tokens': {generation[1]}}}"
    )


def forward_pass(prompts, prompt_tokens, decodes, seconds=0.0098):
    """SGLang 0.5.23's message as JSON."""
    scheduled = {"num_prefill_requests": prompts, "sum_prefill_tokens": prompt_tokens, "num_decode_requests": decodes}
    return json.dumps({"version": 1, "worker_id": "0", "wall_time": seconds, "scheduled_requests": scheduled})
