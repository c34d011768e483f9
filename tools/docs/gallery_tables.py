"""The tables of docs/lab/gallery.md: the gallery as the newest campaign found it, and what was searched since."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import results

from capture_planner.analysis.lint import RULES
from capture_planner.analysis.lint.core import link
from capture_planner.conformance import Check

SHOWN = 160
"""Most characters of a smallest case."""


def campaign() -> dict[str, Any]:
    """Return the newest campaign over everything, each mutant and what is healthy as it was searched last.

    ``later`` says what was searched after it, and when. Raises ``FileNotFoundError``.
    """
    campaigns = results.files("gallery-*.json")
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
    """Return every mutant with its bug, class, place, what found it and the smallest case."""
    descriptions = _descriptions()
    rows = []
    for mutant in sorted(
        campaign()["mutants"], key=lambda mutant: (mutant["class"], mutant["planted"], mutant["name"])
    ):
        threads = ", ".join(f"[{thread}]({link(thread)})" for thread in mutant["threads"])
        description = _cell(descriptions.get(mutant["name"], mutant["says"]))
        rows.append(
            (
                f"`{mutant['name']}`: {description}{f' ({threads})' if threads else ''}",
                mutant["class"],
                mutant["planted"],
                ", ".join(_check(by) for by in mutant["by"]) or "nothing",
                f"{mutant['hits']} of {mutant['seeds']}",
                _cell(_short(mutant["shown"] or results.NO_VALUE)),
            )
        )
    return results.table(("bug", "class", "planted in", "caught by", "found with", "smallest case"), rows, text=6)


def _descriptions() -> dict[str, str]:
    """Return what each mutant does wrong, by name: as the tree has it, because the results may be older."""
    sys.path.append(str(results.ROOT / "tests"))
    import gallery

    return {mutant.name: mutant.says for mutant in gallery.MUTANTS}


def checks() -> str:
    """Return every check of the suite, and every rule that found a mutant, with how many it found."""
    caught = Counter(by for mutant in campaign()["mutants"] for by in mutant["by"])
    rows = [(f"`{check.value}`", check.law, str(caught[check.value])) for check in Check]
    rows += [
        (_check(code), f"{rule.name}: {_first(rule.explanation)}", str(caught[code]))
        for code, rule in RULES.items()
        if caught[code]
    ]
    return results.table(("check", "law", "mutants"), rows, text=2)


def _check(by: str) -> str:
    return f"[{by}](../reference/lint.md#{by.lower()})" if by in RULES else f"`{by}`"


def _first(explanation: str) -> str:
    """Return the first sentence, without its full stop."""
    return _cell(" ".join(explanation.split("\n\n")[0].split())).rstrip(".")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4].rsplit(' ', 1)[0]} ..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {"gallery-run": run, "gallery": table, "gallery-checks": checks}
