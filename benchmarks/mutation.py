"""Mutation testing: whether the tests notice when one operator, number or word of the code changes.

The mutants are cosmic-ray's: each of its operators at each place of each module. Not counted are
those that are no Python, which any test would notice, and those that no test could: where only
annotations, which are never evaluated, or a ``*`` between parameters changed; and ``==`` for ``is``,
which these modules use with None, enum members and records that are never equal without being one.
cosmic-ray itself runs one test command for all modules, one mutant after the other; here each module
has its own tests, the most lethal first, and several mutants run at a time, each in its own copy of
the tree.

A mutant is killed where a test fails, and timed out where the tests take much more of the processor
than the code as it is takes time. docs/lab/mutation.md has the survivors, each with a reason.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, finish, parser, table, verdict
from _mutants import Mutant, digest, mutant, places
from _mutation_runs import Campaign, Outcomes
from _mutation_tests import TESTS

TARGET = 0.88
"""The least share of noticed mutants, of all modules together; it is also said of each."""


def interval(modules: Mapping[str, Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the share of all mutants that is noticed, estimated from samples, and its 95 % interval.

    Each module weighs by its mutants. The variance of a module has one noticed and one unnoticed mutant added
    (Laplace), so that a module of which all were noticed is not taken for certain.
    """
    sampled = [module for module in modules.values() if module["tested"]]
    every = sum(module["mutants"] for module in sampled)
    if not every:
        return 0.0, 0.0, 1.0
    share = variance = 0.0
    for module in sampled:
        weight, tested = module["mutants"] / every, module["tested"]
        likely = (module["noticed"] + 1) / (tested + 2)
        share += weight * module["noticed"] / tested
        unseen = 1 - tested / module["mutants"]
        variance += weight**2 * likely * (1 - likely) / tested * unseen
    margin = 1.96 * math.sqrt(variance)
    return share, max(0.0, share - margin), min(1.0, share + margin)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options.add_argument("--modules", nargs="+", choices=TESTS, default=list(TESTS), metavar="MODULE")
    options.add_argument("--sample", type=int, metavar="N", help="test N mutants of each module; default: all")
    options.add_argument("--seed", type=int, default=0, help="of the sample")
    options.add_argument("--seconds", type=float, default=math.inf, help="begin no mutant after so long")
    options.add_argument(
        "--again",
        type=Path,
        metavar="RESULT",
        help="test only what survived or was not tested in this result, and modules that changed since; "
        "a sample must be the same, and modules that are not named stay as they are",
    )
    return options.parse_args()


