"""Compare the emulation of SGLang with SGLang's own functions, over random launches and batches.

    PYTHONPATH=tests python tests/engines/oracle/run_sglang.py --wheel WHEEL --count 20000 --seed 1

WHEEL is SGLang's; msgspec is installed, SGLang is not. Prints each difference, and how many launches and
batches were compared; exits with 1 where there is a difference. Launches that SGLang refuses over a value that
decides nothing about graphs are counted apart, by flag: without it, SGLang has to answer as the emulation does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from engines.generators import sglang as drawing
from engines.generators import sglang_answers as answers
from engines.generators.sglang_repairs import repaired
from engines.oracle.comparison import finish, options, oracle, say, sources


def differences(engine: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name what differs; a refusal is compared as such, whatever its words."""
    if "refused" in engine or "refused" in ours:
        if ("refused" in engine) == ("refused" in ours):
            return []
        return [f"engine: {engine.get('refused', 'takes it')}; ours: {ours.get('refused', 'takes it')}"]
    engine, ours = json.loads(json.dumps(engine)), json.loads(json.dumps(ours))
    return [f"{key}: engine {engine[key]}; ours {ours[key]}"[:600] for key in engine if engine[key] != ours[key]]


def main() -> int:
    made = options(__doc__, "sglang")
    made.add_argument("--batches", type=int, default=12)
    made.add_argument("--show", type=int, default=20, help="most differences to print")
    arguments = made.parse_args()
    own = oracle("sglang").Sglang(sources(arguments))
    started = time.perf_counter()
    compared = refused = asked = wrong = 0
    ignored: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.count):
            random = Random(f"{arguments.seed}:{index}")
            case = drawing.case(random)
            command = drawing.written(case, Path(folder))
            loras = any("lora" in word for word in case.command)
            batches = drawing.batches(random, arguments.batches, loras=loras)
            counts = drawing.ranks(random, 6)
            ours = answers.emulated(command, case.environment, batches, counts)
            engine = own.ask(command, case.environment, batches, counts)
            found = differences(engine, ours)
            if "refused" in engine and "refused" not in ours:
                for flag, other in repaired(case):
                    words = drawing.written(other, Path(folder))
                    if not differences(own.ask(words, case.environment, batches, counts), ours):
                        ignored[flag], found = ignored[flag] + 1, []
                        break
            compared += 1
            refused += "refused" in engine
            asked += 0 if "refused" in engine else len(batches)
            if found:
                wrong += 1
                if wrong <= arguments.show:
                    lines = [f"{arguments.seed}:{index} {case.device} {case.model} {' '.join(case.command)}"]
                    lines += [f"file {case.file}"] if case.file else []
                    say("\n    ".join([*lines, *found]))
    totals = {"launches": compared, "refused": refused, "batches": asked}
    seconds = time.perf_counter() - started
    return finish("sglang", arguments, totals, wrong, seconds, ignored)


if __name__ == "__main__":
    sys.exit(main())
