"""Observing vLLM's own graph managers, on a machine without the engine.

The managers, the drafters and the dispatch over ranks are the wheel's; what the observer counts is compared with what
they answer. What of vLLM cannot be loaded there, the model runner, is read: its functions and attributes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs

from capture_planner import codec
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.modes import Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.observation import Observation, ObservedRole
from capture_planner.records.spec import Limits, Lora
from capture_planner_vllm.inside import device, facts, splits, trials
from capture_planner_vllm.inside import observe_seams as seams
from capture_planner_vllm.inside.captures import Captures
from capture_planner_vllm.inside.steps import Track
from capture_planner_vllm.inside.watch import DISPATCHED, SPECIALIZED, StepWatch
from engines.generators.vllm_managers import Case, Rows
from support.files import module_at

HERE = Path(__file__).parent
managers = module_at(HERE / "vllm_managers.py")
STANDIN = HERE.parent / "standin"

ABSENT = "not in the file"

CONFIGURATIONS = {
    "compilation_config": ("config/compilation.py", "CompilationConfig"),
    "scheduler_config": ("config/scheduler.py", "SchedulerConfig"),
    "model_config": ("config/model.py", "ModelConfig"),
    "cache_config": ("config/cache.py", "CacheConfig"),
    "parallel_config": ("config/parallel.py", "ParallelConfig"),
    "speculative_config": ("config/speculative.py", "SpeculativeConfig"),
    "lora_config": ("config/lora.py", "LoRAConfig"),
}

OTHERS = (
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner", (*facts.RUNNER, "kv_cache_config", "attn_groups")),
    *((f"{each.module[5:].replace('.', '/')}.py", each.name, each.fields) for each in seams.RECORDS),
    ("config/lora.py", "LoRAConfig", ("max_loras", "specialize_active_lora")),
    ("config/vllm.py", "VllmConfig", ("max_concurrent_batches",)),
    ("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager", ("graphs", "pool", "_capture_descs", "max_num_reqs")),
    ("v1/worker/gpu/cudagraph_utils.py", "ModelCudaGraphManager", trials.OUTPUTS),
    *(
        (f"{module[5:].replace('.', '/')}.py", name, ("_all_instances", "graph_pool", table))
        for module, name, table in trials.WRAPPERS
    ),
    ("v1/worker/workspace.py", "WorkspaceManager", ("_locked",)),
    ("platforms/interface.py", "Platform", ("_global_graph_pool",)),
    ("v1/attention/backends/flash_attn.py", "FlashAttentionMetadataBuilder", ("max_cudagraph_size",)),
    ("v1/kv_cache_interface.py", "KVCacheConfig", ("num_blocks", "kv_cache_tensors", "kv_cache_groups")),
    ("config/parallel.py", "ParallelConfig", ("data_parallel_rank", "rank", "world_size")),
)
"""Files, classes and the attributes that are read of them, besides settings."""


def problems(folder: Path) -> Iterator[str]:
    """Yield what of a wheel is not as the observer and the stand-in have it."""
    for seam in seams.SEAMS:
        theirs, own = (parameters(root, seam.module, seam.name) for root in (folder, STANDIN))
        if theirs is None or theirs[: len(seam.parameters)] != seam.parameters:
            yield f"{seam.module}.{seam.name}: {theirs}, expected {seam.parameters}"
        if own != theirs and seam not in (seams.SAMPLE, seams.SHUTDOWN, seams.FORWARD, seams.OUTPUT):
            yield f"{seam.module}.{seam.name}: the stand-in has {own}, the wheel {theirs}"
    settings = [path.split(".") for _, path in (*facts.SETTINGS, *facts.SPECULATIVE)]
    read = [(*CONFIGURATIONS[owner], (name,)) for owner, name in settings]
    for file, owner, names in (*read, *OTHERS):
        missing = set(names) - attributes(folder / "vllm" / file, owner)
        if missing:
            yield f"{file}: {owner} has no {', '.join(sorted(missing))}"
    build = "FlashAttentionMetadataBuilder.build"
    theirs = parameters(folder, splits.BACKEND, build)
    if theirs != ("self", "common_prefix_len", "common_attn_metadata", "fast_build"):
        yield f"{splits.BACKEND}.{build}: {theirs}"
    text = "".join(path.read_text() for path in (folder / "vllm/v1/worker/gpu/spec_decode").rglob("*.py"))
    for name in facts.DRAFTERS:
        if f"self.{name}" not in text:
            yield f"no drafter has a {name}"


def _class(path: Path, name: str) -> ast.ClassDef:
    body = ast.parse(path.read_text()).body
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def parameters(folder: Path, module: str, name: str) -> tuple[str, ...] | None:
    """Return the names of a function's parameters, from its source; None where there is no such function."""
    path = folder / (module.replace(".", "/") + ".py")
    *owner, function = name.split(".")
    body = _class(path, owner[0]).body if owner else ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return parameters(folder, str(node.module), name)
        if isinstance(node, ast.FunctionDef) and node.name == function:
            every = node.args
            return tuple(each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs))
    return None


