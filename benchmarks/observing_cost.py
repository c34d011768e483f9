"""What observing vLLM adds to a step on the host: microseconds with cold and with warm caches, and calls of functions.

Runs steps of EAGLE with three drafts on the stand-ins of vLLM in tests/engines/standin, with the real wrappers. Around
each wrapped function the engine reads a part of some 50 MB in random order, as an engine's own work leaves no line of
ours in the caches; without that, caches stay warm. Blocks of steps with vLLM's own functions and with the wrapped ones
take turns, and the thread's CPU time is compared in pairs. A stand-in's step is shorter than a real one, so the result
is microseconds, and their share of a step of 5 ms.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from _bench import CONSOLE, ROOT, finish, parser, table, verdict
from _paired import trimmed_mean

from capture_planner_vllm import observe_seams as seams

STEP = 5e-3
"""Seconds of the step whose share is shown: a verification of 48 requests on an H200."""
TARGET = 0.0025
"""Most of a step that observing takes, cold."""
HOT = (seams.EXECUTE, seams.STEP, seams.FORWARD, seams.SAMPLE, seams.OUTPUT, seams.SPECIALIZE)
BLOCK = 4
OBJECTS = 400_000
READ = 1_500
"""Objects that the engine reads before a function that is wrapped, and behind it."""


class Work:
    """The engine's own work: reads other objects each time, in random order."""

    def __init__(self, read: int) -> None:
        """:param read: the number of objects; 0: no work."""
        self._read, self._place = read, 0
        self._objects = [(number, str(number)) for number in range(OBJECTS if read else 1)]
        random.Random(1).shuffle(self._objects)

    def __call__(self) -> None:
        """Read on."""
        start = self._place
        self._place = (start + self._read) % (len(self._objects) - self._read)
        sum(len(name) for _, name in self._objects[start : start + self._read])

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that works before another and behind it."""

        @functools.wraps(original)
        def worked(*args: Any, **kwargs: Any) -> Any:
            self()
            result = original(*args, **kwargs)
            self()
            return result

        return worked


class Engine:
    """A vLLM of stand-ins, whose functions can be wrapped and unwrapped."""

    def __init__(self, support: Any, work: Work | None, requests: int) -> None:
        for seam in HOT:
            importlib.import_module(seam.module)
        if work is not None:
            for seam in HOT:
                self._put(seam, work.around(getattr(*seam.owner())))
        own = [getattr(*seam.owner()) for seam in HOT]
        sizes = tuple(sorted({8, 16, 32, 4 * requests}))
        self._runner = support.started(sizes=sizes, max_num_seqs=requests)
        wrapped = [getattr(*seam.owner()) for seam in HOT]
        self._functions = {True: wrapped, False: own}
        self._step = support.step(requests, 4, sampled=[1 + number % 4 for number in range(requests)])

    def _put(self, seam: seams.Seam, function: Callable[..., Any]) -> None:
        owner, name = seam.owner()
        original = getattr(owner, name)
        setattr(owner, name, function)
        if seam is seams.STEP:
            seams.replace_copies(original, function)

    def observe(self, observed: bool) -> None:
        """Put vLLM's own functions in place, or the wrapped ones."""
        for seam, function in zip(HOT, self._functions[observed], strict=True):
            self._put(seam, function)

    def steps(self, number: int) -> None:
        """Run so many steps."""
        for _ in range(number):
            self._runner.execute_model(self._step)
            self._runner.sample_tokens(None).get_output()
        self._runner.answers.clear()

    def stop(self) -> None:
        """Write the last observation."""
        self._runner.shutdown()


def block(engine: Engine, observed: bool) -> float:
    """Return the seconds of a thread's CPU that a step takes in a block."""
    engine.observe(observed)
    engine.steps(1)
    start = time.thread_time()
    engine.steps(BLOCK)
    return (time.thread_time() - start) / BLOCK


def added(engine: Engine, pairs: int) -> Iterator[float]:
    """Yield the seconds that observing adds to a step, pair by pair."""
    for number in range(pairs):
        seconds = {observed: block(engine, observed) for observed in ((True, False) if number % 2 else (False, True))}
        yield seconds[True] - seconds[False]


def calls(engine: Engine, steps: int) -> float:
    """Return the functions of Python and C that a step calls more than unobserved."""
    counts = []
    for observed in (True, False):
        engine.observe(observed)
        entered = [0]

        def count(frame: Any, event: str, argument: Any, entered: list[int] = entered) -> None:
            entered[0] += event in ("call", "c_call")

        sys.setprofile(count)
        engine.steps(steps)
        sys.setprofile(None)
        counts.append(entered[0])
    return (counts[0] - counts[1]) / steps


def thread_seconds(engine: Engine, steps: int) -> float:
    """Return the CPU seconds that the recorder's thread takes for a step, without writing."""
    clocks = [
        time.pthread_getcpuclockid(each.ident)
        for each in threading.enumerate()
        if "recorder" in each.name and each.ident is not None
    ]
    engine.observe(True)
    time.sleep(1.5)
    before = sum(map(time.clock_gettime, clocks))
    engine.steps(steps)
    time.sleep(1.5)
    return (sum(map(time.clock_gettime, clocks)) - before) / steps


@contextmanager
def measured(work: Work | None, requests: int) -> Iterator[Engine]:
    """Run an engine that is observed."""
    sys.path.insert(0, str(ROOT / "tests"))
    support = importlib.import_module("support.vllm_observed")
    with support.process(CAPTURE_PLANNER_OBSERVE_SECONDS="3600"):
        engine = Engine(support, work, requests)
        yield engine
        engine.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit code 2 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=600, help="pairs of blocks, with cold caches and with warm ones")
    options.add_argument("--requests", type=int, default=48)
    chosen = options.parse_args(arguments)
    os.environ.setdefault("CAPTURE_PLANNER_STRICT", "1")
    results: dict[str, Any] = {"requests": chosen.requests}
    shown = table(f"observing vLLM, {chosen.requests} requests with 3 drafts each", "", "a step", "of 5 ms")
    for name, work in (("cold caches", Work(READ)), ("warm caches", None)):
        with measured(work, chosen.requests) as engine:
            engine.steps(100)
            values = sorted(added(engine, chosen.pairs))
            mean, quarter = trimmed_mean(values) * 1e6, len(values) // 4
            results[name] = {"microseconds": mean, "quartiles": [values[quarter] * 1e6, values[-quarter] * 1e6]}
            shown.add_row(name, f"{mean:.1f} µs", f"{mean * 1e-6 / STEP:.2%}")
            if work is None:
                results["calls"] = calls(engine, 63)
                results["thread microseconds"] = thread_seconds(engine, 4000) * 1e6
    thread = results["thread microseconds"]
    shown.add_row("recorder's thread", f"{thread:.1f} µs", f"{thread * 1e-6 / STEP:.2%}")
    shown.add_row("calls of functions", f"{results['calls']:.1f}", "")
    share = (results["cold caches"]["microseconds"] + thread) * 1e-6 / STEP
    CONSOLE.print(shown)
    CONSOLE.print(f"at most {TARGET:.2%} of a step, cold and with the thread: {share:.2%}", verdict(share <= TARGET))
    finish(chosen, results)
    return 0 if share <= TARGET else 2


if __name__ == "__main__":
    sys.exit(main())
