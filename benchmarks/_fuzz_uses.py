"""One document of the fuzzer through the whole file path, under guards of time and memory."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, shipped_environments, shipped_specs
from _fuzz_documents import Corpus, Document, document

from capture_planner import codec
from capture_planner.analysis.lint import lint
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CapturePlannerError, InvalidValue
from capture_planner.modes import Role
from capture_planner.planning import planner
from capture_planner.plugins import registry
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Spec

MEBI = 1 << 20
MEGABYTES = 200
"""Most memory that one document may take."""
TRACE_EVERY = 25
"""One document in so many is traced."""
TYPES: dict[str, type[Spec | Environment | Plan]] = {"spec": Spec, "environment": Environment, "plan": Plan}


class HangError(KeyboardInterrupt):
    """The hang guard went off; what turns every error of a plugin into one of ours lets interruptions through."""


class BrokenLawError(Exception):
    """A law that a document broke without an exception of its own."""


@attrs.define
class Outcome:
    """What became of one document."""

    index: int
    kind: str
    made_by: str
    size: int
    outcome: str = ""
    cpu: float = 0.0
    stages: dict[str, float] = attrs.field(factory=dict)
    rss: int = 0
    traced: int | None = None
    violations: list[str] = attrs.field(factory=list)

    @property
    def slowest(self) -> float:
        """Processor time of the slowest use, in seconds."""
        return max(self.stages.values(), default=self.cpu)


@attrs.define
class State:
    """What a worker keeps from document to document."""

    arguments: argparse.Namespace
    corpus: Corpus
    specs: list[Spec]
    environments: list[Environment]
    backends: registry.Registry


_STATE: list[State] = []


def prepare(arguments: argparse.Namespace) -> None:
    """Make a worker ready: corpus, backends, and limits on memory and time."""
    read = {
        folder: [path.read_text("utf-8") for path in sorted((ROOT / "plans" / folder).glob("*.yaml"))]
        for folder in ("specs", "environments", "locked")
    }
    corpus = Corpus(spec=read["specs"], environment=read["environments"], plan=read["locked"])
    specs, environments = [*shipped_specs().values()], [*shipped_environments().values()]
    _STATE[:] = [State(arguments, corpus, specs, environments, registry.load_backends())]
    # First-use costs are not a document's.
    lint(codec.loads(corpus.plan[0], Plan))
    limit(2048)
    gc.collect()
    gc.freeze()  # what every worker keeps is not looked at again before each document


def limit(mebibytes: int) -> None:
    """Let this process grow by so much, and its timer stop what takes too long."""

    def overdue(_: int, __: Any) -> None:
        raise HangError

    if sys.platform == "linux":
        guard = memory("VmSize") + mebibytes * MEBI
        resource.setrlimit(resource.RLIMIT_AS, (guard, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, overdue)


def memory(field: str) -> int:
    """Return one of this process's sizes in bytes; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    match = re.search(rf"{field}:\s*(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def reset_peak() -> None:
    """Start the peak of the resident set anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def check(index: int) -> Outcome:
    """Run one document, and again where it was slow or is to be traced."""
    state = _STATE[0]
    arguments = state.arguments
    source = document(state.corpus, arguments.seed, index, arguments.only_kind)
    if arguments.only is not None:
        CONSOLE.print(source.data[:4000].decode("utf-8", "replace"), markup=False, highlight=False)
    outcome = _timed(state, source, index)
    if arguments.seconds < outcome.slowest < 2 * arguments.seconds and not outcome.violations:
        again = _timed(state, source, index)
        outcome = min(outcome, again, key=lambda outcome: outcome.slowest)
    if outcome.slowest > arguments.seconds and outcome.outcome != "hung":
        stage = max(outcome.stages, key=lambda stage: outcome.stages[stage])
        outcome.violations.append(f"{stage} took {outcome.slowest:.2f} s")
    if outcome.rss > MEGABYTES * MEBI:
        outcome.violations.append(f"resident memory grew by {outcome.rss >> 20} MiB")
    if index % TRACE_EVERY == 0 and not outcome.violations:
        tracemalloc.start()
        try:
            _timed(state, source, index)
            outcome.traced = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if outcome.traced > MEGABYTES * MEBI:
            outcome.violations.append(f"allocated {outcome.traced >> 20} MiB")
    return outcome


def _timed(state: State, source: Document, index: int) -> Outcome:
    """Run one document under the guards."""
    outcome = Outcome(index=index, kind=source.kind, made_by=source.made_by, size=len(source.data))
    gc.collect()
    reset_peak()
    before = memory("VmRSS")
    rng = random.Random(f"use:{state.arguments.seed}:{index}")
    guarded(outcome, state.arguments.hang, lambda: _through(state, outcome, source.data, rng))
    outcome.rss = max(memory("VmHWM") - before, 0)
    return outcome


def guarded(outcome: Outcome, hang: float, use: Callable[[], None]) -> None:
    """Use an input, for at most ``hang`` processor seconds, and note how that ended where it must not have."""
    signal.setitimer(signal.ITIMER_PROF, hang)
    start = time.process_time()
    try:
        use()
    except HangError:
        outcome.outcome = "hung"
        outcome.violations.append(f"stopped after {hang:g} s, in {_last(outcome)}")
    except MemoryError:
        outcome.outcome = "out of memory"
        outcome.violations.append(f"out of memory under the guard, after {_last(outcome)}")
    except BrokenLawError as error:
        outcome.outcome = "broke a law"
        outcome.violations.append(str(error))
    except BaseException as error:  # a plugin may raise what is no Exception
        outcome.outcome = "traceback"
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if "capture_planner" in f.filename), frames[-1])
        at = f"{Path(place.filename).name}:{place.lineno} {place.name}"
        outcome.violations.append(f"{type(error).__name__} in {at}: {ascii(error)[:200]}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        outcome.cpu = time.process_time() - start


def _last(outcome: Outcome) -> str:
    return next(reversed(outcome.stages), "the start")


@contextlib.contextmanager
def stage(outcome: Outcome, name: str) -> Iterator[None]:
    """Time one stage; what it raises passes through."""
    start = time.process_time()
    outcome.stages[name] = 0.0
    try:
        yield
    finally:
        outcome.stages[name] = time.process_time() - start


def _through(state: State, outcome: Outcome, data: bytes, rng: random.Random) -> None:
    """Read a document, and use it for all that it is good for."""
    try:
        with stage(outcome, "read"):
            value = _read(state, outcome.kind, data, rng)
    except CapturePlannerError as error:
        _refused(outcome, error, "read")
        return
    outcome.outcome = "loaded"
    with stage(outcome, "write"):
        text = codec.dumps(value)
    with stage(outcome, "read again"):
        _same(value, text, TYPES[outcome.kind])
    plan = value if isinstance(value, Plan) else None
    if plan is None:
        spec = value if isinstance(value, Spec) else rng.choice(state.specs)
        environment = value if isinstance(value, Environment) else rng.choice(state.environments)
        try:
            with stage(outcome, "plan"):
                plan = planner.plan(spec, environment, state.backends)
        except CapturePlannerError as error:
            _refused(outcome, error, "plan")
            return
        outcome.outcome = "planned"
        if rng.random() < 0.3:
            with stage(outcome, "write plan"):
                text = codec.dumps(plan)
            with stage(outcome, "read plan"):
                _same(plan, text, Plan)
    with stage(outcome, "dispatch"):
        _dispatch(plan, rng)
    with stage(outcome, "lint"):
        for finding in lint(plan):
            str(finding).encode()


def _read(state: State, kind: str, data: bytes, rng: random.Random) -> Spec | Environment | Plan:
    """Read bytes as text, or where they are none, and now and then anyway, as a file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is not None and rng.random() < 0.9:
        return codec.loads(text, TYPES[kind])
    path = Path(state.arguments.folder) / f"document-{os.getpid()}.yaml"
    path.write_bytes(data)
    return codec.Document.read(path).load(TYPES[kind])


