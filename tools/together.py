"""Run the last of several commands, and the others beside it; what those say is printed when all have ended.

    python tools/together.py "mypy capture_planner" "sphinx-build docs site" "pytest -n auto"

The exit code is 0 if that of every command is.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack


def main(commands: Sequence[str]) -> int:
    """Run the command lines, without a shell, and return the exit code."""
    *others, last = map(shlex.split, commands)
    with ExitStack() as stack:
        # Files, not pipes: nobody reads while the last one runs, and a full pipe would stop its writer.
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
        beside = [
            subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
            for words, file in zip(others, files, strict=True)
        ]
        codes = [subprocess.run(last, check=False).returncode]
        for words, process, file in zip(others, beside, files, strict=True):
            codes.append(process.wait())
            file.seek(0)
            said = file.read().decode(errors="replace")
            sys.stdout.write(f"$ {shlex.join(words)}\n{said}exit code {codes[-1]}\n")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
