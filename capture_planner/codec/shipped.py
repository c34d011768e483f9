"""The environments that ship with the package, and how one is chosen on the command line."""

from __future__ import annotations

import difflib
from pathlib import Path

from capture_planner import codec
from capture_planner.errors import CapturePlannerError
from capture_planner.records.environment import Environment

DEFAULT_ENVIRONMENT = "h100"

_PACKAGED = Path(__file__).parent.parent / "environments"
_CHECKOUT = Path(__file__).parent.parent.parent / "plans" / "environments"


def shipped_environments() -> dict[str, Path]:
    """Return the files of the shipped environments by name."""
    folder = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_environment(name: str) -> Environment:
    """Return a shipped environment by its name, or any environment by its file.

    Raises ``CapturePlannerError`` where it is neither or empty, ``InvalidDocument`` where the file is wrong.
    """
    shipped = shipped_environments()
    choices = f"shipped are {', '.join(shipped)}, and a path to a file works too"
    if not name.strip():
        raise CapturePlannerError(f"the environment {name!r} names no machine; {choices}")
    if name in shipped:
        return codec.load_environment(shipped[name])
    if Path(name).suffix or Path(name).exists():
        return codec.load_environment(name)
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    raise CapturePlannerError(f"no environment is named {name!r}{hint} {choices}")


def environment_of_output(output: str | None) -> str | None:
    """Return the environment that a file name states: ``qwen3-8b.h100.yaml`` is for h100."""
    if output is None:
        return None
    stated = Path(Path(output).stem).suffix.removeprefix(".")
    return stated if stated in shipped_environments() else None
