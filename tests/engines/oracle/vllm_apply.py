"""Plans inside vLLM's own graph managers, on a machine without the engine.

The managers are the wheel's; ``capture`` runs over stand-ins for the device, so that what is captured, in which order,
and what ``dispatch`` answers are the engine's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import batches, decode_tiers
from capture_planner.records.plan import Plan
from capture_planner_vllm.emulation.export import plan_sizes
from capture_planner_vllm.inside import hooks
from engines.generators.vllm_plans import next_fit, own_case, rank_answers, runnable, runnable_by_ranks
from support import reference
from support.files import module_at

loading = module_at(Path(__file__).with_name("vllm_loading.py"))
standins = module_at(Path(__file__).with_name("vllm_standins.py"))
EXHAUSTIVE = 700
"""Plans of at most so many tokens are asked about every admissible batch; others about those around their sizes."""


class AppliedPlan:
    """The managers of one plan, captured."""

    def __init__(self, modules: dict[str, Any], plan: Plan, ranks: int = 1) -> None:
        """:param ranks: data-parallel ranks; with several, vLLM always drafts K tokens."""
        self.modules, self.plan, self.ranks = modules, plan, ranks
        self.table, self.drafters = modules[hooks.MANAGERS], modules[hooks.DRAFTERS]
        self.modes = _modes(modules)
        self.dynamic = ranks == 1 and plan.speculative is not None and bool(plan.speculative.schedule)
        self.fused = any(entry.draft_steps for role in plan.roles for entry in role.entries)
        self.asked_batches = 0
        self.config = self._config()
        self.log: list[Any] = []
        self.table.logger = SimpleNamespace(debug=lambda *words: self.log.append(words[2]))
        self.managers = {role: self._manager(role, plan.role(role).mode) for role in plan.planned}
        self.captured = {role: self._capture(manager) for role, manager in self.managers.items()}

    def _config(self) -> Any:
        plan, speculative = self.plan, self.plan.speculative
        tiers = [list(tier) for tier in decode_tiers(plan)] if self.dynamic else None
        tokens = 0 if speculative is None else speculative.num_tokens
        sizes = plan_sizes(plan, plan.limits.max_num_tokens)
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=plan.limits.max_num_reqs, max_num_batched_tokens=plan.limits.max_num_tokens
            ),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=0)
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=self.ranks, enable_dbo=False),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=speculative
            and SimpleNamespace(
                method=speculative.method.value,
                num_speculative_tokens=tokens,
                num_speculative_tokens_per_batch_size=tiers,
                uses_dynamic_speculative_decoding=lambda: self.dynamic,
            ),
            num_speculative_tokens=tokens,
        )

    def _manager(self, role: Role, mode: GraphMode) -> Any:
        tokens = self.config.num_speculative_tokens
        theirs = self.modes[mode.name]
        if role is Role.TARGET:
            cases = [0] if self.plan.lora is None else list(self.plan.lora.cases())
            return self.table.ModelCudaGraphManager(self.config, None, theirs, 1 + tokens, cases)
        width = 1 + tokens if role is Role.DRAFT_PREFILL else 1
        return self.drafters.SpeculatorCudaGraphManager(self.config, None, theirs, width)

    def _capture(self, manager: Any) -> list[Any]:
        """Capture by the manager's own order; return the descriptors in it."""
        self.log.clear()
        if isinstance(manager, self.drafters.SpeculatorCudaGraphManager):
            decodes = manager.decode_query_len == 1 and self.config.num_speculative_tokens > 0
            manager.capture(
                lambda *a, **k: None, *[None] * 5, specialize_spec_tokens=self.fused and self.dynamic and decodes
            )
        else:
            self.table.CudaGraphManager.capture(manager, lambda desc, warmup: lambda mode: None)
        return list(self.log)

    def expected(self, entry: Entry, role: Role) -> tuple[Any, ...]:
        """Return what stands for an entry in the engine: the descriptor's fields, and K of a chain under a schedule."""
        drafts = None
        if role is Role.DRAFT_DECODE and self.dynamic and entry.draft_steps is not None:
            drafts = entry.draft_steps + 1
        numbers = entry.num_tokens, entry.num_reqs, entry.query_len, entry.active_loras
        return entry.mode.name, *numbers, drafts

    @staticmethod
    def row(desc: Any) -> tuple[Any, ...] | None:
        """Return a descriptor of the engine in the same form; None where it runs eager."""
        if desc.cg_mode.name == "NONE":
            return None
        numbers = desc.num_tokens, desc.num_reqs, desc.uniform_token_count, desc.num_active_loras
        return desc.cg_mode.name, *numbers, getattr(desc, "num_speculative_tokens", None)

    def asked(self, batch: Batch, tokens: int | None = None) -> tuple[Any, ...] | None:
        """Return the engine's answer for a batch, padded to ``tokens`` by the step before."""
        self.asked_batches += 1
        manager, uniform = self.managers[batch.role], batch.uniform_query_len
        longest = (batch.query_len or self.config.num_speculative_tokens + 1) if batch.past_prompt else None
        if batch.role is Role.TARGET:
            desc = manager.dispatch(
                batch.num_reqs, batch.num_tokens, uniform, num_active_loras=batch.active_loras, max_query_len=longest
            )
        else:
            desc = manager.dispatch(batch.num_reqs, tokens or batch.num_tokens, uniform, num_active_loras=0)
        if batch.role is Role.DRAFT_DECODE:
            k = self.plan.speculative.draft_tokens(batch.num_reqs)  # type: ignore[union-attr]
            desc = manager.specialize_spec_tokens(desc, k)
            assert desc.cg_mode.name == "NONE" or desc in manager.graphs
        return self.row(desc)

    def differences(self) -> Iterator[str]:
        """Yield where the engine differs from the plan: in its captures, and in its answers."""
        plan = runnable(self.plan)
        dispatchers: dict[tuple[Role, int], Dispatcher] = {}
        for role in plan.roles:
            captured = [self.row(desc) for desc in self.captured[role.role]]
            entries = [self.expected(entry, role.role) for entry in role.entries]
            if captured != entries:
                yield f"{role.role} captures {captured} for the plan's {entries}"
            for batch in self.batches(role.role):
                if role.role is Role.DRAFT_PREFILL:
                    tokens = self._target_tokens(batch)
                    ours = next_fit(plan, batch, tokens)
                else:
                    key = role.role, batch.active_loras
                    if key not in dispatchers:
                        dispatchers[key] = Dispatcher(own_case(plan, batch))
                    tokens, ours = batch.num_tokens, dispatchers[key].dispatch(batch).entry
                wanted = None if ours is None else self.expected(ours, role.role)
                theirs = self.asked(batch, tokens)
                if theirs != wanted:
                    yield f"{batch} of {tokens} tokens: the engine answers {theirs} for {wanted}"

    def rank_differences(self, vectors: Sequence[Sequence[Batch | None]]) -> Iterator[str]:
        """Yield where ranks do not run what the plan says of their vector, or not the same; None is an idle rank."""
        plan = runnable_by_ranks(self.plan)
        for role in plan.roles:
            captured = [self.row(desc) for desc in self.captured[role.role]]
            if captured != [self.expected(entry, role.role) for entry in role.entries]:
                yield f"{role.role} captures {captured} for the plan's {role.entries}"
        for vector in vectors:
            batches = [self._idle() if batch is None else batch for batch in vector]
            answers = self._step(batches)
            entries = rank_answers(plan, batches)
            wanted = [None if entry is None else self.expected(entry, Role.TARGET) for entry in entries]
            if [answer[Role.TARGET] for answer in answers] != wanted:
                yield f"{vector}: {answers} for {wanted}"
            for role in plan.planned:
                ran = {None if each[role] is None else each[role][:2] for each in answers}
                if len(ran) > 1:
                    yield f"{vector}: ranks run {ran} of {role}"
            if Role.DRAFT_DECODE in plan.planned and plan.speculative.num_tokens > 1:  # type: ignore[union-attr]
                most = Batch.decode(Role.DRAFT_DECODE, max(batch.num_reqs for batch in batches), 1)
                entry = reference.dispatch(plan, most) if plan.role(Role.DRAFT_DECODE).entries else None
                row = None if entry is None else self.expected(entry, Role.DRAFT_DECODE)
                if {answer[Role.DRAFT_DECODE] for answer in answers} != {row}:
                    yield f"{vector}: draft decodes {answers} for {row}"

    def _idle(self) -> Batch:
        """Return what an idle rank runs: one decode, with the most adapters."""
        cases = self.managers[Role.TARGET].lora_capture_cases
        return Batch.decode(Role.TARGET, 1, 1 + self.config.num_speculative_tokens, max(cases))

    def _step(self, batches: Sequence[Batch]) -> list[dict[Role, tuple[Any, ...] | None]]:
        """Return what each rank runs, by role, as the model runner and the drafter dispatch over ranks."""
        ranks, group = self.modules[f"{loading.GPU}.dp_utils"], standins.Group()
        ranks.get_dp_group = lambda: group
        for rank, batch in enumerate(batches):
            with suppress(standins.FirstAllReduce):
                self._over_ranks(ranks, Role.TARGET, batch, batch.num_tokens, rank, None)
        group.total = torch.stack(group.said).sum(0).to(torch.int32)
        found = []
        for rank, batch in enumerate(batches):
            desc, state = self._over_ranks(ranks, Role.TARGET, batch, batch.num_tokens, rank, None)
            answers = {Role.TARGET: self.row(desc)}
            if Role.DRAFT_PREFILL in self.managers:
                tokens = max(batch.num_tokens, desc.num_tokens)
                answers[Role.DRAFT_PREFILL] = self.row(
                    self._over_ranks(ranks, Role.DRAFT_PREFILL, batch, tokens, rank, state)[0]
                )
            if Role.DRAFT_DECODE in self.managers:
                base = self.modules[f"{loading.GPU}.spec_decode.speculator"].DraftModelSpeculator
                uniform, tokens = base._build_uniform_batch_dp_sync(None, state, batch.num_reqs, 1)
                decode = Batch.decode(Role.DRAFT_DECODE, batch.num_reqs, 1)
                desc, _ = self._over_ranks(ranks, Role.DRAFT_DECODE, decode, tokens, rank, uniform)
                manager = self.managers[Role.DRAFT_DECODE]
                answers[Role.DRAFT_DECODE] = self.row(
                    manager.specialize_spec_tokens(desc, self.config.num_speculative_tokens)
                )
            found.append(answers)
        return found

    def _over_ranks(self, ranks: Any, role: Role, batch: Batch, tokens: int, rank: int, state: Any) -> Any:
        self.asked_batches += 1
        target = role is Role.TARGET
        longest = (batch.query_len or self.config.num_speculative_tokens + 1) if batch.past_prompt else None
        return ranks.dispatch_cg_and_sync_dp(
            self.managers[role],
            batch.num_reqs,
            tokens,
            batch.uniform_query_len,
            self.ranks,
            rank,
            max_query_len=longest if target else None,
            num_active_loras=batch.active_loras if target else 0,
            dp_sync_state=state,
        )

    def _target_tokens(self, batch: Batch) -> int:
        """Return the tokens that the target's batch is padded to, which the draft prefill starts from."""
        longest = (batch.query_len or self.config.num_speculative_tokens + 1) if batch.past_prompt else None
        uniform = batch.uniform_query_len
        target = self.managers[Role.TARGET]
        desc = target.dispatch(batch.num_reqs, batch.num_tokens, uniform, num_active_loras=0, max_query_len=longest)
        return int(desc.num_tokens)

    def batches(self, role: Role) -> Iterator[Batch]:
        """Yield the admissible batches: all, or of many tokens those around each size."""
        tokens = self.plan.limits.max_num_tokens
        near = {size + step for size in (0, *plan_sizes(self.plan, tokens), tokens) for step in (-1, 0, 1)}
        for batch, _ in batches(role, self.plan):
            if tokens <= EXHAUSTIVE or batch.num_tokens in near or batch.num_reqs in near:
                yield batch
                if batch.query_len is None and batch.num_reqs > 1:
                    fewest = max(batch.active_loras, 1)
                    for reqs in {fewest, (fewest + batch.num_reqs) // 2}:
                        yield Batch.mixed(role, reqs, batch.num_tokens, batch.active_loras)


@contextmanager
def engine(folder: Path | str) -> Iterator[dict[str, Any]]:
    """Load the engine's modules from an unpacked wheel, with the plugin's hooks in them."""
    with loading.loaded(Path(folder)) as modules:
        table, drafters = modules[hooks.MANAGERS], modules[hooks.DRAFTERS]
        anything = modules["anything"].Device()
        table.torch = SimpleNamespace(
            cuda=SimpleNamespace(CUDAGraph=anything, graph=lambda *a, **k: anything),
            inference_mode=torch.inference_mode,
            accelerator=anything,
        )
        table.compilation_counter = SimpleNamespace(num_cudagraph_captured=0)
        drafters.prepare_inputs_to_capture = lambda *a, **k: (None, None)
        hooks.apply_to_managers(table)
        yield modules


def stand_in_differences(modules: dict[str, Any], stand_ins: Any) -> Iterator[str]:
    """Yield where the unit tests' stand-ins have other parameters, fields or modes than the wheel's modules."""
    names = {
        hooks.MANAGERS: (
            "BatchExecutionDescriptor",
            "CudaGraphManager.__init__",
            "CudaGraphManager._init_candidates",
            "CudaGraphManager.capture",
            "CudaGraphManager.dispatch",
            "CudaGraphManager.run_fullgraph",
            "ModelCudaGraphManager.capture",
        ),
        hooks.DRAFTERS: (
            "SpeculatorBatchDescriptor",
            "SpeculatorCudaGraphManager.__init__",
            "SpeculatorCudaGraphManager.capture",
            "SpeculatorCudaGraphManager.specialize_spec_tokens",
        ),
    }
    with stand_ins.vllm_modules() as made:
        for module, listed in names.items():
            for name in listed:
                ours, theirs = _shape(made[module], name), _shape(modules[module], name)
                if ours != theirs:
                    yield f"{name}: the stand-in has {ours}, vLLM {theirs}"
    ours, theirs = ({mode.name for mode in modes} for modes in (stand_ins.CUDAGraphMode, _modes(modules)))
    if ours != theirs:
        yield f"CUDAGraphMode: the stand-in has {ours}, vLLM {theirs}"


def _modes(modules: dict[str, Any]) -> Any:
    return modules["vllm.config.compilation"].CUDAGraphMode


def _shape(module: Any, name: str) -> list[str]:
    """Return the parameters of a method, or the fields of a dataclass."""
    owner, _, method = name.partition(".")
    value = getattr(module, owner)
    if method:
        return list(inspect.signature(getattr(value, method)).parameters)
    return [field.name for field in fields(value)]
