"""What was chosen for a run, loaded: the model, its drafter, its adapters, and what a page of their KV cache takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan
from capture_planner.runtime.assembly import dtype_of, kv_dtype_of
from capture_planner.runtime.models.protocols import Adapters, Drafter, TargetModel
from capture_planner.runtime.ranks.collectives import WHOLE, Collectives

if TYPE_CHECKING:
    from capture_planner.runtime.models.huggingface import HuggingFaceModel

Drafting = Literal["copy", "miss", "chance", "random"] | Path


def model_of(
    plan: Plan, source: Path | None, *, device: torch.device, seed: int, among: Collectives = WHOLE
) -> HuggingFaceModel:
    """Return the model at ``source``, or one of the plan's numbers, as ``load_target`` does.

    Raises ``RunError`` where that cannot be executed, or is another model than was planned for.
    """
    # Here, since transformers takes seconds to import, and what is refused before needs none of it.
    from capture_planner.runtime.models.huggingface import differences, load_target

    dtype = dtype_of(plan.model.dtype)
    model = load_target(source, plan.model, device=device, dtype=dtype, seed=seed, among=among)
    if wrong := differences(model, plan.model):
        raise RunError(
            f"the plan is for another model than {model.name}: {'; '.join(wrong)}; plan the model that is run"
        )
    return model


def drafter_of(
    plan: Plan, model: TargetModel, choice: Drafting, *, chance: float = 0.5, seed: int = 0
) -> Drafter | None:
    """Return the drafter that was chosen, sized for the plan; None for a plan without one. ``seed`` is the model's."""
    if plan.speculative is None:
        return None
    from capture_planner.runtime.models.auxiliary import choose_drafter

    states, length = plan.limits.max_num_reqs, plan.model.max_model_len + plan.speculative.num_tokens + 1
    return choose_drafter(
        choice, plan.speculative, model, num_states=states, length=length, chance=chance, seed=seed + 1
    )


def adapters_of(plan: Plan, model: HuggingFaceModel, choice: int | tuple[Path, ...], *, seed: int) -> Adapters | None:
    """Return the LoRA adapters that were chosen; None where none were.

    Raises ``RunError`` for adapters of a plan without LoRA, and as ``load_adapters`` does.
    """
    if not choice:
        return None
    if model.among.size > 1:
        raise RunError("adapters were chosen, and parallel.tensor is more than 1, which adapters are not spread over")
    if plan.lora is None:
        raise RunError("adapters were chosen, and the plan has no LoRA; plan with lora: {max_active: N}")
    from capture_planner.runtime.models.adapters import load_adapters

    return load_adapters(choice, model.linears(), seed=seed + 2)


def page_memory(plan: Plan, model: TargetModel, page_size: int) -> int:
    """Return the bytes of one page: keys and values in all layers of target and drafter."""
    layers = {Role.TARGET: model.num_layers}
    if plan.speculative is not None:
        layers[Role.DRAFT_PREFILL] = plan.speculative.model.num_layers
    widths = 0
    for role, count in layers.items():
        each = Attention.of(plan, role, layers=1, window=None)
        widths += count * each.num_kv_heads * each.head_dim
    return 2 * widths * page_size * kv_dtype_of(plan.model).itemsize
