"""Parts of a script, each in a process of its own: the same command, with ``--part`` and ``--part-output``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def in_process(name: str, seconds: float, triton: Path) -> dict[str, Any]:
    """Run a part in a process of its own; return its numbers, or its error.

    :param triton: folder of Triton's cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.json"
        command = [sys.executable, *sys.argv, "--part", name, "--part-output", str(file)]
        environment = os.environ | {"TRITON_CACHE_DIR": str(triton)}
        try:
            done = subprocess.run(command, env=environment, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {seconds:.0f} s"}
        if done.returncode:
            return {"error": f"exit code {done.returncode}"}
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return found
