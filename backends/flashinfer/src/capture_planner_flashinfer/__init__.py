"""FlashInfer's wrappers and its XQA and trtllm-gen kernels, as a capture-planner backend."""

from collections.abc import Iterable

from capture_planner.plugins.backend import Backend
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner_flashinfer.backend import FlashInfer

__all__ = ["FlashInfer", "capture_planner_backends"]


@hookimpl
def capture_planner_backends() -> Iterable[Backend]:
    """Return the one backend of this distribution."""
    return (FlashInfer(),)
