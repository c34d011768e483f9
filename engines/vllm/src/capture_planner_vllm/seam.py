"""How the plugin gets into an engine: callbacks after an import, methods wrapped once, and checks of what is there.

Nothing here knows vLLM. A callback runs in the process that imports the module, after the module has been executed
and before its importer goes on.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STRICT = "CAPTURE_PLANNER_STRICT"
"""Set to 1: what is only logged becomes an error."""

LOG = logging.getLogger("capture_planner.vllm")

Callback = Callable[[ModuleType], None]

_MARK = "_capture_planner_wraps"
_callbacks: dict[str, list[Callback]] = {}
_logged: set[str] = set()


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


def name_problems(
    subject: str, names: Collection[str], required: Collection[str], known: Collection[str]
) -> Iterator[str]:
    """Yield which names a subject lacks, and which it has that are not known."""
    if missing := sorted(set(required) - set(names)):
        yield f"{subject} lacks {', '.join(missing)}"
    if unknown := sorted(set(names) - set(known)):
        yield f"{subject} has {', '.join(unknown)}, which this plugin does not know"


def report(level: int, lines: Sequence[str], cause: Exception | None = None) -> None:
    """Log lines that this process has not logged yet; in strict mode, raise ``RunError`` for warnings and errors."""
    for line in lines:
        if line not in _logged:
            _logged.add(line)
            LOG.log(level, "%s", line)
    if lines and level > logging.INFO and os.environ.get(STRICT) == "1":
        from capture_planner.errors import RunError

        raise RunError("\n".join(lines)) from cause


def share_handlers(name: str) -> None:
    """Log as the engine does, where nothing else would show our lines: through the handlers of its logger."""
    ours = logging.getLogger("capture_planner")
    if not ours.hasHandlers():
        ours.setLevel(logging.INFO)
        for handler in logging.getLogger(name).handlers:
            ours.addHandler(handler)


class ModeReasons(logging.Handler):
    """Remembers what an engine logs about its graph modes, which is the only place where it gives its reasons."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if re.search("cuda_?graph", text, re.IGNORECASE) and text not in self._lines:
            self._lines.append(text)

    def of(self, mode: str) -> str:
        """Return the last line that ends in that mode, or nothing."""
        chosen = re.compile(rf"(?:=|\bto )(?:CUDAGraphMode\.)?{mode}\b")
        return next((line for line in reversed(self._lines) if chosen.search(line)), "")

    def listen(self, *names: str) -> None:
        """Attach to the loggers of those names, once."""
        for name in names:
            logger = logging.getLogger(name)
            if self not in logger.handlers:
                logger.addHandler(self)
