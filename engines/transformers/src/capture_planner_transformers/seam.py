"""What of transformers' continuous batching is used, checked by signature and attribute before anything is changed.

Read in transformers 5.17.0 and 5.23.0 (generation/continuous_batching); other versions pass where these hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from capture_planner.errors import RunError

SIGNATURES = {
    ("model_runner", "ModelRunner", "__init__"): (
        "self logit_processor cb_config inputs_and_outputs cache do_sample return_logprobs"
    ),
    ("model_runner", "ModelRunner", "maybe_pad_inputs"): "self num_q_tokens max_kv_read use_decode_fast_path",
    ("model_runner", "ModelRunner", "run_one_warmup"): "self model num_q_tokens max_kv_read",
    ("model_runner", "ModelRunner", "warmup"): "self model",
    ("model_runner", "ModelRunner", "compute_batch"): "self model batch_data",
    ("model_runner", "ModelRunner", "_get_forward_fn"): "self use_block_table",
    ("model_runner", "ModelRunner", "_capture_graph"): "self forward_fn compute_stream args",
    ("utils", "CudaGraphBuffer", "get_graph"): "self key",
    ("utils", "CudaGraphBuffer", "set_graph"): "self key graph",
    ("scheduler", "Scheduler", "schedule_batch"): "self token_budget cache_budget",
    ("continuous_api", "ContinuousBatchingManager", "_create_batch_processor"): "self",
    ("continuous_api", "ContinuousBatchingManager", "warmup"): "self",
}
"""Parameters of what is overridden or called, by module, class and name."""

PROCESSOR = ("model_runner", "inputs_and_outputs", "scheduler", "cache")
CACHE = ("max_batch_tokens", "num_blocks", "max_blocks_per_request")
SETTINGS = (
    "max_batch_tokens",
    "max_requests_per_batch",
    "use_cuda_graph",
    "use_async_batching",
    "kv_padding_interval_size",
    "varlen_compile_config",
    "decode_compile_config",
)


def has_graphs(device: Any) -> bool:
    """Whether transformers can capture CUDA graphs on a torch device."""
    return bool(device.type == "cuda")


def check(transformers: ModuleType) -> None:
    """Refuse a version whose continuous batching differs in what is used here; raises ``RunError``."""
    wrong = list(_differences())
    if wrong:
        raise RunError(
            f"transformers {transformers.__version__}: {'; '.join(wrong)}. Plans are applied to transformers "
            "5.17 to 5.23: install one of these, or run without a plan"
        )


def check_attributes(thing: Any, names: tuple[str, ...]) -> None:
    """Refuse an object of transformers without an attribute that is used here; raises ``RunError``."""
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise RunError(
            f"{type(thing).__name__} of this transformers has no {', '.join(missing)}: plans are applied to "
            "transformers 5.17 to 5.23"
        )


def _differences() -> Iterator[str]:
    package = "transformers.generation.continuous_batching"
    for (module, owner, name), expected in SIGNATURES.items():
        where = f"{owner}.{name}"
        try:
            function = getattr(getattr(__import__(f"{package}.{module}", fromlist=[owner]), owner), name)
        except (ImportError, AttributeError):
            yield f"{where} is missing"
            continue
        parameters = " ".join(inspect.signature(function).parameters)
        if parameters != expected:
            yield f"{where} takes ({parameters}), expected ({expected})"
