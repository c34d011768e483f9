"""Load a Python file by its path: oracles, recorders and tests that lie outside of any package."""

import importlib.util
from pathlib import Path
from typing import Any


def module_at(path: Path, name: str | None = None) -> Any:
    """Run the file as a module of that name, by default the file's, and return it; it stays unregistered."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
