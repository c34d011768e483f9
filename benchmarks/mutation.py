"""Mutation testing: whether the tests notice when one operator, number or word of the code changes.

The mutants are cosmic-ray's: each of its operators at each place of each module. Not counted are
those that are no Python, which any test would notice, and those that no test could: where only
annotations, which are never evaluated, or a ``*`` between parameters changed; and ``==`` for ``is``,
which these modules use with None, enum members and records that are never equal without being one.
cosmic-ray itself runs one test command for all modules, one mutant after the other; here each module
has its own tests, the most lethal first, and several mutants run at a time, each in its own copy of
the tree.

A mutant is killed where a test fails, and timed out where the tests take much more of the processor
than the code as it is takes time. docs/lab/mutation.md has the survivors, each with a reason.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, conclude, finish, parser, print_table, verdict
from _equivalent import equivalent
from _mutation_tests import TESTS, source_of
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names

PACKAGE = "capture_planner"
NO_GAP = "no gap: "
"""Before the reason in the result."""

IDENTITY = ("ReplaceComparisonOperator_Is_Eq", "ReplaceComparisonOperator_IsNot_NotEq")


@attrs.frozen(kw_only=True)
class Mutant:
    """One change of one module."""

    module: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str
    source: str = attrs.field(repr=False)
    """The whole module, changed."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.module, self.operator, self.occurrence

    @property
    def row(self) -> dict[str, Any]:
        """The mutant as a result lists it."""
        return attrs.asdict(self, filter=attrs.filters.exclude("module", "source"))


class _AnnotationRemover(ast.NodeTransformer):
    """Takes annotations away, and whether parameters are given by name."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.arguments):
            named = [default for default in node.kw_defaults if default is not None]
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults = [*node.defaults, *named]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, None)
        return node


@lru_cache(2)
def _tree(source: str) -> str | None:
    """Return the syntax tree without annotations, or None where the source has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    return ast.dump(_AnnotationRemover().visit(tree))


def places(module: str) -> list[tuple[int, str, int]]:
    """Return the line, the operator and the occurrence of each change, in the order of the file."""
    nodes = list(ast_nodes(get_ast(source_of(module).read_text(encoding="utf-8"))))
    return sorted(
        (position[0][0], name.removeprefix("core/"), occurrence)
        for name in operator_names()
        if not (kind := get_operator(name)).arguments()
        for occurrence, position in enumerate(each for node in nodes for each in kind().mutation_positions(node))
    )


def mutant(module: str, operator: str, occurrence: int) -> Mutant | str:
    """Return a mutant of a module, or the reason why it is not counted."""
    if operator in IDENTITY:
        return "equality for identity"
    code = source_of(module).read_text(encoding="utf-8")
    changed = MutationVisitor.mutate_code(code, get_operator(f"core/{operator}")(), occurrence)
    if (other := _tree(changed)) in (None, _tree(code)):
        return "no Python" if other is None else "annotation or marker of parameters"
    lines, new = code.splitlines(), changed.splitlines()
    first = _alike(lines, new)
    last = min(_alike(lines[::-1], new[::-1]), min(len(lines), len(new)) - first)
    before = " ".join(line.strip() for line in lines[first : len(lines) - last])
    after = " ".join(line.strip() for line in new[first : len(new) - last] if line.strip())
    if reason := equivalent(module, before, after):
        return f"{NO_GAP}{reason}"
    return Mutant(
        module=module,
        operator=operator,
        occurrence=occurrence,
        line=first + 1,
        before=before,
        after=after,
        source=changed,
    )


def _alike(one: list[str], other: list[str]) -> int:
    """Return how many lines are alike before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def digest(module: str) -> str:
    """Return what a module reads as; an older result holds for the same text only."""
    return hashlib.sha256(source_of(module).read_bytes()).hexdigest()


LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist")
MEMORY = 6 << 30
"""Memory that a test run may take, in bytes: a mutant may ask for any amount."""

Outcomes = dict[tuple[str, str, int], str]
"""By a mutant's module, operator and occurrence: killed, timeout or survived."""


def _sources() -> list[str]:
    """Return the folders of the core and of all other distributions."""
    plugins = (path for pattern in ("*/src", "*/*/src") for path in ROOT.glob(pattern))
    return [PACKAGE, *(str(path.relative_to(ROOT)) for path in plugins)]


