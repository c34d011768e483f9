"""What observing vLLM adds to a step on the host: microseconds with cold and with warm caches, and calls of functions.

Runs steps of EAGLE with three drafts on the stand-ins of vLLM in tests/engines/standin, with the real wrappers. Around
each wrapped function the engine reads a part of some 50 MB in random order, as an engine's own work leaves no line of
ours in the caches; without that, caches stay warm. Blocks of steps with vLLM's own functions and with the wrapped ones
take turns; what lies between the caller and the engine's function is timed in both, and compared. A stand-in's step is
shorter than a real one, so the result is microseconds, and their share of a step of 5 ms.
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
TARGET = 0.005
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

    def __call__(self, result: Any = None) -> None:
        """Read on."""
        start = self._place
        self._place = (start + self._read) % (len(self._objects) - self._read)
        sum(len(name) for _, name in self._objects[start : start + self._read])


def _make(output: Any) -> None:
    """Make the tokens of an output, as vLLM does last."""
    output.sampled_token_ids = [tokens[:] for tokens in output.sampled_token_ids]


class Engine:
    """A vLLM of stand-ins, whose functions can be wrapped and unwrapped.

    What lies between a call and the engine's own function, and between its return and the caller, is timed.
    """

    def __init__(self, support: Any, work: Work, requests: int) -> None:
        self._work, self._clock = work, 0
        for seam in HOT:
            importlib.import_module(seam.module)
        for seam in HOT:
            self._put(seam, self._inside(getattr(*seam.owner()), _make if seam is seams.OUTPUT else work))
        own = [getattr(*seam.owner()) for seam in HOT]
        sizes = tuple(sorted({8, 16, 32, requests, 4 * requests}))
        self._runner = support.started(sizes=sizes, max_num_seqs=requests)
        wrapped = [getattr(*seam.owner()) for seam in HOT]
        self._functions = {True: [*map(self._outside, wrapped)], False: [*map(self._outside, own)]}
        self._step = support.step(requests, 4, sampled=[1 + number % 4 for number in range(requests)])

    def _put(self, seam: seams.Seam, function: Callable[..., Any]) -> None:
        owner, name = seam.owner()
        original = getattr(owner, name)
        setattr(owner, name, function)
        if seam is seams.STEP:
            seams.replace_copies(original, function)

    def _inside(self, original: Callable[..., Any], behind: Callable[[Any], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def inside(*args: Any, **kwargs: Any) -> Any:
            self._clock += time.perf_counter_ns()
            self._work()
            result = original(*args, **kwargs)
            behind(result)
            self._clock -= time.perf_counter_ns()
            return result

        return inside

    def _outside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def outside(*args: Any, **kwargs: Any) -> Any:
            self._work()
            self._clock -= time.perf_counter_ns()
            result = original(*args, **kwargs)
            self._clock += time.perf_counter_ns()
            self._work()
            return result

        return outside

    def observe(self, observed: bool) -> None:
        """Put vLLM's own functions in place, or the wrapped ones."""
        for seam, function in zip(HOT, self._functions[observed], strict=True):
            self._put(seam, function)

    def step(self) -> float:
        """Run a step, and return the microseconds around the engine's own functions."""
        self._clock = 0
        self._runner.execute_model(self._step)
        self._runner.sample_tokens(None).get_output()
        self._runner.answers.clear()
        return self._clock / 1e3

    def stop(self) -> None:
        """Write the last observation."""
        self._runner.shutdown()


def added(engine: Engine, blocks: int) -> float:
    """Return the microseconds that observing adds to a step."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * blocks):
        observed = number % 2 == 0
        engine.observe(observed)
        engine.step()
        times[observed] += [engine.step() for _ in range(BLOCK)]
    return trimmed_mean(times[True]) - trimmed_mean(times[False])


def calls(engine: Engine, steps: int) -> float:
    """Return the functions of Python and C that a step calls more than unobserved."""
    counts = []
    for observed in (True, False):
        engine.observe(observed)
        entered = [0]

        def count(frame: Any, event: str, argument: Any, entered: list[int] = entered) -> None:
            entered[0] += event in ("call", "c_call")

        sys.setprofile(count)
        for _ in range(steps):
            engine.step()
        sys.setprofile(None)
        counts.append(entered[0])
    return (counts[0] - counts[1]) / steps


def thread_microseconds(engine: Engine, steps: int) -> float:
    """Return the CPU microseconds that the recorder's thread takes for a step, without writing the file."""
    clocks = [
        time.pthread_getcpuclockid(each.ident)
        for each in threading.enumerate()
        if "recorder" in each.name and each.ident is not None
    ]
    engine.observe(True)
    time.sleep(1.5)
    before = sum(map(time.clock_gettime, clocks))
    for _ in range(steps):
        engine.step()
    time.sleep(1.5)
    return (sum(map(time.clock_gettime, clocks)) - before) / steps * 1e6


@contextmanager
def measured(work: Work, requests: int) -> Iterator[Engine]:
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
    options.add_argument("--blocks", type=int, default=200, help="blocks of steps that are observed")
    options.add_argument("--requests", type=int, default=48)
    chosen = options.parse_args(arguments)
    os.environ.setdefault("CAPTURE_PLANNER_STRICT", "1")
    results: dict[str, Any] = {"requests": chosen.requests}
    for name, read in (("cold caches", READ), ("warm caches", 0)):
        with measured(Work(read), chosen.requests) as engine:
            results[name] = added(engine, chosen.blocks)
            results["calls"] = calls(engine, 63)
            results["recorder's thread"] = thread_microseconds(engine, 2000)
    shown = table(f"observing {chosen.requests} requests, 3 drafts", "", "µs a step", "of 5 ms")
    for name in ("cold caches", "warm caches", "recorder's thread"):
        shown.add_row(name, f"{results[name]:.1f}", f"{results[name] * 1e-6 / STEP:.2%}")
    share = (results["cold caches"] + results["recorder's thread"]) * 1e-6 / STEP
    CONSOLE.print(shown)
    CONSOLE.print(f"{results['calls']:.0f} calls of functions a step")
    CONSOLE.print(f"at most {TARGET:.2%} of a step, cold and with the thread: {share:.2%}", verdict(share <= TARGET))
    finish(chosen, results)
    return 0 if share <= TARGET else 2


if __name__ == "__main__":
    sys.exit(main())
