"""Searches through the gallery: each mutant with one seed or many, and everything that is healthy."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

import gallery
from capture_planner import codec
from capture_planner.analysis.data_parallel import agree
from capture_planner.analysis.lint import Severity, lint
from capture_planner.analysis.lint.core import link
from capture_planner.plugins.backend import Backend
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_conformance import SearchProfile, SuiteOptions, conform, loads
from gallery.core import Detection, Mutant
from support.runner_conformance import RunnerScene, runner_under_test
from support.runner_conformance.collective_capture import check_capture
from support.runner_conformance.rank_agreement import check_agreement

ROOT = Path(__file__).parents[2]


@attrs.frozen(kw_only=True)
class Search:
    """One search: for a mutant, or through something healthy."""

    name: str
    seed: int
    profile: SearchProfile
    healthy: bool = False
    minimize: bool = False
    """Minimize the failing case, and find out which garbage it needs."""


@attrs.frozen(kw_only=True)
class Result:
    """The outcome of a search."""

    search: Search
    seconds: float
    by: str = ""
    """The check or rule that found something; empty if nothing did."""
    says: str = ""
    case: str = ""
    shown: str = ""
    """The case in a few words."""
    error: str = ""
    """The error that ended the search itself: it proves nothing then."""

    @property
    def expected(self) -> bool:
        """Whether a mutant was found, or nothing was found in something healthy."""
        return bool(self.by) is not self.search.healthy and not self.error


def searches(
    mutants: Sequence[Mutant], seeds: Sequence[int], profile: SearchProfile, *, with_healthy: bool
) -> Iterator[Search]:
    """Yield every search. A plan is linted once: seeds make no difference to it."""
    for mutant in mutants:
        for seed in seeds:
            yield Search(name=mutant.name, seed=seed, profile=profile, minimize=seed == seeds[0])
    for name in healthy() if with_healthy else ():
        for seed in seeds[:1] if name.startswith("plan ") else seeds:
            yield Search(name=name, seed=seed, profile=profile, healthy=True)


def remaining(todo: Sequence[Search], done: Container[Search]) -> list[Search]:
    """Return the searches that are left: mutants before what is healthy, and first those that lack the fewest seeds."""
    left = [search for search in todo if search not in done]
    lacking = Counter(search.name for search in left)
    return sorted(left, key=lambda search: (search.healthy, lacking[search.name]))


def finished(path: Path) -> dict[Search, Result]:
    """Return the results that an earlier campaign appended to a file; a last line that was cut off is left out."""
    found = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            data = json.loads(line)
            profile = SearchProfile(**data["search"].pop("profile"))
            search = Search(**data.pop("search"), profile=profile)
            found[search] = Result(search=search, **data)
    return found


def append(result: Result, path: Path) -> None:
    """Append a result to a file, as a line of JSON; a line that was cut off stays alone."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(attrs.asdict(result)))


def run(
    todo: Sequence[Search], jobs: int, done: Callable[[Result], None], seconds: float | None = None
) -> list[Result]:
    """Run all searches in so many processes, ``done`` after each.

    After Ctrl-C, or so many ``seconds``, return the finished ones.
    """
    results: list[Result] = []
    started = time.perf_counter()

    def add(result: Result) -> bool:
        results.append(result)
        done(result)
        return seconds is not None and time.perf_counter() - started > seconds

    try:
        if jobs == 1:
            for search in todo:
                if add(run_search(search)):
                    break
        else:
            context = multiprocessing.get_context("spawn")
            with context.Pool(min(jobs, len(todo)), _prepare_worker) as pool:
                for result in pool.imap_unordered(run_search, todo):
                    if add(result):
                        break
    except KeyboardInterrupt:
        pass
    return sorted(results, key=lambda result: (result.search.name, result.search.seed))


def _prepare_worker() -> None:
    import torch

    # Ctrl-C is for the parent; and tiny operators are slower on many threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def run_search(search: Search) -> Result:
    """Run one search."""
    started = time.perf_counter()
    found: dict[str, str] = {}
    try:
        found = _search_healthy(search) if search.healthy else _search_mutant(search)
    except Exception as error:  # Reported, and counted against the campaign.
        found = {"error": f"{type(error).__name__}: {error}"[:400]}
    return Result(search=search, seconds=time.perf_counter() - started, **found)


def _search_mutant(search: Search) -> dict[str, str]:
    detection = gallery.detect(
        gallery.named(search.name), seed=search.seed, profile=search.profile, minimize=search.minimize
    )
    if detection is None:
        return {}
    return {"by": detection.by, "says": detection.says, "case": detection.case, "shown": _case_summary(detection)}


