"""vLLM's own graph managers, run on a machine without the engine.

Nothing is captured: ``capture`` runs over stand-ins for the device, so that order and keys are the engine's.
A drafter's ``propose`` runs over stand-ins for its buffers, and asks its managers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engines.generators.vllm_managers import Case, Configuration, Rows, ScheduleCase, summary
from support.files import module_at

HERE = Path(__file__).parent
loading = module_at(HERE / "vllm_loading.py")
legacy = module_at(HERE / "vllm_legacy.py")
standins = module_at(HERE / "vllm_standins.py")
GPU, AUTOREGRESSIVE = loading.GPU, loading.AUTOREGRESSIVE


class Engine:
    """The engine's modules, and answers in the form of ``testing.engines.vllm_managers.answers``."""

    def __init__(self, folder: Path, modules: dict[str, Any]) -> None:
        self.folder, self.modules = folder, modules
        self._pieces: dict[tuple[str, str, str], Callable[..., Any]] = {}

    def answers(self, case: Case) -> dict[str, Any]:
        """Return the graphs of each role in order, each batch's answers, each step's."""
        found = case.configuration
        return (legacy.Legacy if found.runner == "v1" else _V2)(self, found).answers(case)

    def schedule_answer(self, case: ScheduleCase) -> list[int] | None:
        """Return the draft tokens of each batch size, or None where the schedule is refused."""
        build = self.modules["vllm.v1.spec_decode.dynamic.utils"].build_dynamic_sd_schedule_lookup
        try:
            return build(case.schedule, case.max_num_seqs, case.num_speculative_tokens)  # type: ignore[no-any-return]
        except (TypeError, ValueError):
            return None

    def piece(self, module: str, name: str, owner: str, **scope: Any) -> Callable[..., Any]:
        """Return one method of a class as a function; the first scope given for it stays."""
        key = (module, owner, name)
        if key not in self._pieces:
            self._pieces[key] = loading.extract(self.folder, module, name, scope, owner)
        return self._pieces[key]


@contextmanager
def engine(folder: Path | str) -> Iterator[Engine]:
    """Load the engine's modules from an unpacked wheel while the context lasts."""
    with loading.loaded(Path(folder)) as modules:
        yield Engine(Path(folder), modules)


