"""A vLLM plugin that reports, at start-up, where the engine's configuration differs from a plan.

vLLM calls ``register`` through the entry point ``vllm.general_plugins`` in every process. It does nothing
unless ``CAPTURE_PLANNER_PLAN`` names a plan file, and imports nothing of capture-planner before that.

The check needs the sizes and the mode that graphs are captured with. ``VllmConfig.__post_init__`` does not know
the mode yet, which changes once the attention backends are known. So the plugin waits for the target's graph
manager (model runner V2, ``vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager``), which vLLM makes just
before capture. A finder notices when vLLM imports that module; a process without graphs imports nothing.

Each difference is one warning of the logger ``capture_planner.vllm``, once per process. Nothing is raised into
the engine unless ``CAPTURE_PLANNER_STRICT`` is 1.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture_planner.records.plan import Plan

PLAN = "CAPTURE_PLANNER_PLAN"
STRICT = "CAPTURE_PLANNER_STRICT"
MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
MANAGER = "ModelCudaGraphManager"

_LOG = logging.getLogger("capture_planner.vllm")
_MARK = "_capture_planner_checks"
_logged: set[str] = set()


def register() -> None:
    """Watch for the graph manager if a plan is named, once; its errors are reported now, before a model is loaded."""
    if not os.environ.get(PLAN):
        return
    _check()
    module = sys.modules.get(MODULE)
    if module is not None and hasattr(module, MANAGER):
        _watch(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def differences(plan: Plan, config: Any, mode: str) -> Iterator[str]:
    """Yield where a ``VllmConfig`` and the mode that its target is captured with differ from a plan, line by line."""
    from capture_planner.modes import Role
    from capture_planner_vllm.export import export_vllm

    target, scheduler = plan.role(Role.TARGET), config.scheduler_config
    captured = sorted(config.compilation_config.cudagraph_capture_sizes or ())
    # A configuration made by ``export`` may have other sizes than the plan, chosen to hide no graph.
    exported = list(export_vllm(plan).sizes)
    planned = exported if exported == captured else sorted({entry.num_tokens for entry in target.entries})
    if planned != captured:
        missing = ", ".join(str(size) for size in planned if size not in captured)
        added = ", ".join(str(size) for size in captured if size not in planned)
        parts = [f"vLLM lacks {missing}"] if missing else []
        parts += [f"vLLM adds {added}"] if added else []
        yield f"cudagraph_capture_sizes: {' and '.join(parts)}"
    largest = config.compilation_config.max_cudagraph_capture_size or 0
    for name, ours, theirs in (
        ("max_cudagraph_capture_size", max(planned, default=0), largest),
        ("cudagraph_mode", target.mode.value, mode),
        ("max_num_seqs", plan.limits.max_num_reqs, scheduler.max_num_seqs),
        ("max_num_batched_tokens", plan.limits.max_num_tokens, scheduler.max_num_batched_tokens),
    ):
        if ours != theirs:
            yield f"{name}: the plan has {ours}, vLLM has {theirs}"
    yield from _speculative(plan, config.speculative_config, scheduler.max_num_seqs)


def _speculative(plan: Plan, config: Any, max_num_seqs: int) -> Iterator[str]:
    from capture_planner_vllm.schedule import draft_tokens, normalized

    planned = plan.speculative
    if planned is None or config is None:
        if planned is not None or config is not None:
            has, has_not = ("vLLM", "the plan") if planned is None else ("the plan", "vLLM")
            yield f"speculative_config: {has} speculates, {has_not} does not"
        return
    method = "mtp" if str(config.method).endswith("mtp") else str(config.method)
    if planned.method.value != method:
        yield f"speculative_config.method: the plan has {planned.method.value}, vLLM has {config.method}"
    tokens = config.num_speculative_tokens
    if planned.num_tokens != tokens:
        yield f"speculative_config.num_speculative_tokens: the plan has {planned.num_tokens}, vLLM has {tokens}"
        return
    name = "num_speculative_tokens_per_batch_size"
    schedule = getattr(config, name, None)
    tiers = normalized(list(schedule)) if schedule else ()
    theirs = draft_tokens(tiers, max_num_reqs=max_num_seqs, num_speculative=tokens)
    wrong = [reqs for reqs in range(1, max_num_seqs + 1) if planned.draft_tokens(reqs) != theirs[reqs]]
    if wrong:
        first, count = wrong[0], f"{len(wrong)} of {max_num_seqs} batch sizes"
        values = f"the plan drafts {planned.draft_tokens(first)}, vLLM {theirs[first]}"
        yield f"speculative_config.{name}: {count} differ, the first at {first} requests: {values}"


class _Finder(MetaPathFinder):
    """Finds nothing itself; wraps the loader of the manager's module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Runs the module's own loader, then watches the manager."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Anything that asks the module for its loader gets the original one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _watch(module)


def _watch(module: ModuleType) -> None:
    """Check each graph manager after it is constructed."""
    manager = getattr(module, MANAGER, None)
    if manager is None:
        _report(logging.ERROR, [f"nothing is checked: {MODULE} has no {MANAGER}"])
        return
    original = manager.__init__
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _check(lambda: (self.vllm_config, self.cudagraph_mode.name))

    setattr(checked, _MARK, True)
    manager.__init__ = checked


@functools.cache
def _plan_at(path: str) -> Plan:
    """Read a plan, once per process."""
    from capture_planner.codec import load_plan

    return load_plan(path)


def _check(configuration: Callable[[], tuple[Any, str]] | None = None) -> None:
    """Log the differences from the plan, or only read it; any error is logged, too."""
    path = os.environ.get(PLAN)
    if not path:
        return
    try:
        plan = _plan_at(path)
        lines = [] if configuration is None else [*differences(plan, *configuration())]
    except Exception as error:
        reason = " ".join(str(error).split())
        _report(logging.ERROR, [f"nothing is checked: {path}: {type(error).__name__}: {reason}"], error)
        return
    if lines:
        _report(logging.WARNING, [f"{line} ({path})" for line in lines])
    elif configuration is not None:
        _report(logging.INFO, [f"vLLM captures what the plan has ({path})"])


def _report(level: int, lines: list[str], cause: Exception | None = None) -> None:
    """Log lines that this process has not logged yet; in strict mode, raise ``RunError`` for warnings and errors."""
    for line in lines:
        if line not in _logged:
            _logged.add(line)
            _LOG.log(level, "%s", line)
    if level > logging.INFO and os.environ.get(STRICT) == "1":
        from capture_planner.errors import RunError

        raise RunError("\n".join(lines)) from cause
