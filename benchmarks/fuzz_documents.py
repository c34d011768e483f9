"""Random and mutated documents through the whole file path: read, plan, dispatch, lint, write, read.

Every document is made from ``--seed`` and its index alone. Only ``CapturePlannerError`` may be
raised; no use of a document may take more than ``--seconds`` of processor time, and no document more
than 200 MiB of memory; what is loaded must be written and read again as itself. Exit code 1 on any
violation, each with the command that repeats it.

A document just over the time limit is run a second time and the faster run counts. Memory is the growth
of the peak resident set, per document, and tracemalloc's peak for one in 25.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
from _bench import CONSOLE, conclude, parser, print_table, seeded
from _fuzz_documents import KINDS
from _fuzz_uses import MEGABYTES, Outcome, check, prepare
from rich.progress import track

from capture_planner.plugins import registry


def options(doc: str | None, kinds: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options of a campaign over documents, or other inputs, of these kinds."""
    options = parser(doc)
    options.add_argument("--documents", "-n", type=int, default=2000, help="how many (default 2,000)")
    options.add_argument("--only", type=int, default=None, metavar="INDEX", help="run one document, and show it")
    options.add_argument("--only-kind", choices=kinds, default=None, help="documents of one kind only")
    options.add_argument("--seconds", type=float, default=1.0, help="processor time for one document (default 1)")
    options.add_argument(
        "--hang", type=float, default=5.0, help="processor seconds after which one is stopped (default 5)"
    )
    return options


def main() -> int:
    """Run the campaign."""
    registry.load_backends()  # a worker that cannot start would be started again for ever
    return run(seeded(options(__doc__, KINDS)), prepare, check)


def run(
    arguments: argparse.Namespace, prepare: Callable[[argparse.Namespace], None], check: Callable[[int], Outcome]
) -> int:
    """Run a campaign, or with ``--only`` one input; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as arguments.folder:
        if arguments.only is None:
            started = time.perf_counter()
            return report(arguments, campaign(arguments, prepare, check), time.perf_counter() - started)
        prepare(arguments)
        outcome = check(arguments.only)
        CONSOLE.print(attrs.asdict(outcome), markup=False)
        return 1 if outcome.violations else 0


def campaign(
    arguments: argparse.Namespace, prepare: Callable[[argparse.Namespace], None], check: Callable[[int], Outcome]
) -> list[Outcome]:
    """Check every index in worker processes, each of which is prepared once; in this one if ``--jobs`` is 1."""
    outcomes: list[Outcome] = []
    results = _results(arguments, prepare, check)
    for outcome in track(results, "documents", total=arguments.documents, console=CONSOLE):
        outcomes.append(outcome)
        if outcome.violations:
            text = f"{outcome.index} {outcome.made_by}: {'; '.join(outcome.violations)}"
            CONSOLE.print(text, markup=False, highlight=False)
    return sorted(outcomes, key=lambda outcome: outcome.index)


def _results(
    arguments: argparse.Namespace, prepare: Callable[[argparse.Namespace], None], check: Callable[[int], Outcome]
) -> Iterator[Outcome]:
    indices = range(arguments.documents)
    if arguments.jobs == 1:  # another process would import everything again
        prepare(arguments)
        yield from map(check, indices)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs, prepare, (arguments,), maxtasksperchild=2000) as pool:
        results = pool.imap_unordered(check, indices)
        for _ in indices:
            yield results.next(timeout=60 + 10 * arguments.hang)  # a worker that dies is not waited for


def report(arguments: argparse.Namespace, outcomes: list[Outcome], wall: float) -> int:
    """Print what became of the inputs; return the exit code."""
    kinds: collections.Counter[str] = collections.Counter(f"{o.kind}: {o.outcome}" for o in outcomes)
    print_table("documents by outcome", ("outcome", "documents"), kinds.most_common(40))
    stages: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        stages.update(outcome.stages)
    times = (
        (name, f"{seconds:.1f}", f"{max(o.stages.get(name, 0.0) for o in outcomes):.3f}")
        for name, seconds in stages.most_common()
    )
    print_table("processor time by stage", ("stage", "seconds", "most for one document"), times)
    slow = []
    for outcome in sorted(outcomes, key=lambda o: -o.cpu)[:10]:
        worst = max(outcome.stages.items(), key=lambda item: item[1], default=("none", 0.0))
        cells = f"{outcome.cpu:.2f}", f"{worst[0]} {worst[1]:.2f}", outcome.size, outcome.rss >> 20
        slow.append((f"{outcome.kind} {outcome.index}", *cells, outcome.made_by))
    columns = ("document", "seconds", "worst stage", "bytes", "MiB", "made by")
    print_table("slowest documents", columns, slow)
    most_rss, most_traced = max(o.rss for o in outcomes), max((o.traced or 0) for o in outcomes)
    CONSOLE.print(f"most memory: {most_rss >> 20} MiB resident, {most_traced >> 20} MiB traced")
    bad = [outcome for outcome in outcomes if outcome.violations]
    grouped: dict[str, list[Outcome]] = {}
    for outcome in bad:
        grouped.setdefault(re.sub(r"\d+(\.\d+)?|'.*|: .*", "", "; ".join(outcome.violations))[:100], []).append(outcome)
    for violation, group in sorted(grouped.items(), key=lambda item: -len(item[1])):
        CONSOLE.print(f"{len(group)} x {violation}", markup=False, highlight=False)
        for outcome in group[:3]:
            again = f"python benchmarks/{Path(sys.argv[0]).name} --seed {arguments.seed} --only {outcome.index}"
            again += f" --only-kind {arguments.only_kind}" if arguments.only_kind else ""
            text = f"{'; '.join(outcome.violations)} ({outcome.made_by})\n    {again}"
            CONSOLE.print(text, markup=False, highlight=False)
    rate = len(outcomes) / wall
    CONSOLE.print(f"{len(outcomes)} documents in {wall:.0f} s ({rate:.0f} a second), seed {arguments.seed}")
    results = {
        "seed": arguments.seed,
        "documents": len(outcomes),
        "wall_seconds": round(wall, 1),
        "jobs": arguments.jobs,
        "limits": {"seconds": arguments.seconds, "megabytes": MEGABYTES},
        "slowest_seconds": round(max(o.cpu for o in outcomes), 3),
        "most_resident_mebibytes": most_rss >> 20,
        "most_traced_mebibytes": most_traced >> 20,
        "outcomes": dict(kinds.most_common()),
        "stage_seconds": {name: round(seconds, 1) for name, seconds in stages.most_common()},
        "violations": [{"index": o.index, "made_by": o.made_by, "what": o.violations} for o in bad],
    }
    return conclude(arguments, results, {f"no violation (found {len(bad)})": not bad})


if __name__ == "__main__":
    sys.exit(main())
