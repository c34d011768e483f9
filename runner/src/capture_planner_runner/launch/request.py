"""The request of a run: a frozen ``RunRequest``, and loading the model, drafter and adapters that it names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan
from capture_planner_runner.launch.assembly import dtype_of, kv_dtype_of
from capture_planner_runner.models.protocols import Adapters, Drafter, TargetModel
from capture_planner_runner.options import Options
from capture_planner_runner.ranks.collectives import WHOLE, Collectives
from capture_planner_runner.ranks.symmetric import AllReduce

if TYPE_CHECKING:
    from capture_planner_runner.models.huggingface import HuggingFaceModel


ORACLES = ("copy", "miss", "chance")
"""Drafters that know the target's answers, from a rehearsal."""

Drafting = Literal["copy", "miss", "chance", "random"] | Path


@attrs.frozen(kw_only=True)
class RunRequest:
    """The values of a run that a person gives; everything else is in the plan."""

    model: Path | None = None
    """Folder or configuration; None: a Llama of the plan's shape with random weights."""
    drafter: Drafting = "random"
    chance: float = 0.5
    """Probability that the drafter ``chance`` is right."""
    adapters: int | tuple[Path, ...] = ()
    """LoRA adapters, assigned to requests round-robin: a number of random ones, or folders saved by peft."""
    seed: int = 0
    page_size: int = 16
    """Tokens per page of the KV cache."""
    pages: int | None = None
    """Pages of the KV cache; None: for ``max_num_reqs`` requests of full length, as far as memory allows."""
    memory_utilization: float | None = None
    """Share of a device's memory for the whole run; None: ``cache_memory.SHARE``. Refused without a device."""
    warm_up: bool | None = None
    """Run steps of the workload's shapes before the clock starts; None: on a device. Never where steps are compared
    or verified, which would count them."""
    graph_memory: int | None = None
    """Limit of each graph pool in bytes; None: the plan's budget, if it has one."""
    step_seconds: float = 0.01
    """Seconds of simulated arrival time per step."""
    slower: str = ""
    """Advice for the report: the option that makes requests arrive more slowly; empty if no option does."""
    clip: bool = False
    """Truncate requests that are longer than the model, instead of refusing them."""
    eager: bool = False
    """Capture no graphs."""
    dump_graphs: Path | None = None
    """Folder for the contents of each captured graph."""
    verify: bool = False
    """Compare tokens and hidden states with the model in a higher precision, see ``numerics.verification``."""
    any_environment: bool = False
    """Run although the plan is for another machine."""
    any_plan: bool = False
    """Run although lint finds errors in the plan."""
    all_reduce: AllReduce = "auto"
    """Algorithm that sums over ranks of one model, on GPUs."""
    options: Options = attrs.Factory(Options)

    @property
    def facts(self) -> dict[str, str]:
        """The seed, and the synthetic draft lengths where there are any, for the report."""
        rates = ", ".join(f"{rate:g}" for rate in self.options.proposals)
        return {"seed": str(self.seed)} | ({"draft lengths": f"synthetic: {rates}"} if rates else {})


def model_of(
    plan: Plan, source: Path | None, *, device: torch.device, seed: int, among: Collectives = WHOLE
) -> HuggingFaceModel:
    """Return the model at ``source``, or one of the plan's shape, as ``load_target`` does.

    Raises ``RunError`` for a model that cannot be executed, or is not the one that was planned for.
    """
    # Here, since transformers takes seconds to import, and earlier refusals do not need it.
    from capture_planner_runner.models.huggingface import differences, load_target

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
    """Return the chosen drafter, sized for the plan; None for a plan without one. ``seed`` is the model's."""
    if plan.speculative is None:
        return None
    from capture_planner_runner.models.drafters import choose_drafter

    states, length = plan.limits.max_num_reqs, plan.model.max_model_len + plan.speculative.num_tokens + 1
    return choose_drafter(
        choice, plan.speculative, model, num_states=states, length=length, chance=chance, seed=seed + 1
    )


def adapters_of(plan: Plan, model: HuggingFaceModel, choice: int | tuple[Path, ...], *, seed: int) -> Adapters | None:
    """Return the chosen LoRA adapters; None for none.

    Raises ``RunError`` for adapters of a plan without LoRA, and as ``load_adapters`` does.
    """
    if not choice:
        return None
    if model.among.size > 1:
        raise RunError("adapters were chosen, and parallel.tensor is more than 1, which adapters are not spread over")
    if plan.lora is None:
        raise RunError("adapters were chosen, and the plan has no LoRA; plan with lora: {max_active: N}")
    from capture_planner_runner.models.adapters import load_adapters

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
