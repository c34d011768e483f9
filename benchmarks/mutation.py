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
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, finish, parser, table, verdict
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names

PACKAGE = "capture_planner"
TARGET = 0.85
"""The least share of killed mutants in each module."""

_PLANNED = ("planning/test_planner.py", "test_locked_plans.py")
_POLICIES = ("planning/sizing/test_policies.py", "property/test_regressions.py", "planning/test_planner.py")
_BUDGET = ("planning/sizing/test_budget.py", *_PLANNED)
_MODES = ("planning/test_resolve.py", "property/test_law6_resolution.py", "planning/test_planner.py")
TESTS: dict[str, tuple[str, ...]] = {
    "planning/sizing/minimax": ("planning/sizing/test_minimax.py", "planning/sizing/test_budget.py", *_POLICIES),
    "planning/sizing/policies": (*_POLICIES, "test_locked_plans.py"),
    "planning/sizing/budget": _BUDGET,
    "planning/sizing/engine_lists": ("planning/sizing/test_engine_lists.py", "planning/sizing/test_policies.py"),
    "planning/sizing/ladder": _BUDGET,
    "modes": ("test_modes.py", *_MODES),
    "planning/resolve": _MODES,
    "dispatch/dispatcher": (
        "dispatch/test_dispatcher.py",
        "property/test_regressions.py",
        "property/test_law3_next_fit.py",
        "property/test_law1_coverage.py",
    ),
}
"""The tests of each module, in the order in which they run: quick and lethal first."""

IDENTITY = ("core/ReplaceComparisonOperator_Is_Eq", "core/ReplaceComparisonOperator_IsNot_NotEq")
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist")
_MEMORY = 6 << 30
"""Address space of a test run, in bytes: a mutant may ask for any amount."""


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


def run_tests(module: str, copy: Path, limit: int | None, *, cached: bool = False) -> tuple[str, float]:
    """Run a module's tests in a copy of the tree: survived, killed or timeout, and the seconds."""
    environment = os.environ | {"HYPOTHESIS_PROFILE": "mutation", "PYTHONHASHSEED": "0", "PYTHONPATH": str(copy)}
    if not cached:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        + [f"tests/{name}" for name in TESTS[module]],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if limit is not None:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit + 1))
    try:
        output, _ = process.communicate(timeout=None if limit is None else 10 * limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "timeout", time.monotonic() - started
    if cached and process.returncode:
        raise SystemExit(f"the tests of {module} fail without any mutation:\n{output.decode()}")
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout", time.monotonic() - started
    return "killed" if process.returncode else "survived", time.monotonic() - started


def copies_of_the_tree(folder: Path, number: int) -> list[Path]:
    """Copy the checkout, and compile it so that a change of the same size and second is still noticed."""
    copies = []
    for index in range(number):
        copy = folder / str(index)
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", PACKAGE]
        subprocess.run(compiled, cwd=copy, check=True)
        where = "import capture_planner; print(capture_planner.__file__)"
        environment = os.environ | {"PYTHONPATH": str(copy)}
        location = subprocess.check_output([sys.executable, "-c", where], cwd=folder, env=environment, text=True)
        if not Path(location.strip()).is_relative_to(copy):
            raise SystemExit(f"the tests would import {location.strip()}, not the copy")
        copies.append(copy)
    return copies


def kill(pending: list[Mutant], jobs: int) -> dict[tuple[str, str, int], str]:
    """Test each mutant, ``jobs`` at a time; return what became of each."""
    outcomes: dict[tuple[str, str, int], str] = {}
    limits: dict[str, int] = {}
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(mutant: Mutant) -> tuple[Mutant, str]:
        copy = free.get()
        target = source_of(mutant.module, copy)
        try:
            target.write_text(mutant.source, encoding="utf-8")
            return mutant, run_tests(mutant.module, copy, limits[mutant.module])[0]
        finally:
            shutil.copyfile(source_of(mutant.module, pristine), target)
            free.put(copy)

    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, ThreadPoolExecutor(jobs) as pool:
        pristine, *copies = copies_of_the_tree(Path(folder), jobs + 1)
        for module in dict.fromkeys(mutant.module for mutant in pending):
            # In every copy at once: as loaded as it will be, and the tests are compiled in each.
            runs = [pool.submit(run_tests, module, copy, None, cached=True) for copy in copies]
            limits[module] = round(2 + 1.5 * max(run.result()[1] for run in runs))
            CONSOLE.print(f"{module}: at most {limits[module]} s of the processor per mutant")
        for copy in copies:
            free.put(copy)
        for future in as_completed([pool.submit(one, mutant) for mutant in pending]):
            mutant, outcome = future.result()
            outcomes[mutant.key] = outcome
            if outcome != "killed":
                where = f"{mutant.module}:{mutant.line}"
                CONSOLE.print(f"{outcome} {where} {mutant.operator}: {mutant.after}", markup=False)
            if len(outcomes) % 100 == 0:
                CONSOLE.print(f"{len(outcomes)} of {len(pending)}")
    return outcomes


def arguments() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options.add_argument("--modules", nargs="+", choices=TESTS, default=list(TESTS), metavar="MODULE")
    options.add_argument(
        "--again",
        type=Path,
        metavar="RESULT",
        help="test only what survived or timed out in this result, and modules that changed since",
    )
    return options.parse_args()


def main() -> int:
    """Mutate, test, print and write; exit code 1 where a module is below the target."""
    options = arguments()
    older = json.loads(options.again.read_text(encoding="utf-8"))["modules"] if options.again else {}
    pending: list[Mutant] = []
    every: dict[str, list[Mutant]] = {}
    skipped: dict[str, Counter[str]] = {}
    for module in options.modules:
        every[module] = []
        skipped[module] = Counter()
        same = older.get(module, {}).get("digest") == digest(module)
        alive = {(m["operator"], m["occurrence"]) for m in older[module]["not_killed"]} if same else set()
        for mutant in mutants(module):
            if isinstance(mutant, str):
                skipped[module][mutant] += 1
                continue
            every[module].append(mutant)
            if not same or mutant.key[1:] in alive:
                pending.append(mutant)
        CONSOLE.print(f"{module}: {len(every[module])} mutants; not counted: {dict(skipped[module])}")
    CONSOLE.print(f"{len(pending)} mutants to test")
    outcomes = kill(pending, options.jobs) if pending else {}

    modules: dict[str, Any] = {}
    summary = table("mutants", "module", "mutants", "killed", "timed out", "survived", "killed or timed out")
    targets: dict[str, bool] = {}
    for module, group in every.items():
        by = Counter(outcomes.get(mutant.key, "killed") for mutant in group)
        share = (by["killed"] + by["timeout"]) / len(group)
        modules[module] = {
            "tests": TESTS[module],
            "digest": digest(module),
            "mutants": len(group),
            "killed": by["killed"],
            "timed_out": by["timeout"],
            "survived": by["survived"],
            "share": round(share, 4),
            "not_counted": dict(skipped[module]),
            "not_killed": [
                {"outcome": outcome, **mutant.row}
                for mutant in group
                if (outcome := outcomes.get(mutant.key, "killed")) != "killed"
            ],
        }
        targets[f"{module}: at least {TARGET:.0%} are noticed"] = share >= TARGET
        counts = (len(group), by["killed"], by["timeout"], by["survived"])
        summary.add_row(module, *map(str, counts), f"{share:.1%}")
    CONSOLE.print(summary)
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    tool = f"cosmic-ray {metadata.version('cosmic-ray')}"
    finish(options, {"tool": tool, "modules": modules, "targets": targets})
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