def compiled(folder: Path) -> Path:
    """Copy the tree, and compile it so that a change of the same size and second is still noticed."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *_sources()]
    subprocess.run(command, cwd=folder, check=True)
    return folder


class Copy:
    """A copy of the tree, with a server that runs its tests."""

    def __init__(self, tree: Path, folder: Path) -> None:
        """Copy a compiled tree. Its modules come before installed ones, and no GPU is used."""
        shutil.copytree(tree, folder)
        before = filter(None, [os.environ.get("PYTHONPATH")])
        path = os.pathsep.join([*(str(folder / source) for source in (".", *_sources()[1:])), *before])
        changes = {"CUDA_VISIBLE_DEVICES": "", "HYPOTHESIS_PROFILE": "mutation", "PYTHONHASHSEED": "0"}
        environment = os.environ | changes | {"PYTHONPATH": path}
        environment = {name: text for name, text in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
        where = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
        location = subprocess.check_output(where, cwd=folder.parent, env=environment, text=True).strip()
        if not Path(location).is_relative_to(folder):
            raise SystemExit(f"the tests would import {location}, not the copy")
        self.folder, self.log = folder, folder.with_suffix(".log")
        self._server = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "_mutation_server.py")],
            cwd=folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, module: str, seconds: int) -> tuple[int, float]:
        """Run a module's tests; return the status of pytest, or minus a signal, and the seconds of the processor."""
        job = {
            "tests": [f"tests/{name}" for name in TESTS[module]],
            "limits": {"memory": MEMORY, "seconds": seconds},
            "log": str(self.log),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        end = json.loads(self._server.stdout.readline())
        return end["status"], end["seconds"]

    def limit(self, module: str) -> int | None:
        """Return the limit of a module's tests, in seconds of the processor; None: they fail without any mutation."""
        status, seconds = self.run(module, 600)
        if not status:
            return round(3 + 2 * seconds)
        CONSOLE.print(f"the tests of {module} fail without any mutation:", markup=False)
        CONSOLE.print(self.log.read_text(encoding="utf-8")[-3000:], markup=False)
        return None

    def tried(self, mutant: Mutant, limit: int) -> tuple[str, float]:
        """Return what became of a mutant: survived, killed or timeout; and the seconds of the processor."""
        target = source_of(mutant.module, self.folder)
        try:
            target.write_text(mutant.source, encoding="utf-8")
            status, seconds = self.run(mutant.module, limit)
        finally:
            shutil.copyfile(source_of(mutant.module), target)
        outcome = "timeout" if status in (-signal.SIGXCPU, -signal.SIGKILL) else "killed" if status else "survived"
        return outcome, seconds

    def close(self) -> None:
        """End the server, once its last run has ended."""
        self._server.communicate()


class Campaign:
    """The mutants that are to be tested, and the outcomes so far."""

    def __init__(self, pending: Mapping[str, Sequence[Mutant]], written: Callable[[Outcomes], None]) -> None:
        """``written`` is called with all outcomes after each minute."""
        self.outcomes: Outcomes = {}
        self.failing: tuple[str, ...] = ()
        """The modules of which nothing is tested, since their tests fail without any mutation."""
        self._pending = {module: deque(group) for module, group in pending.items() if group}
        self._spent = dict.fromkeys(self._pending, 0.0)
        self._limits: dict[str, int] = {}
        self._written = written
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def run(self, jobs: int, end: float) -> None:
        """Test ``jobs`` mutants at a time until none is left, or until a time after which none is begun."""
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder, ThreadPoolExecutor(jobs) as pool:
            tree = compiled(Path(folder) / "tree")
            copies = list(pool.map(lambda index: Copy(tree, Path(folder) / str(index)), range(jobs)))
            try:
                self._limit(copies, pool)
                for worker in [pool.submit(self._work, copy, end) for copy in copies]:
                    worker.result()
            finally:
                for copy in copies:
                    copy.close()

    def _limit(self, copies: Sequence[Copy], pool: ThreadPoolExecutor) -> None:
        """Run the tests of each module without a mutation; modules with the same tests share a limit."""
        suites = {TESTS[module]: module for module in self._pending}
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)

        def one(module: str) -> int | None:
            copy = free.get()
            try:
                return copy.limit(module)
            finally:
                free.put(copy)

        limits = dict(zip(suites, pool.map(one, suites.values()), strict=True))
        of = {module: limits[TESTS[module]] for module in self._pending}
        self._limits = {module: limit for module, limit in of.items() if limit is not None}
        self.failing = tuple(module for module in of if module not in self._limits)
        self._pending = {module: self._pending[module] for module in self._limits}
        for module, limit in self._limits.items():
            CONSOLE.print(f"{module}: at most {limit} s of the processor per mutant")

    def _work(self, copy: Copy, end: float) -> None:
        while (mutant := self._next(end)) is not None:
            outcome, seconds = copy.tried(mutant, self._limits[mutant.module])
            with self._lock:
                self.outcomes[mutant.key] = outcome
                # What the choice of the next module had assumed is put right.
                self._spent[mutant.module] += seconds - self._limits[mutant.module] / 2
                if outcome != "killed":
                    where = f"{mutant.module}:{mutant.line}"
                    CONSOLE.print(f"{outcome} {where} {mutant.operator}: {mutant.after}", markup=False)
                if time.monotonic() > self._last + 60:
                    self._last = time.monotonic()
                    CONSOLE.print(f"{len(self.outcomes)} tested")
                    self._written(self.outcomes)

    def _next(self, end: float) -> Mutant | None:
        """Return a mutant of the module on which least time was spent."""
        with self._lock:
            left = [module for module, group in self._pending.items() if group]
            if not left or time.monotonic() > end:
                return None
            module = min(left, key=self._spent.__getitem__)
            self._spent[module] += self._limits[module] / 2
            return self._pending[module].popleft()


