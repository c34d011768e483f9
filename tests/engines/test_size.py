"""The emulation of all engines stays small: rules are tables and few lines, or they cannot be kept up."""

from pathlib import Path

ENGINES = Path(__file__).parents[2] / "engines"
MOST_LINES = 9200

FOLDERS = (
    *sorted(ENGINES.glob("*/src/*/emulation")),
    ENGINES / "tensorrt_llm" / "src" / "capture_planner_tensorrt_llm",
)
"""Packages that say what an engine does with its flags. What runs inside an engine grows with what it observes."""


def test_the_emulation_of_all_engines_is_short() -> None:
    """Lines of all kinds count, as a reader meets them."""
    lines = {
        folder: sum(len(path.read_text("utf-8").splitlines()) for path in folder.glob("*.py")) for folder in FOLDERS
    }
    assert len(lines) == 3
    assert all(lines.values())
    assert sum(lines.values()) <= MOST_LINES
