"""Record lines that vLLM and SGLang log of their steps in ``tests/measuring/data/log_lines.json``; needs msgspec.

PYTHONPATH=tests python tests/engines/oracle/record_log_lines.py UNPACKED_VLLM UNPACKED_SGLANG
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from support.files import module_at

HERE = Path(__file__).parent


def recorded(vllm: Path, sglang: Path, *, seed: int = 15, count: int = 10) -> dict[str, Any]:
    """Return steps of each format, each with the text that the engine's own function makes of them."""
    lines, rng = module_at(HERE / "log_lines.py"), random.Random(seed)
    iterations = [
        {
            "engine": index % 2,
            "iteration_index": 41 + index,
            "num_ctx_requests": (reqs := rng.choice((0, 0, 1, 3))),
            "num_ctx_tokens": reqs * rng.randint(1, 512),
            "num_generation_requests": (decoding := rng.randint(1, 256)),
            "num_generation_tokens": decoding * rng.choice((1, 4)),
            "elapsed_ms": round(rng.uniform(1, 40), 2),
            "num_encoder_inputs": 2 if index == 7 else 0,
            "num_encoder_output_tokens": 2392 if index == 7 else 0,
            "is_dummy": index == 5,
        }
        for index in range(count)
    ]
    rows = [(tokens := rng.randint(1, 64), tokens + rng.randint(0, 8), rng.choice(MODES)) for _ in range(count)]
    tables = [[rng.choice(rows) for _ in range(60)] for _ in range(2)]
    log = [
        {"decode": [rng.randint(1, 200), index % 4 == 1], "hybrid": index % 4 == 3}
        if index % 2
        else {"prefill": [rng.randint(1, 8), rng.randint(1, 4096), 17 if index == 4 else 0], "hybrid": index == 6}
        for index in range(2 * count)
    ]
    passes = [
        {
            "num_prefill_requests": (reqs := rng.choice((0, 1, 2))),
            "sum_prefill_tokens": reqs * rng.randint(1, 512),
            "num_decode_requests": rng.randint(0, 64) if reqs else rng.randint(1, 64),
        }
        for _ in range(count)
    ]
    return {
        "vllm_iterations": {"steps": iterations, "text": lines.vllm_iterations(vllm, iterations)},
        "vllm_iterations_colored": {"steps": iterations, "text": lines.vllm_iterations(vllm, iterations, True)},
        "vllm_graph_tables": {
            "steps": [step for table in tables for step in table],
            "text": lines.vllm_graph_tables(vllm, tables, "FULL_AND_PIECEWISE"),
        },
        "sglang": {"steps": log, "text": lines.sglang_log(sglang, log)},
        "forward_passes": {"steps": passes, "text": lines.forward_passes(sglang, passes)},
    }


def main() -> None:
    """Write ten steps of each format."""
    vllm, sglang = map(Path, sys.argv[1:3])
    target = HERE.parent.parent / "measuring" / "data" / "log_lines.json"
    target.write_text(json.dumps(recorded(vllm, sglang), indent=1) + "\n", encoding="utf-8")


MODES = ("NONE", "PIECEWISE", "FULL")

if __name__ == "__main__":
    main()
