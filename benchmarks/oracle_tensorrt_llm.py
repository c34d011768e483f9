"""Run TensorRT-LLM's own functions beside the emulation of them, over random command lines and batches.

    python benchmarks/oracle_tensorrt_llm.py --wheel FOLDER --count 20000 --seed 1

FOLDER has the engine's sources at their paths (``tensorrt_llm/llmapi/llm_args.py`` and so on), at the
commits that ``capture_planner/engines/tensorrt_llm/rules.py`` names: no wheel is on a public index.
Prints how much was compared and every difference; exits with 1 where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from capture_planner.dispatch import Dispatch
from capture_planner.engines.tensorrt_llm import ENGINE, DecodeGraphs, agreed
from capture_planner.entry import Batch
from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.errors import FlagError
from capture_planner.modes import Role
from capture_planner.testing.engines import tensorrt_llm as drawn

ORACLE = Path(__file__).parent.parent / "tests" / "engines" / "oracle" / "tensorrt_llm.py"
MACHINE = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1))

Answers = tuple[Any, ...]
"""Sizes, shapes, answers to batches alone, and to those of ranks."""


def load(path: Path) -> Any:
    """Import a file by its path."""
    spec = spec_from_file_location(f"oracle_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def batch_of(question: drawn.Question) -> Batch:
    """The batch that a question is about."""
    num_reqs, query_len, past_prompt = question
    tokens = num_reqs + 1 if query_len is None else num_reqs * query_len
    return Batch(
        role=Role.TARGET, num_reqs=num_reqs, num_tokens=tokens, query_len=query_len, past_prompt=past_prompt
    )


def requests(dispatch: Dispatch) -> int | None:
    """Requests of the graph that answers, 0 for none."""
    return 0 if dispatch.entry is None else dispatch.entry.num_reqs


def theirs(oracle: Any, sources: Any, case: drawn.Case) -> Answers | None:
    """What the engine makes of a case; None where it fails."""
    try:
        engine = oracle.Engine(sources, case)
    except ValueError:
        return None
    together = engine.attention_dp and engine.tensor > 1
    return (
        sorted(set(engine.sizes)),
        [(size, engine.width(draft_len)) for size, draft_len in engine.shapes],
        [engine.answers([question], together=False)[0] for question in case.batches],
        [engine.answers(step, together=True) for step in case.ranks] if together else [],
    )


def ours(case: drawn.Case, file: Path) -> Answers | None:
    """What the emulation makes of it; None where it refuses."""
    file.write_text(json.dumps(case.config), "utf-8")
    try:
        emulation = ENGINE.emulate([*case.flags, "--config", str(file)], MACHINE)
    except FlagError:
        return None
    (manager,) = emulation.managers
    assert isinstance(manager, DecodeGraphs)
    together = emulation.parallel.data > 1
    steps = [agreed(manager, list(map(batch_of, step))) for step in case.ranks] if together else []
    return (
        list(emulation.sizes),
        [(graph.entry.num_reqs, graph.entry.query_len) for graph in emulation.graphs],
        [requests(emulation.dispatch(batch_of(question))) for question in case.batches],
        [[requests(answer) for answer in step] for step in steps],
    )


def main() -> int:
    """Compare, and say so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True, help="folder with the engine's sources")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    oracle = load(ORACLE)
    sources = oracle.Sources(options.wheel)
    batches = refused = different = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in itertools.islice(drawn.cases(options.seed), options.count):
            expected, found = theirs(oracle, sources, case), ours(case, Path(folder) / "config.yaml")
            refused += expected is None
            if expected is not None:
                batches += len(expected[2]) + sum(map(len, expected[3]))
            if expected != found:
                different += 1
                sys.stdout.write(f"{case}\n  TensorRT-LLM: {expected}\n  here:         {found}\n")
    sys.stdout.write(
        f"{options.count} configurations ({refused} of them refused by both) and {batches} batches compared, "
        f"{different} different\n"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
