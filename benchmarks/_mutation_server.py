"""Run tests in forks of one process that has imported the libraries, but nothing of the tree.

A line on stdin is a run: its tests, what to set, and its limits. A line on stdout is its end: the exit status of
pytest, or minus the signal that ended it, and the seconds of the processor. benchmarks/mutation.py starts one server
in each copy of the tree; importing torch and Hypothesis takes longer than most tests of a module.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

LIBRARIES = ("attrs", "cattrs", "hypothesis.strategies", "pluggy", "pytest", "rich.console", "ruamel.yaml", "torch")


def tests(names: list[str], limits: dict[str, int], log: str) -> int:
    """Run tests in this process, which is a fork, within its limits: memory in addition to what it has."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    # Of data, not of the address space: CUDA's driver reserves more of that than any machine has memory.
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + limits["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"], limits["seconds"] + 1))
    pytest = importlib.import_module("pytest")
    return int(
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *names])
    )


def ended(process: int, deadline: float) -> tuple[int, float]:
    """Wait for a fork, and end it at its deadline; return its status and the seconds of the processor."""
    while True:
        done, status, usage = os.wait4(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    """Import what is the same for all runs, and run what is sent."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert "capture_planner" not in sys.modules, "a library imports the tree, whose modules change"
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if not process:
            code = 70
            try:
                code = tests(job["tests"], job["limits"], job["log"])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status, seconds = ended(process, time.monotonic() + 10 * job["limits"]["seconds"])
        sys.stdout.write(json.dumps({"status": status, "seconds": seconds}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
