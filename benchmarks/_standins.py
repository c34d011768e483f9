"""Stand-ins for kernel libraries that an engine imports for kernels which it then does not run.

``write_standins(FOLDER)`` copies this file to ``FOLDER/NAME/__init__.py`` for each of ``LIBRARIES``. With FOLDER on
PYTHONPATH every module below one can be imported and has every attribute. An attribute serves as an annotation, a base
class, or a decorator that returns its function. Any other call of one, as in a kernel that is compiled or launched,
raises ``LibraryAbsentError``. It is an ``ImportError``: code that does without the library does so with the
stand-in too.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

LIBRARIES = {"cutlass": "nvidia-cutlass-dsl", "flash_mla": "flash-mla"}
"""What is replaced, and the distribution that has it: CUTLASS's DSL, whose kernels in SGLang are for SM100, and
FlashMLA, for latent attention, which SGLang's EAGLE worker imports to know its class."""


class LibraryAbsentError(ImportError):
    """A stand-in was called where the library itself is needed."""


class InertName:
    """An attribute of a module of a library, and all of its attributes."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> InertName:
        return inert(self._path, name)

    def __getitem__(self, key: Any) -> InertName:
        return self

    def __or__(self, other: Any) -> InertName:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __call__(self, *values: Any, **named: Any) -> Any:
        if len(values) == 1 and not named and isinstance(values[0], (FunctionType, type)):
            return values[0]
        name = self._path.partition(".")[0]
        message = (
            f"{self._path} was called, but {name} is a stand-in here: install {LIBRARIES[name]} to run its kernels"
        )
        raise LibraryAbsentError(message, name=name)


def inert(path: str, name: str) -> InertName:
    """Return the attribute; what Python itself looks up, such as ``__wrapped__`` or ``__version__``, is absent."""
    if name.startswith("__"):
        raise AttributeError(f"{path}.{name}: {path.partition('.')[0]} is a stand-in here", name=name)
    return InertName(f"{path}.{name}")


class InertModule(ModuleType):
    """A module of a library."""

    def __getattr__(self, name: str) -> InertName:
        return inert(self.__name__, name)


class InertModules(MetaPathFinder, Loader):
    """Finds every module below a library, all of them packages without files."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module below a library, nothing for others."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the empty module."""
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def write_standins(folder: Path, names: Iterable[str] = LIBRARIES) -> Path:
    """Write the stand-ins into a folder, and return the folder."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(__file__, folder / name / "__init__.py")
    return folder


if __name__ in LIBRARIES:
    sys.meta_path.append(InertModules())

    def __getattr__(name: str) -> InertName:
        return inert(__name__, name)
