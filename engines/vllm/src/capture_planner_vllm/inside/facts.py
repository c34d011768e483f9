"""What an observation says about a running vLLM besides its counts: the resolved settings, roles and graphs."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from capture_planner.engines import probe
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.inside import timestamp
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Chain, GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.model import Method, Speculative
from capture_planner.records.observation import DraftPass, Observation, ObservedGraph, ObservedRole
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner_vllm.inside import device
from capture_planner_vllm.inside.captures import MIB, Capture, Captures
from capture_planner_vllm.inside.profile import Replay
from capture_planner_vllm.inside.steps import Track
from capture_planner_vllm.inside.trials import TrialGraph

Note = Callable[[str], None]

DRAFTERS = {
    "prefill_cudagraph_manager": Role.DRAFT_PREFILL,
    "cudagraph_manager": Role.DRAFT_PREFILL,
    "decode_cudagraph_manager": Role.DRAFT_DECODE,
    "query_cudagraph_manager": Role.DRAFT_DECODE,
}
"""Attributes of vLLM's speculators that have a graph manager, and its role: chains of decodes (EAGLE, MTP, draft
models), several MTP modules in one pass, and parallel drafts (DFlash)."""

RUNNER = (
    *("cudagraph_manager", "speculator", "vllm_config", "model_state", "num_speculative_steps", "decode_query_len"),
    *("max_num_reqs", "max_num_tokens"),
)
"""Attributes of vLLM's model runner that are read."""

SETTINGS = (
    ("cudagraph_mode", "compilation_config.cudagraph_mode"),
    ("compilation_mode", "compilation_config.mode"),
    ("cudagraph_capture_sizes", "compilation_config.cudagraph_capture_sizes"),
    ("max_cudagraph_capture_size", "compilation_config.max_cudagraph_capture_size"),
    ("max_num_seqs", "scheduler_config.max_num_seqs"),
    ("max_num_batched_tokens", "scheduler_config.max_num_batched_tokens"),
    ("async_scheduling", "scheduler_config.async_scheduling"),
    ("max_model_len", "model_config.max_model_len"),
    ("dtype", "model_config.dtype"),
    ("enforce_eager", "model_config.enforce_eager"),
    ("kv_cache_dtype", "cache_config.cache_dtype"),
    ("block_size", "cache_config.block_size"),
    ("gpu_memory_utilization", "cache_config.gpu_memory_utilization"),
    ("tensor_parallel_size", "parallel_config.tensor_parallel_size"),
    ("pipeline_parallel_size", "parallel_config.pipeline_parallel_size"),
    ("data_parallel_size", "parallel_config.data_parallel_size"),
)
"""Names of settings, and where vLLM's configuration has them."""

SPECULATIVE = (
    ("speculative_method", "speculative_config.method"),
    ("num_speculative_tokens", "speculative_config.num_speculative_tokens"),
    ("num_speculative_tokens_per_batch_size", "speculative_config.num_speculative_tokens_per_batch_size"),
    ("rejection_sample_method", "speculative_config.rejection_sample_method"),
)


def read(root: Any, path: str) -> Any:
    """Return an attribute by its path; raises ``CapturePlannerError`` where one is missing."""
    value = root
    for part in path.split("."):
        if not hasattr(value, part):
            raise CapturePlannerError(f"vLLM's {type(root).__name__} has no {path}")
        value = getattr(value, part)
    return value


