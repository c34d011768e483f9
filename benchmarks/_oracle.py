"""What the comparisons with engines share: where an engine's sources are, options, and the result file."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from _bench import CONSOLE, finish, parser

from support.files import module_at

_ORACLES = Path(__file__).parents[1] / "tests" / "engines" / "oracle"


def oracle(name: str) -> Any:
    """Load the oracle of that name: it runs an engine's own functions."""
    return module_at(_ORACLES / f"{name}.py")


def options(doc: str | None, package: str, seed: int = 1) -> argparse.ArgumentParser:
    """Return a command line with the options that every comparison has."""
    made = parser(doc)
    made.add_argument(
        "--wheel",
        type=Path,
        required=True,
        help=f"the wheel of {package}, a folder with it, or a folder of its unpacked sources",
    )
    made.add_argument("--count", type=int, default=20_000, help="configurations (default 20000)")
    made.add_argument("--seed", type=int, default=seed)
    made.set_defaults(package=package)
    return made


def sources(arguments: argparse.Namespace) -> Path:
    """Return the folder that has the engine's package in it; a wheel's Python files are unpacked for that."""
    given, package = arguments.wheel, arguments.package
    if (given / package).is_dir():
        return Path(given)
    wheels = [given] if given.suffix == ".whl" else sorted(given.glob(f"{package}-*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"--wheel {given}: expected the package {package}, or one wheel of it")
    name = hashlib.sha256(wheels[0].name.encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir(), f"{package}-sources-{name}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [each for each in wheel.namelist() if not each.endswith(".so")])
    return folder


def say(text: str) -> None:
    """Print a line as it is."""
    CONSOLE.print(text, markup=False, highlight=False, soft_wrap=True)


def ended(arguments: argparse.Namespace, counts: dict[str, int], differences: int, seconds: float) -> int:
    """Say what was compared, keep it where that was asked for, and return the exit code: 1 on a difference."""
    listed = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    say(f"{listed}: {differences} differ, {seconds:.0f} s")
    finish(
        arguments,
        {
            "engine": arguments.package,
            "seed": arguments.seed,
            "compared": counts,
            "differences": differences,
            "seconds": round(seconds, 1),
        },
    )
    return 1 if differences else 0
