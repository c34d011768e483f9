"""List the mutants of the gallery, or look for them: ``PYTHONPATH=tests python -m gallery``.

Without ``--catch`` the mutants are listed. With it, each is searched for: plans by the lint, ranks by
random vectors, backends and the runner by the conformance suite. Without names, everything healthy is
searched as well, and nothing may be found there; ``--healthy`` searches that alone. ``tox -e gallery`` runs all of it
with 20 seeds.

Exit code 1 if a mutant is missed with any seed, or something healthy does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

import gallery
from capture_planner.errors import RunError
from capture_planner.records.text import counted
from capture_planner_conformance import DEFAULT, THOROUGH
from gallery import campaign
from support.files import module_at

PROFILES = {profile.name: profile for profile in (DEFAULT, THOROUGH)}
SEARCH_OPTIONS = {
    "seed": 0,
    "seeds": 1,
    "profile": DEFAULT.name,
    "examples": None,
    "output": None,
    "seconds": None,
    "resume": None,
    "healthy": False,
}
"""Options that need ``--catch``, each with its default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    bench = module_at(campaign.ROOT / "benchmarks" / "_bench.py")
    parser = _parser(bench)
    options = parser.parse_args(arguments)
    for name, default in SEARCH_OPTIONS.items():
        if not options.catch and getattr(options, name) != default:
            parser.error(f"--{name} needs --catch")
    if options.healthy and options.names:
        parser.error("--healthy searches no mutants: leave the names out")
    try:
        named = [gallery.named(name) for name in dict.fromkeys(options.names)]
        mutants = [] if options.healthy else named or list(gallery.MUTANTS)
    except RunError as error:
        parser.error(str(error))
    if not options.catch:
        listed = [campaign.mutant_data(mutant) for mutant in mutants]
        click.echo("\n".join(_as_json({"mutants": listed}) if options.format == "json" else _list(listed)))
        return 0
    profile = PROFILES[options.profile]
    if options.examples is not None:
        profile = attrs.evolve(profile, name=counted(options.examples, "scene"), examples=options.examples)
    seeds = range(options.seed, options.seed + options.seeds)
    todo = list(campaign.searches(mutants, seeds, profile, with_healthy=not options.names))
    started = time.perf_counter()
    before = campaign.finished(options.resume) if options.resume else {}
    done = [before[search] for search in todo if search in before]
    results = [*done, *_run(campaign.remaining(todo, before), options)]
    data = campaign.campaign_data(results, todo, time.perf_counter() - started)
    click.echo("\n".join(_as_json(data) if options.format == "json" else _report(data, options)))
    bench.finish(options, data, name="gallery")
    return 0 if all(data["targets"].values()) else 1


def _parser(bench: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = bench.parser(__doc__)
    parser.prog = "python -m gallery"
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants (default: all)")
    parser.add_argument("--catch", action="store_true", help="look for each mutant")
    parser.add_argument("--healthy", action="store_true", help="search only what is healthy: nothing may be found")
    parser.add_argument("--seed", type=int, default=0, help="first random seed (default 0)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default 1)")
    parser.add_argument("--profile", choices=PROFILES, default=DEFAULT.name, help="how much the suite tries")
    parser.add_argument("--examples", type=int, metavar="N", help="scenes, instead of the profile's number")
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seconds", type=float, metavar="N", help="stop after so long, with what is finished")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="append each result to FILE, and report those that it has instead of repeating them",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print the result")
    return parser


def _run(todo: Sequence[campaign.Search], options: argparse.Namespace) -> list[campaign.Result]:
    """Run the searches behind a bar, on a terminal, and print each surprise when it comes."""
    if not todo:
        return []
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task("", total=len(todo))

        def done(result: campaign.Result) -> None:
            bars.advance(bar)
            if options.resume is not None:
                campaign.append(result, options.resume)
            if not result.expected:
                message = result.error or result.says or "missed"
                console.print(f"{result.search.name}, seed {result.search.seed}: {message}", markup=False)

        return campaign.run(todo, options.jobs, done, options.seconds)


def _as_json(data: dict[str, Any]) -> list[str]:
    return [json.dumps(data, indent=2)]


def _list(mutants: Sequence[dict[str, Any]]) -> Iterator[str]:
    for mutant in mutants:
        yield f"{mutant['name']} ({mutant['class']}, {mutant['planted']}): {mutant['says']}"
        yield from (f"  {address}" for address in mutant["threads"].values())
    yield counted(len(mutants), "mutant")


def _report(data: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    mutants = data["mutants"]
    for mutant in mutants:
        found = f"found with {mutant['hits']} of {counted(mutant['seeds'], 'seed')}"
        if mutant["left"]:
            found += f", {mutant['left']} not tried"
        by = f" by {', '.join(mutant['by'])}" if mutant["by"] else ""
        yield f"{mutant['name']} ({mutant['class']}, {mutant['planted']}): {found}{by}"
        if mutant["found"]:
            yield f"  {mutant['found']}"
        if mutant["case"]:
            yield f"  case: {mutant['case']}"
        yield f"  again: {_command(mutant, options)}"
    for fault in data["healthy"]["faults"]:
        yield f"{fault['name']}, seed {fault['seed']}: {fault['says']}"
    if data["healthy"]["searched"]:
        yield f"healthy: {len(data['healthy']['searched'])}, faults: {len(data['healthy']['faults'])}"
    sure = sum(mutant["hits"] == mutant["seeds"] and not mutant["left"] for mutant in mutants)
    if mutants:
        yield f"{sure} of {counted(len(mutants), 'mutant')} found with every seed"


def _command(mutant: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the command that searches for it again, with a seed that misses it where there is one."""
    words = ["PYTHONPATH=tests python -m gallery", mutant["name"], "--catch"]
    # The lint of a plan draws nothing.
    if mutant["planted"] != "plan":
        words += ["--seed", str(next(iter(mutant["missed"]), options.seed))]
        if mutant["planted"] != "ranks" and options.profile != DEFAULT.name:
            words += ["--profile", options.profile]
    return " ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
