"""A stand-in for ``cutlass`` (NVIDIA's CUTLASS DSL), for engines that import kernels which the GPU cannot run anyway.

``write_cutlass(FOLDER)`` copies this file to ``FOLDER/cutlass/__init__.py``. With FOLDER on PYTHONPATH every module
below ``cutlass`` can be imported and has every attribute. An attribute serves as an annotation, a base class, or a
decorator that returns its function. Any other call of one, as in a kernel that is compiled or launched, raises
``CutlassAbsentError``. It is an ``ImportError``: code that does without CUTLASS does without the stand-in too.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


class CutlassAbsentError(ImportError):
    """The stand-in was called where CUTLASS itself is needed."""


class InertName:
    """An attribute of a module of ``cutlass``, and all of its attributes."""

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
        message = (
            f"{self._path} was called, but cutlass is a stand-in here: install nvidia-cutlass-dsl to run its kernels"
        )
        raise CutlassAbsentError(message, name="cutlass")


def inert(path: str, name: str) -> InertName:
    """Return the attribute; what Python itself looks up, such as ``__wrapped__`` or ``__version__``, is absent."""
    if name.startswith("__"):
        raise AttributeError(f"{path}.{name}: cutlass is a stand-in here", name=name)
    return InertName(f"{path}.{name}")


class InertModule(ModuleType):
    """A module below ``cutlass``."""

    def __getattr__(self, name: str) -> InertName:
        return inert(self.__name__, name)


class InertModules(MetaPathFinder, Loader):
    """Finds every module below ``cutlass``, all of them packages without files."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module below ``cutlass``, nothing for others."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("cutlass.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the empty module."""
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def write_cutlass(folder: Path) -> Path:
    """Write the stand-in into a folder, and return the folder."""
    (folder / "cutlass").mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, folder / "cutlass" / "__init__.py")
    return folder


if __name__ == "cutlass":
    sys.meta_path.append(InertModules())

    def __getattr__(name: str) -> InertName:
        return inert("cutlass", name)