TARGET = 0.88
"""The least share of noticed mutants, of all modules together; it is also said of each."""


def interval(modules: Mapping[str, Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the share of all mutants that is noticed, estimated from samples, and its 95 % interval.

    Each module weighs by its mutants. The variance of a module has one noticed and one unnoticed mutant added
    (Laplace), so that a module of which all were noticed is not taken for certain.
    """
    sampled = [module for module in modules.values() if module["tested"]]
    every = sum(module["mutants"] for module in sampled)
    if not every:
        return 0.0, 0.0, 1.0
    share = variance = 0.0
    for module in sampled:
        weight, tested = module["mutants"] / every, module["tested"]
        likely = (module["noticed"] + 1) / (tested + 2)
        share += weight * module["noticed"] / tested
        unseen = 1 - tested / module["mutants"]
        variance += weight**2 * likely * (1 - likely) / tested * unseen
    margin = 1.96 * math.sqrt(variance)
    return share, max(0.0, share - margin), min(1.0, share + margin)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options.add_argument("--modules", nargs="+", choices=TESTS, default=list(TESTS), metavar="MODULE")
    options.add_argument("--sample", type=int, metavar="N", help="test N mutants of each module; default: all")
    options.add_argument("--seed", type=int, default=0, help="of the sample")
    options.add_argument("--seconds", type=float, default=math.inf, help="begin no mutant after so long")
    options.add_argument(
        "--again",
        type=Path,
        metavar="RESULT",
        help="test only what survived or was not tested in this result, and modules that changed since; "
        "a sample must be the same, and modules that are not named stay as they are",
    )
    return options.parse_args()


@attrs.frozen(kw_only=True)
class Sample:
    """The mutants of a module that are tested, and what an older result says of them."""

    mutants: int
    """All mutants of the module."""
    skipped: Mapping[str, int]
    """Mutants that are not counted, by the reason."""
    killed: int = 0
    """Mutants that an older result has as killed; they are not made again."""
    chosen: tuple[Mutant, ...]
    """The others, in the order in which they are tested."""
    outcomes: Outcomes = attrs.field(factory=dict)
    """What the older result says of those."""

    @classmethod
    def drawn(cls, module: str, number: int | None, seed: int) -> Sample:
        """Draw one mutant of each of ``number`` parts of a file, in any order; None: all mutants.

        Of a sample, the number of all mutants is estimated: that of the places, less the share of those drawn that
        are not counted.
        """
        choice = random.Random(f"{seed} {module}")
        every = places(module)
        number = len(every) if number is None else min(number, len(every))
        chosen: list[Mutant] = []
        skipped: Counter[str] = Counter()
        for first, last in pairwise(len(every) * part // number for part in range(number + 1)):
            for _, operator, occurrence in choice.sample(every[first:last], last - first):
                made = mutant(module, operator, occurrence)
                if isinstance(made, Mutant):
                    chosen.append(made)
                    break
                skipped[made] += 1
        choice.shuffle(chosen)
        counted = len(chosen) / max(len(chosen) + skipped.total(), 1)
        return cls(mutants=round(len(every) * counted), skipped=skipped, chosen=tuple(chosen))

    @classmethod
    def again(cls, module: str, older: Mapping[str, Any]) -> Sample:
        """Return what an older result of the same text has not as killed: first what survived."""
        outcomes = {(module, row["operator"], row["occurrence"]): row["outcome"] for row in older["not_killed"]}
        keys = [*outcomes, *((module, *key) for key in older["not_tested"])]
        chosen = [made for key in keys if isinstance(made := mutant(*key), Mutant)]
        return cls(
            mutants=older["mutants"],
            skipped=older["not_counted"],
            killed=older["killed"],
            chosen=tuple(chosen),
            outcomes=outcomes,
        )

    @property
    def pending(self) -> list[Mutant]:
        """The mutants to test."""
        return [each for each in self.chosen if self.outcomes.get(each.key, "survived") == "survived"]

    def result(self, module: str, outcomes: Outcomes) -> dict[str, Any]:
        """Return what is written of a module."""
        known = self.outcomes | outcomes
        rows = [(known[each.key], each) for each in self.chosen if each.key in known]
        by = Counter(outcome for outcome, _ in rows) + Counter(killed=self.killed)
        noticed, tested = by["killed"] + by["timeout"], by.total()
        return {
            "tests": TESTS[module],
            "digest": digest(module),
            "mutants": self.mutants,
            "tested": tested,
            "noticed": noticed,
            "killed": by["killed"],
            "timed_out": by["timeout"],
            "survived": by["survived"],
            "share": round(noticed / tested, 4) if tested else None,
            "not_counted": dict(self.skipped),
            "not_killed": [{"outcome": outcome, **each.row} for outcome, each in rows if outcome != "killed"],
            "not_tested": [list(each.key[1:]) for each in self.chosen if each.key not in known],
        }


def results(options: argparse.Namespace, samples: Mapping[str, Sample], outcomes: Outcomes) -> dict[str, Any]:
    """Return what is written: per module, and of all."""
    modules = {module: sample.result(module, outcomes) for module, sample in samples.items()}
    share, low, high = interval(modules)
    return {
        "tool": f"cosmic-ray {metadata.version('cosmic-ray')}",
        "sample": _drawing(options),
        "share": round(share, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "targets": {f"at least {TARGET:.0%} of all mutants are noticed": share >= TARGET},
        "modules": modules,
    }


def _drawing(options: argparse.Namespace) -> dict[str, int] | None:
    """Return how a sample is drawn; None: all mutants are tested."""
    return None if options.sample is None else {"per_module": options.sample, "seed": options.seed}


def main() -> int:
    """Mutate, test, print and write; exit code 1 where fewer are noticed than the target."""
    options = arguments()
    end = time.monotonic() + options.seconds
    older = json.loads(options.again.read_text(encoding="utf-8")) if options.again else {"modules": {}}
    if options.again and older["sample"] != _drawing(options):
        raise SystemExit(f"{options.again} has the sample {older['sample']}, not {_drawing(options)}")
    same = {module for module in TESTS if older["modules"].get(module, {}).get("digest") == digest(module)}
    other = [module for module in options.modules if module not in same]
    with ProcessPoolExecutor(options.jobs) as pool:
        drawn = dict(
            zip(other, pool.map(partial(Sample.drawn, number=options.sample, seed=options.seed), other), strict=True)
        )
    samples = {
        module: Sample.again(module, older["modules"][module]) if module in same else drawn[module]
        for module in TESTS
        if module in same or module in options.modules
    }
    for module, sample in samples.items():
        CONSOLE.print(f"{module}: {sample.mutants} mutants; not counted: {dict(sample.skipped)}")
    pending = {module: samples[module].pending for module in options.modules}
    CONSOLE.print(f"{sum(map(len, pending.values()))} mutants to test")

    def written(outcomes: Outcomes) -> None:
        finish(options, results(options, samples, outcomes))

    campaign = Campaign(pending, written)
    if any(pending.values()):
        campaign.run(options.jobs, end)
    for module in campaign.failing:
        CONSOLE.print(f"{module}: not tested, since its tests fail without any mutation")
    result = results(options, samples, campaign.outcomes)
    counted = ("mutants", "tested", "killed", "timed_out", "survived")
    rows = []
    for module, row in result["modules"].items():
        share = row["share"]
        noticed = () if share is None else (f"{share:.1%}", verdict(share >= TARGET))
        rows.append((module, *(row[name] for name in counted), *noticed))
    print_table("mutants", ("module", *counted, "noticed", "target"), rows)
    low, high = result["interval_95"]
    CONSOLE.print(f"{result['share']:.1%} are noticed" + (f" ({low:.1%} to {high:.1%})" if options.sample else ""))
    return conclude(options, result, result["targets"] | {"all tests pass without a mutation": not campaign.failing})


if __name__ == "__main__":
    sys.exit(main())
