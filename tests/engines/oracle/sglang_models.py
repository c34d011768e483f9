"""SGLang's model classes as their sources have them: which there are, and how they hold their layers.

A class is not made, which would need weights and a GPU. Its skeleton is: the attributes that its constructor
and those of its parents assign, as far as SGLang's search for attention layers follows them.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

_HOLDERS = ("model", "language_model", "transformer", "decoder", "layers")
_ATTENTION = ("self_attn", "attn", "attn_mqa", "attn_mha", "linear_attn", "attention", "mixer")


class Models:
    """The modules below ``sglang.srt.models``, read once."""

    def __init__(self, wheel: Path | str) -> None:
        self.folder = Path(wheel) / "sglang" / "srt"
        self._names: dict[Path, dict[str, tuple[Path, ast.ClassDef] | None]] = {}
        self._trees: dict[Path, ast.Module] = {}

    @cached_property
    def entries(self) -> dict[str, Path]:
        """Each architecture that SGLang has a class for, with the file."""
        found = {}
        for file in sorted((self.folder / "models").glob("*.py")):
            for node in self._tree(file).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                    found |= {name.id: file for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        return found

    def naming(self, architecture: str, places: tuple[str, ...]) -> list[str]:
        """Return the files, of those in some folders, that have the name as a text of its own."""
        return [str(file) for file, texts in self._texts(places).items() if architecture in texts]

    @cache  # noqa: B019  (there is one of this class in a process)
    def _texts(self, places: tuple[str, ...]) -> dict[Path, set[str]]:
        found = {}
        for place in places:
            path = self.folder / place
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                parts = ast.walk(self._tree(file))
                texts = {part.value for part in parts if isinstance(part, ast.Constant)}
                found[file.relative_to(self.folder)] = {text for text in texts if isinstance(text, str)}
        return found

    def skeleton(self, architecture: str) -> Any:
        """Return an object with the attributes by which SGLang finds attention layers."""
        # SGLang sets an attribute of the outermost object, and no other's.
        return copy.copy(self._whole(architecture))

    @cache  # noqa: B019
    def _whole(self, architecture: str) -> Any:
        return self._skeleton(*self._find(self.entries[architecture], architecture))

    def _skeleton(self, file: Path, node: ast.ClassDef, depth: int = 0) -> Any:
        made = type(node.name, (types.SimpleNamespace,), {})()
        if depth > 6:
            return made
        for owner, method in self._methods(file, node):
            for name, value in _assigned(method):
                empty = isinstance(value, ast.Constant)
                if name not in (*_HOLDERS, *_ATTENTION) or hasattr(made, name) or empty:
                    continue
                kinds = self._made_by(owner, method, value, file, node)
                parts = [self._skeleton(*kind, depth=depth + 1) for kind in kinds]
                if name == "layers":
                    made.layers = parts
                else:
                    setattr(made, name, parts[0] if parts else object())
        return made

    def _made_by(
        self, owner: Path, method: ast.FunctionDef, value: ast.expr, file: Path, node: ast.ClassDef
    ) -> list[tuple[Path, ast.ClassDef]]:
        """Return the model classes that an expression makes; through a parameter, those given for it."""
        found = self._named(owner, value)
        if found:
            return found
        methods = list(self._methods(file, node))
        called = {part.attr for part in ast.walk(value) if isinstance(part, ast.Attribute)}
        for place, other in methods:
            if other.name in called and (found := self._named(place, other)):
                return found
        arguments = method.args
        given = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
        given &= {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
        for place, other in methods:
            passed = [part for part in ast.walk(other) if isinstance(part, ast.keyword) and part.arg in given]
            for part in passed:
                if found := self._named(place, part.value):
                    return found
        return [kind for default in arguments.defaults for kind in self._named(owner, default)]

    def _named(self, file: Path, part: ast.AST) -> list[tuple[Path, ast.ClassDef]]:
        """Return the model classes that a piece of source names."""
        # A class that something is compared with is not made there.
        tests = [
            each for each in ast.walk(part) if isinstance(each, ast.Call) and ast.unparse(each.func) == "isinstance"
        ]
        compared = {id(name) for each in tests for name in ast.walk(each)}
        names = [name.id for name in ast.walk(part) if isinstance(name, ast.Name) and id(name) not in compared]
        found = [kind for name in names if (kind := self._find(file, name))]
        return list({kind[1].name: kind for kind in found}.values())

    def _methods(self, file: Path, node: ast.ClassDef) -> Iterator[tuple[Path, ast.FunctionDef]]:
        """Yield constructors of a class and its parents, and what they call of their own, nearest first."""
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and "init" in part.name:
                yield file, part
        for base in node.bases:
            found = self._find(file, ast.unparse(base)) if isinstance(base, ast.Name) else None
            if found:
                yield from self._methods(*found)

    def _find(self, file: Path, name: str) -> Any:
        """Return the class of a name in a module, with the file of its source; None where it is no model's."""
        names = self._names.setdefault(file, {})
        if name in names:
            return names[name]
        names[name] = None
        for node in self._tree(file).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                names[name] = (file, node)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt.models"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        place = self.folder.parent.parent.joinpath(*node.module.split(".")).with_suffix(".py")
                        names[name] = self._find(place, alias.name) if place.exists() else None
            elif isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == [name]:
                names[name] = self._find(file, ast.unparse(node.value))
        return names[name]

    def _tree(self, file: Path) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[file]


def _assigned(method: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes that a method gives its object, with the expressions."""
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    yield part.attr, node.value
