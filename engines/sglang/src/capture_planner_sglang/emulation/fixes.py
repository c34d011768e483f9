"""How to fix the findings of ``check`` with SGLang's flags. Of a flag given twice the last counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from capture_planner.engines.deployments import Run
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Fixes, FlagChange, adding
from capture_planner.modes import Role
from capture_planner.records.batch import Kind

DECODES, PREFILLS, REQUESTS = "--cuda-graph-bs-decode", "--cuda-graph-bs-prefill", "--max-running-requests"
_BACKENDS = ("fa3", "flashinfer", "triton")


class SglangFixes(Fixes):
    """Fixes by ``--cuda-graph-bs-decode`` and its like; sizes of decodes are requests."""

    general: ClassVar = {
        "EN001": "raise --cuda-graph-max-bs-decode to the most running requests, or list it in --cuda-graph-bs-decode",
        "EN002": "remove --disable-cuda-graph-padding, and give --cuda-graph-bs-decode sizes close to each other",
        "EN003": "list in --cuda-graph-bs-decode only sizes up to the most running requests",
        "EN004": "give --cuda-graph-bs-decode whose sizes times the draft tokens fit the alignment",
        "EN005": "name a backend that supports it with --attention-backend",
        "EN006": "add sizes between to --cuda-graph-bs-decode or --cuda-graph-bs-prefill",
        "EN007": "name a folder with the config.json of the model, or fetch that with --download",
        "EN008": "leave --disable-attn-tp-gather or --enable-two-batch-overlap out",
        "EN009": "leave SGLANG_VIT_ENABLE_CUDA_GRAPH out where images come in many sizes",
    }

    def changes(self, code: str, emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
        mixed = [run for run in runs if run.batch.kind is Kind.MIXED]
        decodes = [run for run in runs if run.batch.kind is Kind.DECODE]
        if code == "EN001":
            most = max(run.last for run in runs)
            if not emulation.asked_sizes:
                yield FlagChange.of("--cuda-graph-max-bs-decode", most)
            yield _listed(DECODES, {*emulation.sizes, most})
            yield _listed(DECODES, {*emulation.sizes, *_ends(runs)})
            covered = min(run.first for run in runs) - 1
            if covered:
                yield FlagChange.of(REQUESTS, covered, instead=True)
        elif code == "EN002":
            yield from _both(emulation, _ends(mixed), _ends(decodes))
        elif code in ("EN003", "EN004") and emulation.sizes:
            yield _listed(DECODES, emulation.sizes)
            yield _listed(DECODES, {size for size in emulation.sizes if size <= emulation.limits.max_num_reqs})
        elif code == "EN003":
            # Without sizes of decodes graphs are of prefills: up to the first that has room for the most tokens.
            sizes = sorted({graph.entry.num_tokens for graph in emulation.graphs})
            yield _listed(PREFILLS, sizes[: bisect_left(sizes, emulation.limits.max_num_tokens) + 1])
        elif code == "EN005":
            yield from (FlagChange.of("--attention-backend", each) for each in _BACKENDS)
        elif code == "EN006":
            yield from _both(
                emulation,
                {size for run in mixed for size in run.sizes_between(1)},
                {size for run in decodes for size in run.sizes_between(1)},
            )

    def advice(self, code: str, emulation: Emulation, role: Role, about: Any) -> str:
        if code == "EN001":
            requests = max(run.last for run in about)
            raised = f"raise --cuda-graph-max-bs-decode to {requests}"
            return adding([requests], DECODES) if emulation.asked_sizes else raised
        # SGLang replays no graph that pads a prefill to more than twice its tokens.
        if code == "EN002" and not any(run.batch.kind is Kind.DECODE for run in about):
            return "list sizes in --cuda-graph-bs-prefill at most twice each batch, as far as ranks divide them"
        if code == "EN003":
            sizes = "each of --cuda-graph-bs-decode is captured for every number of adapters, and some are needed"
            return "nothing to do: " + (f"{role} uses the target's sizes" if role.is_drafter else sizes)
        limit = emulation.limits.max_num_reqs
        if code == "EN004" and max(about) > limit:
            return f"remove sizes above the {limit} requests of a rank, and those that its ranks do not divide"
        if code == "EN006":
            phase = "prefill" if about[0].batch.kind is Kind.MIXED else "decode"
            return adding(about[0].sizes_between(1), f"--cuda-graph-bs-{phase}")
        return ""


def _both(emulation: Emulation, prefills: set[int], decodes: set[int]) -> Iterator[FlagChange]:
    """Add sizes to the lists of prefills and of decodes, as far as there are any to add."""
    flags: list[tuple[str, tuple[str, ...]]] = []
    if prefills:
        present = {graph.entry.num_tokens for graph in emulation.graphs if graph.entry.query_len is None}
        flags += _listed(PREFILLS, present | prefills).flags
    if decodes:
        flags += _listed(DECODES, decodes | set(emulation.sizes)).flags
    yield FlagChange(tuple(flags))


def _ends(runs: Sequence[Run]) -> set[int]:
    return {count for run in runs for count in (run.first, run.last)}


def _listed(flag: str, sizes: Iterable[int]) -> FlagChange:
    return FlagChange.of(flag, *sorted(set(sizes)))
