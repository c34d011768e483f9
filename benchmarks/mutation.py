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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, finish, parser, table, verdict
from _mutation_tests import TESTS
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names

PACKAGE = "capture_planner"
TARGET = 0.88
"""The least share of noticed mutants, of all modules together; it is also said of each."""

IDENTITY = ("core/ReplaceComparisonOperator_Is_Eq", "core/ReplaceComparisonOperator_IsNot_NotEq")
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist")
MEMORY = 6 << 30
"""Address space of a test run, in bytes: a mutant may ask for any amount."""

Outcomes = dict[tuple[str, str, int], str]
"""By a mutant's module, operator and occurrence: killed, timeout or survived."""


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


def _tree(source: str) -> str | None:
    """Return the syntax tree without annotations, or None where the source has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    return ast.dump(_AnnotationRemover().visit(tree))


def mutants(module: str) -> Iterator[Mutant | str]:
    """Yield the mutants of a module, and for each that is not counted the reason."""
    code = source_of(module).read_text(encoding="utf-8")
    tree, lines = _tree(code), code.splitlines()
    nodes = list(ast_nodes(get_ast(code)))
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue
        places = sum(1 for node in nodes for _ in kind().mutation_positions(node))
        for occurrence in range(places):
            if name in IDENTITY:
                yield "equality for identity"
                continue
            changed = MutationVisitor.mutate_code(code, kind(), occurrence)
            if (other := _tree(changed)) in (None, tree):
                yield "no Python" if other is None else "annotation or marker of parameters"
                continue
            new = changed.splitlines()
            first = _alike(lines, new)
            last = min(_alike(lines[::-1], new[::-1]), min(len(lines), len(new)) - first)
            yield Mutant(
                module=module,
                operator=name.removeprefix("core/"),
                occurrence=occurrence,
                line=first + 1,
                before=" ".join(line.strip() for line in lines[first : len(lines) - last]),
                after=" ".join(line.strip() for line in new[first : len(new) - last] if line.strip()),
                source=changed,
            )


def _alike(one: list[str], other: list[str]) -> int:
    """Return how many lines are alike before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def source_of(module: str, root: Path = ROOT) -> Path:
    """Return the file of a module."""
    return root / PACKAGE / f"{module}.py"


def digest(module: str) -> str:
    """Return what a module reads as; an older result holds for the same text only."""
    return hashlib.sha256(source_of(module).read_bytes()).hexdigest()


class Copy:
    """A copy of the tree, compiled, with a server that runs its tests."""

    def __init__(self, folder: Path) -> None:
        """Copy the checkout, and compile it so that a change of the same size and second is still noticed."""
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        sources = [PACKAGE, *(str(path.relative_to(ROOT)) for path in ROOT.glob("*/*/src"))]
        compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *sources]
        subprocess.run(compiled, cwd=folder, check=True)
        path = os.pathsep.join(str(folder / source) for source in (".", *sources[1:]))
        environment = os.environ | {"HYPOTHESIS_PROFILE": "mutation", "PYTHONHASHSEED": "0", "PYTHONPATH": path}
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

    def limit(self, module: str) -> int:
        """Return the limit of a module's tests, in seconds of the processor; they must pass."""
        status, seconds = self.run(module, 600)
        if status:
            output = self.log.read_text(encoding="utf-8")
            raise SystemExit(f"the tests of {module} fail without any mutation:\n{output}")
        return round(3 + 2 * seconds)

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
        self._pending = {module: deque(group) for module, group in pending.items() if group}
        self._spent = dict.fromkeys(self._pending, 0.0)
        self._limits: dict[str, int] = {}
        self._written = written
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def run(self, jobs: int, end: float) -> None:
        """Test ``jobs`` mutants at a time until none is left, or until a time after which none is begun."""
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder, ThreadPoolExecutor(jobs) as pool:
            copies = [Copy(Path(folder) / str(index)) for index in range(jobs)]
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

        def one(module: str) -> int:
            copy = free.get()
            try:
                return copy.limit(module)
            finally:
                free.put(copy)

        limits = dict(zip(suites, pool.map(one, suites.values()), strict=True))
        self._limits = {module: limits[TESTS[module]] for module in self._pending}
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


