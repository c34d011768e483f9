"""How the plugin gets into vLLM: callbacks after an import, methods wrapped once, and checks of what is there.

A callback runs in the process that imports the module, after the module has been executed and before its importer
goes on.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_MARK = "_capture_planner_wraps"
_callbacks: dict[str, list[Callback]] = {}


def after_import(name: str, callback: Callback) -> None:
    """Run ``callback`` with the module of that name: now if it is imported, else right after it was executed.

    Callbacks of one module run in the order of registration; registering one again does nothing.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    callbacks = _callbacks.setdefault(name, [])
    if callback not in callbacks:
        callbacks.append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # In front, or another finder would answer for the module first.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds nothing itself; wraps the loaders of the modules that have callbacks."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Other finders delegate too, such as those of coverage tools; asked by one of them, this one has no answer.
        if name not in _callbacks or name in self._wanted:
            return None
        self._wanted.add(name)
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._wanted.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Runs the module's own loader, then the callbacks."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Anything that asks the module for its loader gets the original one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for callback in _callbacks.get(module.__name__, ()):
            callback(module)


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``around`` of it, unless that was done before.

    ``functools.wraps`` in ``around`` hands the marks of earlier wrappers on, so that several can lie over each other.
    """
    original = getattr(owner, name)
    key = f"{around.__module__}.{around.__qualname__}"
    marks = getattr(original, _MARK, ())
    # An engine may import a module again, or register its plugins twice.
    if key not in marks:
        wrapped = around(original)
        setattr(wrapped, _MARK, (*marks, key))
        setattr(owner, name, wrapped)


def parameter_problems(owner: Any, name: str, required: Collection[str], known: Collection[str]) -> Iterator[str]:
    """Yield where a function's parameters are not as expected: without a required one, or with an unknown one."""
    function = getattr(owner, name, None)
    if function is None:
        yield f"{owner.__name__} has no {name}"
        return
    names = set(inspect.signature(function).parameters)
    yield from name_problems(f"{owner.__name__}.{name}", names, required, known)


def method_problems(
    module: ModuleType, owner: str, name: str, required: Collection[str], known: Collection[str]
) -> Iterator[str]:
    """Yield where a method of a module's class is not as expected; also where there is no such class."""
    found = getattr(module, owner, None)
    if found is None:
        yield f"{module.__name__} has no {owner}"
        return
    yield from parameter_problems(found, name, required, known)


def name_problems(
    subject: str, names: Collection[str], required: Collection[str], known: Collection[str]
) -> Iterator[str]:
    """Yield which names a subject lacks, and which it has that are not known."""
    if missing := sorted(set(required) - set(names)):
        yield f"{subject} lacks {', '.join(missing)}"
    if unknown := sorted(set(names) - set(known)):
        yield f"{subject} has {', '.join(unknown)}, which this plugin does not know"


def log_with(name: str) -> None:
    """Log where the engine's logger of that name does, at its level, now and after it is set up anew.

    An engine keeps its logger apart from the root, where a script's own logging may hide our lines. Handlers and a
    level that someone gives to our logger stay.
    """
    ours = logging.getLogger("capture_planner")
    ours.parent = logging.getLogger(name)
    ours.setLevel(ours.level)  # forgets which levels it took for enabled
