"""vLLM's own graph managers, run on a machine without the engine.

The modules that decide are loaded from the unpacked wheel, function for function; of larger modules single
functions are taken from the source. All else that they import is a stub. Nothing is captured: the engine's
``capture`` runs over stand-ins for the device, so that its order and its keys are its own.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from capture_planner.testing.engines.vllm_managers import Case, Configuration, Rows, ScheduleCase, summary

GPU = "vllm.v1.worker.gpu"
AUTOREGRESSIVE = f"{GPU}.spec_decode.target_dependent_ar"
MODULES = (
    "vllm.utils.math_utils",
    "vllm.v1.spec_decode.dynamic.utils",
    f"{GPU}.cudagraph_utils",
    f"{GPU}.dp_utils",
    "vllm.v1.cudagraph_dispatcher",
    f"{GPU}.spec_decode.speculator",
    f"{AUTOREGRESSIVE}.cudagraph_utils",
    f"{AUTOREGRESSIVE}.speculator",
    f"{GPU}.spec_decode.multi_module_mtp.speculator",
    f"{GPU}.spec_decode.dflash.cudagraph",
    f"{GPU}.spec_decode.dflash.speculator",
)
"""Loaded whole, in the order of their imports."""

PIECES = (
    ("vllm.config.compilation", None, ("CUDAGraphMode",)),
    ("vllm.forward_context", None, ("BatchDescriptor",)),
    ("vllm.lora.utils", None, ("get_captured_lora_counts",)),
    ("vllm.v1.worker.utils", None, ("is_uniform_query_len", "get_uniform_decode_token_count")),
)
"""Taken alone from modules that cannot be loaded, into a stub of the same name."""


def _stubs() -> ModuleType:
    path = Path(__file__).with_name("stubs.py")
    spec = importlib.util.spec_from_file_location("stubs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extract(folder: Path, module: str, name: str, scope: dict[str, Any], owner: str | None = None) -> Any:
    """Run one definition of a module alone, in ``scope``; decorators of functions are left out."""
    path = folder / (module.replace(".", "/") + ".py")
    body: Sequence[ast.stmt] = ast.parse(path.read_text()).body
    if owner is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = next(
        node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    )
    if isinstance(found, ast.FunctionDef):
        found.decorator_list = []
    code = ast.Module(body=[found], type_ignores=[])
    future = "from __future__ import annotations\n"
    exec(compile(future + ast.unparse(code), str(path), "exec"), scope)
    return scope[name]


class Support(enum.Enum):
    """Stands for the engine's support levels, of which only the order counts here."""

    UNIFORM_BATCH = 2
    ALWAYS = 3


class _Collected(Exception):
    """Raised in the all-reduce of the first pass, when a rank has said what it has."""


class _Group:
    """Stands for the data-parallel group: the first pass collects, the second answers with the sum."""

    def __init__(self) -> None:
        self.said: list[torch.Tensor] = []
        self.total: torch.Tensor | None = None

    def cpu_all_reduce_(self, tensor: torch.Tensor) -> None:
        if self.total is None:
            self.said.append(tensor.clone())
            raise _Collected
        tensor.copy_(self.total)