def spread(group: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """Return one mutant of each of so many parts of a file, in an order in which the first ones are spread too."""
    if number >= len(group):
        number = len(group)
    choice = random.Random(f"{seed} {group[0].module if group else ''}")
    by_place = sorted(group, key=lambda mutant: (mutant.line, mutant.operator, mutant.occurrence))
    edges = [len(group) * part // number for part in range(number + 1)] if number else [0]
    chosen = [by_place[choice.randrange(*edge)] for edge in pairwise(edges)]
    choice.shuffle(chosen)
    return chosen


def interval(modules: Mapping[str, Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the share of all mutants that is noticed, estimated from samples, and its 95 % interval.

    Each module weighs by its mutants. The variance of a module has one noticed and one unnoticed mutant added
    (Laplace), so that a module of which all were noticed is not taken for certain.
    """
    sampled = [module for module in modules.values() if module["tested"]]
    every = sum(module["mutants"] for module in sampled)
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
        help="test only what survived, timed out or was not tested in this result, and modules that changed since; "
        "a sample must be the same",
    )
    return options.parse_args()


def results(
    options: argparse.Namespace,
    every: Mapping[str, Sequence[Mutant]],
    chosen: Mapping[str, Sequence[Mutant]],
    skipped: Mapping[str, Counter[str]],
    outcomes: Outcomes,
) -> dict[str, Any]:
    """Return what is written: per module, and of all."""
    modules: dict[str, Any] = {}
    for module, group in chosen.items():
        # The order is that of the sample: what a later run has to test again are the others.
        rows = [(outcome, mutant) for mutant in group if (outcome := outcomes.get(mutant.key)) is not None]
        by = Counter(outcome for outcome, _ in rows)
        noticed = by["killed"] + by["timeout"]
        modules[module] = {
            "tests": TESTS[module],
            "digest": digest(module),
            "mutants": len(every[module]),
            "tested": len(rows),
            "noticed": noticed,
            "killed": by["killed"],
            "timed_out": by["timeout"],
            "survived": by["survived"],
            "share": round(noticed / len(rows), 4) if rows else None,
            "not_counted": dict(skipped[module]),
            "not_killed": [{"outcome": outcome, **mutant.row} for outcome, mutant in rows if outcome != "killed"],
            "not_tested": [list(mutant.key[1:]) for mutant in group if mutant.key not in outcomes],
        }
    share, low, high = interval(modules) if outcomes else (0.0, 0.0, 0.0)
    target = f"at least {TARGET:.0%} of all mutants are noticed"
    return {
        "tool": f"cosmic-ray {metadata.version('cosmic-ray')}",
        "sample": None if options.sample is None else {"per_module": options.sample, "seed": options.seed},
        "share": round(share, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "targets": {target: share >= TARGET},
        "modules": modules,
    }


def main() -> int:
    """Mutate, test, print and write; exit code 1 where fewer are noticed than the target."""
    options = arguments()
    end = time.monotonic() + options.seconds
    older = json.loads(options.again.read_text(encoding="utf-8")) if options.again else {"modules": {}}
    sample = None if options.sample is None else {"per_module": options.sample, "seed": options.seed}
    if options.again and older.get("sample") != sample:
        raise SystemExit(f"{options.again} has the sample {older.get('sample')}, not {sample}")
    every: dict[str, list[Mutant]] = {}
    chosen: dict[str, list[Mutant]] = {}
    pending: dict[str, list[Mutant]] = {}
    skipped: dict[str, Counter[str]] = {}
    known: Outcomes = {}
    for module in options.modules:
        made = list(mutants(module))
        every[module] = [mutant for mutant in made if isinstance(mutant, Mutant)]
        skipped[module] = Counter(mutant for mutant in made if isinstance(mutant, str))
        chosen[module] = spread(every[module], options.sample or len(every[module]), options.seed)
        before = older["modules"].get(module, {})
        if before.get("digest") == digest(module):
            again = {(m["operator"], m["occurrence"]) for m in before["not_killed"]} | set(
                map(tuple, before.get("not_tested", []))
            )
            known |= {mutant.key: "killed" for mutant in chosen[module] if mutant.key[1:] not in again}
        pending[module] = [mutant for mutant in chosen[module] if mutant.key not in known]
        CONSOLE.print(f"{module}: {len(every[module])} mutants; not counted: {dict(skipped[module])}")
    CONSOLE.print(f"{sum(map(len, pending.values()))} mutants to test")

    def written(outcomes: Outcomes) -> None:
        finish(options, results(options, every, chosen, skipped, known | outcomes))

    campaign = Campaign(pending, written)
    if any(pending.values()):
        campaign.run(options.jobs, end)
    result = results(options, every, chosen, skipped, known | campaign.outcomes)
    summary = table("mutants", "module", "mutants", "tested", "killed", "timed out", "survived", "noticed", "target")
    for module, row in result["modules"].items():
        counts = [str(row[name]) for name in ("mutants", "tested", "killed", "timed_out", "survived")]
        share = row["share"]
        summary.add_row(module, *counts, *(("", "") if share is None else (f"{share:.1%}", verdict(share >= TARGET))))
    CONSOLE.print(summary)
    low, high = result["interval_95"]
    CONSOLE.print(f"{result['share']:.1%} are noticed" + (f" ({low:.1%} to {high:.1%})" if options.sample else ""))
    for target, holds in result["targets"].items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(options, result)
    return 0 if all(result["targets"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
