"""Compare the emulation of SGLang with SGLang's own functions, over random launches and batches.

    PYTHONPATH=tests python tests/engines/oracle/run_sglang.py --wheel WHEEL --count 20000 --seed 1 --jobs 8

WHEEL is SGLang's; msgspec is installed, SGLang is not. Prints each difference, and how many launches and
batches were compared; exits with 1 where there is a difference. Launches that SGLang refuses over a value that
decides nothing about graphs are counted apart, by flag: without it, SGLang has to answer as the emulation does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import attrs

from capture_planner_sglang.emulation.releases import RELEASES
from engines.generators import sglang as drawing
from engines.generators import sglang_answers as answers
from engines.generators.sglang_repairs import repaired
from engines.oracle.comparison import finish, options, oracle, release_in, say, sources


def differences(engine: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name what differs; a refusal is compared as such, whatever its words."""
    if "refused" in engine or "refused" in ours:
        if ("refused" in engine) == ("refused" in ours):
            return []
        return [f"engine: {engine.get('refused', 'takes it')}; ours: {ours.get('refused', 'takes it')}"]
    engine, ours = json.loads(json.dumps(engine)), json.loads(json.dumps(ours))
    return [f"{key}: {_apart(engine[key], ours[key])}"[:600] for key in engine if engine[key] != ours[key]]


def _apart(engine: Any, ours: Any) -> str:
    """Return where two values part: of lists and tables the items that differ, or all of both."""
    if isinstance(engine, dict) and isinstance(ours, dict) and engine.keys() == ours.keys():
        return "; ".join(f"{key}: {_apart(engine[key], ours[key])}" for key in engine if engine[key] != ours[key])
    if isinstance(engine, list) and isinstance(ours, list) and len(engine) + len(ours) > 12:
        only = ([each for each in one if each not in other] for one, other in ((engine, ours), (ours, engine)))
        return "{} in the engine's alone; {} in ours alone".format(*only)
    return f"engine {engine}; ours {ours}"


@attrs.define
class Tally:
    """What some launches came to."""

    launches: int = 0
    refused: int = 0
    batches: int = 0
    wrong: list[str] = attrs.Factory(list)
    ignored: Counter[str] = attrs.Factory(Counter)

    def add(self, other: Tally) -> None:
        self.launches += other.launches
        self.refused += other.refused
        self.batches += other.batches
        self.wrong += other.wrong
        self.ignored += other.ignored


def compared(own: Any, seed: int, indexes: Iterable[int], batches_each: int) -> Tally:
    """Draw the launches of these indexes and compare them."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for index in indexes:
            random = Random(f"{seed}:{index}")
            case = drawing.case(random, index)
            command = drawing.written(case, Path(folder))
            loras = any("lora" in word for word in case.command)
            batches = drawing.batches(random, batches_each, loras=loras)
            counts = drawing.ranks(random, 6)
            at_edges, more = answers.edges(random, command, case.environment)
            batches, counts = [*batches, *at_edges], [*counts, *more]
            ours = answers.emulated(command, case.environment, batches, counts)
            engine = own.ask(command, case.environment, batches, counts)
            found = differences(engine, ours)
            if "refused" in engine and "refused" not in ours:
                for flag, other in repaired(case):
                    words = drawing.written(other, Path(folder))
                    if not differences(own.ask(words, case.environment, batches, counts), ours):
                        tally.ignored[flag] += 1
                        found = []
                        break
            tally.launches += 1
            tally.refused += "refused" in engine
            tally.batches += 0 if "refused" in engine else len(batches)
            if found:
                lines = [f"{seed}:{index} {case.device} {case.model} {' '.join(case.command)}"]
                lines += [f"file {case.file}"] if case.file else []
                tally.wrong.append("\n    ".join([*lines, *found]))
    return tally


def _parts(own: Any, arguments: argparse.Namespace) -> Iterator[Tally]:
    """Yield what each process compared; they part after the engine's import, so that it is done once."""
    count, jobs = arguments.count, arguments.jobs
    if jobs == 1:
        yield compared(own, arguments.seed, range(count), arguments.batches)
        return
    context = multiprocessing.get_context("fork")
    done: Any = context.Queue()

    def work(indexes: Iterable[int]) -> None:
        done.put(compared(own, arguments.seed, indexes, arguments.batches))

    children = [context.Process(target=work, args=(range(first, count, jobs),)) for first in range(jobs)]
    for child in children:
        child.start()
    for _ in children:
        while True:
            with contextlib.suppress(queue.Empty):
                yield done.get(timeout=10)
                break
            if any(child.exitcode for child in children):
                raise SystemExit("a process of the comparison ended with an error")
    for child in children:
        child.join()


def main() -> int:
    made = options(__doc__, "sglang")
    made.add_argument("--batches", type=int, default=12)
    made.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    made.add_argument("--show", type=int, default=20, help="most differences to print")
    arguments = made.parse_args()
    wheel = sources(arguments)
    arguments.release = release_in(wheel, "sglang")
    release = arguments.release if arguments.release in RELEASES.emulated() else RELEASES.newest
    say(f"SGLang {arguments.release} against the emulation of {release}")
    with RELEASES.following(release):
        return _compare(oracle("sglang").Sglang(wheel), arguments)


def _compare(own: Any, arguments: argparse.Namespace) -> int:
    """Compare while a release is followed, and return the exit status."""
    started = time.perf_counter()
    tally = Tally()
    for part in _parts(own, arguments):
        for text in part.wrong[: max(0, arguments.show - len(tally.wrong))]:
            say(text)
        tally.add(part)
    totals = {"launches": tally.launches, "refused": tally.refused, "batches": tally.batches}
    return finish("sglang", arguments, totals, len(tally.wrong), time.perf_counter() - started, tally.ignored)


if __name__ == "__main__":
    sys.exit(main())
