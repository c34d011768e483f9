"""Build the distributions of this repository: the core, what brings commands, the backends and the engines.

``python tools/build.py dist`` writes a source distribution and a wheel of each into ``dist``.
``python tools/build.py --install-plugins`` builds the wheels of all but the core, and installs them without their
dependencies, as tox does: all of it in one process and one call of pip, which takes seconds.
``--without-runner`` leaves out the runner and the conformance suite, which need torch.
Needs hatchling.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).parent.parent
WITH_TORCH = (ROOT / "runner", ROOT / "conformance")
PLUGINS = [
    ROOT / "tuner",
    *sorted(
        path.parent
        for kind in ("backends", "engines")
        for path in (ROOT / kind).glob("*/pyproject.toml")
        # What users copy to write a backend, and no distribution.
        if path.parent.name != "template"
    ),
]


def build(source: Path, target: Path, *, sdist: bool) -> list[Path]:
    """Build the wheel of one distribution, and its source distribution if asked to."""
    # A build takes the project from the current folder (PEP 517).
    with contextlib.chdir(source), contextlib.redirect_stdout(io.StringIO()):
        names = [build_wheel(str(target)), *([build_sdist(str(target))] if sdist else [])]
    return [target / name for name in names]


def install(sources: Sequence[Path]) -> None:
    """Build the wheels of distributions, and install them into this environment."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = [wheel for source in sources for wheel in build(source, Path(folder), sdist=False)]
        # The version stays while the code changes, so pip would keep what it has; no index has these packages.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall"]
        subprocess.run([*pip, *map(str, wheels)], check=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="Where the distributions are written.")
    parser.add_argument("--install-plugins", action="store_true", help="Install the plugins here instead.")
    parser.add_argument("--without-runner", action="store_true", help="Leave out what needs torch.")
    options = parser.parse_args()
    plugins = PLUGINS if options.without_runner else (*WITH_TORCH, *PLUGINS)
    if options.install_plugins:
        install(plugins)
        return
    if options.folder is None:
        parser.error("name a folder, or pass --install-plugins")
    # Absolute, as ``build`` changes the folder.
    target = options.folder.resolve()
    target.mkdir(parents=True, exist_ok=True)
    for source in (ROOT, *plugins):
        for path in build(source, target, sdist=True):
            sys.stdout.write(f"{path.name}\n")


if __name__ == "__main__":
    main()
