"""The program ``capture-planner``: an interruption ends in one line even while its modules are imported."""

import gc
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    try:
        # Modules stay: looking through them again and again is a sixth of the start.
        gc.disable()
        from capture_planner.cli import main as run

        gc.freeze()
        gc.enable()
        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
