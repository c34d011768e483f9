"""apply(model, plan): every continuous batching manager of the model captures and replays what the plan says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from capture_planner import codec
from capture_planner.engines.inside import SECONDS, is_strict
from capture_planner.engines.launch import OBSERVE, PLAN
from capture_planner.errors import RunError
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import GraphMode, Role
from capture_planner.records.plan import Plan
from capture_planner_transformers import seam
from capture_planner_transformers.observation import LOG, Facts, Ledger
from capture_planner_transformers.tables import ladder, table


@attrs.frozen(kw_only=True)
class Application:
    """A plan that was applied to a model or a manager."""

    plan: Plan
    name: str
    """The plan in messages: its file, or its model."""
    kv_sizes: tuple[int, ...] | None
    strict: bool
    recorder: Recorder | None
    """Writes what is observed, of all managers of the model."""
    remove: Callable[[], None]
    """Make new managers of the model run without the plan; those that exist keep it."""


def apply(
    target: Any,
    plan: Plan | str | Path | None = None,
    *,
    kv_sizes: Sequence[int] | None = None,
    strict: bool | None = None,
    observe: str | Path | None = None,
) -> Application:
    """Make transformers' continuous batching run ``plan``, and return what was applied.

    All graphs of the plan are captured when a manager warms up or starts, none later. A step that the plan has no
    graph for runs eager and unpadded, with the reason in the log.

    :param target: a model with ``generate_batch``, whose managers all get the plan; or one
        ``ContinuousBatchingManager`` that has neither warmed up nor started.
    :param plan: a plan or its file; default: the file that ``CAPTURE_PLANNER_PLAN`` names.
    :param kv_sizes: what the tokens read from the KV cache are padded to, a graph each for every entry of the plan:
        default: 0, ``kv_padding_interval_size`` of the configuration, and its doubles.
    :param strict: raise where a difference is only logged; default: whether ``CAPTURE_PLANNER_STRICT`` is 1.
    :param observe: folder for an observation file (graphs captured with seconds and MiB, steps by shape, reasons for
        eager); default: the folder that ``CAPTURE_PLANNER_OBSERVE`` names, if it is set.

    Raises ``RunError`` for a version of transformers that is not known, a plan that it cannot execute, a model that
    runs another plan, and a manager that has started.
    """
    import transformers

    seam.check(transformers)
    loaded, name = _load(plan)
    refuse(loaded, name)
    if kv_sizes is not None and (not kv_sizes or min(kv_sizes) < 0):
        raise RunError(f"{name}: kv_sizes {list(kv_sizes)}: expected token counts, 0 or more each")
    is_model = hasattr(target, "init_continuous_batching")
    application = Application(
        plan=loaded,
        name=name,
        kv_sizes=None if kv_sizes is None else tuple(sorted(set(kv_sizes))),
        strict=is_strict() if strict is None else strict,
        recorder=_recorder(observe),
        # The model's own attribute hides its class's method, so taking it away is all.
        remove=(lambda: vars(target).pop("init_continuous_batching", None) and None) if is_model else _nothing,
    )
    if not is_model:
        attach(target, application)
        return application
    # A second plan would wrap the first, and the managers of both would run under one of them.
    if "init_continuous_batching" in vars(target):
        raise RunError(f"{name}: this model runs another plan; call remove() of what apply() returned for that first")
    original = type(target).init_continuous_batching

    def init_continuous_batching(*arguments: Any, **options: Any) -> Any:
        manager = original(target, *arguments, **options)
        attach(manager, application)
        return manager

    target.init_continuous_batching = init_continuous_batching
    return application


def _nothing() -> None:
    """A manager keeps its plan."""


def _load(plan: Plan | str | Path | None) -> tuple[Plan, str]:
    if isinstance(plan, Plan):
        return plan, f"the plan of {plan.model.name}"
    file = os.environ.get(PLAN) if plan is None else plan
    if not file:
        raise RunError("no plan: pass one to apply(), or name its file in CAPTURE_PLANNER_PLAN")
    return codec.load_plan(Path(file)), str(file)


def _recorder(observe: str | Path | None) -> Recorder | None:
    folder = os.environ.get(OBSERVE) if observe is None else observe
    if not folder:
        return None
    seconds = os.environ.get(SECONDS, "30")
    try:
        # Absolute, as a server may change its folder later.
        return Recorder(Path(folder).resolve(), f"transformers-{os.getpid()}", float(seconds))
    except ValueError:
        raise RunError(f"{SECONDS} is {seconds}: expected a number of seconds") from None


def refuse(plan: Plan, name: str) -> None:
    """Refuse what transformers' continuous batching does not have; raises ``RunError``."""
    has = {
        "speculative decoding": plan.speculative is not None,
        "LoRA adapters": plan.lora is not None,
        "sequence parallelism": plan.parallel.sequence,
        "decode-context parallelism": plan.parallel.decode_context > 1,
    }
    if wrong := [what for what, is_planned in has.items() if is_planned]:
        raise RunError(
            f"{name} has {' and '.join(wrong)}, which transformers' continuous batching does not have; plan without"
        )