def _case_summary(detection: Detection) -> str:
    finding = detection.finding
    if finding is None:
        inside = re.fullmatch(r".*?\((.*)\)", detection.says) if detection.mutant.kind == "ranks" else None
        return inside[1] if inside else detection.says.partition(": ")[2].partition(";")[0]
    words = [str(finding.role or ""), str(finding.entry or "eager"), finding.batch]
    if detection.case:
        words.append(f"after {counted(len(loads(detection.case, RunnerScene).steps), 'step')}")
    return "; ".join(word for word in words if word)


# What is healthy: nothing may be found in it.


def healthy() -> dict[str, Callable[[Search], str | None]]:
    """Return everything that must pass, by name, each with a function that returns a fault found in it."""
    bases: dict[str, Backend | str] = {"reference": "reference"}
    for mutant in gallery.MUTANTS:
        if mutant.base is not None:
            module = mutant.base.__module__.rpartition(".")[2]
            bases.setdefault(f"{module}.{mutant.base.__qualname__}", mutant.base())
    found: dict[str, Callable[[Search], str | None]] = {
        f"backend {name}": partial(_conformance_fault, backend) for name, backend in bases.items()
    }
    found["ranks as they are"] = lambda search: check_agreement(agree, search.seed)
    found["ranks that capture"] = lambda search: check_capture(search.seed)
    for name, make in gallery.HEALTHY.items():
        found[f"plan without {name}"] = partial(_lint_fault, make, Severity.WARNING)
    for path in sorted((ROOT / "plans" / "locked").glob("*.yaml")):
        found[f"plan {path.stem}"] = partial(_lint_fault, partial(codec.load_plan, path), Severity.ERROR)
    return found


def _search_healthy(search: Search) -> dict[str, str]:
    fault = healthy()[search.name](search)
    return {"by": "healthy", "says": fault} if fault else {}


def _conformance_fault(backend: Backend | str, search: Search) -> str | None:
    outcome = conform(
        runner_under_test(backend),
        SuiteOptions(profile=search.profile, seed=search.seed, shrink=False, blame=False, audits=False),
    )
    return None if outcome.passed else str(outcome.failures[0])


def _lint_fault(make: Callable[[], Plan], least: Severity, search: Search) -> str | None:
    """Return the first finding that is an error, or as severe as ``least``."""
    return next((str(found) for found in lint(make()) if found.rule.severity in (Severity.ERROR, least)), None)


# What a result file says.


def mutant_data(mutant: Mutant) -> dict[str, Any]:
    """Return a mutant as JSON lists it."""
    return {
        "name": mutant.name,
        "class": mutant.bug_class.name,
        "planted": mutant.kind,
        "says": mutant.says,
        "threads": {thread: link(thread) for thread in mutant.threads},
    }


def campaign_data(results: Sequence[Result], todo: Sequence[Search], seconds: float) -> dict[str, Any]:
    """Return what a campaign found, as JSON: each mutant, faults in what is healthy, and the targets."""
    planned = Counter(search.name for search in todo if not search.healthy)
    mutants = [
        _mutant_result(gallery.named(name), [r for r in results if r.search.name == name], searches)
        for name, searches in planned.items()
    ]
    sound = [result for result in results if result.search.healthy]
    faults = [
        {"name": result.search.name, "seed": result.search.seed, "says": result.says or result.error}
        for result in sound
        if not result.expected
    ]
    targets = {
        "every mutant is found with every seed": all(
            result.expected for result in results if not result.search.healthy
        ),
        "nothing is found in what is healthy": not faults,
        "every search is done": len(results) == len(todo),
    }
    return {
        "seeds": len({search.seed for search in todo}),
        "profile": todo[0].profile.name,
        "seconds": round(seconds, 1),
        "mutants": mutants,
        "healthy": {"searched": dict(Counter(result.search.name for result in sound)), "faults": faults},
        "targets": targets,
    }


def _mutant_result(mutant: Mutant, results: Sequence[Result], searches: int) -> dict[str, Any]:
    """Return what was found of a mutant.

    :param searches: how many were to be done, of which ``results`` has those that were.
    """
    hits = [result for result in results if result.by]
    first = next(iter(hits), None)
    times = [result.seconds for result in results] or [0.0]
    return mutant_data(mutant) | {
        "seeds": len(results),
        "left": searches - len(results),
        "hits": len(hits),
        "by": dict(Counter(result.by for result in hits).most_common()),
        "missed": [result.search.seed for result in results if not result.by],
        "errors": sorted({result.error for result in results if result.error}),
        "found": first.says.replace(f"{ROOT}/", "") if first else None,
        "shown": first.shown if first else None,
        "case": first.case or None if first else None,
        "seconds": {"median": round(statistics.median(times), 2), "most": round(max(times), 2)},
    }
