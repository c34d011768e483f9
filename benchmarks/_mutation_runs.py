"""Run the tests of mutants: copies of the tree, each with a server, and which mutant is next."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _bench import CONSOLE, ROOT
from _mutants import PACKAGE, Mutant, source_of
from _mutation_tests import TESTS

LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist")
MEMORY = 6 << 30
"""Memory that a test run may take, in bytes: a mutant may ask for any amount."""

Outcomes = dict[tuple[str, str, int], str]
"""By a mutant's module, operator and occurrence: killed, timeout or survived."""


def _sources() -> list[str]:
    """Return the folders of the core and of the plugins."""
    return [PACKAGE, *(str(path.relative_to(ROOT)) for path in ROOT.glob("*/*/src"))]


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