class Engine:
    """The engine's modules, and answers in the form of ``testing.engines.vllm_managers.answers``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, ModuleType] = {}

    def answers(self, case: Case) -> dict[str, Any]:
        """Return the graphs of each role in order, each batch's answers, each step's."""
        found = case.configuration
        return _Legacy(self, found).answers(case) if found.runner == "v1" else _V2(self, found).answers(case)

    def schedule_answer(self, case: ScheduleCase) -> list[int] | None:
        """Return the draft tokens of each batch size, or None where the schedule is refused."""
        build = self.modules["vllm.v1.spec_decode.dynamic.utils"].build_dynamic_sd_schedule_lookup
        try:
            return build(case.schedule, case.max_num_seqs, case.num_speculative_tokens)  # type: ignore[no-any-return]
        except (TypeError, ValueError):
            return None

    def piece(self, module: str, name: str, owner: str, **scope: Any) -> Callable[..., Any]:
        """Return one method of a class as a function."""
        return extract(self.folder, module, name, scope, owner)  # type: ignore[no-any-return]


@contextmanager
def engine(folder: Path | str) -> Iterator[Engine]:
    """Load the engine's modules while the context lasts; afterwards none is left in ``sys.modules``."""
    folder, stubs = Path(folder), _stubs()
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    finder = stubs.Finder("vllm")
    sys.meta_path.append(finder)
    try:
        found = Engine(folder)

        def stub(name: str) -> ModuleType:
            if name not in sys.modules:
                parent = name.rpartition(".")[0]
                sys.modules[name] = stubs.StubModule(name)
                sys.modules[name].__path__ = []
                if parent:
                    stub(parent)
            return sys.modules[name]

        import dataclasses

        for name, _, pieces in PIECES:
            module = stub(name)
            scope: dict[str, Any] = {"enum": enum, "__name__": name}
            for piece in pieces:
                if piece == "BatchDescriptor":
                    scope["dataclass"] = dataclasses.dataclass
                setattr(module, piece, extract(folder, name, piece, scope))
        # Some modules import the modes from the package.
        stub("vllm.config").CUDAGraphMode = sys.modules["vllm.config.compilation"].CUDAGraphMode
        for name in MODULES:
            stub(name.rpartition(".")[0])
            path = folder / (name.replace(".", "/") + ".py")
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            found.modules[name] = module
        yield found
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


