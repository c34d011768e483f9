"""What the benchmark scripts share: provenance, results, and the deployments that ship."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from capture_planner import codec
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Spec

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CONSOLE = Console()

_OWN = ("capture-planner", "attrs", "cattrs", "pluggy", "ruamel.yaml", "rich", "hypothesis")
_PACKAGES = (*_OWN, "torch", "triton", "transformers", "flash-attn-4", "flashinfer-python", "vllm", "sglang")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a command-line parser with the options that every script has."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=RESULTS,
        help="write JSON: to this file, or to <script>-<date>.json in this folder "
        "(benchmarks/results where no value is given); default: print only",
    )
    return result


def seeded(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line of a campaign, which has a seed and processes; print the seed."""
    options.add_argument("--seed", type=int, default=random.getrandbits(32), help="default: chosen and printed")
    options.add_argument("--jobs", "-j", type=int, default=os.cpu_count(), help="processes")
    arguments = options.parse_args()
    CONSOLE.print(f"seed {arguments.seed}")
    return arguments


def provenance() -> dict[str, Any]:
    """Return where and with what a result was measured; no absolute path in it."""
    script = Path(sys.argv[0]).resolve()
    path = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", str(path), *map(_relative, sys.argv[1:])]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "capture_planner", "backends", "benchmarks")),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)} | _gpu(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def finish(arguments: argparse.Namespace, results: dict[str, Any], name: str | None = None) -> None:
    """Write the results where the command line says; ``name`` is used instead of the script's."""
    if arguments.output is None:
        return
    target: Path = arguments.output
    if target.suffix != ".json":
        target = target / f"{name or Path(sys.argv[0]).stem}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"provenance": provenance(), **results}, indent=2) + "\n"
    target.write_text(_without_folders(text), encoding="utf-8")
    CONSOLE.print(f"written to {target.name}")


def conclude(arguments: argparse.Namespace, results: dict[str, Any], targets: dict[str, bool]) -> int:
    """Print each target, write the results with them, and return the exit code: 1 where a target is missed."""
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(arguments, {**results, "targets": targets})
    return 0 if targets and all(targets.values()) else 1


def _without_folders(text: str) -> str:
    """Return a text without the folders that packages lie in here: libraries name their files in errors."""
    for folder in sorted({str(Path(entry).resolve()) for entry in sys.path}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "") if folder != "/" else text
    return text


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table whose first column is text and the others are numbers; a row may end early."""
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if index else "left")
    for row in rows:
        result.add_row(*map(str, row))
    CONSOLE.print(result)


def verdict(holds: bool) -> str:
    """Return how a target is shown."""
    return "[green]met[/]" if holds else "[red]MISSED[/]"


def shipped_specs() -> dict[str, Spec]:
    """Return the specs in plans/specs by name."""
    return {path.stem: codec.load_spec(path) for path in sorted((ROOT / "plans" / "specs").glob("*.yaml"))}


def shipped_environments() -> dict[str, Environment]:
    """Return the environments in plans/environments by name."""
    folder = ROOT / "plans" / "environments"
    return {path.stem: codec.load_environment(path) for path in sorted(folder.glob("*.yaml"))}


def _relative(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _git(*arguments: str) -> str:
    process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout.strip() if process.returncode == 0 else "unknown"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, str]:
    """Return the CUDA device, where this process uses one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
