"""Compare the emulation of SGLang with SGLang's own functions, over random launches and batches.

    python benchmarks/oracle_sglang.py --wheel FOLDER --count 20000 --seed 1

FOLDER holds the unpacked wheel (``sglang`` in it); msgspec is installed, SGLang is not. Prints each
difference, and how many launches and batches were compared; exits with 1 where there is a difference.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from capture_planner.testing.engines import sglang as drawing
from capture_planner.testing.engines import sglang_answers as answers

_ORACLE = Path(__file__).parents[1] / "tests" / "engines" / "oracle" / "sglang.py"


def load_oracle(wheel: Path) -> Any:
    """Load the oracle by its file, under a name that is not the engine's."""
    spec = importlib.util.spec_from_file_location("oracle_of_sglang", _ORACLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Sglang(wheel)


def differences(engine: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name what differs; a refusal is compared as such, whatever its words."""
    if "refused" in engine or "refused" in ours:
        if ("refused" in engine) == ("refused" in ours):
            return []
        return [f"engine: {engine.get('refused', 'takes it')}; ours: {ours.get('refused', 'takes it')}"]
    engine, ours = json.loads(json.dumps(engine)), json.loads(json.dumps(ours))
    return [
        f"{key}: engine {engine[key]}; ours {ours[key]}"[:600] for key in engine if engine[key] != ours[key]
    ]


def say(text: str) -> None:
    """Write a line at once: a run takes minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the emulation of SGLang with its own functions.")
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=20, help="most differences to print")
    options = parser.parse_args()
    oracle = load_oracle(options.wheel)
    compared = refused = asked = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.count):
            random = Random(f"{options.seed}:{index}")
            case = drawing.case(random)
            command = drawing.written(case, Path(folder))
            loras = any("lora" in word for word in case.command)
            batches = drawing.batches(random, options.batches, loras=loras)
            counts = drawing.ranks(random, 6)
            ours = answers.emulated(command, case.environment, batches, counts)
            engine = oracle.ask(command, case.environment, batches, counts)
            found = differences(engine, ours)
            compared += 1
            refused += "refused" in engine
            asked += 0 if "refused" in engine else len(batches)
            if found:
                wrong += 1
                if wrong <= options.show:
                    lines = [f"{options.seed}:{index} {case.device} {case.model} {' '.join(case.command)}"]
                    lines += [f"file {case.file}"] if case.file else []
                    say("\n    ".join([*lines, *found]))
    say(f"{compared} launches compared, {refused} of them refused by SGLang, {asked} batches; {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
