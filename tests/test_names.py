"""The house's naming rules: one name for one class, plain words, files of a size to read."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("capture_planner", "runner", "conformance", "tuner", "engines", "backends")
    for path in (ROOT / folder).rglob("*.py")
)
SCRIPTS = sorted(path for folder in ("tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))
"""Tests, benchmarks and tools; only their length is checked."""
WITH_TEXT = [*SOURCES, *(path for path in SCRIPTS if path.relative_to(ROOT).parts[0] != "tests")]
"""What users, or readers of results, meet."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
KEYS = {"mend"}
"""Keys of files and of JSON that stay for their readers."""

WORDS = {
    r"\bmends?\b|\bmended\b": "fix",
    r"\bheeded\b": "applied",
    r"\bwhoever\b": "name the person or the part",
    r"\bnobody\b": "name what does not: no rank, no caller, nothing",
    r"\b(?:some|any|every)body\b": "name the person or the part",
    r"\bbeside\b": "next to, and, besides",
    r"\blikewise\b": "also, too",
    r"\bstands? in for\b": "replaces",
    r"\b(?:what|none) there is\b|\bthere is none\b": "say which thing exists or is missing",
    r"\bleft out:": "Default:",
    r"\bas many as\b": "the same number of",
}
"""Words of a dialect that readers stumble over, each with what to write instead."""


def texts(path: Path) -> list[tuple[int, str]]:
    """Return line and text of every string in a module: docstrings, messages and help texts."""
    return [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in KEYS
    ]


@functools.cache
def classes(path: Path) -> frozenset[str]:
    """Return the names of all classes of a module."""
    text = path.read_text(encoding="utf-8")
    if not re.search(r"^\s*class\s", text, re.M):
        return frozenset()
    return frozenset(node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))


def found_in(text: str) -> list[str]:
    """Return the forbidden words of a text, each with its replacement."""
    return [f"{match[0]!r}: {instead}" for word, instead in WORDS.items() for match in re.finditer(word, text, re.I)]


def test_class_names_are_unique() -> None:
    """A class name means one thing in the whole repository: the core, the engines and the backends."""
    modules = defaultdict(set)
    for path in SOURCES:
        for name in classes(path):
            modules[name].add(str(path.relative_to(ROOT)))
    assert {name: sorted(where) for name, where in modules.items() if len(where) > 1} == {}


def test_class_names_are_nouns() -> None:
    """No participle: what a class is, not what was done to it."""
    names = {name for path in SOURCES + SCRIPTS for name in classes(path)}
    assert {name for name in names if re.fullmatch(r"_?[A-Z][a-z]+(?:ed|wn|eld)", name)} == set()


def test_strings_use_plain_words() -> None:
    """Docstrings, messages and help texts."""
    assert [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in WITH_TEXT
        for line, text in texts(path)
        for word in found_in(text)
    ] == []


def test_pages_use_plain_words() -> None:
    """README and docs."""
    assert [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in PAGES
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in found_in(text)
    ] == []


def test_forbidden_words_are_found() -> None:
    """The check can fail, and does not take parts of other words."""
    assert found_in("The hint that mends it is heeded.") == ["'mends': fix", "'heeded': applied"]
    assert found_in("Recommended amendments, besides.") == []
