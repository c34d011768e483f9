"""FlashInfer on a GPU, captured and eager, against dense attention in float32.

The settings ``8.0`` are planned for compute capability 8.0, which any GPU here executes and which has
no decode kernel without a host plan: the decode wrapper on CUDA cores (up to three query heads a KV
head) and on tensor cores (from four), and the prefill wrapper (2, 4 and 8 tokens a request), plain,
with a window and with a softcap. The settings ``device`` are planned for this GPU: XQA on SM90 and
SM12x, trtllm-gen on SM100, for 1, 2, 4 and 8 tokens a request, two head widths, two page sizes and a
window. Eager steps, of any batch, take one prefill wrapper in all of them.

FlashInfer compiles some twenty kernels on first use, 11 to 19 s each. ``python
tests/gpu/test_flashinfer.py --compile`` does it for all settings at once; then pytest takes about a
minute. ``python tests/gpu/test_flashinfer.py q4 device`` runs the settings whose name has one of the
arguments. CAPTURE_PLANNER_GPU_EXAMPLES says how many batches each property takes (6).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from support import flashinfer_rig as checks
from support.flashinfer_rig import Rig, Setting, Steps

EXAMPLES = int(os.environ.get("CAPTURE_PLANNER_GPU_EXAMPLES", "6"))

WRAPPERS = [
    Setting(heads=8),
    Setting(heads=16, head_dim=64, page_size=64),
    Setting(heads=32),
    Setting(heads=64, head_dim=64, page_size=64),
    Setting(heads=8, query_len=2),
    Setting(heads=16, query_len=4, page_size=64),
    Setting(heads=32, query_len=8),
    Setting(heads=64, query_len=4, head_dim=64),
    Setting(heads=8, window=33),
    Setting(heads=32, window=33, query_len=4),
    Setting(heads=32, softcap=20.0, query_len=4),
    Setting(heads=16, softcap=20.0),
]
KERNELS = [
    attrs.evolve(setting, capability=None)
    for setting in (
        *(Setting(query_len=query_len) for query_len in (1, 2, 4, 8)),
        Setting(heads=8, query_len=2),
        Setting(heads=16, head_dim=64),
        Setting(heads=64, query_len=4, page_size=64),
        Setting(window=33),
    )
]
SETTINGS = WRAPPERS + KERNELS


def missing() -> str | None:
    """Return what keeps these tests from running here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    return None


pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"needs a GPU and FlashInfer: {missing()}"),
    # Those of the libraries are theirs.
    pytest.mark.filterwarnings("default"),
]


property_of = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def on_gpu(forward: Callable[[], None]) -> Callable[[], None]:
    """Capture a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


@functools.cache
def rig_of(setting: Setting) -> Rig:
    """Make the rig of a setting; skips where this GPU has no such kernel."""
    rig = Rig(setting, torch.device("cuda"), on_gpu)
    if setting.capability is None and rig.family.is_wrapper:
        pytest.skip(f"{torch.cuda.get_device_name()} has no decode kernel without a plan for {setting}")
    return rig


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@property_of
@given(steps=checks.changes())
def test_replays_equal_dense_attention(setting: Setting, steps: Steps) -> None:
    """A graph gives the right rows whatever batch came before, padding and freed pages aside."""
    checks.check_replays(rig_of(setting), steps)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@property_of
@given(steps=checks.changes())
def test_replays_do_not_depend_on_poisoned_buffers(setting: Setting, steps: Steps) -> None:
    """Fields, plans, counters and partial results of an earlier step have no part in the next."""
    checks.check_poisoned(rig_of(setting), steps)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@property_of
@given(steps=checks.changes())
def test_nan_after_the_sequence_is_not_read(setting: Setting, steps: Steps) -> None:
    """What an earlier request left in the rest of a last page is not read."""
    checks.check_replays(rig_of(setting), steps, tail=float("nan"))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@property_of
@given(requests=checks.mixed, seed=checks.seeds)
def test_eager_steps_equal_dense_attention(setting: Setting, requests: list[tuple[int, int]], seed: int) -> None:
    """Mixed batches run without a graph, and leave the graphs as they were."""
    checks.check_eager(rig_of(setting), requests, seed)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_host_plans_only_after_page_counts_or_workspace_change(setting: Setting) -> None:
    """The host plans when page counts change, and after the workspace was overwritten."""
    checks.check_plan_counts(rig_of(setting))


TESTS: tuple[Any, ...] = (
    test_host_plans_only_after_page_counts_or_workspace_change,
    test_replays_equal_dense_attention,
    test_replays_do_not_depend_on_poisoned_buffers,
    test_eager_steps_equal_dense_attention,
    test_nan_after_the_sequence_is_not_read,
)


def compile_all() -> int:
    """Run one batch of each property in a process for each setting; return how many broke."""
    one = os.environ | {"CAPTURE_PLANNER_GPU_EXAMPLES": "1"}
    begun = {
        str(setting): subprocess.Popen(
            [sys.executable, __file__, str(setting)], env=one, stdout=subprocess.PIPE, text=True
        )
        for setting in SETTINGS
    }
    broken = 0
    for name, process in begun.items():
        said, _ = process.communicate()
        broken += process.returncode != 0
        sys.stdout.write(f"{name}: compiled\n" if process.returncode == 0 else f"{name}:\n{said}")
    return broken


def main() -> int:
    """Run every test on every setting whose name has one of the arguments; say which failed and how."""
    if missing() is not None:
        sys.stdout.write(f"cannot run: {missing()}\n")
        return 1
    if sys.argv[1:] == ["--compile"]:
        return min(compile_all(), 1)
    failed = 0
    for setting in (s for s in SETTINGS if not sys.argv[1:] or any(part in str(s) for part in sys.argv[1:])):
        for test in TESTS:
            outcome = "passed"
            try:
                test(setting=setting)
            except pytest.skip.Exception as skipped:
                outcome = f"skipped: {skipped}"
            except Exception as error:
                failed += 1
                outcome = f"FAILED: {type(error).__name__}: {error}"
            family = rig_of(setting).family.value if outcome == "passed" else "-"
            sys.stdout.write(f"{setting} ({family}) {test.__name__}: {outcome}\n")
            sys.stdout.flush()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
