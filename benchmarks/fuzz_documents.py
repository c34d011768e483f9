"""Random and mutated documents through the whole file path: read, plan, dispatch, lint, write, read.

Every document is made from ``--seed`` and its index alone. Only ``CapturePlannerError`` may be
raised; no use of a document may take more than ``--seconds`` of processor time, and no document more
than ``--megabytes`` of memory;
what is loaded must be written and read again as itself. Exit code 1 on any violation, each with the
command that repeats it.

A document just over the time limit is run a second time and the faster run counts. Memory is the growth
of the peak resident set, per document, and tracemalloc's peak for one in ``--trace-every``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, finish, parser, shipped_environments, shipped_specs, table, verdict
from fuzz_mutations import KINDS, Corpus, document
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

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
TYPES: dict[str, type[Spec | Environment | Plan]] = {"spec": Spec, "environment": Environment, "plan": Plan}
LOADERS: dict[str, Callable[[Path], Spec | Environment | Plan]] = {
    "spec": codec.load_spec,
    "environment": codec.load_environment,
    "plan": codec.load_plan,
}


class Overdue(BaseException):
    """The hang guard went off; no ``except Exception`` may swallow it."""


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
    entries: int = 0
    message: int = 0
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
    specs, environments = shipped_specs(), shipped_environments()
    backends = registry.load_backends()
    plans = {}
    for name, spec in specs.items():
        for other, environment in environments.items():
            with contextlib.suppress(CapturePlannerError):
                plans[f"{name}@{other}"] = codec.dumps(planner.plan(spec, environment, backends))
    read = {
        path.stem: path.read_text(encoding="utf-8")
        for folder in ("specs", "environments")
        for path in sorted((ROOT / "plans" / folder).glob("*.yaml"))
    }
    corpus = Corpus(
        spec=[read[name] for name in specs],
        environment=[read[name] for name in environments],
        plan=[plans[name] for name in sorted(plans)],
    )
    _STATE[:] = [State(arguments, corpus, list(specs.values()), list(environments.values()), backends)]
    lint(planner.plan(specs["qwen3-8b-eagle3"], environments["h100"], backends))  # first-use costs are not a document's
    if sys.platform == "linux":
        guard = memory("VmSize") + 2048 * MEBI
        resource.setrlimit(resource.RLIMIT_AS, (guard, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, _overdue)
    gc.collect()
    gc.freeze()  # what every worker keeps is not looked at again before each document


def _overdue(_: int, __: Any) -> None:
    raise Overdue


def memory(field: str) -> int:
    """Return one of this process's sizes in bytes; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(rf"{field}:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def reset_peak() -> None:
    """Start the peak of the resident set anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def check(index: int) -> Outcome:
    """Run one document, and again where it was slow or is to be traced."""
    state = _STATE[0]
    arguments = state.arguments
    made = document(state.corpus, arguments.seed, index, arguments.only_kind)
    done = _timed(state, made.kind, made.made_by, made.data, index)
    if arguments.seconds < done.slowest < 2 * arguments.seconds and not done.violations:
        again = _timed(state, made.kind, made.made_by, made.data, index)
        done = min(done, again, key=lambda outcome: outcome.slowest)
    if done.slowest > arguments.seconds and done.outcome != "hung":
        stage = max(done.stages, key=lambda stage: done.stages[stage])
        done.violations.append(f"{stage} took {done.slowest:.2f} s")
    if done.rss > arguments.megabytes * MEBI:
        done.violations.append(f"resident memory grew by {done.rss >> 20} MiB")
    if index % arguments.trace_every == 0 and not done.violations:
        tracemalloc.start()
        try:
            _timed(state, made.kind, made.made_by, made.data, index)
            done.traced = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if done.traced > arguments.megabytes * MEBI:
            done.violations.append(f"allocated {done.traced >> 20} MiB")
    return done


def _timed(state: State, kind: str, made_by: str, data: bytes, index: int) -> Outcome:
    """Run one document under the guards."""
    done = Outcome(index=index, kind=kind, made_by=made_by, size=len(data))
    gc.collect()
    reset_peak()
    before = memory("VmRSS")
    signal.setitimer(signal.ITIMER_PROF, state.arguments.hang)
    start = time.process_time()
    try:
        _through(state, done, data, random.Random(f"use:{state.arguments.seed}:{index}"))
    except Overdue:
        done.outcome = "hung"
        done.violations.append(f"stopped after {state.arguments.hang:g} s, in {_last(done)}")
    except MemoryError:
        done.outcome = "out of memory"
        done.violations.append(f"out of memory under the guard, after {_last(done)}")
    except BrokenLawError as error:
        done.outcome = "broke a law"
        done.violations.append(str(error))
    except Exception as error:
        done.outcome = "traceback"
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if "capture_planner" in f.filename), frames[-1])
        done.violations.append(
            f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno} {place.name}: {str(error)[:200]}"
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        done.cpu = time.process_time() - start
    done.rss = max(memory("VmHWM") - before, 0)
    return done


def _last(done: Outcome) -> str:
    return next(reversed(done.stages), "the start")


@contextlib.contextmanager
def stage(done: Outcome, name: str) -> Iterator[None]:
    """Time one stage; what it raises passes through."""
    start = time.process_time()
    done.stages[name] = 0.0
    try:
        yield
    finally:
        done.stages[name] = time.process_time() - start


def _through(state: State, done: Outcome, data: bytes, rng: random.Random) -> None:
    """Read a document, and use it for all that it is good for."""
    try:
        with stage(done, "read"):
            value = _read(state, done.kind, data, rng)
    except CapturePlannerError as error:
        _refused(done, error, "read")
        return
    done.outcome = "loaded"
    with stage(done, "write"):
        text = codec.dumps(value)
    with stage(done, "read again"):
        _same(value, text, TYPES[done.kind])
    plan = value if isinstance(value, Plan) else None
    if plan is None:
        spec = value if isinstance(value, Spec) else rng.choice(state.specs)
        environment = value if isinstance(value, Environment) else rng.choice(state.environments)
        try:
            with stage(done, "plan"):
                plan = planner.plan(spec, environment, state.backends)
        except CapturePlannerError as error:
            _refused(done, error, "plan")
            return
        done.outcome = "planned"
        if rng.random() < 0.3:
            with stage(done, "write plan"):
                text = codec.dumps(plan)
            with stage(done, "read plan"):
                _same(plan, text, Plan)
    done.entries = plan.num_graphs
    with stage(done, "dispatch"):
        _dispatch(plan, rng)
    with stage(done, "lint"):
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
    return LOADERS[kind](path)


def _same(value: Spec | Environment | Plan, text: str, kind: type[Spec | Environment | Plan]) -> None:
    try:
        again = codec.loads(text, kind)
    except CapturePlannerError as error:
        raise BrokenLawError(f"what was written is refused: {str(error)[:200]}") from error
    if again != value:
        raise BrokenLawError("what was written is read as something else")


def _refused(done: Outcome, error: CapturePlannerError, by: str) -> None:
    """Classify a refusal, and check that it can be shown."""
    try:
        done.message = len(str(error).encode())
    except UnicodeEncodeError as wrong:
        raise BrokenLawError(f"the message cannot be shown: {wrong}") from error
    problems = error.problems if isinstance(error, InvalidValue) else ()
    if by == "read" and not problems:
        raise BrokenLawError(f"{type(error).__name__} without a problem")
    message = problems[0].message if problems else str(error)
    message = re.sub(r"'[^']*'|\"[^\"]*\"|got .*", "...", message, flags=re.DOTALL)
    done.outcome = f"{by} refused: " + re.sub(r"-?\d+", "N", message)[:70].replace("\n", " ").strip()


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
        asked = (role, reqs, tokens, query_len, rng.random() < 0.8, rng.choice((0, 0, 0, 1, rng.randint(-1, 40))))
        try:
            first, second = dispatcher.dispatch_counts(*asked), dispatcher.dispatch_counts(*asked)
        except CapturePlannerError:
            if plan.roles:
                raise BrokenLawError(f"dispatch is not total: {asked}") from None
            continue
        if first != second:
            raise BrokenLawError(f"dispatch changes its answer: {asked}")


def main() -> int:
    """Run the campaign."""
    options = parser(__doc__)
    options.add_argument("--documents", "-n", type=int, default=2000, help="how many (default 2,000)")
    options.add_argument("--start", type=int, default=0, help="index of the first document (default 0)")
    options.add_argument("--seed", type=int, default=None, help="default: chosen and printed")
    options.add_argument("--only", type=int, default=None, metavar="INDEX", help="run one document, and show it")
    options.add_argument("--only-kind", choices=KINDS, default=None, help="documents of one kind only")
    options.add_argument("--save", type=Path, default=None, help="with --only: write the document to this file")
    options.add_argument("--jobs", "-j", type=int, default=multiprocessing.cpu_count(), help="processes")
    options.add_argument("--seconds", type=float, default=1.0, help="processor time for one document (default 1)")
    options.add_argument("--megabytes", type=int, default=200, help="memory for one document (default 200)")
    options.add_argument(
        "--hang", type=float, default=5.0, help="processor seconds after which one is stopped (default 5)"
    )
    options.add_argument("--trace-every", type=int, default=25, help="trace one document in so many (default 25)")
    options.add_argument("--minutes", type=float, default=None, help="stop after so long, and report")
    arguments = options.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 32)
    CONSOLE.print(f"seed {arguments.seed}")
    registry.load_backends()  # a worker that cannot start would be started again for ever
    with tempfile.TemporaryDirectory(prefix="fuzz-") as arguments.folder:
        if arguments.only is not None:
            return _one(arguments)
        started = time.perf_counter()
        outcomes = _campaign(arguments)
    return _report(arguments, outcomes, time.perf_counter() - started)


def _one(arguments: argparse.Namespace) -> int:
    prepare(arguments)
    made = document(_STATE[0].corpus, arguments.seed, arguments.only, arguments.only_kind)
    if arguments.save is not None:
        arguments.save.write_bytes(made.data)
    done = check(arguments.only)
    CONSOLE.print(made.data[:4000].decode("utf-8", "replace"), markup=False, highlight=False)
    CONSOLE.print(attrs.asdict(done))
    return 1 if done.violations else 0


def _campaign(arguments: argparse.Namespace) -> list[Outcome]:
    outcomes: list[Outcome] = []
    indices = range(arguments.start, arguments.start + arguments.documents)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    deadline = time.perf_counter() + 60 * (math.inf if arguments.minutes is None else arguments.minutes)
    with (
        Progress(*columns, console=CONSOLE) as progress,
        context.Pool(arguments.jobs, prepare, (arguments,), maxtasksperchild=2000) as pool,
    ):
        task = progress.add_task("documents", total=len(indices))
        found = pool.imap_unordered(check, indices)
        for _ in indices:
            done = found.next(timeout=60 + 10 * arguments.hang)  # a worker that dies is not waited for
            outcomes.append(done)
            progress.advance(task)
            if time.perf_counter() > deadline:
                break
            if done.violations:
                progress.console.print(f"[red]{done.index}[/] {done.made_by}: ", end="")
                progress.console.print("; ".join(done.violations), markup=False, highlight=False)
    return sorted(outcomes, key=lambda outcome: outcome.index)


def _report(arguments: argparse.Namespace, outcomes: list[Outcome], wall: float) -> int:
    kinds: collections.Counter[str] = collections.Counter(f"{o.kind}: {o.outcome}" for o in outcomes)
    shown = table("documents by outcome", "outcome", "documents")
    for outcome, count in kinds.most_common(40):
        shown.add_row(outcome, str(count))
    CONSOLE.print(shown)
    stages: collections.Counter[str] = collections.Counter()
    for done in outcomes:
        stages.update(done.stages)
    time_in = table("processor time by stage", "stage", "seconds", "most for one document")
    for name, seconds in stages.most_common():
        time_in.add_row(name, f"{seconds:.1f}", f"{max(o.stages.get(name, 0.0) for o in outcomes):.3f}")
    CONSOLE.print(time_in)
    slow = table("slowest documents", "document", "seconds", "worst stage", "bytes", "entries", "MiB", "made by")
    for done in sorted(outcomes, key=lambda o: -o.cpu)[:10]:
        worst = max(done.stages.items(), key=lambda item: item[1], default=("none", 0.0))
        cells = f"{done.cpu:.2f}", f"{worst[0]} {worst[1]:.2f}", str(done.size), str(done.entries)
        slow.add_row(f"{done.kind} {done.index}", *cells, str(done.rss >> 20), done.made_by)
    CONSOLE.print(slow)
    most_rss, most_traced = max(o.rss for o in outcomes), max((o.traced or 0) for o in outcomes)
    CONSOLE.print(f"most memory: {most_rss >> 20} MiB resident, {most_traced >> 20} MiB traced")
    longest = max(outcomes, key=lambda o: o.message)
    CONSOLE.print(f"longest refusal: {longest.message} bytes (document {longest.index})")
    bad = [done for done in outcomes if done.violations]
    grouped: dict[str, list[Outcome]] = {}
    for done in bad:
        grouped.setdefault(re.sub(r"\d+(\.\d+)?|'.*|: .*", "", "; ".join(done.violations))[:100], []).append(done)
    for what, group in sorted(grouped.items(), key=lambda item: -len(item[1])):
        CONSOLE.print(f"{len(group)} x {what}", markup=False, highlight=False)
    for done in [group[at] for group in grouped.values() for at in range(min(len(group), 3))]:
        again = f"python benchmarks/fuzz_documents.py --seed {arguments.seed} --only {done.index}"
        again += f" --only-kind {arguments.only_kind}" if arguments.only_kind else ""
        CONSOLE.print(f"{'; '.join(done.violations)} ({done.made_by})\n    {again}", markup=False, highlight=False)
    rate = len(outcomes) / wall
    CONSOLE.print(f"{len(outcomes)} documents in {wall:.0f} s ({rate:.0f} a second), seed {arguments.seed}")
    CONSOLE.print(f"no violation (found {len(bad)}): {verdict(not bad)}")
    finish(
        arguments,
        {
            "seed": arguments.seed,
            "documents": len(outcomes),
            "wall_seconds": round(wall, 1),
            "jobs": arguments.jobs,
            "limits": {"seconds": arguments.seconds, "megabytes": arguments.megabytes},
            "slowest_seconds": round(max(o.cpu for o in outcomes), 3),
            "most_resident_mebibytes": most_rss >> 20,
            "most_traced_mebibytes": most_traced >> 20,
            "outcomes": dict(kinds.most_common()),
            "stage_seconds": {name: round(seconds, 1) for name, seconds in stages.most_common()},
            "violations": [{"index": o.index, "made_by": o.made_by, "what": o.violations} for o in bad],
        },
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
