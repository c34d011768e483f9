"""A plan inside vLLM: what the plugin puts into vLLM's configuration and graph managers, role by role.

Five places of vLLM 0.33, all of model runner V2 and each checked before it is touched:

- ``VllmConfig._set_cudagraph_sizes`` (vllm/config/vllm.py): ``cudagraph_capture_sizes`` and
  ``max_cudagraph_capture_size`` become the plan's. It runs in ``__post_init__``, before anything reads them:
  the compiler, MoE layers and the attention backends do.
- ``CudaGraphManager._init_candidates`` (vllm/v1/worker/gpu/cudagraph_utils.py): the end of the manager's
  ``__init__``, which alone fills the tables that ``capture`` and ``dispatch`` read.
- ``CudaGraphManager.capture``: a graph that is larger than the first one is warmed up before it, so that the buffers
  that vLLM allocates then have room for every graph (``buffers``).
- ``FlashAttentionMetadataBuilder.build``: splits are bounded up to the largest full graph only (``splits``).
- ``SpeculatorCudaGraphManager.capture``: with dynamic draft lengths vLLM multiplies every graph by every length
  there; the plan has named the lengths already.

Memory profiling makes managers too, and captures a few graphs; each gets its tables anew.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from capture_planner.codec import load_plan
from capture_planner.engines.launch import PLAN
from capture_planner.errors import RunError, class_and_message
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import digest
from capture_planner.records.plan import Decision, Plan
from capture_planner_vllm.emulation.export import plan_sizes
from capture_planner_vllm.inside import agreement, starting, workers
from capture_planner_vllm.inside.apply import ManagerFacts, RoleTable, descriptor_fields, drafted_tokens, role_table
from capture_planner_vllm.inside.buffers import largest_first
from capture_planner_vllm.inside.chains import with_planned_chains
from capture_planner_vllm.inside.log import ModeReasons, report
from capture_planner_vllm.inside.observe_seams import DRAFTERS, MANAGERS, is_target
from capture_planner_vllm.inside.seam import (
    after_import,
    log_with,
    method_problems,
    name_problems,
    parameter_problems,
    wrap,
)
from capture_planner_vllm.inside.splits import BACKEND, FULL_GRAPHS, bound_splits

CONFIG = "vllm.config.vllm"
LEGACY_RUNNER = "vllm.v1.worker.gpu_model_runner"

KNOWN_MANAGERS = {(MANAGERS, "ModelCudaGraphManager"), (DRAFTERS, "SpeculatorCudaGraphManager")}
"""Module and class of the managers that a plan has roles for; of others vLLM keeps its own lists."""

_DISPATCH = {"self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"}
_CAPTURE = {"self", "create_forward_fn"}
_FIELDS = {"cg_mode", "num_tokens", "num_reqs", "uniform_token_count"}
_ATTRIBUTES = {
    *("vllm_config", "compilation_config", "max_num_reqs", "cudagraph_mode", "decode_query_len"),
    *("lora_capture_cases", "_lora_dispatch_map", "_candidates", "_capture_descs"),
}

_reasons = ModeReasons()

decisions: dict[Role, tuple[Decision, ...]] = {}
"""Decisions that differ from the plan, by role, of the manager that was filled last."""


def install(*, apply: bool, observe: bool) -> None:
    """Install what the variables ask for, once; a plan that cannot be read is reported now."""
    log_with("vllm")
    plan = current_plan()
    if observe:
        # Before the plan: its wrappers lie outside, and what they add counts to the graph that vLLM captures first.
        after_import(MANAGERS, observe_managers)
        after_import(LEGACY_RUNNER, refuse_legacy_runner)
    if plan is not None and apply:
        # From the start: vLLM logs why it rewrites a mode before it makes a manager.
        _reasons.listen(CONFIG, "vllm.config.compilation")
        after_import(CONFIG, apply_to_config)
        after_import(MANAGERS, apply_to_managers)
        after_import(BACKEND, bound_splits)
        after_import(starting.WORKER, explain_failed_start)
    elif plan is not None:
        after_import(MANAGERS, check_managers)
    elif apply and os.environ.get(PLAN):
        after_import(MANAGERS, apply_to_managers)  # other workers may have read it


def current_plan() -> Plan | None:
    """Return the plan that the environment names; None without one, and where it cannot be read, which is logged."""
    path = os.environ.get(PLAN)
    if not path:
        return None
    try:
        return _plan_at(path)
    except Exception as error:
        report(logging.ERROR, [f"no plan is applied: {path}: {class_and_message(error)}"], error)
        return None


@functools.cache
def _plan_at(path: str) -> Plan:
    """Read a plan, once per process."""
    return load_plan(path)


def observe_managers(module: ModuleType) -> None:
    """Let the observer attach to the managers."""
    importlib.import_module("capture_planner_vllm.inside.observe").attach(module, current_plan, decisions)


def refuse_legacy_runner(module: ModuleType) -> None:
    """Let the observer say that it does not know model runner V1, when one is made."""
    importlib.import_module("capture_planner_vllm.inside.observe_seams").refuse(module)


def explain_failed_start(module: ModuleType) -> None:
    """Let the worker say which plan a start ran under that fails before its graphs are captured."""
    starting.watch(module, current_plan(), os.environ.get(PLAN, ""))


# The configuration


def apply_to_config(module: ModuleType) -> None:
    """Give vLLM's configuration the plan's sizes."""
    problems = [*method_problems(module, "VllmConfig", "_set_cudagraph_sizes", {"self"}, {"self"})]
    if problems:
        # The managers still refuse a bound that is too low, with the flag to give.
        report(logging.WARNING, [f"capture sizes stay vLLM's own: {problem}" for problem in problems])
        return
    wrap(module.VllmConfig, "_set_cudagraph_sizes", _with_plan_sizes)


def _with_plan_sizes(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def set_cudagraph_sizes(config: Any) -> None:
        plan = current_plan()
        if plan is not None:
            # First: vLLM's own method takes sizes that are set as the user's, and only checks them.
            set_sizes(plan, config)
        original(config)

    return set_cudagraph_sizes


def set_sizes(plan: Plan, config: Any) -> None:
    """Set the capture sizes of a configuration, unless it captures nothing or no plan can be applied to it."""
    compilation, model = config.compilation_config, config.model_config
    # vLLM captures nothing then, so there are no sizes to replace.
    if model is None or model.enforce_eager or compilation.cudagraph_mode.name == GraphMode.NONE.name:
        return
    if not getattr(config, "use_v2_model_runner", True):
        unsupported = _asked(config, "_get_v2_model_runner_unsupported_features")
        why = f"it does so for {', '.join(unsupported)}" if unsupported else "leave VLLM_USE_V2_MODEL_RUNNER=0 out"
        report(logging.ERROR, [f"no plan is applied: model runner V1 has one list of sizes for all roles; {why}"])
        return
    # Sizes without managers that sort them by role would be captured for every role: both, or neither.
    obstacle = agreement.obstacle(plan, config) or _unknown_managers()
    if obstacle is not None:
        report(logging.ERROR, [f"no plan is applied: {obstacle}"])
        return
    sizes = plan_sizes(plan, config.scheduler_config.max_num_batched_tokens)
    # vLLM asserts that a list has a size; a plan without graphs leaves its managers' tables empty instead.
    if not sizes:
        return
    given = compilation.cudagraph_capture_sizes
    if given is not None and sorted(set(given)) != sizes:
        report(logging.WARNING, [f"cudagraph_capture_sizes: the plan's {len(sizes)} sizes replace {sorted(given)}"])
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]
    report(logging.INFO, [f"cudagraph_capture_sizes: {len(sizes)} sizes of the plan, max_cudagraph_capture_size "
                          f"{sizes[-1]} ({os.environ.get(PLAN)})"])  # fmt: skip


def _unknown_managers() -> str | None:
    """Say where the managers are not as expected; they are not imported for it."""
    module = sys.modules.get(MANAGERS)
    if module is not None:
        return next((f"this vLLM is not known: {problem}" for problem in _manager_problems(module)), None)
    # As text: the front end makes a configuration too, and has no use for the worker's modules.
    spec = importlib.util.find_spec(MANAGERS)
    if spec is None or spec.origin is None or "def _init_candidates(self)" not in Path(spec.origin).read_text("utf-8"):
        return f"this vLLM is not known: {MANAGERS} has no CudaGraphManager._init_candidates"
    return None


# The managers


def apply_to_managers(module: ModuleType) -> None:
    """Fill the tables of vLLM's graph managers from the plan."""
    problems = list(_manager_problems(module))
    if problems:
        report(logging.ERROR, [f"no plan is applied: this vLLM is not known: {problem}" for problem in problems])
        return
    wrap(module.CudaGraphManager, "_init_candidates", _with_plan)
    wrap(module.CudaGraphManager, "capture", largest_first)


