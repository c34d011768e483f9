"""The program ``capture-planner``: an interruption ends in one line even while its modules are imported."""

import gc
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    code = 130

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = 143
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    try:
        # Modules stay: looking through them again and again is a sixth of the start.
        gc.disable()
        from capture_planner.cli import main as run

        gc.freeze()
        gc.enable()
        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(code)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