def _same(value: Spec | Environment | Plan, text: str, kind: type[Spec | Environment | Plan]) -> None:
    try:
        again = codec.loads(text, kind)
    except CapturePlannerError as error:
        raise BrokenLawError(f"what was written is refused: {str(error)[:200]}") from error
    if again != value:
        raise BrokenLawError("what was written is read as something else")


def _refused(outcome: Outcome, error: CapturePlannerError, by: str) -> None:
    """Classify a refusal, and check that it can be shown."""
    try:
        str(error).encode()
    except UnicodeEncodeError as wrong:
        raise BrokenLawError(f"the message cannot be shown: {wrong}") from error
    problems = error.problems if isinstance(error, InvalidValue) else ()
    if by == "read" and not problems:
        raise BrokenLawError(f"{type(error).__name__} without a problem")
    message = problems[0].message if problems else str(error)
    message = re.sub(r"'[^']*'|\"[^\"]*\"|got .*", "...", message, flags=re.DOTALL)
    outcome.outcome = f"{by} refused: " + re.sub(r"-?\d+", "N", message)[:70].replace("\n", " ").strip()


def _dispatch(plan: Plan, rng: random.Random) -> None:
    """Ask for random batches, each twice: total, and the same answer always."""
    dispatcher = Dispatcher(plan)
    for _ in range(30):
        role = rng.choice([role.role for role in plan.roles] or [Role.TARGET])
        reqs = rng.choice((rng.randint(-1, 300), rng.randint(1, plan.limits.max_num_reqs + 1)))
        query_len = rng.choice((None, 1, 2, 4, rng.randint(-1, 300)))
        tokens = (
            reqs * query_len if query_len and rng.random() < 0.8 else rng.randint(0, plan.limits.max_num_tokens + 1)
        )
        batch = (role, reqs, tokens, query_len, rng.random() < 0.8, rng.choice((0, 0, 0, 1, rng.randint(-1, 40))))
        try:
            first, second = dispatcher.dispatch_counts(*batch), dispatcher.dispatch_counts(*batch)
        except CapturePlannerError:
            if plan.roles:
                raise BrokenLawError(f"dispatch is not total: {batch}") from None
            continue
        if first != second:
            raise BrokenLawError(f"dispatch changes its answer: {batch}")
