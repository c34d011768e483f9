"""Run TensorRT-LLM's own functions beside the emulation of them, over random command lines and batches.

    PYTHONPATH=tests python tests/engines/oracle/run_tensorrt_llm.py --wheel FOLDER --count 20000 --seed 1

FOLDER has the engine's sources at their paths (``tensorrt_llm/llmapi/llm_args.py`` and so on), at the
commits that ``capture_planner/engines/tensorrt_llm/rules.py`` names: no wheel is on a public index.
Prints how much was compared and every difference; exits with 1 where there is one.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from capture_planner.errors import FlagError
from engines.generators import tensorrt_llm as drawn
from engines.generators.tensorrt_llm_answers import Answers, asked, emulated
from engines.oracle.comparison import finish, options, oracle, say, sources


def theirs(module: Any, files: Any, case: drawn.Case) -> Answers | None:
    """What the engine makes of a case; None where it fails."""
    try:
        engine = module.Engine(files, case)
    except ValueError:
        return None
    return asked(engine, case)


def ours(case: drawn.Case, file: Path) -> Answers | None:
    """What the emulation makes of it; None where it refuses."""
    try:
        return emulated(case, file)
    except FlagError:
        return None


def main() -> int:
    """Compare, and say so."""
    arguments = options(__doc__, "tensorrt_llm").parse_args()
    module = oracle("tensorrt_llm")
    engine, started = module.Sources(sources(arguments)), time.perf_counter()
    batches = refused = different = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in itertools.islice(drawn.cases(arguments.seed), arguments.count):
            expected, found = theirs(module, engine, case), ours(case, Path(folder) / "config.yaml")
            refused += expected is None
            if expected is not None:
                batches += len(expected.alone) + sum(map(len, expected.ranks))
            if expected != found:
                different += 1
                say(f"{case}\n  TensorRT-LLM: {expected}\n  here:         {found}")
    counts = {"configurations": arguments.count, "refused by both": refused, "batches": batches}
    return finish("tensorrt_llm", arguments, counts, different, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
