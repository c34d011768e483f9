"""Throw-away captures: what graphs that vLLM does not capture would take, and what a size takes by itself.

They run right after a manager's own capture, in its context and by its own functions, before vLLM serves: each graph
alone, in a pool of its own, as vLLM's ``profile_cudagraph_memory`` does (vllm/v1/worker/gpu/cudagraph_utils.py, 0.33).
What they allocate is given back. The tables of the manager and of the wrappers of PIECEWISE graphs are set aside
meanwhile, so that nothing of a trial is left in them, whatever happens in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import attrs

from capture_planner.errors import class_and_message
from capture_planner.modes import GraphMode
from capture_planner_vllm.inside import device
from capture_planner_vllm.inside.buffers import CreateForward
from capture_planner_vllm.inside.observe_seams import MANAGERS, is_target
from capture_planner_vllm.inside.profile import Replay
from capture_planner_vllm.inside.splits import FULL_GRAPHS

MIB = 1 << 20

RESERVE = 512 * MIB
"""Bytes of free memory that trials leave."""

FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Sizes of trials, by the largest graph of their kind. Captured ones show what a size takes in a pool of its own."""

SAFE_FULL = {"FLASH_ATTN", "FLASH_ATTN_MLA", "TRITON_ATTN"}
"""Attention backends whose full graphs can be larger than ``max_cudagraph_capture_size``; others have buffers of it."""

WRAPPERS = (
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper", "concrete_cudagraph_entries"),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper", "entries"),
)
"""Classes that keep PIECEWISE graphs, and their tables."""

OUTPUTS = ("hidden_states", "aux_hidden_states", "intermediate_tensors")
"""Buffers that a manager allocates by its first forward, at the size of it."""


@attrs.frozen(kw_only=True)
class TrialGraph:
    """One graph that was captured, timed and dropped."""

    descriptor: Any
    seconds: float
    """Seconds of its warm-up and capture."""
    mib: float
    """MiB that it took in a pool of its own, the driver's included, without the buffers for its outputs."""
    replay: Replay