class Creation:
    """``ContinuousBatchingManager._create_batch_processor`` of one manager, with the plan's runner put in."""

    def __init__(self, manager: Any, application: Application) -> None:
        self.application = application
        self._manager = manager
        self._create = type(manager)._create_batch_processor

    def __call__(self) -> Any:
        """Return the processor; a new one has captured all graphs."""
        from capture_planner_transformers.runner import PlannedRunner

        processor = self._create(self._manager)
        seam.check_attributes(processor, seam.PROCESSOR)
        # transformers makes the processor once and hands it out again.
        if isinstance(processor.model_runner, PlannedRunner):
            return processor
        processor.model_runner = runner = self._runner(processor)
        processor.scheduler.schedule_batch = runner.scheduling(processor.scheduler.schedule_batch)
        # Now, as a capture between two steps would hold up every request.
        runner.warmup(self._manager.model)
        # transformers logs a capture that fails and goes on.
        missing = [key for key in runner.table.keys if key not in runner.captured]
        # Without graphs nothing was to be captured, and nothing is amiss.
        if missing and any(processor.model_runner.cb_config.cuda_graph_booleans):
            says = f"{len(missing)} of {len(runner.table.keys)} graphs were not captured, {missing[0]} first"
            _differ(self.application, f"{says}: transformers' log has the reason")
        return processor

    def _runner(self, processor: Any) -> Any:
        from capture_planner_transformers.runner import PlannedRunner, cache_tokens, device_ios

        plan, name, cache = self.application.plan, self.application.name, processor.cache
        seam.check_attributes(cache, seam.CACHE)
        limit = cache_tokens(cache)
        if cache.max_batch_tokens < plan.limits.max_num_tokens:
            says = (
                f"memory allows {cache.max_batch_tokens} tokens a step, and the plan has {plan.limits.max_num_tokens}"
            )
            _differ(self.application, says)
        interval = self._manager.continuous_batching_config.kv_padding_interval_size
        graphs, notes = table(
            plan,
            name=name,
            limit=limit,
            reads=self.application.kv_sizes or ladder(interval, limit),
            block_table=cache.max_blocks_per_request > 0,
            copies=len(device_ios(processor.inputs_and_outputs)),
        )
        for note in notes:
            LOG.info("%s: %s", name, note)
        facts = _facts(self._manager, cache)
        return PlannedRunner(processor.model_runner, graphs, Ledger(name, facts, self.application.recorder))


def _facts(manager: Any, cache: Any) -> Facts:
    """Return what an observation says of the engine."""
    import torch
    import transformers

    config, device, helper = manager.continuous_batching_config, manager.model.device, manager.distributed_helper
    names = (*seam.SETTINGS, "max_blocks_per_request")
    return Facts(
        engine_version=transformers.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch=torch.__version__,
        rank=helper.global_rank,
        world_size=helper.world_size,
        kv_blocks=cache.num_blocks,
        settings=(
            ("attn_implementation", str(manager.model.config._attn_implementation)),
            *((name, str(getattr(config, name))) for name in names),
        ),
    )


def attach(manager: Any, application: Application) -> None:
    """Make one manager run the plan from its first step; raises ``RunError``."""
    name, plan = application.name, application.plan
    seam.check_attributes(manager, ("continuous_batching_config", "batch_processor", "distributed_helper", "model"))
    applied = vars(manager).get("_create_batch_processor")
    # A manager that the model made has the plan already: applying it again is no error.
    if isinstance(applied, Creation):
        if applied.application.plan != plan:
            raise RunError(f"{name}: this manager runs {applied.application.name} already; make a new manager")
        return
    if manager.batch_processor is not None:
        raise RunError(f"{name}: this manager has warmed up or started without it; apply the plan before")
    config = manager.continuous_batching_config
    seam.check_attributes(config, seam.SETTINGS)
    tensor = manager.distributed_helper.tp_size
    if tensor != plan.parallel.tensor:
        raise RunError(f"{name} is for {plan.parallel.tensor} tensor-parallel ranks, and the model is on {tensor}")
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        raise RunError(f"{name}: graphs of compiled forward passes are not supported; set default_compile_level=0")
    for difference in _model_differences(plan, manager.model.config.get_text_config()):
        _differ(application, difference)
    # Given by hand and different: it is replaced below, which the operator should know.
    if config.max_batch_tokens not in (None, plan.limits.max_num_tokens):
        _differ(
            application, f"max_batch_tokens is {config.max_batch_tokens}, and the plan has {plan.limits.max_num_tokens}"
        )
    for setting, value in _settings(plan, manager.model.device, application):
        if getattr(config, setting) != value:
            LOG.info("%s: %s: %s -> %s", name, setting, getattr(config, setting), value)
            setattr(config, setting, value)
    manager._create_batch_processor = Creation(manager, application)


def _settings(plan: Plan, device: Any, application: Application) -> Iterator[tuple[str, Any]]:
    """Yield what transformers' configuration must be for the plan."""
    yield "max_requests_per_batch", plan.limits.max_num_reqs
    yield "max_batch_tokens", plan.limits.max_num_tokens
    target = plan.role(Role.TARGET)
    graphs = any(entry.mode is GraphMode.FULL for entry in target.entries)
    if graphs and not seam.has_graphs(device):
        LOG.info("%s: all steps run eager: the device is %s, which has no CUDA graphs", application.name, device)
        graphs = False
    pieces = sum(entry.mode is GraphMode.PIECEWISE for entry in target.entries)
    if pieces:
        says = f"its {pieces} PIECEWISE graphs are left out, as transformers captures whole forward passes"
        _differ(application, f"{says}; plan mode FULL for graphs of mixed batches")
    yield "use_cuda_graph", (graphs, graphs)


def _model_differences(plan: Plan, config: Any) -> Iterator[str]:
    """Yield the facts of the model that differ from the plan's."""
    names = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
    }
    for ours, theirs in names.items():
        planned, real = getattr(plan.model, ours), getattr(config, theirs, None)
        # Some configurations leave a number out, such as head_dim.
        if None not in (planned, real) and planned != real:
            yield f"{theirs} is {real}, and the plan's {ours} {planned}"


def _differ(application: Application, says: str) -> None:
    """Log a difference between plan and engine, or raise it as ``RunError`` in strict mode."""
    if application.strict:
        raise RunError(f"{application.name}: {says}")
    LOG.warning("%s: %s", application.name, says)
