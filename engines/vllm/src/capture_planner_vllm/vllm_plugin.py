"""A vLLM plugin: says at start-up where the engine's own configuration differs from a plan.

vLLM calls ``register`` through the entry point ``vllm.general_plugins``, in every process: in that
of the server before there is a configuration, in that of the engine and of each worker after. Only
where ``CAPTURE_PLANNER_PLAN`` names a plan file does it do anything.

What it checks is what graphs are captured with. ``VllmConfig.__post_init__`` knows the sizes, and not
yet the mode, which changes once the attention backends are known. So it waits for the graph manager of
the target (model runner V2, ``vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager``), which is
made with the mode as it was resolved, beside the configuration, just before capture. vLLM imports
that module itself: a finder notices when it does, so that nothing is imported early, and nothing at
all in a process that captures no graph.

Each difference is one line of the logger ``capture_planner.vllm``: a warning, and once a process.
Nothing is raised into the engine, whatever happens, unless ``CAPTURE_PLANNER_STRICT`` is 1.
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
_said: set[str] = set()


def register() -> None:
    """Watch for the graph manager, where a plan is named; any number of calls is as one.

    The plan is read at once, so that a wrong file is known before a model is loaded.
    """
    if not os.environ.get(PLAN):
        return
    _read_plan()
    module = sys.modules.get(MODULE)
    if module is not None and hasattr(module, MANAGER):
        _watch(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def differences(plan: Plan, config: Any, mode: str) -> Iterator[str]:
    """Yield what differs between a plan and vLLM's configuration, a line each, the plan's value first.

    ``config`` is a ``VllmConfig``, ``mode`` the name of the mode that the target's graphs are captured
    with.
    """
    from capture_planner.modes import Role

    target, compilation, scheduler = (
        plan.role(Role.TARGET),
        config.compilation_config,
        config.scheduler_config,
    )
    captured = sorted(compilation.cudagraph_capture_sizes or ())
    sizes = _planned_sizes(plan, captured)
    yield from _sizes(sizes, captured)
    for name, planned, found in (
        ("max_cudagraph_capture_size", max(sizes, default=0), compilation.max_cudagraph_capture_size or 0),
        ("cudagraph_mode", target.mode.value, mode),
        ("max_num_seqs", plan.limits.max_num_reqs, scheduler.max_num_seqs),
        ("max_num_batched_tokens", plan.limits.max_num_tokens, scheduler.max_num_batched_tokens),
    ):
        if planned != found:
            yield f"{name}: the plan has {planned}, vLLM has {found}"
    yield from _speculative(plan, config.speculative_config, scheduler.max_num_seqs)


def _planned_sizes(plan: Plan, found: list[int]) -> list[int]:
    """Return the sizes of the plan's target, or those that ``export`` writes for it where vLLM has these."""
    from capture_planner.modes import Role
    from capture_planner_vllm.export import export_vllm

    exported = sorted(export_vllm(plan).settings.get("cudagraph-capture-sizes", ()))
    return exported if exported == found else sorted({e.num_tokens for e in plan.role(Role.TARGET).entries})


def _sizes(planned: Sequence[int], found: Sequence[int]) -> Iterator[str]:
    missing = [str(size) for size in planned if size not in found]
    added = [str(size) for size in found if size not in planned]
    parts = [f"vLLM lacks {', '.join(missing)}"] if missing else []
    parts += [f"vLLM has {', '.join(added)} besides"] if added else []
    if parts:
        yield f"cudagraph_capture_sizes: {' and '.join(parts)}"


def _speculative(plan: Plan, found: Any, max_num_seqs: int) -> Iterator[str]:
    from capture_planner_vllm.schedule import draft_tokens, normalized

    planned = plan.speculative
    if planned is None or found is None:
        if planned is not None or found is not None:
            has, has_not = ("vLLM", "the plan") if planned is None else ("the plan", "vLLM")
            yield f"speculative_config: {has} speculates, {has_not} does not"
        return
    method = "mtp" if str(found.method).endswith("mtp") else str(found.method)
    if planned.method.value != method:
        yield f"speculative_config.method: the plan has {planned.method.value}, vLLM has {found.method}"
    tokens = found.num_speculative_tokens
    if planned.num_tokens != tokens:
        yield f"speculative_config.num_speculative_tokens: the plan has {planned.num_tokens}, vLLM has {tokens}"
        return
    name = "num_speculative_tokens_per_batch_size"
    given = getattr(found, name, None)
    tiers = normalized(list(given)) if given else ()
    of_engine = draft_tokens(tiers, max_num_reqs=max_num_seqs, num_speculative=tokens)
    wrong = [reqs for reqs in range(1, max_num_seqs + 1) if planned.draft_tokens(reqs) != of_engine[reqs]]
    if wrong:
        first = wrong[0]
        yield (
            f"speculative_config.{name}: {len(wrong)} of {max_num_seqs} batch sizes draft otherwise, first "
            f"{first}: the plan has {planned.draft_tokens(first)}, vLLM has {of_engine[first]}"
        )


class _Finder(MetaPathFinder):
    """Finds nothing by itself; has the manager watched as soon as its module is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Watching(spec.loader)
                return spec
        return None


class _Watching(Loader):
    """The module's own loader, and after it the watch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What asks the module for its loader is to find the one that it would have had.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _watch(module)


def _watch(module: ModuleType) -> None:
    """Have each manager checked once it is made."""
    manager = getattr(module, MANAGER, None)
    if manager is None:
        _say(logging.ERROR, [f"nothing is checked: {MODULE} has no {MANAGER}"])
        return
    made = manager.__init__
    if getattr(made, _MARK, False):
        return

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _check(lambda: (self.vllm_config, self.cudagraph_mode.name))

    setattr(checked, _MARK, True)
    manager.__init__ = checked


@functools.cache
def _plan_at(path: str) -> Plan:
    """Read a plan; once a process, as it is asked for at registration and at every manager."""
    from capture_planner.codec import load_plan

    return load_plan(path)


def _read_plan() -> Plan | None:
    """Return the plan; None where it cannot be read, which is said."""
    path = os.environ[PLAN]
    try:
        return _plan_at(path)
    except Exception as error:
        _not_checked(path, error)
        return None


def _not_checked(path: str, error: Exception) -> None:
    reason = " ".join(str(error).split())
    _say(logging.ERROR, [f"nothing is checked: {path}: {type(error).__name__}: {reason}"], error)


def _check(resolved: Callable[[], tuple[Any, str]]) -> None:
    """Compare with the plan; whatever goes wrong in that is itself a line."""
    path = os.environ.get(PLAN)
    plan = _read_plan() if path else None
    if path is None or plan is None:
        return
    try:
        config, mode = resolved()
        lines = [f"{line} ({path})" for line in differences(plan, config, mode)]
    except Exception as error:
        _not_checked(path, error)
        return
    if lines:
        _say(logging.WARNING, lines)
    else:
        _say(logging.INFO, [f"vLLM captures what the plan has ({path})"], fine=True)


def _say(level: int, lines: list[str], cause: Exception | None = None, *, fine: bool = False) -> None:
    """Log lines that this process has not had; raise ``RunError`` for them where that is wanted."""
    for line in lines:
        if line not in _said:
            _said.add(line)
            _LOG.log(level, "%s", line)
    if not fine and os.environ.get(STRICT) == "1":
        from capture_planner.errors import RunError

        raise RunError("\n".join(lines)) from cause
