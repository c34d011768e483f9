"""The gallery: public bugs of serving engines, each planted once, and found by the suite or the lint.

    import gallery
    mutant = gallery.named("doubling-sizes")
    print(gallery.detect(mutant))

``PYTHONPATH=tests python -m gallery`` does the same from the command line. A mutant has exactly the bug of its
threads and is healthy otherwise; no check exists for one mutant alone.
"""

from __future__ import annotations

import difflib

from capture_planner.errors import RunError
from gallery import adapters, backends, plans, ranks, runners, sampling
from gallery.core import Detection, Mutant, detect
from gallery.plans import HEALTHY

__all__ = ["HEALTHY", "MUTANTS", "Detection", "Mutant", "detect", "named"]


MUTANTS: tuple[Mutant, ...] = tuple(
    sorted(
        (*adapters.MUTANTS, *backends.MUTANTS, *runners.MUTANTS, *plans.MUTANTS, *ranks.MUTANTS, *sampling.MUTANTS),
        key=lambda mutant: (mutant.bug_class.name, mutant.kind, mutant.name),
    )
)
"""All mutants, sorted by class, place and name."""


def named(name: str) -> Mutant:
    """Return the mutant of a name; raises ``RunError`` where there is none."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    near = difflib.get_close_matches(name, [mutant.name for mutant in MUTANTS], n=1)
    hint = f"did you mean {near[0]}?" if near else "`python -m gallery` lists them"
    raise RunError(f"no mutant is named {name!r}; {hint}")
