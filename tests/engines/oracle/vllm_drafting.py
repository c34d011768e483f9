"""vLLM's own drafter over a tiny model: its buffers, its capture, and stand-ins for its three kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from capture_planner.modes import Chain, Role
from support.files import module_at

HERE = Path(__file__).parent
loading = module_at(HERE / "vllm_loading.py")
tiny = module_at(HERE / "vllm_tiny.py")
GPU, AUTOREGRESSIVE = loading.GPU, loading.AUTOREGRESSIVE


def speculator(world: Any, *, is_eager: bool) -> Any:
    """Make the drafter with the buffers that it has, and capture it unless it is to run eager."""
    cls = world.modules[f"{AUTOREGRESSIVE}.speculator"].TargetDependentARSpeculator
    cls.__abstractmethods__ = frozenset()
    found, limits, drafts = object.__new__(cls), world.shape.limits, world.shape.speculative
    assert drafts is not None
    reqs, tokens = limits.max_num_reqs, limits.max_num_tokens
    found.vllm_config, found.device, found.speculative_config = world.config, None, world.config.speculative_config
    found.num_speculative_steps, found.max_num_reqs, found.max_num_tokens = drafts.num_tokens, reqs, tokens
    found.method, found.pcp_manager, found.eplb_state = "eagle3", None, None
    found.supports_mm_inputs, found.dp_size, found.dp_rank = False, 1, 0
    found.last_token_indices = torch.zeros(reqs, dtype=torch.int64)
    found.idx_mapping = torch.zeros(reqs, dtype=torch.int64)
    found.sample_src_positions = torch.zeros(reqs, dtype=torch.int64)
    found.current_draft_step = torch.tensor(0, dtype=torch.int64)
    found.draft_tokens = torch.zeros(reqs, drafts.num_tokens, dtype=torch.int64)
    found.hidden_states = torch.zeros(tokens, tiny.WIDTH, dtype=torch.float64)
    found.temperature = found.seeds = torch.zeros(reqs)
    found.draft_logits = None
    buffers = world.modules[f"{GPU}.input_batch"].InputBuffers
    found.input_buffers = buffers(reqs, tokens, torch.device("cpu"))
    model = tiny.Drafter(world, 2)
    found.model = model if is_eager else world.pieces(model)
    found.model.combine_hidden_states = lambda states: states[:, : tiny.WIDTH]
    found.block_tables, found.kv_cache_config = world.blocks(), None
    found.target_input_buffers = world.buffers
    found.target_attn_groups = []
    fused = drafts.chain is Chain.FUSED
    group = SimpleNamespace(
        supports_draft_decode_metadata_update=fused,
        backend=SimpleNamespace(get_name=lambda: "any"),
        map_to_kernel_block_table=lambda table: None,
        kv_cache_group_id=0,
    )
    found.attn_groups = [[group]]
    found._configure_decode_metadata_update()
    found._copy_request_inputs = lambda *a, **k: None
    found._prepare_eplb_forward = lambda tokens: None
    found._update_draft_decode_metadata = lambda metadata, reqs: None
    found._build_uniform_attn_metadata = lambda **k: {"rows": world.draft_rows}
    found.sample_draft = lambda hidden, positions, *rest: (hidden.sum(-1).long() + positions).abs() % tiny.VOCABULARY
    found.model_state = SimpleNamespace(prepare_attn=_draft_attn(world, found))
    found.prefill_cudagraph_manager = found.decode_cudagraph_manager = None
    if not is_eager:
        found.init_cudagraph_manager(world.modes[world.shape.role(Role.TARGET).mode.name])
        if world.manager.needs_capture():
            found.capture()
    return found


def _draft_attn(world: Any, found: Any) -> Any:
    """Return what prepares metadata: the target's for a draft prefill, else the drafter's own."""
    own = found.input_buffers.seq_lens.data_ptr()

    def prepare(batch: Any, *others: Any, **named: Any) -> dict[str, Any]:
        return {"rows": world.draft_rows} if batch.seq_lens.data_ptr() == own else world.prepare_attn(batch)

    return prepare


def prepare_prefill_inputs(
    last_token_indices: Any, current_draft_step: Any, input_buffers: Any, input_batch: Any, *others: Any
) -> None:
    """Stands for a kernel: write the drafter's inputs of a draft prefill."""
    tokens, reqs = input_batch.num_tokens_after_padding, input_batch.num_reqs
    last_token_indices.zero_()
    last_token_indices[:reqs] = input_batch.last
    current_draft_step.zero_()
    input_buffers.input_ids[:tokens] = input_batch.input_ids + 1
    input_buffers.positions[:tokens] = input_batch.positions


def prepare_decode_inputs(
    draft_tokens: Any, seq_lens: Any, rejected: Any, input_buffers: Any, *others: Any, **named: Any
) -> None:
    """Stands for a kernel: write the drafter's inputs of the first draft decode."""
    reqs = len(draft_tokens)
    input_buffers.input_ids[:reqs] = draft_tokens
    input_buffers.positions[:reqs] += 1


def update_draft_inputs(
    draft_tokens: Any, step: Any, hidden: Any, drafts: Any, next_hidden: Any, buffers: Any, positions: Any, reqs: int,
    *others: Any, **named: Any,
) -> None:  # fmt: skip
    """Stands for a kernel: keep a draft, and write the inputs of the next draft decode."""
    drafts[:reqs].scatter_(1, step.view(1, 1).expand(reqs, 1), draft_tokens[:reqs, None])
    next_hidden[:reqs] = hidden[:reqs]
    buffers.input_ids[:reqs] = draft_tokens[:reqs]
    buffers.positions[:reqs] += 1
    positions[:reqs] += 1
