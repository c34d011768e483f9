"""What SGLang's scheduler decides for a launch of the oracle: how many requests run, and which batches are split."""

from __future__ import annotations

import types
from typing import Any

import torch


class Refusal(Exception):
    """What SGLang refuses where it makes its pools."""


def pool(launch: Any) -> int:
    """Return a rank's most requests, as SGLang works it out of the tokens and the states that it has room for."""
    tokens, page = launch.view.max_total_tokens, launch.view.page_size
    if tokens is not None:
        tokens = tokens // page * page
    elif launch.schedule.max_running_requests is not None:
        tokens = 1 << 40
    else:
        # Enough for the fewest requests that a pool is made for, and no more.
        tokens = max(4 * launch.context, 4096)
    kind = launch.m.pools.KVCacheConfigurator
    methods = ("_handle_max_mamba_cache", "_calculate_mamba_ratio", "resolve_max_num_reqs")
    # Its own fields are slots, of which most describe a device.
    own = type("Pools", (types.SimpleNamespace,), {name: getattr(kind, name) for name in methods})
    configurator = own(
        model_config=launch.config,
        attn_dp_size=launch.parallel.attn_dp_size,
        pp_size=launch.record.pp_size,
        spec_algorithm=launch.algorithm,
        mambaish_config=launch.m.hybrids.mambaish_config(launch.config),
        hybrid_gdn_config=launch.m.hybrids.hybrid_gdn_config(launch.config),
        hybrid_kda_config=None,
        fused_entry_bytes=lambda _: None,
        extra_mamba_cache_bytes_per_req=0,
    )
    if configurator.mambaish_config is not None:
        # In GiB: room for the states of as many requests as the flags allow.
        configurator._handle_max_mamba_cache(1 << 40)
    found = configurator.resolve_max_num_reqs(tokens)
    if found < 1:
        raise Refusal("max_running_request is zero")
    return int(found)


def splits(launch: Any, requests: int) -> bool:
    """Whether the scheduler splits a batch of decodes that each rank has, where it asks the ranks at all."""
    if not launch.m.common.require_mlp_sync():
        return False
    preparer = launch.m.overlap.TboDPAttentionPreparer()
    local = types.SimpleNamespace(
        forward_mode=launch.m.batches.ForwardMode.DECODE,
        spec_info=None,
        batch_size=lambda: requests,
        extend_lens=None,
        is_extend_in_batch=False,
    )
    gathered = torch.tensor([preparer.prepare_all_gather(local)] * launch.parallel.num_dp_ranks)
    index, _ = preparer.compute_output(gathered)
    return index is not None