@attrs.frozen(kw_only=True)
class Sample:
    """The mutants of a module that are tested, and what an older result says of them."""

    mutants: int
    """All mutants of the module."""
    skipped: Mapping[str, int]
    """Mutants that are not counted, by the reason."""
    killed: int = 0
    """Mutants that an older result has as killed; they are not made again."""
    chosen: tuple[Mutant, ...]
    """The others, in the order in which they are tested."""
    outcomes: Outcomes = attrs.field(factory=dict)
    """What the older result says of those."""

    @classmethod
    def drawn(cls, module: str, number: int | None, seed: int) -> Sample:
        """Draw one mutant of each of ``number`` parts of a file, in any order; None: all mutants.

        Of a sample, the number of all mutants is estimated: that of the places, less the share of those drawn that
        are not counted.
        """
        choice = random.Random(f"{seed} {module}")
        every = places(module)
        number = len(every) if number is None else min(number, len(every))
        chosen: list[Mutant] = []
        skipped: Counter[str] = Counter()
        for first, last in pairwise(len(every) * part // number for part in range(number + 1)):
            for _, operator, occurrence in choice.sample(every[first:last], last - first):
                made = mutant(module, operator, occurrence)
                if isinstance(made, Mutant):
                    chosen.append(made)
                    break
                skipped[made] += 1
        choice.shuffle(chosen)
        counted = len(chosen) / max(len(chosen) + skipped.total(), 1)
        return cls(mutants=round(len(every) * counted), skipped=skipped, chosen=tuple(chosen))

    @classmethod
    def again(cls, module: str, older: Mapping[str, Any]) -> Sample:
        """Return what an older result of the same text has not as killed: first what survived."""
        outcomes = {(module, row["operator"], row["occurrence"]): row["outcome"] for row in older["not_killed"]}
        keys = [*outcomes, *((module, *key) for key in older["not_tested"])]
        chosen = [made for key in keys if isinstance(made := mutant(*key), Mutant)]
        return cls(
            mutants=older["mutants"],
            skipped=older["not_counted"],
            killed=older["killed"],
            chosen=tuple(chosen),
            outcomes=outcomes,
        )

    @property
    def pending(self) -> list[Mutant]:
        """The mutants to test."""
        return [each for each in self.chosen if self.outcomes.get(each.key, "survived") == "survived"]

    def result(self, module: str, outcomes: Outcomes) -> dict[str, Any]:
        """Return what is written of a module."""
        known = self.outcomes | outcomes
        rows = [(known[each.key], each) for each in self.chosen if each.key in known]
        by = Counter(outcome for outcome, _ in rows) + Counter(killed=self.killed)
        noticed, tested = by["killed"] + by["timeout"], by.total()
        return {
            "tests": TESTS[module],
            "digest": digest(module),
            "mutants": self.mutants,
            "tested": tested,
            "noticed": noticed,
            "killed": by["killed"],
            "timed_out": by["timeout"],
            "survived": by["survived"],
            "share": round(noticed / tested, 4) if tested else None,
            "not_counted": dict(self.skipped),
            "not_killed": [{"outcome": outcome, **each.row} for outcome, each in rows if outcome != "killed"],
            "not_tested": [list(each.key[1:]) for each in self.chosen if each.key not in known],
        }


def results(options: argparse.Namespace, samples: Mapping[str, Sample], outcomes: Outcomes) -> dict[str, Any]:
    """Return what is written: per module, and of all."""
    modules = {module: sample.result(module, outcomes) for module, sample in samples.items()}
    share, low, high = interval(modules)
    return {
        "tool": f"cosmic-ray {metadata.version('cosmic-ray')}",
        "sample": _drawing(options),
        "share": round(share, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "targets": {f"at least {TARGET:.0%} of all mutants are noticed": share >= TARGET},
        "modules": modules,
    }


def _drawing(options: argparse.Namespace) -> dict[str, int] | None:
    """Return how a sample is drawn; None: all mutants are tested."""
    return None if options.sample is None else {"per_module": options.sample, "seed": options.seed}


def main() -> int:
    """Mutate, test, print and write; exit code 1 where fewer are noticed than the target."""
    options = arguments()
    end = time.monotonic() + options.seconds
    older = json.loads(options.again.read_text(encoding="utf-8")) if options.again else {"modules": {}}
    if options.again and older["sample"] != _drawing(options):
        raise SystemExit(f"{options.again} has the sample {older['sample']}, not {_drawing(options)}")
    same = {module for module in TESTS if older["modules"].get(module, {}).get("digest") == digest(module)}
    other = [module for module in options.modules if module not in same]
    with ProcessPoolExecutor(options.jobs) as pool:
        drawn = dict(
            zip(other, pool.map(partial(Sample.drawn, number=options.sample, seed=options.seed), other), strict=True)
        )
    samples = {
        module: Sample.again(module, older["modules"][module]) if module in same else drawn[module]
        for module in TESTS
        if module in same or module in options.modules
    }
    for module, sample in samples.items():
        CONSOLE.print(f"{module}: {sample.mutants} mutants; not counted: {dict(sample.skipped)}")
    pending = {module: samples[module].pending for module in options.modules}
    CONSOLE.print(f"{sum(map(len, pending.values()))} mutants to test")

    def written(outcomes: Outcomes) -> None:
        finish(options, results(options, samples, outcomes))

    campaign = Campaign(pending, written)
    if any(pending.values()):
        campaign.run(options.jobs, end)
    for module in campaign.failing:
        CONSOLE.print(f"{module}: not tested, since its tests fail without any mutation")
    result = results(options, samples, campaign.outcomes)
    summary = table("mutants", "module", "mutants", "tested", "killed", "timed out", "survived", "noticed", "target")
    for module, row in result["modules"].items():
        counts = [str(row[name]) for name in ("mutants", "tested", "killed", "timed_out", "survived")]
        share = row["share"]
        summary.add_row(module, *counts, *(("", "") if share is None else (f"{share:.1%}", verdict(share >= TARGET))))
    CONSOLE.print(summary)
    low, high = result["interval_95"]
    CONSOLE.print(f"{result['share']:.1%} are noticed" + (f" ({low:.1%} to {high:.1%})" if options.sample else ""))
    for target, holds in result["targets"].items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(options, result)
    return 0 if all(result["targets"].values()) and not campaign.failing else 1


if __name__ == "__main__":
    sys.exit(main())
