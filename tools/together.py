"""Run commands at the same time, and print what each says when it has ended.

    python tools/together.py "mypy capture_planner" "sphinx-build docs site"

The exit code is 0 if that of every command is. Where ``TESTS_UNTIL`` is set, as by ``.ci/run``, what has not ended
``GRACE`` seconds after it is stopped, and printed as not finished.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack

GRACE = 1200


def main(commands: Sequence[str]) -> int:
    """Run the command lines, without a shell, and return the exit code."""
    until = float(os.environ.get("TESTS_UNTIL", "inf")) + GRACE
    codes = []
    with ExitStack() as stack:
        # Files, not pipes: only one is read at a time, and a full pipe would stop the writers of the others.
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        running = [
            subprocess.Popen(shlex.split(command), stdout=file, stderr=subprocess.STDOUT)
            for command, file in zip(commands, files, strict=True)
        ]
        for command, process, file in zip(commands, running, files, strict=True):
            try:
                codes.append(process.wait(None if until == float("inf") else max(until - time.time(), 0)))
                end = f"exit code {codes[-1]}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                end = f"not finished {GRACE} s after TESTS_UNTIL: this machine needs more time for it"
            file.seek(0)
            sys.stdout.write(f"$ {command}\n{file.read().decode(errors='replace')}{end}\n")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
