"""One vLLM over several GPUs, driven by JSON lines: the child of vllm_ranks.py.

The words after ``--`` are ``vllm serve``'s; the engine is the one behind the API server, whose engine cores and workers
are processes of their own. The process imports vLLM, and starts the engine at the first line of stdin. It writes one
JSON object a line to stdout: first ``{"facts": ...}``, then one answer for each further line of stdin:

- ``{"requests": [100, 3], "prompt": 128, "output": 128}``: serve so many requests on each data-parallel rank, or with
  one number on the engine, that arrive together; answer with seconds and tokens per second, all ranks together;
- ``{"tokens": true, ...}``: the same, with the tokens of each request in order.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from typing import Any

AS_MIXTURE = "CAPTURE_PLANNER_BENCHMARK_AS_MIXTURE"
"""Set: vLLM takes a dense model for a mixture of experts, whose data-parallel ranks agree in each step."""


OTHER_PLAN = "CAPTURE_PLANNER_BENCHMARK_OTHER_PLAN"
"""The plan of worker 1, where it has another."""


def treat_as_mixture() -> None:
    """Make vLLM treat a dense model as a mixture of experts, whose data-parallel ranks agree in each step."""
    from vllm.config.model import ModelConfig

    ModelConfig.is_moe = property(lambda self: True)


async def serve(engine: Any, load: dict[str, Any], name: str) -> dict[str, Any]:
    """Serve the requests of a load and return the figures."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        max_tokens=load["output"],
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    draw = random.Random(1)
    spread = len(load["requests"]) > 1
    jobs = [
        (f"{name}-{rank}-{index:04}", [draw.randrange(1000) for _ in range(load["prompt"])], rank if spread else None)
        for rank, count in enumerate(load["requests"])
        for index in range(count)
    ]

    async def one(request: str, prompt: list[int], rank: int | None) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, request, data_parallel_rank=rank):
            tokens += output.outputs[0].token_ids
        return tokens

    start = time.perf_counter()
    served = await asyncio.gather(*(one(*job) for job in jobs))
    seconds = time.perf_counter() - start
    count = sum(map(len, served))
    answer = {
        "requests": load["requests"],
        "seconds": round(seconds, 4),
        "tokens_per_second": round(count / seconds, 1),
    }
    return answer | ({"output": served} if load.get("tokens") else {})


async def drive(words: list[str], out: Any) -> None:
    """Start the engine, and answer lines until stdin ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    lines = asyncio.get_running_loop()
    start = time.perf_counter()
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parsed))
    try:
        config = engine.vllm_config
        facts = {
            "vllm": importlib.import_module("vllm").__version__,
            "start_seconds": round(time.perf_counter() - start, 2),
            "mode": config.compilation_config.cudagraph_mode.name,
            "max_cudagraph_capture_size": config.compilation_config.max_cudagraph_capture_size,
        }
        print(json.dumps({"facts": facts}), file=out)
        number = 0
        while line := await lines.run_in_executor(None, sys.stdin.readline):
            number += 1
            print(json.dumps(await serve(engine, json.loads(line), f"r{number}")), file=out)
    finally:
        engine.shutdown()


def main() -> None:
    """Import, wait for the first line, and serve."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout, too
    importlib.import_module("vllm.v1.engine.async_llm")
    sys.stdin.readline()
    asyncio.run(drive(sys.argv[sys.argv.index("--") + 1 :], out))


# In vLLM's processes, too: they are spawned, and import this file.
if os.environ.get(AS_MIXTURE):
    treat_as_mixture()
if os.environ.get(OTHER_PLAN) and multiprocessing.current_process().name == "VllmWorker-1":
    os.environ["CAPTURE_PLANNER_PLAN"] = os.environ[OTHER_PLAN]

if __name__ == "__main__":
    main()