class Trials:
    """Throw-away captures of one model runner, within a time."""

    def __init__(self, runner: Any, seconds: float, note: Callable[[str], None]) -> None:
        """:param seconds: for all of them."""
        self._runner, self._left, self._note = runner, seconds, note
        self.spent = 0.0
        """Seconds of all trials so far."""

    def of(
        self,
        manager: Any,
        create_forward: CreateForward,
        capture: Callable[..., Any],
        replays: Callable[[Any, Sequence[Any], CreateForward], list[Replay]],
    ) -> list[TrialGraph]:
        """Return the trials of a manager that has just captured; an error ends them, and is noted.

        :param capture: ``CudaGraphManager.capture``, unobserved.
        :param replays: gives what each graph's replay takes.
        """
        start, found = time.perf_counter(), list[TrialGraph]()
        try:
            for trial in self._trials(manager, create_forward, capture, replays):
                found.append(trial)
        except Exception as error:
            self._failed(error, "of graphs that are not captured, none or not all were timed")
        taken = time.perf_counter() - start
        self._left, self.spent = self._left - taken, self.spent + taken
        return found

    def _failed(self, error: Exception, text: str) -> None:
        self._note(f"{text}: {class_and_message(error)[:200]}")

    def _trials(
        self,
        manager: Any,
        create_forward: CreateForward,
        capture: Callable[..., Any],
        replays: Callable[[Any, Sequence[Any], CreateForward], list[Replay]],
    ) -> Iterator[TrialGraph]:
        start = time.perf_counter()
        agreed = _agreement(self._runner)
        if agreed is None:
            return
        kinds = [*_kinds(manager, self._backends(manager))]
        for place, sizes in enumerate(kinds):
            # What a drafter needs is left to it: its managers come after the target's.
            others = (
                len(kinds)
                - place
                - 1
                + 2 * (getattr(self._runner, "speculator", None) is not None and is_target(manager))
            )
            # What a kind does not use of its share is left to the next ones.
            until = time.perf_counter() + (self._left - (time.perf_counter() - start)) / (1 + others)
            needs = 0.0  # bytes a token
            for descriptor in sizes:
                tokens = descriptor.num_tokens
                goes = time.perf_counter() < until
                # The warm-up takes about as much again.
                goes = goes and device.free_memory() - 2 * needs * tokens >= RESERVE
                # All workers stop at the same trial, or the rest would wait in its forward.
                if not agreed(goes):
                    break
                try:
                    trial = self._trial(manager, descriptor, create_forward, capture, replays)
                except Exception as error:
                    what = f"{descriptor.cg_mode.name} of {tokens} tokens"
                    self._failed(error, f"of graphs that are not captured, not all were timed; {what}")
                    until = 0.0  # the other workers learn it before the next
                    continue
                needs = max(needs, trial.mib * MIB / tokens)
                yield trial

    def _trial(
        self,
        manager: Any,
        descriptor: Any,
        create_forward: CreateForward,
        capture: Callable[..., Any],
        replays: Callable[[Any, Sequence[Any], CreateForward], list[Replay]],
    ) -> TrialGraph:
        forwards: list[Any] = []  # what a full graph reads besides vLLM's buffers must live until it is dropped

        def create(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
            forwards.append(create_forward(*args, **kwargs))
            made: Callable[[Any], Any] = forwards[-1]
            return made

        device.settle()
        free = device.free_memory()
        try:
            with set_aside(manager, descriptor, self._builders()), _outside_sleep_pool():
                start = time.perf_counter()
                capture(manager, create, "Timing CUDA graphs")
                seconds = time.perf_counter() - start
                device.settle()
                # The engine's output buffers exist already; a trial allocates its own and frees them.
                taken = free - device.free_memory() - _output_bytes(manager)
                (replay,) = replays(manager, [descriptor], create)
        finally:
            forwards.clear()
            device.settle()
        return TrialGraph(descriptor=descriptor, seconds=seconds, mib=max(taken, 0) / MIB, replay=replay)

    def _backends(self, manager: Any) -> set[str]:
        """Return the names of the attention backends that a manager's graphs may run."""
        owners = [self._runner, *([] if is_target(manager) else [getattr(self._runner, "speculator", None)])]
        listed = (groups for owner in owners for groups in getattr(owner, "attn_groups", ()))
        return {group.backend.get_name() for groups in listed for group in groups}

    def _builders(self) -> Iterator[Any]:
        for owner in (self._runner, getattr(self._runner, "speculator", None)):
            for groups in getattr(owner, "attn_groups", ()):
                for group in groups:
                    yield from getattr(group, "metadata_builders", ())


def _kinds(manager: Any, backends: set[str]) -> Iterator[list[Any]]:
    """Yield for each kind of graph the descriptors to try, ascending; PIECEWISE kinds first."""
    config = manager.vllm_config
    partitioned = getattr(config.compilation_config, "use_inductor_graph_partition", False)
    found: dict[Any, list[Any]] = {}
    for descriptor in (each for listed in manager._capture_descs.values() for each in listed):
        if getattr(descriptor, "num_ubatches", 1) > 1:
            continue
        kind = replace(descriptor, num_tokens=0, num_reqs=None)
        found.setdefault(kind, []).append(descriptor)
    fewest = min((kind.num_active_loras for kind in found), default=0)
    for kind, captured in sorted(found.items(), key=lambda item: item[0].cg_mode.name == "FULL"):
        is_full = kind.cg_mode.name == "FULL"
        # The inductor's partitions reclaim the storage of the graphs that were captured before.
        possible = backends <= SAFE_FULL if is_full else not partitioned
        # One adapter case stands for the others: there are seconds for trials, not minutes.
        if kind.num_active_loras == fewest:
            largest = max(captured, key=lambda each: each.num_tokens)
            yield [
                replace(largest, num_tokens=tokens, num_reqs=_requests(largest, tokens, manager.max_num_reqs))
                for tokens in sizes(
                    largest.num_tokens,
                    _most(manager, largest) if possible else largest.num_tokens,
                    _step(manager, largest),
                )
                if possible or is_full
            ]


def sizes(largest: int, most: int, step: int) -> list[int]:
    """Return the tokens of trials, ascending: ``FACTORS`` of the largest graph, and the most that can be.

    :param step: what they are multiples of.
    """
    wanted = {-(-int(largest * factor) // step) * step for factor in FACTORS} | {most // step * step}
    return sorted(tokens for tokens in wanted if 0 < tokens <= max(most, largest))


def _most(manager: Any, descriptor: Any) -> int:
    """Return the most tokens that a graph of this kind can have."""
    config = manager.vllm_config
    tokens = int(config.scheduler_config.max_num_batched_tokens)
    decodes = int(manager.max_num_reqs)
    each = descriptor.uniform_token_count or getattr(descriptor, "max_query_len", None)
    if each is not None:
        return min(tokens, decodes * int(each))
    # The model's recurrent state then has a workspace for decodes only.
    bounded = getattr(config.cache_config, "use_kda_recoverssm", False)
    return min(tokens, decodes * int(manager.decode_query_len)) if bounded else tokens


def _step(manager: Any, descriptor: Any) -> int:
    # Where captured sizes divide by the ranks they may have to: sequence parallelism asks for it.
    parallel = getattr(manager.vllm_config.parallel_config, "tensor_parallel_size", 1)
    each = descriptor.uniform_token_count or 1
    return int(each if descriptor.num_tokens % parallel or each % parallel == 0 else each * parallel)


def _requests(descriptor: Any, tokens: int, most: int) -> int | None:
    if descriptor.num_reqs is None:
        return None
    return tokens // descriptor.uniform_token_count if descriptor.uniform_token_count else min(tokens, most)


@contextmanager
def set_aside(manager: Any, descriptor: Any, builders: Iterator[Any]) -> Iterator[None]:
    """Let a manager capture one graph into empty tables and a pool of its own; then all is as it was.

    :param builders: of attention metadata; for a full graph FlashAttention's bound on splits is raised meanwhile.
    """
    platform = getattr(sys.modules.get(MANAGERS), "current_platform", None)
    pool = None if platform is None else platform.graph_pool_handle()
    saved: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        # A release without the attribute has nothing to set aside.
        if hasattr(owner, name):
            saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    try:
        put(manager, "graphs", {})
        put(manager, "_capture_descs", {descriptor.cg_mode: [descriptor]})
        put(manager, "pool", pool)
        for name in OUTPUTS:
            put(manager, name, [] if name == "aux_hidden_states" else None)
        if platform is not None:
            # What binds its pool while it captures looks there, as in vLLM's own memory profiling.
            put(type(platform), "_global_graph_pool", pool)
        for module, name, table in WRAPPERS:
            # A copy, as the set holds its wrappers weakly.
            for wrapper in list(getattr(getattr(sys.modules.get(module), name, None), "_all_instances", ())):
                put(wrapper, "graph_pool", pool)
                put(wrapper, table, {})
        workspaces = getattr(sys.modules.get("vllm.v1.worker.workspace"), "_manager", None)
        if workspaces is not None:
            put(workspaces, "_locked", True)  # one that grew would leave the captured graphs without it
        put(sys.modules.get(MANAGERS), "tqdm", _without_bar)
        counter = getattr(sys.modules.get("vllm.compilation.counter"), "compilation_counter", None)
        if counter is not None:
            put(counter, "num_cudagraph_captured", counter.num_cudagraph_captured)
        if descriptor.cg_mode.name == GraphMode.FULL.name:
            put(FULL_GRAPHS, "tokens", max(FULL_GRAPHS.tokens or 0, descriptor.num_tokens))
            for builder in builders:
                if getattr(builder, "max_cudagraph_size", None) is not None:
                    put(builder, "max_cudagraph_size", max(builder.max_cudagraph_size, descriptor.num_tokens))
        yield
    finally:
        # Backwards, so that a name that was set twice gets its first value.
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


def _without_bar(items: Any, **_: Any) -> Any:
    return items


def _output_bytes(manager: Any) -> int:
    """Return the bytes of the buffers that a capture allocated for its outputs."""
    held = getattr(manager, "intermediate_tensors", None)
    tensors = [getattr(manager, "hidden_states", None), *getattr(manager, "aux_hidden_states", ())]
    tensors += [] if held is None else list(held.tensors.values())
    return sum(getattr(tensor, "nbytes", 0) for tensor in tensors)


def _outside_sleep_pool() -> AbstractContextManager[Any]:
    """Keep captures out of the pool that vLLM's sleep mode offloads, which would not give them back."""
    outside = getattr(sys.modules.get("vllm.compilation.cudagraph_pool"), "capture_outside_cumem_pool", None)
    return nullcontext() if outside is None else outside()


def _agreement(runner: Any) -> Callable[[bool], bool] | None:
    """Return what says whether all workers go on; None where they cannot agree.

    The workers of one replica run each forward together, so one that stops alone would let the others wait.
    """
    parallel = runner.vllm_config.parallel_config
    # The group that is asked below joins the ranks of one replica's stage, and no others.
    others = ("data_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    if any(getattr(parallel, name, 1) > 1 for name in others):
        return None
    if parallel.tensor_parallel_size == 1:
        return bool
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state is None:
        return None
    group = state.get_tp_group().cpu_group

    def agreed(goes: bool) -> bool:
        import torch

        flag = torch.tensor([int(goes)], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())

    return agreed