def _manager_problems(module: ModuleType) -> Iterator[str]:
    missing = [name for name in ("CudaGraphManager", "BatchExecutionDescriptor") if not hasattr(module, name)]
    if missing:
        yield f"{MANAGERS} has no {' and no '.join(missing)}"
        return
    manager = module.CudaGraphManager
    yield from parameter_problems(manager, "_init_candidates", {"self"}, {"self"})
    yield from parameter_problems(manager, "capture", _CAPTURE, {*_CAPTURE, "progress_bar_desc"})
    yield from parameter_problems(manager, "dispatch", _DISPATCH, {*_DISPATCH, "max_query_len", "num_ubatches"})
    names = {field.name for field in fields(module.BatchExecutionDescriptor)}
    known = {*_FIELDS, "max_query_len", "num_active_loras", "num_ubatches"}
    yield from name_problems("BatchExecutionDescriptor", names, _FIELDS, known)


def _with_plan(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def init_candidates(manager: Any) -> None:
        # The first of a runner: what an earlier one has noted, of memory profiling or another engine, holds no longer.
        if is_target(manager):
            decisions.clear()
        plan = current_plan()
        if plan is None or not _filled(manager, plan):
            original(manager)
        FULL_GRAPHS.add(manager)
        # Also where vLLM's own graphs are kept: other workers may have the plan's.
        digested = "no plan" if plan is None else f"plan {digest(plan)[:15]}"
        workers.compare(manager, f"{type(manager).__name__} of width {manager.decode_query_len}", digested)

    return init_candidates


def _filled(manager: Any, plan: Plan) -> bool:
    """Fill a manager's tables; an error of ours is logged, and leaves the engine to its own lists."""
    adapters = getattr(manager, "_lora_dispatch_map", None)
    try:
        return fill(manager, plan)
    # Strict mode makes errors of reports; they are meant to end the start.
    except RunError:
        raise
    except Exception as error:
        # The tables may be half filled, and vLLM's own method expects them empty.
        manager._candidates.clear()
        manager._capture_descs.clear()
        manager._lora_dispatch_map = adapters
        reason = class_and_message(error)
        report(logging.ERROR, [f"{type(manager).__name__} keeps vLLM's own graphs: {reason}"], error)
        return False


def fill(manager: Any, plan: Plan) -> bool:
    """Fill a manager's tables from a plan; False where vLLM keeps its own, with the reason logged."""
    refusal = _refusal(manager, plan)
    if refusal is not None:
        report(logging.ERROR, [refusal])
        return False
    facts = facts_of(manager, role_of(manager))
    table = role_table(plan, facts)
    _fill_tables(manager, plan, facts, table)
    # What concerns the whole configuration is said once, with the target.
    if facts.role is Role.TARGET:
        lines = [*agreement.limit_differences(plan, manager.vllm_config)]
        lines += agreement.speculation_differences(plan, manager.vllm_config)
        for each in agreement.roles_without_graphs(plan, manager.vllm_config):
            decisions[each.role] = (each,)
            lines.append(f"{each.role}: {each.message}")
        report(logging.WARNING, [f"{line} ({os.environ.get(PLAN)})" for line in lines])
    report(logging.INFO, [f"{facts.role}: {len(table.entries)} graphs of the plan, {facts.mode.value}"])
    report(logging.WARNING, [f"{facts.role}: {decision.message}" for decision in table.decisions])
    decisions[facts.role] = table.decisions
    return True


def _refusal(manager: Any, plan: Plan) -> str | None:
    """Return why a manager keeps vLLM's own graphs, or None."""
    owner, missing = type(manager), sorted(name for name in _ATTRIBUTES if not hasattr(manager, name))
    own = f"{owner.__name__} keeps vLLM's own graphs"
    if (owner.__module__, owner.__name__) not in KNOWN_MANAGERS:
        return f"{own}: the plan has no role for it"
    if missing:
        return f"{own}: this vLLM is not known: it has no {', '.join(missing)}"
    # 0.33 fills both here and nowhere else, so that entries in them come from code that is not known.
    if manager._candidates or manager._capture_descs:
        return f"{own}: this vLLM is not known: its tables are filled before _init_candidates"
    if role_of(manager) not in plan.planned:
        return f"{own}: the plan has no {role_of(manager)}"
    config = manager.vllm_config
    obstacle = agreement.obstacle(plan, config)
    # A manager of mode NONE captures nothing, whatever the bound.
    if obstacle is None and manager.cudagraph_mode:
        obstacle = agreement.bound_obstacle(plan, config)
    return None if obstacle is None else f"no plan is applied: {obstacle}"


def role_of(manager: Any) -> Role:
    """Return the role of a known manager: its class says target or drafter, its decodes' length which pass."""
    if is_target(manager):
        return Role.TARGET
    # One class serves both passes; only the prefill has the target's tokens for each request, 1 + K.
    wide = manager.decode_query_len > manager.vllm_config.num_speculative_tokens
    return Role.DRAFT_PREFILL if wide else Role.DRAFT_DECODE


def facts_of(manager: Any, role: Role) -> ManagerFacts:
    """Return what vLLM has decided about a manager."""
    config = manager.vllm_config
    speculative = config.speculative_config
    mode = GraphMode[manager.cudagraph_mode.name]
    # recoverSSM has room for decodes only: _init_candidates captures no mixed batch above their tokens.
    recurrent = getattr(config.cache_config, "use_kda_recoverssm", False)
    return ManagerFacts(
        role=role,
        mode=mode,
        max_num_reqs=manager.max_num_reqs,
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
        lora_cases=tuple(sorted(manager.lora_capture_cases)),
        num_speculative_tokens=config.num_speculative_tokens,
        dynamic=speculative is not None and bool(_asked(speculative, "uses_dynamic_speculative_decoding")),
        varlen_query_len=manager.decode_query_len if getattr(manager, "varlen_decode", False) else None,
        widest_mixed=manager.max_num_reqs * manager.decode_query_len if recurrent else None,
        ranks=getattr(config.parallel_config, "data_parallel_size", 1),
        reason=_reasons.of(mode.value),
    )


def _asked(owner: Any, name: str) -> Any:
    """Call a method that older releases lack."""
    method = getattr(owner, name, None)
    return None if method is None else method()


def _fill_tables(manager: Any, plan: Plan, facts: ManagerFacts, table: RoleTable) -> None:
    module = importlib.import_module(MANAGERS)
    descriptor, modes = module.BatchExecutionDescriptor, type(manager.cudagraph_mode)
    names = {field.name for field in fields(descriptor)}
    varlen = facts.varlen_query_len is not None

    # One object for each descriptor: the observer finds graphs by identity, as hashing one takes a microsecond.
    @functools.cache
    def described(entry: Any) -> Any:
        values = descriptor_fields(entry, varlen)
        values["cg_mode"] = modes[values["cg_mode"]]
        return descriptor(**{name: value for name, value in values.items() if name in names})

    captured: dict[Any, list[Any]] = {}
    for entry in table.entries:
        desc, drafts = described(entry), drafted_tokens(entry, plan.speculative, facts.dynamic)
        # Under a schedule K is part of the key: specialize_spec_tokens looks for the chain of the scheduled length.
        if drafts is not None:
            chained = importlib.import_module(DRAFTERS).SpeculatorBatchDescriptor
            desc = chained(**vars(desc), num_speculative_tokens=drafts)
        captured.setdefault(desc.cg_mode, []).append(desc)
    # The object's own dictionaries: memory profiling and the drafter read them later.
    manager._capture_descs.update(captured)
    # Entries that differ in their chain alone are one descriptor here; the drafter adds the chain that it runs.
    lists = {tried: [*dict.fromkeys(described(entry) for entry in tried)] for tried in set(table.candidates.values())}
    manager._candidates.update({key: lists[tried] for key, tried in table.candidates.items()})
    # vLLM sends a count without an entry to its own largest case, so every count gets one.
    manager._lora_dispatch_map = dict(table.lora_dispatch)
    if facts.role is Role.DRAFT_DECODE and facts.dynamic:
        wrap(type(manager), "capture", with_planned_chains)


# Checking only


def check_managers(module: ModuleType) -> None:
    """Compare vLLM's configuration with the plan when the target's manager is made, and change nothing."""
    manager = getattr(module, "ModelCudaGraphManager", None)
    if manager is None:
        report(logging.ERROR, [f"nothing is checked: {MANAGERS} has no ModelCudaGraphManager"])
        return
    wrap(manager, "__init__", _with_check)


def _with_check(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def checked(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        plan = current_plan()
        if plan is None:
            return
        path = os.environ.get(PLAN)
        try:
            lines = [*agreement.differences(plan, manager.vllm_config, manager.cudagraph_mode.name)]
        except Exception as error:
            report(logging.ERROR, [f"nothing is checked: {path}: {class_and_message(error)}"], error)
            return
        if lines:
            report(logging.WARNING, [f"{line} ({path})" for line in lines])
        else:
            report(logging.INFO, [f"vLLM captures what the plan has ({path})"])

    return checked