def written(value: Any) -> str:
    """Return a setting as a file has it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return ", ".join(_range(item) if isinstance(item, list | tuple) else written(item) for item in value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _range(tier: Sequence[Any]) -> str:
    """Return a tier of ``num_speculative_tokens_per_batch_size``: first and last batch size, and the drafts."""
    return "{} to {}: {}".format(*tier) if len(tier) == 3 else str(list(tier))


def bonus_tokens(runner: Any) -> int:
    """Return the tokens that a request gets besides its accepted drafts."""
    # 0 for DiffusionGemma (models/diffusion_gemma.py), 1 for the others and where a release lacks it.
    return int(getattr(runner.model_state, "num_new_sampled_tokens_per_step", 1))


def tracks(runner: Any, captures: Captures | None, note: Note) -> tuple[Track, ...]:
    """Return the roles of a model runner with the graphs that were captured for them, target first."""
    missing = [name for name in RUNNER if not hasattr(runner, name)]
    if missing:
        raise CapturePlannerError(f"vLLM's {type(runner).__name__} has no {', '.join(missing)}")
    speculative = _speculative(runner, note)
    managers = [(Role.TARGET, runner.cudagraph_manager)]
    for name, value in vars(runner.speculator).items() if runner.speculator is not None else ():
        # With one draft no decode follows the draft prefill, and its manager captures and answers nothing.
        idle = name == "decode_cudagraph_manager" and runner.num_speculative_steps < 2
        if name in DRAFTERS and value is not None and not idle:
            managers.append((DRAFTERS[name], value))
    found = [_track(role, manager, runner, captures, speculative) for role, manager in managers]
    return tuple(sorted(found, key=lambda track: list(Role).index(track.role)))


def _track(role: Role, manager: Any, runner: Any, captures: Captures | None, speculative: Speculative | None) -> Track:
    # Managers of parallel drafters lack it: their single pass makes all drafts.
    specialized = role is Role.DRAFT_DECODE and hasattr(manager, "specialize_spec_tokens")
    fused = specialized and bool(runner.speculator.supports_decode_metadata_update)
    graphs: list[ObservedGraph] = []
    trials: list[ObservedGraph] = []
    keys: dict[Any, int] = {}
    for capture, replay in captures.graphs(manager) if captures is not None else ():
        desc = capture.descriptor
        # Such a graph serves the two halves of a batch, which an observation has no entry for.
        if getattr(desc, "num_ubatches", 1) > 1:
            continue
        keys[desc] = len(graphs)
        graphs.append(_graph(desc, runner, capture, replay, fused=fused))
    for trial in captures.trials(manager) if captures is not None else ():
        trials.append(_graph(trial.descriptor, runner, trial, trial.replay, fused=fused))
    return Track(
        role=role,
        mode=GraphMode[manager.cudagraph_mode.name],
        manager=manager,
        graphs=tuple(graphs),
        trials=tuple(trials),
        keys=keys,
        specialized=specialized,
        fused=fused,
        speculative=speculative,
        ranks=runner.vllm_config.parallel_config.data_parallel_size,
    )


def _graph(desc: Any, runner: Any, cost: Capture | TrialGraph, replay: Replay, *, fused: bool) -> ObservedGraph:
    drafts = getattr(desc, "num_speculative_tokens", runner.num_speculative_steps)
    return ObservedGraph(
        entry=entry(desc, drafts - 1 if fused else None),
        max_query_len=getattr(desc, "max_query_len", None),
        seconds=round(cost.seconds, 4),
        mib=round(cost.mib, 2),
        milliseconds=replay.milliseconds,
        half_milliseconds=replay.half_milliseconds,
    )


def entry(desc: Any, draft_steps: int | None = None) -> Entry:
    """Return the entry that a descriptor of a graph means."""
    return Entry(
        mode=GraphMode[desc.cg_mode.name],
        num_tokens=desc.num_tokens,
        num_reqs=desc.num_reqs,
        query_len=desc.uniform_token_count,
        active_loras=desc.num_active_loras,
        draft_steps=draft_steps,
    )


def dispatcher(track: Track, target: Track) -> probe.Asked:
    """Return what answers a batch of a role as vLLM does: with the index of a graph, or the reason for none.

    A draft prefill runs the target's padded tokens. Draft decodes look for the chain of the scheduled length.
    """
    manager, speculative = track.manager, track.speculative

    def answer(batch: Batch) -> probe.Answer:
        uniform, tokens, loras = batch.uniform_query_len, batch.num_tokens, batch.active_loras
        # As the runner states it: a bound where lengths differ, and None where a row has a prompt.
        longest = (batch.query_len or target.manager.decode_query_len) if batch.past_prompt else None
        if track.role is Role.TARGET:
            desc = manager.dispatch(batch.num_reqs, tokens, uniform, loras, max_query_len=longest)
        else:
            if track.role is Role.DRAFT_PREFILL:
                padded = target.manager.dispatch(batch.num_reqs, tokens, uniform, loras, max_query_len=longest)
                tokens = padded.num_tokens
            desc = manager.dispatch(batch.num_reqs, tokens, uniform, 0)
        if track.specialized and speculative is not None:
            desc = manager.specialize_spec_tokens(desc, speculative.draft_tokens(batch.num_reqs))
        graph = track.graph(desc)
        return graph, (track.why_eager(batch) if graph is None else None)

    return answer


def observation(runner: Any, tracks: Sequence[Track], note: Note) -> Observation:
    """Return the observation of a model runner before its first step, without the dispatcher's answers.

    :param note: takes a sentence about each setting that vLLM does not have.
    """
    config = runner.vllm_config
    parallel = config.parallel_config
    replicas = parallel.data_parallel_size
    machine = device.machine()
    return Observation(
        engine="vllm",
        engine_version=_version(),
        # vLLM numbers the workers of each replica from 0.
        rank=parallel.data_parallel_rank * parallel.world_size + parallel.rank,
        # Replicas of a model without experts share nothing: each has data_parallel_size 1, and its index.
        replica=getattr(parallel, "data_parallel_index", 0) - parallel.data_parallel_rank,
        world_size=parallel.world_size * replicas,
        started=timestamp(),
        model=str(config.model_config.model),
        limits=Limits(
            max_num_reqs=config.scheduler_config.max_num_seqs,
            max_num_tokens=config.scheduler_config.max_num_batched_tokens,
        ),
        speculative=tracks[0].speculative,
        drafts=passes(tracks, runner.max_num_reqs),
        lora=_lora(runner),
        parallel=Parallel(
            data=replicas,
            tensor=parallel.tensor_parallel_size,
            decode_context=getattr(parallel, "decode_context_parallel_size", 1),
        ),
        sizes=tuple(sorted(config.compilation_config.cudagraph_capture_sizes or ())),
        settings=tuple(_settings(runner, note)),
        roles=tuple(
            ObservedRole(role=track.role, mode=track.mode, graphs=track.graphs, trials=track.trials) for track in tracks
        ),
        kv_blocks=getattr(getattr(runner, "kv_cache_config", None), "num_blocks", None),
        kv_token_bytes=_kv_token_bytes(runner),
        device=machine.device,
        driver=machine.driver,
        torch=machine.torch,
    )


def _kv_token_bytes(runner: Any) -> float | None:
    """Return the bytes of the KV cache that a token takes on this device; None where vLLM does not say.

    Each group of layers has blocks of its own for a token, out of one number of blocks.
    """
    cache: Any = getattr(runner, "kv_cache_config", None)
    block_size = runner.vllm_config.cache_config.block_size
    tensors, groups = getattr(cache, "kv_cache_tensors", ()), getattr(cache, "kv_cache_groups", ())
    # A release without these fields, or a model without a KV cache.
    if not tensors or not groups or not cache.num_blocks or not block_size:
        return None
    size = sum(int(tensor.size) for tensor in tensors)
    return round(size * len(groups) / (int(cache.num_blocks) * int(block_size)), 3)


def with_answers(base: Observation, tracks: Sequence[Track]) -> Observation:
    """Add what vLLM's dispatchers answer for every batch."""
    families = emulation_of(base).families
    target = tracks[0]
    # Answers to draft prefills change where the target's padding does.
    mixed = [graph.entry for graph in target.graphs if graph.entry.query_len is None]
    counts = {each.num_reqs for each in mixed if each.num_reqs is not None}
    roles = (
        replace(
            role,
            answers=probe.answers(
                role.role,
                base,
                track.graphs,
                dispatcher(track, target),
                families=families(role.role),
                request_counts=counts if track.role is Role.DRAFT_PREFILL else (),
            ),
        )
        for role, track in zip(base.roles, tracks, strict=True)
    )
    return replace(base, roles=tuple(roles))


