"""The mutants of a module: one operator, number or word changed at one place each."""

from __future__ import annotations

import ast
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
from _bench import ROOT
from _equivalent import equivalent
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names

PACKAGE = "capture_planner"
NO_GAP = "no gap: "
"""Before the reason in the result."""

IDENTITY = ("ReplaceComparisonOperator_Is_Eq", "ReplaceComparisonOperator_IsNot_NotEq")


@attrs.frozen(kw_only=True)
class Mutant:
    """One change of one module."""

    module: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str
    source: str = attrs.field(repr=False)
    """The whole module, changed."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.module, self.operator, self.occurrence

    @property
    def row(self) -> dict[str, Any]:
        """The mutant as a result lists it."""
        return attrs.asdict(self, filter=attrs.filters.exclude("module", "source"))


class _AnnotationRemover(ast.NodeTransformer):
    """Takes annotations away, and whether parameters are given by name."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.arguments):
            named = [default for default in node.kw_defaults if default is not None]
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults = [*node.defaults, *named]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, None)
        return node


@lru_cache(2)
def _tree(source: str) -> str | None:
    """Return the syntax tree without annotations, or None where the source has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    return ast.dump(_AnnotationRemover().visit(tree))


def places(module: str) -> list[tuple[int, str, int]]:
    """Return the line, the operator and the occurrence of each change, in the order of the file."""
    nodes = list(ast_nodes(get_ast(source_of(module).read_text(encoding="utf-8"))))
    return sorted(
        (position[0][0], name.removeprefix("core/"), occurrence)
        for name in operator_names()
        if not (kind := get_operator(name)).arguments()
        for occurrence, position in enumerate(each for node in nodes for each in kind().mutation_positions(node))
    )


def mutant(module: str, operator: str, occurrence: int) -> Mutant | str:
    """Return a mutant of a module, or the reason why it is not counted."""
    if operator in IDENTITY:
        return "equality for identity"
    code = source_of(module).read_text(encoding="utf-8")
    changed = MutationVisitor.mutate_code(code, get_operator(f"core/{operator}")(), occurrence)
    if (other := _tree(changed)) in (None, _tree(code)):
        return "no Python" if other is None else "annotation or marker of parameters"
    lines, new = code.splitlines(), changed.splitlines()
    first = _alike(lines, new)
    last = min(_alike(lines[::-1], new[::-1]), min(len(lines), len(new)) - first)
    before = " ".join(line.strip() for line in lines[first : len(lines) - last])
    after = " ".join(line.strip() for line in new[first : len(new) - last] if line.strip())
    if reason := equivalent(module, before, after):
        return f"{NO_GAP}{reason}"
    return Mutant(
        module=module,
        operator=operator,
        occurrence=occurrence,
        line=first + 1,
        before=before,
        after=after,
        source=changed,
    )


def _alike(one: list[str], other: list[str]) -> int:
    """Return how many lines are alike before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def source_of(module: str, root: Path = ROOT) -> Path:
    """Return the file of a module."""
    return root / PACKAGE / f"{module}.py"


def digest(module: str) -> str:
    """Return what a module reads as; an older result holds for the same text only."""
    return hashlib.sha256(source_of(module).read_bytes()).hexdigest()
