"""Record what TensorRT-LLM's own functions answer.

    PYTHONPATH=tests python tests/engines/oracle/record_tensorrt_llm.py FOLDER

FOLDER has the engine's sources at their paths, at the commits that ``engines/tensorrt_llm/rules.py``
names, or the functions alone. Writes ``golden/tensorrt_llm.json``: numbers, and no word of the sources.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from engines.generators import tensorrt_llm as drawn
from engines.generators.tensorrt_llm_answers import asked, shortened
from support.files import module_at

HERE = Path(__file__).parent
SEED, COUNT = 2026, 400


def recorded(oracle, sources, case):
    """What the engine makes of a case, or that it refuses it."""
    try:
        engine = oracle.Engine(sources, case)
    except ValueError:
        return {"refused": True}
    return shortened(asked(engine, case))


def main(folder):
    """Record ``COUNT`` cases."""
    oracle = module_at(HERE / "tensorrt_llm.py")
    sources = oracle.Sources(folder)
    answers = [recorded(oracle, sources, case) for case in itertools.islice(drawn.cases(SEED), COUNT)]
    lines = ",\n".join(json.dumps(answer, separators=(",", ":")) for answer in answers)
    (HERE.parent / "golden" / "tensorrt_llm.json").write_text(f'{{"seed":{SEED},"cases":[\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
