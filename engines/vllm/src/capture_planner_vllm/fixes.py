"""How to fix the findings of ``check`` with vLLM's flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.encoders import EncoderGraphs
from capture_planner.engines.engine import Fixes
from capture_planner.engines.remedies import FlagChange
from capture_planner.engines.walk import Run
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.plan import Decision
from capture_planner_vllm import changes

_GRID = 16
"""vLLM's own sizes above 256 are multiples of it, and the largest one is rounded down to one."""

_LOWERED = {
    "deepep": "name another --all2all-backend, such as deepep_low_latency",
    "kv-connector": "remove the KV connector's layerwise transfer",
    "pooling": "nothing to do: no flag gives such a model more",
    "encoder-decoder": "nothing to do: no flag gives such a model more",
    "stock-compile": "leave -cc.mode at VLLM_COMPILE",
    "compilation": "leave -cc.mode at VLLM_COMPILE",
    "schedule-v1": "unset VLLM_USE_V2_MODEL_RUNNER: model runner V2 captures schedules",
}
"""What to do about a mode that one of vLLM's rules lowers, by the rule."""


class VllmFixes(Fixes):
    """Fixes by ``--cudagraph-capture-sizes`` and its like; sizes are tokens."""

    general: ClassVar = {
        "EN001": "raise --max-cudagraph-capture-size to the largest decode (requests times 1 + K), or list it "
        "in --cudagraph-capture-sizes",
        "EN002": "give sizes of which each is a multiple of every query length: capture-planner export --to "
        "vllm writes such a list",
        "EN003": "list in --cudagraph-capture-sizes only sizes that a batch of the schedule needs",
        "EN004": "give --cudagraph-capture-sizes that are multiples of 1 + K",
        "EN005": "name a backend that supports it with --attention-backend, or request the mode that is left "
        "with -cc.cudagraph_mode",
        "EN006": "add sizes between to --cudagraph-capture-sizes",
        "EN007": "name a folder with the config.json of the model, or fetch that with --download",
        "EN008": "leave --enable-dbo out, or move --dbo-decode-token-threshold to one above a capture size",
        "EN009": "leave cudagraph_mm_encoder out of --compilation-config",
    }

    def changes(self, code: str, emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
        return changes.changes(code, emulation, role, runs)

    def applied(self, command: Sequence[str], change: FlagChange) -> list[str]:
        return changes.applied(command, change)

    def uncovered(self, emulation: Emulation, runs: Sequence[Run]) -> str:
        tokens = max(run.last * (run.batch.query_len or 1) for run in runs)
        if emulation.asked_sizes:
            limit = "; --max-cudagraph-capture-size, where it is given, has to be the same"
            return f"add {tokens} to --cudagraph-capture-sizes, and keep the others{limit}"
        if tokens % _GRID == 0:
            return f"raise --max-cudagraph-capture-size to {tokens}"
        # vLLM captures no graph of more than max_num_seqs requests, so a rounded size would be dropped.
        return f"give --cudagraph-capture-sizes {' '.join(map(str, (*emulation.sizes, tokens)))}"

    def missed(self, emulation: Emulation, role: Role, runs: Sequence[Run]) -> str:
        modes = emulation.modes
        if not modes[role].is_separate:
            return ""
        if role is Role.DRAFT_PREFILL and modes[role] is modes[Role.TARGET]:
            return "the list of sizes that fixes the target fixes this too"
        if role is not Role.TARGET:
            return ""
        sizes = " ".join(map(str, changes.complete_list(emulation)))
        return f"give --cudagraph-capture-sizes {sizes}; with these, no batch misses a graph"

    def unreached(self, emulation: Emulation, role: Role) -> str:
        if role.is_drafter:
            return f"nothing to do: {role} uses the target's sizes"
        return (
            "give fewer --cudagraph-capture-sizes: each is captured for every query length of the "
            "schedule and every number of adapters, and some batch may need the others"
        )

    def dropped(self, emulation: Emulation, sizes: Sequence[int]) -> str:
        limit, most = emulation.limits.max_num_tokens, max(sizes)
        return f"remove them, or raise --max-num-batched-tokens from {limit} to {most}" if most > limit else ""

    def lowered(self, emulation: Emulation, decision: Decision) -> str:
        return _LOWERED.get(decision.rule, "")

    def padded(self, emulation: Emulation, run: Run) -> str:
        sizes = " ".join(map(str, run.sizes_between(run.batch.query_len or 1)))
        return f"add {sizes} to --cudagraph-capture-sizes, and keep the others"

    def encoder(self, emulation: Emulation, encoder: EncoderGraphs | None) -> str:
        if encoder is None:
            return ""
        return f"give -cc.encoder_cudagraph_token_budgets={[*encoder.budgets, encoder.reach]}".replace(" [", "[")

    def split(self, emulation: Emulation, runs: Sequence[Run]) -> str:
        fixes = []
        decodes = [run.batch for run in runs if run.batch.kind is Kind.DECODE]
        if decodes:
            # From one token above a size on, every decode that is padded to the next has its graph of microbatches.
            tokens = 1 + max(0, *(size for size in emulation.sizes if size < decodes[0].num_tokens))
            fixes.append(f"give --dbo-decode-token-threshold {tokens}")
        if len(decodes) < len(runs):
            tokens = 1 + max(graph.entry.num_tokens for graph in emulation.graphs)
            fixes.append(f"give --dbo-prefill-token-threshold {tokens}, where their graphs are worth more than overlap")
        return " and ".join(fixes)