class _V2:
    """One configuration under model runner V2."""

    def __init__(self, engine: Engine, found: Configuration) -> None:
        self.found, self.engine = found, engine
        modules = engine.modules
        self.table, self.ranks = modules[f"{GPU}.cudagraph_utils"], modules[f"{GPU}.dp_utils"]
        self.modes = sys.modules["vllm.config.compilation"].CUDAGraphMode  # type: ignore[attr-defined]
        stubs = type(sys.modules["vllm"])
        anything = stubs("vllm._anything").Device()
        self.log: list[Any] = []
        self.table.torch = SimpleNamespace(
            cuda=SimpleNamespace(CUDAGraph=anything, graph=lambda *a, **k: anything),
            inference_mode=torch.inference_mode,
            accelerator=anything,
        )
        self.table.compilation_counter = SimpleNamespace(num_cudagraph_captured=0)
        # The engine says what it captures as it captures it.
        self.table.logger = SimpleNamespace(debug=lambda *said: self.log.append(said[2]))
        mode = self.modes[found.mode.value]
        k = found.num_speculative_tokens
        self.speculative = (
            SimpleNamespace(
                num_speculative_tokens_per_batch_size=None
                if found.schedule is None
                else [list(tier) for tier in found.schedule],
                uses_dynamic_speculative_decoding=lambda: found.schedule is not None,
                num_speculative_tokens=k,
            )
            if k
            else None
        )
        self.config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=found.max_num_seqs),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=list(found.sizes), max_cudagraph_capture_size=found.max_size
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=self.speculative,
            num_speculative_tokens=k,
        )
        self.target = self.table.CudaGraphManager(
            self.config, None, mode, 1 + k, list(found.lora_cases), found.varlen
        )
        self.graphs = {"target": self._capture(self.target)}
        self.dp_size, self.dp_rank = 1, 0
        self.drafter = None
        if found.drafter == "chain":
            self._chain(mode)
        elif found.drafter == "modules":
            self._modules(mode)
        elif found.drafter == "parallel":
            self._parallel(mode)
        self.gather = engine.piece(
            f"{GPU}.model_runner",
            "gather_batch_req_state",
            "GPUModelRunner",
            np=np,
            BatchReqState=SimpleNamespace,
            sort_batch_req_ids=lambda tokens, drafts, width: list(tokens),
            get_uniform_decode_token_count=sys.modules["vllm.v1.worker.utils"].get_uniform_decode_token_count,  # type: ignore[attr-defined]
        )
        lookup = modules["vllm.v1.spec_decode.dynamic.utils"].build_dynamic_sd_schedule_lookup
        self.lookup = (
            None
            if found.schedule is None
            else lookup(self.speculative.num_speculative_tokens_per_batch_size, found.max_num_seqs, k)  # type: ignore[union-attr]
        )

    def answers(self, case: Case) -> dict[str, Any]:
        return {
            "graphs": {role: summary(rows) for role, rows in self.graphs.items()},
            "batches": [self._batch(rows, loras, None)[0] for rows, loras in case.batches],
            "steps": [self._step(step) for step in case.steps],
        }

    def _capture(self, manager: Any) -> list[list[Any]]:
        self.log.clear()
        if manager.needs_capture():
            manager.capture(lambda desc, warmup: lambda mode: None)
        return [self._graph(desc, None) for desc in self.log]

    def _graph(self, desc: Any, steps: int | None) -> list[Any]:
        return [
            desc.cg_mode.name[0],
            desc.num_tokens,
            desc.num_reqs,
            desc.uniform_token_count,
            desc.max_query_len,
            desc.num_active_loras,
            steps,
        ]

    def _row(self, desc: Any, steps: int | None = None) -> list[Any]:
        if not desc.cg_mode:
            return ["N", desc.num_tokens]
        mode, tokens, reqs, width, _, loras, _ = self._graph(desc, None)
        return [mode, tokens, reqs, width, loras, *(() if steps is None else (steps,))]

    def _chain(self, mode: Any) -> None:
        """Make the engine's speculator without its buffers, and let it make and capture its managers."""
        module = self.engine.modules[f"{AUTOREGRESSIVE}.speculator"]
        keys = self.engine.modules[f"{AUTOREGRESSIVE}.cudagraph_utils"]
        keys.prepare_inputs_to_capture = lambda *a, **k: (None, None)
        cls = module.TargetDependentARSpeculator
        cls.__abstractmethods__ = frozenset()
        drafter = self.drafter = object.__new__(cls)
        anything = type(sys.modules["vllm"])("vllm._anything")
        for name in ("last_token_indices", "idx_mapping", "model", "model_state", "target_input_buffers"):
            setattr(drafter, name, anything.Tensor())
        for name in ("block_tables", "target_attn_groups", "attn_groups", "kv_cache_config", "hidden_states"):
            setattr(drafter, name, anything.Tensor())
        for name in ("draft_tokens", "current_draft_step", "input_buffers", "sample_src_positions"):
            setattr(drafter, name, anything.Tensor())
        drafter.vllm_config, drafter.device = self.config, None
        drafter.vllm_config.model_config = SimpleNamespace(max_model_len=1 << 20)
        drafter.speculative_config = self.speculative
        drafter.num_speculative_steps = self.found.num_speculative_tokens
        drafter.max_num_reqs = self.found.max_num_seqs
        drafter.method, drafter.pcp_manager, drafter.eplb_state = "eagle", None, None
        drafter.supports_mm_inputs = False
        drafter.attn_groups = [
            [
                SimpleNamespace(
                    supports_draft_decode_metadata_update=self.found.draft_fused,
                    backend=SimpleNamespace(get_name=lambda: "any"),
                )
            ]
        ]
        drafter._configure_decode_metadata_update()
        module.prepare_prefill_inputs = module.prepare_decode_inputs = lambda *a, **k: None
        drafter._copy_request_inputs = lambda *a, **k: None
        drafter._prefill = lambda *a, **k: None
        chains: list[tuple[bool, int]] = []
        drafter._generate_fused_drafts = lambda *a, num_speculative_steps: chains.append(
            (True, num_speculative_steps)
        )
        drafter._generate_draft = lambda *a, num_speculative_steps: chains.append(
            (False, num_speculative_steps)
        )
        drafter.init_cudagraph_manager(mode)
        self.log.clear()
        logged: dict[int, list[Any]] = {}
        prefill, decode = drafter.prefill_cudagraph_manager, drafter.decode_cudagraph_manager
        drafter.capture()
        split = sum(len(descs) for descs in prefill._capture_descs.values())
        logged[0], logged[1] = self.log[:split], self.log[split:]
        self.graphs["draft_prefill"] = [self._graph(desc, None) for desc in logged[0]]
        self.chains = {
            desc: (k - 1 if fused else None) for desc, (fused, k) in zip(logged[1], chains[::2], strict=True)
        }
        assert chains[::2] == chains[1::2]
        if drafter.num_speculative_steps > 1:
            self.graphs["draft_decode"] = [self._graph(desc, self.chains[desc]) for desc in logged[1]]
        assert set(decode.graphs) == set(logged[1])

    def _modules(self, mode: Any) -> None:
        module = self.engine.modules[f"{GPU}.spec_decode.multi_module_mtp.speculator"]
        module.is_breakable_cudagraph_enabled = lambda: False
        self.drafter = SimpleNamespace(
            vllm_config=self.config, device=None, num_speculative_steps=self.found.num_speculative_tokens
        )
        module.MultiModuleMTPSpeculator.init_cudagraph_manager(self.drafter, mode)
        self.graphs["draft_prefill"] = self._capture_base(self.drafter.cudagraph_manager)

    def _parallel(self, mode: Any) -> None:
        module = self.engine.modules[f"{GPU}.spec_decode.dflash.speculator"]
        module.AttentionCGSupport = Support
        self.drafter = SimpleNamespace(
            vllm_config=self.config,
            device=None,
            num_query_per_req=self.found.draft_query_len,
            attn_cg_support=SimpleNamespace(min_cg_support=Support.ALWAYS, min_cg_attn_backend="any"),
        )
        module.DFlashSpeculator.init_cudagraph_manager(self.drafter, mode)
        self.graphs["draft_decode"] = self._capture_base(self.drafter.query_cudagraph_manager)

    def _capture_base(self, manager: Any) -> list[list[Any]]:
        """Capture by the manager's own order, without the drafter's inputs."""
        self.log.clear()
        if manager.needs_capture():
            self.table.CudaGraphManager.capture(manager, lambda desc, warmup: lambda mode: None)
        return [self._graph(desc, None) for desc in self.log]

    def _asked(self, rows: Rows) -> tuple[int, int, int | None, int | None, bool]:
        """Return requests, tokens, uniform, longest and eligibility as the model runner finds them."""
        names = [str(index) for index in range(len(rows))]
        scheduled = {name: tokens for name, (tokens, _) in zip(names, rows, strict=True)}
        prompts = np.array([10_000 if is_prompt else 5 for _, is_prompt in rows])
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
        )
        runner = SimpleNamespace(
            decode_query_len=1 + self.found.num_speculative_tokens,
            req_states=SimpleNamespace(
                req_id_to_index={name: index for index, name in enumerate(names)},
                prefill_len=SimpleNamespace(np=prompts),
                # A prompt that has just begun: one token of it is no decode yet.
                num_computed_prefill_tokens=np.array([0 if is_prompt else 5 for _, is_prompt in rows]),
            ),
            use_pp=False,
            adaptive_verification=None,
            pcp_manager=None,
        )
        state, uniform = self.gather(runner, output, False)
        longest = None if state.has_prefill else max(scheduled.values())
        return len(rows), state.num_tokens, uniform, longest, state.decode_graph_eligible

    def _target(self, rows: Rows, loras: int) -> tuple[Any, Any, dict[str, Any]]:
        k = self.found.num_speculative_tokens
        if rows:
            reqs, tokens, uniform, longest, eligible = self._asked(rows)
        else:
            # The dummy batch of a rank without work.
            reqs, tokens, uniform, longest, eligible = 1, 1 + k, 1 + k, 1 + k, True
            rows, loras = ((1 + k, False),), self.found.max_loras + 1 if self.found.max_loras else 0
        desc, state = self.ranks.dispatch_cg_and_sync_dp(
            self.target,
            reqs,
            tokens,
            uniform,
            self.dp_size,
            self.dp_rank,
            max_query_len=longest,
            num_active_loras=loras,
        )
        asked = {"rows": rows, "reqs": reqs, "tokens": tokens, "uniform": uniform, "eligible": eligible}
        return desc, state, asked

    def _batch(self, rows: Rows, loras: int, state: Any) -> tuple[list[list[Any]], Any]:
        desc, state, asked = self._target(rows, loras)
        found = [self._row(desc)]
        if self.found.drafter == "chain":
            found += self._propose(asked, max(asked["tokens"], desc.num_tokens), state)
        elif self.found.drafter == "modules":
            given, _ = self.ranks.dispatch_cg_and_sync_dp(
                self.drafter.cudagraph_manager,  # type: ignore[attr-defined]
                asked["reqs"],
                max(asked["tokens"], desc.num_tokens),
                asked["uniform"],
                dp_size=self.dp_size,
                dp_rank=self.dp_rank,
                need_eager=False,
                dp_sync_state=state,
            )
            found.append(self._row(given))
        elif self.found.drafter == "parallel":
            found.append(self._whole(asked["reqs"], state))
        return found, state

    def _drafts(self, reqs: int) -> int:
        return self.found.num_speculative_tokens if self.lookup is None else self.lookup[reqs]

    def _propose(self, asked: dict[str, Any], padded: int, state: Any) -> list[list[Any]]:
        """Let the engine's own ``propose`` ask its managers, and note what it is answered."""
        drafter: Any = self.drafter
        module = self.engine.modules[f"{AUTOREGRESSIVE}.speculator"]
        given: list[Any] = []
        real = self.ranks.dispatch_cg_and_sync_dp

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            answer = real(*args, **kwargs)
            given.append(answer[0])
            return answer

        module.dispatch_cg_and_sync_dp = dispatch
        drafter.dp_size, drafter.dp_rank = self.dp_size, self.dp_rank
        drafter.prefill_cudagraph_manager.run_fullgraph = lambda desc: None
        decoded: list[Any] = []

        def decode(reqs: int, skip: bool, desc: Any, *rest: Any) -> None:
            decoded.append(desc)

        drafter._fused_multi_step_decode = drafter._multi_step_decode = decode
        rows = asked["rows"]
        anything = drafter.model
        batch = SimpleNamespace(
            num_reqs=asked["reqs"],
            num_tokens=asked["tokens"],
            num_tokens_after_padding=padded,
            num_scheduled_tokens=np.array([tokens for tokens, _ in rows]),
            seq_lens_cpu_upper_bound=torch.ones(asked["reqs"], dtype=torch.int64),
            decode_graph_eligible=asked["eligible"],
            idx_mapping=anything,
            seq_lens=anything,
        )
        drafter.propose(
            batch, {}, {}, anything, None, anything, anything, anything, anything, anything, anything,
            dp_sync_state=state, num_speculative_tokens=self._drafts(asked["reqs"]),
        )  # fmt: skip
        found = [self._row(given[0])]
        if drafter.num_speculative_steps > 1:
            found.append(self._row(decoded[0], self._steps(decoded[0])) if decoded else [])
        return found

    def _steps(self, desc: Any) -> int | None:
        return self.chains.get(desc)

    def _whole(self, reqs: int, state: Any) -> list[Any]:
        """Ask as ``DFlashSpeculator.propose`` does; its state for several ranks is the engine's."""
        if self._drafts(reqs) == 0:
            return []
        width = self.drafter.num_query_per_req  # type: ignore[attr-defined]
        base = self.engine.modules[f"{GPU}.spec_decode.speculator"].DraftModelSpeculator
        tokens = reqs * width
        if state is not None:
            state, tokens = base._build_uniform_batch_dp_sync(self.drafter, state, reqs, width)
        desc, _ = self.ranks.dispatch_cg_and_sync_dp(
            self.drafter.query_cudagraph_manager,  # type: ignore[attr-defined]
            reqs,
            tokens,
            uniform_token_count=width,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=False,
            dp_sync_state=state,
        )
        return self._row(desc)

    def _step(self, step: Sequence[tuple[Rows, int]]) -> list[list[list[Any]]]:
        group = _Group()
        self.ranks.get_dp_group = lambda: group  # type: ignore[attr-defined]
        self.dp_size = len(step)
        for self.dp_rank, (rows, loras) in enumerate(step):
            try:
                self._target(rows, loras)
            except _Collected:
                continue
            raise AssertionError("a rank did not speak")
        group.total = torch.stack(group.said).sum(0).to(torch.int32)
        found = []
        for self.dp_rank, (rows, loras) in enumerate(step):
            found.append(self._batch(rows, loras, None)[0])
        self.dp_size, self.dp_rank = 1, 0
        return found


