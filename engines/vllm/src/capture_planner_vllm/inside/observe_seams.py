"""The functions of vLLM 0.33 that observing wraps, and the parameters that each wrapper relies on."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import attrs

from capture_planner_vllm.inside.log import report
from capture_planner_vllm.inside.seam import wrap
from capture_planner_vllm.inside.starting import LAST, WORKER

GPU = "vllm.v1.worker.gpu"
MANAGERS = f"{GPU}.cudagraph_utils"
RUNNER = f"{GPU}.model_runner"
RANKS = f"{GPU}.dp_utils"
OUTPUTS = f"{GPU}.async_utils"
DRAFTERS = f"{GPU}.spec_decode.target_dependent_ar.cudagraph_utils"


def is_target(manager: Any) -> bool:
    """Say whether a manager has the target's graphs."""
    return type(manager).__name__ == "ModelCudaGraphManager"


@attrs.frozen
class Seam:
    """One function of vLLM that is wrapped, and the parameters that the wrapper relies on."""

    module: str
    name: str
    """``function`` or ``Class.method``."""
    parameters: tuple[str, ...]
    part: str
    """The part of the observation that needs it."""

    def check(self, module: ModuleType | None = None) -> None:
        """Raise ``LookupError`` where the function is not as the wrapper needs it, as ``owner`` does."""
        self.owner(module)

    def owner(self, module: ModuleType | None = None) -> tuple[Any, str]:
        """Return what has the function as an attribute, and the attribute's name.

        :param module: the module, if it is not the imported one of that name.
        :raises LookupError: it is not as the wrapper needs it; the text says what is wrong.
        """
        owner: Any = module or sys.modules.get(self.module)
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        function = getattr(owner, name, None)
        if function is None:
            raise LookupError(f"{self.module} has no {self.name}")
        try:
            has = tuple(inspect.signature(function).parameters)
        # A compiled function may hide its signature.
        except (TypeError, ValueError) as error:
            raise LookupError(f"{self.module}.{self.name} shows no parameters: {error}") from error
        # Wrappers hand on what comes behind these; a function that is known to have none must have none.
        if has[: len(self.parameters) or None] != self.parameters:
            expected = ", ".join([*self.parameters, "..."] if self.parameters else [])
            raise LookupError(f"{self.module}.{self.name} takes ({', '.join(has)}), expected ({expected})")
        return owner, name


@attrs.frozen
class ObservedFields:
    """One dataclass of vLLM that is read."""

    module: str
    name: str
    fields: tuple[str, ...]
    part: str
    """The part of the observation that needs them."""

    def check(self, module: ModuleType | None = None) -> None:
        """Raise ``LookupError`` where the class or a field is missing; the text says which.

        :param module: the module, if it is not the imported one of that name.
        """
        owner = getattr(module or sys.modules.get(self.module), self.name, None)
        has = getattr(owner, "__dataclass_fields__", {})
        missing = [name for name in self.fields if name not in has]
        if owner is None or missing:
            what = self.name if owner is None else f"{', '.join(missing)} in {self.name}"
            raise LookupError(f"{self.module} has no {what}")


DESCRIPTOR = ObservedFields(
    MANAGERS,
    "BatchExecutionDescriptor",
    ("cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "num_active_loras"),
    "everything",
)
SCHEDULED = ObservedFields("vllm.v1.core.sched.output", "SchedulerOutput", ("scheduled_spec_decode_tokens",), "drafts")
SAMPLED = ObservedFields("vllm.v1.outputs", "ModelRunnerOutput", ("req_ids", "sampled_token_ids"), "drafts")

JOINED = ObservedFields(
    "vllm.v1.core.sched.output",
    "SchedulerOutput",
    ("scheduled_new_reqs", "num_scheduled_tokens"),
    "intervals between steps",
)

RECORDS = (DESCRIPTOR, SCHEDULED, SAMPLED, JOINED)

_BATCH = ("cudagraph_manager", "num_reqs", "num_tokens", "uniform_token_count")

INIT = Seam(MANAGERS, "CudaGraphManager.__init__", ("self", "vllm_config"), "everything")
CAPTURE = Seam(MANAGERS, "CudaGraphManager.capture", ("self", "create_forward_fn"), "seconds and memory of graphs")
DISPATCH = Seam(
    MANAGERS,
    "CudaGraphManager.dispatch",
    ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len"),
    "answers of the dispatcher",
)
CAPTURE_MODEL = Seam(RUNNER, "GPUModelRunner.capture_model", ("self", "profile_only"), "everything")
WARM_UP = Seam(WORKER, f"Worker.{LAST}", ("self",), "times of eager steps where nothing is captured")
DUMMY = Seam(RUNNER, "GPUModelRunner._dummy_run", ("self", "num_tokens"), "counts, times and drafts")
EXECUTE = Seam(RUNNER, "GPUModelRunner.execute_model", ("self", "scheduler_output"), "counts, times and drafts")
STEP = Seam(RANKS, "dispatch_cg_and_sync_dp", _BATCH, "counts and times")
RANK_GROUP = Seam(RANKS, "get_dp_group", (), "what data-parallel ranks bring to a step")
SAMPLE = Seam(RUNNER, "GPUModelRunner.sample_tokens", ("self",), "drafts, and times of drafters")
SHUTDOWN = Seam(RUNNER, "GPUModelRunner.shutdown", ("self",), "the last counts before a shutdown")
FORWARD = Seam(OUTPUTS, "StepTimingCollector.forward_start", ("self",), "times of the target")
OUTPUT = Seam(OUTPUTS, "AsyncOutput.get_output", ("self",), "drafts")
SPECIALIZE = Seam(
    DRAFTERS,
    "SpeculatorCudaGraphManager.specialize_spec_tokens",
    ("self", "desc", "num_speculative_tokens"),
    "counts of draft decodes",
)

SEAMS = (
    *(INIT, CAPTURE, DISPATCH, CAPTURE_MODEL, WARM_UP, DUMMY, EXECUTE, STEP, RANK_GROUP),
    *(SAMPLE, SHUTDOWN, FORWARD, OUTPUT, SPECIALIZE),
)


def replace_copies(original: Any, replacement: Any) -> None:
    """Replace a function in every module of the model runner that imported it by name."""
    # A copy, as reading an attribute of a lazy module imports others.
    for name, module in list(sys.modules.items()):
        if name.startswith(GPU):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)


def refuse(module: ModuleType) -> None:
    """Say that nothing is observed where a model runner V1 is made; ``vllm.v1.worker.gpu_model_runner``, executed."""
    if hasattr(module, "GPUModelRunner"):
        wrap(module.GPUModelRunner, "__init__", _refused)


def _refused(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        report(
            logging.WARNING, ["nothing is observed: this is model runner V1; VLLM_USE_V2_MODEL_RUNNER=1 asks for V2"]
        )
        original(*args, **kwargs)

    return init
