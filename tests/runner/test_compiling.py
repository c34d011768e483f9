"""Compile times: what Triton compiles within the context, and no more."""

import pytest

from capture_planner_runner.compilation.forwards import compiled_seconds

knobs = pytest.importorskip("triton.knobs", reason="needs Triton 3.4 or later")


def compile_kernel(*, cache_hit=False, microseconds=1_500_000):
    """Tell Triton's listener what its compiler would."""
    times = knobs.CompileTimes(ir_initialization=0, lowering_stages=[("ttir", microseconds)], store_results=0)
    listener = knobs.compilation.listener
    if listener is not None:
        listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_only_kernels_that_are_not_in_the_cache_count():
    with compiled_seconds() as seconds:
        compile_kernel()
        compile_kernel(cache_hit=True)
    compile_kernel()
    assert seconds == [1.5]


def test_a_listener_of_someone_else_stays(monkeypatch):
    calls = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **call: calls.append(call["cache_hit"]))
    with compiled_seconds():
        compile_kernel(cache_hit=True)
    compile_kernel()
    assert calls == [True, False]
