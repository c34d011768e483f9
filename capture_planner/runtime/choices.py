"""What a person chooses about a run, and which choices do not go together."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.plan import Plan
from capture_planner.runtime.chosen import Drafting
from capture_planner.runtime.options import ExecutionPolicy, Options
from capture_planner.runtime.ranks.symmetric import AllReduce

ORACLES = ("copy", "miss", "chance")
"""Drafters that are told what the target says, by a rehearsal."""


@attrs.frozen(kw_only=True)
class Choices:
    """What a person chooses about a run; the plan says everything else."""

    model: Path | None = None
    """Folder or configuration; None: a Llama of the plan's numbers with random weights."""
    drafter: Drafting = "random"
    chance: float = 0.5
    """How often the drafter ``chance`` is right."""
    adapters: int | tuple[Path, ...] = ()
    """LoRA adapters that requests have by turns: so many of random weights, or folders that peft saved; none."""
    seed: int = 0
    page_size: int = 16
    pages: int | None = None
    """Pages of the KV cache; None: for ``max_num_reqs`` requests of full length, as far as memory allows."""
    memory_utilization: float | None = None
    """Share of a device's memory that all together may take; None: ``cache_memory.SHARE``. Not without a device."""
    warm_up: bool | None = None
    """Run steps of the workload's shapes before the clock starts; None: on a device. Never where steps are compared
    or verified, which would count them."""
    graph_memory: int | None = None
    """Bytes that a pool of graphs may hold; None: the plan's budget, if it has one."""
    step_seconds: float = 0.01
    """How far the clock of arrivals moves in a step."""
    slower: str = ""
    """What a person changes so that requests arrive more slowly, for the report; empty: nothing does."""
    clip: bool = False
    """Cut requests that are longer than the model, instead of refusing them."""
    eager: bool = False
    """Capture nothing."""
    dump_graphs: Path | None = None
    """Folder to write what each captured graph holds into."""
    verify: bool = False
    """Hold what was served against the same model in a higher precision, see ``runtime.verification``."""
    any_environment: bool = False
    """Run although this machine is not the one that was planned for."""
    any_plan: bool = False
    """Run although the lint finds errors in the plan."""
    all_reduce: AllReduce = "auto"
    """How ranks that share a model add their parts, on GPUs."""
    options: Options = attrs.Factory(Options)

    @property
    def drawn(self) -> dict[str, str]:
        """The synthetic draft lengths as a fact of the run, where they are drawn."""
        rates = self.options.proposals
        return {"draft lengths": f"synthetic: {', '.join(f'{rate:g}' for rate in rates)}"} if rates else {}


def refuse_contradictions(plan: Plan, registry: Registry, choices: Choices, device: torch.device) -> None:
    """Raise ``RunError`` for choices that do not go together, before a model is loaded."""
    acceptance = choices.options.acceptance
    if plan.speculative is None and choices.drafter != "random":
        raise RunError(f"--drafter {choices.drafter}: the plan has no drafter; plan with speculative, or leave it out")
    ExecutionPolicy.of(plan, registry, choices.options, is_gpu=device.type == "cuda")
    if acceptance and choices.verify:
        raise RunError(
            "--verify holds tokens against the model, and with --acceptance they are not the model's; leave one out"
        )
    if acceptance and choices.drafter in ORACLES:
        raise RunError(
            f"--drafter {choices.drafter} decides which drafts are accepted, and so does --acceptance; leave one out"
        )
    if choices.memory_utilization is not None and (device.type != "cuda" or choices.pages is not None):
        other = "--pages gives the size of the KV cache" if choices.pages is not None else "the plan is for a processor"
        raise RunError(f"--memory-utilization is a share of a device's memory, and {other}; leave it out")
