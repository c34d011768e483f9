"""What the comparisons with engines share: the engine's sources, the options, and the result file."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture_planner_sglang.emulation.releases import RELEASES as SGLANG
from capture_planner_vllm.emulation.releases import NEWEST
from support.files import module_at

_HERE = Path(__file__).parent
_BENCH = module_at(_HERE.parents[2] / "benchmarks" / "_bench.py")


def oracle(name: str) -> Any:
    """Load the oracle of that name, which runs an engine's own functions."""
    return module_at(_HERE / f"{name}.py")


def options(doc: str | None, package: str, seed: int = 1) -> argparse.ArgumentParser:
    """Return a command line with the options that every comparison has."""
    parser: argparse.ArgumentParser = _BENCH.parser(doc)
    parser.add_argument(
        "--wheel",
        type=Path,
        required=True,
        help=f"the wheel of {package}, a folder with it, or a folder of its unpacked sources",
    )
    parser.add_argument("--count", type=int, default=20_000, help="configurations (default: 20000)")
    parser.add_argument("--seed", type=int, default=seed)
    parser.set_defaults(package=package)
    return parser


def sources(arguments: argparse.Namespace) -> Path:
    """Return the folder that contains the engine's package; the Python files of a wheel are unpacked."""
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


def release_in(folder: Path, package: str = "vllm") -> str:
    """Return the release of unpacked sources of an engine, from the file that its build writes."""
    text = (folder / package / "_version.py").read_text()
    match = re.search(r"__version__ = (?:version = )?'([^']+)'", text)
    if match is None:
        raise SystemExit(f"{folder}: {package}/_version.py names no release")
    return match[1]


def say(text: str) -> None:
    """Print a line without markup."""
    _BENCH.CONSOLE.print(text, markup=False, highlight=False, soft_wrap=True)


def finish(
    name: str,
    arguments: argparse.Namespace,
    counts: dict[str, int],
    differences: int,
    seconds: float,
    ignored: Mapping[str, int] | None = None,
) -> int:
    """Print what was compared, write the result file if asked to, and return the exit code: 1 on a difference.

    ``ignored`` counts refusals of the engine that the emulation does not repeat, by flag.
    """
    listed = ", ".join(f"{count:,} {subject}" for subject, count in counts.items())
    say(f"{listed}: {differences} differ, {seconds:.0f} s")
    for flag, count in (ignored or {}).items():
        say(f"accepted here, refused by the engine over a value with no effect on graphs: {count:,} {flag}")
    release = getattr(arguments, "release", None)
    if arguments.output is not None and arguments.output.suffix != ".json":
        date = datetime.datetime.now(datetime.UTC)
        older = "" if release in (None, NEWEST, SGLANG.newest) else f"_{release}"
        arguments.output = arguments.output / f"oracle_{name}{older}-{date:%Y-%m-%d}.json"
    results: dict[str, Any] = {
        "engine": arguments.package,
        "release": release,
        "seed": arguments.seed,
        "compared": counts,
        "differences": differences,
        "seconds": round(seconds, 1),
    }
    if ignored is not None:
        results["refusals_of_values_without_effect"] = dict(ignored)
    _BENCH.finish(arguments, results)
    return 1 if differences else 0