def with_capture(base: Observation, capture: tuple[float, int] | None) -> Observation:
    """Add what the whole capture took.

    :param capture: seconds and bytes, excluding replays and trials; None: nothing was captured.
    """
    if capture is None:
        return base
    seconds, size = capture
    # vLLM's figure is a difference of free memory, and is negative where the allocator gave some back.
    mib = round(max(size, 0) / MIB, 2)
    return replace(base, capture_seconds=round(max(seconds, 0), 3), graph_mib=mib)


def _version() -> str:
    return str(getattr(sys.modules["vllm"], "__version__", "unknown"))


def _settings(runner: Any, note: Note) -> Iterator[tuple[str, str]]:
    config = runner.vllm_config
    wanted = SETTINGS if config.speculative_config is None else (*SETTINGS, *SPECULATIVE)
    for name, path in wanted:
        try:
            yield name, written(read(config, path))
        except CapturePlannerError as error:
            note(f"not observed: {name}, as {error}")
    yield "decode_query_len", str(runner.decode_query_len)
    yield "breakable_graphs", written(bool(getattr(runner.cudagraph_manager, "use_breakable_cg", False)))
    for name, owner in (("attention_backend", runner), ("draft_attention_backend", runner.speculator)):
        # The layers of one runner may have several backends.
        names = {group.backend.get_name() for groups in getattr(owner, "attn_groups", ()) for group in groups}
        if names:
            yield name, ", ".join(sorted(names))


