"""Import an engine's own modules from an unpacked wheel, without installing the engine.

``installed(folder, "vllm")`` puts the folder on the import path and adds a finder that answers what the
engine's modules import and this machine does not have: compiled extensions, and packages that are not
installed. Each answer is a stub module, whose attributes can stand where a class, a decorator, a
generic, a context manager or a number is wanted. Only imports that the engine itself writes are answered:
``importlib.util.find_spec("flash_attn")`` still says that it is absent, to everyone.

What runs is the engine's own code. A stub that decides an answer would be a defect of the caller's
set-up, so ``stubs`` keeps a list of every stub module that was handed out.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

stubs: list[str] = []
"""The names of the stub modules that were imported, in order."""


class _Permissive(type):
    """The metaclass of everything that a stub module has: whatever is asked of the class, it does."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = stub_class(f"{cls.__qualname__}.{name}", cls.__module__)
        setattr(cls, name, found)
        return found

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_is_stub" in cls.__dict__:
            if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | MethodType | type):
                return args[0]
            if len(args) == 3 and isinstance(args[0], str) and isinstance(args[1], tuple):
                return type(*args)
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        return True

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance)


class Stub(metaclass=_Permissive):
    """What a stub's class makes: an object that accepts everything and does nothing."""

    _is_stub = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | MethodType | type):
            return args[0]
        return Stub()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *caught: object) -> None:
        return None

    def __getitem__(self, item: Any) -> Any:
        return Stub()

    def __setitem__(self, item: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __int__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


_ARITHMETIC = "add sub mul truediv floordiv mod pow and xor lshift rshift".split()


def _arithmetic(self: Any, *others: Any) -> Any:
    return Stub()


def _never(self: Any, other: Any) -> bool:
    return False


for _name in _ARITHMETIC:
    setattr(Stub, f"__{_name}__", _arithmetic)
    setattr(Stub, f"__r{_name}__", _arithmetic)
for _name in ("neg", "pos", "invert"):
    setattr(Stub, f"__{_name}__", _arithmetic)
for _name in ("lt", "le", "gt", "ge"):
    setattr(Stub, f"__{_name}__", _never)


def stub_class(name: str, module: str) -> type:
    """Return a class that can stand for anything; an exception where its name says so."""
    last = name.rpartition(".")[2]
    namespace = {"__module__": module, "__qualname__": name, "_is_stub": True}
    if last.endswith(("Error", "Exception", "Warning")):
        return type(last, (Exception,), {"__module__": module})
    return _Permissive(last, (Stub,), namespace)


class StubModule(ModuleType):
    """A module that has every attribute, and every submodule."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = stub_class(name, self.__name__)
        setattr(self, name, found)
        return found


def provide(name: str, **values: Any) -> StubModule:
    """Put a stub in the place of a module that could be imported, with ``values`` where they matter."""
    module = StubModule(name)
    module.__path__ = []
    module.__dict__.update(values)
    sys.modules[name] = module
    stubs.append(name)
    return module


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = StubModule(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        stubs.append(module.__name__)


class Finder(importlib.abc.MetaPathFinder):
    """Answers with a stub where an engine's own module imports what is not there.

    ``absent`` are top-level names that stay absent even for the engine: it then takes the path that it
    has for machines without them.
    """

    def __init__(self, package: str, absent: Iterable[str] = ()) -> None:
        self.package = package
        self.absent = frozenset(absent)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in self.absent or not self._asked_by_engine(top):
            return None
        if top != self.package:
            parent = fullname.rpartition(".")[0]
            # A package that is really there keeps its own answer about what it lacks.
            if parent and not isinstance(sys.modules.get(parent), StubModule):
                return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)

    def _asked_by_engine(self, top: str) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            code = frame.f_code.co_filename
            if name == "importlib.util":
                return False
            if not (code.startswith("<frozen importlib") or name in ("importlib", "importlib._bootstrap")):
                return str(name).partition(".")[0] == self.package
            frame = frame.f_back
        return False


@contextmanager
def installed(folder: Path | str, package: str, absent: Iterable[str] = ()) -> Iterator[None]:
    """Make ``package`` importable from ``folder`` while the context lasts; its modules stay loaded."""
    finder = Finder(package, absent)
    sys.path.insert(0, str(folder))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(folder))
