"""The gallery: public bugs of serving engines, each planted once, and each found by the suite or the lint.

    from capture_planner.testing import gallery
    mutant = gallery.named("doubling-sizes")
    print(gallery.catch(mutant))

``capture-planner gallery`` is the same from the command line. A mutant has exactly the bug of its threads
and is healthy otherwise; no check exists for one mutant alone.
"""

from __future__ import annotations

import difflib
from importlib import import_module

from capture_planner.errors import RunError
from capture_planner.testing.gallery.core import Caught, Mutant, catch
from capture_planner.testing.gallery.plans import HEALTHY

__all__ = ["HEALTHY", "MUTANTS", "Caught", "Mutant", "catch", "named"]


def _collected() -> tuple[Mutant, ...]:
    found: list[Mutant] = []
    for part in ("backends", "runners", "plans", "ranks"):
        name = f"{__name__}.{part}"
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            # TODO at the merge of all four: import them by name, above.
            if error.name != name:
                raise
            continue
        found += module.MUTANTS
    return tuple(sorted(found, key=lambda mutant: (mutant.bug_class.name, mutant.kind, mutant.name)))


MUTANTS: tuple[Mutant, ...] = _collected()
"""All of them: by class, by where they are planted, by name."""


def named(name: str) -> Mutant:
    """Return the mutant of a name; raises ``RunError`` where there is none."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    near = difflib.get_close_matches(name, [mutant.name for mutant in MUTANTS], n=1)
    hint = f"did you mean {near[0]}?" if near else "`capture-planner gallery` lists them"
    raise RunError(f"no mutant is named {name!r}; {hint}")
