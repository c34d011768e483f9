"""Record what TensorRT-LLM's own functions answer: ``python tests/engines/record_tensorrt_llm.py FOLDER``.

FOLDER has the engine's sources at their paths, at the commits that ``engines/tensorrt_llm/rules.py``
names, or the functions alone. Writes ``golden/tensorrt_llm.json``: numbers, and no word of the sources.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from capture_planner.testing.engines import tensorrt_llm as drawn
from capture_planner.testing.files import module_at

HERE = Path(__file__).parent
SEED, COUNT = 2026, 400


def runs(values):
    """Write ascending numbers as [first, count] of each run of neighbours: lists are long."""
    found = []
    for value in values:
        if found and value == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def recorded(oracle, sources, case):
    """What the engine makes of a case: sizes, shapes as requests and tokens a request, and its answers."""
    try:
        engine = oracle.Engine(sources, case)
    except ValueError:
        return {"refused": True}
    shapes = {}
    for num_reqs, draft_len in engine.shapes:
        shapes.setdefault(engine.width(draft_len), []).append(num_reqs)
    together = engine.attention_dp and engine.tensor > 1
    return {
        "sizes": runs(sorted(set(engine.sizes))),
        "shapes": {str(width): runs(sorted(sizes)) for width, sizes in shapes.items()},
        "first": [[size, engine.width(k)] for size, k in engine.shapes[:3]],
        "alone": [engine.answers([batch], together=False)[0] for batch in case.batches],
        "ranks": [engine.answers(step, together=True) for step in case.ranks] if together else [],
    }


def main(folder):
    """Record ``COUNT`` cases."""
    oracle = module_at(HERE / "oracle" / "tensorrt_llm.py")
    sources = oracle.Sources(folder)
    answers = [recorded(oracle, sources, case) for case in itertools.islice(drawn.cases(SEED), COUNT)]
    lines = ",\n".join(json.dumps(answer, separators=(",", ":")) for answer in answers)
    (HERE / "golden" / "tensorrt_llm.json").write_text(f'{{"seed":{SEED},"cases":[\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
