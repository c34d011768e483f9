"""The mutant gallery, many times: every mutant with so many seeds, and beside them what is healthy.

A mutant counts as found with a seed where the suite (or the lint, or the check of ranks) finds anything
with it; the first seed also makes the failing case small. Healthy are the backends that mutants are made
of, the plans without their bugs, the shipped plans and the ranks as they are: nothing may be found in
them. Exit code 1 where a mutant is missed with any seed, or something healthy is not passed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, finish, parser, table, verdict
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from capture_planner import codec
from capture_planner.analysis.data_parallel import agree
from capture_planner.analysis.lint import Severity, lint
from capture_planner.conformance import (
    DEFAULT,
    THOROUGH,
    Choices,
    Profile,
    conform,
    loads,
    under_test,
)
from capture_planner.conformance.agreeing import check_agreement
from capture_planner.records.backend import Backend
from capture_planner.records.plan import Plan
from gallery import HEALTHY, MUTANTS, Caught, Mutant, catch, named

PROFILES = {profile.name: profile for profile in (DEFAULT, THOROUGH)}
LOCKED = sorted((ROOT / "plans" / "locked").glob("*.yaml"))


@attrs.frozen(kw_only=True)
class Task:
    """One search: of a mutant, or through something healthy."""

    name: str
    healthy: bool
    seed: int
    profile: Profile
    small: bool = False


@attrs.frozen(kw_only=True)
class Result:
    """What came of it."""

    task: Task
    seconds: float
    by: str = ""
    """What found something; empty where nothing did."""
    says: str = ""
    case: str = ""
    shown: str = ""
    """The case in a few words."""
    error: str = ""
    """What the search itself broke with: then it says nothing."""


def prepare() -> None:
    """Make a worker ready: tiny operators are slower on many threads, and Ctrl-C is for the campaign."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)

    torch.set_num_threads(1)


def search(task: Task) -> Result:
    """Do one search."""
    started = time.perf_counter()
    found: dict[str, str] = {}
    try:
        found = _healthy(task) if task.healthy else _mutant(task)
    except Exception as error:  # It is reported, and counts against the campaign.
        found = {"error": f"{type(error).__name__}: {error}"[:400]}
    return Result(task=task, seconds=time.perf_counter() - started, **found)


def _mutant(task: Task) -> dict[str, str]:
    caught = catch(named(task.name), seed=task.seed, profile=task.profile, small=task.small)
    if caught is None:
        return {}
    return {"by": caught.by, "says": caught.says, "case": caught.case, "shown": _in_words(caught)}


def _in_words(caught: Caught) -> str:
    """Return the smallest case in a few words."""
    finding = caught.finding
    if finding is None:
        inside = re.fullmatch(r".*?\((.*)\)", caught.says) if caught.mutant.kind == "ranks" else None
        return inside[1] if inside else caught.says.partition(": ")[2].partition(";")[0]
    words = [str(finding.role or ""), str(finding.entry or "eager"), finding.batch]
    if caught.case:
        steps = len(loads(caught.case).steps)
        words.append(f"after {steps} step{'s' if steps != 1 else ''}")
    return "; ".join(word for word in words if word)


def _healthy(task: Task) -> dict[str, str]:
    says = healthy()[task.name](task)
    return {"by": "healthy", "says": says} if says else {}


def healthy() -> dict[str, Callable[[Task], str | None]]:
    """Return all that must pass, each with what looks for a fault in it."""
    bases: dict[str, Backend | str] = {"reference": "reference"}
    for mutant in MUTANTS:
        if mutant.base is not None:
            bases.setdefault(
                f"{mutant.base.__module__.rpartition('.')[2]}.{mutant.base.__qualname__}", mutant.base()
            )
    found: dict[str, Callable[[Task], str | None]] = {
        f"backend {name}": partial(_suite, backend) for name, backend in bases.items()
    }
    found["ranks as they are"] = lambda task: check_agreement(agree, task.seed)
    for name, make in HEALTHY.items():
        found[f"plan without {name}"] = partial(_lint, make, Severity.WARNING)
    for path in LOCKED:
        found[f"plan {path.stem}"] = partial(_lint, partial(codec.load_plan, path), Severity.ERROR)
    return found


def _suite(backend: Backend | str, task: Task) -> str | None:
    outcome = conform(
        under_test(backend),
        Choices(profile=task.profile, seed=task.seed, shrink=False, blame=False, audits=False),
    )
    return None if outcome.passed else str(outcome.findings[0])


def _lint(make: Callable[[], Plan], least: Severity, task: Task) -> str | None:
    """Look for findings of a severity, or a worse one."""
    bad = {Severity.ERROR, least}
    return next((str(found) for found in lint(make()) if found.rule.severity in bad), None)


def tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    """Yield every search; whatever is the same for all seeds is done once."""
    profile = PROFILES[arguments.profile]
    if arguments.examples is not None:
        profile = attrs.evolve(profile, name=f"{arguments.examples} scenes", examples=arguments.examples)
    for mutant in arguments.mutants:
        for seed in range(arguments.seeds):
            yield Task(name=mutant.name, healthy=False, seed=seed, profile=profile, small=seed == 0)
    if not arguments.only:
        for name in healthy():
            for seed in range(1 if name.startswith("plan ") else arguments.seeds):
                yield Task(name=name, healthy=True, seed=seed, profile=profile)


def summary(mutant: Mutant, results: list[Result]) -> dict[str, Any]:
    """Return what a result file says of a mutant; ``results`` are by seed."""
    hits = [result for result in results if result.by]
    first = next(iter(hits), None)
    return {
        "name": mutant.name,
        "class": mutant.bug_class.name,
        "planted": mutant.kind,
        "says": mutant.says,
        "threads": mutant.threads,
        "seeds": len(results),
        "hits": len(hits),
        "by": dict(Counter(result.by for result in hits).most_common()),
        "missed": [result.task.seed for result in results if not result.by],
        "errors": sorted({result.error for result in results if result.error}),
        "found": first.says.replace(f"{ROOT}/", "") if first else None,
        "shown": first.shown if first else None,
        "case": first.case or None if first else None,
        "seconds": {
            "median": round(statistics.median(result.seconds for result in results), 2),
            "most": round(max(result.seconds for result in results), 2),
        },
    }


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=20, help="of each mutant, from 0 on (default 20)")
    made.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1, help="processes")
    made.add_argument("--profile", choices=PROFILES, default=DEFAULT.name, help="how much the suite tries")
    made.add_argument("--examples", type=int, metavar="N", help="scenes, in place of the profile's number")
    made.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help="these mutants, and nothing healthy"
    )
    arguments = made.parse_args()
    arguments.mutants = [named(name) for name in arguments.only] or list(MUTANTS)
    return arguments


def run(asked: list[Task], jobs: int) -> list[Result]:
    """Do all searches, several at a time; after Ctrl-C, return those that were done."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    done = []
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(min(jobs, len(asked)), prepare) as pool,
        Progress(*columns, console=CONSOLE, transient=True) as bars,
    ):
        bar = bars.add_task("", total=len(asked))
        try:
            for result in pool.imap_unordered(search, asked):
                done.append(result)
                bars.advance(bar)
                if bool(result.by) is result.task.healthy or result.error:
                    told = result.error or result.says or "missed"
                    CONSOLE.print(f"{result.task.name}, seed {result.task.seed}: {told}", markup=False)
        except KeyboardInterrupt:
            CONSOLE.print(f"interrupted: {len(done)} of {len(asked)} searches are done")
    return sorted(done, key=lambda result: (result.task.name, result.task.seed))


def main() -> int:
    """Run the campaign; return the exit code."""
    arguments = read_arguments()
    started = time.perf_counter()
    asked = list(tasks(arguments))
    results = run(asked, arguments.jobs)
    seconds = time.perf_counter() - started

    by_name: dict[str, list[Result]] = {}
    for result in results:
        if not result.task.healthy:
            by_name.setdefault(result.task.name, []).append(result)
    mutants = [summary(m, by_name[m.name]) for m in arguments.mutants if m.name in by_name]
    sound = [result for result in results if result.task.healthy]
    faults = [
        {"name": r.task.name, "seed": r.task.seed, "says": r.says or r.error}
        for r in sound
        if r.by or r.error
    ]
    shown = table("gallery", "mutant", "class", "planted in", "found", "by", "median s")
    for made in mutants:
        found, median = f"{made['hits']} of {made['seeds']}", f"{made['seconds']['median']:.1f}"
        shown.add_row(made["name"], made["class"], made["planted"], found, ", ".join(made["by"]), median)
    CONSOLE.print(shown)
    targets = {
        f"every mutant is found with {arguments.seeds} of {arguments.seeds} seeds": sum(
            made["hits"] for made in mutants
        )
        == len(arguments.mutants) * arguments.seeds
    }
    if not arguments.only:
        classes = Counter(made["class"] for made in mutants)
        targets["nothing is found in what is healthy"] = not faults and len(results) == len(asked)
        targets["at least 30 mutants"] = len(mutants) >= 30
        targets["two or more of each class"] = all(classes[name] >= 2 for name in "ABCDEFGHIJ")
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(
        arguments,
        {
            "seeds": arguments.seeds,
            "profile": arguments.profile if arguments.examples is None else f"{arguments.examples} scenes",
            "seconds": round(seconds, 1),
            "mutants": mutants,
            "healthy": {
                "searched": dict(Counter(result.task.name for result in sound)),
                "faults": faults,
            },
            "targets": targets,
        },
    )
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
