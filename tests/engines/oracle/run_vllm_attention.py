"""vLLM's attention backends in the conformance suite, with recorded graphs on a CPU.

    PYTHONPATH=tests python tests/engines/oracle/run_vllm_attention.py --wheel WHEEL --count 100

Needs the unpacked wheel, torch and Triton; no GPU and no installed engine. FLASH_ATTN runs ``--count`` random scenes
with a stand-in for FlashAttention's two compiled functions; TRITON_ATTN, whose kernels are interpreted, a few cases.
Without the zeros that the adapter writes, both leave rows unwritten (vllm#57136). At last the names of the unit tests'
stand-ins are compared with the wheel's. Exits with 1 on any other answer.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from capture_planner.modes import GraphMode
from capture_planner_conformance.scene import Arrive, Case, RunBatch, Scene, Shape, dumps
from capture_planner_conformance.stage import under_test
from capture_planner_conformance.suite import SearchProfile, SuiteOptions, conform, replay
from engines.oracle.comparison import finish, options, oracle, say, sources
from support import vllm_attention

SHAPES = {
    engine: tuple(
        Shape(dtype=dtype, heads=4, kv_heads=2, head_dim=32, page_size=16, longest=48, windowed=windowed)
        for windowed in (False, True)
    )
    for engine, dtype in (("FLASH_ATTN", "bfloat16"), ("TRITON_ATTN", "float32"))
}
SEGMENTS = 2
"""Parts of a sequence in TRITON_ATTN's split kernel: 16 in vLLM, of which each is interpreted."""


def cases(shape: Shape) -> Iterator[str]:
    """Yield a prompt next to a decode, in whole graphs and around them, without and with drafts in one graph."""
    for drafts, mode in ((0, GraphMode.FULL), (0, GraphMode.PIECEWISE), (2, GraphMode.FULL)):
        scene = Scene(
            shape=shape, mode=mode, num_reqs=2, num_tokens=8, size_tokens=(8,), size_reqs=(1, 2), drafts=drafts
        )
        first = RunBatch(rows=((0, 1 + drafts, 0),))
        steps = (Arrive(prompt=4, computed=4), first, Arrive(prompt=20), RunBatch(rows=((0, 1, 0), (1, 5, 0))), first)
        yield dumps(Case(scene=scene, steps=steps))


def differences(module: Any, count: int, seed: int, seen: Counter[str]) -> Iterator[str]:
    """Yield what the suite finds that it should not, and the other way round."""
    flash, triton = (under_test(module.InterpretedAttention(engine)) for engine in SHAPES)
    profile = SearchProfile(name="oracle", examples=count, steps=8)
    outcome = conform(flash, SuiteOptions(profile=profile, seed=seed, shapes=SHAPES["FLASH_ATTN"], audits=False))
    yield from (f"FLASH_ATTN: {failure}: {failure.case}" for failure in outcome.failures)
    seen["scenes of FLASH_ATTN"] += outcome.log.examples
    seen["forwards of FLASH_ATTN"] += outcome.log.forwards.total()
    for text in (text for shape in SHAPES["TRITON_ATTN"] for text in cases(shape)):
        result = replay(triton, text)
        if result.failure is not None:
            yield f"TRITON_ATTN: {result.failure}: {text}"
        seen["cases of TRITON_ATTN"] += 1
        seen["forwards of TRITON_ATTN"] += result.log.forwards.total()
    for engine, shapes in SHAPES.items():
        found = replay(under_test(module.InterpretedAttention(engine, zeroes=False)), next(cases(shapes[0]))).failure
        seen["unwritten rows found"] += 1
        if found is None or found.check.value != "written":
            yield f"{engine}: rows are expected to stay unwritten, and the suite says {found}"


def stand_in_differences() -> Iterator[str]:
    """Yield where vLLM lacks a name, a parameter or a field that the adapter uses."""
    for seam in vllm_attention.seams():
        found = getattr(importlib.import_module(seam.module), seam.name, None)
        if found is None:
            yield f"vLLM has no {seam.name} in {seam.module}"
        elif seam.needs and (absent := seam.needs - set(inspect.signature(found).parameters)):
            yield f"{seam.module}.{seam.name} takes no {', '.join(sorted(absent))}"


def main() -> int:
    """Run and print; exit code 1 on a difference."""
    parser = options(__doc__, "vllm", seed=0)
    parser.set_defaults(count=100)
    arguments = parser.parse_args()
    seen: Counter[str] = Counter()
    started = time.perf_counter()
    module = oracle("vllm_attention")
    engine = module.AttentionOracle(sources(arguments))
    from vllm.v1.attention.backends import triton_attn

    triton_attn.NUM_PAR_SOFTMAX_SEGMENTS = SEGMENTS
    differing = 0
    with engine.running():
        for text in (*differences(module, arguments.count, arguments.seed, seen), *stand_in_differences()):
            say(text)
            differing += 1
    return finish("vllm_attention", arguments, dict(seen), differing, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
