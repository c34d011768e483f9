"""The emulation of all engines stays small: rules are tables and few lines, or they cannot be kept up."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

ENGINES = Path(__file__).parents[2] / "engines"
MOST_LINES = 9500

INSIDE_AN_ENGINE = (
    *("hooks", "seam", "observ*", "watch", "apply", "chains", "workers"),
    *("attention_*", "connector", "*_plugin"),
)
"""Modules that run in an engine's own process, or run its kernels: they grow with what is observed and applied there,
and no rule of what an engine does with its flags is in them."""

MODULES = sorted(ENGINES.glob("*/src/*/*.py"))


def is_emulation(path: Path) -> bool:
    return not any(fnmatch(path.stem, pattern) for pattern in INSIDE_AN_ENGINE)


def test_the_emulation_of_all_engines_is_short() -> None:
    """Lines of all kinds count, as a reader meets them."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES if is_emulation(path)}
    assert sum(lines.values()) <= MOST_LINES


@pytest.mark.parametrize("pattern", INSIDE_AN_ENGINE)
def test_what_is_not_counted_exists(pattern: str) -> None:
    """A pattern without a module would hide the next one of that name."""
    assert any(fnmatch(path.stem, pattern) for path in MODULES)