def _speculative(runner: Any, note: Note) -> Speculative | None:
    config = runner.vllm_config.speculative_config
    tokens = runner.num_speculative_steps
    if config is None or not tokens:
        return None
    # vLLM has one such name for each family of models, such as deepseek_mtp.
    method = "mtp" if str(config.method).endswith("mtp") else str(config.method)
    # Those whose passes are read as this release has them; it captures none of a draft model.
    known = {each.value for each in (Method.EAGLE, Method.EAGLE3, Method.MTP)}
    if method not in known:
        note(f"speculative.method: vLLM runs {config.method}, written as eagle: only the numbers of drafts matter here")
    fused = bool(getattr(runner.speculator, "supports_decode_metadata_update", False))
    schedule = getattr(config, "num_speculative_tokens_per_batch_size", None) or ()
    plain = Speculative(
        method=Method(method) if method in known else Method.EAGLE,
        num_tokens=tokens,
        chain=Chain.FUSED if fused else Chain.SINGLE,
    )
    try:
        return replace(plain, schedule=tuple(sorted((first, last, k) for first, last, k in schedule)))
    except CapturePlannerError as error:
        # vLLM accepts more schedules than a spec does.
        note(f"speculative.schedule: {error}; answers are those of {tokens} drafts for every batch size")
        return plain


def passes(tracks: Sequence[Track], max_num_reqs: int) -> tuple[DraftPass, ...] | None:
    """Return the passes of a drafter that makes all drafts at once; None for others."""
    decodes = [track.manager for track in tracks if track.role is Role.DRAFT_DECODE and not track.specialized]
    found = (DraftPass(query_len=each.decode_query_len, first=1, last=max_num_reqs) for each in decodes)
    return tuple(found) or None


def _lora(runner: Any) -> Lora | None:
    config = runner.vllm_config.lora_config
    return None if config is None else Lora(max_active=config.max_loras, specialize=config.specialize_active_lora)
