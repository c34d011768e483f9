"""The capture-size lists of engines, exactly.

Sources: vLLM 0.33.0 ``VllmConfig._set_cudagraph_sizes`` and ``CudaGraphManager._init_candidates``;
SGLang 0.5.23 ``arg_groups/cuda_graph_hook.py``; TensorRT-LLM ``CudaGraphConfig``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

GiB = 1 << 30


def _vllm_grid(last: int) -> list[int]:
    """1, 2, 4, then steps of 8 below 256, then steps of 16."""
    return [*(n for n in (1, 2, 4) if n <= last), *range(8, min(last + 1, 256), 8), *range(256, last + 1, 16)]


def vllm_tokens(
    *,
    max_num_reqs: int,
    max_num_tokens: int,
    query_len: int,
    platform_max: int,
    tiers: Iterable[tuple[int, int]] = (),
    user_sizes: Sequence[int] | None = None,
    user_max: int | None = None,
    interactive: bool = False,
    older: Container[str] = (),
) -> tuple[int, ...]:
    """Return vLLM's ``cudagraph_capture_sizes``, in tokens, ascending.

    ``query_len`` is 1 + K, ``platform_max`` 1024 on SM100 and 512 elsewhere, ``tiers`` the
    (query length, widest batch) pairs of a dynamic schedule. ``user_sizes`` and ``user_max`` are
    ``cudagraph_capture_sizes`` and ``max_cudagraph_capture_size`` where a user sets them.
    ``interactive`` is ``--performance-mode interactivity``: every size up to 32. ``older`` names what older releases
    do not add: the most requests before 0.31, multiples of ``query_len`` before 0.29, the token budget before 0.22.
    """
    decode_sizes: set[int] = set()
    top = user_max
    if top is None:
        top = min(max_num_reqs * query_len * 2, platform_max)
        if query_len > 1 and "widths" not in older:
            for tier_query_len, tier_reqs in tiers or ((query_len, max_num_reqs),):
                reqs = min(tier_reqs, platform_max)
                decode_sizes |= {n * tier_query_len for n in (*_vllm_grid(reqs), reqs) if n * tier_query_len <= top}
        elif query_len == 1 and max_num_reqs <= top and "requests" not in older:
            decode_sizes = {max_num_reqs}
    top = min(max_num_tokens, top)
    # A user's list replaces the grid; vLLM drops only what exceeds the token budget.
    if user_sizes is not None:
        return tuple(sorted({size for size in user_sizes if size <= max_num_tokens}))
    sizes = set(_vllm_grid(top)) | {size for size in decode_sizes if size <= max_num_tokens}
    if interactive:
        sizes |= set(range(1, min(top, 32) + 1))
    if max_num_tokens <= top and "budget" not in older:
        sizes.add(max_num_tokens)
    return tuple(sorted(sizes))


def vllm_requests(tokens: Sequence[int], *, query_len: int, max_query_len: int, max_num_reqs: int) -> tuple[int, ...]:
    """Return the request counts of vLLM's uniform decode graphs of one query length, ascending.

    Each size is rounded up to a multiple of ``query_len``; what then passes the largest size or
    max_num_seqs is dropped, not clamped: with K = 3, 256 requests and 512 tokens, 128 are covered.
    """
    top = min(max(tokens, default=0), max_num_reqs * max_query_len)
    rounded = {-(-size // query_len) for size in tokens}
    return tuple(sorted(n for n in rounded if n * query_len <= top and n <= max_num_reqs))


def sglang_default_max(memory: int, tensor: int) -> int:
    """Return SGLang's largest decode batch, by device memory in bytes and tensor-parallel size."""
    wide = tensor >= 4
    if memory < 20 * GiB:
        return 8
    if memory < 35 * GiB:
        return 160 if wide else 48
    if memory < 60 * GiB:
        return 160 if wide else 32
    if memory < 160 * GiB:
        return 512 if wide else 256
    return 512


def sglang_requests(top: int, *, speculative: bool, padding: bool) -> tuple[int, ...]:
    """Return SGLang's decode batch sizes up to ``top``, which is always one of them."""
    # Without padding a graph serves only batches of exactly its size.
    if not padding:
        return tuple(range(1, top + 1)) or (top,)
    if speculative:
        grid = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, top + 1, 16)]
    else:
        grid = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, top + 1, 32)]
    return tuple(sorted({size for size in grid if size <= top} | {top}))


def sglang_tokens(top: int) -> tuple[int, ...]:
    """Return SGLang's prefill sizes, in tokens, up to ``top``; ``top`` itself need not be one."""
    grid = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, top + 1, 512),
    ]
    return tuple(size for size in grid if size <= top)


def tensorrt_llm_requests(top: int, *, padding: bool) -> tuple[int, ...]:
    """Return TensorRT-LLM's batch sizes up to ``top``, which is always one of them."""
    if padding:
        grid = [1, 2, 4, *range(8, 129, 8), *range(192, top + 1, 64)]
    else:
        grid = [*range(1, 33), 64, 128, *(1 << i for i in range(8, (top - 1).bit_length()))]
    return tuple(sorted({size for size in grid if size <= top} | {top}))


def tensorrt_llm_admitted(sizes: Sequence[int], most: int, *, padding: bool) -> tuple[int, ...]:
    """Return the sizes TensorRT-LLM keeps when at most ``most`` requests can decode together."""
    kept = [size for size in sizes if size <= most]
    # With padding the first size above is replaced by ``most`` itself.
    if padding and len(kept) < len(sizes) and most not in kept:
        kept.append(most)
    return tuple(kept)