class _V2:
    """One configuration under model runner V2."""

    def __init__(self, engine: Engine, found: Configuration) -> None:
        self.found, self.engine = found, engine
        modules = engine.modules
        self.table, self.ranks = modules[f"{GPU}.cudagraph_utils"], modules[f"{GPU}.dp_utils"]
        self.modes = modules["vllm.config.compilation"].CUDAGraphMode
        anything = modules["anything"].Device()
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
        schedule = None if found.schedule is None else [list(tier) for tier in found.schedule]
        self.speculative = standins.speculative(k, schedule) if k else None
        self.config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=found.max_num_seqs),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=list(found.sizes), max_cudagraph_capture_size=found.max_size
            ),
            parallel_config=standins.parallel(found.overlap),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=self.speculative,
            num_speculative_tokens=k,
        )
        cases, parts = list(found.settings.lora_cases), standins.runner(found.overlap)
        self.target = self.table.CudaGraphManager(self.config, None, mode, 1 + k, cases, found.varlen, parts)
        self.graphs = {"target": self._capture(self.target)}
        self.dp_size, self.dp_rank = 1, 0
        self.drafter: Any = None
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
            get_uniform_decode_token_count=modules["vllm.v1.worker.utils"].get_uniform_decode_token_count,
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
            "batches": [self._alone(rows, loras) for rows, loras in case.batches],
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
            desc.num_ubatches,
        ]

    def _row(self, desc: Any, steps: int | None = None) -> list[Any]:
        if not desc.cg_mode:
            return ["N", desc.num_tokens]
        mode, tokens, reqs, width, _, loras, _, _ = self._graph(desc, None)
        return [mode, tokens, reqs, width, loras, *(() if steps is None else (steps,))]

    def _chain(self, mode: Any) -> None:
        """Make the engine's speculator without its buffers, and let it make and capture its managers."""
        module = self.engine.modules[f"{AUTOREGRESSIVE}.speculator"]
        keys = self.engine.modules[f"{AUTOREGRESSIVE}.cudagraph_utils"]
        keys.prepare_inputs_to_capture = lambda *a, **k: (None, None)
        cls = module.TargetDependentARSpeculator
        cls.__abstractmethods__ = frozenset()
        drafter = self.drafter = object.__new__(cls)
        anything = self.engine.modules["anything"]
        for name in ("last_token_indices", "idx_mapping", "model", "model_state", "target_input_buffers"):
            setattr(drafter, name, anything.Tensor())
        for name in ("block_tables", "target_attn_groups", "attn_groups", "kv_cache_config", "hidden_states"):
            setattr(drafter, name, anything.Tensor())
        for name in ("draft_tokens", "current_draft_step", "input_buffers", "sample_src_positions"):
            setattr(drafter, name, anything.Tensor())
        drafter.vllm_config, drafter.device = self.config, None
        drafter.vllm_config.model_config = SimpleNamespace(max_model_len=1 << 20)
        # An attribute before 0.33, and then a property of the configuration.
        vars(drafter)["max_model_len"] = 1 << 20
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
        drafter._generate_fused_drafts = lambda *a, num_speculative_steps: chains.append((True, num_speculative_steps))
        drafter._generate_draft = lambda *a, num_speculative_steps: chains.append((False, num_speculative_steps))
        drafter.init_cudagraph_manager(mode)
        self.log.clear()
        logged: dict[int, list[Any]] = {}
        prefill, decode = drafter.prefill_cudagraph_manager, drafter.decode_cudagraph_manager
        # GPUModelRunner.capture_model asks the target alone whether there is something to capture.
        captures = self.target.needs_capture()
        if captures:
            drafter.capture()
        split = sum(len(descs) for descs in prefill._capture_descs.values()) if captures else 0
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
        module.AttentionCGSupport = standins.Support
        self.drafter = SimpleNamespace(
            vllm_config=self.config,
            device=None,
            num_query_per_req=self.found.draft_query_len,
            attn_cg_support=SimpleNamespace(min_cg_support=standins.Support.ALWAYS, min_cg_attn_backend="any"),
        )
        module.DFlashSpeculator.init_cudagraph_manager(self.drafter, mode)
        self.graphs["draft_decode"] = self._capture_base(self.drafter.query_cudagraph_manager)

    def _capture_base(self, manager: Any) -> list[list[Any]]:
        """Capture by the manager's own order, without the drafter's inputs."""
        self.log.clear()
        if self.target.needs_capture() and manager.needs_capture():
            self.table.CudaGraphManager.capture(manager, lambda desc, warmup: lambda mode: None)
        return [self._graph(desc, None) for desc in self.log]

    def _asked(self, rows: Rows) -> tuple[int, int, int | None, int | None, bool]:
        """Return requests, tokens, uniform, longest and eligibility as the model runner finds them."""
        names = [str(index) for index in range(len(rows))]
        scheduled = {name: tokens for name, (tokens, _) in zip(names, rows, strict=True)}
        lengths = np.array([10_000 if is_prompt else 5 for _, is_prompt in rows])
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
        )
        runner = SimpleNamespace(
            decode_query_len=1 + self.found.num_speculative_tokens,
            req_states=SimpleNamespace(
                req_id_to_index={name: index for index, name in enumerate(names)},
                prefill_len=SimpleNamespace(np=lengths),
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
            parallel_config=self.config.parallel_config,
            allow_ubatching=self.target.ubatch_runner is not None,
            uniform_decode=uniform == 1 + k,
        )
        asked = {"rows": rows, "reqs": reqs, "tokens": tokens, "uniform": uniform, "eligible": eligible}
        return desc, state, asked

    def _alone(self, rows: Rows, loras: int) -> list[list[Any]]:
        """Return the answers of one rank, or where batches are split of one of two that run the same."""
        if self.found.overlap is None:
            return self._batch(rows, loras, None)[0]
        return self._step([(rows, loras)] * 2)[0]

    def _batch(self, rows: Rows, loras: int, state: Any) -> tuple[list[list[Any]], Any]:
        desc, state, asked = self._target(rows, loras)
        found = [self._row(desc)]
        if self.found.drafter == "chain":
            found += self._propose(asked, max(asked["tokens"], desc.num_tokens), state)
        elif self.found.drafter == "modules":
            given, _ = self.ranks.dispatch_cg_and_sync_dp(
                self.drafter.cudagraph_manager,
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
        drafter = self.drafter
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
            found.append(self._row(decoded[0], self.chains.get(decoded[0])) if decoded else [])
        return found

    def _whole(self, reqs: int, state: Any) -> list[Any]:
        """Ask as ``DFlashSpeculator.propose`` does; its state for several ranks is the engine's."""
        if self._drafts(reqs) == 0:
            return []
        width = self.drafter.num_query_per_req
        base = self.engine.modules[f"{GPU}.spec_decode.speculator"].DraftModelSpeculator
        tokens = reqs * width
        if state is not None:
            state, tokens = base._build_uniform_batch_dp_sync(self.drafter, state, reqs, width)
        desc, _ = self.ranks.dispatch_cg_and_sync_dp(
            self.drafter.query_cudagraph_manager,
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
        group = standins.Group()
        self.ranks.get_dp_group = lambda: group
        # Before 0.33 the ranks reduce through torch, over the group's CPU half.
        self.ranks.dist = SimpleNamespace(all_reduce=lambda tensor, group: group.cpu_all_reduce_(tensor))
        self.dp_size = len(step)
        for self.dp_rank, (rows, loras) in enumerate(step):
            try:
                self._target(rows, loras)
            except standins.FirstAllReduce:
                continue
            raise AssertionError("a rank did not speak")
        group.total = torch.stack(group.said).sum(0).to(torch.int32)
        found = []
        for self.dp_rank, (rows, loras) in enumerate(step):
            found.append(self._batch(rows, loras, None)[0])
        self.dp_size, self.dp_rank = 1, 0
        return found
