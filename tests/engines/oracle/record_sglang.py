"""Record SGLang's own answers as golden: run by hand, with the path of the unpacked wheel.

    PYTHONPATH=tests python tests/engines/oracle/record_sglang.py FOLDER

Writes ``tests/engines/golden/sglang.json``: launches drawn by ``engines.generators.sglang``,
each with what the engine's functions answered, as ``shortened`` has it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from engines.generators import sglang as drawing
from engines.generators import sglang_answers as answers
from engines.generators.sglang_repairs import repaired
from support.files import module_at

COUNT, BATCHES, RANKS = 400, 12, 3
SELDOM = (
    ("b200", "--pp-size 2 --cuda-graph-backend-prefill breakable"),
    ("h100", "--pp-size 2 --cuda-graph-backend-prefill breakable --chunked-prefill-size 16384"),
    ("h100", "--tp-size 8 --moe-dense-tp-size 1 --cuda-graph-bs-decode 1 3 8 20"),
    ("b200", "--tp-size 8 --attn-dp-size 4 --chunked-prefill-size 32768 --disable-cuda-graph-padding"),
)
"""Launches for rules that a draw seldom meets."""
_HERE = Path(__file__).parent


def main() -> None:
    oracle = module_at(_HERE / "sglang.py").Sglang(Path(sys.argv[1]))
    cases: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(COUNT + len(SELDOM)):
            random = Random(f"golden:{seed}")
            case = drawing.case(random)
            if seed >= COUNT:
                device, flags = SELDOM[seed - COUNT]
                words = ("--model-path", "MODEL", *flags.split())
                case = drawing.Case(command=words, model="llama-3", device=device)
            command = drawing.written(case, Path(folder))
            loras = any("lora" in word for word in case.command)
            batches = drawing.batches(random, BATCHES, loras=loras)
            counts = drawing.ranks(random, RANKS)
            answer = oracle.ask(command, case.environment, batches, counts)
            for _, other in repaired(case) if "refused" in answer else ():
                # What is refused over a value that decides nothing is recorded without that value.
                again = oracle.ask(drawing.written(other, Path(folder)), case.environment, batches, counts)
                answer = answer if "refused" in again else again
            kept: Any = "refused" if "refused" in answer else answers.shortened(answer)
            asked = [] if kept == "refused" else [answers.batch_row(batch) for batch in batches]
            cases.append([case.device, case.model, case.command, case.file, asked, counts, kept])
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (_HERE.parent / "golden" / "sglang.json").write_text(f"[\n{rows}\n]\n")
    refused = sum(case[-1] == "refused" for case in cases)
    sys.stdout.write(f"{len(cases)} launches, {refused} of them refused\n")


if __name__ == "__main__":
    main()
