"""The tables of docs/lab/gallery.md: the gallery as the newest campaign found it, and what was searched since."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import results

from capture_planner.analysis.lint import RULES, BugClass
from capture_planner_conformance import Check


def campaign() -> dict[str, Any]:
    """Return the newest campaign over everything, each mutant and what is healthy as it was searched last.

    ``later`` says what was searched after it, and when. Raises ``FileNotFoundError``.
    """
    campaigns = results.files("gallery-*.json")
    # A campaign over some mutants, or over what is healthy alone, only adds to one over everything.
    whole = [index for index, each in enumerate(campaigns) if each["healthy"]["searched"] and each["mutants"]]
    if not whole:
        raise FileNotFoundError("benchmarks/results has no gallery-*.json: run tox -e gallery -- --output")
    newest, later = campaigns[whole[-1]], campaigns[whole[-1] + 1 :]
    mutants = {mutant["name"]: mutant for each in (newest, *later) for mutant in each["mutants"]}
    healthy = next(each["healthy"] for each in reversed((newest, *later)) if each["healthy"]["searched"])
    return {**newest, "mutants": list(mutants.values()), "healthy": healthy, "later": [_again(each) for each in later]}


def _again(later: dict[str, Any]) -> str:
    what = f"{len(later['mutants'])} of the mutants" if later["mutants"] else "what is healthy"
    return f"{what} again or first on {later['provenance']['date'][:10]}"


def run() -> str:
    """Say what was run, and on what."""
    result = campaign()
    mutants, healthy = result["mutants"], result["healthy"]
    sure = sum(_is_sure(mutant) for mutant in mutants)
    tried = sorted({mutant["seeds"] for mutant in mutants if mutant["planted"] != "plan"} or {result["seeds"]})
    seeds = f"{tried[0]} to {tried[-1]}" if len(tried) > 1 else f"{tried[0]}"
    packages = result["provenance"]["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "hypothesis") if name in packages)
    when = [f"{result['provenance']['date'][:10]}, {versions}"]
    when += result["later"]
    lines = [
        f"{len(mutants)} mutants, {seeds} seeds each, profile {result['profile']}: {sure} of {len(mutants)} "
        f"are found with every seed. Of {len(healthy['searched'])} healthy backends, plans and ranks, "
        f"{len({fault['name'] for fault in healthy['faults']})} had findings. "
        f"{'; '.join(when)}."
    ]
    for mutant in mutants:
        if mutant["hits"] < mutant["seeds"]:
            lines += [
                "",
                f"- `{mutant['name']}` is missed with {mutant['seeds'] - mutant['hits']} of {mutant['seeds']} seeds.",
            ]
    if left := sum(mutant.get("left", 0) > 0 for mutant in mutants):
        lines += ["", f"- The campaign ended before {left} of {len(mutants)} mutants were searched with every seed."]
    return "\n".join(lines)


def _is_sure(mutant: dict[str, Any]) -> bool:
    """Say whether a mutant is found with every seed, and no seed is left."""
    return bool(mutant["hits"] == mutant["seeds"] and not mutant.get("left"))


def table() -> str:
    """Return how many mutants of each class are planted where, and what found them."""
    by_class: dict[str, list[dict[str, Any]]] = {}
    for mutant in sorted(campaign()["mutants"], key=lambda mutant: (mutant["class"], mutant["name"])):
        by_class.setdefault(mutant["class"], []).append(mutant)
    names = {kind.name: kind.value for kind in BugClass}
    rows = [
        (
            f"{letter}, {names.get(letter, '')}",
            ", ".join(f"{count} {place}" for place, count in Counter(each["planted"] for each in mutants).items()),
            str(len(mutants)),
        )
        for letter, mutants in by_class.items()
    ]
    return results.table(("class", "planted in", "mutants"), rows, text=2)


def checks() -> str:
    """Return every check of the suite, and every rule that found a mutant, with how many it found."""
    caught = Counter(by for mutant in campaign()["mutants"] for by in mutant["by"])
    # The runner's checks are in the tests, which are no package.
    sys.path.append(str(results.ROOT / "tests"))
    from support.runner_conformance import RunnerCheck

    found = ", ".join(f"`{check.value}` {caught[check.value]}" for check in (*Check, *RunnerCheck))
    rules = ", ".join(f"{_check(code)} {caught[code]}" for code in RULES if caught[code])
    return f"- Checks: {found}.\n- Lint rules: {rules}."


def _check(by: str) -> str:
    return f"[{by}](../reference/lint.md#{by.lower()})" if by in RULES else f"`{by}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {"gallery-run": run, "gallery": table, "gallery-checks": checks}