class _Legacy:
    """One configuration under the legacy dispatcher."""

    def __init__(self, engine: Engine, found: Configuration) -> None:
        self.found = found
        self.module = engine.modules["vllm.v1.cudagraph_dispatcher"]
        modes = sys.modules["vllm.config.compilation"].CUDAGraphMode  # type: ignore[attr-defined]
        self.mode = modes[found.mode.value]
        compilation = SimpleNamespace(
            cudagraph_capture_sizes=list(found.sizes),
            max_cudagraph_capture_size=found.max_size,
            cudagraph_mode=self.mode,
            is_attention_compiled_piecewise=lambda: True,
            compile_sizes=None,
            cudagraph_specialize_lora=found.capture_fewer,
        )
        lora = (
            SimpleNamespace(max_loras=found.max_loras, specialize_active_lora=found.specialize_lora)
            if found.max_loras
            else None
        )
        k = found.num_speculative_tokens
        config = SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=k,
            lora_config=lora,
            scheduler_config=SimpleNamespace(max_num_seqs=found.max_num_seqs),
        )
        if self.mode.decode_mode() == modes.FULL and k > 0:
            round_up = engine.modules["vllm.utils.math_utils"].round_up
            adjust = engine.piece(
                "vllm.config.compilation",
                "adjust_cudagraph_sizes_for_spec_decode",
                "CompilationConfig",
                round_up=round_up,
            )
            adjust(compilation, 1 + k)
        self.target = self.module.CudagraphDispatcher(config)
        self.target.initialize_cudagraph_keys(self.mode, 1 + k)
        self.is_decode = engine.piece(
            "vllm.v1.worker.gpu_model_runner", "_is_uniform_decode", "GPUModelRunner"
        )
        self.drafter = None
        if found.drafter == "chain":
            initialize = engine.piece(
                "vllm.v1.spec_decode.llm_base_proposer",
                "initialize_cudagraph_keys",
                "SpecDecodeBaseProposer",
                CUDAGraphMode=modes,
            )
            # The drafter is asked without adapters, and keeps the adapter cases that it has no use for.
            self.drafter = self.module.CudagraphDispatcher(config)
            proposer = SimpleNamespace(
                speculative_config=SimpleNamespace(enforce_eager=False), cudagraph_dispatcher=self.drafter
            )
            initialize(proposer, self.mode)

    def answers(self, case: Case) -> dict[str, Any]:
        graphs = {"target": summary(self._graphs(self.target))}
        if self.drafter is not None:
            # It is captured as it is asked: without adapters, whatever keys it was given.
            rows = [row for row in self._graphs(self.drafter) if row[5] == 0]
            graphs |= {role: summary(rows) for role in ("draft_prefill", "draft_decode")}
        return {
            "graphs": graphs,
            "batches": [self._batch(rows, loras) for rows, loras in case.batches],
            "steps": [],
        }

    def _graphs(self, dispatcher: Any) -> list[list[Any]]:
        return [self._graph(mode, desc) for mode, descs in dispatcher.get_capture_descs() for desc in descs]

    def _graph(self, mode: Any, desc: Any) -> list[Any]:
        width = 1 + self.found.num_speculative_tokens if desc.uniform else None
        return [mode.name[0], desc.num_tokens, desc.num_reqs, width, None, desc.num_active_loras, None]

    def _batch(self, rows: Rows, loras: int) -> list[list[Any]]:
        tokens = sum(count for count, _ in rows)
        is_decode = self.is_decode(
            max_num_scheduled_tokens=max(count for count, _ in rows),
            uniform_decode_query_len=1 + self.found.num_speculative_tokens,
            num_tokens=tokens,
            num_reqs=len(rows),
        )
        found = [
            self._row(
                *self.target.dispatch(
                    num_tokens=tokens, uniform_decode=is_decode, has_lora=loras > 0, num_active_loras=loras
                )
            )
        ]
        if self.drafter is not None:
            found += [self._row(*self.drafter.dispatch(count)) for count in (tokens, len(rows))]
        return found

    def _row(self, mode: Any, desc: Any) -> list[Any]:
        if not mode:
            return ["N", desc.num_tokens]
        kind, tokens, reqs, width, _, loras, _ = self._graph(mode, desc)
        return [kind, tokens, reqs, width, loras]
