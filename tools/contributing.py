"""Run the commands of CONTRIBUTING.md in a clean clone of this checkout, so that they stay true.

Executes the shell blocks of the section "Set up", line for line, in a fresh virtual environment that they make
themselves. To bound the time, a bare ``pytest`` only collects: its arguments are given by ``PYTEST_ADDOPTS``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def script() -> str:
    """Return the commands of the section, as one script for bash."""
    section = re.search(r"^## Set up\n(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S)
    assert section is not None, "CONTRIBUTING.md has no section 'Set up'"
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", section[1], re.M | re.S))
    # The result of the pipe is that of pytest: ``pipefail`` is set below.
    bounded, count = re.subn(r"^pytest$", "PYTEST_ADDOPTS='--collect-only -q' pytest | tail -3", commands, flags=re.M)
    assert count == 1, "the section runs pytest other than once"
    return f"set -exo pipefail\n{bounded}"


def main() -> None:
    """Clone, and run the commands."""
    # These would bring packages and options of the caller into the clone's environment.
    unset = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        # A clone has what is committed alone, so that a forgotten file shows.
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        sys.exit(subprocess.run(["bash", "-c", script()], cwd=clone, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