def attributes(path: Path, owner: str) -> set[str]:
    """Return the fields, methods and ``self`` attributes of a class."""
    found = set()
    for node in ast.walk(_class(path, owner)):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


@attrs.define
class Counts:
    """Takes what a watch counts."""

    steps: list[tuple[Any, ...]] = attrs.field(factory=list)

    def add(self, outcome: Any, steps: int) -> None:
        self.steps += [outcome] * steps

    def sample(self, *key: Any) -> None:
        raise AssertionError("nothing is timed here")

    def interval(self, *key: Any) -> None:
        raise AssertionError("no step follows another here")

    def draft(self, drafted: Any, accepted: Any) -> None:
        raise AssertionError("nothing is drafted here")

    def vector(self, shared: Any) -> None:
        raise AssertionError("the ranks' sums are not observed here")

    def idle(self) -> None:
        raise AssertionError("no rank is idle here")


def _idle(desc: Any, warmup: bool) -> Callable[[Any], None]:
    """Stand in for vLLM's factory of forwards."""
    return lambda mode: None


class ObservedEngine:
    """The managers of one case, observed."""

    def __init__(self, engine: Any, case: Case) -> None:
        device.free_memory, device.settle = lambda: 1 << 40, lambda: None
        self.case, self.captures, self.read, self.tried = case, Captures(), 0, 0
        module = engine.modules[seams.MANAGERS]
        table = module.CudaGraphManager
        original = table.capture
        table.capture = self._capture(original, module)
        try:
            self.engine = managers._V2(engine, case.configuration)
        finally:
            table.capture = original
        self.tracks = facts.tracks(self._runner(), self.captures, self._no_note)
        self.counts = Counts()
        self.watch = StepWatch(self.tracks, self.counts, object)  # of all steps, as it remembers those before

    def _capture(self, original: Callable[..., Any], module: Any) -> Callable[..., Any]:
        def capture(manager: Any, create_forward_fn: Any, *arguments: Any) -> None:
            log = self.captures.begin(manager, create_forward_fn)
            original(manager, log.create_forward, *arguments)
            log.end()
            # What is compared from here on is that of an engine that tried other sizes.
            alone = dict.fromkeys(("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"), 1)
            config = SimpleNamespace(parallel_config=SimpleNamespace(**alone))
            runner = SimpleNamespace(vllm_config=config, speculator=None)
            manager.vllm_config.scheduler_config.max_num_batched_tokens = 2048
            tried = trials.Trials(runner, 60.0, self._no_note)
            with mock.patch.object(module, "logger"):
                self.tried += len(tried.of(manager, _idle, original, lambda *_: [None]))

        return capture

    def _no_note(self, text: str) -> None:
        raise AssertionError(text)

    def _runner(self) -> Any:
        v2 = self.engine
        if v2.speculative is not None:
            v2.speculative.method = "eagle"
        v2.config.lora_config = None
        if v2.drafter is not None and self.case.configuration.drafter != "chain":
            v2.drafter.supports_decode_metadata_update = False
        return SimpleNamespace(
            vllm_config=v2.config,
            cudagraph_manager=v2.target,
            speculator=v2.drafter,
            num_speculative_steps=self.case.configuration.num_speculative_tokens,
            **dict.fromkeys(("model_state", "decode_query_len", "max_num_reqs", "max_num_tokens")),
        )

    def row(self, role: Role, graph: int | None) -> list[Any] | None:
        """Return a graph in the oracle's form."""
        if graph is None:
            return None
        track = next(track for track in self.tracks if track.role is role)
        entry: Entry = track.graphs[graph].entry
        found = [entry.mode.value[0], entry.num_tokens, entry.num_reqs, entry.query_len, entry.active_loras]
        return found if entry.draft_steps is None else [*found, entry.draft_steps]

    def differences(self) -> Iterator[str]:
        """Yield where graphs, counts or answers differ from the engine's."""
        captured = {
            role: [[*row[:4], *row[5:7]] for row in rows if row[7] == 1]
            for role, rows in self.engine.graphs.items()
            if rows
        }
        own = {
            track.role.value: [
                [e.mode.value[0], e.num_tokens, e.num_reqs, e.query_len, e.active_loras, e.draft_steps]
                for e in (graph.entry for graph in track.graphs)
            ]
            for track in self.tracks
            if track.graphs
        }
        if captured != own:
            yield f"graphs: {own} for the engine's {captured}"
        for rows, loras in self.case.batches:
            counted, answers = self._counted(lambda rows=rows, loras=loras: self.engine._batch(rows, loras, None)[0])
            if counted != answers:
                yield f"{rows}, {loras}: counted {counted} for the engine's {answers}"
            asked, read = self._asked(rows, loras)
            if asked != answers:
                yield f"{rows}, {loras}: asked {asked} for the engine's {answers}"
            if any(mine not in (row, ABSENT) for mine, row in zip(read, asked, strict=True)):
                yield f"{rows}, {loras}: the file has {read} for the engine's {answers}"
        for ranks in self.case.steps:
            counted, answers = self._counted(lambda ranks=ranks: [*chain.from_iterable(self.engine._step(ranks))])
            if sorted(counted, key=str) != sorted(answers, key=str):  # those that are alike are counted together
                yield f"{ranks}: counted {counted} for the engine's {answers}"

    def _counted(self, step: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
        """Run a step; return the graphs of its roles as they are counted, and as the engine answers."""
        watch, ranks = self.watch, self.engine.ranks
        real = ranks.dispatch_cg_and_sync_dp
        drafters = self.engine.engine.modules[seams.DRAFTERS].SpeculatorCudaGraphManager
        specialize = drafters.specialize_spec_tokens

        def dispatch(manager: Any, num_reqs: int, num_tokens: int, uniform_token_count: Any, *a: Any, **k: Any) -> Any:
            answer = real(manager, num_reqs, num_tokens, uniform_token_count, *a, **k)
            watch.log((DISPATCHED, manager, num_reqs, num_tokens, uniform_token_count, k, answer[0]))
            return answer

        def specialized(manager: Any, desc: Any, num_speculative_tokens: int) -> Any:
            answer = specialize(manager, desc, num_speculative_tokens)
            watch.log((SPECIALIZED, answer, num_speculative_tokens))
            return answer

        ranks.dispatch_cg_and_sync_dp, drafters.specialize_spec_tokens = dispatch, specialized
        try:
            answers = step()
        finally:
            ranks.dispatch_cg_and_sync_dp, drafters.specialize_spec_tokens = real, specialize
        watch.flush()
        counted = [self.row(outcome[0], outcome[6]) for outcome in self.counts.steps]
        self.counts.steps.clear()
        return counted, [plain(row) for row in answers if row]

    def _asked(self, rows: Rows, loras: int) -> tuple[list[Any], list[Any]]:
        """Return the answers of the probe's dispatchers to the same batch, and those of the observation's file."""
        reqs, tokens, uniform, longest, _ = self.engine._asked(rows)
        past = uniform is not None or longest is not None
        asked, read = [], []
        for track in self.tracks:
            shape = {"num_reqs": reqs, "num_tokens": tokens, "query_len": uniform, "past_prompt": past}
            if track.role is Role.DRAFT_DECODE:
                if self.engine._drafts(reqs) < (2 if track.specialized else 1):
                    continue
                width = track.manager.decode_query_len
                shape = {"num_reqs": reqs, "num_tokens": reqs * width, "query_len": width, "past_prompt": True}
            batch = Batch(role=track.role, active_loras=loras, **shape)  # type: ignore[arg-type]
            graph, _ = facts.dispatcher(track, self.tracks[0])(batch)
            asked.append(self.row(track.role, graph))
            read.append(self._from_file(attrs.evolve(batch, active_loras=0) if track.role.is_drafter else batch, track))
        return asked, read

    def _from_file(self, batch: Batch, track: Track) -> Any:
        """Return the answer that the file has."""
        answer = self.emulation.dispatch(batch)
        if answer.reason is Reason.NOT_ADMISSIBLE:
            return ABSENT
        self.read += 1
        entries = [graph.entry for graph in track.graphs]
        return self.row(track.role, None if answer.entry is None else entries.index(answer.entry))

    @cached_property
    def emulation(self) -> Emulation:
        """The file of the observation as a deployment."""
        found = self.case.configuration
        base = Observation(
            engine="vllm",
            engine_version="0",
            started="2026-11-22T00:00:00Z",
            model="any",
            limits=Limits(max_num_reqs=found.max_num_seqs, max_num_tokens=max(*found.sizes, 64)),
            speculative=self.tracks[0].speculative,
            drafts=facts.passes(self.tracks, found.max_num_seqs),
            lora=Lora(max_active=found.max_loras, specialize=found.specialize_lora) if found.max_loras else None,
            roles=tuple(ObservedRole(role=track.role, mode=track.mode, graphs=track.graphs) for track in self.tracks),
        )
        return emulation_of(codec.loads(codec.dumps(facts.with_answers(base, self.tracks)), Observation))


def plain(row: list[Any]) -> list[Any] | None:
    """Return an answer of the oracle; None for an eager one."""
    return None if row[0] == "N" else row
