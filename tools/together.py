"""Run commands at the same time, and print what each says when it has ended.

    python tools/together.py "mypy capture_planner" "sphinx-build docs site"

The exit code is 0 if that of every command is.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line, without a shell; its two streams come as one."""
    words = shlex.split(command)
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def main(commands: Sequence[str]) -> int:
    """Run the command lines, and return the exit code."""
    codes = []
    # Threads are enough: each waits for a process.
    with ThreadPoolExecutor(len(commands)) as pool:
        # In the order of the commands: a later one that has ended waits, so that outputs never mix.
        for command, done in zip(commands, pool.map(run, commands), strict=True):
            sys.stdout.write(f"$ {command}\n{done.stdout}exit code {done.returncode}\n")
            codes.append(done.returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
