"""Run commands at the same time, and print what each says when it has ended.

    python tools/together.py "mypy capture_planner" "sphinx-build docs site"

The exit code is 0 if that of every command is.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line, without a shell; its two streams come as one."""
    return subprocess.run(
        shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def main(commands: Sequence[str]) -> int:
    """Run the commands, and return the exit code."""
    failed = False
    with ThreadPoolExecutor(len(commands)) as pool:
        for each in as_completed([pool.submit(run, command) for command in commands]):
            ended = each.result()
            sys.stdout.write(f"$ {shlex.join(ended.args)}\n{ended.stdout}exit code {ended.returncode}\n")
            sys.stdout.flush()
            failed |= ended.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
